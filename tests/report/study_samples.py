"""Reports and logs made from answers, with statistics computed here, the plain way, and not by kinject."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.stats import binomtest

from kinject.types import Cell, Difference, Report

Z = 1.959963984540054


def markdown_faults(text: str, tag: str = r"<(?!\s)") -> list[str]:
    """Return what in a report.md would be a tag (a match of `tag`), leads anywhere but to its figures, or tears a table.

    Code, which is indented, is shown as it is.
    """
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    faults = [match[0] for pattern in (tag, r"(?<!\\)\]\((?!figures/)", "://") for match in re.finditer(pattern, prose)]
    width = 0
    for line in prose.splitlines():
        n = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("|") and width not in (0, n):
            faults.append(line)
        width = n if line.startswith("|") else 0
    return faults


def make_cell(arm: str, right: Sequence[bool], base: Sequence[bool] | None, *, k: int = 0, **changes: object) -> Cell:
    """Return the cell of one arm from which questions it got right; `base` are the base arm's, None for base itself."""
    n, n_correct = len(right), sum(right)
    share, spread = n_correct / n, 1 + Z * Z / n
    middle = (share + Z * Z / (2 * n)) / spread
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / spread
    fields: dict[str, object] = {
        "question_set": "new", "role": "learning", "arm": arm, "model": arm.removesuffix("+rag"), "format": "texts",
        "shots": 0, "k": k, "n": n, "n_unscored": 0, "n_correct": n_correct, "accuracy": share, "low": middle - half,
        "high": middle + half, "chance": 0.25, "difference": None,
    }  # fmt: skip
    if base is not None:
        gained = sum(r and not b for r, b in zip(right, base, strict=True))
        lost = sum(b and not r for r, b in zip(right, base, strict=True))
        p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        fields["difference"] = Difference("base", (gained - lost) / n, gained, lost, float(p))
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def first(n_right: int, n: int) -> list[bool]:
    """Return that the first `n_right` of `n` questions were answered rightly."""
    return [index < n_right for index in range(n)]


def answers(share: float, n: int, seed: int) -> list[bool]:
    """Return answers that are right with probability `share`."""
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(n)]


ARMS = {"base": (0.26, 0.98), "base+rag": (0.97, 0.985), "reg": (0.55, 0.9), "reg+rag": (0.93, 0.94),
        "par": (0.86, 0.965), "par+rag": (0.965, 0.97)}  # fmt: skip
SETS = {"new": ("learning", 600), "known": ("retention", 400), "reverse": ("learning", 200)}


def make_answers() -> dict[tuple[str, str], list[bool]]:
    """Return (question set, arm) -> which questions were right, for a realistic run."""
    found = {}
    for which, (name, (_, n)) in enumerate(SETS.items()):
        for index, (arm, (learned, kept)) in enumerate(ARMS.items()):
            share = {"new": learned, "known": kept, "reverse": 0.25 + 0.6 * arm.endswith("+rag")}[name]
            found[name, arm] = answers(share, n, 100 * which + index)
    return found


def make_report(title: str = "Sandbox: 120 people the base model never read about") -> Report:
    """Return the report of `make_answers`."""
    right = make_answers()
    cells = [
        make_cell(
            arm,
            right[name, arm],
            None if arm == "base" else right[name, "base"],
            k=3 if arm.endswith("+rag") else 0,
            question_set=name,
            role=role,
        )
        for name, (role, _) in SETS.items()
        for arm in ARMS
    ]
    return Report(title, tuple(cells), ("Retrieval: BM25 over 120 documents.",))


def write_log(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a training log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_logs(folder: Path) -> dict[str, Path]:
    """Write the logs of two runs, one over 6 epochs with a loss that steps down, one over 1."""
    runs = {}
    for name, per_epoch in (("reg", 10), ("par", 60)):
        rows = [
            {"step": step, "loss": 3 * 0.5**epoch + 0.01 * step, "learning_rate": 3e-4, "epoch": step / per_epoch}
            for step in range(1, 61)
            for epoch in [step // per_epoch]
        ]
        runs[name] = write_log(folder / name / "log.jsonl", [*rows, {"step": 60, "eval_loss": 1.0, "epoch": 6.0}])
    return runs
