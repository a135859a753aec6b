"""kinject merge."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kinject.errors import InputError
from kinject.terminal import show

_DETAIL = """\
Average a tuned model with its base, weight by weight: alpha 0 is the base, 1 the tuned model.
Values in between often forget far less and keep most of what was learned. TUNED may be a peft
adapter.

examples:
  kinject merge runs/sandbox/base/model runs/cpt/model
  kinject merge runs/sandbox/base/model runs/cpt/model --alpha 0.5 0.75 --out runs/merged
  kinject merge runs/sandbox/base/model runs/cpt/model --probe eval/sandbox/new.jsonl
  kinject merge runs/sandbox/base/model runs/cpt/model --probe recipes/eval.yaml"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "merge",
        help="average a tuned model with its base",
        description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="folder of the base model")
    parser.add_argument("tuned", metavar="TUNED", help="folder of the trained model, or of an adapter")
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="fractions of TUNED (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="folder for the results (default: merged beside TUNED)")
    parser.add_argument(
        "--probe",
        type=Path,
        nargs="+",
        metavar="QUESTIONS",
        help="question files (or one evaluation recipe) on which to score the base and each result",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.train.merge import merge

    out = arguments.out or Path(arguments.tuned).parent / "merged"
    probe = None if arguments.probe is None else _probe_recipe(arguments.probe, out)
    done = merge(arguments.base, arguments.tuned, sorted(set(arguments.alpha)), out)
    for alpha, folder in done.items():
        show(f"alpha {alpha:g}: {folder}")
    if probe is not None:
        from kinject.eval import evaluate
        from kinject.recipe import read_recipe
        from kinject.report import render_summary

        models = {"base": arguments.base} | {f"alpha-{alpha:g}": str(folder) for alpha, folder in done.items()}
        overrides = [f"run_dir={out / 'eval'}", f"eval.models={json.dumps(models)}"]
        show(render_summary(evaluate(read_recipe(probe, overrides, "eval"))))
    return 0


def _probe_recipe(files: list[Path], out: Path) -> Path:
    """Return the evaluation recipe among `files`, or write one into `out` that asks them all as question files."""
    from kinject.disk import write_json

    recipes = [path for path in files if path.suffix in (".yaml", ".yml")]
    if recipes and len(files) > 1:
        raise InputError(
            f"--probe: found {len(files)} files, {recipes[0]} among them. Give one recipe, or question files."
        )
    if recipes:
        return recipes[0]
    absent = [path for path in files if not path.is_file()]
    if absent:
        raise InputError(f"--probe: {absent[0]}: no such file. Give question files or an evaluation recipe.")
    if len({path.stem for path in files}) < len(files):
        raise InputError("--probe: two files have the same name. The tables are named by them; rename one.")
    recipe = out / "probe.yaml"  # JSON is YAML
    write_json(
        recipe, {"run_dir": str(out / "eval"), "eval": {"models": {}, "questions": {p.stem: str(p) for p in files}}}
    )
    return recipe
