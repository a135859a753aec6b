"""Each way in which training fails in silence is a warning, a stop, or nothing, as the recipe says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.errors import TrainingError
from kinject.models import load_model
from kinject.recipe import GuardsSection, Recipe
from kinject.train import train
from kinject.train.data import Collator
from kinject.train.guards import Guard
from kinject.train.trainer import KnowledgeTrainer

MakeRecipe = Callable[..., Recipe]
MASKED = [{"input_ids": [1, 2], "labels": [-100, -100], "position_ids": [0, 1]}]


def _poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Multiply the loss of these (0-based) steps with NaN."""
    honest = KnowledgeTrainer.compute_loss

    def _loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(self, *args, **kwargs) * (float("nan") if self.state.global_step in steps else 1.0)

    monkeypatch.setattr(KnowledgeTrainer, "compute_loss", _loss)


def test_an_update_that_is_not_finite_is_left_out_and_counted(
    make_recipe: MakeRecipe, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, {0, 1})
    for limit in (0.0, 1.0):  # unclipped and clipped
        result = train(make_recipe(trainer={"max_steps": 2, "max_grad_norm": limit}), overwrite=True)
        kept, base = (load_file(Path(folder) / "model.safetensors") for folder in (result.model_dir, tiny_model))
        assert all(torch.equal(kept[name], base[name]) for name in base)
    manifest = json.loads((Path(result.run_dir) / "manifest.json").read_text())
    assert manifest["counts"]["skipped_updates"] == 2
    assert "update is skipped (2 so far)" in manifest["counts"]["warnings"][-1]


def test_a_run_goes_on_after_a_skipped_update_and_stops_past_the_limit(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, {2})
    result = train(make_recipe(guards={"skipped_updates": 1}))
    assert all(torch.isfinite(p).all() for p in load_model(result.model_dir).model.parameters())
    with pytest.raises(TrainingError, match=r"step 3: the gradient norm is nan for the 1\. time"):
        train(make_recipe(guards={"skipped_updates": 0}), overwrite=True)


def test_a_norm_ten_times_its_running_median_is_a_warning_or_a_stop() -> None:
    guard = Guard(GuardsSection())
    for step, norm in enumerate([1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.0, 1.0, 9.9]):
        assert guard.may_update(norm, step)
    assert guard.warnings == []
    assert guard.may_update(10.1, 9)
    assert "step 10: the gradient norm is 10.1, over 10 times its running median 1" in guard.warnings[0]
    stopping = Guard(GuardsSection(norm_spike="stop"))
    for step in range(10):
        stopping.may_update(1.0, step)
    with pytest.raises(TrainingError, match="running median"):
        stopping.may_update(11.0, 10)


def test_a_batch_of_masked_labels_stops_warns_or_passes(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match="all labels masked"):
        Collator(0, masked_batch="stop")(MASKED)
    Collator(0, masked_batch="ignore")(MASKED)
    assert not caplog.messages
    Collator(0, masked_batch="warn")(MASKED)
    assert "all labels masked" in caplog.text


def test_a_masked_batch_that_may_pass_moves_nothing(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Collator.__call__

    def _masked(self: Collator, rows: Any) -> Any:
        return honest(self, [{**row, "labels": [-100] * len(row["labels"])} for row in rows])

    monkeypatch.setattr(Collator, "__call__", _masked)
    guards = {"masked_batch": "ignore", "zero_loss": "ignore"}
    result = train(make_recipe(guards=guards, trainer={"max_steps": 2, "weight_decay": 0.0}))
    assert result.final_loss == 0.0
    with pytest.raises(TrainingError, match="step 1: the loss is exactly 0"):
        train(make_recipe(guards={"masked_batch": "ignore"}, trainer={"max_steps": 2}), overwrite=True)


def test_a_rate_that_moves_no_weight_and_one_that_dies_early_are_said(make_recipe: MakeRecipe) -> None:
    half = make_recipe(model={**make_recipe().raw["model"], "dtype": "bfloat16"}, trainer={"learning_rate": 1e-6})
    assert any("of the weights round back" in note for note in train(half).notes)
    dying = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 12.0, "lr_end": 0.0}, "max_steps": 8}
    result = train(make_recipe(trainer=dying), overwrite=True)
    warnings = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]["warnings"]
    assert any("the learning rate is down to" in warning for warning in warnings)
    with pytest.raises(TrainingError, match="the learning rate is down to"):
        train(make_recipe(trainer=dying, guards={"vanishing_rate": "stop"}), overwrite=True)
    small = {
        "lr_scheduler_type": "noam",
        "lr_scheduler_kwargs": {"d_model": 10**9},
        "learning_rate": 1,
        "warmup_steps": 1,
    }
    train(make_recipe(trainer={**small, "max_steps": 8}, guards={"vanishing_rate": "stop"}), overwrite=True)


def test_a_tokenizer_that_pads_with_its_end_is_said(make_recipe: MakeRecipe, tiny_model: Path) -> None:
    tokenizer = load_model(str(tiny_model)).tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tiny_model)
    assert any("pads with its end-of-text token" in note for note in train(make_recipe()).notes)
    with pytest.raises(TrainingError, match="pads with its end-of-text token"):
        train(make_recipe(guards={"pad_is_eos": "stop"}), overwrite=True)


def test_a_corpus_longer_than_the_steps_is_said_with_the_number_that_reads_it_once(make_recipe: MakeRecipe) -> None:
    short = {"packing": False, "max_steps": 4}  # 16 of 40 rows
    note = next(note for note in train(make_recipe(trainer=short)).notes if "reads 16 of 40 rows" in note)
    assert "60% of the corpus is never seen. Set max_steps to 10" in note
    assert not any(
        "never seen" in n for n in train(make_recipe(trainer={**short, "max_steps": 10}), overwrite=True).notes
    )
    quiet = make_recipe(trainer=short, guards={"unread_corpus": "ignore"})
    assert not any("never seen" in note for note in train(quiet, overwrite=True).notes)


def test_updates_that_an_fp16_scaler_leaves_out_are_counted_and_stop_where_no_scale_helps(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaler:  # accelerate has no fp16 on the CPU
        scale = 4.0

        def get_scale(self) -> float:
            return self.scale

    kept: list[KnowledgeTrainer] = []
    start = KnowledgeTrainer.train
    monkeypatch.setattr(KnowledgeTrainer, "train", lambda self, **k: kept.append(self) or start(self, **k))
    train(make_recipe(trainer={"max_steps": 1}))
    trainer, scaler = kept[0], Scaler()
    model = trainer.model
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer._get_grad_norm(model)
    assert trainer.guard.skipped == 0
    next(model.parameters()).grad.fill_(float("inf"))
    for _ in range(5):  # more than guards.skipped_updates: the scaler is looking for its scale
        trainer._get_grad_norm(model)
    assert trainer.guard.skipped == 5
    assert "fp16 overflow at loss scale 4; the update is left out" in trainer.guard.warnings[-1]
    assert next(model.parameters()).grad is not None  # leaving it out is the scaler's own work
    scaler.scale = 0.5
    with pytest.raises(TrainingError, match=r"even with the loss scaled by 0\.5; 6 updates were left out"):
        trainer._get_grad_norm(model)
