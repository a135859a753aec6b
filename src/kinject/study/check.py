"""Checks a study's recipe beyond its types: unknown names, overrides that no stage reads, faults of the shared recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.questions import read_questions
from kinject.disk import is_file
from kinject.errors import Problem, RecipeError
from kinject.eval.plan import layout_of, question_set_section
from kinject.eval.prompts import GENERATED, OPEN, WITHOUT_QUESTION
from kinject.recipe import StudyRecipe, read_recipe
from kinject.recipe.check import KeyPath, suggestion
from kinject.recipe.eval_section import EvalSection
from kinject.study.arms import (
    AUGMENT_SECTIONS,
    BASE,
    RAG,
    TRAIN_SECTIONS,
    StudyArms,
    base_models,
    eval_overrides,
    override_arguments,
    value_label,
)

_NO_SWEEPS = " The study has no sweeps; add it to study.sweeps."


def check_names(recipe: StudyRecipe, *, check_inputs: bool = True) -> None:
    """Raise `RecipeError` with every unknown name and unused key of the section. Quick: reads no other recipe.

    Unless `check_inputs` is False, the corpora that arms name must exist.
    """
    _raise_faults(
        [*_arm_faults(recipe, check_inputs), *_tune_faults(recipe), *_model_faults(recipe), *_sweep_faults(recipe),
         *_scaling_faults(recipe), *_claim_faults(recipe), *_key_faults(recipe)]
    )  # fmt: skip


def check_inputs(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` for missing documents and questions of the shared recipes, before anything is trained."""
    section = recipe.study
    augment = {key: value for key, value in (section.overrides or {}).items() if key.split(".")[0] in AUGMENT_SECTIONS}
    evaluation = {**eval_overrides(section), "eval.models": {"any": "."}}  # replaced by the arms' models
    shared: tuple[tuple[str | None, Mapping[str, Any], Literal["augment", "eval"]], ...] = (
        (section.augment, augment, "augment"), (section.eval, evaluation, "eval")
    )  # fmt: skip
    faults: list[Problem] = []
    for path, overrides, verb in shared:
        try:
            if path is not None:
                read_recipe(Path(path), override_arguments(overrides), verb)
        except RecipeError as error:
            faults += error.problems
    _raise_faults(faults)


def check_shared_recipes(recipe: StudyRecipe, arms: StudyArms) -> None:
    """Raise `RecipeError` with every fault of the shared recipes under the overrides of some arm. Imports TRL."""
    every = [*arms.arms, *(arm for grid in arms.grids.values() for _, arm in grid)]
    faults: list[Problem] = []
    for arm in every:
        key_path: KeyPath = ("study", "sweeps", arm.sweep) if arm.sweep else ("study", "arms", arm.name)
        shared = ((recipe.study.augment, arm.augment_overrides), (recipe.study.train, arm.train_overrides))
        for path, overrides in shared:
            try:
                if path is not None:
                    read_recipe(Path(path), override_arguments(overrides))
            except RecipeError as error:  # a fault of an override is reported at the arm's line
                faults += [
                    replace(fault, location=recipe.location(key_path)) if fault.location == "command line" else fault
                    for fault in error.problems
                ]
    _raise_faults([*faults, *_question_set_faults(recipe)])


def _raise_faults(faults: Iterable[Problem]) -> None:
    unique = list(dict.fromkeys(faults))
    if unique:
        raise RecipeError(unique)


def _unknown(recipe: StudyRecipe, key_path: KeyPath, name: str | None, allowed: Iterable[str]) -> Iterator[Problem]:
    """Yield a fault if `name` is not among `allowed`, with the nearest of them."""
    allowed = set(allowed)
    if name is not None and name not in allowed:
        yield recipe.problem(key_path, f"found {name!r}.{suggestion(name, allowed)}")


