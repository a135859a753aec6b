"""A recipe's `study` section to arms: overrides laid over one another, curves and grids expanded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinject.recipe import StudyRecipe
from kinject.recipe.study_section import (
    ArmSection,
    ResourcesSection,
    StudyModelSection,
    StudySection,
    SweepSection,
)

BASE = "base"
"""The name of the arm that nothing was done to."""
RAG = "+rag"
"""What follows an arm's name when it is asked with its chosen number of passages."""
AUGMENT_SECTIONS = ("augment",)
"""Sections of overrides that the augment recipe takes."""
TRAIN_SECTIONS = ("trainer", "model", "corpus", "adapter", "regularization", "guards", "techniques", "method")
"""Sections of overrides that the train recipe takes."""


@dataclass(frozen=True)
class Arm:
    """One arm on one base model: what its stages are given besides the shared recipes (dotted key -> value)."""

    name: str
    model: str
    about: str
    corpus: str
    overrides: Mapping[str, Any]
    match_steps_of: str
    match_tokens_of: str
    alpha: float | None
    rag: bool
    seeds: tuple[int, ...]
    resources: ResourcesSection
    curve: str = ""

    @property
    def trained(self) -> bool:
        """Whether the arm's weights differ from the base's."""
        return self.name != BASE

    @property
    def augment_overrides(self) -> dict[str, Any]:
        """Those of `overrides` that the augment recipe takes."""
        return {key: value for key, value in self.overrides.items() if key.split(".")[0] in AUGMENT_SECTIONS}

    @property
    def train_overrides(self) -> dict[str, Any]:
        """Those of `overrides` that the train recipe takes."""
        return {key: value for key, value in self.overrides.items() if key.split(".")[0] in TRAIN_SECTIONS}

    def same_weights_as(self, other: Arm) -> bool:
        """Return whether both arms come to the same weights on their common seeds."""
        return self._weights() == other._weights()

    def _weights(self) -> Arm:
        """Return the arm without what its weights do not depend on."""
        values = nest_overrides(self.overrides)
        alpha = None if self.alpha == 1 else self.alpha  # alpha 1 is the tuned model itself
        return replace(self, name="", about="", rag=True, seeds=(), curve="", overrides=values, alpha=alpha)


def nest_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys and values as the mapping of mappings that they make, later ones over earlier ones."""
    root: dict[str, Any] = {}
    for key, value in overrides.items():
        *path, last = key.split(".")
        place = root
        for part in path:
            below = place.get(part)
            place[part] = dict(below) if isinstance(below, Mapping) else {}
            place = place[part]
        place[last] = value
    return root


def eval_overrides(section: StudySection) -> dict[str, Any]:
    """Return what study.overrides changes in the shared eval recipe."""
    return {key: value for key, value in (section.overrides or {}).items() if key.split(".")[0] == "eval"}


def base_models(section: StudySection) -> dict[str, StudyModelSection]:
    """Return the base models by name."""
    return {
        name: StudyModelSection(path=value) if isinstance(value, str) else value
        for name, value in section.models.items()
    }


def expand_arms(recipe: StudyRecipe, chosen: Mapping[tuple[str, str], Any]) -> list[Arm]:
    """Return every arm on every base model, the base first, then the recipe's, then those of curves.

    `chosen` is what `tune` found: (model, name of the choice) -> value. A point of a curve that does as another arm
    is that arm and stands once.
    """
    section = recipe.study
    arms: list[Arm] = []
    for model in section.models:
        given = {name: value for (of, name), value in chosen.items() if of == model}
        own = [_base(section, model)]
        own += [
            _arm(section, model, name, item, given)
            for name, item in section.arms.items()
            if model in (item.models or section.models)
        ]
        for curve, item in (section.sweeps or {}).items():
            for _, arm in curve_arms(section, curve, item, own):
                if not any(arm.same_weights_as(other) and set(arm.seeds) <= set(other.seeds) for other in own):
                    own.append(arm)
        arms += own
    return arms


def tuning_grids(recipe: StudyRecipe) -> dict[tuple[str, str], list[tuple[Any, Arm]]]:
    """Return what `tune` tries: (model, name of the choice) -> (value, arm with that value)."""
    section = recipe.study
    grids: dict[tuple[str, str], list[tuple[Any, Arm]]] = {}
    for model in section.models:
        for name, item in (section.tune or {}).items():
            if model in (section.arms[item.arm].models or section.models):
                arm = _arm(section, model, item.arm, section.arms[item.arm], {})
                grids[model, name] = [
                    (value, replace(_varied(arm, item.key, value, ""), seeds=item.seeds, rag=False))
                    for value in item.values
                ]
    return grids


def curve_arms(section: StudySection, name: str, item: SweepSection, arms: list[Arm]) -> Iterator[tuple[Any, Arm]]:
    """Yield (value, arm) of each point of a curve that varies an arm of `arms`; nothing where that is not there."""
    parent = next((arm for arm in arms if arm.name == item.arm), None)
    if parent is None:
        return
    for value in item.values:
        varied = _varied(parent, item.key, value, name)
        yield value, replace(varied, rag=False, seeds=item.seeds or parent.seeds)


def _base(section: StudySection, model: str) -> Arm:
    about = "the model as it was, nothing done to it"
    return Arm(BASE, model, about, "", {}, "", "", None, True, (section.seeds[0],), section.resources)


def _arm(section: StudySection, model: str, name: str, item: ArmSection, given: Mapping[str, Any]) -> Arm:
    overrides = {key: value for key, value in (section.overrides or {}).items() if key not in eval_overrides(section)}
    for choice, value in given.items():
        how = (section.tune or {})[choice]
        if name in (how.arms or (name,)):
            overrides[how.key] = value
    overrides |= item.overrides or {}
    return Arm(
        name=name, model=model, about=item.description, corpus=item.corpus, overrides=overrides,
        match_steps_of=item.match_steps_of or "",
        match_tokens_of=item.match_tokens_of or "", alpha=item.alpha, rag=item.rag, seeds=item.seeds or section.seeds,
        resources=item.resources or section.resources,
    )  # fmt: skip


def _varied(arm: Arm, key: str, value: Any, curve: str) -> Arm:
    name = f"{arm.name}, {key.split('.')[-1]} {label_of(value)}"
    if key == "alpha":
        return replace(arm, name=name, alpha=float(value), curve=curve)
    if key == "corpus":
        return replace(arm, name=name, corpus=str(value), curve=curve)
    return replace(arm, name=name, overrides={**arm.overrides, key: value}, curve=curve)


def label_of(value: Any) -> str:
    """Return a value of a recipe as a short label."""
    if isinstance(value, Mapping):
        return " + ".join(f"{name} {label_of(item)}" for name, item in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def override_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return dotted keys and values as `read_recipe` takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
