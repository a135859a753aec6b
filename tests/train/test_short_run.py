"""A short run takes its steps with nothing saved, in a process that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.recipe import TrainRecipe, read_recipe
from kinject.train.short_run import last_log_line, read_timing, run_process, short_recipe

pytestmark = pytest.mark.usefixtures("forked")

MakeRecipe = Callable[..., TrainRecipe]


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> MakeRecipe:
    """Return a recipe with everything that a short run leaves out."""
    rows = "".join(json.dumps({"text": f"Ore {i} is mined in Kelm."}) + "\n" for i in range(40))
    for name in ("corpus", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(rows)

    def _make(**trainer: Any) -> TrainRecipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
            "corpus": {"path": str(tmp_path / "corpus.jsonl"), "validation_corpus": str(tmp_path / "validation.jsonl"),
                       "cache_dir": str(tmp_path / "tokens")},
            "techniques": {"patience": 1, "sam": 0.05}, "guards": {"instability": "stop"},
            "trainer": {"max_steps": 1000, "per_device_train_batch_size": 2, "max_length": 32, "bf16": False,
                        "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5,
                        "warmup_steps": 30, "load_best_model_at_end": True, "metric_for_best_model": "loss", **trainer},
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return read_recipe(path, verb="train")

    return _make


def test_a_short_recipe_keeps_what_a_step_costs_and_the_lines_of_the_file(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe()
    short = short_recipe(recipe, tmp_path / "short", 3, {"learning_rate": 1e-4})
    assert (short.trainer["max_steps"], short.trainer["learning_rate"]) == (3, 1e-4)
    assert short.trainer["lr_scheduler_type"] == "constant"
    assert not {"warmup_steps", "eval_steps", "save_steps"} & short.trainer.keys()
    assert (short.techniques.sam, short.techniques.patience) == (0.05, None)
    assert (short.guards.instability, short.guards.nothing_learned) == ("ignore", "ignore")
    assert short.location("trainer.max_length") == recipe.location("trainer.max_length")
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(dict(short.raw)))
    written = read_recipe(path, verb="train")
    for name in ("run_dir", "seed", "model", "corpus", "techniques", "guards", "trainer", "probes"):
        assert getattr(written, name) == getattr(short, name), name


def test_a_process_takes_the_steps_and_saves_nothing(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    assert run_process(short_recipe(make_recipe(), folder, 3, {})) == 0
    assert [row["step"] for row in read_timing(folder)] == [1, 2, 3]
    assert (
        json.loads((folder / "result.json").read_text())["peak_bytes"]
        >= read_timing(folder)[-1]["peak_bytes"]
    )
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert not (tmp_path / "run").exists()


def test_a_process_is_killed_after_its_time_or_over_its_memory(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    short = short_recipe(make_recipe(), tmp_path / "short", 3, {})
    assert run_process(short, seconds=0) is None
    assert run_process(short, limit=1) is None
    assert not (tmp_path / "short" / "result.json").exists()


def test_a_fault_is_the_last_line_of_the_log(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    (tmp_path / "corpus.jsonl").write_text('{"text": 3}\n')
    short = short_recipe(recipe, tmp_path / "short", 3, {})
    assert run_process(short) == 2
    assert last_log_line(tmp_path / "short").startswith(f"{tmp_path / 'corpus.jsonl'}:1: ")


def test_a_trial_run_ends_when_its_parent_process_is_gone(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    make_recipe()
    command = [sys.executable, "-m", "kinject.train.short_run", str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdin is not None
        child.stdin.close()  # as the system does for a process that was killed
        assert child.wait(1200) == 1
    assert not (tmp_path / "run").exists()
