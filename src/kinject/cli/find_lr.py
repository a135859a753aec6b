"""kinject find-lr."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
Find a learning rate by a range test: with the recipe's own model, batch and optimizer, the rate
rises by the same factor at every update until the loss diverges. The model is trained in memory
only; its files do not change. In run_dir/find-lr:
  lr.png             loss over rate, with the suggestion
  lr.csv, lr.json    the same as numbers; the same test is not repeated
Exit code 0: a rate is suggested; 1: the loss did not fall.

examples:
  kinject find-lr recipes/cpt.yaml
  kinject find-lr recipes/cpt.yaml --low 1e-6 --high 0.1 --steps 200
  kinject find-lr recipes/lora.yaml trainer.per_device_train_batch_size=2"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "find-lr", "find a learning rate by a range test, with its plot", _DETAIL, None)
    parser.add_argument("--low", type=float, default=1e-7, metavar="RATE", help="first rate (default: 1e-7)")
    parser.add_argument("--high", type=float, default=1.0, metavar="RATE", help="last rate (default: 1)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="updates (default: 100)")
    parser.add_argument(
        "--diverged", type=float, default=1.5, metavar="X", help="stop at X times the lowest loss (default: 1.5)"
    )
    parser.add_argument(
        "--margin", type=float, default=10.0, metavar="X",
        help="suggest at most the rate of the lowest loss, divided by X (default: 10)",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "train")
    from kinject.tune import Ramp, find_lr, render_range_test

    ramp = Ramp(arguments.low, arguments.high, arguments.steps, arguments.diverged, arguments.margin)
    result, folder = find_lr(recipe, ramp)
    show(render_range_test(result, ramp))
    show(f"plot: {folder / 'lr.png'}")
    return 1 if result.suggestion is None else 0
