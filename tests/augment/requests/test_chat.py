"""Chat models as they are: parameters that an endpoint refuses, thinking in answers, servers without a key."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from faulty_server import Talk

from kinject.augment import augment
from kinject.errors import EndpointError
from kinject.llm.chat import refused_parameter, split_thinking
from kinject.llm.endpoint import Endpoint
from kinject.llm.generator import Structure, items_in, json_in
from kinject.llm.replies import parse_completion
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Message

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


def says(talk: Talk, content: str) -> bool:
    message = {"role": "assistant", "content": content}
    return talk.say(200, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())


def structured(forms: Sequence[str]) -> Callable[[Talk, int], bool | None]:
    """Return the script of an endpoint that writes JSON for these types of response_format and refuses the others."""

    def act(talk: Talk, number: int) -> bool | None:
        request = json.loads(talk.body)
        form = request.get("response_format", {}).get("type")
        if form is None or form in forms:
            return says(talk, '{"items": ["a", "b"]}' if form else "a\nb")
        message = f"Invalid parameter: 'response_format' of type '{form}' is not supported with this model."
        return talk.say(400, json.dumps({"error": {"message": message, "param": "response_format"}}).encode())

    return act


@pytest.mark.parametrize(
    ("forms", "tries", "sent"),
    [
        (("json_schema",), ["json_schema"], "as JSON"),
        (("json_object",), ["json_schema", "json_object"], "as JSON"),
        ((), ["json_schema", "json_object", None], "as lines"),
    ],
)
def test_a_list_is_asked_for_as_json_where_the_endpoint_writes_it(
    hostile: Any, forms: Sequence[str], tries: list[str | None], sent: str
) -> None:
    server = hostile(structured(forms))
    section = GeneratorSection("openai", model="sandbox", base_url=server.url)
    lines: list[Message] = [{"role": "user", "content": "<passage>\nx\n</passage>\n\nas lines"}]
    as_json: list[Message] = [{"role": "user", "content": "<passage>\nx\n</passage>\n\nas JSON"}]
    structure = Structure("items", {"type": "object"}, as_json)

    async def answers() -> list[str]:
        async with Endpoint(section) as endpoint:
            return [(await endpoint.complete(lines, seed, structure)).text for seed in range(3)]

    assert asyncio.run(answers()) == ['{"items": ["a", "b"]}' if forms else "a\nb"] * 3
    requests = [json.loads(body) for body in server.seen]
    formats = [request.get("response_format", {}).get("type") for request in requests]
    assert formats == [*tries, tries[-1], tries[-1]]  # what it refuses is remembered
    assert requests[-1]["messages"][0]["content"].endswith(sent)
    if forms == ("json_schema",):
        schema = {"name": "items", "strict": True, "schema": {"type": "object"}}
        assert requests[0]["response_format"]["json_schema"] == schema


def test_an_endpoint_that_takes_response_format_and_ignores_it_is_asked_for_lines(
    hostile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = hostile(lambda talk, number: says(talk, "a\nb"))
    section = GeneratorSection("openai", model="sandbox", base_url=server.url)
    messages: list[Message] = [{"role": "user", "content": "<passage>\nx\n</passage>\n\nas lines"}]

    async def answers() -> None:
        async with Endpoint(section) as endpoint:
            for seed in range(2):
                await endpoint.complete(messages, seed, Structure("items", {}, messages))

    asyncio.run(answers())
    assert ["response_format" in json.loads(body) for body in server.seen] == [True, False]
    assert caplog.text.count("it writes no JSON although it takes response_format") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ("[1]", None),
        ("- a\n- b", None),
        ('{"a": 1', None),
        ("[" * 100_000, None),
    ],
)
def test_json_is_read_with_or_without_a_fence(text: str, value: object) -> None:
    assert json_in(text) == value


def test_items_are_lines_of_text() -> None:
    assert items_in('{"items": ["a\\nb", 3, "", " c ", null]}') == ["a b", "c"]
    assert items_in('{"items": []}') == []
    assert items_in('{"items": "a"}') is None
    assert items_in("a\nb") is None


def test_the_facts_of_a_style_are_the_same_as_json_and_as_lines(
    make_recipe: Make, serving: Any, hostile: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(value: dict[str, Any]) -> None:
        message = value["choices"][0]["message"]
        message["content"] = f"```json\n{json.dumps({'items': message['content'].splitlines()})}\n```"

    def act(talk: Talk, number: int) -> bool | None:
        request = json.loads(talk.body)
        return talk.say(200, talk.completion(fenced)) if "response_format" in request else None

    settings = {"styles": {"atomic_facts": 1}, "generator__concurrency": 2}
    with monkeypatch.context() as patch:
        patch.setattr("kinject.llm.chat._STRUCTURES", ())
        lines = augment(make_recipe(serving().url, **settings))
    wanted = lines.corpus_path.read_bytes()
    for name in ("cache.sqlite", "notes.jsonl", "variants.jsonl", "rejected.jsonl"):
        (lines.run_dir / name).unlink()
    server = hostile(act)
    assert augment(make_recipe(server.url, **settings)).corpus_path.read_bytes() == wanted
    prompts = [json.loads(body) for body in server.seen]
    structured = [one for one in prompts if "response_format" in one]
    assert 0 < len(structured) < len(prompts)  # the preparations alone
    assert all("Do not write lines." in one["messages"][-1]["content"] for one in structured)
    assert caplog.text == ""
