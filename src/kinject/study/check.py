"""What is wrong with a study's recipe beyond its types: names that stand for nothing, keys that no stage reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kinject.errors import Fault, RecipeError
from kinject.recipe import StudyRecipe, read_recipe
from kinject.recipe.check import KeyPath, suggestion
from kinject.recipe.study_section import StudySection, SweepSection, TuneSection
from kinject.study.arms import (
    AUGMENT_SECTIONS,
    BASE,
    RAG,
    TRAIN_SECTIONS,
    base_models,
    eval_overrides,
    expand_arms,
    override_arguments,
    tuning_grids,
)

_NO_SWEEPS = " The study has no sweeps; add it to study.sweeps."


def check_names(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` with every name and key of the section that stands for nothing. Quick: reads no other recipe."""
    section = recipe.study
    faults = [*_name_faults(recipe, section), *_key_faults(recipe, section)]
    if faults:
        raise RecipeError(list(dict.fromkeys(faults)))


def check_inputs(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` where documents or questions that the shared recipes name are not there: before any training."""
    section = recipe.study
    faults: list[Fault] = []
    own = {key: value for key, value in (section.overrides or {}).items() if key.split(".")[0] in AUGMENT_SECTIONS}
    here = {"eval.models": {"any": "."}}  # the study's own models take its place
    asked: tuple[tuple[str | None, Mapping[str, Any], Literal["augment", "eval"]], ...] = (
        (section.augment, own, "augment"), (section.eval, {**eval_overrides(section), **here}, "eval")
    )  # fmt: skip
    for path, overrides, verb in asked:
        try:
            if path is not None:
                read_recipe(Path(path), override_arguments(overrides), verb)
        except RecipeError as error:
            faults += error.faults
    if faults:
        raise RecipeError(faults)


def check_shared_recipes(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` with every fault that the shared recipes have with some arm's overrides. Imports TRL."""
    faults = [*_shared_faults(recipe, recipe.study)]
    if faults:
        raise RecipeError(list(dict.fromkeys(faults)))


def _name_faults(recipe: StudyRecipe, section: StudySection) -> Iterator[Fault]:
    arms = {BASE, *section.arms}

    def unknown(place: KeyPath, found: str | None, allowed: set[str]) -> Iterator[Fault]:
        if found is not None and found not in allowed:
            yield recipe.fault(place, f"found {found!r}.{suggestion(found, allowed)}")

    if BASE in section.arms:
        yield recipe.fault(("study", "arms", BASE), "this name is the untouched model's. Choose another.")
    for name, arm in section.arms.items():
        place: KeyPath = ("study", "arms", name)
        if RAG in name or "," in name:
            yield recipe.fault(place, f"a name with {RAG!r} or a comma would be taken for another arm. Choose another.")
        yield from unknown((*place, "match_steps_of"), arm.match_steps_of, arms - {BASE, name})
        yield from unknown((*place, "match_tokens_of"), arm.match_tokens_of, arms - {BASE, name})
        if arm.match_steps_of and arm.match_tokens_of:
            yield recipe.fault(place, "match_steps_of and match_tokens_of exclude each other. Take one out.")
        for other in (arm.match_steps_of, arm.match_tokens_of):
            if (
                other is not None
                and other in section.arms
                and (section.arms[other].match_steps_of or section.arms[other].match_tokens_of)
            ):
                yield recipe.fault(place, f"{other} is itself matched to another arm. Name that one.")
        for index, model in enumerate(arm.models or ()):
            yield from unknown((*place, "models", index), model, set(section.models))
        if arm.corpus in ("augmented", "random") and section.augment is None:
            yield recipe.fault(place, f"corpus {arm.corpus} needs study.augment, the recipe that writes it.")
        elif arm.corpus not in ("augmented", "random") and not Path(arm.corpus).is_file():
            yield recipe.fault((*place, "corpus"), f"found {arm.corpus!r}: neither augmented, random, nor a file.")
    for name, choice in (section.tune or {}).items():
        yield from unknown(("study", "tune", name, "arm"), choice.arm, arms - {BASE})
        for index, arm_name in enumerate(choice.arms or ()):
            yield from unknown(("study", "tune", name, "arms", index), arm_name, arms - {BASE})
    for name, model_item in base_models(section).items():
        if model_item.path is None and model_item.recipe is None:
            yield recipe.fault(("study", "models", name), "has neither path nor recipe. Give one.")
        if model_item.overrides and model_item.recipe is None:
            yield recipe.fault(
                ("study", "models", name), "overrides is there, but recipe, whose keys it changes, is not."
            )
    yield from _curve_faults(recipe, section, arms)
    yield from _scaling_faults(recipe, section)
    yield from _claim_faults(recipe, section, arms)


def _curve_faults(recipe: StudyRecipe, section: StudySection, arms: set[str]) -> Iterator[Fault]:
    for name, curve in (section.sweeps or {}).items():
        place: KeyPath = ("study", "sweeps", name)
        if curve.arm not in arms - {BASE}:
            yield recipe.fault(place, f"arm: found {curve.arm!r}.{suggestion(curve.arm, arms - {BASE})}")
        if curve.control is not None and curve.control not in arms:
            yield recipe.fault((*place, "control"), f"found {curve.control!r}.{suggestion(curve.control, arms)}")


def _scaling_faults(recipe: StudyRecipe, section: StudySection) -> Iterator[Fault]:
    scaling = section.scaling
    if scaling is None:
        return
    curves = section.sweeps or {}
    if scaling.sweep not in curves:
        hint = suggestion(scaling.sweep, curves) or _NO_SWEEPS
        yield recipe.fault("study.scaling.sweep", f"found {scaling.sweep!r}.{hint}")
    for subject, n_values in scaling.values.items():
        if n_values < 2:
            what = f"found {n_values}, allowed: 2 or more. A fact with one value holds nothing."
            yield recipe.fault(("study", "scaling", "values", subject), what)
    for name, n_facts in (scaling.facts or {}).items():
        if name not in scaling.question_sets:
            yield recipe.fault(
                ("study", "scaling", "facts", name), f"not in question_sets.{suggestion(name, scaling.question_sets)}"
            )
        if n_facts < 1:
            yield recipe.fault(("study", "scaling", "facts", name), f"found {n_facts}, allowed: 1 or more.")


def _claim_faults(recipe: StudyRecipe, section: StudySection, arms: set[str]) -> Iterator[Fault]:
    needed = {"difference": ("arm", "baseline"), "trend": ("sweep",), "above_chance": ("arm",), "near_chance": ("arm",)}
    for name, claim in (section.claims or {}).items():
        place: KeyPath = ("study", "claims", name)
        for key in needed[claim.test]:
            if getattr(claim, key) is None:
                yield recipe.fault(place, f"{key}: missing; test {claim.test} needs it.")
        for key in ("arm", "baseline"):
            found = getattr(claim, key)
            if found is not None and found.removesuffix(RAG) not in arms:
                yield recipe.fault((*place, key), f"found {found!r}.{suggestion(found, arms)}")
        if claim.sweep is not None and claim.sweep not in (section.sweeps or {}):
            hint = suggestion(claim.sweep, section.sweeps or {}) or _NO_SWEEPS
            yield recipe.fault((*place, "sweep"), f"found {claim.sweep!r}.{hint}")


def _key_faults(recipe: StudyRecipe, section: StudySection) -> Iterator[Fault]:
    """Yield the overrides that no stage would read."""
    allowed = {*AUGMENT_SECTIONS, *TRAIN_SECTIONS}
    places: list[tuple[KeyPath, str]] = [(("study", "overrides", key), key) for key in section.overrides or {}]
    for name, arm in section.arms.items():
        places += [(("study", "arms", name, "overrides", key), key) for key in arm.overrides or {}]
    varied: list[tuple[str, str, TuneSection | SweepSection]] = [
        *(("tune", name, item) for name, item in (section.tune or {}).items()),
        *(("sweeps", name, item) for name, item in (section.sweeps or {}).items()),
    ]
    for kind, name, item in varied:
        own = {"alpha", "corpus"} if kind == "sweeps" else set()
        if item.key not in own:
            places.append((("study", kind, name, "key"), item.key))
    for place, key in places:
        head = key.split(".")[0]
        if head == "eval" and place[1] == "overrides" and not key.startswith(("eval.models", "eval.questions")):
            continue  # the eval recipe is every arm's
        if head not in allowed or key in ("corpus", "model"):
            yield recipe.fault(place, f"found {key!r}; it must begin with one of {', '.join(sorted(allowed))}.")
        elif key.startswith("corpus.path") or key.startswith("model.path"):
            yield recipe.fault(place, f"{key} is set by the study. Use the arm's corpus, or study.models.")
        elif head in AUGMENT_SECTIONS and section.augment is None:
            yield recipe.fault(place, f"{key} changes study.augment, which is missing.")


def _shared_faults(recipe: StudyRecipe, section: StudySection) -> Iterator[Fault]:
    """Yield what the shared recipes say of each arm's overrides, at the arm's own line."""
    for arm in [*expand_arms(recipe, {}), *(arm for grid in tuning_grids(recipe).values() for _, arm in grid)]:
        parts: tuple[tuple[str | None, Mapping[str, Any]], ...] = (
            (section.augment, arm.augment_overrides), (section.train, arm.train_overrides)
        )  # fmt: skip
        place: KeyPath = ("study", "sweeps", arm.curve) if arm.curve else ("study", "arms", arm.name)
        for path, overrides in parts:
            if path is None:
                continue
            try:
                read_recipe(Path(path), override_arguments(overrides))
            except RecipeError as error:
                for fault in error.faults:
                    own = fault.where == "command line"
                    yield replace(fault, where=recipe.where(place)) if own else fault
    yield from _validation_faults(recipe, section)


def _validation_faults(recipe: StudyRecipe, section: StudySection) -> Iterator[Fault]:
    asked = read_recipe(Path(section.eval), override_arguments(eval_overrides(section))).eval
    if asked is None:
        yield recipe.fault("study.eval", f"{section.eval} has no eval section.")
        return
    for name, share in (section.validation or {}).items():
        if name not in asked.questions:
            yield recipe.fault(("study", "validation", name), f"no such set.{suggestion(name, asked.questions)}")
        if not 0 < share < 1:
            yield recipe.fault(("study", "validation", name), f"found {share}, allowed: between 0 and 1.")
    own_file = {name for name, item in asked.questions.items() if not isinstance(item, str) and item.validation}
    with_validation = {*(section.validation or {}), *own_file}
    for name, choice in (section.tune or {}).items():
        for on in choice.sets():
            if on not in with_validation:
                hint = (
                    suggestion(on, with_validation)
                    or " Name a set in study.validation, or its validation file in eval."
                )
                yield recipe.fault(
                    ("study", "tune", name, "question_sets"), f"{on!r} has no validation questions.{hint}"
                )
    for index, name in enumerate(section.scaling.question_sets if section.scaling is not None else ()):
        if name not in asked.questions:
            yield recipe.fault(
                ("study", "scaling", "question_sets", index), f"found {name!r}.{suggestion(name, asked.questions)}"
            )
    for name, claim in (section.claims or {}).items():
        if claim.question_set not in asked.questions:
            yield recipe.fault(
                ("study", "claims", name, "question_set"),
                f"found {claim.question_set!r}.{suggestion(claim.question_set, asked.questions)}",
            )
