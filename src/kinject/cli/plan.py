"""kinject plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
Print what a training recipe will need before it runs: parameters, memory by part, steps, tokens,
exposures, time and disk; whether it fits, the cheapest changes if it does not, and how to spread
it over several devices. The model's config is enough (no weights are read). The corpus is read as
training reads it, and a few real steps are timed in a process of their own.
Exit code 0: it fits, or a way to run it fits; 1: none does.

examples:
  kinject plan recipes/cpt.yaml
  kinject plan recipes/cpt.yaml --no-calibration --json plan.json --figure learning-rate.png
  kinject plan recipes/llama-3.1-8b/cpt.yaml --gpu H100
  kinject plan recipes/llama-3.1-8b/cpt.yaml --gpu H100 --devices 8
  kinject plan recipes/llama-3.1-8b/cpt.yaml --memory 24GiB --devices 4 --nodes 2 --link 3
  kinject plan recipes/llama-3.1-8b/cpt.yaml --gpu H100 --devices 8 --cp 4 trainer.max_length=65536
  kinject plan recipes/llama-3.1-8b/lora.yaml --memory 24GiB model.path=folder-with-config.json"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "plan", "estimate memory, time and disk of a training run", _DETAIL, None)
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for this card: H200, H100, A100, A100-40GB, L40S, L4, 4090, T4"
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, as 24GiB (default: this machine's)")
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices of a machine (default: this one's)")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of machines (default: 1)")
    parser.add_argument("--cp", metavar="N", type=int, help="split each row between N GPUs (context parallelism)")
    parser.add_argument("--tp", metavar="N", type=int, help="split each layer between N GPUs (tensor parallelism)")
    parser.add_argument(
        "--link",
        metavar="GBPS",
        type=float,
        help="gigabytes a second of the slowest link: of a machine's network with --nodes, else between two devices",
    )
    parser.add_argument("--no-calibration", action="store_true", help="time no real steps")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=120.0, help="time limit for these steps (default: 120)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the plan as JSON")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw the learning rate by step (PNG, SVG or PDF)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.errors import InputError

    for option in ("devices", "nodes", "link", "seconds", "cp", "tp"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            raise InputError(f"--{option}: found {value:g}, allowed: more than 0.")
    recipe = recipe_of(arguments, "plan")
    from kinject.disk import write_json
    from kinject.plan.devices import parse_memory
    from kinject.plan.pages import draw_rates, plan_values, render_plan
    from kinject.plan.run import PlanOptions, plan

    memory = parse_memory(arguments.memory) if arguments.memory is not None else None
    link = None if arguments.link is None else arguments.link * 1e9
    options = PlanOptions(
        memory,
        arguments.devices,
        not arguments.no_calibration,
        arguments.seconds,
        arguments.nodes,
        link,
        arguments.gpu,
        arguments.cp,
        arguments.tp,
    )
    result = plan(recipe, options)
    show(render_plan(result))
    if arguments.json is not None:
        write_json(arguments.json, dict(plan_values(result)))
    if arguments.figure is not None:
        draw_rates(result, arguments.figure)
    return 0 if result.fits or result.parallelism.command else 1
