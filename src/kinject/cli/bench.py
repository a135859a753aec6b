"""kinject bench."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_DETAIL = """\
Compare training strategies on one train recipe, each run in a process of its own: vanilla
(float32, the batch as given, one document a row), fp16, bf16, packing, gradient accumulation,
gradient checkpointing, activation offloading, Adafactor, 8-bit AdamW, torch.compile, LoRA, and
all of them that run here combined. Time and peak memory are compared with the two vanilla runs of
the same round; accuracy is that of the recipe's probes (or eval questions) after the last step. A
strategy that cannot run here is listed with its reason. The recipe's bench section adds
strategies of your own, and with whole_runs: true each run takes the recipe's own epochs,
evaluations and best checkpoint. In its run_dir:
  bench.md, bench.csv, bench.json   the table, rows by time
  bench.png, bench.svg              the same as a figure
  runs/ID/                          log.jsonl, timing.jsonl and stage.log of each run;
                                    a finished run is not repeated
Exit code 0: all that can run here ran; 1: a strategy failed.

examples:
  kinject bench recipes/bench/50m.yaml
  kinject bench recipes/bench/sandbox.yaml --repeats 2 --steps 20
  kinject bench recipes/bench/techniques.yaml --repeats 1
  kinject bench recipes/bench/whole-runs.yaml --repeats 1
  kinject bench recipes/cpt.yaml --only bf16,packing,compile run_dir=runs/bench/cpt"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "bench", "compare training strategies: time, memory, accuracy", _DETAIL, None)
    names = "vanilla always runs; names: fp16, bf16, packing, accumulation, checkpointing, offloading, adafactor, "
    names += "adamw-8bit, compile, lora, combined"
    parser.add_argument("--only", metavar="NAME,NAME", default="", help=f"only these strategies ({names})")
    parser.add_argument("--skip", metavar="NAME,NAME", default="", help="all strategies except these")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds, for intervals (default: 3)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps of each run (default: the recipe's max_steps, else 12)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "bench")
    from kinject.bench.results import render_bench
    from kinject.bench.run import BenchOptions, bench

    only, skip = _names(arguments.only), _names(arguments.skip)
    result, page = bench(recipe, BenchOptions(only, skip, arguments.repeats, arguments.steps))
    show(render_bench(result))
    show(f"table: {page}")
    return 1 if result.n_failed else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
