"""What is not the fault of one answer: addresses, keys, clocks, budgets, and an endpoint that goes and comes back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest

from faulty_server import Hostile, Talk
from kinject.augment import augment
from kinject.errors import EndpointError, RecipeError
from kinject.llm import Transient, read_usage
from kinject.llm.endpoint import Endpoint, retry_after
from kinject.llm.error_replies import read_error
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Usage

Few = Callable[..., Recipe]
Start = Callable[[Callable[[Talk, int], bool | None]], Hostile]


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 2)
    monkeypatch.setattr("kinject.llm.sender.N_FAILURES_IN_A_ROW", 2)


def _closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.mark.usefixtures("one_try")
def test_a_refused_connection_and_a_name_without_an_address_end_the_run_with_their_reason(
    few: Few, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EndpointError,
        match=r"no connection \(.*\). Is the endpoint running\?.*So did the 1 requests",
    ):
        augment(few(f"http://127.0.0.1:{_closed_port()}/v1"))

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EndpointError, match=r"no connection .*Name or service not known"):
        augment(few("http://no-such-host.invalid/v1"))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "localhost:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://[::1/v1",
            "http://" + "a" * 70 + ".example/v1", "http://a b/v1", "http://a\nb/v1"],
)  # fmt: skip
def test_a_base_url_that_is_none_is_a_fault_of_the_recipe(few: Few, url: str) -> None:
    with pytest.raises(
        RecipeError,
        match=r"augment\.generator\.base_url: (found .* expected a URL such as|this is no address)",
    ):
        augment(few("http://127.0.0.1:1/v1", generator__base_url=url))


def test_a_model_that_an_endpoint_does_not_list_is_reported_with_those_that_it_does(
    few: Few, hostile: Start
) -> None:
    server = hostile(lambda talk, number: talk.say(404, b'{"error": "as ordered"}'))
    with pytest.raises(
        EndpointError, match=r"no model 'sand' \(404: as ordered\). It offers sandbox, other"
    ):
        augment(few(server.url, generator__model="sand"))


@pytest.mark.usefixtures("impatient")
def test_an_endpoint_that_goes_and_comes_back_is_waited_for(few: Few, hostile: Start) -> None:
    # Three times as many faults as one request may meet: none of them is the request's own.
    server = hostile(lambda talk, number: talk.reset() if 2 <= number < 26 else None)
    result = augment(few(server.url))
    assert (result.got, result.failed) == (4, {})
    assert len(server.good) == len(set(server.good)) == 4


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None), ({"retry-after": "3"}, 3.0), ({"retry-after": "0.5"}, 0.5), ({"retry-after": "-1"}, None),
        ({"retry-after-ms": "1250", "retry-after": "2"}, 1.25), ({"retry-after-ms": "soon", "retry-after": "4"}, 4.0),
        ({"retry-after": "nan"}, None), ({"retry-after": "soon"}, None), ({"retry-after": "9" * 5000}, None),
    ],
)  # fmt: skip
def test_a_retry_after_is_a_number_of_seconds_or_nothing(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize(
    ("delay", "seconds"), [("41s", 41.0), ("0.750s", 0.75), ("41", None), ("soon", None), (7, None), (None, None)]
)  # fmt: skip
def test_the_delay_in_googles_body_is_waited_for(delay: object, seconds: float | None) -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}
    details = [{"@type": "type.googleapis.com/google.rpc.Help"}, info]
    body = json.dumps([{"error": {"code": 429, "message": "wait", "details": details}}]).encode()
    endpoint = Endpoint(GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1"))
    for headers, expected in (({}, seconds), ({"retry-after": "3"}, 3.0)):
        error = asyncio.run(endpoint.reported_error(read_error(429, body), headers))
        assert isinstance(error, Transient)
        assert error.retry_after == expected


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, Usage(3, 4)), ({}, Usage()), (None, Usage()), ([], Usage()),
        ({"prompt_tokens": -3, "completion_tokens": 4.0}, Usage(0, 4)),
        ({"prompt_tokens": 10**7 + 1, "completion_tokens": float("nan")}, Usage()),
        ({"prompt_tokens": True, "completion_tokens": "12"}, Usage()),
    ],
)  # fmt: skip
def test_a_usage_that_cannot_be_counts_as_none(usage: object, expected: Usage) -> None:
    value = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": usage}
    endpoint = Endpoint(GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1"))
    assert endpoint.parse(json.dumps(value).encode()).usage == expected


@pytest.mark.parametrize(
    ("n_in", "n_out", "total", "n_thinking", "expected"),
    [
        (32, 9, 135, 94, Usage(32, 103, 94)),
        (20, 198, 623, None, Usage(20, 603)),
        (70, 50, 120, 30, Usage(70, 50, 30)),
        (0, 40, 90, None, Usage(0, 40)),
        (70, 50, 10, None, Usage(70, 50)),
    ],
)
def test_thinking_that_the_total_alone_has_is_counted(
    n_in: int, n_out: int, total: int, n_thinking: int | None, expected: Usage
) -> None:
    details = {"reasoning_tokens": n_thinking}
    usage = {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": total}
    assert read_usage({**usage, "completion_tokens_details": details}) == expected


PRICES = {"generator__price": [100.0, 100.0], "generator__max_tokens": 400}


@pytest.mark.parametrize(
    "usage", [None, {"prompt_tokens": -(10**6), "completion_tokens": -(10**6)}]
)
def test_a_usage_that_is_missing_or_negative_does_not_make_the_budget_endless(
    few: Few, hostile: Start, usage: object
) -> None:
    def act(talk: Talk, number: int) -> bool:
        return talk.say(200, talk.completion(lambda value: value.update(usage=usage)))

    free = augment(few(hostile(act).url, budget=100.0, **PRICES))
    assert free.got == 4
    assert free.cost > 4 * 100e-6 * 100, "four prompts of more than a hundred tokens"


def test_a_lost_answer_is_counted_at_the_most_it_can_have_cost(few: Few, hostile: Start) -> None:
    def act(talk: Talk, number: int) -> bool | None:
        return talk.say(200, b'{"choices": [{"mess') if number == 1 else None

    server = hostile(act)
    result = augment(few(server.url, budget=100.0, **PRICES))
    known = 4 * 150 * 100e-6  # the server says 100 tokens in, 50 out
    assert result.got == 4
    assert result.cost > known + 400 * 100e-6


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_takes_neither_documents_nor_key_to_another_host(
    few: Few, hostile: Start, status: int
) -> None:
    other = hostile(lambda talk, number: None)
    away = {"location": other.url + "/chat/completions"}
    with pytest.raises(EndpointError, match="redirects requests to"):
        augment(few(hostile(lambda talk, number: talk.say(status, b"", **away)).url))
    assert other.seen == []
