"""kinject plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
What a training recipe will need, before it runs: parameters, memory by part, steps, tokens, exposures, time, disk; whether
it fits, what to change first if it does not, and how to spread it over several devices. The model's config is enough
(no weights are read), the corpus is read as training reads it, and a few real steps are timed in a process of their own.

examples:
  kinject plan recipes/cpt.yaml
  kinject plan recipes/cpt.yaml --no-calibration --json plan.json --figure learning-rate.png
  kinject plan recipes/llama-3.1-8b/cpt.yaml --memory 80GiB --devices 8
  kinject plan recipes/llama-3.1-8b/lora.yaml --memory 24GiB model.path=folder-with-config.json"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "plan", "what a training run will need, and whether it fits", _DETAIL, None)
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, as 24GiB (default: what is here)")
    parser.add_argument("--devices", metavar="N", type=int, help="number of devices (default: what is here)")
    parser.add_argument("--no-calibration", action="store_true", help="time no real steps")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=120.0, help="most that these may take (default: 120)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan as JSON, too")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw the learning rate by step (PNG, SVG or PDF)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.errors import InputError

    for option, value in (("--devices", arguments.devices), ("--seconds", arguments.seconds)):
        if value is not None and value <= 0:
            raise InputError(f"{option}: found {value:g}, allowed: more than 0.")
    recipe = recipe_of(arguments, "plan")
    from kinject.disk import write_json
    from kinject.plan.devices import parse_memory
    from kinject.plan.pages import as_json, draw_rates, render
    from kinject.plan.run import Wanted, plan

    memory = parse_memory(arguments.memory) if arguments.memory is not None else None
    found = plan(recipe, Wanted(memory, arguments.devices, not arguments.no_calibration, arguments.seconds))
    show(render(found))
    if arguments.json is not None:
        write_json(arguments.json, dict(as_json(found)))
    if arguments.figure is not None:
        draw_rates(found, arguments.figure)
    return 0 if found.fits or found.way.command else 1
