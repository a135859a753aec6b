"""The provider's batch API: requests are collected into a file and submitted; a restart resumes submitted batches."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kinject.disk import open_database, write_rows
from kinject.errors import DiskError, EndpointError
from kinject.llm.cache import AnswerCache, request_key
from kinject.llm.endpoint import Endpoint
from kinject.llm.generator import Stopped, Transient
from kinject.recipe import GeneratorSection
from kinject.secrets import without_secrets
from kinject.types import Completion, Message

if TYPE_CHECKING:
    import openai

MOST_REQUESTS = 10_000
"""Requests in one batch; providers take 50,000."""
SECONDS_TO_FILL = 0.5
"""Seconds without a new request before a batch is submitted."""
FIRST_POLL, LONGEST_POLL = 2.0, 60.0
"""Seconds between two polls of a batch: doubled each time, up to the second."""
MAX_SILENCE = 600.0
"""Seconds without an answer about files and batches before the run stops. Batches continue meanwhile."""
LONGEST_BATCH = 48 * 3600.0
"""Seconds that a run waits for a batch. Providers end one after 24 hours; a later run waits again."""
_LONGEST_NAME = 200
_ENDED = ("completed", "failed", "expired", "cancelled", "unknown")

Result = TypeVar("Result")


class BatchEndpoint:
    """Answers requests through batches of one endpoint, open inside ``async with``."""

    def __init__(self, section: GeneratorSection, identity: dict[str, Any], run_dir: Path) -> None:
        """Read the key. Raises `EndpointError` (fatal), which names the environment variable, where it is missing."""
        self._endpoint = Endpoint(section)
        self._identity = identity
        self._run_dir = run_dir
        self._requests: dict[str, dict[str, Any]] = {}
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._submitted: set[str] = set()
        self._has_requests = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BatchEndpoint:
        """Open the endpoint and the log, and resume the batches of earlier runs."""
        await self._endpoint.__aenter__()
        self._log = BatchLog(self._run_dir / "batches.sqlite")
        self._cache = AnswerCache(self._run_dir / "cache.sqlite")
        for batch in self._log.unfinished(self._endpoint.url):
            self._submitted.update(batch.keys)
            self._start(self._wait_for(batch), batch.keys)
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

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the answer when its batch has ended, which may take hours.

        Raises as `Endpoint.complete`, and `Stopped` after `abandon`.
        """
        key = request_key(self._identity, messages, seed).hex()
        future = self._futures.setdefault(key, asyncio.get_running_loop().create_future())
        if key not in self._submitted:
            self._requests[key] = self._endpoint.body(messages, seed)
            self._has_requests.set()
        try:
            return await future
        finally:
            self._futures.pop(key, None)

    def abandon(self) -> None:
        """Stop waiting for batches. The endpoint continues, and the next run fetches the results."""
        self._requests.clear()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(Stopped())

    def _start(self, work: Any, keys: tuple[str, ...]) -> None:
        """Run `work` as a task. Its exception is raised by the requests with `keys`, without keys by all."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            self._submitted.difference_update(keys)
            if isinstance(error, Exception):
                # All requests raise an error that is not the endpoint's, such as a full disk.
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
        """Submit a batch when enough requests have come, or no more come."""
        while True:
            await self._has_requests.wait()
            n_before = 0
            while n_before < min(len(self._requests), MOST_REQUESTS):
                n_before = len(self._requests)
                await asyncio.sleep(SECONDS_TO_FILL)
            chosen = dict(list(self._requests.items())[:MOST_REQUESTS])
            for key in chosen:
                del self._requests[key]
            if not self._requests:
                self._has_requests.clear()
            if chosen:
                self._submitted.update(chosen)
                self._start(self._submit(chosen), tuple(chosen))

    async def _submit(self, requests: dict[str, dict[str, Any]]) -> None:
        lines = (
            json.dumps({"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body})
            for key, body in requests.items()
        )
        content = "".join(f"{line}\n" for line in lines).encode()
        submission = uuid.uuid4().hex
        try:
            file = await self._call(lambda client: upload(client, content))
            # Logged before it is made: if this process dies in between, the next one finds the batch by its metadata.
            self._log.begin(submission, self._endpoint.url, list(requests))
            name = await self._make(submission, file)
        except EndpointError as error:
            if error.fatal:
                raise
            self._log.end(submission)  # refused: there will be no such batch
            raise EndpointError(f"{error} Without batches: augment.generator.batch=false.", fatal=True) from error
        self._log.name(submission, name)
        await self._wait_for(SubmittedBatch(submission, name, tuple(requests)))

    async def _make(self, submission: str, file: str) -> str:
        """Return the name of a new batch over `file`. It is made once, even if the endpoint's answer is lost."""
        tried = False

        async def make(client: openai.AsyncOpenAI) -> str:
            nonlocal tried
            name = await find_batch(client, submission) if tried else None
            if name is not None:
                return name
            tried = True
            return await make_batch(client, submission, file)

        return await self._call(make)

    async def _call(self, call: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
        """Return the result of `call`, which is repeated for up to `MAX_SILENCE` while its errors may pass.

        Submitting requests again because a poll of their batch failed would pay for them twice.
        """
        pause, since = FIRST_POLL, monotonic()
        while True:
            try:
                async with self._endpoint.calling() as client:
                    return await call(client)
            except Transient as fault:
                if monotonic() - since > MAX_SILENCE:
                    message = f"{fault} Nothing else came for {MAX_SILENCE:.0f} s; submitted batches continue."
                    raise EndpointError(message, fatal=True) from fault
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL)

    async def _wait_for(self, submitted: SubmittedBatch) -> None:
        """Wait for a batch, put its answers into the cache, and deliver them to the waiting requests."""
        name = submitted.batch or await self._call(lambda client: find_batch(client, submitted.submission))
        if name is None:  # it was never made: its requests go into another batch
            self._log.end(submitted.submission)
            raise Transient(f"{self._endpoint.url}: a batch was never made.", kind="server error")
        pause, since = FIRST_POLL, monotonic()
        while (batch := await self._call(lambda client: retrieve_batch(client, name)))["status"] not in _ENDED:
            if monotonic() - since > LONGEST_BATCH:
                hours = f"{LONGEST_BATCH / 3600:.0f} hours"
                message = f"{self._endpoint.url}: the batch {name} has not ended in {hours}. It continues there."
                raise EndpointError(message, fatal=True)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL)
        answers: dict[str, Completion | Exception] = {}
        n_unread = 0
        for file in (batch.get("output_file_id"), batch.get("error_file_id")):
            if isinstance(file, str) and file:
                n_unread += await self._read_results(file, answers)
        for key in submitted.keys:
            answer = answers.get(key)
            if isinstance(answer, Completion):
                self._cache.put(bytes.fromhex(key), answer)
        self._log.end(submitted.submission)
        missing = self._missing_error(name, batch, n_unread)
        for key in submitted.keys:
            self._submitted.discard(key)
            self._settle(key, answers.get(key, missing))

    def _missing_error(self, name: str, batch: Mapping[str, Any], n_unread: int) -> EndpointError:
        """Return the error of a request that has no answer in a batch."""
        subject = f"{self._endpoint.url}: the batch {name}"
        match batch["status"]:
            case "failed":
                return EndpointError(f"{subject} was refused ({self._endpoint.shown(errors_of(batch))}).", fatal=True)
            case "cancelled":
                return EndpointError(
                    f"{subject} was cancelled. Its answers are stored; the other requests go into a new batch at the next run.",
                    fatal=True,
                )
            case "unknown":
                return EndpointError(
                    f"{subject} is not known there any more (404), and its answers are lost. Its requests go into a new "
                    "batch, at the full price, when you run again.",
                    fatal=True,
                )
            case status:
                unread = f" ({n_unread:,} lines of its results cannot be read)" if n_unread else ""
                return Transient(
                    f"{subject} ended {status} without an answer to this request{unread}.", kind="server error"
                )

    async def _read_results(self, file: str, answers: dict[str, Completion | Exception]) -> int:
        """Add the rows of a result file to `answers`, where the first answer stays; return the number of unreadable lines."""
        n_unread = 0
        content = await self._call(lambda client: download(client, file))
        for line in filter(bytes.strip, content.splitlines()):
            result = self._parse_result(line)
            if result is None:
                n_unread += 1
            elif not isinstance(answers.get(result[0]), Completion):
                answers[result[0]] = result[1]
        return n_unread

    def _parse_result(self, line: bytes) -> tuple[str, Completion | Exception] | None:
        """Return (key, answer or error) of a line of a result file, None if it is no row."""
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
    """Upload a file of requests and return its name."""
    raw = await client.files.with_raw_response.create(file=("requests.jsonl", content), purpose="batch")
    return _name(_object(raw))


