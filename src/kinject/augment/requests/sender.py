"""Sends requests within the limits, answers them from the cache, retries passing faults; runs many workers on one sender."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from kinject.augment.requests import open_generator
from kinject.augment.requests.cache import AnswerCache, request_key
from kinject.augment.requests.chat import with_thinking
from kinject.augment.requests.generator import Generator, Stopped, Transient
from kinject.augment.requests.limits import AdaptiveConcurrency, Budget, Limits, RateLimit
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.signals import handled_by, interruption, running_time
from kinject.types import Completion, Message, Usage

N_TRIES = 8
"""Times that one request is sent before it counts as failed; refusals for overload do not count."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the first retry and the maximum: doubled at each retry, with a jitter of half to whole."""
MAX_SILENCE = 600.0
"""Seconds without any answer, from an endpoint that is overloaded or unreachable, before the run stops."""
LONGEST_WAIT = 120.0
"""Most seconds of a pause that the endpoint asks for."""
N_FAILURES_IN_A_ROW = 20
"""Requests that fail for good, without an answer in between, before the run stops."""
_ALIVE = 5.0
"""Seconds since the last answer within which an overloaded endpoint counts as answering other requests."""
_PRESSURE = ("overload", "timeout", "connection")
_CHARACTERS_PER_TOKEN = 3.0
"""A low estimate, so that the cost reserved for a request is rather too high than too low."""


@dataclass
class Traffic:
    """Counts of the requests of this run."""

    n_sent: int = 0
    n_answered: int = 0
    n_cached: int = 0
    n_retried: dict[str, int] = field(default_factory=dict)
    n_lost: int = 0
    """Answers that were interrupted and may have been charged."""
    n_estimated: int = 0
    """Answers without a plausible token count."""
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_thinking: int = 0
    seconds: float = 0.0

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "sent": self.n_sent, "answered": self.n_answered, "from_cache": self.n_cached, "retried": self.n_retried,
            "lost": self.n_lost, "usage_estimated": self.n_estimated, "request_seconds": round(self.seconds, 3),
        }  # fmt: skip

    def cost_note(self) -> str:
        """Return which part of the cost is estimated, "" if none is."""
        notes = []
        if self.n_lost:
            notes.append(
                f"{self.n_lost:,} answers were lost on the way, each counted at the most that it can have cost"
            )
        if self.n_estimated:
            notes.append(f"{self.n_estimated:,} answers did not report their tokens, each counted by its length")
        return "; ".join(notes)


