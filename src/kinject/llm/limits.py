"""Limits of requests: how many at once, and a budget that is never exceeded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kinject.llm.cache import stored_usage
from kinject.recipe import GeneratorSection


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

    def times(self, number: float) -> Limits:
        """Return the limits of so many endpoints (of 1/n: of each of n)."""
        return replace(self, concurrency=round(self.concurrency * number))


def limits_of(generator: GeneratorSection, budget: float | None) -> Limits:
    """Return the limits of a generator, which each of its endpoints has, and the budget."""
    price_in, price_out = generator.price or (0.0, 0.0)
    one = Limits(
        concurrency=generator.concurrency,
        price_in=price_in, price_out=price_out, budget=budget,
    )  # fmt: skip
    return one.times(len(generator.parts()))


def spent_so_far(generator: GeneratorSection, path: Path) -> float:
    """Return the cost of all answers in the cache at `path`, 0 without one."""
    usage = stored_usage(path)
    return limits_of(generator, None).cost(usage.tokens_in, usage.tokens_out)


@dataclass
class SharedBudget:
    """The budget of a run, for one or more senders: `most` is the limit, `reserved` is for requests in flight."""

    most: float | None
    spent: float = 0.0
    reserved: float = 0.0
    n_reserved: int = 0
    empty: bool = False
    """Whether a request was not sent because it could have exceeded the budget."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def wake(self, *, everyone: bool = False) -> None:
        """Let the first waiting request (or all of them) try again."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                if not everyone:
                    return


class Budget:
    """The cost of one endpoint's requests at its prices, charged to a budget that is never exceeded."""

    def __init__(self, limits: Limits, shared: SharedBudget) -> None:
        self._limits = limits
        self.shared = shared

    @property
    def spent(self) -> float:
        """The cost so far, of all endpoints and senders that share the budget."""
        return self.shared.spent

    async def reserve(self, tokens_in: float, tokens_out: float, ending: Callable[[], bool]) -> float | None:
        """Reserve and return the most that a request may cost; None if that could exceed the budget, or at the end.

        Requests cost less than is reserved for them: while some are in flight, this waits for the rest of theirs.
        """
        most = self._limits.cost(tokens_in, tokens_out)
        shared = self.shared
        while shared.most is not None and shared.spent + shared.reserved + most > shared.most:
            if not shared.n_reserved:
                shared.empty = True
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            shared.waiting.append(future)
            await future
            if ending():
                return None
        shared.reserved += most
        shared.n_reserved += 1
        shared.wake()  # the rest may be enough for the next request, too
        return most

    def settle(self, reserved: float, tokens_in: int, tokens_out: int) -> None:
        """Replace a reservation by the cost of the answer."""
        self.shared.reserved -= reserved
        self.shared.n_reserved -= 1
        self.shared.spent += self._limits.cost(tokens_in, tokens_out)
        self.shared.wake()
