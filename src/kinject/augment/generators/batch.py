"""The provider's batch API: requests collected into a file, handed in, waited for, and taken up again after a restart."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kinject.augment.cache import AnswerCache, request_key
from kinject.augment.generators.batch_log import BatchLog, Handed
from kinject.augment.generators.faults import Stopped, Transient
from kinject.augment.generators.openai import Endpoint
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message

if TYPE_CHECKING:
    import openai

MOST_REQUESTS = 10_000
"""Requests in one batch; providers take 50,000."""
SECONDS_TO_FILL = 0.5
"""How long nothing new must have come before a batch is handed in."""
FIRST_POLL, LONGEST_POLL = 2.0, 60.0
"""Seconds before a batch is looked at again: doubled each time up to the most."""
_ENDED = ("completed", "failed", "expired", "cancelled")


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
            for key in keys or tuple(self._futures):
                self._handed.discard(key)
                if isinstance(error, Exception):
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
        async with self._endpoint.calling() as client:
            file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
            # Noted before it is made: should this process die in between, the next one finds it by its metadata.
            self._log.begin(submission, self._endpoint.url, list(requests))
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
                metadata={"submission": submission},
            )  # fmt: skip
        self._log.name(submission, batch.id)
        await self._take_up(Handed(submission, batch.id, tuple(requests)))

    async def _take_up(self, handed: Handed) -> None:
        """Wait for a batch, put its answers into the cache, and give them to those that wait."""
        async with self._endpoint.calling() as client:
            name = handed.batch or await self._find(client, handed.submission)
            if name is None:  # it was never made: its requests go into another
                self._log.end(handed.submission)
                raise Transient(f"{self._endpoint.url}: a batch was never made.", kind="server error")
            pause = FIRST_POLL
            while (batch := await client.batches.retrieve(name)).status not in _ENDED:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_POLL)
            answers: dict[str, Completion | Exception] = {}
            for file in (batch.output_file_id, batch.error_file_id):
                if file:
                    answers.update(self._answers((await client.files.content(file)).content))
        for key, answer in answers.items():
            if isinstance(answer, Completion):
                self._cache.put(bytes.fromhex(key), answer)
        self._log.end(handed.submission)
        told = "; ".join(str(error.message) for error in (batch.errors.data or ())) if batch.errors else ""
        said = self._endpoint.shown(told)
        missing = (
            EndpointError(f"{self._endpoint.url}: the batch {name} was refused ({said}).", fatal=True)
            if batch.status == "failed"
            else Transient(f"{self._endpoint.url}: the batch {name} ended {batch.status}.", kind="server error")
        )
        for key in handed.keys:
            self._handed.discard(key)
            self._settle(key, answers.get(key, missing))

    async def _find(self, client: openai.AsyncOpenAI, submission: str) -> str | None:
        async for batch in client.batches.list(limit=100):
            if (batch.metadata or {}).get("submission") == submission:
                return batch.id
        return None

    def _answers(self, content: bytes) -> Iterator[tuple[str, Completion | Exception]]:
        """Yield (key, answer or the error that only it met) for each line of a result file."""
        for line in content.splitlines():
            try:
                row = json.loads(line)
                key, response = str(row["custom_id"]), row.get("response") or {}
                bytes.fromhex(key)
                status, body = response.get("status_code"), json.dumps(response.get("body")).encode()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EndpointError(f"{self._endpoint.url}: a batch's result is no JSON row ({error}).") from error
            try:
                if status == 200:
                    yield key, self._endpoint.completion(body)
                else:
                    yield key, self._endpoint.row_error(status, row.get("error"), body)
            except Transient as fault:
                yield key, fault
