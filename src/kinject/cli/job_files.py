"""--job: the file with which Slurm, SkyPilot or Kubernetes runs a verb, written before its inputs
exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kinject.cli import Outcome, named_recipe, option
from kinject.terminal import show

if TYPE_CHECKING:
    from kinject.recipe import StudyRecipe
    from kinject.recipe.read import Verb

JOB_OPTION = option(
    "--job",
    choices=("slurm", "sky", "k8s"),
    help="print a job file; its inputs may be missing yet",
    either=True,
)
_LAUNCHED = ("train", "eval")
"""Verbs whose processes divide the work of one job: `accelerate launch` starts them."""
_LONGEST_NAME = 63
_NO_GPU = ("augment", "questions")
"""Verbs that mostly ask an endpoint."""


def print_job(arguments: argparse.Namespace, verb: Verb, *flags: str) -> Outcome:
    """Print the job file of a verb with its `flags`, and on stderr what must exist when it starts.

    Raises `RecipeError` for every fault of the recipe but a missing input: a fault is to end this
    command, not a job in the queue.
    """
    from kinject.recipe.read import missing_inputs, read_recipe

    path, overrides = named_recipe(arguments, verb)
    missing = missing_inputs(path, overrides, verb)
    recipe = read_recipe(path, overrides, verb, check_inputs=False)
    if verb == "study":
        _check_study(recipe)
    text = render_job(arguments.job, [verb, str(path), *overrides, *flags])
    show(text, end="")
    if missing:
        show("must exist when this job starts:", file=sys.stderr)
    for problem in missing:
        show(f"  {problem}", file=sys.stderr)
    if missing and arguments.job == "slurm":
        show(
            "Submit it behind the job that makes it: "
            "sbatch --dependency=afterok:$(sbatch --parsable OTHER.sbatch) THIS.sbatch",
            file=sys.stderr,
        )
    return {"job": text, "must_exist": [str(problem) for problem in missing]}, 0


def _check_study(study: StudyRecipe) -> None:
    """Raise `RecipeError` for the faults of a study's names and of its shared recipes."""
    from kinject.study.arms import check_names, expand_arms
    from kinject.study.planner import check_recipes

    check_names(study, check_inputs=False)
    check_recipes(study, expand_arms(study.study))


def render_job(kind: str, words: list[str]) -> str:
    """Return the job file of `kind`, a file of cli/jobs/, that runs `words` (a verb, its recipe and
    overrides) in this folder."""
    verb, recipe, *_ = words
    command = shlex.join(words)
    if verb == "train":
        command += " --resume"
    # Kubernetes takes no other characters and no longer names, nor do host names.
    name = re.sub(r"[^a-z0-9]+", "-", f"{verb}-{Path(recipe).stem}".lower())
    name = name[:_LONGEST_NAME].strip("-")
    gpus = "1"
    if verb in _NO_GPU:
        gpus = "0"
    processes = "1"
    if verb in _LAUNCHED:
        processes = "$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-1}))"
    values = {
        "name": name,
        "folder": shlex.quote(str(Path.cwd())),
        "command": command,
        # JSON's strings are YAML's: the command may hold quotes.
        "shell": json.dumps(f"exec kinject {command}"),
        "directory": json.dumps(str(Path.cwd())),
        "python": shlex.quote(sys.executable),
        "gpus": gpus,
        "start": "kinject",
        "processes": processes,
    }
    # On nodes of SkyPilot the launcher is for what processes divide.
    if verb in _LAUNCHED:
        values["start"] = "accelerate launch $launcher -m kinject.cli"
    # The Slurm file lets the launcher ignore its signals: torchrun kills its ranks 30 s after
    # SIGTERM, and is itself killed by SIGUSR1.
    text = (files("kinject.cli") / "jobs" / kind).read_text("utf-8")
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text
