"""How much each row of a corpus counts: a number that the row holds, or its age."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.recipe import RowWeightsSection

_DAY = 86_400.0
_MAX_TOLD = 20
_HEAVIEST = 1e9
"""Far from where products of weights and losses leave float32."""


def row_weights(section: RowWeightsSection, path: Path) -> npt.NDArray[np.float32]:
    """Return the weight of each row of the corpus at `path`, in order.

    With a half-life, the column holds ISO 8601 dates and the weight is ``0.5 ** (days before the newest / half_life)``.
    Raises `InputError` with every row (the first 20) whose column is absent or of another kind, each as file:line.
    """
    values: list[float] = []
    faults: list[str] = []
    n_faults = 0
    for number, row in read_jsonl(path):
        found = _look_up(row, section.column)
        if found is None and section.missing is not None:
            values.append(math.nan)
            continue
        try:
            values.append(_seconds(found) if section.half_life is not None else _number(found))
        except ValueError as error:
            n_faults += 1
            if n_faults <= _MAX_TOLD:
                faults.append(f"{path}:{number}: {section.column}: {error}")
    if faults:
        more = [f"... and {n_faults - _MAX_TOLD} more faulty lines."] if n_faults > _MAX_TOLD else []
        hint = "Set techniques.row_weights.missing for rows that lack the column."
        raise InputError("\n".join([*faults, *more, hint]))
    weights = np.array(values)
    if section.half_life is not None and not np.isnan(weights).all():
        weights = 0.5 ** ((np.nanmax(weights) - weights) / _DAY / section.half_life)
    weights = np.nan_to_num(weights, nan=section.missing or 0.0)
    if not weights.any():
        raise InputError(
            f"{path}: every row weighs 0 by {section.column}, so nothing would be learned. Give some a weight."
        )
    return np.asarray(weights, dtype=np.float32)


def _look_up(row: Any, column: str) -> Any:
    if column in row:
        return row[column]
    for part in column.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _number(found: Any) -> float:
    if found is None:
        raise ValueError("is missing.")
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= _HEAVIEST:
        raise ValueError(
            f"found {found!r}, expected a number of 0 or more, up to {_HEAVIEST:g}. For dates set half_life."
        )
    return float(found)


def _seconds(found: Any) -> float:
    if found is None:
        raise ValueError("is missing.")
    try:
        moment = datetime.fromisoformat(found)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"found {found!r}, expected a date such as 2024-05-31.") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
