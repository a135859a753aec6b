"""kinject find-batch."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
The largest per-device batch that fits, by doubling and then bisection, each trial (two updates on the longest rows) in a
process of its own; then the gradient accumulation that keeps the recipe's global batch. On a GPU a trial fits when the
allocator refuses nothing, on the CPU when the peak of its resident set stays within --memory. Prints the two lines to set.
In run_dir/find-batch:
  trials.json        what each batch took; a finished trial is not done again
  batch-N/log.txt    what the trial printed

examples:
  kinject find-batch recipes/cpt.yaml
  kinject find-batch recipes/cpt.yaml --memory 4GiB
  kinject find-batch recipes/lora.yaml trainer.gradient_checkpointing=true --most 64"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "find-batch", "the largest batch that fits, and the accumulation for it", _DETAIL, None)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="what a trial may hold, for example 8GiB (default: the GPU, or what is free here)",
    )
    parser.add_argument(
        "--most", type=int, metavar="N", help="largest batch to try (default: the rows of an update on one device)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "train")
    from kinject.errors import InputError
    from kinject.plan.devices import parse_memory
    from kinject.tune.find_batch import find_batch, render_batch

    if arguments.most is not None and arguments.most < 1:
        raise InputError(f"--most: found {arguments.most}, allowed: 1 or more.")
    limit = parse_memory(arguments.memory) if arguments.memory else None
    show(render_batch(find_batch(recipe, limit, arguments.most)))
    return 0
