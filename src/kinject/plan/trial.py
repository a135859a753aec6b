"""A few real steps of a recipe in a process of their own: how long a step takes, and how much memory it did take."""

from __future__ import annotations

import copy
import itertools
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kinject.disk.jsonl import Row, parse_row
from kinject.recipe import TrainRecipe
from kinject.train.config import trainer_field

_WARM_UP = 2
_STEPS = 6
_MOST_ACCUMULATED = 4
"""Micro-batches of a step in the trial; a recipe with more takes so much longer."""


@dataclass(frozen=True)
class Trial:
    """`step_seconds` is the median of `n_steps` steps after a warm-up, `peak_bytes` the most memory of the whole process."""

    step_seconds: float
    n_steps: int
    peak_bytes: int


def trial_recipe(recipe: TrainRecipe, folder: Path) -> dict[str, Any]:
    """Return the values of a recipe that takes a few steps into `folder`, saving, asking and reporting nothing."""
    values = {key: copy.deepcopy(value) for key, value in recipe.raw.items() if key in _KEPT}
    values["trainer"] = {key: list(item) if isinstance(item, tuple) else item for key, item in recipe.trainer.items()}
    values["corpus"].pop("validation_corpus", None)
    values["run_dir"] = str(folder / "run")
    for key in _OF_A_WHOLE_RUN:
        values["trainer"].pop(key, None)
    if isinstance(values.get("techniques"), dict):
        values["techniques"] = {key: item for key, item in values["techniques"].items() if key not in _NOT_EVERY_STEP}
    values["trainer"] |= {
        "max_steps": _WARM_UP + _STEPS, "logging_strategy": "steps", "logging_steps": 1, "save_strategy": "no",
        "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False, "report_to": "none",
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": min(trainer_field(recipe, "gradient_accumulation_steps"), _MOST_ACCUMULATED),
    }  # fmt: skip
    return values


_KEPT = ("seed", "method", "model", "adapter", "regularization", "techniques", "corpus")
_OF_A_WHOLE_RUN = (
    "num_train_epochs", "metric_for_best_model", "greater_is_better", "eval_steps", "save_steps", "lr_scheduler_kwargs",
    "warmup_steps", "warmup_ratio",
)  # fmt: skip
"""What needs evaluations, or more steps than these; none of it changes how long a step takes."""
_NOT_EVERY_STEP = ("freeze_base_steps", "freeze_base_except", "patience", "histogram_steps")


def try_steps(recipe: TrainRecipe, seconds: float) -> Trial | str:
    """Return what the steps took, or why there is nothing to tell: they broke, or took longer than `seconds` in all."""
    with tempfile.TemporaryDirectory(prefix="kinject-plan-") as name:
        folder = Path(name)
        path = folder / "recipe.yaml"
        path.write_text(
            yaml.safe_dump(trial_recipe(recipe, folder), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        command = [sys.executable, "-m", "kinject.cli", "train", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            done = None
        rows = _rows(folder / "run" / "timing.jsonl")
        if done is not None and done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return f"the steps broke: {last}"
        if len(rows) < _WARM_UP + 1:
            return f"{_WARM_UP + 1} steps take more than {seconds:g} s here (--seconds)."
        ends = [row["seconds"] for row in rows[_WARM_UP - 1 :]]
        own = int(trainer_field(recipe, "gradient_accumulation_steps"))
        longer = own / min(own, _MOST_ACCUMULATED)
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return Trial(statistics.median(steps) * longer, len(steps), max(row["peak_bytes"] for row in rows))


def _rows(timing: Path) -> list[Row]:
    """Return the whole rows of a timing.jsonl: one that was being written when the process was ended is left out."""
    if not timing.is_file():
        return []
    lines = timing.read_bytes().splitlines(keepends=True)
    return [parse_row(line, f"{timing}:{number}") for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
