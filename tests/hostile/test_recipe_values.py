"""One adversary for every value of a recipe: done with a changed, finite model, or refused with the key, by check as by train.

The whole draw takes half an hour: ``KINJECT_DRAWS=5000 pytest tests/hostile/test_recipe_values.py`` (KINJECT_SEED: another).
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from recipe_values import Draw, Outcome, all_keys, bases, draw, judge, judge_all, write_inputs

from kinject.report import runs

N_DRAWS = int(os.environ.get("KINJECT_DRAWS", "20"))
SEED = int(os.environ.get("KINJECT_SEED", "14"))


@pytest.fixture
def folder(tmp_path: Path, trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the inputs; reports of training runs, which have tests of their own, are not drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "write_run_report", lambda *_: None)
    write_inputs(tmp_path, trained_tokenizer)
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_any_value_of_any_key_is_trained_with_or_refused_by_name(folder: Path) -> None:
    random, keys = Random(SEED), all_keys()
    counts, faults = judge_all((draw(keys, random) for _ in range(N_DRAWS)), folder)
    assert not faults, "\n\n".join([str(dict(counts)), *faults[:20]])
    if N_DRAWS >= 20:
        assert {"refused", "done"} <= counts.keys(), counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("study.arms.tuned.corpus", "a" * 300),
        ("corpus.mix.extra.path", "/dev/null"),
        ("model.path", "a" * 300),
        ("run_dir", "a" * 300),
        ("study.cache_dir", "a" * 300),
        ("questions.closed_book", str(2**31)),
        ("regularization.kl", "1.0e+39"),
        ("adapter.trainable_token_indices", "[]"),
        ("model.new.num_hidden_layers", "-9223372036854775808"),
        ("eval.retrieval.kind", "dense"),
        ("model.new.rope_parameters", "{rope_theta: 0, rope_type: default}"),
        ("study.models.base.recipe", "tiny"),
        ("adapter.monteclora_config", "'true'"),
        ("adapter.velora_config", "{nope: 1}"),
        ("adapter.velora_config", "{scale: 1.0e+39}"),
        ("adapter.use_bdlora", "true"),
        ("adapter.trainable_token_indices", "[100000]"),
        ("adapter.trainable_token_indices", "{embed_tokens: []}"),
        ("adapter.trainable_token_indices", "{embed_tokens: 5}"),
    ],
)
def test_values_that_went_wrong_once_are_refused_by_name(folder: Path, name: str, text: str) -> None:
    key = next(key for key in all_keys() if key.name == name)
    outcome = judge(Draw(key, text), folder)
    assert not outcome.fault, outcome.fault
    assert outcome.what in ("refused", "refused late", "input missing")


@pytest.mark.filterwarnings("ignore")
def test_embeddings_of_tokens_that_two_layers_share_are_planned_as_they_are_trained(folder: Path) -> None:
    key = next(key for key in all_keys() if key.name == "adapter.trainable_token_indices")
    assert judge(Draw(key, "[5]"), folder) == Outcome("done")


def test_every_key_of_every_verb_is_drawn() -> None:
    names = {key.name for key in all_keys()}
    assert {"seed", "trainer.learning_rate", "adapter.target_modules", "model.new.hidden_size", "eval.retrieval.k",
            "augment.judge.timeout", "study.claims.learns.margin", "techniques.row_weights.half_life",
            "corpus.mix.extra.fraction", "model.tokenizer.vocab_size"} <= names  # fmt: skip
    assert {key.base for key in all_keys()} <= bases().keys()
