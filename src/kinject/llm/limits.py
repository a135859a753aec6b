"""Limits of requests: a budget that is never exceeded, and as many at once as each endpoint
bears."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kinject.llm import Generator, Transient
from kinject.llm.cache import stored_usage
from kinject.recipe import GeneratorSection
from kinject.shards import WHOLE, Shard

_NEWEST = 0.1
"""Weight of the newest answer in the mean latency."""
_LEAST_LATENCY, _MOST_LATENCY = 0.1, 60.0
"""Seconds that an endpoint is taken to need after a fault, doubled each time, so that the others
get the requests."""
# By the fraction of refusals in a window it swung between 16 and 34 at a capacity of 32, 1.43 times
# the ideal time; so it stays at 32 to 39, 1.19 times.
_GROWTH = 0.1
"""Added to the concurrency limit by each answer; each refusal for overload subtracts 1."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a run over all its endpoints. Prices are per million tokens.

    `budget` is in the currency of the prices and covers the run folder, earlier runs included.
    """

    concurrency: int
    price_in: float = 0.0
    price_out: float = 0.0
    budget: float | None = None

    def cost(self, tokens_in: float, tokens_out: float) -> float:
        """Return the cost of tokens."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6


def limits_of(generator: GeneratorSection, budget: float | None, shard: Shard = WHOLE) -> Limits:
    """Return the limits of a generator, whose endpoints have its concurrency each, and the budget;
    of a shard its part of them."""
    price_in, price_out = generator.price or (0.0, 0.0)
    concurrency = generator.concurrency
    # A local model is loaded by each shard, and has the rows of a batch to itself.
    if generator.kind == "openai":
        concurrency = shard.share_of(concurrency)
    if budget is not None and shard.total:
        budget /= shard.total
    return Limits(concurrency * len(generator.parts()), price_in, price_out, budget)


def spent_so_far(generator: GeneratorSection, path: Path) -> float:
    """Return the cost of all answers in the cache at `path`, 0 without one."""
    usage = stored_usage(path)
    return limits_of(generator, None).cost(usage.tokens_in, usage.tokens_out)


class _Line:
    """Requests that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def wake(self, *, everyone: bool = False) -> None:
        """Let the first waiting request (or all of them) try again."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                if not everyone:
                    return


@dataclass
class Budget:
    """The budget of a run, for one or more senders: `most` is the limit, `reserved` is for requests
    in flight."""

    most: float | None
    spent: float = 0.0
    reserved: float = 0.0
    n_reserved: int = 0
    empty: bool = False
    """Whether a request was not sent because it could have exceeded the budget."""
    line: _Line = field(default_factory=_Line)

    async def reserve(self, cost: float, ending: Callable[[], bool]) -> bool:
        """Reserve the most that a request may cost; return False if that could exceed the budget,
        or at the end.

        Requests cost less than is reserved for them: while some are in flight, this waits for the
        rest of theirs.
        """
        while self.most is not None and self.spent + self.reserved + cost > self.most:
            # Only when nothing is in flight: 16 requests reserved ten times their cost, and budgets
            # ended at half.
            if not self.n_reserved:
                self.empty = True
                return False
            await self.line.wait()
            if ending():
                return False
        self.reserved += cost
        self.n_reserved += 1
        self.line.wake()  # the rest may be enough for the next request, too
        return True

    def settle(self, reserved: float, cost: float) -> None:
        """Replace a reservation by the cost of the answer."""
        self.reserved -= reserved
        self.n_reserved -= 1
        self.spent += cost
        self.line.wake()


@dataclass(eq=False)
class EndpointState:
    """One endpoint of a run: its generator, its requests in flight and its latency.

    `limit` starts at `most`, the recipe's concurrency, and follows the endpoint's capacity: of a
    burst of four times the capacity three in four are refused, which leaves the capacity. `latency`
    is the exponentially weighted mean of the seconds of an answer, 0 before the first, longer after
    faults.
    """

    generator: Generator
    most: int
    latency: float = 0.0
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.limit = float(self.most)

    def expected_wait(self) -> tuple[float, float]:
        """Seconds until it has answered its requests in flight and one more; before the first
        answers, the load decides.

        That of Finagle's Peak EWMA (mean latency times requests in flight), over the endpoint's
        capacity.
        """
        load = (self.in_flight + 1) / self.limit
        return self.latency * load, load

    def record_answer(self, seconds: float) -> None:
        """Take an answer that took `seconds` into the mean."""
        if not self.latency:
            self.latency = seconds
        self.latency += (seconds - self.latency) * _NEWEST

    def record_fault(self, fault: Transient) -> None:
        """Leave the endpoint alone for longer than before."""
        longer = max(2 * self.latency, fault.retry_after or 0.0, _LEAST_LATENCY)
        self.latency = min(longer, _MOST_LATENCY)


class LoadBalancer:
    """Gives each request its turn at the endpoint with the least expected wait."""

    def __init__(self, endpoints: Sequence[EndpointState]) -> None:
        self.endpoints = endpoints
        self.line = _Line()

    async def enter(self, stopping: Callable[[], bool]) -> EndpointState | None:
        """Return the endpoint of the next request; None at the end of the run."""
        while not stopping():
            endpoint = min(self.endpoints, key=EndpointState.expected_wait)
            if endpoint.in_flight < int(endpoint.limit):
                endpoint.in_flight += 1
                return endpoint
            await self.line.wait()
        return None

    def leave(self, endpoint: EndpointState, *, overloaded: bool) -> None:
        """Count a request as ended."""
        n_before = int(endpoint.limit)
        endpoint.in_flight -= 1
        endpoint.limit = max(
            1.0, min(float(endpoint.most), endpoint.limit + (-1 if overloaded else _GROWTH))
        )
        # A limit that grew by a whole request has room for one more than the one that ended.
        for _ in range(1 + max(0, int(endpoint.limit) - n_before)):
            self.line.wake()
