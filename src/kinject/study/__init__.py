"""Whole experiments: arms, seeds and claims, from one recipe to a result.

Importing this package imports neither matplotlib nor jinja2 nor torch; its functions do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinject.recipe import StudyRecipe
    from kinject.results import Report

__all__ = ["study"]


def study(recipe: StudyRecipe, *, jobs: int | None = None) -> Report:
    """Run the unfinished stages of the study and write its report; return its result.

    `jobs` is the number of worker processes (`kinject.executors.executor_factory`). Raises as `kinject.study.run.run_study`.
    """
    from kinject.executors import executor_factory
    from kinject.study.run import run_study

    return run_study(recipe, executor_factory(jobs))[0]
