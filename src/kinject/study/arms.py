"""Expands a recipe's `study` section to arms: their overrides, sweeps and tuning grids. Checks them
beyond their types."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_type_hints

from kinject.corpus.spans import Json
from kinject.errors import Problem, RecipeError
from kinject.question_formats import FORMATS
from kinject.recipe import StudyRecipe, read_recipe, read_values
from kinject.recipe.adapter_fields import ADAPTER_KEYS, adapter_types
from kinject.recipe.check import KeyPath
from kinject.recipe.conflicts import find_problems
from kinject.recipe.read import NOT_TRAINING, Sections
from kinject.recipe.sections import (
    ArmSection,
    EvalSection,
    StudyModelSection,
    StudySection,
)
from kinject.recipe.sections.study import Shared
from kinject.recipe.yaml_lines import key_path
from kinject.results import ArmInfo, Sweep, SweepPoint
from kinject.terminal import exact_number
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

_NOTHING_IN_ITSELF = ("regularization", "distillation")
"""Sections that change nothing while their keys have defaults: one that is not there is such."""


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
    match_tokens_of: str = ""

    @property
    def trained(self) -> bool:
        """Whether the arm's weights differ from the base's."""
        return self.name != str(ArmName(BASE, self.retrieval))

    @property
    def augment_overrides(self) -> dict[str, Any]:
        """The overrides that apply to the augment recipe."""
        return _of_sections(self.overrides, AUGMENT_SECTIONS)

    @property
    def train_overrides(self) -> dict[str, Any]:
        """The overrides that apply to the train recipe."""
        return _of_sections(self.overrides, TRAIN_SECTIONS)

    @property
    def matched(self) -> str:
        """The arm whose steps, tokens or seconds it takes, "" if it has its own."""
        return self.match_steps_of or self.match_tokens_of or self.match_seconds_of

    def is_covered_by(self, other: Arm, shared: Mapping[str, Any]) -> bool:
        """Return whether `other` has the same weights for every seed of this arm, by the values
        `shared` of the recipes that both override."""
        if not set(self.seeds) <= set(other.seeds):
            return False
        keys = {*self.overrides, *other.overrides}
        return self._weights(shared, keys) == other._weights(shared, keys)

    def _weights(self, shared: Mapping[str, Any], keys: Collection[str]) -> Arm:
        """Return the arm reduced to the fields on which its weights depend; of `keys` that neither
        it nor a recipe sets it has the defaults."""
        values = nest_overrides(self.overrides, shared)
        defaults = {key: default_of(key, values) for key in keys if not _has(values, key)}
        known = {key: value for key, value in defaults.items() if value is not MISSING}
        alpha = self.alpha
        if alpha == 1:
            alpha = None  # alpha 1 is the tuned model itself
        return replace(
            self,
            name="",
            description="",
            rag=True,
            seeds=(),
            sweep="",
            overrides=nest_overrides(known, values),
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


def n_trainings(arm: Arm, arms: Sequence[Arm]) -> int:
    """Return how many trainings one after the other make the weights of `arm`."""
    by_name = {other.name: other for other in arms if other.model == arm.model}
    n = 1
    while arm.after:
        arm = by_name[arm.after]
        n += 1
    return n


def expand_arms(
    section: StudySection, tuned: Mapping[tuple[str, str], Any] = MappingProxyType({})
) -> StudyArms:
    """Return the arms on every base model, in order: the base, the recipe's arms, the arms of
    sweeps.

    `tuned` holds the values that `tune` chose: (base model, name in `tune`) -> value. A point of a
    sweep whose weights another arm has already is that arm, and none is added.
    """
    every: list[Arm] = []
    shared = _shared_values(section)
    sweeps: dict[tuple[str, str], tuple[SweepPoint, ...]] = {}
    for model in section.models:
        values = {name: value for (of, name), value in tuned.items() if of == model}
        arms = [base_arm(section, model)]
        arms += [
            _make_arm(section, model, name, item, values) for name, item in section.arms.items()
        ]
        for sweep, item in (section.sweeps or {}).items():
            for parent in arms:
                if parent.name == item.arm:
                    sweeps[model, sweep] = _expand_sweep(section, sweep, parent, arms, shared)
                    break
        every += arms
        for name, keys in (section.retrievals or {}).items():
            every += [_with_retrieval(arm, name, keys) for arm in arms if arm.rag]
    last_seed = max(chain.from_iterable(arm.seeds for arm in every))
    return StudyArms(tuple(every), sweeps, _expand_grids(section, last_seed))


def _with_retrieval(arm: Arm, name: str, keys: Mapping[str, Any]) -> Arm:
    """Return `arm` as it is asked with the passages of the retrieval `name`."""
    retrieval = {f"eval.retrieval.{key}": value for key, value in keys.items()}
    return replace(
        arm,
        name=str(ArmName(arm.name, name)),
        retrieval=name,
        description=f"{arm.name}, with the passages of {name}",
        overrides={**arm.overrides, **retrieval},
    )


def _expand_sweep(
    section: StudySection, name: str, parent: Arm, arms: list[Arm], shared: Mapping[str, Any]
) -> tuple[SweepPoint, ...]:
    """Return the points of the sweep `name` over `parent`; append those that no arm of `arms`
    covers to `arms`."""
    points = []
    item = (section.sweeps or {})[name]
    for value in item.values:
        varied = replace(
            _with_value(section, parent, item.key, value),
            sweep=name,
            rag=False,
            seeds=item.seeds or parent.seeds,
        )
        arm = _with_weights_of(varied, arms, shared)
        if arm is varied:
            arms.append(arm)
        points.append(SweepPoint(value, value_label(value), arm.name))
    return tuple(points)


def _with_weights_of(varied: Arm, arms: Sequence[Arm], shared: Mapping[str, Any]) -> Arm:
    """Return the first arm that has the weights of `varied`, itself if none has."""
    for arm in arms:
        if varied.is_covered_by(arm, shared):
            return arm
    return varied


def _shared_values(section: StudySection) -> dict[str, Any]:
    """Return the values of the train and augment recipes that the arms override."""
    values = read_values(Path(section.train))
    if section.augment is not None:
        values |= {
            key: value
            for key, value in read_values(Path(section.augment)).items()
            if key in AUGMENT_SECTIONS
        }
    return values


def _expand_grids(
    section: StudySection, last_seed: int
) -> dict[tuple[str, str], tuple[tuple[Any, Arm], ...]]:
    """Return each grid's arms, with the seed after `last_seed`: reported seeds choose nothing."""
    grids = {}
    for model in section.models:
        for name, item in (section.tune or {}).items():
            arm = _make_arm(section, model, item.arm, section.arms[item.arm], {})
            arm = replace(arm, seeds=(last_seed + 1,), rag=False)
            grids[model, name] = tuple(
                (value, _with_value(section, arm, item.key, value)) for value in item.values
            )
    return grids


