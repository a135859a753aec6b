"""Chat models as they are: parameters that an endpoint refuses, thinking in answers, servers without a key."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kinject.augment import augment
from kinject.errors import EndpointError
from kinject.llm import split_thinking
from kinject.llm.endpoint import Endpoint
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
    ],
)
def test_thinking_is_taken_off_the_answer(text: str, thinking: str, answer: str) -> None:
    assert split_thinking(text) == (thinking, answer)


def test_what_the_recipe_says_is_sent_and_shapes_the_cache(make_recipe: Make, hostile: Any) -> None:
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


def test_openai_is_sent_the_limit_that_all_its_models_take_and_others_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-something-of-length")
    of_openai = Endpoint(GeneratorSection("openai", model="m")).body([], 1)
    assert of_openai["max_completion_tokens"] == 1024
    assert "max_tokens" not in of_openai
    other = Endpoint(
        GeneratorSection(
            "openai",
            model="m",
            base_url="http://10.0.0.1/v1",
            extra_body={"seed": None, "temperature": None},
        )
    ).body([], 1)
    assert other["max_tokens"] == 1024
    assert not {"seed", "temperature"} & set(other)


def test_a_server_without_a_key_works_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Endpoint(GeneratorSection("openai", model="m", base_url="http://vllm.example.org:8000/v1"))
    with pytest.raises(EndpointError, match="OPENAI_API_KEY is not set"):
        Endpoint(GeneratorSection("openai", model="m"))
