"""kinject plan, kinject doctor and kinject find-lr."""

from __future__ import annotations

import argparse
from pathlib import Path

from kinject.cli import Outcome, incomplete, option, recipe_of, verb
from kinject.terminal import show


@verb(
    "plan",
    option(
        "--gpu",
        metavar="NAME",
        help="plan for this card: H200, H100, A100, A100-40GB, L40S, L4, 4090, T4",
    ),
    option(
        "--memory", metavar="SIZE", help="memory of a device, as 24GiB (default: this machine's)"
    ),
    option(
        "--devices",
        metavar="N",
        type=int,
        help="number of devices of a machine (default: this one's)",
    ),
    option("--nodes", metavar="N", type=int, help="number of machines (default: 1)"),
    option(
        "--link",
        metavar="GBPS",
        type=float,
        help="gigabytes a second of the slowest link: of a machine's network with --nodes, else "
        "between two devices",
    ),
    option("--no-calibration", action="store_true", help="time no real steps"),
    option(
        "--figure",
        metavar="FILE",
        type=Path,
        help="draw the learning rate by step (PNG, SVG or PDF)",
    ),
)
def _plan(arguments: argparse.Namespace) -> Outcome:
    recipe = recipe_of(arguments, "plan")
    # Here, since it imports torch: faults of the recipe are reported first.
    from kinject.plan.run import check_figure, draw_rates, plan, render_plan
    from kinject.plan.ways import parse_memory

    # Before the plan, which may time real steps for minutes.
    if arguments.figure is not None:
        check_figure(arguments.figure)
    memory = None
    if arguments.memory is not None:
        memory = parse_memory(arguments.memory)
    result = plan(
        recipe,
        memory=memory,
        n_devices=arguments.devices,
        nodes=arguments.nodes,
        link=arguments.link and arguments.link * 1e9,
        gpu=arguments.gpu,
        calibration=not arguments.no_calibration,
    )
    show(render_plan(result))
    if arguments.figure is not None:
        draw_rates(result, arguments.figure)
    # 1 where no way to run it fits.
    return result, 0 if result.way.command else 1


@verb(
    "doctor",
    option(
        "recipes",
        nargs="*",
        type=Path,
        help="recipe files or folders (default: recipes, if it exists)",
    ),
    option("--offline", action="store_true", help="send nothing over the network"),
)
def _doctor(arguments: argparse.Namespace) -> Outcome:
    from kinject.api import doctor
    from kinject.doctor import render
    from kinject.errors import InputError

    paths = arguments.recipes
    if not paths and Path("recipes").is_dir():
        paths = [Path("recipes")]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: does not exist. Give recipe files or folders.")
    checkup = doctor(*paths, offline=arguments.offline)
    show(render(checkup))
    return checkup, incomplete(checkup.problems)


@verb(
    "find-lr",
    option("--low", type=float, metavar="RATE", help="first rate (default: 1e-6)"),
    option("--high", type=float, metavar="RATE", help="last rate (default: 1)"),
    option("--steps", type=int, metavar="N", help="updates (default: 100)"),
    option(
        "--batch", action="store_true", help="find the largest batch that fits instead of a rate"
    ),
    option(
        "--memory",
        metavar="SIZE",
        help="with --batch, as 8GiB (default: the GPU's, or what is free here)",
    ),
)
def _find_lr(arguments: argparse.Namespace) -> Outcome:
    from kinject.errors import InputError

    given = {name: getattr(arguments, name) for name in ("low", "high", "steps")}
    ramp = {name: value for name, value in given.items() if value is not None}
    if arguments.batch and ramp:
        raise InputError(
            f"--{next(iter(ramp))}: is for rates, and --batch tries none. Take it out."
        )
    if arguments.memory is not None and not arguments.batch:
        raise InputError("--memory: is for --batch only.")
    recipe = recipe_of(arguments, "train")
    from kinject.plan.ways import parse_memory
    from kinject.tune import Ramp, find_batch, find_lr, render_batch, render_range_test

    if arguments.batch:
        limit = None
        if arguments.memory is not None:
            limit = parse_memory(arguments.memory)
        batch = find_batch(recipe, limit)
        show(render_batch(batch))
        return batch, 0
    result, folder = find_lr(recipe, Ramp(**ramp))
    show(render_range_test(result))
    show(f"plot: {folder / 'lr.png'}")
    return result, 1 if result.suggestion is None else 0
