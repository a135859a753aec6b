"""`method: distill`: context distillation. A teacher that reads the document predicts the text,
and the model learns its predictions (`kinject.train.objectives.distillation`)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from kinject.process import first_process_first
from kinject.recipe import TrainRecipe
from kinject.recipe.method_rules import distillation_of
from kinject.train.methods.base import Method, MethodInputs, MethodParts
from kinject.train.objectives.distillation import Teacher, make_teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ContextDistillation(Method):
    """Learns rows of every shape from the predictions of a teacher."""

    name = "distill"

    def prepare(self, inputs: MethodInputs) -> MethodParts:
        """Return its part, with a teacher that is made of the model as the trainer has wrapped
        it."""
        parts = super().prepare(inputs)
        if inputs.tokenized.teacher is None:
            return parts
        return dataclasses.replace(parts, make_teacher=functools.partial(_make_teacher, inputs))

    def for_timing(self, recipe: TrainRecipe) -> TrainRecipe:
        """Return the recipe without its teacher, which would read the whole corpus first."""
        raw = dict(recipe.raw)
        for key in ("method", "distillation"):
            raw.pop(key, None)
        return dataclasses.replace(recipe, method=None, distillation=None, raw=raw)


def _make_teacher(inputs: MethodInputs, model: PreTrainedModel) -> Teacher:
    """Return the teacher of a run; add a note on it to its rows, and the cost of its predictions to
    the run's cost.

    The first process makes those that the cache lacks.
    """
    rows, section = inputs.tokenized.teacher, distillation_of(inputs.recipe)
    assert rows is not None
    assert section is not None
    weights = inputs.hashes.get("teacher" if section.teacher else "model", "")
    if weights.startswith("hub:"):  # a name, which does not say what its weights are
        weights = ""
    make = functools.partial(
        make_teacher, inputs.recipe, rows, model, weights, bf16=inputs.config.bf16
    )
    teacher, note, spent = first_process_first(make)
    inputs.tokenized.notes.append(note)
    inputs.cost.update(spent)
    return teacher
