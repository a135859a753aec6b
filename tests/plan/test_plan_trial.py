"""The timed steps of kinject plan: the recipe that they run, and what is made of their times."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.plan import trial as plan_trial
from kinject.plan.run import Wanted, plan
from kinject.plan.trial import Trial, try_steps
from kinject.recipe import Recipe, read_recipe


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """Return a recipe with a corpus to evaluate on; ``trainer`` adds to what is short and small."""
    corpus, held_out = tmp_path / "corpus.jsonl", tmp_path / "held-out.jsonl"
    for file in (corpus, held_out):
        file.write_text("".join(json.dumps({"text": f"Ore {i} is mined in Kelm."}) + "\n" for i in range(40)))

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
    """The whole chain, with a stand-in for the process only: what the trial writes is what the trainer takes."""
    from kinject.train import train

    seen: list[Any] = []

    def _run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "kinject.cli", "train"]
        train(read_recipe(Path(command[-1]), verb="train"))  # and not the page that the command draws after it
        seen.append(Path(yaml.safe_load(Path(command[-1]).read_text())["run_dir"]))
        seen.append([path.name for path in seen[0].glob("checkpoint-*")])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(plan_trial.subprocess, "run", _run)
    recipe = make_recipe(
        {"patience": 1, "sam": 0.05}, lr_scheduler_type="reduce_lr_on_plateau", warmup_steps=30, eval_strategy="steps",
        eval_steps=5, save_strategy="steps", save_steps=5, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    found = plan(recipe, Wanted())
    assert any("techniques.sam" in note for note in found.notes)
    assert found.trial is not None, found.notes
    assert found.trial.n_steps == 6
    assert found.seconds == pytest.approx(1000 * found.trial.step_seconds)
    assert found.trial.peak_bytes > 0
    assert seen[1] == []  # no checkpoint
    assert not seen[0].exists()
    assert not (tmp_path / "run").exists()


def _writes(ends: list[float], code: int = 0, last: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a stand-in for a process whose steps end at `ends` (seconds); a `last` line is cut short."""

    def _run(command: list[str], timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-1]).parent / "run"
        folder.mkdir()
        rows = [{"step": n, "seconds": end, "peak_bytes": 1000 + n} for n, end in enumerate(ends, 1)]
        (folder / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + last)
        if last:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code, "", "a bar\nkinject train: no such thing\n" if code else "")

    return _run


def test_the_median_step_after_two_is_taken_and_scaled_to_all_that_is_accumulated(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_trial.subprocess, "run", _writes([9.0, 12.0, 13.0, 15.0, 16.0, 20.0, 21.5, 22.5]))
    found = try_steps(make_recipe(gradient_accumulation_steps=12), 60)  # steps of 1, 2, 1, 4, 1.5 and 1 s
    assert found == Trial(1.25 * 12 / 4, 6, 1008)
    assert try_steps(make_recipe(), 60) == Trial(1.25, 6, 1008)


def test_steps_that_break_or_take_too_long_are_told_and_those_that_ended_count(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    monkeypatch.setattr(plan_trial.subprocess, "run", _writes([1.0], code=2))
    assert try_steps(recipe, 60) == "the steps broke: kinject train: no such thing"
    monkeypatch.setattr(plan_trial.subprocess, "run", _writes([1.0, 2.0], last='{"step": 3, "sec'))
    assert try_steps(recipe, 7) == "3 steps take more than 7 s here (--seconds)."
    monkeypatch.setattr(plan_trial.subprocess, "run", _writes([1.0, 2.0, 5.0, 7.0], last='{"step": 5, "sec'))
    assert try_steps(recipe, 7) == Trial(2.5, 2, 1004)
