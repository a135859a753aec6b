"""Multiple-choice questions scored by log-likelihood. Importing this package imports no torch;
`evaluate` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinject.corpus.questions import read_questions

if TYPE_CHECKING:
    from kinject.recipe import EvalRecipe
    from kinject.results import Report

__all__ = ["evaluate", "read_questions"]


def evaluate(recipe: EvalRecipe) -> Report:
    """Score every question set of the recipe's `eval` section with every model; see
    `kinject.eval.run.evaluate`."""
    # Here: `import kinject.eval` loads no heavy library (tests/report/test_report.py).
    from kinject.eval.run import evaluate as run

    return run(recipe)
