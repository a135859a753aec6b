"""Expands a recipe's `study` section to arms: their overrides, sweeps and tuning grids. Checks them
beyond their types."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kinject.errors import Problem, RecipeError
from kinject.question_formats import FORMATS
from kinject.recipe import StudyRecipe, read_recipe
from kinject.recipe.check import KeyPath
from kinject.recipe.conflicts import Shared, find_problems
from kinject.recipe.read import NOT_TRAINING, Sections
from kinject.recipe.sections import (
    ArmSection,
    EvalSection,
    StudyModelSection,
    StudySection,
    SweepSection,
)
from kinject.results import ArmInfo, Sweep, SweepPoint
from kinject.types import ArmName

BASE = "base"
"""Name of the arm of the untouched base model."""
AUGMENT_SECTIONS = ("augment", "documents")
"""Sections of overrides that apply to the augment recipe."""
TRAIN_SECTIONS = tuple(
    item.name for item in fields(Sections) if item.name not in {*NOT_TRAINING, "seed"}
)
"""Sections of overrides that apply to the train recipe."""
_OUTPUT_FOLDERS = ("run_dir", "corpus.cache_dir")
"""Recipe keys of output and cache folders. They do not change a stage's result, so its id leaves
them out."""


@dataclass(frozen=True)
class Arm:
    """One arm on one base model; `overrides` (dotted key -> value) are applied to the shared
    recipes.

    `retrieval` names the one of study.retrievals whose passages it is asked with, and it is asked
    with passages only.
    """

    name: str
    model: str
    description: str
    corpus: str
    overrides: Mapping[str, Any]
    match_steps_of: str
    match_seconds_of: str
    alpha: float | None
    rag: bool
    seeds: tuple[int, ...]
    sweep: str = ""
    through: str = ""
    after: str = ""
    retrieval: str = ""

    @property
    def trained(self) -> bool:
        """Whether the arm's weights differ from the base's."""
        return self.name != str(ArmName(BASE, self.retrieval))

    @property
    def augment_overrides(self) -> dict[str, Any]:
        """The overrides that apply to the augment recipe."""
        return {
            key: value
            for key, value in self.overrides.items()
            if key.split(".")[0] in AUGMENT_SECTIONS
        }

    @property
    def train_overrides(self) -> dict[str, Any]:
        """The overrides that apply to the train recipe."""
        return {
            key: value
            for key, value in self.overrides.items()
            if key.split(".")[0] in TRAIN_SECTIONS
        }

    @property
    def matched(self) -> str:
        """The arm whose steps or seconds it takes, "" if it has its own."""
        return self.match_steps_of or self.match_seconds_of

    def is_covered_by(self, other: Arm) -> bool:
        """Return whether `other` has the same weights for every seed of this arm."""
        return self._weights() == other._weights() and set(self.seeds) <= set(other.seeds)

    def _weights(self) -> Arm:
        """Return the arm reduced to the fields on which its weights depend."""
        values = nest_overrides(self.overrides)
        alpha = None if self.alpha == 1 else self.alpha  # alpha 1 is the tuned model itself
        return replace(
            self,
            name="",
            description="",
            rag=True,
            seeds=(),
            sweep="",
            overrides=values,
            alpha=alpha,
        )


@dataclass(frozen=True)
class StudyArms:
    """The arms of a study, the points of its sweeps, and the arms with each value that `tune`
    tries.

    Sweeps and grids are by (base model, name in the recipe).
    """

    arms: tuple[Arm, ...]
    sweeps: Mapping[tuple[str, str], tuple[SweepPoint, ...]]
    grids: Mapping[tuple[str, str], tuple[tuple[Any, Arm], ...]]


def expand_arms(
    section: StudySection, tuned: Mapping[tuple[str, str], Any] = MappingProxyType({})
) -> StudyArms:
    """Return the arms on every base model, in order: the base, the recipe's arms, the arms of
    sweeps.

    `tuned` holds the values that `tune` chose: (base model, name in `tune`) -> value. A point of a
    sweep whose weights another arm has already is that arm, and none is added.
    """
    every: list[Arm] = []
    sweeps: dict[tuple[str, str], tuple[SweepPoint, ...]] = {}
    for model in section.models:
        values = {
            name: value for (tuned_model, name), value in tuned.items() if tuned_model == model
        }
        arms = [base_arm(section, model)]
        arms += [
            _make_arm(section, model, name, item, values) for name, item in section.arms.items()
        ]
        for sweep, item in (section.sweeps or {}).items():
            parent = next((arm for arm in arms if arm.name == item.arm), None)
            if parent is not None:
                sweeps[model, sweep] = _expand_sweep(sweep, item, parent, arms)
        every += arms
        every += [
            replace(
                arm, name=str(ArmName(arm.name, name)), retrieval=name, description=f"{arm.name}, with the passages of {name}",
                overrides={**arm.overrides, **{f"eval.retrieval.{key}": value for key, value in keys.items()}},
            )
            for name, keys in (section.retrievals or {}).items() for arm in arms if arm.rag
        ]  # fmt: skip
    return StudyArms(
        tuple(every),
        sweeps,
        _expand_grids(section, max(seed for arm in every for seed in arm.seeds)),
    )


def _expand_sweep(
    name: str, item: SweepSection, parent: Arm, arms: list[Arm]
) -> tuple[SweepPoint, ...]:
    """Return the points of a sweep over `parent`; append those that no arm of `arms` covers to
    `arms`."""
    points = []
    for value in item.values:
        varied = replace(
            _with_value(parent, item.key, value, name), rag=False, seeds=item.seeds or parent.seeds
        )
        arm = next((arm for arm in arms if varied.is_covered_by(arm)), None)
        if arm is None:
            arm = varied
            arms.append(arm)
        points.append(SweepPoint(value, value_label(value), arm.name))
    return tuple(points)


def _expand_grids(
    section: StudySection, last_seed: int
) -> dict[tuple[str, str], tuple[tuple[Any, Arm], ...]]:
    """Return the arms of each grid, with the seed after `last_seed`: reported seeds choose nothing."""
    grids = {}
    for model in section.models:
        for name, item in (section.tune or {}).items():
            arm = _make_arm(section, model, item.arm, section.arms[item.arm], {})
            arm = replace(arm, seeds=(last_seed + 1,), rag=False)
            grids[model, name] = tuple(
                (value, _with_value(arm, item.key, value, "")) for value in item.values
            )
    return grids


def base_arm(section: StudySection, model: str) -> Arm:
    """Return the arm of the untouched base model `model`."""
    description = "the base model without training"
    return Arm(BASE, model, description, "", {}, "", "", None, True, (section.seeds[0],))


def _make_arm(
    section: StudySection, model: str, name: str, item: ArmSection, tuned: Mapping[str, Any]
) -> Arm:
    """Return an arm of the recipe: its own overrides take precedence over tuned values, and these
    over the study's."""
    overrides = {
        key: value
        for key, value in (section.overrides or {}).items()
        if key not in eval_overrides(section)
    }
    for tuning, value in tuned.items():
        tune = (section.tune or {})[tuning]
        if name in (tune.arms or (name,)):
            overrides[tune.key] = value
    overrides |= item.overrides or {}
    match = dict(item.match or {})
    return Arm(
        name=name, model=model, description=item.description, corpus=item.corpus, overrides=overrides,
        match_steps_of=match.get("steps", ""), match_seconds_of=match.get("seconds", ""), alpha=item.alpha, rag=item.rag,
        seeds=item.seeds or section.seeds, through=item.through or "", after=item.after or "",
    )  # fmt: skip


