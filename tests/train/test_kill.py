"""A disk that fills, and which checkpoints are there at any moment. Kills: tests/soak/test_kills.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.disk import read_jsonl
from kinject.errors import Terminated
from kinject.process import exit_code
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.checkpoints import is_complete

MakeRecipe = Callable[..., Recipe]


def _losses(run_dir: Path) -> list[float]:
    return [row["loss"] for _, row in read_jsonl(run_dir / "log.jsonl") if "loss" in row]


FILL = """
import resource, sys
from kinject.cli import main
from kinject.train import checkpoints
honest = checkpoints.mark_complete
def mark(checkpoint):
    honest(checkpoint)
    if checkpoint.name == "checkpoint-4":  # from here on no file takes more than 20 kB, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpoints.mark_complete = mark
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.usefixtures("forked")
def test_a_disk_that_fills_stops_with_a_line_and_a_usable_checkpoint(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
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
    assert "the disk refuses a file of training" in line
    assert "The newest complete checkpoint is checkpoint-4" in line
    assert [path.name for path in full.glob("checkpoint-*")] == [
        "checkpoint-4"
    ]  # what was half written is gone
    resumed = train(make_recipe(run_dir=str(full), trainer=save), resume=True)
    uninterrupted = train(
        make_recipe(run_dir=str(tmp_path / "straight"), trainer={**save, "save_strategy": "no"})
    )
    assert _losses(full) == _losses(tmp_path / "straight")
    one, two = (
        load_file(Path(result.model_dir) / "model.safetensors")
        for result in (uninterrupted, resumed)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_older_checkpoint_goes_only_when_the_newer_is_whole(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kinject.train import checkpoints

    there: list[set[str]] = []
    honest = checkpoints.mark_complete

    def mark(checkpoint: Path) -> None:
        there.append({path.name for path in checkpoint.parent.glob("checkpoint-*")})
        honest(checkpoint)

    monkeypatch.setattr(checkpoints, "mark_complete", mark)
    result = train(
        make_recipe(trainer={"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1})
    )
    assert there == [
        {"checkpoint-2"},
        {"checkpoint-2", "checkpoint-4"},
        {"checkpoint-4", "checkpoint-6"},
    ]
    assert [path.name for path in Path(result.run_dir).glob("checkpoint-*")] == ["checkpoint-6"]


@pytest.mark.parametrize("strategy", ["steps", pytest.param("epoch", marks=pytest.mark.soak)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_resuming_changes_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    save = {
        "save_strategy": strategy,
        "save_steps": 3,
        "eval_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    corpus = {"path": make_recipe().corpus.path, "validation_fraction": 0.2}
    runs = [tmp_path / "interrupted", tmp_path / "straight"]
    uninterrupted = train(make_recipe(run_dir=str(runs[1]), trainer=save, corpus=corpus))
    n_steps = uninterrupted.n_steps
    assert 4 <= n_steps <= 12
    assert n_steps % 2 == 0

    sent = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [(number, signal.signal(number, signal.default_int_handler)) for number in sent]
    try:
        for number, step in zip(
            sent, (1, n_steps // 2 - 1, n_steps - 1), strict=True
        ):  # amid, and at the end of, an epoch

            def kill(
                self: Any,
                args: Any,
                state: Any,
                control: Any,
                moment: Any = (step, number),
                **rest: Any,
            ) -> None:
                if state.global_step == moment[0]:
                    os.kill(os.getpid(), moment[1])

            monkeypatch.setattr(
                import_module("kinject.train.callbacks").Screen,
                "on_step_begin",
                kill,
                raising=False,
            )
            with pytest.raises(
                KeyboardInterrupt if number == signal.SIGINT else Terminated
            ) as stopped:
                train(
                    make_recipe(run_dir=str(runs[0]), trainer=save, corpus=corpus), resume=step > 1
                )
            assert exit_code(stopped.value) == 128 + number
            assert is_complete(runs[0] / f"checkpoint-{step + 1}")
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    done = train(make_recipe(run_dir=str(runs[0]), trainer=save, corpus=corpus), resume=True)
    assert done.n_learned == uninterrupted.n_learned
    assert uninterrupted.n_learned == 2 * uninterrupted.account["trained"]
    one, two = ([{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
                 for _, row in read_jsonl(run / "log.jsonl")] for run in runs)  # fmt: skip
    assert one == two
    kept, others = ({path.name for path in run.glob("*checkpoint*")} for run in runs)
    assert kept >= others
    weights, straight = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert all(torch.equal(weights[name], straight[name]) for name in weights)
