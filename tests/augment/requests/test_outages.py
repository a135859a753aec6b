"""What is not the fault of one answer: addresses, keys, clocks, budgets, and an endpoint that goes and comes back."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_server import Hostile, Talk

from kinject.augment import augment
from kinject.doctor import answers
from kinject.errors import EndpointError, RecipeError
from kinject.llm.cache import AnswerCache
from kinject.llm.endpoint import parse_completion, retry_after
from kinject.recipe import Recipe
from kinject.types import Usage

Few = Callable[..., Recipe]
Start = Callable[[Callable[[Talk, int], bool | None]], Hostile]
PEM = Path(__file__).with_name("untrusted.pem")


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
    with pytest.raises(EndpointError, match=r"no connection \(.*\). Is the endpoint running\?.*So did the 1 requests"):
        augment(few(f"http://127.0.0.1:{_closed_port()}/v1"))

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EndpointError, match=r"no connection .*Name or service not known"):
        augment(few("http://no-such-host.invalid/v1"))


def test_no_secure_connection_stops_the_run_at_once_and_says_which_way_out(few: Few, hostile: Start) -> None:
    plain = hostile(lambda talk, number: None)
    with pytest.raises(EndpointError, match=r"no secure connection .*http or https") as caught:
        augment(few(plain.url.replace("http:", "https:")))
    assert caught.value.fatal
    secure = hostile(lambda talk, number: None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    secure.socket = context.wrap_socket(secure.socket, server_side=True)
    with pytest.raises(EndpointError, match=r"no secure connection .*SSL_CERT_FILE") as caught:
        augment(few(secure.url.replace("http:", "https:")))
    assert caught.value.fatal
    assert secure.seen == []


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "localhost:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://[::1/v1",
            "http://" + "a" * 70 + ".example/v1", "http://a b/v1", "http://a\nb/v1"],
)  # fmt: skip
def test_a_base_url_that_is_none_is_a_fault_of_the_recipe_and_no_probe_trips_over_it(few: Few, url: str) -> None:
    with pytest.raises(
        RecipeError, match=r"augment\.generator\.base_url: (found .* expected a URL such as|this is no address)"
    ):
        augment(few("http://127.0.0.1:1/v1", generator__base_url=url))
    assert not answers(url)


@pytest.mark.usefixtures("impatient")
def test_an_endpoint_that_goes_and_comes_back_is_waited_for(few: Few, hostile: Start) -> None:
    # Three times as many faults as one request may meet: none of them is the request's own.
    server = hostile(lambda talk, number: talk.reset() if 2 <= number < 26 else None)
    result = augment(few(server.url))
    assert (result.got, result.failed) == (4, {})
    assert len(server.good) == len(set(server.good)) == 4


@pytest.mark.usefixtures("impatient")
def test_an_endpoint_that_stays_away_stops_the_run_in_the_end(
    few: Few, hostile: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinject.llm.sender.MAX_SILENCE", 0.05)
    monkeypatch.setattr("kinject.llm.sender.N_FAILURES_IN_A_ROW", 2)
    server = hostile(lambda talk, number: talk.reset() if number >= 2 else None)
    with pytest.raises(EndpointError, match=r"no connection .* 2 rewritings are stored"):
        augment(few(server.url))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None), ({"retry-after": "3"}, 3.0), ({"retry-after-ms": "1500"}, 1.5), ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None), ({"retry-after": "1_0"}, None), ({"retry-after": "\u0665"}, None),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0), ({"retry-after": "+5"}, None), ({"retry-after": "5, 7"}, None),
        ({"retry-after": "1e999"}, None), ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:29:00 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 60.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"retry-after": "Fri, 99 Foo 99999 99:99:99 GMT"}, None), ({"retry-after": "9" * 5000}, None),
    ],
)  # fmt: skip
def test_a_retry_after_is_a_number_of_seconds_or_nothing(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


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
    assert parse_completion(json.dumps(value).encode(), "u", 10).usage == expected


PRICES = {"generator__price": [100.0, 100.0], "generator__max_tokens": 400}


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -(10**6), "completion_tokens": -(10**6)}])
def test_a_usage_that_is_missing_or_negative_does_not_make_the_budget_endless(
    few: Few, hostile: Start, usage: object
) -> None:
    def act(talk: Talk, number: int) -> bool:
        return talk.say(200, talk.completion(lambda value: value.update(usage=usage)))

    free = augment(few(hostile(act).url, budget=100.0, **PRICES))
    assert free.got == 4
    assert free.cost > 4 * 100e-6 * 100, "four prompts of more than a hundred tokens"
    assert "4 answers did not report their tokens" in free.cost_note


def test_a_lost_answer_is_counted_at_the_most_it_can_have_cost_in_this_run_and_the_next(
    few: Few, hostile: Start
) -> None:
    def act(talk: Talk, number: int) -> bool | None:
        return talk.say(200, b'{"choices": [{"mess') if number == 1 else None

    server = hostile(act)
    result = augment(few(server.url, budget=100.0, **PRICES))
    known = 4 * 150 * 100e-6  # the server says 100 tokens in, 50 out
    assert result.got == 4
    assert result.cost > known + 400 * 100e-6
    assert "1 answers were lost on the way" in result.cost_note
    again = augment(few(server.url, budget=100.0, **PRICES))
    assert (again.n_sent, again.cost) == (0, pytest.approx(result.cost))
    assert again.cost_note == ""


def test_a_failed_commit_is_told_to_everyone_who_waits_for_it(tmp_path: Path) -> None:
    import asyncio

    from kinject.types import Completion

    async def run() -> list[object]:
        with AnswerCache(tmp_path / "cache.sqlite") as cache:
            completions = [Completion("a"), Completion("b", "stop", Usage(2**70, 1))]
            kept = (cache.keep(bytes([number]), completion) for number, completion in enumerate(completions))
            return list(await asyncio.wait_for(asyncio.gather(*kept, return_exceptions=True), 60))

    assert [type(result) for result in asyncio.run(run())] == [OverflowError] * 2


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_takes_neither_documents_nor_key_to_another_host(few: Few, hostile: Start, status: int) -> None:
    other = hostile(lambda talk, number: None)
    away = {"location": other.url + "/chat/completions"}
    with pytest.raises(EndpointError, match="redirects requests to"):
        augment(few(hostile(lambda talk, number: talk.say(status, b"", **away)).url))
    assert other.seen == []