def _with_value(arm: Arm, key: str, value: Any, sweep: str) -> Arm:
    """Return `arm` with `value` for `key` (a dotted recipe key, alpha or corpus), named after both."""
    name = f"{arm.name}, {key.split('.')[-1]} {value_label(value)}"
    if key == "alpha":
        return replace(arm, name=name, alpha=float(value), sweep=sweep)
    if key == "corpus":
        return replace(arm, name=name, corpus=str(value), sweep=sweep)
    return replace(arm, name=name, overrides={**arm.overrides, key: value}, sweep=sweep)


def base_models(section: StudySection) -> dict[str, StudyModelSection]:
    """Return the base models by name."""
    return {
        name: StudyModelSection(path=value) if isinstance(value, str) else value
        for name, value in section.models.items()
    }


def eval_overrides(section: StudySection, arm: Arm | None = None) -> dict[str, Any]:
    """Return the overrides of the study, and of `arm`, that apply to the shared eval recipe."""
    overrides = {**(section.overrides or {}), **(arm.overrides if arm else {})}
    return {key: value for key, value in overrides.items() if key.split(".")[0] == "eval"}


def nest_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys and values as nested mappings; later keys overwrite earlier ones."""
    root: dict[str, Any] = {}
    for key, value in overrides.items():
        *path, last = key.split(".")
        parent = root
        for part in path:
            child = parent.get(part)
            parent[part] = dict(child) if isinstance(child, Mapping) else {}
            parent = parent[part]
        parent[last] = value
    return root


def override_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return dotted keys and values as ``key=value`` for `read_recipe`."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def drop_output_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values without its output and cache folders."""
    result = copy.deepcopy(dict(values))
    for key in _OUTPUT_FOLDERS:
        *path, last = key.split(".")
        section: Any = result
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    return result


