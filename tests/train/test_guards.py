"""Each way in which training fails in silence is a warning, a stop, or nothing, as the recipe says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._inductor.exc import InductorError

from kinject.cli import main
from kinject.errors import TrainingError
from kinject.models import load_model
from kinject.recipe import GuardsSection, Recipe
from kinject.train import train
from kinject.train.batches import Collator
from kinject.train.callbacks import patience
from kinject.train.guards import Guard, compiler_faults
from kinject.train.trainer import KnowledgeTrainer
from small import interrupt, quick

MakeRecipe = Callable[..., Recipe]
CpuScaler = Callable[..., list[Any]]
MASKED = [{"input_ids": [1, 2], "labels": [-100, -100], "position_ids": [0, 1]}]


def _poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Multiply the loss of these (0-based) steps with NaN."""
    honest = KnowledgeTrainer.compute_loss

    def _loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(self, *args, **kwargs) * (
            float("nan") if self.state.global_step in steps else 1.0
        )

    monkeypatch.setattr(KnowledgeTrainer, "compute_loss", _loss)


def _unfinished(recipe: Recipe, message: str) -> None:
    """Train; the run must fail with this message, without a model, and its manifest must not call it finished."""
    with pytest.raises(TrainingError, match=message):
        train(recipe, overwrite=True)
    assert not (recipe.run_dir / "model").exists()
    assert not (recipe.run_dir / ".model.part").exists()
    assert json.loads((recipe.run_dir / "manifest.json").read_text())["counts"]["finished"] is False


