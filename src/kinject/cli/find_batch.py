"""kinject find-batch."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
Find the largest per-device batch that fits, and the gradient accumulation that keeps the recipe's
global batch. The search doubles the batch, then bisects. Each trial makes two updates on the
longest rows in a process of its own. On a GPU a trial fits if the allocator refuses nothing; on a
CPU if its peak resident memory stays within --memory. Prints the two lines to set. In
run_dir/find-batch:
  trials.json        the memory of each batch; a finished trial is not repeated
  batch-N/log.txt    what the trial printed

examples:
  kinject find-batch recipes/cpt.yaml
  kinject find-batch recipes/cpt.yaml --memory 4GiB
  kinject find-batch recipes/lora.yaml trainer.gradient_checkpointing=true --max-batch 64"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "find-batch", "find the largest batch that fits, and its accumulation", _DETAIL, None)
    parser.add_argument(
        "--memory", metavar="SIZE",
        help="most memory of a trial, for example 8GiB (default: the GPU's, or what is free here)",
    )  # fmt: skip
    parser.add_argument(
        "--max-batch", type=int, metavar="N", help="largest batch to try (default: rows of an update on one device)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "train")
    from kinject.errors import InputError
    from kinject.plan.devices import parse_memory
    from kinject.tune import find_batch, render_batch

    if arguments.max_batch is not None and arguments.max_batch < 1:
        raise InputError(f"--max-batch: found {arguments.max_batch}, allowed: 1 or more.")
    limit = parse_memory(arguments.memory) if arguments.memory else None
    show(render_batch(find_batch(recipe, limit, arguments.max_batch)))
    return 0
