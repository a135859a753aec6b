"""Rows that count by a weight of their own (techniques.row_weights)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from kinject.corpus.rows import LineFaults
from kinject.corpus.spans import Json
from kinject.disk import Row, read_jsonl
from kinject.errors import InputError
from kinject.recipe import RowWeightsSection
from kinject.train.loss import Objective

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
    read = _number if section.half_life is None else _seconds
    values: list[float] = []
    faults = LineFaults()
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
            f"{path}: every row weighs 0 by {section.column}, so nothing would be learned. Give "
            "some a weight."
        )
    return np.asarray(weights, dtype=np.float32)


def _look_up(row: Row, column: str) -> Json:
    """Return the value of `column`, which may name a field of nested objects: ``meta.weight``; None
    without one."""
    if column in row:
        found: Json = row[column]
        return found
    value: Json = row
    for key in column.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _number(value: Json) -> float:
    # A bool is an int to isinstance.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _HEAVIEST:
        raise ValueError(
            f"found {value!r}, expected a number of 0 or more. For dates set half_life."
        )
    return float(value)


def _seconds(value: Json) -> float:
    try:
        moment = datetime.fromisoformat(cast("str", value))  # any other type is refused by it
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"found {value!r}, expected a date such as 2024-05-31.") from None
    # Else timestamp() reads it in the machine's own zone, and weights differ between machines.
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()