def value_label(value: Any) -> str:
    """Return a value of a recipe as a short label."""
    if isinstance(value, Mapping):
        return " + ".join(f"{name} {value_label(item)}" for name, item in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def arm_infos(arms: Sequence[Arm]) -> tuple[ArmInfo, ...]:
    """Return the description of each arm for the report."""
    infos = []
    for arm in arms:
        recipe = dict(arm.overrides)
        if arm.corpus not in ("", "augmented"):
            recipe["corpus"] = arm.corpus
        if arm.alpha is not None:
            recipe["alpha"] = arm.alpha
        recipe |= {
            key: value for key, value in (("through", arm.through), ("after", arm.after)) if value
        }
        infos.append(
            ArmInfo(
                arm.name, arm.model, arm.description, arm.trained, arm.sweep, recipe, arm.matched
            )
        )
    return tuple(infos)


def make_sweeps(section: StudySection, arms: StudyArms) -> list[Sweep]:
    """Return each sweep on each base model."""
    items = section.sweeps or {}
    return [
        Sweep(name, items[name].key, model, items[name].frontier, points)
        for (model, name), points in arms.sweeps.items()
    ]


def check_names(recipe: StudyRecipe, *, check_inputs: bool = True) -> None:
    """Raise `RecipeError` with every unknown name and unused key of the section. Quick: reads no
    other recipe.

    Unless `check_inputs` is False, the corpora that arms name must exist.
    """
    recipe.raise_any(find_problems("study", recipe, replace(_KEYS, checks_inputs=check_inputs)))


_KEYS = Shared(augment_keys=tuple(AUGMENT_SECTIONS), train_keys=tuple(TRAIN_SECTIONS))


def check_inputs(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` for missing documents and questions of the shared recipes, before
    anything is trained."""
    section = recipe.study
    augment = {
        key: value
        for key, value in (section.overrides or {}).items()
        if key.split(".")[0] in AUGMENT_SECTIONS
    }
    evaluation = {
        **eval_overrides(section),
        "eval.models": {"any": "."},
    }  # replaced by the arms' models
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
    """Raise `RecipeError` with every fault of the shared recipes under the overrides of some arm.
    Imports TRL."""
    every = [*arms.arms, *(arm for grid in arms.grids.values() for _, arm in grid)]
    problems: list[Problem] = []
    adapters: dict[KeyPath, str] = {}
    for arm in every:
        key_path: KeyPath = (
            ("study", "sweeps", arm.sweep) if arm.sweep else ("study", "arms", arm.name)
        )
        name = (recipe.study.sweeps or {})[arm.sweep].arm if arm.sweep else arm.name
        shared = [
            (recipe.study.augment, arm.augment_overrides),
            (recipe.study.train, arm.train_overrides),
        ]
        if arm.retrieval:  # every arm's as the base's
            key_path = ("study", "retrievals", arm.retrieval)
            shared = [] if arm.trained else [(recipe.study.eval, eval_overrides(recipe.study, arm))]
        for path, overrides in shared:
            try:
                read = (
                    None if path is None else read_recipe(Path(path), override_arguments(overrides))
                )
                if (
                    name in recipe.study.arms
                    and read
                    and read.adapter
                    and not read.adapter.get("merge")
                ):
                    adapters[key_path] = name
            except RecipeError as error:  # a fault of an override is reported at the arm's line
                problems += [
                    replace(problem, location=recipe.location(key_path))
                    if problem.location == "command line"
                    else problem
                    for problem in error.problems
                ]
    evaluation = read_recipe(
        Path(recipe.study.eval), override_arguments(eval_overrides(recipe.study))
    ).eval
    if evaluation is None:
        problems.append(Problem("study.eval", f"{recipe.study.eval} has no eval section."))
    else:
        decides = {name: head_format(evaluation, name)[0] for name in evaluation.questions}
        shared_eval = replace(
            _KEYS,
            checks_inputs=False,
            sets=evaluation.questions,
            writes=frozenset(name for name, format in decides.items() if FORMATS[format].generates),
            writes_words=frozenset(
                name for name, format in decides.items() if FORMATS[format].is_open
            ),
            adapters=adapters,
        )
        problems += find_problems("study", recipe, shared_eval)
    recipe.raise_any(problems)


def head_format(evaluation: EvalSection, question_set: str) -> tuple[str, int]:
    """Return the format and number of shots that decide choices and claims on a set: the first of
    each in the eval recipe."""
    asked = evaluation.formats_of(evaluation.sets()[question_set])
    return next(
        (format for format in asked if FORMATS[format].shows_question), asked[0]
    ), evaluation.shots[0]
