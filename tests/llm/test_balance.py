"""Several endpoints: where requests go, what happens when one fails, and which model an answer is said to be of."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from faulty_server import Hostile, Talk
from kinject.augment import augment
from kinject.errors import RecipeError
from kinject.llm import Generator
from kinject.llm.cache import request_key
from kinject.llm.limits import EndpointState, LoadBalancer
from kinject.llm.sender import generator_identity
from kinject.recipe import GeneratorSection, Recipe

Make = Callable[..., Recipe]
Start = Callable[[Callable[[Talk, int], bool | None]], Hostile]
pytestmark = pytest.mark.usefixtures("exact_copies_only")


@pytest.fixture
def over(make_recipe: Make) -> Make:
    """A recipe over several servers, three requests in flight at each: over([server, ...], key=value, ...)."""

    def make(servers: Any, **fields: Any) -> Recipe:
        urls = [server.url for server in servers]
        generator = {"kind": "openai", "model": "sandbox", "concurrency": 3, "base_url": urls}
        return make_recipe(None, generator=generator | fields.pop("generator", {}), **fields)

    return make


def good(talk: Talk, number: int) -> None:
    return None


def paid(servers: list[Hostile]) -> Counter[bytes]:
    """Count the answers to each request, whichever server and model gave them."""
    requests = [{**json.loads(body), "model": ""} for server in servers for body in server.good]
    return Counter(json.dumps(request).encode() for request in requests)


def test_the_address_is_no_part_of_a_models_identity() -> None:
    alone = GeneratorSection("openai", model="m", base_url="http://a/v1")
    moved = GeneratorSection("openai", model="m", base_url="http://b/v1")
    several = GeneratorSection("openai", model="m", base_url=("http://a/v1", "http://b/v1"))
    assert generator_identity(alone) == generator_identity(moved) == generator_identity(several)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"extra_body": {}}, {}, True),
        ({"chat_template_kwargs": {}}, {"stop": ()}, True),
        (
            {"extra_body": {"top_k": 20.0, "a": [0.0]}},
            {"extra_body": {"a": [0], "top_k": 20}},
            True,
        ),
        ({"extra_body": {"top_k": 20.5}}, {"extra_body": {"top_k": 20}}, False),
        ({"extra_body": {"top_k": None}}, {}, False),
    ],
)
def test_an_answer_is_not_paid_again_for_another_spelling(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    keys = [
        request_key(generator_identity(GeneratorSection(kind="openai", model="m", **more)), [], 0)
        for more in (one, other)
    ]
    assert (keys[0] == keys[1]) == same


def test_one_of_four_that_dies_half_way_loses_nothing_and_nothing_is_paid_twice(
    over: Make, hostile: Start
) -> None:
    servers = [hostile(good) for _ in range(3)]
    servers.append(hostile(lambda talk, number: talk.reset() if number >= 5 else None))
    result = augment(over(servers, styles={"paraphrase": 12}))
    assert (result.got, result.failed, result.refused) == (144, {}, {})
    counts = paid(servers)
    assert (len(counts), set(counts.values())) == (144, {1})
    assert len(servers[3].good) == 5
    assert len(servers[3].seen) - 5 < 20  # the others are expected to answer sooner


def test_a_list_of_addresses_is_as_many_endpoints(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    servers = [serving(latency=0.01) for _ in range(3)]
    urls = [server.url for server in servers]
    generator = {"kind": "openai", "model": "sandbox", "base_url": urls, "concurrency": 2}
    result = augment(make_recipe(None, generator=generator, styles={"paraphrase": 6}))
    assert (result.got, result.failed) == (72, {})
    assert [server.most_in_flight for server in servers] == [2, 2, 2]
    one = generator | {"base_url": urls[0]}
    assert (
        augment(make_recipe(None, generator=one, styles={"paraphrase": 6})).n_sent == 0
    )  # the same ids


@pytest.mark.parametrize(
    ("generator", "fault"),
    [
        ({"base_url": ["http://a/v1", "ftp://b"]}, "augment.generator.base_url.1: this is no address"),
        ({"base_url": ["http://me:secret@a/v1"]}, "augment.generator.base_url.0: the URL holds a name or password"),
    ],
)  # fmt: skip
def test_faults_of_a_list_of_addresses_are_reported(
    make_recipe: Make, generator: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        augment(make_recipe(None, generator={"kind": "openai", "model": "sandbox"} | generator))
    assert fault in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_request_goes_where_the_answer_comes_soonest() -> None:
    async def run() -> list[str]:
        generators = [
            Generator(name, {}, True, lambda messages, seed: asyncio.sleep(0)) for name in "abc"
        ]
        states = [
            EndpointState(one, most) for one, most in zip(generators, (8, 8, 80), strict=True)
        ]
        for endpoint, seconds in zip(states, (1.0, 4.0, 4.0), strict=True):
            endpoint.record_answer(seconds)
        balancer = LoadBalancer(states)
        chosen = [await balancer.enter(lambda: False) for _ in range(24)]
        return [endpoint.generator.name for endpoint in chosen if endpoint]

    # The k-th request of an endpoint is expected to wait k/8, 4k/8 and 4k/80 seconds: the 24 shortest of these.
    assert Counter(asyncio.run(run())) == {"a": 6, "b": 1, "c": 17}
