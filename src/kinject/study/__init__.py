"""What the numbers support: whole experiments, and the reports of a study, an evaluation and a training run.

Importing this loads neither matplotlib nor jinja2 nor torch: they are imported where they are needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kinject import VerbPackage
from kinject.study.report import read_report, redraw_report, write_report
from kinject.study.study_report import redraw_study
from kinject.study.training_log import training_logs
from kinject.study.training_page import write_training_report

if TYPE_CHECKING:
    from kinject.recipe import Recipe
    from kinject.study.outcomes import StudyResult

__all__ = [
    "read_report",
    "redraw_report",
    "redraw_study",
    "study",
    "training_logs",
    "write_report",
    "write_training_report",
]


def study(recipe: Recipe, *, jobs: int | None = None, executor: str = "local") -> StudyResult:
    """Run what is missing of the study and write its report; see `kinject.study.run.run_study` and `workers.executor_of`."""
    from kinject.study.run import run_study
    from kinject.study.workers import executor_of

    return run_study(recipe, executor_of(executor, jobs))[0]


sys.modules[__name__].__class__ = VerbPackage
