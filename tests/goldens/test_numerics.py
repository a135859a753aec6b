"""Losses and log-probs of kinject are those of numpy in float64 (numerics.json), on any CPU; and a recipe repeats itself.

Tolerances: float32 carries 24 bits, and the order in which a CPU's kernels sum differs between AVX2, AVX-512 and NEON. A
log-prob here is a sum of at most ten terms of about 6, each behind some thousand roundings of 6e-8: 4e-5 is ten times what
was measured (3.9e-6), and a hundredth of what a change of meaning makes (tested below). Losses are means: 1.7e-7 of the value
was measured, gradient norms 8e-7; they have 4e-5 and 4e-4, since each update carries on what the one before rounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy_llama
import pytest
import yaml
from make_numerics import CLIP, DECAY, QUESTIONS, RATE, SEEDS, TEXTS, UPDATES, log_probs_of

from kinject.disk import read_jsonl, write_jsonl
from kinject.eval.run import evaluate
from kinject.models import train_tokenizer
from kinject.recipe import Recipe, read_recipe
from kinject.train import train

GOLD = json.loads(Path(__file__).with_name("numerics.json").read_text("utf-8"))
TOLERANCE = 4e-5


@pytest.fixture
def byte_model(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that writes the numpy Llama of a seed, with a tokenizer whose tokens are bytes."""

    def _write(seed: int) -> Path:
        folder = tmp_path / f"byte-model-{seed}"
        tokenizer = train_tokenizer([""], numpy_llama.VOCABULARY)
        tokenizer.save_pretrained(folder)
        numpy_llama.write_checkpoint(folder, numpy_llama.draw(seed))
        return folder

    return _write


def _recipe(tmp_path: Path, model: Path, name: str, seed: int = 0, **trainer: Any) -> Recipe:
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS])
    sections = {
        "run_dir": str(tmp_path / name), "seed": seed, "model": {"path": str(model)},
        "corpus": {"path": str(tmp_path / "corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
        "trainer": {
            "max_steps": UPDATES, "per_device_train_batch_size": 8, "learning_rate": RATE, "weight_decay": DECAY,
            "max_grad_norm": CLIP, "optim": "adamw_torch", "lr_scheduler_type": "linear", "logging_steps": 1,
            "max_length": 48, "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False,
            "save_strategy": "no", "bf16": False, **trainer,
        },
    }  # fmt: skip
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return read_recipe(path, verb="train")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("packing", [True, False])
def test_losses_and_gradients_of_a_run_are_those_of_numpy(
    seed: int, packing: bool, byte_model: Any, tmp_path: Path
) -> None:
    result = train(_recipe(tmp_path, byte_model(seed), "run", packing=packing))
    rows = [row for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl") if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(GOLD[str(seed)]["losses"], rel=TOLERANCE)
    assert [row["grad_norm"] for row in rows] == pytest.approx(
        GOLD[str(seed)]["gradient_norms"], rel=10 * TOLERANCE
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", ["texts", "letters"])
def test_log_probs_of_an_evaluation_are_those_of_numpy(
    seed: int, format: str, byte_model: Any, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "questions.jsonl", QUESTIONS)
    path = tmp_path / "eval.yaml"
    sections = {
        "models": {"base": str(byte_model(seed))},
        "questions": {"new": str(tmp_path / "questions.jsonl")},
    }
    path.write_text(
        yaml.safe_dump(
            {"run_dir": str(tmp_path / "eval"), "eval": {**sections, "formats": [format]}}
        )
    )
    report = evaluate(read_recipe(path, verb="eval"))
    log_probs = {
        row["question_id"]: row["log_probs"]
        for _, row in read_jsonl(tmp_path / "eval" / "answers.jsonl")
        if row["format"] == format  # not the control's
    }
    wanted = GOLD[str(seed)]["log_probs"][format]
    assert log_probs == {
        name: pytest.approx(values, abs=TOLERANCE) for name, values in wanted.items()
    }
    right = [max(range(len(values)), key=values.__getitem__) == 0 for values in wanted.values()]
    assert (report.results[0].n_correct, report.results[0].accuracy) == (
        sum(right),
        pytest.approx(sum(right) / 3),
    )


def test_the_tolerance_tells_a_change_of_meaning_from_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a wrong position, epsilon, pairing of queries or token makes is at least a hundred times the tolerance."""
    weights, wanted = numpy_llama.draw(0), GOLD["0"]["log_probs"]["texts"]["a"]
    assert log_probs_of(weights)["texts"]["a"] == pytest.approx(wanted, abs=1e-10)
    for name, other in (("THETA", 9_000.0), ("EPSILON", 1e-3), ("BOS", 1)):
        with monkeypatch.context() as changed:
            changed.setattr("make_numerics.BOS" if name == "BOS" else f"numpy_llama.{name}", other)
            log_probs = log_probs_of(weights)["texts"]["a"]
        assert max(abs(a - b) for a, b in zip(log_probs, wanted, strict=True)) > 100 * TOLERANCE, (
            name
        )


def test_the_same_recipe_gives_the_same_bytes_of_weights_twice(
    byte_model: Any, tmp_path: Path
) -> None:
    model = byte_model(0)
    first, second = (
        Path(train(_recipe(tmp_path, model, name, 7, per_device_train_batch_size=2)).model_dir)
        / "model.safetensors"
        for name in ("one", "two")
    )
    assert first.read_bytes() == second.read_bytes()
    other = train(_recipe(tmp_path, model, "three", 8, per_device_train_batch_size=2))
    assert (
        Path(other.model_dir) / "model.safetensors"
    ).read_bytes() != first.read_bytes()  # the seed is what decides
