"""The timed steps of kinject plan: the recipe that they run, and the time of a step that follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.plan import run as planning
from kinject.plan.run import StepTiming, plan, time_steps
from kinject.recipe import Recipe, read_recipe
from kinject.train.short_run import run_process

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """Return a recipe with a corpus to evaluate on; ``trainer`` adds to what is short and small."""
    corpus, held_out = tmp_path / "corpus.jsonl", tmp_path / "held-out.jsonl"
    for file in (corpus, held_out):
        file.write_text(
            "".join(json.dumps({"text": f"Ore {i} is mined in Kelm."}) + "\n" for i in range(40))
        )

    def _make(techniques: dict[str, Any] | None = None, **trainer: Any) -> Recipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
            "corpus": {"path": str(corpus), "validation_corpus": str(held_out), "cache_dir": str(tmp_path / "tokens")},
            "techniques": techniques or {},
            "trainer": {
                "max_steps": 1000, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_length": 32, "packing": True,
                "gradient_checkpointing": False, "bf16": False, **trainer,
            },
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return read_recipe(path, verb="plan")

    return _make


def test_a_recipe_for_a_thousand_steps_takes_eight_and_leaves_nothing(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole chain: the short recipe is what the trainer takes."""
    folders: list[Path] = []
    checkpoints: list[Path] = []

    def _run(recipe: Recipe, **options: Any) -> int | None:
        code = run_process(recipe, **options)
        folders.append(recipe.run_dir)
        checkpoints.extend(recipe.run_dir.glob("checkpoint-*"))
        return code

    monkeypatch.setattr(planning, "run_process", _run)
    monkeypatch.setattr(planning, "_SECONDS", 3600.0)  # the machine may be a busy one
    recipe = make_recipe(
        {"patience": 1, "sam": 0.05}, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps",
        eval_steps=5, save_strategy="steps", save_steps=5, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    result = plan(recipe)
    assert result.timing is not None, result.notes
    assert result.timing.n_steps == 6
    assert result.seconds == pytest.approx(1000 * result.timing.step_seconds)
    assert result.timing.peak_bytes > 0
    assert checkpoints == []
    assert not folders[0].exists()
    assert not (tmp_path / "run").exists()


def _writes(ends: list[float], code: int | None = 0, last: str = "") -> Callable[..., int | None]:
    """Return a stand-in for a process whose steps end at `ends` (seconds); a `last` line is cut short."""

    def _run(recipe: Recipe, seconds: float, **_: Any) -> int | None:
        folder = recipe.run_dir
        folder.mkdir()
        rows = [
            {"step": n, "seconds": end, "peak_bytes": 1000 + n} for n, end in enumerate(ends, 1)
        ]
        (folder / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + last)
        (folder / "log.txt").write_text("a bar\nno such thing\n" if code else "")
        return None if last else code

    return _run


def test_the_median_step_after_two_is_taken(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        planning, "run_process", _writes([9.0, 12.0, 13.0, 15.0, 16.0, 20.0, 21.5, 22.5])
    )
    assert time_steps(make_recipe()) == StepTiming(
        1.25, 6, 1008
    )  # steps of 1, 2, 1, 4, 1.5 and 1 s


def test_steps_that_fail_or_take_too_long_are_reported_and_those_that_ended_count(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    monkeypatch.setattr(planning, "run_process", _writes([1.0], code=2))
    assert time_steps(recipe) == "the steps failed: no such thing"
    monkeypatch.setattr(planning, "run_process", _writes([1.0, 2.0], last='{"step": 3, "sec'))
    assert time_steps(recipe) == "3 steps take more than 120 s here."
    monkeypatch.setattr(
        planning, "run_process", _writes([1.0, 2.0, 5.0, 7.0], last='{"step": 5, "sec')
    )
    assert time_steps(recipe) == StepTiming(2.5, 2, 1004)


def test_processes_that_share_cores_are_not_timed_as_one(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "time_steps", lambda _: StepTiming(1.0, 6, 1))
    monkeypatch.setattr(planning, "matrix_pace", lambda _: 3e9)
    recipe = make_recipe()
    assert plan(recipe, n_devices=1).timing is not None
    three = plan(recipe, n_devices=3)
    assert three.timing is None
    assert three.devices.flops == 1e9
    assert any("3 processes share the cores" in note for note in three.notes)