def _arm_faults(recipe: StudyRecipe, check_inputs: bool) -> Iterator[Problem]:
    section = recipe.study
    if BASE in section.arms:
        yield recipe.problem(("study", "arms", BASE), "this name is the untouched model's. Choose another.")
    for name, arm in section.arms.items():
        key_path: KeyPath = ("study", "arms", name)
        if RAG in name or "," in name:
            fault = f"a name with {RAG!r} or a comma would be taken for another arm. Choose another."
            yield recipe.problem(key_path, fault)
        matched = arm.match or {}
        for key, other in matched.items():
            yield from _unknown(recipe, (*key_path, "match", key), other, section.arms.keys() - {BASE, name})
        if len(matched) > 1:
            yield recipe.problem(key_path, f"{' and '.join(matched)} exclude each other. Keep one.")
        for other in matched.values():
            item = section.arms.get(other or "")
            if item is not None and item.match:
                yield recipe.problem(key_path, f"{other} is itself matched to another arm. Name that one.")
        if arm.corpus in ("augmented", "random") and section.augment is None:
            yield recipe.problem(key_path, f"corpus {arm.corpus} needs study.augment, the recipe that writes it.")
        elif arm.corpus not in ("augmented", "random") and not is_file(arm.corpus):
            if Path(arm.corpus).suffix and not check_inputs:
                continue
            fault = (
                f"found {arm.corpus!r}: neither augmented nor random, and as a file nothing is there. Check the path."
            )
            yield recipe.problem((*key_path, "corpus"), fault)


def _tune_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    arms = recipe.study.arms.keys() - {BASE}
    for name, item in (recipe.study.tune or {}).items():
        yield from _unknown(recipe, ("study", "tune", name, "arm"), item.arm, arms)
        for index, arm in enumerate(item.arms or ()):
            yield from _unknown(recipe, ("study", "tune", name, "arms", index), arm, arms)


def _model_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    for name, item in base_models(recipe.study).items():
        key_path: KeyPath = ("study", "models", name)
        if item.path is None and item.recipe is None:
            yield recipe.problem(key_path, "has neither path nor recipe. Give one.")
        if item.overrides and item.recipe is None:
            yield recipe.problem(key_path, "has overrides, but no recipe for them to change. Add the recipe.")


def _sweep_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    arms = recipe.study.arms.keys() - {BASE}
    for name, sweep in (recipe.study.sweeps or {}).items():
        key_path: KeyPath = ("study", "sweeps", name)
        if sweep.arm not in arms:
            yield recipe.problem(key_path, f"arm: found {sweep.arm!r}.{suggestion(sweep.arm, arms)}")
        yield from _unknown(recipe, (*key_path, "control"), sweep.control, {BASE, *arms})


def _scaling_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    scaling = recipe.study.scaling
    if scaling is None:
        return
    yield from _unknown_sweep(recipe, ("study", "scaling", "sweep"), scaling.sweep)
    for subject, n_values in scaling.values.items():
        if n_values < 2:
            fault = f"found {n_values}, allowed: 2 or more. A fact with one possible value carries no information."
            yield recipe.problem(("study", "scaling", "values", subject), fault)
    for name, n_facts in (scaling.facts or {}).items():
        key_path: KeyPath = ("study", "scaling", "facts", name)
        if name not in scaling.question_sets:
            yield recipe.problem(key_path, f"not in question_sets.{suggestion(name, scaling.question_sets)}")
        if n_facts < 1:
            yield recipe.problem(key_path, f"found {n_facts}, allowed: 1 or more.")


def _unknown_sweep(recipe: StudyRecipe, key_path: KeyPath, name: str | None) -> Iterator[Problem]:
    sweeps = recipe.study.sweeps or {}
    if name is not None and name not in sweeps:
        yield recipe.problem(key_path, f"found {name!r}.{suggestion(name, sweeps) or _NO_SWEEPS}")


