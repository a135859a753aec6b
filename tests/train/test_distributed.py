"""Several processes: the ready-made configurations, and the same losses as in one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kinject.disk import read_jsonl
from kinject.recipe import Recipe
from kinject.train import train

MakeRecipe = Callable[..., Recipe]
CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "distributed").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerates_own_parser_reads_the_configuration(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    kind = {"ddp": "MULTI_GPU", "ddp-cpu": "MULTI_CPU", "fsdp2": "FSDP"}.get(path.stem, "DEEPSPEED")
    assert config.distributed_type == kind
    assert config.num_processes == 2
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


@pytest.mark.usefixtures("forked")
def test_two_processes_learn_as_one_with_the_same_global_batch(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    shared = {"max_steps": 5, "use_cpu": True}
    one = train(make_recipe(run_dir=str(tmp_path / "one"), trainer={**shared, "per_device_train_batch_size": 4}))
    recipe = make_recipe(run_dir=str(tmp_path / "two"), trainer={**shared, "per_device_train_batch_size": 2})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
        command = [sys.executable, "-m", "kinject.cli", "train", str(recipe.path)]
        workers.append(subprocess.Popen(command, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True))
    said = [worker.communicate(timeout=400)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
    losses = [
        [row["loss"] for _, row in read_jsonl(tmp_path / name / "log.jsonl") if "loss" in row]
        for name in ("one", "two")
    ]
    assert len(losses[1]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours)
    assert one.n_steps == 5