def base_arm(section: StudySection, model: str) -> Arm:
    """Return the arm of the untouched base model `model`."""
    description = "the base model without training"
    # Nothing is trained, so further seeds would be the same model.
    return Arm(BASE, model, description, "", {}, "", "", None, True, (section.seeds[0],))


def _make_arm(
    section: StudySection, model: str, name: str, item: ArmSection, tuned: Mapping[str, Any]
) -> Arm:
    """Return an arm of the recipe: its own overrides take precedence over tuned values, and these
    over the study's."""
    of_eval = eval_overrides(section)
    # They are for the eval recipe (`eval_overrides`), not for a training.
    overrides = {
        key: value for key, value in (section.overrides or {}).items() if key not in of_eval
    }
    for tuning, value in tuned.items():
        tune = (section.tune or {})[tuning]
        # Without a list of arms a chosen value is for all of them.
        if name in (tune.arms or (name,)):
            overrides[tune.key] = value
    overrides |= item.overrides or {}
    match = dict(item.match or {})
    return Arm(
        name=name,
        model=model,
        description=item.description,
        corpus=item.corpus,
        overrides=overrides,
        match_steps_of=match.get("steps", ""),
        match_seconds_of=match.get("seconds", ""),
        alpha=item.alpha,
        rag=item.rag,
        seeds=item.seeds or section.seeds,
        through=item.through or "",
        after=item.after or "",
        match_tokens_of=match.get("tokens", ""),
    )


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Return whether nested values have a dotted key."""
    for part in key_path(key, values):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def default_of(key: str, values: Mapping[str, Any]) -> Any:
    """Return the default of a dotted key that `values` do not set, `MISSING` if it is not known."""
    section, _, name = key.partition(".")
    if section not in ("trainer", "adapter"):
        return _own_default(key_path(key, values), values)
    kind: Any = None
    # Another config has the defaults of method: recall.
    if section == "trainer" and values.get("method") != "recall":
        from trl import SFTConfig

        kind = SFTConfig
    elif section == "adapter" and isinstance(values.get(section), Mapping):
        if name in ADAPTER_KEYS:
            return ADAPTER_KEYS[name]
        kind = adapter_types().get(values[section].get("type", "lora"))
    if kind is None:
        return MISSING
    return _default_in(fields(kind), name)


def _own_default(path: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Return the default of a key of kinject's own sections, `MISSING` in most that are not there:
    to write one (augment.judge) is more than to write its defaults."""
    kind: Any = Sections
    for part in path[:-1]:
        default = _default_in(fields(kind), part)
        inner = values.get(part)
        is_there = isinstance(inner, Mapping) or part in _NOTHING_IN_ITSELF
        if default is MISSING or (default is None and not is_there):
            return MISSING
        values = {}
        if isinstance(inner, Mapping):
            values = inner
        hint = get_type_hints(kind)[part]
        kind = next((of for of in (hint, *get_args(hint)) if is_dataclass(of)), None)
        if kind is None:
            return MISSING
    return _default_in(fields(kind), path[-1])