class Sender:
    """Sends the requests of one run to one generator. `stop` lets those in flight finish and refuses all others."""

    def __init__(
        self, generator: Generator, cache: AnswerCache | None, limits: Limits, spent: Usage | None = None,
        partner: Sender | None = None,
    ) -> None:  # fmt: skip
        """`spent` are the tokens that the run folder has cost so far. With a `partner` it shares the budget and the stop."""
        self.generator = generator
        self.traffic = Traffic()
        shared = partner.budget.shared if partner else None
        self.budget: Budget = Budget(limits, spent or Usage(), shared)
        self._cache = cache
        self._limits = limits
        self._thinking_before = spent.tokens_thinking if spent else 0
        self._concurrency = AdaptiveConcurrency(limits.concurrency)
        self._requests = RateLimit(limits.requests_per_minute, "requests_per_minute")
        self._tokens = RateLimit(limits.tokens_per_minute, "tokens_per_minute")
        self._stopping: asyncio.Event = partner._stopping if partner else asyncio.Event()
        self._in_flight: dict[bytes, asyncio.Future[Completion]] = {}
        self._n_failures = 0
        self._last_answer = running_time()
        self._silent_since: float | None = None  # the first refusal since the last answer

    @property
    def stopping(self) -> bool:
        """Whether the run is ending."""
        return self._stopping.is_set()

    @property
    def out_of_budget(self) -> bool:
        """Whether the budget, shared with a partner, ended the run."""
        return self.budget.shared.empty

    @property
    def cost_of_thinking(self) -> float:
        """The part of the run folder's cost that a reasoning model's thinking took, at this sender's prices."""
        return self._limits.cost(0, self._thinking_before + self.traffic.tokens_thinking)

    def stop(self) -> None:
        """Send nothing more. Requests in flight may finish."""
        self._stopping.set()
        self.budget.shared.wake(everyone=True)

    def interrupt(self) -> None:
        """Send nothing more, and do not wait for batches, which take hours."""
        self.stop()
        self.generator.abandon()

    def status(self) -> str:
        """Return the text beside the progress bar: tokens of this run and cost of the run folder."""
        if not self.traffic.n_answered or not self.generator.remote:
            return ""
        thinking = f" ({self.traffic.tokens_thinking:,} thinking)" if self.traffic.tokens_thinking else ""
        text = f"{self.traffic.tokens_in:,} tokens in, {self.traffic.tokens_out:,} out{thinking}"
        return f"{text}, cost {self.budget.spent:.4f}" if self.budget.spent else text

    async def send(self, messages: list[Message], seed: int) -> Completion:
        """Return the answer from the cache or from the generator.

        Raises `EndpointError` if there is none (fatal: nor for any other request) and `Stopped` where the run is ending.
        """
        if self._cache is None:
            return await self._ask(messages, seed)
        key = request_key(self.generator.identity, messages, seed)
        stored = self._cache.get(key)
        if stored is not None:
            self.traffic.n_cached += 1
            return stored
        if key in self._in_flight:  # two equal passages share one request
            return await asyncio.shield(self._in_flight[key])
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            completion = await self._ask(messages, seed)
            await self._cache.keep(key, completion)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else Stopped())
            future.exception()  # retrieved: nobody else may be waiting
            raise
        finally:
            del self._in_flight[key]
        future.set_result(completion)
        return completion

    async def _ask(self, messages: list[Message], seed: int) -> Completion:
        """Send until answered. An endpoint that is overloaded, or unreachable after it answered, is retried for `MAX_SILENCE`."""
        tries = n_waits = 0
        n_answered = self.traffic.n_answered
        while True:
            try:
                return await self._try(messages, seed)
            except Transient as fault:
                failure = fault
            except EndpointError as error:
                raise self._failed(error) from error
            self.traffic.n_retried[failure.kind] = self.traffic.n_retried.get(failure.kind, 0) + 1
            # Gone: it answered before, but nothing since this request's last fault. Else this request causes the fault.
            unreachable = failure.kind == "connection" and 0 < self.traffic.n_answered == n_answered
            n_answered = self.traffic.n_answered
            if failure.kind == "overload" or unreachable:
                n_waits += 1
                if self._silent_too_long():
                    raise self._failed(failure, everyone=failure.kind == "overload") from failure
            else:
                tries += 1
                if tries >= N_TRIES:
                    raise self._failed(failure) from failure
            # While others get answers, the adaptive concurrency limits the load; long pauses would leave connections idle.
            others_pass = running_time() - self._last_answer < _ALIVE
            await self._pause(tries + (min(n_waits, 2) if others_pass else n_waits), failure.retry_after)

    def _silent_too_long(self) -> bool:
        """Return whether the first refusal since the last answer is longer ago than `MAX_SILENCE`."""
        now = running_time()
        if self._silent_since is None:
            self._silent_since = now
        return now - self._silent_since > MAX_SILENCE

    async def _try(self, messages: list[Message], seed: int) -> Completion:
        """Send once, within all limits."""
        tokens_in = sum(len(message["content"]) for message in messages) / _CHARACTERS_PER_TOKEN
        most_out = int(self.generator.identity.get("max_tokens") or 0)
        await self._concurrency.enter()
        overloaded = False
        usage: Usage | None = None
        try:
            entry = await self._tokens.take(tokens_in + most_out)
            await self._requests.take()
            if self.stopping:
                raise Stopped
            reserved = await self.budget.reserve(tokens_in, most_out, self._stopping.is_set)
            if reserved is None:
                self.stop()
                raise Stopped
            self.traffic.n_sent += 1
            try:
                completion = self._with_usage(await self.generator.ask(messages, seed), tokens_in, most_out)
                usage = completion.usage
            except Transient as fault:
                overloaded = fault.kind in _PRESSURE
                usage = self._record_lost(fault, tokens_in, most_out)
                raise
            finally:
                used = usage or Usage()
                self.budget.settle(reserved, used.tokens_in, used.tokens_out)
                self._tokens.settle(entry, used.tokens_in + used.tokens_out)
        finally:
            self._concurrency.leave(overloaded=overloaded)
        self._record_answer(completion.usage)
        return completion

    def _with_usage(self, completion: Completion, tokens_in: float, most_out: int) -> Completion:
        """Return a completion with its tokens, estimated where it does not report them: the budget must count every answer."""
        usage, text = completion.usage, completion.text
        if not self.generator.remote or (usage.tokens_in and (usage.tokens_out or not text)):
            return completion
        self.traffic.n_estimated += 1
        whole = completion.finish_reason != "length"
        n_written = len(completion.thinking) + len(text)
        n_out = usage.tokens_out or (
            math.ceil(n_written / _CHARACTERS_PER_TOKEN) if whole or not most_out else most_out
        )
        used = Usage(usage.tokens_in or math.ceil(tokens_in), n_out, usage.tokens_thinking)
        return replace(completion, usage=with_thinking(used, len(completion.thinking), len(text)))

    def _record_lost(self, fault: Transient, tokens_in: float, most_out: int) -> Usage | None:
        """Store and return the tokens that a fault may have cost: the most possible, where it reports none."""
        if fault.lost is None or not self.generator.remote:
            return None
        self.traffic.n_lost += 1
        usage = Usage(fault.lost.tokens_in or math.ceil(tokens_in), fault.lost.tokens_out or most_out)
        if self._cache is not None:
            self._cache.put_lost(usage)
        return usage

    def _record_answer(self, usage: Usage) -> None:
        self.traffic.n_answered += 1
        self.traffic.tokens_in += usage.tokens_in
        self.traffic.tokens_out += usage.tokens_out
        self.traffic.tokens_thinking += usage.tokens_thinking
        self._n_failures = 0
        self._silent_since = None
        self._last_answer = running_time()

    def _failed(self, error: EndpointError, *, everyone: bool = False) -> EndpointError:
        """Return the error of a failed request, fatal where many in a row or all (`everyone`) fail. A fatal one stops the run."""
        self._n_failures += 1
        if everyone:
            self.stop()
            return EndpointError(f"{error} Nothing else came for {MAX_SILENCE:.0f} s.", fatal=True)
        if not error.fatal and self._n_failures < N_FAILURES_IN_A_ROW:
            return error
        self.stop()  # at once, before another request is sent
        if error.fatal:
            return error
        return EndpointError(
            f"{error} So did the {self._n_failures - 1} requests before it; the run stops here.", fatal=True
        )

    async def _pause(self, tries: int, retry_after: float | None) -> None:
        pause = min(FIRST_PAUSE * 2 ** min(tries - 1, 16), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        if retry_after is not None:
            pause = max(pause, min(retry_after, LONGEST_WAIT) * random.uniform(1.0, 1.1))
        try:
            await asyncio.wait_for(self._stopping.wait(), pause)
        except TimeoutError:
            return
        raise Stopped


@contextlib.asynccontextmanager
async def open_sender(
    section: GeneratorSection,
    run_dir: Path,
    limits: Limits,
    *,
    cache: str = "cache.sqlite",
    partner: Sender | None = None,
) -> AsyncIterator[Sender]:
    """Yield a sender to the generator of `section`, with a cache in `run_dir` where answers cost money or time.

    Raises as `open_generator` and `AnswerCache`.
    """
    async with open_generator(section, run_dir) as generator:
        if generator.remote:
            with AnswerCache(run_dir / cache) as answers:
                yield Sender(generator, answers, limits, answers.usage(), partner)
        else:
            yield Sender(generator, None, limits, None, partner)


Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def run_workers(
    items: Iterator[Item], work: Callable[[Item], Awaitable[None]], sender: Sender, n_workers: int
) -> None:
    """Do `work` on every item, `n_workers` at a time.

    Raises the first exception of `work` after the requests in flight have ended (`Stopped` ends the run without one),
    and `KeyboardInterrupt` as `graceful_shutdown` does.
    """
    errors: list[Exception] = []

    async def worker() -> None:
        try:
            for item in items:
                if sender.stopping:
                    return
                await work(item)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001  (raised below, when the requests in flight have ended)
            errors.append(error)
            sender.stop()

    with graceful_shutdown(sender):
        await asyncio.gather(*(worker() for _ in range(n_workers)))
        if errors:
            raise errors[0]


async def gather_answers(requests: Iterable[Awaitable[Answer]]) -> list[Answer | EndpointError]:
    """Return the answer to each request, or the error that only this request met, in order.

    Raises an error that ends the run when all requests have ended; `Stopped` only if there is no other.
    """
    results = await asyncio.gather(*requests, return_exceptions=True)
    fatal = [one for one in results if isinstance(one, BaseException) and not _is_of_one_request(one)]
    if fatal:
        raise next((error for error in fatal if not isinstance(error, Stopped)), fatal[0])
    return [one for one in results if isinstance(one, EndpointError) or not isinstance(one, BaseException)]


def _is_of_one_request(error: BaseException) -> bool:
    return isinstance(error, EndpointError) and not error.fatal


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time limits leave out the time for which the process was stopped (SIGSTOP)."""

    def time(self) -> float:
        return running_time()

    def read_clock(self) -> None:
        """Read the clock each second from now on, so that a pause is counted to the second."""
        self.call_later(1.0, self.read_clock)


def run_event_loop(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of `work`, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        loop.read_clock()
        return runner.run(work)


@contextlib.contextmanager
def graceful_shutdown(sender: Sender) -> Iterator[None]:
    """Turn the first signal that ends a verb into `sender.interrupt()`, so that answers in flight are received and stored.

    At the end of the block `KeyboardInterrupt` (`Terminated`) is raised. A second signal cancels the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        sender.interrupt()
        if len(signals) > 1 and task is not None:
            task.cancel()

    def receive(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        loop.call_soon_threadsafe(interrupt)

    with handled_by(receive):
        try:
            yield
        except asyncio.CancelledError:
            if not signals:
                raise
    if signals:
        raise interruption(signals[0])
