"""How much may be asked at once, in a minute and in all: concurrency that adapts, rate limits and a budget that hold."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

PERIOD = 60.0
"""Seconds of the window in which rate limits hold."""
_GROWTH = 0.1
"""What one answer adds to the number of requests allowed at once; a refusal takes 1 away."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use. Rates are per minute and None where there is none; prices are per million tokens.

    `budget` is in the currency of the prices and covers the run folder, earlier runs included.
    """

    concurrency: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    budget: float | None = None

    def cost(self, tokens_in: float, tokens_out: float) -> float:
        """Return what so many tokens cost."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6


class AdaptiveConcurrency:
    """Lets up to `limit` requests through at once; `limit` follows what the endpoint bears, from `most` down and back up.

    Each refusal for overload lowers it by one, so that a burst of four times an endpoint's capacity, of which three of
    four are refused, leaves just the capacity. Each answer raises it by a tenth: an endpoint that refuses fewer than
    one in ten at any load is used in full, and one at its capacity is probed by as much.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = float(most)
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when this request may be sent."""
        if self.in_flight < int(self.limit) and not self._waiting:
            self.in_flight += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.in_flight -= 1
            self._wake()
            raise

    def leave(self, *, overloaded: bool) -> None:
        """Count one request as ended."""
        self.in_flight -= 1
        self.limit = max(1.0, self.limit - 1) if overloaded else min(float(self.most), self.limit + _GROWTH)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.in_flight < int(self.limit):
            future = self._waiting.popleft()
            if not future.done():
                self.in_flight += 1
                future.set_result(None)


class RateLimit:
    """At most `per_period` units in any window of `PERIOD` seconds, retries included."""

    def __init__(self, per_period: int | None) -> None:
        self._limit = per_period
        self._spent: deque[list[float]] = deque()
        self._sum = 0.0
        self._turn = asyncio.Lock()

    async def take(self, units: float = 1.0) -> list[float]:
        """Return when `units` may be spent (more than the limit: when nothing else is), as an entry for `settle`."""
        entry = [time.monotonic(), units]
        if self._limit is None:
            return entry
        async with self._turn:
            while True:
                now = time.monotonic()
                while self._spent and self._spent[0][0] <= now - PERIOD:
                    self._sum -= self._spent.popleft()[1]
                if not self._spent or self._sum + units <= self._limit:
                    break
                # Looked at again soon: an answer may give back what was set aside for it.
                await asyncio.sleep(min(max(self._spent[0][0] + PERIOD - now, 0.001), 0.1))
            entry[0] = time.monotonic()
            self._spent.append(entry)
            self._sum += units
        return entry

    def settle(self, entry: list[float], units: float) -> None:
        """Correct an entry to what was really spent."""
        if self._limit is not None and entry[0] > time.monotonic() - PERIOD:
            self._sum += units - entry[1]
            entry[1] = units


@dataclass
class SharedBudget:
    """Money that several senders may share: `most` is the hard limit, `reserved` what requests in flight may cost."""

    most: float | None
    spent: float = 0.0
    reserved: float = 0.0
    n_reserved: int = 0
    empty: bool = False
    """Whether a request was not sent because it could have overdrawn it."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def wake(self, *, everyone: bool = False) -> None:
        """Let the first who waits for money (or everyone) look again."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                if not everyone:
                    return


class Budget:
    """What one sender's requests cost at its prices, out of a purse that must not be overdrawn."""

    def __init__(self, limits: Limits, tokens_in: int, tokens_out: int, purse: SharedBudget | None = None) -> None:
        """`tokens_in` and `tokens_out` were spent by earlier runs; without a `purse` it has one of its own."""
        self._limits = limits
        self.purse = purse or SharedBudget(limits.budget)
        self.purse.spent += limits.cost(tokens_in, tokens_out)

    @property
    def spent(self) -> float:
        """What was spent from the purse, by all who share it."""
        return self.purse.spent

    async def reserve(self, tokens_in: float, tokens_out: float, ending: Callable[[], bool]) -> float | None:
        """Return the most that a request may cost, set aside; None where that could cross the budget, or at the end.

        Requests cost less than is set aside for them: while some are in flight, it waits for what they give back.
        """
        most = self._limits.cost(tokens_in, tokens_out)
        purse = self.purse
        while purse.most is not None and purse.spent + purse.reserved + most > purse.most:
            if not purse.n_reserved:
                purse.empty = True
                return None
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            purse.waiting.append(future)
            await future
            if ending():
                return None
        purse.reserved += most
        purse.n_reserved += 1
        purse.wake()  # what was given back may be enough for the next one, too
        return most

    def settle(self, reserved: float, tokens_in: int, tokens_out: int) -> None:
        """Replace what was set aside by what the answer cost."""
        self.purse.reserved -= reserved
        self.purse.n_reserved -= 1
        self.purse.spent += self._limits.cost(tokens_in, tokens_out)
        self.purse.wake()
