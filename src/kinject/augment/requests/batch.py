"""The provider's batch API: requests collected into a file, handed in, waited for, and taken up again after a restart."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kinject.augment.requests.cache import AnswerCache, request_key
from kinject.augment.requests.endpoint import Endpoint
from kinject.augment.requests.generator import Stopped, Transient
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message

if TYPE_CHECKING:
    import openai


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openai


import sqlite3
import zlib
from dataclasses import dataclass

from kinject.disk import settle_database
from kinject.errors import DiskError

MOST_REQUESTS = 10_000
"""Requests in one batch; providers take 50,000."""
SECONDS_TO_FILL = 0.5
"""How long nothing new must have come before a batch is handed in."""
FIRST_POLL, LONGEST_POLL = 2.0, 60.0
"""Seconds before a batch is looked at again: doubled each time up to the most."""
MAX_SILENCE = 600.0
"""Seconds that the endpoint may answer nothing about files and batches before the run stops. Batches go on meanwhile."""
_ENDED = ("completed", "failed", "expired", "cancelled")

Found = TypeVar("Found")


class BatchEndpoint:
    """Answers requests through batches of one endpoint, open inside ``async with``."""

    def __init__(self, section: GeneratorSection, identity: dict[str, Any], run_dir: Path) -> None:
        """Look the key up. Raises `EndpointError` (fatal) naming the variable where it is missing."""
        self._endpoint = Endpoint(section)
        self._identity = identity
        self._run_dir = run_dir
        self._requests: dict[str, dict[str, Any]] = {}
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._handed: set[str] = set()
        self._some = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BatchEndpoint:
        """Open the endpoint and the log, and take up what earlier runs handed in."""
        await self._endpoint.__aenter__()
        self._log = BatchLog(self._run_dir / "batches.sqlite")
        self._cache = AnswerCache(self._run_dir / "cache.sqlite")
        for handed in self._log.waiting(self._endpoint.url):
            self._handed.update(handed.keys)
            self._start(self._take_up(handed), handed.keys)
        self._start(self._collect(), ())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._log.close()
        self._cache.__exit__(kind, error, trace)
        await self._endpoint.__aexit__(kind, error, trace)

    async def ask(self, messages: list[Message], seed: int) -> Completion:
        """Return the answer when its batch has ended, which may take hours.

        Raises as `Endpoint.ask`, and `Stopped` after `abandon`.
        """
        key = request_key(self._identity, messages, seed).hex()
        future = self._futures.setdefault(key, asyncio.get_running_loop().create_future())
        if key not in self._handed:
            self._requests[key] = self._endpoint.body(messages, seed)
            self._some.set()
        try:
            return await future
        finally:
            self._futures.pop(key, None)

    def abandon(self) -> None:
        """Wait for no batch any longer: the endpoint works on, and the next run takes the results up."""
        self._requests.clear()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(Stopped())

    def _start(self, work: Any, keys: tuple[str, ...]) -> None:
        """Run `work` beside the rest; what it raises is raised by the requests with `keys` (by all, without any)."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            self._handed.difference_update(keys)
            if isinstance(error, Exception):
                # What is no fault of the batch (a full disk) concerns all, and must be heard though nobody waits for it.
                for key in keys if keys and isinstance(error, EndpointError) else tuple(self._futures):
                    self._settle(key, error)

        task.add_done_callback(ended)

    def _settle(self, key: str, answer: Completion | Exception) -> None:
        future = self._futures.get(key)
        if future is None or future.done():
            return
        if isinstance(answer, Completion):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    async def _collect(self) -> None:
        """Hand in a batch whenever enough has come, or nothing more comes."""
        while True:
            await self._some.wait()
            n_before = 0
            while n_before < min(len(self._requests), MOST_REQUESTS):
                n_before = len(self._requests)
                await asyncio.sleep(SECONDS_TO_FILL)
            chosen = dict(list(self._requests.items())[:MOST_REQUESTS])
            for key in chosen:
                del self._requests[key]
            if not self._requests:
                self._some.clear()
            if chosen:
                self._handed.update(chosen)
                self._start(self._hand_in(chosen), tuple(chosen))

    async def _hand_in(self, requests: dict[str, dict[str, Any]]) -> None:
        lines = (
            json.dumps({"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body})
            for key, body in requests.items()
        )
        content = "".join(f"{line}\n" for line in lines).encode()
        submission = uuid.uuid4().hex
        try:
            file = await self._call(lambda client: upload(client, content))
            # Noted before it is made: should this process die in between, the next one finds it by its metadata.
            self._log.begin(submission, self._endpoint.url, list(requests))
            name = await self._make(submission, file)
        except EndpointError as error:
            if error.fatal:
                raise
            self._log.end(submission)  # refused for what it is: there will be none
            raise EndpointError(f"{error} augment.generator.batch=false asks without batches.", fatal=True) from error
        self._log.name(submission, name)
        await self._take_up(SubmittedBatch(submission, name, tuple(requests)))

    async def _make(self, submission: str, file: str) -> str:
        """Return the name of a batch over `file`, made once though the endpoint's answer may be lost on the way."""
        tried = False

        async def make(client: openai.AsyncOpenAI) -> str:
            nonlocal tried
            found = await find_batch(client, submission) if tried else None
            if found is not None:
                return found
            tried = True
            return await make_batch(client, submission, file)

        return await self._call(make)

    async def _call(self, call: Callable[[openai.AsyncOpenAI], Awaitable[Found]]) -> Found:
        """Return what `call` returns; it is called again as long as what it meets may pass, for some time.

        Handing requests in anew because a look at their batch failed would pay for them twice.
        """
        pause, since = FIRST_POLL, time.monotonic()
        while True:
            try:
                async with self._endpoint.calling() as client:
                    return await call(client)
            except Transient as fault:
                if time.monotonic() - since > MAX_SILENCE:
                    told = f"{fault} Nothing else came for {MAX_SILENCE:.0f} s; batches that were handed in go on."
                    raise EndpointError(told, fatal=True) from fault
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL)

    async def _take_up(self, handed: SubmittedBatch) -> None:
        """Wait for a batch, put its answers into the cache, and give them to those that wait."""
        name = handed.batch or await self._call(lambda client: find_batch(client, handed.submission))
        if name is None:  # it was never made: its requests go into another
            self._log.end(handed.submission)
            raise Transient(f"{self._endpoint.url}: a batch was never made.", kind="server error")
        pause = FIRST_POLL
        while (batch := await self._call(lambda client: look_at_batch(client, name)))["status"] not in (
            *_ENDED,
            "gone",
        ):
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL)
        answers: dict[str, Completion | Exception] = {}
        n_unread = 0
        for file in (batch.get("output_file_id"), batch.get("error_file_id")):
            if isinstance(file, str) and file:
                n_unread += await self._read(file, answers)
        for key in handed.keys:
            answer = answers.get(key)
            if isinstance(answer, Completion):
                self._cache.put(bytes.fromhex(key), answer)
        self._log.end(handed.submission)
        missing = self._missing(name, batch, n_unread)
        for key in handed.keys:
            self._handed.discard(key)
            self._settle(key, answers.get(key, missing))

    def _missing(self, name: str, batch: Mapping[str, Any], n_unread: int) -> EndpointError:
        """Return what it means that a batch holds no answer to a request."""
        told = f"{self._endpoint.url}: the batch {name}"
        match batch["status"]:
            case "failed":
                return EndpointError(f"{told} was refused ({self._endpoint.shown(errors_of(batch))}).", fatal=True)
            case "cancelled":
                return EndpointError(
                    f"{told} was cancelled. What it had answered is stored; the rest goes into another when you run again.",
                    fatal=True,
                )
            case "gone":
                return EndpointError(
                    f"{told} is not known there any more (404): its answers cannot be had. Its requests go into "
                    "another, at the full price, when you run again.",
                    fatal=True,
                )
            case status:
                unread = f" ({n_unread:,} lines of its results cannot be read)" if n_unread else ""
                return Transient(
                    f"{told} ended {status} without an answer to this request{unread}.", kind="server error"
                )

    async def _read(self, file: str, answers: dict[str, Completion | Exception]) -> int:
        """Add what a result file holds to `answers`, where an answer stays; return how many lines are no row."""
        n_unread = 0
        content = await self._call(lambda client: content_of(client, file))
        for line in filter(bytes.strip, content.splitlines()):
            found = self._answer(line)
            if found is None:
                n_unread += 1
            elif not isinstance(answers.get(found[0]), Completion):
                answers[found[0]] = found[1]
        return n_unread

    def _answer(self, line: bytes) -> tuple[str, Completion | Exception] | None:
        """Return (key, answer or the error that only it met) of a line of a result file; None where it is no row."""
        try:
            row = json.loads(line)
            key, response, error = str(row["custom_id"]), row.get("response") or {}, row.get("error")
            status, body = response.get("status_code"), json.dumps(response.get("body")).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if status != 200:
            return key, self._endpoint.row_error(status, error, body)
        try:
            return key, self._endpoint.parse(body)
        except Transient as fault:
            return key, fault


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    """Return the name of a new file of requests."""
    raw = await client.files.with_raw_response.create(file=("requests.jsonl", content), purpose="batch")
    return str(_object(raw)["id"])


