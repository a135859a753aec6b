"""kinject train and kinject export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kinject.cli import Outcome, given_options, incomplete, option, recipe_of, verb
from kinject.cli.job_files import JOB_OPTION, print_job
from kinject.errors import InputError
from kinject.gguf import KINDS
from kinject.process import is_first_process
from kinject.terminal import exact_number, show

if TYPE_CHECKING:
    from kinject.export import ExportResult


@verb(
    "train",
    option(
        "--resume",
        action="store_true",
        help="resume from the newest complete checkpoint in run_dir",
        either=True,
    ),
    option(
        "--overwrite", action="store_true", help="start over, whatever is in run_dir", either=True
    ),
    option(
        "--dry-run",
        action="store_true",
        help="print the plan of kinject plan, and stop",
        either=True,
    ),
    JOB_OPTION,
)
def _train(arguments: argparse.Namespace) -> Outcome:
    if arguments.dry_run:
        # As kinject plan reads it: inputs may be missing.
        planned = recipe_of(arguments, "plan")
        from kinject.plan.run import plan, render_plan

        outlook = plan(planned)
        show(render_plan(outlook))
        return outlook, incomplete(not outlook.way.command)
    if arguments.job is not None:
        return print_job(arguments, "train")
    recipe = recipe_of(arguments, "train")
    from kinject.api import train
    from kinject.train.run import render_summary

    result = train(recipe, resume=arguments.resume, overwrite=arguments.overwrite)
    if is_first_process():
        show(render_summary(result))
    return result, incomplete(result.ended_above_start)


def _merge(arguments: argparse.Namespace) -> list[Path]:
    """Merge models as the arguments ask; print and return the folder of each result.

    Raises `InputError` unless they are of one form.
    """
    from kinject.train.merge import add_difference, merge

    forms = {"--average-with": arguments.average_with, "--add": arguments.add}
    used = [name for name, value in forms.items() if value is not None]
    if len(used) > 1:
        raise InputError(f"kinject export: found {' and '.join(used)}. Give one of them.")
    if (arguments.add is None) != (arguments.minus is None):
        raise InputError(
            "--add and --minus belong together: an instruct model, and the base that it was made "
            "from."
        )
    for flag, value, form in (
        ("--alpha", arguments.alpha, "--average-with"),
        ("--scale", arguments.scale, "--add"),
    ):
        if value is not None and used != [form]:
            raise InputError(f"{flag}: is for {form} only.")
    folder = arguments.folder
    # Of a run, which an export without a merge takes too.
    if (folder / "model").is_dir():
        folder = folder / "model"
    model, out = str(folder), arguments.out or folder.parent / "merged"
    if arguments.add is not None:
        scales = sorted(set(arguments.scale or (1.0,)))
        merged = add_difference(model, arguments.add, arguments.minus, scales, out)
        folders = {f"scale {exact_number(scale)}": folder for scale, folder in merged.items()}
    else:
        alphas = sorted(set(arguments.alpha or (0.0, 0.25, 0.5, 0.75, 1.0)))
        merged = merge(arguments.average_with, model, alphas, out)
        folders = {f"alpha {exact_number(alpha)}": folder for alpha, folder in merged.items()}
    for name, folder in folders.items():
        show(f"{name}: {folder}")
    return list(folders.values())


_OF_MERGE = ("average_with", "alpha", "add", "minus", "scale")
"""Options of export that merge models."""
_OF_MODEL = ("report", "dtype", "gguf", "prove", "copies")
"""Options of export that are about one model."""


@verb(
    "export",
    option(
        "folder",
        type=Path,
        metavar="MODEL",
        help="run folder of kinject train, or a model or adapter folder",
    ),
    option(
        "--average-with",
        metavar="BASE",
        help="average MODEL, which may be an adapter, with its base",
        group="merge",
    ),
    option(
        "--alpha",
        type=float,
        nargs="+",
        help="fractions of MODEL (default: 0 0.25 0.5 0.75 1)",
        group="merge",
    ),
    option(
        "--add",
        metavar="INSTRUCT",
        help="add what INSTRUCT learned beyond BASE (arXiv 2310.04799)",
        group="merge",
    ),
    option("--minus", metavar="BASE", help="the base of both models", group="merge"),
    option(
        "--scale",
        type=float,
        nargs="+",
        help="factors of the difference (default: 1, the whole)",
        group="merge",
    ),
    option("--out", type=Path, metavar="DIR", help="folder of the result (default: export in RUN)"),
    option(
        "--report",
        type=Path,
        metavar="RUN",
        help="evaluation or study whose results the card shows",
    ),
    option(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights (auto: as they are stored; of an adapter's base, as it is "
        "stored)",
    ),
    option("--license", metavar="ID", help="licence in the card, as apache-2.0"),
    option(
        "--upload",
        metavar="OWNER/NAME",
        help="upload the result to the hub; of a run of kinject augment, its corpus as a data set",
    ),
    option("--public", action="store_true", help="make a new repository public (default: private)"),
    option("--gguf", choices=tuple(KINDS), help="write a GGUF file for llama.cpp, too"),
    option(
        "--prove",
        type=Path,
        metavar="RUN",
        nargs="?",
        const=Path(),
        help="ask the questions of an evaluation (recipe or run; default: --report, else the "
        "run's probes) of the result and "
        "each copy; exit code 1 if one differs from the trained model",
    ),
    option(
        "--copy",
        nargs="+",
        default=[],
        metavar="COPY",
        dest="copies",
        help="further copies to prove: a model folder, a .gguf file, a server's address "
        "(http://HOST/v1)",
    ),
)
def _export(arguments: argparse.Namespace) -> Outcome:
    merges = any(getattr(arguments, name) for name in _OF_MERGE)
    _check_export(arguments, merges=merges)
    if merges:
        return {"folders": _merge(arguments)}, 0
    from kinject.export import ExportOptions, export
    from kinject.upload import Target, is_corpus, upload_corpus, upload_model

    target = None
    if arguments.upload is not None:
        target = Target(arguments.upload, arguments.public)
        # Before the export, which may take long.
        target.check()
        if is_corpus(arguments.folder):
            _check_corpus_upload(arguments)
            return _uploaded(upload_corpus(arguments.folder, target, arguments.license)), 0
    values = {
        key: value
        for key, value in vars(arguments).items()
        if key in ExportOptions.__dataclass_fields__
    }
    # The value of --prove without a RUN.
    if arguments.prove == Path():
        values["prove"] = arguments.report or arguments.folder
    result = export(ExportOptions(**{**values, "copies": tuple(arguments.copies)}))
    _show_export(result)
    if not all(proof.holds for proof in result.proofs):
        return result, 1  # what differs from the trained model is not uploaded
    if target is not None:
        _uploaded(upload_model(result.folder, target))
    return result, 0


def _show_export(result: ExportResult) -> None:
    for path in (result.folder, result.gguf):
        if path is not None:
            show(f"{path}: written")
    for proof in result.proofs:
        show("\n".join(proof.lines()))
    if result.commands:
        show("\nUse it:\n  " + "\n  ".join(result.commands))
    if result.serve:
        show(f"\n{result.serve}")


def _check_export(arguments: argparse.Namespace, *, merges: bool) -> None:
    """Raise `InputError` for options that do not belong together."""
    unused = given_options(arguments, ("upload", "license", *_OF_MODEL))
    if merges and unused:
        raise InputError(
            f"{unused[0]}: is for one result. Export the merged model that you choose."
        )
    if arguments.public and arguments.upload is None:
        raise InputError("--public: is for --upload only.")


def _check_corpus_upload(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options that the upload of a corpus does not obey."""
    unused = given_options(arguments, ("out", *_OF_MODEL))
    if unused:
        raise InputError(f"{unused[0]}: is for models. {arguments.folder} holds a corpus.")


def _uploaded(address: str) -> dict[str, str]:
    show(f"uploaded: {address}")
    return {"uploaded": address}