def _default_in(known: Iterable[Field[Any]], name: str) -> Any:
    """Return the default of the field `name` as a recipe writes it, `MISSING` without one."""
    for item in known:
        if item.name == name:
            value = item.default
            if item.default_factory is not MISSING:
                value = item.default_factory()
            if isinstance(value, tuple):
                return list(value)
            return value
    return MISSING


def _with_value(section: StudySection, arm: Arm, key: str, value: Json) -> Arm:
    """Return `arm`, named after both, with `value` for `key` (dotted, or alpha or corpus)."""
    name = f"{arm.name}, {_key_label(section, key)} {value_label(value)}"
    if key == "alpha":
        return replace(arm, name=name, alpha=float(cast(float, value)))
    if key == "corpus":
        return replace(arm, name=name, corpus=str(value))
    # Last, so that no override of its whole section replaces it.
    others = {other: item for other, item in arm.overrides.items() if other != key}
    return replace(arm, name=name, overrides={**others, key: value})


def _key_label(section: StudySection, key: str) -> str:
    """Return the last part of a key, with as many parts before it as tell it from the other keys
    that the study varies: corpus.replay.fraction from corpus.mix.chat.fraction."""
    varied = {item.key for item in (section.sweeps or {}).values()}
    varied |= {item.key for item in (section.tune or {}).values()}
    parts = key.split(".")
    for start in range(len(parts) - 1, 0, -1):
        label = ".".join(parts[start:])
        if not any(other != key and other.endswith(f".{label}") for other in varied):
            return label
    return key


def base_models(section: StudySection) -> dict[str, StudyModelSection]:
    """Return the base models by name."""
    models = {}
    for name, value in section.models.items():
        if isinstance(value, str):
            models[name] = StudyModelSection(path=value)
        else:
            models[name] = value
    return models


