"""One of the processes of a launch: trains each of several runs, of which some are interrupted after two steps and resumed.

    python tests/train/two_processes.py RUNS.json

RUNS.json holds a list of runs: name, recipe, overrides, environment (as accelerate's launcher sets it), interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch

from kinject.recipe import read_recipe
from kinject.train import train


def main() -> None:
    """Train all runs, in order."""
    for run in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.update(run["environment"])
        if "ACCELERATE_USE_DEEPSPEED" in run["environment"]:
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
        recipe = read_recipe(run["recipe"], run["overrides"], verb="train")
        train(recipe)
        if run["interrupted"]:
            torch.distributed.barrier()
            if os.environ["RANK"] == "0":
                shutil.rmtree(recipe.run_dir / "model")
                shutil.rmtree(recipe.run_dir / "checkpoint-4")
            torch.distributed.barrier()
            train(recipe, resume=True)
        for name in run["environment"]:
            del os.environ[name]


main()
