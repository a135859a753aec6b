"""Written answers against transformers' own generation of each prompt alone, for every architecture of the scorer's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.eval.scoring.test_scorer import (
    ARCHITECTURES,
    LONGROPE,
    PLAIN,
    VOCABULARY,
    make_model,
)
from transformers import GenerationConfig

from kinject.eval.prompts import Generation
from kinject.eval.scoring import generate
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.generate import AnswerGenerator
from kinject.eval.scoring.scorer import Scorer
from kinject.eval.scoring.tree import RowLimits
from kinject.models.generate import generation_settings
from small import quick


class Letters:
    """A tokenizer whose tokens are single characters; token 2 ends a text."""

    eos_token_id = 2
    added_tokens_decoder: Mapping[int, Any] = {}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


UP_TO_NINE = Generation(9)


def make_prompts(n: int = 9, generation: Generation = UP_TO_NINE) -> list[Encoded]:
    """Return prompts of unequal length, two thirds of which share their beginning."""
    random = np.random.default_rng(1)

    def ids(size: int) -> Any:
        return random.integers(3, VOCABULARY, size, dtype=np.int32)

    header, passage = ids(20), ids(10)
    starts = [header, np.concatenate([header, passage]), ids(6)]
    contexts = [np.concatenate([starts[i % 3], ids(3 + i % 4)]) for i in range(n)]
    return [Encoded((context,), (), generation=generation) for context in contexts]


def alone(model: Any, prompt: Encoded) -> list[int]:
    """Return what transformers writes after one prompt, without a cache."""
    ids = torch.tensor(prompt.contexts[0].astype(np.int64))[None]
    most = prompt.generation.max_new_tokens
    config = GenerationConfig(
        max_new_tokens=most, do_sample=False, eos_token_id=2, pad_token_id=0, use_cache=False
    )
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return whole[0, ids.shape[1] :].tolist()


def ids_of(text: str) -> list[int]:
    return [ord(character) - 0x4E00 for character in text]


QUICK = ("llama", "mistral, sliding window", "gemma3", "gpt2", "mamba", "mixtral")
"""One of each way to keep what was read: whole, a window, both, learned positions, a state, experts."""


@pytest.mark.parametrize("architecture", quick(ARCHITECTURES, *QUICK))
def test_every_prompt_gets_the_tokens_that_it_gets_alone(architecture, monkeypatch):
    model, prompts = make_model(architecture), make_prompts()
    monkeypatch.setattr(generate, "_MOST_ACTIVE", 5)  # slots are used again
    monkeypatch.setattr(generate, "_MOST_READ", 24)
    generator = AnswerGenerator(Scorer(model, 512), Letters())
    scores = dict(generator.score(prompts))
    assert sorted(scores) == list(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        expected = alone(model, prompt)
        expected = expected[: expected.index(2)] if 2 in expected else expected
        assert ids_of(scores[index].text) == expected
        assert scores[index].n_tokens == len(expected)
    assert len({score.text for score in scores.values()}) > 4  # else agreement would mean little
    assert any("plain batches" in note for note in generator.scorer.notes) == (
        architecture in PLAIN
    )


def test_the_row_is_no_wider_than_the_scorer_says_that_attention_pays():
    model, prompts = make_model("llama"), make_prompts()
    texts, widths = [], []
    for width in (2048, 60):
        generator = AnswerGenerator(Scorer(model, 512, RowLimits(width=width)), Letters())
        seen: list[int] = []
        append = generator.forward.append

        def counted(cache, tokens, depths, visible, last, append=append, seen=seen):
            seen.append(int(visible.any(axis=0).sum()))
            return append(cache, tokens, depths, visible, last)

        generator.forward.append = counted
        texts.append([score.text for _, score in sorted(generator.score(prompts))])
        widths.append(max(seen))
    # The longest prompt has 36 tokens and an answer of 9.
    assert widths[1] <= 60 < widths[0]
    assert texts[0] == texts[1]


def test_longrope_writes_after_a_short_prompt_as_without_a_long_one(monkeypatch):
    longrope = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": 30}
    config = {**LONGROPE, "rope_parameters": longrope, "original_max_position_embeddings": 30}
    monkeypatch.setitem(ARCHITECTURES, "longrope", config)
    model, prompts = make_model("longrope"), make_prompts(6)  # of 9 to 36 tokens
    generator = AnswerGenerator(Scorer(model, 512), Letters())
    for index, score in generator.score(prompts):
        expected = alone(model, prompts[index])
        assert ids_of(score.text) == expected[: len(score.text)]
        assert len(score.text) >= len(expected) - 1


def test_a_text_ends_before_its_stop_string_and_columns_nobody_sees_are_taken_out(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(generate, "_MOST_ACTIVE", 2)
    monkeypatch.setattr(generate, "_MOST_READ", 16)
    whole = dict(AnswerGenerator(Scorer(model, 512), Letters()).score(make_prompts()))
    stop = whole[0].text[3]
    stopped = dict(
        AnswerGenerator(Scorer(model, 512), Letters()).score(
            make_prompts(generation=Generation(9, (stop,)))
        )
    )
    assert [stopped[i].text for i in range(9)] == [whole[i].text.split(stop)[0] for i in range(9)]
    assert stopped[0].n_tokens <= 4


def test_tokens_as_close_as_rounding_are_decided_by_the_sequence_alone(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(generate, "_CLOSE", 1e9)  # every token is close
    generator = AnswerGenerator(Scorer(model, 512), Letters())
    scores = dict(generator.score(make_prompts(3)))
    assert generator.n_alone >= sum(score.n_tokens for score in scores.values())
    assert [ids_of(scores[i].text) for i in range(3)] == [
        [token for token in alone(model, prompt) if token != 2] for prompt in make_prompts(3)
    ]


def test_a_model_whose_logits_are_not_finite_writes_nothing():
    model = make_model("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    scores = dict(AnswerGenerator(Scorer(model, 512), Letters()).score(make_prompts(3)))
    assert [score.text for score in scores.values()] == [None] * 3
    assert all(np.isnan(score.log_probs[0]) for score in scores.values())


def test_a_model_that_shares_nothing_writes_nothing_from_logits_that_are_not_finite_either():
    model, prompts = make_model("bloom"), make_prompts(4)
    last = int(prompts[2].contexts[0][-1])

    def overflow(_, ids, states):  # as weights that are too large for float16
        return states.masked_fill((ids[0] == last)[..., None], float("inf"))

    model.transformer.word_embeddings.register_forward_hook(overflow)
    scores = dict(AnswerGenerator(Scorer(model, 512), Letters()).score(prompts))
    broken = [last in prompt.contexts[0] for prompt in prompts]
    assert [score.text is None for score in scores.values()] == [broken[i] for i in scores]
    assert 0 < sum(broken) < 4
    assert all(np.isnan(scores[i].log_probs[0]) for i in range(4) if broken[i])


def test_what_a_models_own_generation_config_sets_is_reported_once_and_not_followed():
    model, prompts = make_model("llama"), make_prompts(4)
    expected = [
        ids_of(score.text)
        for _, score in sorted(AnswerGenerator(Scorer(model, 512), Letters()).score(prompts))
    ]
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=1.0,
        repetition_penalty=9.0,
        eos_token_id=2,
        max_length=3,
    )
    scorer = Scorer(model, 512)
    answers = [
        ids_of(score.text) for _, score in sorted(AnswerGenerator(scorer, Letters()).score(prompts))
    ]
    assert answers == expected
    assert [note for note in scorer.notes if "generation_config" in note] == [
        "answers are the likeliest tokens, without what its generation_config.json sets (repetition_penalty 9.0, do_sample "
        "True, temperature 0.7)"
    ]
    model.generation_config = GenerationConfig(
        temperature=0.7, top_k=5
    )  # transformers reads neither without do_sample
    assert generation_settings(model) == {}
