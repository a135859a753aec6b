"""Techniques that cannot be together are faults of the recipe; patience stops a run; histograms hold what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers.integrations import TensorBoardCallback, WandbCallback

from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.recipe import Recipe
from kinject.train import run as stage
from kinject.train import train
from kinject.train.callbacks import Histograms
from kinject.train.config import make_sft_config

MakeRecipe = Callable[..., Recipe]
HARD = {"hard_example_mining": {"fraction": 0.5}}


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"techniques": {"sams": 0.1}}, "techniques.sams: unknown key. Did you mean sam?"),
        ({"techniques": {"sam": -1}}, "techniques.sam: found -1"),
        ({"techniques": {"hard_example_mining": {"fraction": 1.5}}},
         "techniques.hard_example_mining.fraction: found 1.5, allowed: 0.001 to 1.0"),
        ({"techniques": {"hard_example_mining": {"fraction": 0.5, "unit": "row"}}}, "Did you mean rows?"),
        ({"techniques": HARD, "trainer": {"loss_type": "dft"}}, "techniques.hard_example_mining: changes the loss nll"),
        ({"trainer": {"loss_type": "dft", "label_smoothing_factor": 0.1}}, "trainer.label_smoothing_factor: changes the loss"),
        ({"trainer": {"label_smoothing_factor": 1.0}}, "trainer.label_smoothing_factor: found 1.0, allowed: 0 to less than 1"),
        ({"techniques": {**HARD, "row_weights": {"column": "w"}}},
         "techniques.hard_example_mining: with row_weights it is undefined"),
        ({"techniques": HARD, "regularization": {"kl": 1.0}},
         "techniques.hard_example_mining: regularization.kl is in units"),
        ({"techniques": {"sam": 0.1}, "trainer": {"optim": "lomo"}}, "techniques.sam: this optimizer updates while"),
        ({"techniques": {"freeze_base_steps": 2}}, "techniques.freeze_base_except: missing. Name the parameters"),
        ({"techniques": {"freeze_base_steps": 2}}, "Or set techniques.reinitialize_last_layers."),
        ({"techniques": {"freeze_base_steps": 2}, "adapter": {"r": 2}}, "an adapter's base is frozen to the end"),
        ({"techniques": {"reinitialize_last_layers": 1}, "adapter": {"r": 2}}, "beside an adapter they would not train"),
        ({"techniques": {"reinitialize_last_layers": 1}, "regularization": {"l2": 0.1}}, "to untrained layers"),
        ({"techniques": {"patience": 1}}, "trainer.eval_strategy: missing. techniques.patience counts evaluations"),
        ({"techniques": {"patience": 1}, "trainer": {"eval_strategy": "epoch"}, "probes": {"questions": {"new": "Q"}}},
         "techniques.patience: without corpus.validation_corpus there is no loss"),
        ({"techniques": {"histogram_steps": 2}}, "techniques.histogram_steps: no tracker that takes them"),
        ({"trainer": {"optim": "schedule_free_adamw"}},
         "trainer.lr_scheduler_type: found linear, but schedule_free_adamw averages weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_fault_with_its_line(
    make_recipe: MakeRecipe, corpus: Path, sections: dict[str, Any], fault: str
) -> None:
    if "probes" in sections:
        sections = {**sections, "probes": {**sections["probes"], "questions": {"new": str(corpus)}}}  # no one reads it
    with pytest.raises(RecipeError) as caught:
        make_sft_config(make_recipe(**sections))
    assert fault in str(caught.value)
    assert "recipe.yaml:" in str(caught.value)


def test_sam_on_half_precision_weights_is_refused(make_recipe: MakeRecipe, tiny_model: Path) -> None:
    with pytest.raises(RecipeError, match=r"a step of 0\.05 uphill rounds away in bfloat16 weights"):
        make_sft_config(make_recipe(model={"path": str(tiny_model), "dtype": "bfloat16"}, techniques={"sam": 0.05}))


def test_schedule_free_without_its_package_says_what_to_install(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    monkeypatch.setattr("kinject.train.config.find_spec", lambda name: None)
    recipe = make_recipe(trainer={"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"})
    with pytest.raises(
        RecipeError, match=r"trainer\.optim: schedule_free_adamw needs the package schedulefree\. Install it:"
    ):
        make_sft_config(recipe)


@pytest.mark.parametrize(("patience", "interrupted"), [(1, False), (2, False), (2, True)])
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
    held_out.write_text(json.dumps({"text": "0123456789 A. B. C. D. Question: where does she live?"}) + "\n")
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
        row["step"]: row["eval_loss"] for _, row in read_jsonl(tmp_path / "run" / "log.jsonl") if "eval_loss" in row
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
    assert any(f"for {patience} evaluations (techniques.patience); the run stops." in note for note in warnings)


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
    monkeypatch.setattr("kinject.train.config.HISTOGRAM_TRACKERS", ("none",))
    monkeypatch.setattr("kinject.train.config._histogram_faults", lambda recipe, config: [])
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.2, "max_steps": 5,
               "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}  # fmt: skip
    train(make_recipe(trainer=options, techniques={"histogram_steps": 1}))
    names = {name.removeprefix("weights/") for _, name in boards.histograms if name.startswith("weights/")}
    assert len(names) == 20
    for step in range(1, 5):
        gradients = {name: boards.histograms[step, f"gradients/{name}"] for name in names}
        assert sum(float((g.astype(float) ** 2).sum()) for g in gradients.values()) ** 0.5 <= 0.2 * (1 + 1e-4)
        for name in names:
            moved = boards.histograms[step + 1, f"weights/{name}"] - boards.histograms[step, f"weights/{name}"]
            assert np.allclose(moved, -0.5 * gradients[name], atol=1e-7), name
    assert [row["train/global_step"] for row in wandb.rows] == [1, 2, 3, 4, 5]
    assert wandb.rows[1]["gradients/model.norm.weight"] == sorted(boards.histograms[2, "gradients/model.norm.weight"])


def test_tensorboard_holds_histograms_of_every_second_update(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
    train(make_recipe(trainer={"report_to": "tensorboard", "max_steps": 4}, techniques={"histogram_steps": 2}))
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})  # all: it keeps one a name otherwise
    events.Reload()
    histograms = events.Histograms("gradients/model.norm.weight")
    assert [event.step for event in histograms] == [2, 4]
    assert histograms[0].histogram_value.num == 32


def test_a_gpu_without_bfloat16_trains_in_float16_and_refuses_bfloat16(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinject.train import config

    monkeypatch.setattr(config, "choose_precision", lambda device: "fp16")
    recipe = make_recipe()
    assert config._precision(recipe, "cuda") == {"bf16": False, "fp16": True}
    recipe = make_recipe(regularization={"l2": 0.1})
    assert config._precision(recipe, "cuda") == {"bf16": False, "fp16": False}  # its gradients must be unscaled
    monkeypatch.setattr(config, "emulated_bf16", lambda device: "T4 (compute capability 7.5) only emulates bfloat16.")
    recipe = make_recipe(
        trainer={"bf16": True}, model={"path": "m", "dtype": "bfloat16", "attention": "flex_attention"}
    )
    assert dict(config._device_faults(recipe)) == {
        "model.attention": "torch's flex_attention does not train on a CPU. Set model.attention: auto.",
        "trainer.bf16": "T4 (compute capability 7.5) only emulates bfloat16. Remove the line: fp16 is then on.",
        "model.dtype": "T4 (compute capability 7.5) only emulates bfloat16. Set model.dtype: float32 (fp16 is then on).",
    }
