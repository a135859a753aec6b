"""Sends requests: from the cache where it can, within the limits, again after a fault that may pass."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from kinject.augment.cache import AnswerCache, request_key
from kinject.augment.generators import Writer
from kinject.augment.generators.faults import Stopped as Stopped
from kinject.augment.generators.faults import Transient
from kinject.augment.limits import AdaptiveGate, Budget, Limits, RateLimit
from kinject.errors import EndpointError
from kinject.types import Completion, Message, Usage

N_TRIES = 8
"""Times that one request is sent before it counts as failed; refusals for overload do not count."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the first retry, doubled at each further one, and the most; jittered between half and whole."""
PATIENCE = 600.0
"""Seconds that an endpoint may answer nothing but overload before the run stops."""
N_FAILURES_IN_A_ROW = 20
"""Requests that fail for good, one after the other without an answer between, before the run stops."""
_ALIVE = 5.0
"""Seconds since the last answer in which an endpoint that refuses for overload counts as answering others."""
_PRESSURE = ("overload", "timeout", "connection")
_CHARACTERS_PER_TOKEN = 3.0
"""A low guess, so that what is set aside for a request is rather too much than too little."""


@dataclass
class Traffic:
    """What went over the wire in this run."""

    n_sent: int = 0
    n_answered: int = 0
    n_cached: int = 0
    n_retried: dict[str, int] = field(default_factory=dict)
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0


class Sender:
    """Sends the requests of one run to one writer. `stop` lets those in flight finish and refuses all others."""

    def __init__(
        self, writer: Writer, cache: AnswerCache | None, limits: Limits, spent: Usage | None = None,
        partner: Sender | None = None,
    ) -> None:  # fmt: skip
        """`spent` are the tokens that the run folder has cost so far; with a `partner` it shares the end and the purse."""
        before = spent or Usage()
        self.writer = writer
        self.traffic = Traffic()
        purse = partner.budget.purse if partner else None
        self.budget: Budget = Budget(limits, before.tokens_in, before.tokens_out, purse)
        self._cache = cache
        self._gate = AdaptiveGate(limits.concurrency)
        self._requests = RateLimit(limits.requests_per_minute)
        self._tokens = RateLimit(limits.tokens_per_minute)
        self._stopping: asyncio.Event = partner._stopping if partner else asyncio.Event()
        self._in_flight: dict[bytes, asyncio.Future[Completion]] = {}
        self._n_failures = 0
        self._last_answer = time.monotonic()

    @property
    def stopping(self) -> bool:
        """Whether the run is ending."""
        return self._stopping.is_set()

    @property
    def out_of_budget(self) -> bool:
        """Whether the budget (a partner's requests included) ended the run."""
        return self.budget.purse.empty

    def stop(self) -> None:
        """Send nothing more; what is in flight may finish."""
        self._stopping.set()
        self.budget.purse.wake(everyone=True)

    def interrupt(self) -> None:
        """Send nothing more, and do not wait for what would take hours."""
        self.stop()
        self.writer.abandon()

    def status(self) -> str:
        """Return what to show beside the bar: tokens of this run, and what the run folder has cost."""
        if not self.traffic.n_answered or not self.writer.remote:
            return ""
        text = f"{self.traffic.tokens_in:,} tokens in, {self.traffic.tokens_out:,} out"
        return f"{text}, cost {self.budget.spent:.4f}" if self.budget.spent else text

    async def send(self, messages: list[Message], seed: int) -> Completion:
        """Return the answer, from the cache or the writer.

        Raises `EndpointError` where it cannot be had (fatal: nor any other) and `Stopped` where the run is ending.
        """
        if self._cache is None:
            return await self._ask(messages, seed)
        key = request_key(self.writer.identity, messages, seed)
        stored = self._cache.get(key)
        if stored is not None:
            self.traffic.n_cached += 1
            return stored
        if key in self._in_flight:  # two equal passages: one request serves both
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
        """Send until answered. An overloaded endpoint is asked again as long as others get answers."""
        tries = n_overloads = 0
        while True:
            try:
                return await self._try(messages, seed)
            except Transient as fault:
                failure = fault
            except EndpointError as error:
                raise self._given_up(error) from error
            self.traffic.n_retried[failure.kind] = self.traffic.n_retried.get(failure.kind, 0) + 1
            if failure.kind == "overload":
                n_overloads += 1
                if time.monotonic() - self._last_answer > PATIENCE:
                    self.stop()
                    raise EndpointError(f"{failure} Nothing else came for {PATIENCE:.0f} s.", fatal=True) from failure
            else:
                tries += 1
                if tries >= N_TRIES:
                    raise self._given_up(failure) from failure
            # While others get answers the gate keeps the pressure down: long pauses would only leave places empty.
            others_pass = time.monotonic() - self._last_answer < _ALIVE
            await self._pause(tries + (min(n_overloads, 2) if others_pass else n_overloads), failure.retry_after)

    async def _try(self, messages: list[Message], seed: int) -> Completion:
        """Send once, within every limit."""
        tokens_in = sum(len(message["content"]) for message in messages) / _CHARACTERS_PER_TOKEN
        most_out = int(self.writer.identity.get("max_tokens") or 0)
        await self._gate.enter()
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
                completion = await self.writer.ask(messages, seed)
                usage = completion.usage
            except Transient as fault:
                overloaded = fault.kind in _PRESSURE
                raise
            finally:
                used = usage or Usage()
                self.budget.settle(reserved, used.tokens_in, used.tokens_out)
                self._tokens.settle(entry, used.tokens_in + used.tokens_out)
        finally:
            self._gate.leave(overloaded=overloaded)
        self._note_answer(completion.usage)
        return completion

    def _note_answer(self, usage: Usage) -> None:
        self.traffic.n_answered += 1
        self.traffic.tokens_in += usage.tokens_in
        self.traffic.tokens_out += usage.tokens_out
        self._n_failures = 0
        self._last_answer = time.monotonic()

    def _given_up(self, error: EndpointError) -> EndpointError:
        """Return `error`, made fatal where many failed in a row; a fatal one stops the run."""
        self._n_failures += 1
        if not error.fatal and self._n_failures < N_FAILURES_IN_A_ROW:
            return error
        self.stop()  # at once, before another request can leave
        if error.fatal:
            return error
        return EndpointError(
            f"{error} So did the {self._n_failures - 1} requests before it; the run stops here.", fatal=True
        )

    async def _pause(self, tries: int, retry_after: float | None) -> None:
        pause = min(FIRST_PAUSE * 2 ** min(tries - 1, 16), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        if retry_after is not None:
            pause = max(pause, retry_after * random.uniform(1.0, 1.1))
        try:
            await asyncio.wait_for(self._stopping.wait(), pause)
        except TimeoutError:
            return
        raise Stopped
