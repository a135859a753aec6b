"""A disk that fills, and which checkpoints are there at any moment. Kills: tests/soak/test_kills.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kinject.disk import read_jsonl
from kinject.recipe import Recipe
from kinject.train import train

MakeRecipe = Callable[..., Recipe]


def _losses(run_dir: Path) -> list[float]:
    return [row["loss"] for _, row in read_jsonl(run_dir / "log.jsonl") if "loss" in row]


FILL = """
import resource, sys
from kinject.cli import main
from kinject.train import trainer
honest = trainer.mark_complete
def mark(checkpoint):
    honest(checkpoint)
    if checkpoint.name == "checkpoint-4":  # from here on no file takes more than 20 kB, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
trainer.mark_complete = mark
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.usefixtures("forked")
def test_a_disk_that_fills_stops_with_a_line_and_a_usable_checkpoint(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    save = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 8}
    full = tmp_path / "full"
    recipe = make_recipe(run_dir=str(full), trainer=save)
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(recipe.path)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert "the disk refuses what training writes" in line
    assert "The newest complete checkpoint is checkpoint-4" in line
    assert [path.name for path in full.glob("checkpoint-*")] == ["checkpoint-4"]  # what was half written is gone
    resumed = train(make_recipe(run_dir=str(full), trainer=save), resume=True)
    straight = train(make_recipe(run_dir=str(tmp_path / "straight"), trainer={**save, "save_strategy": "no"}))
    assert _losses(full) == _losses(tmp_path / "straight")
    one, two = (load_file(Path(result.model_dir) / "model.safetensors") for result in (straight, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_older_checkpoint_goes_only_when_the_newer_is_whole(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinject.train import trainer

    there: list[set[str]] = []
    honest = trainer.mark_complete

    def mark(checkpoint: Path) -> None:
        there.append({path.name for path in checkpoint.parent.glob("checkpoint-*")})
        honest(checkpoint)

    monkeypatch.setattr(trainer, "mark_complete", mark)
    result = train(make_recipe(trainer={"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}))
    assert there == [{"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"}, {"checkpoint-4", "checkpoint-6"}]
    assert [path.name for path in Path(result.run_dir).glob("checkpoint-*")] == ["checkpoint-6"]
