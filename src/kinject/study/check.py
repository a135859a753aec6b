"""Checks a study's recipe beyond its types: unknown names, overrides that no stage reads, faults of the shared recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.questions import read_questions
from kinject.disk import is_file
from kinject.errors import Problem, RecipeError
from kinject.eval.plan import layout_of
from kinject.eval.prompts import GENERATED, OPEN, WITHOUT_QUESTION
from kinject.recipe import StudyRecipe, read_recipe
from kinject.recipe.check import KeyPath
from kinject.recipe.conflicts import Shared, find_problems
from kinject.recipe.eval_section import EvalSection
from kinject.study.arms import (
    AUGMENT_SECTIONS,
    TRAIN_SECTIONS,
    StudyArms,
    eval_overrides,
    override_arguments,
)


def check_names(recipe: StudyRecipe, *, check_inputs: bool = True) -> None:
    """Raise `RecipeError` with every unknown name and unused key of the section. Quick: reads no other recipe.

    Unless `check_inputs` is False, the corpora that arms name must exist.
    """
    recipe.raise_any(find_problems("study", recipe, replace(_KEYS, checks_inputs=check_inputs)))


_KEYS = Shared(augment_keys=tuple(AUGMENT_SECTIONS), train_keys=tuple(TRAIN_SECTIONS))


def check_inputs(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` for missing documents and questions of the shared recipes, before anything is trained."""
    section = recipe.study
    augment = {key: value for key, value in (section.overrides or {}).items() if key.split(".")[0] in AUGMENT_SECTIONS}
    evaluation = {**eval_overrides(section), "eval.models": {"any": "."}}  # replaced by the arms' models
    shared: tuple[tuple[str | None, Mapping[str, Any], Literal["augment", "eval"]], ...] = (
        (section.augment, augment, "augment"), (section.eval, evaluation, "eval")
    )  # fmt: skip
    problems: list[Problem] = []
    for path, overrides, verb in shared:
        try:
            if path is not None:
                read_recipe(Path(path), override_arguments(overrides), verb)
        except RecipeError as error:
            problems += error.problems
    recipe.raise_any(problems)


def check_shared_recipes(recipe: StudyRecipe, arms: StudyArms) -> None:
    """Raise `RecipeError` with every fault of the shared recipes under the overrides of some arm. Imports TRL."""
    every = [*arms.arms, *(arm for grid in arms.grids.values() for _, arm in grid)]
    problems: list[Problem] = []
    for arm in every:
        key_path: KeyPath = ("study", "sweeps", arm.sweep) if arm.sweep else ("study", "arms", arm.name)
        shared = ((recipe.study.augment, arm.augment_overrides), (recipe.study.train, arm.train_overrides))
        for path, overrides in shared:
            try:
                if path is not None:
                    read_recipe(Path(path), override_arguments(overrides))
            except RecipeError as error:  # a fault of an override is reported at the arm's line
                problems += [
                    replace(problem, location=recipe.location(key_path))
                    if problem.location == "command line"
                    else problem
                    for problem in error.problems
                ]
    evaluation = read_recipe(Path(recipe.study.eval), override_arguments(eval_overrides(recipe.study))).eval
    if evaluation is None:
        problems.append(Problem("study.eval", f"{recipe.study.eval} has no eval section."))
    else:
        decides = {name: head_format(evaluation, name)[0] for name in evaluation.questions}
        shared_eval = replace(
            _KEYS,
            checks_inputs=False,
            sets=evaluation.questions,
            writes=frozenset(name for name, format in decides.items() if format in GENERATED),
            writes_words=frozenset(name for name, format in decides.items() if format in OPEN),
        )
        problems += [*find_problems("study", recipe, shared_eval), *_impossible_outcomes(recipe, evaluation)]
    recipe.raise_any(problems)


def head_format(evaluation: EvalSection, question_set: str) -> tuple[str, int]:
    """Return the format and number of shots that decide choices and claims on a set: the first of each in the eval recipe."""
    asked = evaluation.sets()[question_set].formats or evaluation.formats
    return next((format for format in asked if format not in WITHOUT_QUESTION), asked[0]), evaluation.shots[0]


def _impossible_outcomes(recipe: StudyRecipe, evaluation: EvalSection) -> Iterator[Problem]:
    """Yield a problem for each claim whose outcome no question of its set can have: abstained or answered."""
    for name, claim in (recipe.study.claims or {}).items():
        if claim.question_set not in evaluation.questions or claim.outcome not in ("abstained", "answered"):
            continue
        item = evaluation.sets()[claim.question_set]
        if is_file(item.path):
            questions = read_questions(Path(item.path), layout_of(item.layout, item.formats or evaluation.formats))
            if {question.is_answerable for question in questions} == {claim.outcome == "answered"}:
                message = (
                    f"no question of {claim.question_set!r} can be {claim.outcome}: a question with an answer can be "
                    "abstained from, one whose answers are [] can be answered. Take another outcome or set."
                )
                yield Problem(("study", "claims", name, "outcome"), message)