async def make_batch(client: openai.AsyncOpenAI, submission: str, file: str) -> str:
    """Return the name of a new batch over a file of requests, with our name for it in its metadata."""
    raw = await client.batches.with_raw_response.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"submission": submission},
    )  # fmt: skip
    return str(_object(raw)["id"])


async def find_batch(client: openai.AsyncOpenAI, submission: str) -> str | None:
    """Return the name of the batch with our `submission` in its metadata, None where there is none."""
    after: dict[str, Any] = {}
    seen: set[str] = set()
    while True:
        page = _object(await client.batches.with_raw_response.list(limit=100, **after))
        names = [str(batch["id"]) for batch in page["data"]]
        for name, batch in zip(names, page["data"], strict=True):
            metadata = batch.get("metadata")
            if isinstance(metadata, dict) and metadata.get("submission") == submission:
                return name
        if not page.get("has_more") or not names or names[-1] in seen:
            return None
        seen.update(names)
        after = {"after": names[-1]}


async def look_at_batch(client: openai.AsyncOpenAI, name: str) -> dict[str, Any]:
    """Return a batch as the endpoint describes it; its status is ``gone`` where the endpoint does not know it."""
    import openai

    try:
        found = _object(await client.batches.with_raw_response.retrieve(name))
    except openai.NotFoundError:
        return {"status": "gone"}
    return {**found, "status": str(found["status"])}


