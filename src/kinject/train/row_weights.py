"""The weight of each row of a corpus: a number in one of its columns, or its age."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinject.corpus.rows import LineFaults
from kinject.disk import Row, read_jsonl
from kinject.errors import InputError
from kinject.recipe import RowWeightsSection

_DAY = 86_400.0
_HEAVIEST = 1e9
"""Far from weights whose products with losses leave float32."""


class RowWeights:
    """Collects the weight of each row of a corpus: a number in one of its columns, or a number by its age.

    With a half-life, the column holds ISO 8601 dates and the weight is ``0.5 ** (days before the newest / half_life)``.
    """

    def __init__(self, section: RowWeightsSection, path: Path) -> None:
        self.section, self.path = section, path
        self._values: list[float] = []
        self._faults = LineFaults()

    def add(self, number: int, row: Row) -> None:
        """Add the row on line `number`."""
        value = _look_up(row, self.section.column)
        try:
            self._values.append(_seconds(value) if self.section.half_life is not None else _number(value))
        except ValueError as error:
            self._faults.add(f"{self.path}:{number}: {self.section.column}: {error}")

    def result(self) -> npt.NDArray[np.float32]:
        """Return the weight of each row, in order; the file is read if no row was added (its tokens were cached).

        Raises `InputError` with every row (the first 20) whose column is absent or of another kind, each as file:line.
        """
        if not self._values and not self._faults:
            for number, row in read_jsonl(self.path):
                self.add(number, row)
        self._faults.raise_if_any("Give every row the column.")
        weights = np.array(self._values)
        if self.section.half_life is not None and len(weights):
            weights = 0.5 ** ((weights.max() - weights) / _DAY / self.section.half_life)
        if not weights.any():
            raise InputError(
                f"{self.path}: every row weighs 0 by {self.section.column}, so nothing would be learned. Give some a "
                "weight."
            )
        return np.asarray(weights, dtype=np.float32)


def _look_up(row: Any, column: str) -> Any:
    """Return the value of `column`, which may name a field of nested objects: ``meta.weight``; None without one."""
    if column in row:
        return row[column]
    for key in column.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _number(value: Any) -> float:
    if value is None:
        raise ValueError("is missing.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _HEAVIEST:
        raise ValueError(
            f"found {value!r}, expected a number of 0 or more, up to {_HEAVIEST:g}. For dates set half_life."
        )
    return float(value)


def _seconds(value: Any) -> float:
    if value is None:
        raise ValueError("is missing.")
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"found {value!r}, expected a date such as 2024-05-31.") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