async def make_batch(client: openai.AsyncOpenAI, submission: str, file: str) -> str:
    """Make a batch over a file of requests, with `submission` in its metadata, and return its name."""
    raw = await client.batches.with_raw_response.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"submission": submission},
    )  # fmt: skip
    return _name(_object(raw))


async def find_batch(client: openai.AsyncOpenAI, submission: str) -> str | None:
    """Return the name of the batch with `submission` in its metadata, None if there is none."""
    after: dict[str, Any] = {}
    seen: set[str] = set()
    while True:
        page = _object(await client.batches.with_raw_response.list(limit=100, **after))
        names = [_name(batch) for batch in page["data"]]
        for name, batch in zip(names, page["data"], strict=True):
            metadata = batch.get("metadata")
            if isinstance(metadata, dict) and metadata.get("submission") == submission:
                return name
        if not page.get("has_more") or not names or names[-1] in seen:
            return None
        seen.update(names)
        after = {"after": names[-1]}


async def retrieve_batch(client: openai.AsyncOpenAI, name: str) -> dict[str, Any]:
    """Return the endpoint's description of a batch, with status ``unknown`` if the endpoint does not know it."""
    import openai

    try:
        batch = _object(await client.batches.with_raw_response.retrieve(name))
    except openai.NotFoundError:
        return {"status": "unknown"}
    return {**batch, "status": str(batch["status"])}