async def content_of(client: openai.AsyncOpenAI, file: str) -> bytes:
    """Return what a file of results holds."""
    content = bytes((await client.files.content(file)).content)
    if content.lstrip()[:1] not in (b"{", b""):
        raise ValueError("no file of results, but a page")  # of something in between: the results are still there
    return content


def _object(raw: Any) -> dict[str, Any]:
    """Return the JSON object in a raw response. Raises `ValueError` where there is none."""
    value = json.loads(raw.http_response.content)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def errors_of(batch: Mapping[str, Any]) -> str:
    """Return what a batch says went wrong."""
    errors = batch.get("errors")
    rows = errors.get("data") if isinstance(errors, dict) else None
    said = [str(row.get("message")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return "; ".join(said) or "it does not say why"


_SCHEMA = """CREATE TABLE IF NOT EXISTS batches (
    submission TEXT PRIMARY KEY, url TEXT NOT NULL, batch TEXT, keys TEXT NOT NULL, crc32 INTEGER
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class SubmittedBatch:
    """One batch without results so far: our name for it, the endpoint's (None: maybe never made), its request keys."""

    submission: str
    batch: str | None
    keys: tuple[str, ...]


class BatchLog:
    """An open log. Each change is on disk when the call returns. Raises `DiskError` where it cannot be.

    Each row has its CRC-32 (those of an older kinject have none); on opening all are read.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` where it cannot be, or a row is not as it was written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            settle_database(self._database, path)
            self._database.execute(_SCHEMA)
            if all(column[1] != "crc32" for column in self._database.execute("PRAGMA table_info(batches)")):
                self._database.execute("ALTER TABLE batches ADD COLUMN crc32 INTEGER")
            rows = self._database.execute("SELECT submission, url, batch, keys, crc32 FROM batches").fetchall()
            if any(row[4] not in (None, _crc32(*row[:4])) for row in rows):
                raise sqlite3.DatabaseError("a row is not as it was written")
        except (OSError, TypeError, AttributeError, sqlite3.Error) as error:
            raise DiskError(
                f"{path}: cannot be opened as the log of batches ({error}). Move it away to go on without it: batches that "
                "are not finished are then handed in, and paid, again."
            ) from error

    def begin(self, submission: str, url: str, keys: list[str]) -> None:
        """Note a batch about to be made."""
        self._put(submission, url, None, json.dumps(keys))

    def name(self, submission: str, batch: str) -> None:
        """Note the endpoint's name for it."""
        found = self._database.execute("SELECT url, keys FROM batches WHERE submission = ?", (submission,)).fetchone()
        self._put(submission, found[0], batch, found[1])

    def end(self, submission: str) -> None:
        """Forget a batch: its results are in the cache, or it will never have any."""
        self._write("DELETE FROM batches WHERE submission = ?", (submission,))

    def waiting(self, url: str) -> list[SubmittedBatch]:
        """Return the batches handed in at `url` that have not ended."""
        found = self._database.execute("SELECT submission, batch, keys FROM batches WHERE url = ?", (url,))
        return [SubmittedBatch(submission, batch, tuple(json.loads(keys))) for submission, batch, keys in found]

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _put(self, submission: str, url: str, batch: str | None, keys: str) -> None:
        row = (submission, url, batch, keys)
        self._write("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?)", (*row, _crc32(*row)))

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise DiskError(
                f"{self.path}: cannot be written ({error}). What was stored so far is safe. Mend what the system says; the "
                "same command goes on."
            ) from error


def _crc32(submission: str, url: str, batch: str | None, keys: str) -> int:
    return zlib.crc32("\0".join((submission, url, "" if batch is None else f"={batch}", keys)).encode())