def _claim_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    required = {
        "difference": ("arm", "baseline"), "equivalence": ("arm", "baseline"), "trend": ("sweep",),
        "above_chance": ("arm",), "near_chance": ("arm",),
    }  # fmt: skip
    arms = {BASE, *recipe.study.arms}
    for name, claim in (recipe.study.claims or {}).items():
        key_path: KeyPath = ("study", "claims", name)
        for key in required[claim.test]:
            if getattr(claim, key) is None:
                yield recipe.problem(key_path, f"{key}: missing; test {claim.test} needs it.")
        for key in ("arm", "baseline"):
            arm = getattr(claim, key)
            if isinstance(arm, Mapping):
                yield from _point_faults(recipe, (*key_path, key), arm)
            elif arm is not None and arm.removesuffix(RAG) not in arms:
                yield recipe.problem((*key_path, key), f"found {arm!r}.{suggestion(arm, arms)}")
        yield from _unknown_sweep(recipe, (*key_path, "sweep"), claim.sweep)


def _point_faults(recipe: StudyRecipe, key_path: KeyPath, point: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the fault of a point of a sweep that a claim names as {SWEEP: VALUE}."""
    if len(point) != 1:
        yield recipe.problem(key_path, f"found {len(point)} keys; a point of a sweep is {{SWEEP: VALUE}}.")
        return
    ((name, value),) = point.items()
    sweep = (recipe.study.sweeps or {}).get(name)
    if sweep is None:
        yield from _unknown_sweep(recipe, key_path, name)
    elif value not in sweep.values:
        allowed = ", ".join(value_label(item) for item in sweep.values)
        yield recipe.problem(key_path, f"found {value_label(value)}, but the values of the sweep {name} are {allowed}.")


def _key_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    """Yield a fault for each override, sweep and tuned key that no stage would read."""
    section = recipe.study
    keys: list[tuple[KeyPath, str]] = [(("study", "overrides", key), key) for key in section.overrides or {}]
    for name, arm in section.arms.items():
        keys += [(("study", "arms", name, "overrides", key), key) for key in arm.overrides or {}]
    keys += [(("study", "tune", name, "key"), item.key) for name, item in (section.tune or {}).items()]
    keys += [
        (("study", "sweeps", name, "key"), item.key)
        for name, item in (section.sweeps or {}).items() if item.key not in ("alpha", "corpus")
    ]  # fmt: skip
    allowed = {*AUGMENT_SECTIONS, *TRAIN_SECTIONS}
    for key_path, key in keys:
        head = key.split(".")[0]
        if head == "eval" and key_path[1] == "overrides" and not key.startswith("eval.models"):
            continue  # overrides of the shared eval recipe are for all arms
        if head not in allowed or key in ("corpus", "model"):
            yield recipe.problem(key_path, f"found {key!r}; it must begin with one of {', '.join(sorted(allowed))}.")
        elif key.startswith(("corpus.path", "model.path")):
            yield recipe.problem(key_path, f"{key} is set by the study. Use the arm's corpus, or study.models.")
        elif head in AUGMENT_SECTIONS and section.augment is None:
            yield recipe.problem(key_path, f"{key} changes study.augment, which is missing.")


def _question_set_faults(recipe: StudyRecipe) -> Iterator[Problem]:
    """Yield the faults in the study's references to question sets of the shared eval recipe."""
    section = recipe.study
    evaluation = read_recipe(Path(section.eval), override_arguments(eval_overrides(section))).eval
    if evaluation is None:
        yield recipe.problem("study.eval", f"{section.eval} has no eval section.")
        return
    questions = evaluation.questions
    fractions = section.validation or {}
    for name, fraction in fractions.items():
        key_path: KeyPath = ("study", "validation", name)
        if name not in questions:
            yield recipe.problem(key_path, f"no such set.{suggestion(name, questions)}")
        if not 0 < fraction < 1:
            yield recipe.problem(key_path, f"found {fraction}, allowed: between 0 and 1.")
    has_file = {name for name, item in questions.items() if not isinstance(item, str) and item.validation}
    validated = {*fractions, *has_file}
    for name, tune in (section.tune or {}).items():
        for question_set in tune.sets():
            if question_set not in validated:
                hint = suggestion(question_set, validated)
                hint = hint or " Name a set in study.validation, or its validation file in eval."
                fault = f"{question_set!r} has no validation questions.{hint}"
                yield recipe.problem(("study", "tune", name, "question_sets"), fault)
    for index, name in enumerate(section.scaling.question_sets if section.scaling is not None else ()):
        yield from _unknown(recipe, ("study", "scaling", "question_sets", index), name, questions)
    for name, claim in (section.claims or {}).items():
        yield from _unknown(recipe, ("study", "claims", name, "question_set"), claim.question_set, questions)
    yield from _written_faults(recipe, evaluation)


def head_format(evaluation: EvalSection) -> tuple[str, int]:
    """Return the format and number of shots that decide choices and claims: the first of each in the eval recipe."""
    formats = [format for format in evaluation.formats if format not in WITHOUT_QUESTION]
    return (formats or list(evaluation.formats))[0], evaluation.shots[0]


def _written_faults(recipe: StudyRecipe, evaluation: EvalSection) -> Iterator[Problem]:
    """Yield the faults of keys that need choices where answers are written, and of claims on impossible outcomes."""
    scaling = recipe.study.scaling
    for index, name in enumerate(scaling.question_sets if scaling is not None else ()):
        if _is_written(evaluation, name):
            fault = (
                f"the answers on {name!r} are written: bits are counted from choices, by the chance of guessing one. "
                "Put texts or letters first in eval.formats, or take study.scaling out."
            )
            yield recipe.problem(("study", "scaling", "question_sets", index), fault)
    for name, claim in (recipe.study.claims or {}).items():
        if claim.question_set not in evaluation.questions:
            continue
        is_written, path = _is_written(evaluation, claim.question_set), ("study", "claims", name)
        if _is_written(evaluation, claim.question_set, OPEN) and claim.test in ("above_chance", "near_chance"):
            fault = (
                f"{claim.test}: the answers on {claim.question_set!r} are written, which has no chance of guessing. "
            )
            yield recipe.problem((*path, "test"), f"{fault}Compare with a baseline: difference or equivalence.")
        if claim.outcome != "right" and not is_written:
            fault = f"found {claim.outcome}, but the answers on {claim.question_set!r} are choices: right or wrong. "
            yield recipe.problem((*path, "outcome"), f"{fault}Put generate first in eval.formats, or take it out.")
        elif claim.outcome in ("abstained", "answered"):
            yield from _outcome_faults(recipe, (*path, "outcome"), claim.question_set, claim.outcome, evaluation)


def _outcome_faults(
    recipe: StudyRecipe, key_path: KeyPath, name: str, outcome: str, evaluation: EvalSection
) -> Iterator[Problem]:
    """Yield a fault if no question of the set `name` can have `outcome`, abstained or answered."""
    item = question_set_section(evaluation, name)
    if not is_file(item.path):
        return
    has_answer = {q.is_answerable for q in read_questions(Path(item.path), layout_of(item.layout, evaluation.formats))}
    if outcome == "abstained" and has_answer == {False}:
        fault = f"no question of {name!r} has an answer: to abstain is right there, or not to is answered."
        yield recipe.problem(key_path, f"{fault} Take another outcome.")
    if outcome == "answered" and has_answer == {True}:
        fault = f"every question of {name!r} has an answer. Name a set of questions whose answers are []."
        yield recipe.problem(key_path, fault)


def _is_written(evaluation: EvalSection, name: str, formats: Collection[str] = GENERATED) -> bool:
    """Return whether the answers that decide choices and claims on a question set are written, in one of `formats`."""
    item = evaluation.questions.get(name)
    return item is not None and head_format(evaluation)[0] in formats