def test_a_failing_compiler_is_torchs_and_a_full_memory_stays_one(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise InductorError(AssertionError("no lowering of this"), None)

    monkeypatch.setattr(KnowledgeTrainer, "compute_loss", _fail)
    _unfinished(make_recipe(), "torch cannot .*no lowering of this.* trainer.torch_compile: false")
    with pytest.raises(InductorError), compiler_faults():
        raise InductorError(RuntimeError("CUDA out of memory"), None)


def test_an_update_that_is_not_finite_is_left_out_and_counted(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poisoned run equals one that took its rows to the same updates but for the skipped ones."""
    _poison(monkeypatch, {0, 1})
    kept: list[KnowledgeTrainer] = []
    start = KnowledgeTrainer.train
    monkeypatch.setattr(
        KnowledgeTrainer, "train", lambda self, **k: kept.append(self) or start(self, **k)
    )
    for limit in (0.0, 1.0):  # unclipped and clipped
        result = train(
            make_recipe(trainer={"max_steps": 3, "max_grad_norm": limit}), overwrite=True
        )
        weights = load_file(Path(result.model_dir) / "model.safetensors")
        state = kept[-1].optimizer.state
        assert {int(values["step"]) for values in state.values()} == {
            1
        }  # AdamW made one update of three
        assert all(torch.isfinite(weight).all() for weight in weights.values())
    manifest = json.loads((Path(result.run_dir) / "manifest.json").read_text())
    assert manifest["counts"]["skipped_updates"] == 2
    assert "update is skipped (2 so far)" in manifest["counts"]["warnings"][-1]
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    assert [row["loss"] is None for row in rows if "loss" in row] == [True, True, False]
    assert (
        result.final_loss == rows[2]["loss"] == rows[-1]["train_loss"]
    )  # of the one update that was made


@pytest.mark.parametrize("logging_steps", quick([1, 3, 50], 3, 50))
def test_the_mean_loss_is_that_of_the_updates_that_were_made(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, logging_steps: int
) -> None:
    seen: list[float] = []
    honest = KnowledgeTrainer.training_step
    monkeypatch.setattr(
        KnowledgeTrainer,
        "training_step",
        lambda self, *a, **k: seen.append(honest(self, *a, **k)) or seen[-1],
    )
    _poison(monkeypatch, {1, 4})
    trainer = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": logging_steps,
    }
    result = train(make_recipe(trainer=trainer))
    updates = [float(a + b) for a, b in zip(seen[::2], seen[1::2], strict=True)]
    made = [loss for step, loss in enumerate(updates) if step not in (1, 4)]
    assert len(updates) == 6
    assert result.final_loss == pytest.approx(sum(made) / 4, rel=1e-6)
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    logged = {row["step"]: row["loss"] for row in rows if "loss" in row}
    if logging_steps == 3:
        assert logged == {
            3: pytest.approx(sum(made[:2]) / 2, rel=1e-6),
            6: pytest.approx(sum(made[2:]) / 2, rel=1e-6),
        }
    elif logging_steps == 1:
        assert [step for step, loss in logged.items() if loss is None] == [2, 5]


def test_a_run_continues_after_a_skipped_update_and_stops_past_the_limit(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, {2})
    result = train(make_recipe(guards={"skipped_updates": 1}))
    assert all(torch.isfinite(p).all() for p in load_model(result.model_dir).model.parameters())
    with pytest.raises(TrainingError, match=r"step 3: the gradient norm is nan for the 1\. time"):
        train(make_recipe(guards={"skipped_updates": 0}), overwrite=True)


@pytest.mark.parametrize("trainer", [{"learning_rate": 1e-30}, {"max_steps": 1, "warmup_steps": 5}])
def test_a_run_that_changed_nothing_is_not_finished(
    make_recipe: MakeRecipe, trainer: dict[str, Any]
) -> None:
    _unfinished(make_recipe(trainer=trainer), "no weight differs from its start")


def test_a_run_of_skipped_updates_alone_is_not_finished(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, {0, 1})
    _unfinished(make_recipe(trainer={"max_steps": 2}), "all 2 updates were skipped")


def test_weights_that_are_not_finite_never_become_a_checkpoint(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient may be finite and its update not: the loss of that step was computed before."""
    step = KnowledgeTrainer._get_grad_norm

    def _spoil(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = step(self, *args, **kwargs)
        if self.state.global_step == 3:
            next(self.model.parameters()).data[0, 0] = float("inf")
        return norm

    monkeypatch.setattr(KnowledgeTrainer, "_get_grad_norm", _spoil)
    saving = {"save_strategy": "steps", "save_steps": 2}
    _unfinished(make_recipe(trainer=saving), r"step 4: .*embed_tokens.* is no longer finite")
    assert [path.name for path in make_recipe().run_dir.glob("checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.setattr(KnowledgeTrainer, "_get_grad_norm", step)
    assert train(make_recipe(trainer=saving), resume=True).n_steps == 6


def test_a_norm_ten_times_its_running_median_is_a_warning_or_a_stop() -> None:
    guard = Guard(GuardsSection())
    for step, norm in enumerate([1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.0, 1.0, 9.9]):
        guard.check_progress(1.0, norm, step)
    assert guard.warnings == []
    guard.check_progress(1.0, 10.1, 9)
    assert (
        "step 10: the gradient norm is 10.1, over 10 times its running median 1"
        in guard.warnings[0]
    )
    stopping = Guard(GuardsSection(instability="stop"))
    for step in range(10):
        stopping.check_progress(1.0, 1.0, step)
    with pytest.raises(TrainingError, match="running median"):
        stopping.check_progress(1.0, 11.0, 10)


def _warnings(
    losses: Sequence[float], norms: Sequence[float] | None = None, **reactions: Any
) -> list[str]:
    guard = Guard(GuardsSection(**reactions))
    guard._n_weights = 10**6
    for step, loss in enumerate(losses):
        guard.count(norms[step] if norms else 1.0)
        guard.check_progress(loss, norms[step] if norms else 1.0, step)
    return guard.warnings


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([1.18, *[28.5 + index % 3 for index in range(30)]], 17),  # at once, as with a rate of 0.2
        ([1.18 + 0.34 * index for index in range(80)], 28),  # slowly: a line
        (
            [
                *[2 + 5 * 0.9**index for index in range(60)],
                *[7.1 + 0.1 * (index % 2) for index in range(20)],
            ],
            76,
        ),
        (
            [1.18, 1.5, 4, 9, 3, *[8, 7, 9, 6] * 5],
            21,
        ),  # by leaps, until they are no larger than noise
    ],
)
def test_a_loss_that_diverges_is_one_warning_that_names_the_settings(
    losses: list[float], step: int
) -> None:
    (warning,) = _warnings(losses)
    assert f"step {step}: the loss diverges" in warning
    with pytest.raises(TrainingError, match=f"step {step}: the loss diverges"):
        _warnings(losses, instability="stop")
    assert _warnings(losses, instability="ignore") == []


@pytest.mark.parametrize(
    "losses",
    [
        [1.18, *[2.1 - index / 100 for index in range(80)]],  # a warm-up's peak, not twice as high
        [1.18, *[9.0] * 15, 1.0, *[0.9] * 40],  # over within 16 updates
        [12.0 * 0.97**index for index in range(200)],
        [*[0.02] * 50, *[0.9] * 50],  # memorised rows, then new ones
        [1.5 + 0.6 * math.sin(index / 4) for index in range(200)],  # restarts
        [random.Random(index).expovariate(0.5) for index in range(20_000)],  # single short rows
        [*[3.0] * 20, math.nan, *[3.0] * 20],
    ],
)
def test_a_loss_that_is_high_for_a_while_or_by_noise_is_no_divergence(losses: list[float]) -> None:
    assert _warnings(losses, instability="stop") == []


def test_a_gradient_that_vanishes_is_one_warning_and_a_small_one_is_none() -> None:
    """A million weights: their gradients' root mean square is 1e-8 where the norm is 1e-5."""
    (warning,) = _warnings([5.0] * 40, [1.0] * 20 + [9e-6] * 20)
    assert (
        "step 28: the gradient vanishes: in 8 updates its norm was at most 9e-06, for 1,000,000 weights"
        in warning
    )
    assert _warnings([0.01] * 40, [1.0] * 20 + [1.1e-5] * 20) == []
    assert (
        _warnings([0.01] * 40, [1.0] * 20 + [math.nan] * 20) == []
    )  # DeepSpeed does not return one
    with pytest.raises(TrainingError, match="the gradient vanishes"):
        _warnings([5.0] * 8, [0.0] * 8, instability="stop")


def test_a_run_that_diverges_warns_and_stops_if_asked_also_after_a_resume(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is multiplied from the fourth update on. The warning of a resumed run is that of an uninterrupted one."""
    honest = KnowledgeTrainer.compute_loss
    monkeypatch.setattr(
        KnowledgeTrainer, "compute_loss",
        lambda self, *a, **k: honest(self, *a, **k) * (4.0 if self.state.global_step > 2 else 1.0),
    )  # fmt: skip
    trainer = {"max_steps": 20, "learning_rate": 1e-4, "max_grad_norm": 0.5, "warmup_steps": 2, "save_strategy": "steps",
               "save_steps": 10}  # fmt: skip
    stopping = make_recipe(trainer=trainer, guards={"instability": "stop"})
    _unfinished(
        stopping,
        r"step 19: the loss diverges: in 16 updates it was at least 2\d\.\d, after a lowest of 5\.\d+",
    )
    assert (stopping.run_dir / "checkpoint-10").is_dir()
    whole = train(make_recipe(trainer=trainer), overwrite=True)
    (warning,) = [note for note in whole.notes if "the loss diverges" in note]
    assert (
        "Lower trainer.learning_rate (now 0.0001), raise trainer.warmup_steps (now 2), or clip more: trainer.max_grad_norm "
        "(now 0.5). guards.instability: stop ends such a run here." in warning
    )
    interrupt(make_recipe().run_dir, 10)
    assert warning in train(make_recipe(trainer=trainer), resume=True).notes


def test_a_base_that_begins_to_train_is_no_spike(make_recipe: MakeRecipe) -> None:
    """The norm of all weights is over ten times that of the one that trains first."""
    frozen = {"freeze_base_steps": 8, "freeze_base_except": ["model.norm.weight"]}
    result = train(
        make_recipe(techniques=frozen, trainer={"max_steps": 12}, guards={"instability": "stop"})
    )
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    norms = [row["grad_norm"] for row in rows if "loss" in row]
    assert min(norms[8:]) > 10 * max(norms[:8])


def test_a_skipped_update_leaves_the_schedule_where_it_is(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, {1, 2})
    result = train(make_recipe(trainer={"learning_rate": 1e-3}))
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    rates = [1.0, 5 / 6, 5 / 6, 5 / 6, 4 / 6, 3 / 6]
    assert [row["learning_rate"] for row in rows if "loss" in row] == pytest.approx(
        [1e-3 * rate for rate in rates]
    )


def test_a_batch_of_masked_labels_stops_warns_or_passes(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match="all labels masked"):
        Collator(0, nothing_learned="stop")(MASKED)
    Collator(0, nothing_learned="ignore")(MASKED)
    assert not caplog.messages
    Collator(0, nothing_learned="warn")(MASKED)
    assert "all labels masked" in caplog.text


def test_a_rate_that_moves_no_weight_and_one_that_dies_early_are_said(
    make_recipe: MakeRecipe,
) -> None:
    half = make_recipe(
        model={**make_recipe().raw["model"], "dtype": "bfloat16"}, trainer={"learning_rate": 1e-6}
    )
    assert any("of the weights round back" in note for note in train(half).notes)
    dying = {
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 12.0, "lr_end": 0.0},
        "max_steps": 8,
    }
    result = train(make_recipe(trainer=dying), overwrite=True)
    warnings = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"][
        "warnings"
    ]
    assert any("the learning rate is down to" in warning for warning in warnings)
    with pytest.raises(TrainingError, match="the learning rate is down to"):
        train(make_recipe(trainer=dying, guards={"instability": "stop"}), overwrite=True)
    small = {
        "lr_scheduler_type": "noam",
        "lr_scheduler_kwargs": {"d_model": 10**9},
        "learning_rate": 1,
        "warmup_steps": 1,
    }
    train(
        make_recipe(trainer={**small, "max_steps": 8}, guards={"instability": "stop"}),
        overwrite=True,
    )


def test_a_corpus_longer_than_the_steps_is_said_with_the_number_that_reads_it_once(
    make_recipe: MakeRecipe,
) -> None:
    short = {"packing": False, "max_steps": 4}  # 16 of 40 rows
    note = next(
        note for note in train(make_recipe(trainer=short)).notes if "reads 16 of 40 rows" in note
    )
    assert "60% of the corpus is never seen. Set max_steps to 10" in note
    assert not any(
        "never seen" in n
        for n in train(make_recipe(trainer={**short, "max_steps": 10}), overwrite=True).notes
    )


def test_updates_that_an_fp16_scaler_leaves_out_are_counted_and_stop_where_no_scale_helps(
    make_recipe: MakeRecipe, cpu_scaler: CpuScaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own scaler: it skips by itself, and may do so more often than guards.skipped_updates (3) allows."""
    scalers = cpu_scaler(init_scale=2.0**35)
    result = train(make_recipe(trainer={"fp16": True, "max_steps": 30, "max_grad_norm": 0.0}))
    counts = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]
    skipped = counts["skipped_updates"]
    assert 3 < skipped < 28
    assert scalers[0].get_scale() == 2.0 ** (35 - skipped)
    assert any(
        "at loss scale 34,359,738,368; the update is skipped" in text for text in counts["warnings"]
    )
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    assert rates == pytest.approx(
        [1e-3] * (skipped + 1) + [1e-3 * (1 - n / 30) for n in range(1, 30 - skipped)]
    )
    cpu_scaler(init_scale=4.0)
    _poison(monkeypatch, set(range(9)))
    message = r"step 4: the gradient norm is nan even with the loss scaled by 0\.5; 4 updates were skipped"
    _unfinished(make_recipe(trainer={"fp16": True}), message)


def test_fp16_on_a_model_saved_in_bfloat16_is_a_warning_in_the_manifest(
    make_recipe: MakeRecipe,
    cpu_scaler: CpuScaler,
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu_scaler(init_scale=2.0**10)
    config = json.loads((tiny_model / "config.json").read_text())
    for dtype, warned in (("bfloat16", True), ("float16", False), ("float32", False)):
        caplog.clear()
        (tiny_model / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        result = train(
            make_recipe(trainer={"fp16": True, "max_steps": 1}, guards={"instability": "ignore"}),
            overwrite=True,
        )
        warnings = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"][
            "warnings"
        ]
        message = f"trainer.fp16: {tiny_model} was saved in bfloat16; activations beyond 65,504 overflow. Use bf16: true"
        assert [text.startswith(message) for text in warnings] == [True] * warned
        assert (message in caplog.text) == warned
        assert any("(float32 weights, float16 arithmetic)" in note for note in result.notes)


def test_an_evaluation_that_is_not_finite_is_no_improvement(
    make_recipe: MakeRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan, rows = float("nan"), [3.0, float("nan"), 2.0, float("nan"), float("nan")]
    history = [{"step": step, "eval_loss": value} for step, value in enumerate(rows, start=1)]
    reason, args = patience(2), SimpleNamespace(metric_for_best_model=None)
    assert reason(args, history[:4]) == ""
    assert "not been better than 2.000 for 2 evaluations" in reason(args, history)
    never = [{"step": step, "eval_loss": nan} for step in (1, 2)]
    assert "eval_loss has not been finite for 2 evaluations" in reason(args, never)
    honest = KnowledgeTrainer.compute_loss
    monkeypatch.setattr(
        KnowledgeTrainer, "compute_loss",
        lambda self, model, *a, **k: honest(self, model, *a, **k) * (1.0 if model.training else nan),
    )  # fmt: skip
    trainer = {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    sections = {"corpus": {"path": str(corpus), "validation_corpus": str(corpus)}}
    result = train(make_recipe(trainer=trainer, **sections), overwrite=True)
    rows = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [None, None]


@pytest.mark.parametrize(("rate", "is_above"), [(3.0, True), (1e-3, False)])
def test_a_short_run_that_ends_far_above_its_first_loss_says_so(
    make_recipe: MakeRecipe, rate: float, is_above: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        trainer={"learning_rate": rate, "max_steps": 5, "lr_scheduler_type": "constant"}
    )
    assert main(["train", str(recipe.path)]) == int(is_above)
    assert ("far above" in capsys.readouterr().err) is is_above
    manifest = json.loads((recipe.run_dir / "manifest.json").read_text())
    assert manifest["counts"]["ended_above_start"] is is_above
    assert any("far above" in warning for warning in manifest["counts"]["warnings"]) is is_above
