"""Chat models as they are: parameters that an endpoint refuses, thinking in answers, servers without a key."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kinject.augment import augment
from kinject.errors import EndpointError
from kinject.llm.endpoint import Endpoint
from kinject.llm.thinking import split_thinking, thinking_marks
from kinject.recipe import GeneratorSection, Recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("An answer.", "", "An answer."),
        ("2 < 3 and <b>bold</b>.", "", "2 < 3 and <b>bold</b>."),
        ("<think>\na\n\nb\n</think>\n\nAn answer.", "a\n\nb", "An answer."),
        ("<think></think>An answer.", "", "An answer."),
        ("no opening tag\n</think>\nAn answer.", "no opening tag", "An answer."),
        ("<think>never ends", "never ends", ""),
        ("[THINK]a[/THINK]An answer.", "a", "An answer."),
        ("<|channel>thought\na\n<channel|>An answer.", "thought\na", "An answer."),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>An answer.<|return|>",
            "a",
            "An answer.",
        ),
        ("<|channel|>analysis<|message|>cut in the middle", "cut in the middle", ""),
        (
            "<|channel|>commentary to=x <|constrain|>json<|message|>b<|call|><|channel|>final<|message|>An answer.",
            "b",
            "An answer.",
        ),
        ("<thinking>\nTwo rivers.\n</thinking>\nThe Arn.", "Two rivers.", "The Arn."),
        ("<reasoning>Two.</reasoning>The Arn.", "Two.", "The Arn."),
        ("<seed:think>Two.</seed:think>The Arn.", "Two.", "The Arn."),
        ("<longcat_think>Two.</longcat_think>The Arn.", "Two.", "The Arn."),
        ("<Thought>Two.</THOUGHT >The Arn.", "Two.", "The Arn."),
        ('<think budget="300" lang=\'en\'>Two.</think>The Arn.', "Two.", "The Arn."),
        ("<REASONING>so <b>Two", "so <b>Two", ""),
        ("<seed:think effort=low>Two", "Two", ""),
        ("Two.</seed:think>\n\nThe Arn.", "Two.", "The Arn."),
        ("<think>Two.</thinking>The Arn.", "Two.", "The Arn."),  # closed by another name
        (
            "<thinking>I close <reasoning>this</reasoning> first.</thinking>The Arn.",
            "I close <reasoning>this</reasoning> first.",
            "The Arn.",
        ),
        ("<think/>The Arn.", "", "The Arn."),
        ("<think>One.</think>\n<thinking>Two.</thinking>\nThe Arn.", "One.\n\nTwo.", "The Arn."),
        ("Let me see.\n<thinking>Two.</thinking>\nThe Arn.", "Let me see.\nTwo.", "The Arn."),
        ("Write <thinking> and </thinking> in pairs.", "", "Write <thinking> and </thinking> in pairs."),
        ("The <thinker> sits. </thinker>", "", "The <thinker> sits. </thinker>"),
    ],
)  # fmt: skip
def test_thinking_is_taken_off_the_answer(text: str, thinking: str, answer: str) -> None:
    assert split_thinking(text) == (thinking, answer)


def test_blocks_of_thinking_without_end_take_no_time_without_end() -> None:
    def _seconds(n: int) -> float:
        began = time.process_time()
        split_thinking("<think></reasoning>" * n)
        return time.process_time() - began

    short = min(_seconds(1_000) for _ in range(3))
    # four times as much text: a square would take sixteen times as long
    assert min(_seconds(4_000) for _ in range(3)) < 10 * short + 0.1


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        ("{{ '<seed:think>' }}", "<seed:think>"),
        ("{{ content.split('</reasoning>')[-1] }}", "<reasoning>"),
        ("{{ content.split('[/THINK]')[-1] }}", "[THINK]"),
    ],
)
def test_the_marks_of_a_chat_template_are_found(template: str, opens: str) -> None:
    marks = thinking_marks(template)
    assert marks is not None
    assert (marks.opens, marks.closes) == (opens, f"{opens[0]}/{opens[1:]}")
    assert marks.are_open(f"a prompt{opens}\n")


def test_settings_of_the_recipe_are_sent_and_are_part_of_the_cache_key(
    make_recipe: Make, hostile: Any
) -> None:
    server = hostile(lambda talk, number: None)
    options = {
        "stop": ["###"], "chat_template_kwargs": {"enable_thinking": False},
        "extra_body": {"repetition_penalty": 1.1, "top_p": 0.9, "reasoning_effort": "low"},
    }  # fmt: skip
    settings = {f"generator__{name}": value for name, value in options.items()}
    result = augment(make_recipe(server.url, styles={"paraphrase": 1}, **settings))
    sent = json.loads(server.seen[0])
    assert sent.items() >= {
        "stop": ["###"], "chat_template_kwargs": {"enable_thinking": False}, "repetition_penalty": 1.1, "top_p": 0.9,
        "reasoning_effort": "low",
    }.items()  # fmt: skip
    assert result.n_sent == 12
    assert augment(make_recipe(server.url, styles={"paraphrase": 1}, **settings)).n_sent == 0
    settings["generator__extra_body"] = {"top_p": 0.5}
    assert augment(make_recipe(server.url, styles={"paraphrase": 1}, **settings)).n_sent == 12


def test_a_key_in_thinking_is_redacted(canary_key: str) -> None:
    message = {"content": "An answer.", "reasoning": f"the key is {canary_key}"}
    reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    answer = Endpoint(
        GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1")
    ).parse(reply)
    assert (answer.text, answer.finish_reason) == ("An answer.", "stop")
    assert canary_key not in answer.thinking
    assert "the key is" in answer.thinking


def test_a_text_that_only_thinks_has_no_answer() -> None:
    reply = json.dumps(
        {"choices": [{"message": {"content": "<think>so"}, "finish_reason": "length"}]}
    ).encode()
    answer = Endpoint(
        GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1")
    ).parse(reply)
    assert (answer.text, answer.finish_reason, answer.thinking) == ("", "length", "so")


LIMITS = ("max_tokens", "max_completion_tokens")


def refusing(name: str, message: str, status: int = 400, **error: str) -> Callable[..., Any]:
    """Return the script of a server that refuses the parameter `name`."""
    content = json.dumps({"error": {"message": message, **error}}).encode()

    def act(talk: Any, number: int) -> bool | None:
        return talk.say(status, content) if name in json.loads(talk.body) else None

    return act


def limits_sent(server: Any) -> list[str]:
    """Return the name of the limit in each request."""
    return [name for body in server.seen for name in LIMITS if name in json.loads(body)]


@pytest.mark.parametrize(
    ("message", "status", "error"),
    [
        ("Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'.", 400, {}),
        ("This argument is not taken here.", 400, {"param": "max_tokens"}),
        ("[{'loc': ['body', 'max_tokens'], 'msg': 'Extra inputs are not permitted'}]", 422, {}),
        ("max_tokens: unknown, at most one limit", 400, {"code": "unknown_parameter"}),
    ],
)  # fmt: skip
def test_a_limit_that_the_server_refuses_is_sent_under_its_other_name(
    message: str, status: int, error: dict[str, str], few: Make, hostile: Any
) -> None:
    server = hostile(refusing("max_tokens", message, status, **error))
    result = augment(few(server.url, generator__max_tokens=333))
    assert (result.got, result.failed) == (4, {})
    assert limits_sent(server) == [LIMITS[0], *[LIMITS[1]] * 4], "tried once, then remembered"
    assert {json.loads(body)[LIMITS[1]] for body in server.seen[1:]} == {333}


def test_requests_in_flight_while_the_name_is_found_out_are_answered_too(
    make_recipe: Make, hostile: Any
) -> None:
    server = hostile(refusing("max_tokens", "no max_tokens, please"))
    result = augment(
        make_recipe(server.url, styles={"paraphrase": 1}, max_attempts=1, generator__concurrency=6)
    )
    assert result.failed == {}
    assert limits_sent(server).count(LIMITS[0]) <= 6
    assert limits_sent(server).count(LIMITS[1]) == 12


def test_a_limit_that_is_refused_under_both_names_is_reported_by_its_first_message(
    few: Make, hostile: Any
) -> None:
    def act(talk: Any, number: int) -> bool:
        (name,) = [name for name in LIMITS if name in json.loads(talk.body)]
        return talk.say(400, json.dumps({"detail": f"{name} must be even"}).encode())

    server = hostile(act)
    result = augment(few(server.url))
    ((error, n),) = result.failed.items()
    assert n == 4
    assert "answered 400 (max_tokens must be even)" in error
    assert limits_sent(server).count(LIMITS[1]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # The other name might be ignored, and the answer be without a limit.
        ({}, "max_tokens is too large: 1024. This model writes at most 900."),
        ({}, "Invalid max_tokens value, its valid range is [1, 900]"),
        ({}, "max_tokens must be between 1 and 900"),
        ({}, "temperature is not supported."),
        ({"generator__extra_body": {"max_tokens": 640}}, "max_tokens is not supported."),
    ],
)
def test_a_limit_keeps_its_name_where_the_name_is_not_at_fault(
    settings: dict[str, object], message: str, few: Make, hostile: Any
) -> None:
    server = hostile(refusing("max_tokens", message))
    assert sum(augment(few(server.url, **settings)).failed.values()) == 4
    assert limits_sent(server) == [LIMITS[0]] * 4


@pytest.mark.parametrize(
    ("extra_body", "expected"),
    [
        ({"max_completion_tokens": 700}, {"max_completion_tokens": 700}),
        ({"max_tokens": 90, "top_k": 5}, {"max_tokens": 90}),
        ({"max_tokens": None}, {}),
    ],
)
def test_a_limit_that_the_recipe_names_is_sent_as_it_names_it(
    extra_body: dict[str, Any], expected: dict[str, int]
) -> None:
    section = GeneratorSection(
        "openai", model="m", base_url="http://127.0.0.1:9/v1", extra_body=extra_body
    )
    body = Endpoint(section).body([], 1)
    assert {name: body[name] for name in LIMITS if name in body} == expected


@pytest.mark.parametrize(
    ("extra_body", "is_whole"),
    [
        ({}, False),
        ({"top_k": 5, "max_tokens": 16}, False),
        ({"max_completion_tokens": 700}, True),
        ({"max_tokens": 90}, True),
        ({"max_tokens": None}, True),
    ],
)
def test_a_long_answer_is_whole_where_the_limit_that_is_sent_allows_it(
    extra_body: dict[str, Any], is_whole: bool
) -> None:
    section = GeneratorSection("openai", model="m", max_tokens=16, base_url="http://127.0.0.1:9/v1")
    text = "A step. " * 300 + "So the answer is C."
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    endpoint = Endpoint(replace(section, extra_body=extra_body))
    answer = endpoint.parse(json.dumps({"model": "m", "choices": [choice]}).encode())
    expected = (text, "stop") if is_whole else (text[: 16 * 128], "length")
    assert (answer.text, answer.finish_reason) == expected


def test_a_parameter_that_extra_body_has_as_null_is_left_out() -> None:
    other = Endpoint(
        GeneratorSection(
            "openai",
            model="m",
            base_url="http://10.0.0.1/v1",
            extra_body={"seed": None, "temperature": None},
        )
    ).body([], 1)
    assert other["max_tokens"] == 1024
    assert "max_completion_tokens" not in other
    assert not {"seed", "temperature"} & set(other)


def test_a_server_without_a_key_works_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Endpoint(GeneratorSection("openai", model="m", base_url="http://vllm.example.org:8000/v1"))
    with pytest.raises(EndpointError, match="OPENAI_API_KEY is not set"):
        Endpoint(GeneratorSection("openai", model="m"))
