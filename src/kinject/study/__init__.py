"""Whole experiments: arms, seeds and claims, from one recipe to a result.

Importing this loads neither matplotlib nor jinja2 nor torch: they are imported where they are needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kinject import VerbPackage

if TYPE_CHECKING:
    from kinject.recipe import StudyRecipe
    from kinject.results import Report

__all__ = ["study"]


def study(recipe: StudyRecipe, *, jobs: int | None = None, executor: str = "local") -> Report:
    """Run what is missing of the study and write its report; see `kinject.study.run.run_study` and `workers.executor_factory`."""
    from kinject.study.executors import executor_factory
    from kinject.study.run import run_study

    return run_study(recipe, executor_factory(executor, jobs))[0]


sys.modules[__name__].__class__ = VerbPackage
