"""kinject study and kinject bench."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_STUDY = """\
Run a whole experiment from one file: arms x models x seeds x question sets, hyperparameters
chosen on validation questions, claims tested, and a report. Work that arms have in common is done
once, and a finished stage is not repeated, so the same command resumes a stopped study. In the
recipe's run_dir:
  report.html    verdict, claims, tables, figures (also report.md, report.json, figures/)
  choices.json   the choices made on validation questions, before test questions are read
  questions/     the validation and test questions
Stages are in study.cache_dir (runs/stages), shared by all studies; each folder has a stage.log.

examples:
  kinject study recipes/studies/sandbox-quick.yaml
  kinject study recipes/studies/sandbox.yaml --dry-run
  kinject study recipes/studies/sandbox.yaml 'study.seeds=[0]' run_dir=runs/studies/one-seed
  kinject study recipes/studies/paper-mmlu.yaml --executor ray"""


def add_study(verbs: Any) -> None:
    """Add `kinject study`."""
    parser = add_verb(verbs, "study", "run a whole experiment: arms, seeds, choices, claims, report", _STUDY, None)
    parser.add_argument(
        "--dry-run", action="store_true", help="print which stages would run and which are done, then stop"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help="stages at once (default: one for each GPU; without one, a core each, at most 8)",
    )  # fmt: skip
    parser.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="worker processes here, or a Ray cluster (RAY_ADDRESS)",
    )
    parser.set_defaults(run=_study)


def _study(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "study")
    if arguments.dry_run:
        from kinject.study.run import render_plan

        show(render_plan(recipe))
        return 0
    from kinject.executors import executor_factory
    from kinject.report.summary import render_summary
    from kinject.study.run import run_study

    result, page, was_there = run_study(recipe, executor_factory(arguments.executor, arguments.jobs))
    show(render_summary(result))
    show(f"report: {page}" + ("   (everything was done already)" if was_there else ""))
    return 1 if result.failures or result.unscored or any(arm.n_unscored for arm in result.results) else 0


_BENCH = """\
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


def add_bench(verbs: Any) -> None:
    """Add `kinject bench`."""
    parser = add_verb(verbs, "bench", "compare training strategies: time, memory, accuracy", _BENCH, None)
    names = "vanilla always runs; names: fp16, bf16, packing, accumulation, checkpointing, offloading, adafactor, "
    names += "adamw-8bit, compile, lora, combined"
    parser.add_argument("--only", metavar="NAME,NAME", default="", help=f"only these strategies ({names})")
    parser.add_argument("--skip", metavar="NAME,NAME", default="", help="all strategies except these")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds, for intervals (default: 3)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps of each run (default: the recipe's max_steps, else 12)"
    )
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
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
