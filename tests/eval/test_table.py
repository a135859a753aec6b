from __future__ import annotations

from kinject.eval import render_table
from kinject.types import Cell, Difference, Report


def cell(name: str, role: str, arm: str, n_correct: int, difference: Difference | None, k: int = 0) -> Cell:
    return Cell(
        name,
        role,
        arm,
        arm.removesuffix("+rag"),
        "texts",
        0,
        k,
        40,
        0,
        n_correct,
        n_correct / 40,
        0.1,
        0.4,
        0.25,
        difference,
    )


REPORT = Report(
    "demo",
    (
        cell("new", "learning", "base", 10, None),
        cell("new", "learning", "base+rag", 38, Difference("base", 0.7, 28, 0, 7.5e-9), k=3),
        cell("new", "learning", "cpt", 32, Difference("base", 0.55, 24, 2, 0.0004)),
        cell("known", "retention", "base", 40, None),
        cell("known", "retention", "cpt", 39, Difference("base", -0.025, 0, 1, 1.0)),
    ),
    ("cpt: said something",),
)

TABLE = """\
new (learning, 40 questions)
  arm       K  format  shots  accuracy    95% interval  chance   n  to base        p
  base      0  texts       0     0.250  0.100 to 0.400   0.250  40
  base+rag  3  texts       0     0.950  0.100 to 0.400   0.250  40   +0.700  < 0.001
  cpt       0  texts       0     0.800  0.100 to 0.400   0.250  40   +0.550  < 0.001

known (retention, 40 questions)
  arm   K  format  shots  accuracy    95% interval  chance   n  to base      p
  base  0  texts       0     1.000  0.100 to 0.400   0.250  40
  cpt   0  texts       0     0.975  0.100 to 0.400   0.250  40   -0.025  1.000

change to base: learned, and kept
  arm       K  format  shots  learning: new  retention: known
  base+rag  3  texts       0         +0.700
  cpt       0  texts       0         +0.550            -0.025

note: cpt: said something"""


def test_the_table_shows_learning_beside_forgetting():
    assert render_table(REPORT) == TABLE


def test_without_retention_there_is_no_summary():
    assert "learned, and kept" not in render_table(Report("demo", REPORT.cells[:3]))


def test_unscored_questions_stand_beside_n():
    unscored = Cell("new", "learning", "base", "base", "texts", 0, 0, 40, 3, 1, 0.025, 0, 0.1, 0.25, None)
    assert "40 (3 unscored)" in render_table(Report("demo", (unscored,)))
