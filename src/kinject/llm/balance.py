"""Sends each request to the endpoint that is expected to answer soonest. A fault doubles what is expected of an endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinject.llm.generator import Generator, Transient
from kinject.llm.limits import Limits
from kinject.types import Usage

_NEWEST = 0.1
"""Weight of the newest answer in the mean latency."""
_LEAST_LATENCY, _MOST_LATENCY = 0.1, 60.0
"""Seconds that an endpoint is taken to need after a fault, doubled each time, so that the others get the requests."""
_GROWTH = 0.1
"""Added to the concurrency limit by each answer; each refusal for overload subtracts 1."""


@dataclass(eq=False)
class EndpointState:
    """One endpoint of a run: its generator and limits, its requests in flight, its latency and its faults.

    `name` is its key in the recipe, "" for the only one. `most_in_flight` starts at the recipe's concurrency and follows
    the endpoint's capacity: of a burst of four times the capacity three in four are refused, which leaves the capacity.
    `latency` is the exponentially weighted mean of the seconds of an answer, 0 before the first, longer after faults.
    `closed` holds the error after which it gets no further request.
    """

    name: str
    generator: Generator
    limits: Limits
    n_sent: int = 0
    n_answered: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    usage: Usage = Usage()
    latency: float = 0.0
    closed: str = ""
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.most_in_flight = float(self.limits.concurrency)

    def expected_wait(self) -> tuple[float, float]:
        """Seconds until it has answered its requests in flight and one more; before the first answers, the load decides.

        That of Finagle's Peak EWMA (mean latency times requests in flight), over the endpoint's capacity.
        """
        load = (self.in_flight + 1) / self.most_in_flight
        return self.latency * load, load

    @property
    def is_full(self) -> bool:
        """Whether it takes no request until one has ended."""
        return self.in_flight >= int(self.most_in_flight)

    def leave(self, *, overloaded: bool) -> None:
        """Count a request as ended."""
        self.in_flight -= 1
        changed = self.most_in_flight + (-1 if overloaded else _GROWTH)
        self.most_in_flight = max(1.0, min(float(self.limits.concurrency), changed))

    def record_answer(self, usage: Usage, seconds: float) -> None:
        """Count an answer that took `seconds`."""
        self.n_answered += 1
        self.usage = self.usage + usage
        self.latency += (seconds - self.latency) * (_NEWEST if self.latency else 1.0)

    def record_fault(self, fault: Transient) -> None:
        """Count a fault."""
        self.faults[fault.kind] += 1
        self.latency = min(max(2 * self.latency, fault.retry_after or 0.0, _LEAST_LATENCY), _MOST_LATENCY)

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
class _Waiting:
    future: asyncio.Future[EndpointState | None]
    failed: Collection[EndpointState]


class LoadBalancer:
    """Gives each request, in order, its turn at the endpoint with the least expected wait."""

    def __init__(self, endpoints: Sequence[EndpointState], stopping: Callable[[], bool]) -> None:
        self.endpoints = endpoints
        self._stopping = stopping
        self._waiting: deque[_Waiting] = deque()

    async def enter(self, failed: Collection[EndpointState] = ()) -> EndpointState | None:
        """Return the endpoint of the next request, none of `failed` if possible; None at the end of the run."""
        waiting = _Waiting(asyncio.get_running_loop().create_future(), failed)
        self._waiting.append(waiting)
        self._wake()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            chosen = waiting.future.result() if waiting.future.done() and not waiting.future.cancelled() else None
            if chosen is not None:
                chosen.leave(overloaded=False)
            self._wake()
            raise

    def leave(self, endpoint: EndpointState, *, overloaded: bool) -> None:
        """Count a request as ended."""
        endpoint.leave(overloaded=overloaded)
        self._wake()

    def stop(self) -> None:
        """End every wait: nothing more is sent."""
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_result(None)

    def others(self, failed: Collection[EndpointState]) -> list[EndpointState]:
        """Return the endpoints that are open and not in `failed`."""
        return [endpoint for endpoint in self.endpoints if not endpoint.closed and endpoint not in failed]

    def _wake(self) -> None:
        """Give the first waiting requests their turn, while an endpoint can take one."""
        if self._stopping():
            self.stop()
        while self._waiting:
            first = self._waiting[0]
            if first.future.done():
                self._waiting.popleft()
                continue
            fitting = self.others(first.failed) or self.others(())
            endpoint = min(fitting, key=lambda endpoint: endpoint.expected_wait())
            if endpoint.is_full:
                return
            self._waiting.popleft()
            endpoint.in_flight += 1
            first.future.set_result(endpoint)

    def status(self) -> str:
        """Return how many endpoints answer, and which do not; "" for one endpoint."""
        if len(self.endpoints) == 1:
            return ""
        down = [endpoint.name for endpoint in self.endpoints if endpoint.closed]
        without = f", no answers from {', '.join(down)}" if down else ""
        return f"{len(self.endpoints)} endpoints{without}"

    def counts(self) -> dict[str, Any]:
        """Return the manifest's entry: counts by endpoint; {} for one endpoint."""
        if len(self.endpoints) == 1:
            return {}
        total = sum(endpoint.n_answered for endpoint in self.endpoints)
        return {endpoint.name: endpoint.counts(total) for endpoint in self.endpoints}


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
