import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kinject.augment import augment
from kinject.llm import Transient
from kinject.llm.cache import AnswerCache
from kinject.llm.completions import PROMPT, CompletionsEndpoint
from kinject.llm.endpoint import Endpoint, is_loopback
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Completion

Make = Callable[..., Recipe]


def body(content: object = "text", reason: object = "stop", **rest: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
    return json.dumps({"choices": [choice], **rest}).encode()


def parsed(content: bytes) -> Completion:
    return Endpoint(
        GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1", max_tokens=100)
    ).parse(content)


def test_a_request_carries_what_the_recipe_says_and_the_key_in_its_header_alone(
    make_recipe: Make, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abc")
    keys: list[str] = []
    server = hostile(lambda talk, number: keys.append(talk.headers["authorization"]))
    settings = {"generator__temperature": 0.5, "generator__max_tokens": 77}
    augment(make_recipe(server.url, styles={"paraphrase": 1}, max_attempts=1, **settings))
    assert set(keys) == {"Bearer sk-abc"}
    request = json.loads(server.seen[0])
    assert b"sk-abc" not in server.seen[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("sandbox", 0.5, 77)
    assert isinstance(request["seed"], int)
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


def test_a_bad_request_counts_as_failed_and_is_reported_in_one_printable_line(
    make_recipe: Make, hostile: Any
) -> None:
    body = b'{"error": {"message": "context too long\\n\\u001b[31m' + b"x" * 500 + b'"}}'
    result = augment(
        make_recipe(hostile(lambda talk, number: talk.say(400, body)).url, styles={"paraphrase": 1})
    )
    (error,) = result.failed
    assert result.failed[error] == 12
    assert "answered 400 (context too long [31mxxx" in error
    assert len(error) < 350


def test_a_pause_that_the_endpoint_asks_for_is_kept(
    few: Callable[..., Recipe], hostile: Any
) -> None:
    server = hostile(
        lambda talk, number: None if number else talk.say(429, b"{}", retry_after="0.4")
    )
    began = time.monotonic()
    augment(few(server.url))
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices": 5}',
        b'{"choices": [5]}',
        body(["parts"]),
        body([{"type": "text", "text": 5}]),
        body({"type": "text", "text": "no list"}),
        b'{"choices": [{"message": {"con',
        b"\xff",
    ],
)
def test_a_body_that_is_no_completion_is_malformed(content: bytes) -> None:
    with pytest.raises(Transient, match="not a chat completion") as caught:
        parsed(content)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("content", "text", "thinking"),
    [
        (
            [{"type": "text", "text": "Two "}, {"type": "text", "text": "rivers."}],
            "Two rivers.",
            "",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "A."}],
            "A.",
            "",
        ),
        (
            [{"type": "text", "text": None}, {"kind": "odd"}, {"type": "text", "text": "A."}],
            "A.",
            "",
        ),
        ([{"type": "text", "text": "<reasoning>b</reasoning>A."}], "A.", "b"),
        ([{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "A."}], "A.", "b"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "b"}]}], "", "b"),
        ([], "", ""),
    ],
)
def test_a_content_of_parts_is_read(content: object, text: str, thinking: str) -> None:
    answer = parsed(body(content))
    assert (answer.text, answer.thinking, answer.finish_reason) == (text, thinking, "stop")


@pytest.mark.parametrize("reason", ["error", "insufficient_system_resource"])
def test_the_beginning_of_an_answer_that_broke_off_is_none(reason: str) -> None:
    with pytest.raises(Transient, match=f"broke off its answer .*{reason}") as caught:
        parsed(body("The Arn has its source in", reason))
    assert (caught.value.kind, caught.value.lost) == ("server error", True)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("STOP", "stop"), ("eos_token", "stop"), ("COMPLETE", "stop"), ("MAX_TOKENS", "length"),
        ("model_length", "length"), ("SAFETY", "content_filter"), ("BLOCKLIST", "content_filter"),
        ("content_filter: PROHIBITED_CONTENT", "content_filter"), ("tool_calls", "tool_calls"), (None, ""),
    ],
)  # fmt: skip
def test_a_finish_reason_is_given_in_the_words_of_openai(reason: str | None, expected: str) -> None:
    assert parsed(body("The Arn.", reason)).finish_reason == expected


def test_a_part_that_refuses_is_a_refusal() -> None:
    refusal = parsed(body([{"type": "refusal", "refusal": "Not this one."}]))
    assert (refusal.text, refusal.finish_reason) == ("", "content_filter")


def test_a_continued_text_with_half_characters_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"text": "Kelm\udce9 lies\x00 by Farrow", "finish_reason": "stop\udfff"}
    content = json.dumps({"choices": [choice]}).encode()
    section = GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1")
    endpoint = CompletionsEndpoint(section)

    async def post(body: object) -> SimpleNamespace:
        return SimpleNamespace(status_code=200, content=content, headers={})

    monkeypatch.setattr(endpoint, "_post", post)
    answer = asyncio.run(endpoint.complete([{"role": PROMPT, "content": "Where?"}], 3))
    with AnswerCache(tmp_path / "cache.sqlite") as cache:
        cache.put(b"key", answer)
        assert cache.get(b"key") == answer
    assert (answer.text, answer.finish_reason) == ("Kelm? lies\ufffd by Farrow", "stop")


def test_what_a_completion_lacks_is_reported_by_its_finish_reason() -> None:
    assert parsed(b'{"choices": []}').finish_reason == "no choices"
    assert parsed(body(None, "length")) == parsed(body("", "length"))
    refused = {
        "choices": [{"message": {"content": None, "refusal": "no"}, "finish_reason": "stop"}]
    }
    assert parsed(json.dumps(refused).encode()).finish_reason == "content_filter"
    counted = parsed(body("a\x00b \ud83d", usage={"prompt_tokens": 3, "completion_tokens": 4}))
    assert counted.text == "a\ufffdb ?"
    assert (counted.usage.tokens_in, counted.usage.tokens_out) == (3, 4)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True), ("http://localhost/v1", True), ("http://[::1]:80/v1", True),
        ("http://127.0.0.1.example.org/v1", False), ("https://api.openai.com/v1", False), ("http://10.0.0.1/v1", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
