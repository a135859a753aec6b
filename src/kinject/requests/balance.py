"""Sends each request to the endpoint that is expected to answer soonest; leaves alone those that fail, for growing pauses."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kinject.requests.generator import Generator, Transient
from kinject.requests.limits import AdaptiveConcurrency, Budget, Limits, RateLimit
from kinject.types import Usage

log = logging.getLogger(__name__)

FIRST_ENDPOINT_PAUSE, LONGEST_ENDPOINT_PAUSE = 0.5, 30.0
"""Seconds for which an endpoint is left alone after its faults, doubled each time, before one request tries it again."""
_FAULTS_UNTIL_PAUSE = 3
"""Faults in a row, without an answer in between."""
_NEWEST = 0.1
"""Weight of the newest answer in the mean latency."""
_MOST_SHOWN = 4


@dataclass
class EndpointState:
    """One endpoint of a run: its generator and limits, its requests in flight, its latency and its faults.

    `name` is its key in the recipe, "" for the only one. `latency` is the exponentially weighted mean of the seconds of an
    answer, 0 before the first. `closed` holds the error after which it gets no further request.
    """

    name: str
    generator: Generator
    limits: Limits
    budget: Budget
    n_sent: int = 0
    n_answered: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    usage: Usage = Usage()
    latency: float = 0.0
    closed: str = ""

    def __post_init__(self) -> None:
        prefix = f"{self.name}: " if self.name else ""
        self.concurrency = AdaptiveConcurrency(self.limits.concurrency)
        self.requests = RateLimit(self.limits.requests_per_minute, f"{prefix}requests_per_minute")
        self.tokens = RateLimit(self.limits.tokens_per_minute, f"{prefix}tokens_per_minute")
        self._pause = self._paused_until = 0.0
        self._faults_in_a_row = 0
        self._trying = False

    @property
    def is_paused(self) -> bool:
        """Whether it failed and has not answered since."""
        return bool(self._pause)

    @property
    def expected_wait(self) -> float:
        """Seconds until it has answered its requests in flight and one more: its latency, times load over capacity."""
        return self.latency * (self.concurrency.in_flight + 1) / self.concurrency.limit

    def wait(self, units: float) -> float:
        """Return the seconds until it can take a request of `units` tokens; infinite if that depends on another's end."""
        if self.closed or self.concurrency.is_full or self._trying:
            return math.inf
        pause = self._paused_until - monotonic() if self._pause else 0.0
        return max(pause, self.requests.wait(), self.tokens.wait(units), 0.0)

    def take(self, units: float) -> list[float]:
        """Count a request as in flight; return the entry of its tokens, for `tokens.settle`."""
        self._trying = self.is_paused
        self.concurrency.enter()
        self.requests.take()
        return self.tokens.take(units)

    def leave(self, *, overloaded: bool) -> None:
        """Count a request as ended."""
        self._trying = False
        self.concurrency.leave(overloaded=overloaded)

    def record_answer(self, usage: Usage, seconds: float) -> None:
        """Count an answer that took `seconds`."""
        self.n_answered += 1
        used = self.usage
        self.usage = Usage(
            used.tokens_in + usage.tokens_in, used.tokens_out + usage.tokens_out,
            used.tokens_thinking + usage.tokens_thinking,
        )  # fmt: skip
        self.latency += (seconds - self.latency) * (_NEWEST if self.latency else 1.0)
        self._pause = 0.0
        self._faults_in_a_row = 0

    def record_fault(self, fault: Transient, longest_wait: float) -> None:
        """Count a fault; an endpoint that gives nothing but faults, or asks for a pause, is left alone for a while."""
        self.faults[fault.kind] += 1
        overloaded = fault.kind == "overload"
        self._faults_in_a_row += not overloaded or self.concurrency.limit <= 1
        now = monotonic()
        requested_pause = min(fault.retry_after or 0.0, longest_wait)
        if self._faults_in_a_row >= _FAULTS_UNTIL_PAUSE and now >= self._paused_until:
            self._pause = min(2 * self._pause, LONGEST_ENDPOINT_PAUSE) or FIRST_ENDPOINT_PAUSE
            self._paused_until = now + self._pause
            if self._pause == FIRST_ENDPOINT_PAUSE:
                log.warning(f"{fault} {self.name} gets no requests for a while; the other endpoints continue.")
        if requested_pause and overloaded:
            self._pause = self._pause or FIRST_ENDPOINT_PAUSE
            self._paused_until = max(self._paused_until, now + requested_pause)

    def counts(self, n_answered: int) -> dict[str, Any]:
        """Return the manifest's entry; `n_answered` are the answers of all endpoints."""
        used = self.usage
        return {
            "generator": self.generator.name, "sent": self.n_sent, "answered": self.n_answered,
            "share": round(self.n_answered / max(1, n_answered), 4), "faults": dict(self.faults),
            "latency_seconds": round(self.latency, 3), "tokens_in": used.tokens_in, "tokens_out": used.tokens_out,
            "cost": self.limits.cost(used.tokens_in, used.tokens_out), **({"closed": self.closed} if self.closed else {}),
        }  # fmt: skip


@dataclass
class Turn:
    """The permission to send one request to `endpoint`; `entry` holds its tokens within the rate."""

    endpoint: EndpointState
    entry: list[float]


@dataclass
class _Waiting:
    future: asyncio.Future[Turn | None]
    units: float
    avoid: EndpointState | None


