"""The local generator against transformers itself, with a tiny model made on the spot."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.augment import augment
from kinject.errors import InputError
from kinject.llm.transformers import LocalModel, weights_identity
from kinject.models import LoadOptions, load_model
from kinject.models.generate import _Sampler
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Completion, Message

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
ASKED: list[list[Message]] = [
    [{"role": "user", "content": text}]
    for text in ("Where?", "Arden was born in Lowmere.", "The school of Kelm.")
]


@pytest.fixture
def chat_model(tiny_model: Path) -> Path:
    """The tiny model with a chat template."""
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    return tiny_model


def section(model: Path, **fields: Any) -> GeneratorSection:
    return GeneratorSection(kind="transformers", model=str(model), max_tokens=12, **fields)


def answers(section: GeneratorSection, requests: list[tuple[list[Message], int]]) -> list[Any]:
    async def run() -> list[Any]:
        async with LocalModel(section) as model:
            return await asyncio.gather(
                *(model.complete(*request) for request in requests), return_exceptions=True
            )

    return asyncio.run(run())


def test_without_temperature_a_batch_writes_what_transformers_writes_for_each_alone(
    chat_model: Path,
) -> None:
    loaded = load_model(str(chat_model), LoadOptions(device="cpu"))
    answer = answers(section(chat_model, temperature=0.0), [(messages, 1) for messages in ASKED])
    for messages, completion in zip(ASKED, answer, strict=True):
        ids = loaded.tokenizer(
            messages[0]["content"] + "\nA:", add_special_tokens=False, return_tensors="pt"
        )
        expected = loaded.model.generate(**ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[
            0
        ]
        text = loaded.tokenizer.decode(
            expected[ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert completion.text == text
        assert completion.usage.tokens_in == ids["input_ids"].shape[1]


def test_an_answer_depends_on_messages_and_seed_and_on_nothing_else_in_its_batch(
    chat_model: Path,
) -> None:
    together = answers(
        section(chat_model), [(messages, seed) for messages in ASKED for seed in (1, 2)]
    )
    (alone,) = answers(section(chat_model, concurrency=1), [(ASKED[1], 2)])
    assert together[3] == alone
    assert together[2].text != together[3].text


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 4),
        ({"top_k": 2}, 2),
        ({"top_p": 0.9}, 2),
        ({"min_p": 0.1}, 2),
        ({"top_p": 0.99, "top_k": 3}, 3),
    ],
)
def test_draws_follow_the_softmax_of_the_kept_tokens(options: dict[str, Any], kept: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(20_000, 1)
    draw = _Sampler(
        section(Path("model"), temperature=0.5, extra_body=options), range(20_000), "cpu"
    )
    drawn = draw(torch.empty(0), logits).argmax(-1)
    fractions = torch.bincount(drawn, minlength=4) / len(drawn)
    expected = torch.softmax(logits[0] / 0.5, -1)  # .002, .016, .117, .865
    expected[: 4 - kept] = 0
    assert torch.allclose(fractions, expected / expected.sum(), atol=0.01)
    assert not fractions[: 4 - kept].any()


def test_the_chat_template_gets_its_arguments_and_thinking_is_taken_off(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chat_model / "chat_template.jinja").write_text(
        "{{ messages[0]['content'] }}{% if thinks %} aloud{% endif %}"
    )
    plain, thinking = (
        answers(
            section(chat_model, temperature=0.0, chat_template_kwargs={"thinks": on}),
            [(ASKED[0], 1)],
        )[0]
        for on in (False, True)
    )
    assert thinking.usage.tokens_in > plain.usage.tokens_in
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerBase.decode",
        lambda *_, **__: "<think>so</think>\nAn answer.",
    )
    (answer,) = answers(section(chat_model, temperature=0.0), [(ASKED[0], 1)])
    assert (answer.thinking, answer.text) == ("so", "An answer.")
    assert answer.usage.tokens_thinking == round(answer.usage.tokens_out * 2 / 12)


def test_an_answer_without_an_end_is_truncated_and_one_that_does_not_fit_fails_alone(
    chat_model: Path,
) -> None:
    long: list[Message] = [{"role": "user", "content": "Arden " * 300}]
    good, bad = answers(section(chat_model), [(ASKED[0], 1), (long, 1)])
    assert isinstance(good, Completion)
    assert good.finish_reason in ("length", "stop")
    assert (good.finish_reason == "length") == (good.usage.tokens_out == 12)
    assert "the model reads 256 tokens" in str(bad)


def test_other_weights_are_another_generator(chat_model: Path) -> None:
    before = weights_identity(str(chat_model))
    weights_identity.cache_clear()
    weights = next(chat_model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_identity(str(chat_model)) != before
    assert weights_identity("org/name") == ""


def test_a_model_without_a_chat_template_is_reported(
    make_recipe: Callable[..., Recipe], tiny_model: Path
) -> None:
    with pytest.raises(InputError, match="has no chat template"):
        augment(make_recipe(generator={"kind": "transformers", "model": str(tiny_model)}))


def test_a_run_is_counted_cached_and_never_asked_twice(
    make_recipe: Callable[..., Recipe], chat_model: Path
) -> None:
    config = json.loads((chat_model / "config.json").read_text())
    (chat_model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    generator = {
        "kind": "transformers",
        "model": str(chat_model),
        "max_tokens": 8,
        "concurrency": 4,
    }
    fields: Any = {"generator": generator, "max_attempts": 1, "styles": {"plain": 1}}
    first = augment(make_recipe(**fields))
    assert first.n_sent == first.asked == 12
    assert sum(first.refused.values()) + sum(first.failed.values()) + first.got == first.asked
    assert augment(make_recipe(**fields)).n_sent == sum(first.failed.values())
