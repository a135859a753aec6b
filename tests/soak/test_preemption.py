"""A job of two processes that Slurm preempts at random steps: at most a step is lost, and the result is the same.

`KINJECT_PREEMPTIONS=6 pytest -m soak -s tests/soak/test_preemption.py` prints the table of docs/reliability.md.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from slurm_commands import Slurm

from kinject.cli.job_files import render_job
from kinject.disk import read_jsonl
from kinject.train.checkpoints import newest_complete

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.soak
N_PREEMPTIONS = int(os.environ.get("KINJECT_PREEMPTIONS", "4"))


def last_step(run_dir: Path) -> int:
    """Return the last step that log.jsonl holds; 0 without one."""
    try:
        return max(
            (row["step"] for _, row in read_jsonl(run_dir / "log.jsonl") if "loss" in row),
            default=0,
        )
    except Exception:  # noqa: BLE001 (it is being written)
        return 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_preempted_job_loses_no_step_and_ends_with_the_same_weights(
    nodes: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, n_steps = (
        random.Random(17),
        max(60 * N_PREEMPTIONS, 240),
    )  # a job does dozens of steps before a signal is there
    (tmp_path / "corpus.jsonl").write_text(
        "".join(f'{{"text": "Person {n} was born in {1900 + n}."}}\n' for n in range(400))
    )
    trainer = {
        "max_steps": n_steps, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1, "bf16": False,
        "use_cpu": True, "save_strategy": "no", "gradient_checkpointing": False,
    }  # fmt: skip
    recipe = {
        "run_dir": "straight",
        "model": {"path": str(tiny_model), "device": "cpu"},
        "corpus": {"path": "corpus.jsonl"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "trainer": trainer}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "KINJECT_SRUN_PAUSE", "0.2"
    )  # the processes get the signal at different moments
    config = ROOT / "recipes" / "distributed" / "ddp-cpu.yaml"
    for name in ("straight", "preempted"):
        text = render_job("slurm", ["train", "recipe.yaml", f"run_dir={name}"])
        launcher = re.sub("launcher='.*?'", f"launcher='--config_file {config}'", text)
        (tmp_path / f"{name}.sbatch").write_text(launcher)
    slurm = Slurm(tmp_path, nodes, gpus=2 // nodes)
    assert slurm.run(tmp_path / "straight.sbatch", lambda: True, None) == 0

    lost, seconds = [], []
    for target in sorted(draw.sample(range(1, n_steps - 100), N_PREEMPTIONS)):
        sent = draw.choice((signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM))
        began, before = time.monotonic(), last_step(tmp_path / "preempted")
        wanted = max(target, before + 1)
        code = slurm.run(
            tmp_path / "preempted.sbatch",
            lambda step=wanted: last_step(tmp_path / "preempted") >= step,
            sent,
        )
        assert (code == 0) == (sent == signal.SIGUSR1)  # then it was requeued
        newest = newest_complete(tmp_path / "preempted")
        assert newest is not None
        lost.append(last_step(tmp_path / "preempted") - int(newest.name.rpartition("-")[2]))
        seconds.append(time.monotonic() - began)
    assert slurm.run(tmp_path / "preempted.sbatch", lambda: True, None) == 0
    rows = [
        [row for _, row in read_jsonl(tmp_path / name / "log.jsonl") if "loss" in row]
        for name in ("straight", "preempted")
    ]
    print(f"\n{nodes} node(s), {N_PREEMPTIONS} preemptions of {n_steps} steps: steps lost {lost}, final loss "
          f"{rows[0][-1]['loss']} and {rows[1][-1]['loss']}, {sum(seconds) / len(seconds):.0f} s each")  # fmt: skip
    assert max(lost) <= 1
    assert [(row["step"], row["loss"]) for row in rows[0]] == [
        (row["step"], row["loss"]) for row in rows[1]
    ]
    one, two = (
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("straight", "preempted")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not list((tmp_path / "preempted").glob("checkpoint-*"))