class LoadBalancer:
    """Gives each request, in order, an endpoint that can take it now: the one with the least expected wait.

    With requests enough, each endpoint has as many in flight as it can take, and faster ones get more of them. The
    expected wait is that of Finagle's Peak EWMA (mean latency times requests in flight), over the endpoint's capacity.
    """

    def __init__(self, endpoints: Sequence[EndpointState], stopping: Callable[[], bool]) -> None:
        self.endpoints = endpoints
        self._stopping = stopping
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, units: float, avoid: EndpointState | None = None) -> Turn | None:
        """Return the turn of a request of `units` tokens, elsewhere than at `avoid` if possible; None at the end of the run.

        Raises `EndpointError` if an endpoint could never take it.
        """
        for endpoint in self.endpoints:
            endpoint.tokens.check(units)
        if not self._waiting:
            best = self._best(units, avoid)
            if best is not None:
                return Turn(best, best.take(units))
        waiting = _Waiting(asyncio.get_running_loop().create_future(), units, avoid)
        self._waiting.append(waiting)
        self._wake()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled():
                turn = waiting.future.result()
                if turn is not None:
                    turn.endpoint.leave(overloaded=False)
            self._wake()
            raise

    def leave(self, turn: Turn, *, overloaded: bool) -> None:
        """Count a request as ended."""
        turn.endpoint.leave(overloaded=overloaded)
        self._wake()

    def stop(self) -> None:
        """End every wait: nothing more is sent."""
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_result(None)

    def others_continue(self, endpoint: EndpointState) -> bool:
        """Return whether another endpoint than this one answers, as far as is known."""
        return any(not (other is endpoint or other.closed or other.is_paused) for other in self.endpoints)

    def _best(self, units: float, avoid: EndpointState | None) -> EndpointState | None:
        """Return the endpoint that can take a request now and has the least expected wait, None if there is none."""
        if len(self.endpoints) == 1:
            return self.endpoints[0] if not self.endpoints[0].wait(units) else None
        ready = [endpoint for endpoint in self.endpoints if not endpoint.wait(units)]
        others = [endpoint for endpoint in ready if endpoint is not avoid]
        # Before the first answers, the load decides.
        return min(
            others or ready,
            key=lambda candidate: (
                candidate.expected_wait,
                candidate.concurrency.in_flight / candidate.concurrency.limit,
            ),
            default=None,
        )

    def _wake(self) -> None:
        """Give the first waiting requests their turn; if no endpoint can take one, try again as soon as one can."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopping():
            self.stop()
        while self._waiting:
            first = self._waiting[0]
            if first.future.done():
                self._waiting.popleft()
                continue
            endpoint = self._best(first.units, first.avoid)
            if endpoint is None:
                wait = min(candidate.wait(first.units) for candidate in self.endpoints)
                if math.isfinite(wait):
                    self._timer = asyncio.get_running_loop().call_later(wait, self._wake)
                return
            self._waiting.popleft()
            first.future.set_result(Turn(endpoint, endpoint.take(first.units)))

    def status(self) -> str:
        """Return each endpoint's part of the answers, and which do not answer; "" for one endpoint."""
        if len(self.endpoints) == 1:
            return ""
        total = sum(endpoint.n_answered for endpoint in self.endpoints)
        parts = [
            f"{endpoint.name} {endpoint.n_answered / max(1, total):.0%}" for endpoint in self.endpoints[:_MOST_SHOWN]
        ]
        if len(self.endpoints) > _MOST_SHOWN:
            parts = [f"{len(self.endpoints)} endpoints"]
        down = [endpoint.name for endpoint in self.endpoints if endpoint.closed or endpoint.is_paused]
        if down:
            more = f" and {len(down) - _MOST_SHOWN} more" if len(down) > _MOST_SHOWN else ""
            parts.append(f"no answers from {', '.join(down[:_MOST_SHOWN])}{more}")
        return ", ".join(parts)

    def counts(self) -> dict[str, Any]:
        """Return the manifest's entry: counts by endpoint; {} for one endpoint."""
        if len(self.endpoints) == 1:
            return {}
        total = sum(endpoint.n_answered for endpoint in self.endpoints)
        return {endpoint.name: endpoint.counts(total) for endpoint in self.endpoints}


def sum_counts(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the sum of several `LoadBalancer.counts` by endpoint."""
    names = dict.fromkeys(name for part in parts for name in part)
    rows = {name: [part[name] for part in parts if name in part] for name in names}
    n_answered = sum(row["answered"] for endpoint_rows in rows.values() for row in endpoint_rows)
    return {name: _sum_of(endpoint_rows, n_answered) for name, endpoint_rows in rows.items()}


def _sum_of(rows: Sequence[Mapping[str, Any]], n_answered: int) -> dict[str, Any]:
    answered = sum(row["answered"] for row in rows)
    seconds = sum(row["latency_seconds"] * row["answered"] for row in rows)
    total: dict[str, Any] = {
        **rows[-1], "share": round(answered / max(1, n_answered), 4), "latency_seconds": round(seconds / max(1, answered), 3),
        "faults": dict(sum((Counter(row["faults"]) for row in rows), Counter[str]())),
    }  # fmt: skip
    return total | {
        key: sum(row[key] for row in rows) for key in ("sent", "answered", "tokens_in", "tokens_out", "cost")
    }


def render_endpoints(endpoints: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of `LoadBalancer.counts` as lines; none without endpoints, or if nothing was sent to any."""
    if not any(count["sent"] for count in endpoints.values()):
        return []
    width = max(8, *map(len, endpoints))
    lines = ["", f"{'endpoint':<{width}}{'answered':>10}{'share':>8}{'latency':>10}{'cost':>10}  faults"]
    for name, count in endpoints.items():
        faults = ", ".join(f"{kind} {number}" for kind, number in count["faults"].items())
        lines.append(
            f"{name:<{width}}{count['answered']:>10,}{count['share']:>8.1%}{count['latency_seconds']:>8.2f} s"
            f"{count['cost']:>10.4f}  {count.get('closed') or faults}".rstrip()
        )
    return lines