def eval_overrides(section: StudySection, arm: Arm | None = None) -> dict[str, Any]:
    """Return the overrides of the study, and of `arm`, that apply to the shared eval recipe."""
    overrides = dict(section.overrides or {})
    if arm is not None:
        overrides |= arm.overrides
    return _of_sections(overrides, ("eval",))


def _of_sections(overrides: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """Return the overrides of keys in `sections`."""
    return {key: value for key, value in overrides.items() if key.split(".")[0] in sections}


def nest_overrides(
    overrides: Mapping[str, Any], onto: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return dotted keys and values as nested mappings, over the values `onto`; later keys
    overwrite earlier ones."""
    root: dict[str, Any] = dict(onto)
    for key, value in overrides.items():
        *path, last = key_path(key, root)
        parent = root
        for part in path:
            child = parent.get(part)
            # A value that is no mapping gives way to the later key.
            parent[part] = {}
            if isinstance(child, Mapping):
                parent[part] |= child  # a copy: the value is the recipe's
            parent = parent[part]
        parent[last] = value
    return root


def override_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return dotted keys and values as ``key=value`` for `read_recipe`."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def drop_output_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values without its output and cache folders."""
    # The values are the recipe's, which others read as well.
    result = copy.deepcopy(dict(values))
    for key in _OUTPUT_FOLDERS:
        *path, last = key.split(".")
        section: Any = result
        for part in path:
            if isinstance(section, dict):
                section = section.get(part)
        if isinstance(section, dict):
            section.pop(last, None)
    return result


def value_label(value: Json) -> str:
    """Return a value of a recipe as a short label."""
    if isinstance(value, Mapping):
        return " + ".join(f"{name} {value_label(item)}" for name, item in value.items()) or "none"
    if isinstance(value, float):
        return exact_number(value)
    if value is None:
        return "none"
    return str(value)


def arm_infos(arms: Sequence[Arm]) -> tuple[ArmInfo, ...]:
    """Return the description of each arm for the report."""
    infos = []
    for arm in arms:
        recipe = dict(arm.overrides)
        if arm.corpus not in ("", "augmented"):
            recipe["corpus"] = arm.corpus
        if arm.alpha is not None:
            recipe["alpha"] = arm.alpha
        if arm.through:
            recipe["through"] = arm.through
        if arm.after:
            recipe["after"] = arm.after
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
    augment = _of_sections(section.overrides or {}, AUGMENT_SECTIONS)
    problems: list[Problem] = []
    if section.augment is not None:
        problems += _problems_of(section.augment, augment, "augment")
    problems += _problems_of_eval(section)
    recipe.raise_any(problems)


def check_questions(recipe: StudyRecipe) -> None:
    """Raise `RecipeError` for missing files of questions, each with the command that makes it: a
    dry run reads them, too, but none of the other inputs."""
    problems = _problems_of_eval(recipe.study)
    recipe.raise_any([item for item in problems if item.dotted.startswith("eval.questions.")])


def _problems_of_eval(section: StudySection) -> list[Problem]:
    evaluation = eval_overrides(section)
    evaluation["eval.models"] = {"any": "."}  # replaced by the arms' models
    return _problems_of(section.eval, evaluation, "eval")


def _problems_of(
    path: str, overrides: Mapping[str, Any], verb: Literal["augment", "eval"]
) -> list[Problem]:
    try:
        read_recipe(Path(path), override_arguments(overrides), verb)
    except RecipeError as error:
        return list(error.problems)
    return []


def check_shared_recipes(recipe: StudyRecipe, arms: StudyArms) -> None:
    """Raise `RecipeError` with every fault of the shared recipes under the overrides of some arm.
    Imports TRL."""
    every = list(arms.arms)
    for grid in arms.grids.values():
        every += [arm for _, arm in grid]
    problems = list(_name_problems(recipe.study, arms.arms))
    adapters: dict[KeyPath, str] = {}
    for arm in every:
        key_path, name = _declared_at(recipe.study, arm)
        for path, overrides in _shared_recipes(recipe.study, arm):
            try:
                read = read_recipe(Path(path), override_arguments(overrides))
            except RecipeError as error:
                problems += [_at_arm(problem, recipe, key_path) for problem in error.problems]
                continue
            # Not folded in, it is no whole model, which merging and further training need.
            if name in recipe.study.arms and read.adapter and not read.adapter.get("merge"):
                adapters[key_path] = name
    overrides = eval_overrides(recipe.study)
    evaluation = read_recipe(Path(recipe.study.eval), override_arguments(overrides)).eval
    if evaluation is None:
        problems.append(Problem("study.eval", f"{recipe.study.eval} has no eval section."))
    else:
        problems += find_problems("study", recipe, _shared_eval(evaluation, adapters))
    recipe.raise_any(problems)


def _name_problems(section: StudySection, arms: Sequence[Arm]) -> Iterator[Problem]:
    """Yield the arms of one name: results are found by it."""
    first: dict[tuple[str, str], Arm] = {}
    for arm in arms:
        if first.setdefault((arm.model, arm.name), arm) is not arm:
            message = f"{arm.name!r:.120} is the name of two arms of other values or seeds."
            fix = "Give both the same seeds, or change the values of one."
            yield Problem(_declared_at(section, arm)[0], f"{message} {fix}")


def _declared_at(section: StudySection, arm: Arm) -> tuple[KeyPath, str]:
    """Return the line of the recipe that declares an arm, and the recipe's arm that it varies."""
    if arm.retrieval:
        key_path: KeyPath = ("study", "retrievals", arm.retrieval)
    elif arm.sweep:
        key_path = ("study", "sweeps", arm.sweep)
    else:
        key_path = ("study", "arms", arm.name)
    if arm.sweep:
        return key_path, (section.sweeps or {})[arm.sweep].arm
    return key_path, arm.name


def _shared_recipes(section: StudySection, arm: Arm) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the shared recipes that an arm overrides, with its overrides."""
    if arm.retrieval and arm.trained:
        return []  # its evaluation is the base's, which is checked
    if arm.retrieval:
        return [(section.eval, eval_overrides(section, arm))]
    shared: list[tuple[str, Mapping[str, Any]]] = []
    if section.augment is not None:
        shared.append((section.augment, arm.augment_overrides))
    return [*shared, (section.train, arm.train_overrides)]


def _at_arm(problem: Problem, recipe: StudyRecipe, key_path: KeyPath) -> Problem:
    """Return a fault of an override at the arm's line, another one as it is."""
    # Overrides of an arm are read as those of a command line.
    if problem.location == "command line":
        return replace(problem, location=recipe.location(key_path))
    return problem


def _shared_eval(evaluation: EvalSection, adapters: Mapping[KeyPath, str]) -> Shared:
    """Return what the checks of a study need of its eval recipe."""
    formats = {name: head_format(evaluation, name)[0] for name in evaluation.questions}
    return replace(
        _KEYS,
        checks_inputs=False,
        sets=evaluation.questions,
        formats=formats,
        writes=frozenset(name for name, form in formats.items() if FORMATS[form].generates),
        writes_words=frozenset(name for name, form in formats.items() if FORMATS[form].is_open),
        adapters=adapters,
    )


def head_format(evaluation: EvalSection, question_set: str) -> tuple[str, int]:
    """Return the format and number of shots that decide choices and claims on a set: the first of
    each in the eval recipe."""
    asked = evaluation.formats_of(evaluation.sets()[question_set])
    shots = evaluation.shots[0]
    for name in asked:
        # A control leaves the question out, so it decides nothing.
        if FORMATS[name].shows_question:
            return name, shots
    return asked[0], shots
