"""Training methods, by their name in a recipe: each is one file of this folder, and one line of
`METHODS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinject.train.methods.base import Method, MethodInputs, MethodParts, TrainerOptions
from kinject.train.methods.cpt import ContinuedPretraining
from kinject.train.methods.distill import ContextDistillation
from kinject.train.methods.recall import Recall
from kinject.train.methods.sft import SupervisedFineTuning

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe

__all__ = ["METHODS", "Method", "MethodInputs", "MethodParts", "TrainerOptions", "method_of"]

METHODS: dict[str | None, Method] = {
    None: Method(),
    "cpt": ContinuedPretraining(),
    "sft": SupervisedFineTuning(),
    "distill": ContextDistillation(),
    "recall": Recall(),
}
"""Name -> method. A recipe without one learns rows of every shape."""


def method_of(recipe: TrainRecipe) -> Method:
    """Return the method of a recipe."""
    return METHODS[recipe.method]
