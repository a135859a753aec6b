"""kinject plan, kinject doctor and kinject find-lr."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.cli import Outcome, add_verb, recipe_of
from kinject.terminal import show

_PLAN = """\
Print what a training recipe will need: parameters, memory by part, steps, tokens and time;
whether it fits, the cheapest changes if it does not, and how to spread it over several devices.
No weights are read; a few real steps are timed in a process of their own.
Exit code 0: it fits, or a way to run it fits; 1: none does.

examples:
  kinject plan recipes/cpt.yaml
  kinject plan recipes/llama-3.1-8b/cpt.yaml --gpu H100 --devices 8
  kinject plan recipes/llama-3.1-8b/lora.yaml --memory 24GiB model.path=folder-with-config.json"""


def add_plan(verbs: Any) -> None:
    """Add `kinject plan`."""
    parser = add_verb(verbs, "plan", "estimate memory and time of a training run", _PLAN, None)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for this card: H200, H100, A100, A100-40GB, L40S, L4, 4090, T4"
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, as 24GiB (default: this machine's)")
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices of a machine (default: this one's)")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of machines (default: 1)")
    parser.add_argument(
        "--link",
        metavar="GBPS",
        type=float,
        help="gigabytes a second of the slowest link: of a machine's network with --nodes, else between two devices",
    )
    parser.add_argument("--no-calibration", action="store_true", help="time no real steps")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw the learning rate by step (PNG, SVG or PDF)")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> Outcome:
    from kinject.errors import InputError

    for option in ("devices", "nodes", "link"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            raise InputError(f"--{option}: found {value:g}, allowed: more than 0.")
    recipe = recipe_of(arguments, "plan")
    from kinject.plan.run import draw_rates, plan, render_plan
    from kinject.plan.ways import parse_memory

    result = plan(
        recipe, memory=parse_memory(arguments.memory) if arguments.memory is not None else None,
        n_devices=arguments.devices, nodes=arguments.nodes, link=arguments.link and arguments.link * 1e9,
        gpu=arguments.gpu, calibration=not arguments.no_calibration,
    )  # fmt: skip
    show(render_plan(result))
    if arguments.figure is not None:
        draw_rates(result, arguments.figure)
    return result, 0 if result.way.command else 1


_DOCTOR = """\
Check this machine, and what keeps each recipe from running on it: missing inputs, keys, hardware. Exit
code 0: no problems; 1: problems.

examples:
  kinject doctor                        every recipe below recipes/
  kinject doctor recipes/cpt.yaml"""


def add_doctor(verbs: Any) -> None:
    """Add `kinject doctor`."""
    parser = verbs.add_parser(
        "doctor", help="check this machine and what keeps recipes from running", description=_DOCTOR
    )
    parser.add_argument(
        "recipes", nargs="*", type=Path, help="recipe files or folders (default: recipes, if it exists)"
    )
    parser.add_argument("--offline", action="store_true", help="send nothing over the network")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> Outcome:
    from kinject.api import doctor
    from kinject.doctor import render
    from kinject.errors import InputError

    paths = arguments.recipes or [path for path in (Path("recipes"),) if path.is_dir()]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: does not exist. Give recipe files or folders.")
    checkup = doctor(*paths, offline=arguments.offline)
    show(render(checkup))
    return checkup, 1 if checkup.problems else 0


_FIND_LR = """\
Find a learning rate by a range test: the rate rises by the same factor at every update until the loss
diverges; suggested is the rate at which its mean is lowest. No file of the model changes. In run_dir/find-lr:
  lr.png, lr.csv     loss over rate, with the suggestion
With --batch: the largest batch of a device that fits, and the accumulation that keeps the global batch.
Exit code 0: a rate or batch is suggested; 1: none is, and the output says why.

examples:
  kinject find-lr recipes/cpt.yaml
  kinject find-lr recipes/cpt.yaml --low 1e-6 --high 0.1 --steps 200
  kinject find-lr recipes/cpt.yaml --batch --memory 4GiB"""


def add_find_lr(verbs: Any) -> None:
    """Add `kinject find-lr`."""
    parser = add_verb(verbs, "find-lr", "find a learning rate by a range test, or the largest batch", _FIND_LR, None)
    parser.add_argument("--low", type=float, default=1e-6, metavar="RATE", help="first rate (default: 1e-6)")
    parser.add_argument("--high", type=float, default=1.0, metavar="RATE", help="last rate (default: 1)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="updates (default: 100)")
    parser.add_argument("--batch", action="store_true", help="find the largest batch that fits instead of a rate")
    parser.add_argument(
        "--memory", metavar="SIZE", help="with --batch, as 8GiB (default: the GPU's, or what is free here)"
    )
    parser.set_defaults(run=_find_lr)


def _find_lr(arguments: argparse.Namespace) -> Outcome:
    recipe = recipe_of(arguments, "train")
    from kinject.plan.ways import parse_memory
    from kinject.tune import Ramp, find_batch, find_lr, render_batch, render_range_test

    if arguments.batch:
        limit = parse_memory(arguments.memory) if arguments.memory else None
        batch = find_batch(recipe, limit)
        show(render_batch(batch))
        return batch, 0
    result, folder = find_lr(recipe, Ramp(arguments.low, arguments.high, arguments.steps))
    show(render_range_test(result))
    show(f"plot: {folder / 'lr.png'}")
    return result, 1 if result.suggestion is None else 0
