"""The keys of a recipe that exclude or need each other, for every verb: `find_problems`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kinject.errors import Problem
from kinject.recipe import train_conflicts
from kinject.recipe.launch import Launch
from kinject.recipe.read import (
    AugmentRecipe,
    EvalRecipe,
    QuestionsRecipe,
    Recipe,
    StudyRecipe,
    TrainRecipe,
)
from kinject.recipe.sections import EvalSection, GeneratorSection
from kinject.recipe.sections.augment import (
    StyleTraits,
    augment_problems,
    generator_problems,
    questions_problems,
    unlimited_problems,
)
from kinject.recipe.sections.eval import Asking, eval_problems
from kinject.recipe.sections.model import model_problems
from kinject.recipe.sections.study import Shared, study_problems

Facts = Launch | Asking | Shared | Mapping[str, StyleTraits]
"""What the checks of train, eval, study and augment read beside a recipe."""


@dataclass(frozen=True)
class Check:
    """The problems of one subject; `problems` gets the recipe, or a generator, and the facts."""

    problems: Callable[..., Iterator[Problem]]

    @property
    def message(self) -> str:
        """The name of the function, for tests."""
        return self.problems.__name__


def find_problems(verb: str, recipe: Recipe, facts: Facts | None = None) -> list[Problem]:
    """Return all problems of a recipe of `verb`.

    `facts` are those of the verb: a `Launch`, `Asking`, `Shared` or the styles; plan and questions
    have none.
    """
    problems: list[Problem] = []
    for check in CONFLICTS[verb]:
        problems += check.problems(recipe, facts)
    budget = getattr(getattr(recipe, verb, None), "budget", None)
    for key, generator in _generators(recipe, verb):
        problems += generator_problems(generator, key)
        if budget is not None:
            problems += unlimited_problems(generator, key)
    return problems


def _generators(recipe: Recipe, verb: str) -> Iterator[tuple[str, GeneratorSection]]:
    """Yield the generators of the section of a verb by their keys."""
    section = getattr(recipe, verb, None)
    for name in ("generator", "judge"):
        if getattr(section, name, None) is not None:
            yield f"{verb}.{name}", getattr(section, name)
    if isinstance(section, EvalSection):
        for name, table in section.endpoints().items():
            yield f"eval.models.{name}.endpoint", table.generator(1)


def _model(recipe: TrainRecipe, _: Launch | None) -> Iterator[Problem]:
    yield from model_problems(recipe.model)


def _eval(recipe: EvalRecipe, asking: Asking) -> Iterator[Problem]:
    # With a corpus or a trainer the file is a train recipe too, which reads the section.
    if recipe.model is not None and recipe.corpus is None and not recipe.trainer:
        message = (
            "an evaluation does not read this section. Put a model into eval.models, as "
            "NAME: {path: ..., quantization: 4bit}, and what holds for all of them into "
            "eval.model_defaults."
        )
        yield Problem("model", message)
    yield from eval_problems(recipe.eval, asking)


def _augment(recipe: AugmentRecipe, styles: Mapping[str, StyleTraits]) -> Iterator[Problem]:
    yield from augment_problems(recipe.augment, styles)


def _questions(recipe: QuestionsRecipe, _: None) -> Iterator[Problem]:
    yield from questions_problems(recipe.questions)


def _study(recipe: StudyRecipe, shared: Shared) -> Iterator[Problem]:
    yield from study_problems(recipe.study, shared)


CONFLICTS: Mapping[str, tuple[Check, ...]] = {
    "plan": (Check(_model), Check(train_conflicts.corpus)),
    "train": (
        Check(_model),
        Check(train_conflicts.weights),
        Check(train_conflicts.arithmetic),
        Check(train_conflicts.corpus),
        Check(train_conflicts.evaluations),
        Check(train_conflicts.machine),
        Check(train_conflicts.loss),
        Check(train_conflicts.method),
        Check(train_conflicts.trained_weights),
        Check(train_conflicts.frozen_base),
        Check(train_conflicts.new_layers),
        Check(train_conflicts.gradients),
        Check(train_conflicts.update),
        Check(train_conflicts.processes),
    ),
    "eval": (Check(_eval),),
    "augment": (Check(_augment),),
    "questions": (Check(_questions),),
    "generator": (Check(generator_problems),),
    "study": (Check(_study),),
}
"""Verb -> its checks in the order of the messages, and those of each generator."""
