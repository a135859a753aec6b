"""kinject study."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.terminal import show

_STUDY = """\
Run a whole experiment from one file: arms x models x seeds x question sets, hyperparameters chosen on
validation questions, claims tested, and a report. A finished stage is not repeated, so the same command
resumes a stopped study. In the recipe's run_dir:
  report.html    verdict, claims, tables, figures (also report.json, figures/)
  choices.json   the choices made on validation questions, before test questions are read
Stages are in study.cache_dir (runs/stages), shared by all studies; each folder has a stage.log.

examples:
  kinject study recipes/studies/sandbox-quick.yaml
  kinject study recipes/studies/sandbox.yaml --dry-run
  kinject study recipes/studies/sandbox.yaml 'study.seeds=[0]' run_dir=runs/studies/one-seed"""


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
    parser.set_defaults(run=_study)


def _study(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "study")
    if arguments.dry_run:
        from kinject.study.run import render_plan

        show(render_plan(recipe))
        return 0
    from kinject.executors import executor_factory
    from kinject.report.files import render_summary
    from kinject.study.run import run_study

    result, page, was_there = run_study(recipe, executor_factory(arguments.jobs))
    show(render_summary(result))
    show(f"report: {page}" + ("   (everything was done already)" if was_there else ""))
    return 1 if result.failures or result.unscored or any(arm.n_unscored for arm in result.results) else 0
