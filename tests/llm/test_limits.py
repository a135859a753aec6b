import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kinject.augment import augment
from kinject.llm import Generator
from kinject.llm.limits import Budget, EndpointState, Limits, LoadBalancer
from kinject.llm.sender import Sender
from kinject.recipe import Recipe
from kinject.types import Completion, Usage

Make = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("exact_copies_only")


def gate_of(most: int) -> LoadBalancer:
    """Return the gate of one endpoint that is sent at most `most` requests at once."""
    generator = Generator("test", {}, True, lambda messages, seed: asyncio.sleep(0))
    return LoadBalancer([EndpointState(generator, most)])


def drive(most: int, capacity: int, n: int) -> list[float]:
    """Send `n` requests to an endpoint that serves `capacity` at once and refuses the rest; return the limit after each."""
    limits: list[float] = []
    served = 0
    gate = gate_of(most)

    async def one() -> None:
        nonlocal served
        endpoint = await gate.enter(lambda: False)
        assert endpoint is not None
        refused = served >= capacity
        if not refused:
            served += 1
            for _ in range(20):
                await asyncio.sleep(0)
            served -= 1
        gate.leave(endpoint, overloaded=refused)
        limits.append(endpoint.limit)

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(n)))

    asyncio.run(run())
    return limits


def test_the_gate_finds_what_the_endpoint_bears_and_stays_near_it() -> None:
    assert all(32 <= limit < 42 for limit in drive(128, capacity=32, n=2000)[200:])


def test_the_gate_never_closes() -> None:
    assert min(drive(16, capacity=0, n=300)) == 1.0


def test_an_endpoint_that_takes_few_at_once_gets_all_answered(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving(latency=0.005, capacity=4)
    result = augment(make_recipe(server.url, styles={"paraphrase": 8}, generator__concurrency=32))
    assert (result.got, result.failed) == (96, {})
    assert server.most_in_flight == 4


@pytest.mark.parametrize(
    ("text", "least"), [("桥在河上。" * 8, 40), ("पुल " * 20, 60), ("bridge" * 20, 40)]
)
def test_an_answer_without_usage_costs_about_what_its_script_takes(text: str, least: int) -> None:
    async def complete(messages: object, seed: int) -> Completion:
        return Completion("")

    sender = Sender([Generator("test", {}, True, complete)], None, Limits(1, price_in=1e6))
    asyncio.run(sender.send([{"role": "user", "content": text}], 3))
    assert least <= sender.budget.spent <= 2 * least


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_in_extra_body_is_what_an_answer_may_cost(name: str) -> None:
    async def complete(messages: object, seed: int) -> Completion:
        await asyncio.sleep(0)
        return Completion("a", usage=Usage(1, 450))

    async def run() -> None:
        requests = (sender.send([{"role": "user", "content": "b"}], seed) for seed in range(2))
        await asyncio.gather(*requests, return_exceptions=True)

    identity = {"max_tokens": 10, "extra_body": {name: 500}}
    limits = Limits(2, price_out=1e6, budget=600.0)
    sender = Sender([Generator("test", identity, True, complete)], None, limits)
    asyncio.run(run())
    assert (sender.budget.spent, sender.out_of_budget) == (450, True)


def test_a_budget_stops_the_run_before_it_is_crossed_and_keeps_what_was_paid_for(
    make_recipe: Make, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving()
    set_aside = [0.0]  # for the dearest request
    reserve = Budget.reserve

    async def spied(budget: Budget, cost: float, ending: Callable[[], bool]) -> bool:
        set_aside[0] = max(set_aside[0], cost)
        return await reserve(budget, cost, ending)

    monkeypatch.setattr(Budget, "reserve", spied)

    def run(budget: float) -> Any:
        generator = {"max_tokens": 100, "concurrency": 4, "price": [1.0, 4.0]}
        settings = {f"generator__{key}": value for key, value in generator.items()}
        return augment(make_recipe(server.url, budget=budget, **settings))

    result = run(0.01)
    assert (result.out_of_budget, result.short) == (True, True)
    # What is set aside for requests in flight is used once they give it back: it ends when not one more can be paid for.
    assert 0.01 - set_aside[0] < result.cost <= 0.01
    assert 0 < result.got < 36
    again = run(0.01)
    assert again.out_of_budget
    assert again.cost <= 0.01
    unstopped = run(1.0)
    assert (unstopped.got, unstopped.n_sent, unstopped.out_of_budget) == (
        36,
        36 - result.n_sent - again.n_sent,
        False,
    )
