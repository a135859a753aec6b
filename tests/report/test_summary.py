"""The report of an evaluation as text on the terminal."""

from __future__ import annotations

from study_samples import make_evaluation, make_result

from kinject.report.summary import render_summary
from kinject.results import ArmResult, Contrast


def result(
    name: str, role: str, arm: str, n_correct: int, change: tuple[float, int, int, float] | None, k: int = 0
) -> ArmResult:
    contrast = None
    if change is not None:
        delta, gained, lost, p = change
        contrast = Contrast("base", delta, None, None, p, None, gained, lost, None, "McNemar", 40, 40, 40, n_correct / 40)
    right = [index < n_correct for index in range(40)]
    return make_result(arm, right, None, k=k, question_set=name, role=role, to_base=contrast, low=0.1, high=0.4)


REPORT = make_evaluation(
    (
        result("new", "learning", "base", 10, None),
        result("new", "learning", "base", 38, (0.7, 28, 0, 7.5e-9), k=3),
        result("new", "learning", "cpt", 32, (0.55, 24, 2, 0.0004)),
        result("known", "retention", "base", 40, None),
        result("known", "retention", "cpt", 39, (-0.025, 0, 1, 1.0)),
    ),
    "demo",
    notes=("cpt: said something",),
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

change to base, by question set
  arm       K  format  shots  learning: new  retention: known
  base+rag  3  texts       0         +0.700
  cpt       0  texts       0         +0.550            -0.025

note: cpt: said something

cpt gained on new (25.0% → 80.0% correct), but is not shown to be above guessing; no loss is shown on known; no \
difference from retrieval alone is shown on new (95.0%). This is about \
these models: each arm was trained once, and another training may differ; a difference is named only if p < 0.05."""


def test_the_table_shows_learning_beside_forgetting() -> None:
    assert render_summary(REPORT) == TABLE


def test_without_retention_there_is_no_summary() -> None:
    assert "change to base" not in render_summary(make_evaluation(REPORT.results[:3]))


def test_unscored_questions_stand_beside_n() -> None:
    unscored = make_result("base", [True, *[False] * 39], None, n_unscored=3)
    assert "40 (3 unscored)" in render_summary(make_evaluation((unscored,)))
