"""Objectives of training beside plain cross-entropy: each is one file of this folder, and one line
of `OBJECTIVES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinject.train.loss import Objective, TrainingLoss
from kinject.train.objectives.distillation import Distillation
from kinject.train.objectives.hard_examples import HardExamples
from kinject.train.objectives.weighted_rows import WeightedRows, row_weights

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe

__all__ = [
    "OBJECTIVES",
    "HardExamples",
    "Objective",
    "TrainingLoss",
    "WeightedRows",
    "make_loss",
    "row_weights",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "hard_example_mining": HardExamples,
    "row_weights": WeightedRows,
    "distill": Distillation,
}
"""Name -> kind. A name that is no key of a recipe is one of techniques.custom."""


def make_loss(recipe: TrainRecipe, smoothing: float) -> TrainingLoss:
    """Return the loss of a run; `smoothing` is trainer.label_smoothing_factor."""
    chosen = [
        kind.configured(name, recipe)
        for name, kind in OBJECTIVES.items()
        if kind.is_on(name, recipe)
    ]
    return TrainingLoss(smoothing, tuple(chosen))
