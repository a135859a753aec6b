"""Techniques that cannot be together are faults of the recipe; patience stops a run; histograms hold what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers.integrations import TensorBoardCallback, WandbCallback

from kinject.disk import read_jsonl
from kinject.recipe import Recipe
from kinject.train import run as stage
from kinject.train import train
from kinject.train.callbacks import Histograms
from small import quick

MakeRecipe = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("patience", "interrupted"), quick([(1, False), (2, False), (2, True)], (2, True))
)
def test_a_run_stops_when_the_held_out_loss_has_not_fallen_for_so_long(
    make_recipe: MakeRecipe,
    corpus: Path,
    tmp_path: Path,
    patience: int,
    interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning other texts at a growing rate makes the held-out loss rise after a while; a rerun of a run that had stopped, but
    not saved its model, takes no further step."""
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(
        json.dumps({"text": "0123456789 A. B. C. D. Question: where does she live?"}) + "\n"
    )
    trainer = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 40, "learning_rate": 0.05,
               "lr_scheduler_type": "constant", "eval_on_start": True, "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    recipe = make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(held_out)},
        trainer=trainer,
        techniques={"patience": patience},
    )
    if interrupted:
        with monkeypatch.context() as patched:
            patched.setattr(stage, "_save_model", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train(recipe)
    result = train(recipe, resume=interrupted)
    losses = {
        row["step"]: row["eval_loss"]
        for _, row in read_jsonl(tmp_path / "run" / "log.jsonl")
        if "eval_loss" in row
    }
    best, wanted = float("inf"), 0
    since = 0
    for step in sorted(losses):
        if step == 0:
            continue
        since, best = (0, losses[step]) if losses[step] < best else (since + 1, best)
        if since == patience:
            wanted = step
            break
    assert result.n_steps == wanted < 40
    warnings = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["warnings"]
    assert any(
        f"for {patience} evaluations (techniques.patience); the run stops." in note
        for note in warnings
    )


class _Kept(TensorBoardCallback):  # type: ignore[misc]
    """A tracker's callback that keeps what it is handed."""

    def __init__(self) -> None:
        self.tb_writer = self
        self.histograms: dict[tuple[int, str], np.ndarray] = {}

    def add_histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        self.histograms[step, name] = values.numpy().copy()


class _KeptWandb(WandbCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self._wandb = self
        self.rows: list[dict[str, Any]] = []

    Histogram = staticmethod(sorted)

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def test_histograms_hold_the_clipped_gradient_and_the_weight_it_is_applied_to(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards, wandb = _Kept(), _KeptWandb()
    honest = Histograms.__init__

    def _with_trackers(self: Histograms, every: int, trackers: Any) -> None:
        honest(self, every, lambda: [*trackers(), boards, wandb])

    monkeypatch.setattr(Histograms, "__init__", _with_trackers)
    monkeypatch.setattr(import_module("kinject.train.config"), "find_problems", lambda *_: [])
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.2, "max_steps": 5,
               "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}  # fmt: skip
    train(make_recipe(trainer=options, techniques={"histogram_steps": 1}))
    names = {
        name.removeprefix("weights/")
        for _, name in boards.histograms
        if name.startswith("weights/")
    }
    assert len(names) == 20
    for step in range(1, 5):
        gradients = {name: boards.histograms[step, f"gradients/{name}"] for name in names}
        assert sum(
            float((g.astype(float) ** 2).sum()) for g in gradients.values()
        ) ** 0.5 <= 0.2 * (1 + 1e-4)
        for name in names:
            moved = (
                boards.histograms[step + 1, f"weights/{name}"]
                - boards.histograms[step, f"weights/{name}"]
            )
            assert np.allclose(moved, -0.5 * gradients[name], atol=1e-7), name
    assert [row["train/global_step"] for row in wandb.rows] == [1, 2, 3, 4, 5]
    assert wandb.rows[1]["gradients/model.norm.weight"] == sorted(
        boards.histograms[2, "gradients/model.norm.weight"]
    )


def test_a_gpu_without_bfloat16_trains_in_float16(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinject.train import config

    monkeypatch.setattr(config.models, "choose_precision", lambda device: "fp16")
    recipe = make_recipe()
    assert config._precision(recipe.regularization, "cuda") == {"bf16": False, "fp16": True}
    recipe = make_recipe(regularization={"l2": 0.1})
    assert config._precision(recipe.regularization, "cuda") == {
        "bf16": False,
        "fp16": False,
    }  # its gradients must be unscaled
