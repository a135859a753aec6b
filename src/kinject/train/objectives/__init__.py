"""Objectives of training beside plain cross-entropy: weights of rows, the hardest tokens or rows,
and the table of all.

An objective of your own is a class in a file of this folder, and one line of `OBJECTIVES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kinject.corpus.rows import LineFaults
from kinject.corpus.tokenize import IGNORED
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.recipe import RowWeightsSection
from kinject.recipe.sections import HardExampleMiningSection
from kinject.train.loss import Objective, TrainingLoss
from kinject.train.objectives.distillation import Distillation

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

_DAY = 86_400.0
_HEAVIEST = 1e9
"""Far from weights whose products with losses leave float32."""


class WeightedRows(Objective):
    """The loss is the weighted mean over tokens; batches hold weights [batch, length]."""

    is_mean = False

    def __init__(self, section: RowWeightsSection) -> None:
        self.section = section

    def count(self, batch: Mapping[str, Any], learned: torch.Tensor) -> torch.Tensor:
        """Return the weight of the learned tokens."""
        return torch.where(learned, batch["weights"][:, 1:], 0.0).sum()

    def total(self, losses: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the weighted sum."""
        return torch.sum(losses * batch["weights"][:, 1:])


def row_weights(section: RowWeightsSection, path: Path) -> npt.NDArray[np.float32]:
    """Return the weight of each row of a corpus: a number in one of its columns, or a number by its
    age.

    With a half-life, the column holds ISO 8601 dates and the weight is ``0.5 ** (days before the
    newest / half_life)``. Raises `InputError` with every row (the first 20) whose column is absent
    or of another kind, each as file:line.
    """
    read, values, faults = (
        _number if section.half_life is None else _seconds,
        list[float](),
        LineFaults(),
    )
    for number, row in read_jsonl(path):
        try:
            values.append(read(_look_up(row, section.column)))
        except ValueError as error:
            faults.add(f"{path}:{number}: {section.column}: {error}")
    faults.raise_if_any("Give every row the column.")
    weights = np.array(values)
    if section.half_life is not None and len(weights):
        weights = 0.5 ** ((weights.max() - weights) / _DAY / section.half_life)
    if not weights.any():
        raise InputError(
            f"{path}: every row weighs 0 by {section.column}, so nothing would be learned. Give some a weight."
        )
    return np.asarray(weights, dtype=np.float32)


def _look_up(row: Any, column: str) -> Any:
    """Return the value of `column`, which may name a field of nested objects: ``meta.weight``; None
    without one."""
    if column in row:
        return row[column]
    for key in column.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _HEAVIEST:
        raise ValueError(
            f"found {value!r}, expected a number of 0 or more. For dates set half_life."
        )
    return float(value)


def _seconds(value: Any) -> float:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"found {value!r}, expected a date such as 2024-05-31.") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


class HardExamples(Objective):
    """Only the fraction with the highest loss counts: of tokens, or of rows by their mean loss, all
    rows with equal weight.

    Rows are texts: one ends where positions restart (arXiv 1604.03540).
    """

    is_mean = False

    def __init__(self, section: HardExampleMiningSection) -> None:
        self.section = section

    def count(self, batch: Mapping[str, Any], learned: torch.Tensor) -> torch.Tensor:
        """Return how many tokens or rows are kept."""
        n = int(learned.sum()) if self.section.unit == "tokens" else len(_texts(batch, learned)[0])
        return torch.tensor(_n_hardest(n, self.section.fraction), device=learned.device)

    def total(self, losses: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the sum of the highest losses."""
        learned = batch["labels"][:, 1:] != IGNORED
        if self.section.unit == "tokens":
            items = losses[learned]
        else:
            sizes, indices = _texts(batch, learned)
            items = losses.new_zeros(len(sizes)).index_add(0, indices, losses[learned]) / sizes
        return items.topk(_n_hardest(len(items), self.section.fraction)).values.sum()


def _n_hardest(n: int, fraction: float) -> int:
    return math.ceil(fraction * n - 1e-9)  # 0.1 * 30 is a little more than 3


def _texts(batch: Mapping[str, Any], learned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (learned tokens of each text that has any, the index of the text of each learned
    token), texts in order."""
    restarts = batch["position_ids"] == 0
    restarts[:, 0] = True
    numbers = restarts.flatten().cumsum(0).view(restarts.shape)[:, 1:]
    _, indices, sizes = numbers[learned].unique(return_inverse=True, return_counts=True)
    return sizes, indices


OBJECTIVES: dict[str, type[Objective]] = {
    "hard_example_mining": HardExamples,
    "row_weights": WeightedRows,
    "distill": Distillation,
}
"""Name -> kind. A name that is no key of a recipe is one of techniques.custom."""


def make_loss(recipe: TrainRecipe, smoothing: float) -> TrainingLoss:
    """Return the loss of a run; `smoothing` is trainer.label_smoothing_factor."""
    chosen = (
        kind.configured(name, recipe)
        for name, kind in OBJECTIVES.items()
        if kind.is_on(name, recipe)
    )
    return TrainingLoss(smoothing, tuple(chosen))
