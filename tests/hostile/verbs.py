"""Damaged inputs given to whole verbs, in this process: an exit code and a message, and no file outside the run folder."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from random import Random

from kinds import (
    ANSWERS,
    CORPORA,
    DOCUMENTS,
    PAGES,
    PDFS,
    QUESTIONS,
    ROOT,
    Kind,
    as_yaml,
    from_trees,
    lines_of,
    recipe_trees,
)
from mutations import damaged_bytes

from kinject.cli import main
from kinject.errors import InputError

RECIPE = {
    "run_dir": "run", "augment": {
        "documents": "", "styles": {"permuted": 2, "tagged": 1}, "generator": {"kind": "sandbox"}, "passage_tokens": 16,
    },
}  # fmt: skip
LOG = [
    [
        {"step": 1, "loss": 2.0, "learning_rate": 1e-4, "epoch": 0.1},
        {"step": 2, "loss": 1.5, "epoch": 0.2, "grad_norm": 1.0},
    ]
]


def verb_kinds() -> list[tuple[Kind, float]]:
    """Return kinds that are whole verbs."""
    pages = [*PAGES, *PDFS]

    def page(random: Random) -> bytes:
        return damaged_bytes(random.choice(pages), pages, random)

    return [
        (Kind("kinject recipes check", "recipe.yaml", from_trees(recipe_trees(), as_yaml), _check), 3),
        (Kind("kinject augment (rows)", "d.jsonl", from_trees([*DOCUMENTS, *CORPORA], lines_of), _augment), 3),
        (Kind("kinject augment (page)", "d.html", page, _augment), 1),
        (Kind("kinject augment (leak check)", "q.jsonl", from_trees(QUESTIONS, lines_of), _augment_checked), 1),
        (Kind("kinject compare", "answers.jsonl", from_trees(ANSWERS, lines_of), _compare), 2),
        (Kind("kinject view --draw (log)", "log.jsonl", from_trees(LOG, lines_of), _report), 0.3),
    ]


def _run(*words: str) -> None:
    """Run a verb. Raises `InputError` with what it said where it refuses; lets everything else through."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    if code == 2:
        raise InputError(
            output.getvalue().partition(": ")[2] if output.getvalue().startswith("kinject ") else output.getvalue()
        )
    assert code in (0, 1), (code, output.getvalue())


def _check(path: Path) -> None:
    _run("recipes", "check", str(path))


def _compare(path: Path) -> None:
    _run("compare", str(path), str(path), "--score", "chars")


def _in_a_fresh_folder(path: Path, **changes: object) -> None:
    """Augment documents beside `path`, and see that nothing was written but the run folder."""
    run_dir = path.parent / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    section = {**RECIPE["augment"], "documents": str(path), **changes}  # type: ignore[dict-item]
    (path.parent / "r.yaml").write_bytes(as_yaml({"run_dir": str(run_dir), "augment": section}))
    before = {item.name for item in path.parent.iterdir()}
    try:
        _run("augment", str(path.parent / "r.yaml"))
    finally:
        new_files = {item.name for item in path.parent.iterdir()} - before - {"run"}
        assert not new_files, new_files


def _augment(path: Path) -> None:
    _in_a_fresh_folder(path)


def _augment_checked(path: Path) -> None:
    _in_a_fresh_folder(
        path, documents=str(ROOT / "data" / "sandbox" / "documents.jsonl"), contamination_check=[str(path)]
    )


def _report(path: Path) -> None:
    (path.parent / "manifest.json").write_text(
        '{"format_version": 1, "stage": "train", "recipe": {}, "inputs": {}, "counts": {}}'
    )
    _run("view", str(path.parent), "--draw")


def result_kinds() -> list[tuple[Kind, float]]:
    """Return the report.json of an evaluation and of a study, as the tests of the reports make them."""
    sys.path.insert(0, str(ROOT / "tests" / "report"))
    from kinds import read_result
    from study_results import make_small
    from study_samples import make_report

    from kinject.results import to_json

    def as_json(tree: object) -> bytes:
        return json.dumps(tree).encode()

    trees = [{"format_version": 1, **to_json(report)} for report in (make_small(), make_report())]
    return [
        (Kind("study report.json", "report.json", from_trees(trees[:1], as_json), read_result), 1),
        (Kind("eval report.json", "report.json", from_trees(trees[1:], as_json), read_result), 1),
    ]