async def download(client: openai.AsyncOpenAI, file: str) -> bytes:
    """Return the content of a result file. Raises `ValueError` on a page of a proxy: the results still exist."""
    content = bytes((await client.files.content(file)).content)
    if content.lstrip()[:1] not in (b"{", b""):
        raise ValueError("a page instead of a file of results")
    return content


def _object(raw: Any) -> dict[str, Any]:
    """Return the JSON object in a raw response. Raises `ValueError` if there is none."""
    value = json.loads(raw.http_response.content)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _name(made: Mapping[str, Any]) -> str:
    """Return the endpoint's name for a file or a batch, which is stored. Raises `ValueError` if it holds a part of a key."""
    name = str(made["id"])
    if len(name) > _LONGEST_NAME or without_secrets(name) is not name:
        raise ValueError("its id is no name")
    return name


def errors_of(batch: Mapping[str, Any]) -> str:
    """Return the error messages of a failed batch as one text."""
    errors = batch.get("errors")
    rows = errors.get("data") if isinstance(errors, dict) else None
    messages = [str(row.get("message")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return "; ".join(messages) or "without a reason"


_SCHEMA = """CREATE TABLE IF NOT EXISTS batches (
    submission TEXT PRIMARY KEY, url TEXT NOT NULL, batch TEXT, keys TEXT NOT NULL
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class SubmittedBatch:
    """An unfinished batch: kinject's name for it, the endpoint's (None: maybe never made), and its request keys."""

    submission: str
    batch: str | None
    keys: tuple[str, ...]


class BatchLog:
    """The submitted batches of a run folder, so that a restart fetches their results instead of paying again.

    Each change is on disk when the call returns, or raises `DiskError`.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `DiskError` if that fails."""
        self.path = path
        try:
            self._database = open_database(path, _SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise DiskError(
                f"{path}: cannot be opened as the log of batches ({error}). Move it away to continue without it: "
                "unfinished batches are then submitted, and paid, again."
            ) from error

    def begin(self, submission: str, url: str, keys: list[str]) -> None:
        """Record a batch that is about to be made."""
        self._put(submission, url, None, json.dumps(keys))

    def name(self, submission: str, batch: str) -> None:
        """Record the endpoint's name for a batch."""
        row = self._database.execute("SELECT url, keys FROM batches WHERE submission = ?", (submission,)).fetchone()
        url, keys = row
        self._put(submission, url, batch, keys)

    def end(self, submission: str) -> None:
        """Delete a batch: its results are in the cache, or it will never have any."""
        self._write("DELETE FROM batches WHERE submission = ?", (submission,))

    def unfinished(self, url: str) -> list[SubmittedBatch]:
        """Return the batches submitted to `url` that have not ended."""
        rows = self._database.execute("SELECT submission, batch, keys FROM batches WHERE url = ?", (url,))
        return [SubmittedBatch(submission, batch, tuple(json.loads(keys))) for submission, batch, keys in rows]

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _put(self, submission: str, url: str, batch: str | None, keys: str) -> None:
        self._write("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", (submission, url, batch, keys))

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        write_rows(self._database, self.path, statement, [values])
