"""Chat models as they are: parameters that an endpoint refuses, thinking in answers, servers without a key."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from faulty_server import Talk

from kinject.augment import augment
from kinject.errors import EndpointError
from kinject.llm.chat import refused_parameter, split_thinking
from kinject.llm.endpoint import Endpoint, parse_completion
from kinject.recipe import GeneratorSection, Recipe

Make = Callable[..., Recipe]
THOUGHT = "<think>\nThe passage names one Person & 3 dates.\n\nI rewrite it.\n</think>\n\n"
SENT = ("temperature", "max_tokens", "seed", "top_k")


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("An answer.", "", "An answer."),
        ("2 < 3 and <b>bold</b>.", "", "2 < 3 and <b>bold</b>."),
        ("<think>\na\n\nb\n</think>\n\nAn answer.", "a\n\nb", "An answer."),
        ("<think></think>An answer.", "", "An answer."),
        ("no opening tag\n</think>\nAn answer.", "no opening tag", "An answer."),
        ("<think>never ends", "never ends", ""),
        ("<thinking>a</thinking> An answer.", "a", "An answer."),
        ("<seed:think>a</seed:think>An answer.", "a", "An answer."),
        ("[THINK]a[/THINK]An answer.", "a", "An answer."),
        ("◁think▷a◁/think▷An answer.", "a", "An answer."),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>An answer.<|return|>",
            "a",
            "An answer.",
        ),
        ("<|channel|>analysis<|message|>cut in the middle", "cut in the middle", ""),
        ("analysisThe final bridge.assistantfinalAn answer.", "The final bridge.", "An answer."),
        ("analysis a\nassistantcommentary b\nassistantfinal\nAn answer.", "a\nassistantcommentary b", "An answer."),
        ("Analysis: the assistant gave the final answer.", "", "Analysis: the assistant gave the final answer."),
        (
            "<|channel|>commentary to=x <|constrain|>json<|message|>b<|call|><|channel|>final<|message|>An answer.",
            "b",
            "An answer.",
        ),
    ],
)
def test_thinking_is_taken_off_the_answer(text: str, thinking: str, answer: str) -> None:
    assert split_thinking(text) == (thinking, answer)


@pytest.mark.parametrize(
    ("reply", "name"),
    [
        # as OpenAI's o-series and GPT-5, vLLM, Mistral, Azure, Gemini's compatible endpoint and Groq answer
        (
            {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
             "'max_completion_tokens' instead.", "type": "invalid_request_error", "param": "max_tokens",
             "code": "unsupported_parameter"}}, "max_tokens",
        ),
        (
            {"error": {"message": "Unsupported value: 'temperature' does not support 0.7 with this model. Only the default (1) "
             "value is supported.", "param": "temperature", "code": "unsupported_value"}}, "temperature",
        ),
        ({"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}, "seed"),
        ({"error": {"message": "Unrecognized request argument supplied: seed", "param": None}}, "seed"),
        ([{"error": {"code": 400, "message": "Invalid JSON payload. Unknown name \"top_k\": Cannot find field."}}], "top_k"),
        ({"error": {"message": "property 'top_k' is unsupported"}}, "top_k"),
        # as Moonshot and Anthropic answer
        ({"error": {"message": "invalid temperature: only 1 is allowed for this model"}}, "temperature"),
        ({"error": {"message": "`temperature` and `top_p` cannot both be specified for this model."}}, "temperature"),
        # refusals of a value, or of something else
        ({"error": {"message": "invalid max_tokens: only values up to 4096 are allowed"}}, None),
        ({"error": {"message": "max_tokens is too large: 9000. This model supports at most 4096.", "param": "max_tokens"}}, None),
        ({"error": {"message": "This model does not support image inputs", "param": "messages"}}, None),
        ({"error": {"message": "maximum context length is 4096 tokens, you requested 5000 (max_tokens 1024)"}}, None),
        ("nothing", None),
    ],
)  # fmt: skip
def test_the_parameter_that_an_error_refuses_is_found(reply: object, name: str | None) -> None:
    assert refused_parameter(json.dumps(reply).encode(), SENT) == name


def test_parameters_that_the_endpoint_refuses_are_left_out_and_remembered(
    make_recipe: Make, hostile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def reasoning(talk: Talk, number: int) -> bool | None:
        request = json.loads(talk.body)
        for name, code in (("max_tokens", "unsupported_parameter"), ("temperature", "unsupported_value")):
            if name in request:
                message = f"Unsupported: '{name}' is not supported with this model."
                return talk.say(400, json.dumps({"error": {"message": message, "param": name, "code": code}}).encode())
        return None

    server = hostile(reasoning)
    result = augment(
        make_recipe(server.url, styles={"paraphrase": 2}, generator__concurrency=1, generator__max_tokens=321)
    )
    assert (result.got, result.failed) == (24, {})
    requests = [json.loads(body) for body in server.seen]
    assert len(requests) == len(server.good) + 2  # each was asked once
    assert all(request["max_completion_tokens"] == 321 for request in requests[1:])
    assert all("temperature" not in request and "seed" in request for request in requests[2:])
    assert caplog.text.count("does not take the temperature 1") == 1


def test_an_option_of_the_recipe_that_the_endpoint_refuses_ends_the_run_by_its_name(
    make_recipe: Make, hostile: Any
) -> None:
    def refuses(talk: Talk, number: int) -> bool | None:
        return talk.say(400, b'{"error": {"message": "Unknown name \\"repetition_penalty\\": Cannot find field."}}')

    server = hostile(refuses)
    with pytest.raises(
        EndpointError, match=r"does not take generator\.extra_body\.repetition_penalty .*Remove it"
    ) as caught:
        augment(make_recipe(server.url, generator__extra_body={"repetition_penalty": 1.1}, generator__concurrency=1))
    assert caught.value.fatal
    assert len(server.seen) == 1


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
    answer = Endpoint(GeneratorSection("openai", model="m", base_url="http://127.0.0.1:9/v1")).parse(reply)
    assert (answer.text, answer.finish_reason) == ("An answer.", "stop")
    assert canary_key not in answer.thinking
    assert "the key is" in answer.thinking


def test_a_text_that_only_thinks_has_no_answer() -> None:
    reply = json.dumps({"choices": [{"message": {"content": "<think>so"}, "finish_reason": "length"}]}).encode()
    answer = parse_completion(reply, "u", 100)
    assert (answer.text, answer.finish_reason, answer.thinking) == ("", "length", "so")


def test_openai_is_sent_the_limit_that_all_its_models_take_and_others_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-something-of-length")
    of_openai = Endpoint(GeneratorSection("openai", model="m")).body([], 1)
    assert of_openai["max_completion_tokens"] == 1024
    assert "max_tokens" not in of_openai
    other = Endpoint(
        GeneratorSection("openai", model="m", base_url="http://10.0.0.1/v1", extra_body={"seed": None})
    ).body([], 1)
    assert other["max_tokens"] == 1024
    assert "seed" not in other


def test_a_server_without_a_key_works_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Endpoint(GeneratorSection("openai", model="m", base_url="http://vllm.example.org:8000/v1"))
    with pytest.raises(EndpointError, match="OPENAI_API_KEY is not set"):
        Endpoint(GeneratorSection("openai", model="m"))
