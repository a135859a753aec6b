"""How many bits base models of several sizes hold, and the lines through their accuracies: values of a study's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """How many bits of a question set's facts one base model, or one arm on it, knows.

    `exposures` is how often training read the document behind a question, in any paraphrase (mean), None if that was not
    counted (the base). `bits` are in all `n_facts`, with `low` and `high` its 95% interval over documents and seeds;
    `per_parameter` is bits over `parameters`. `most_bits` is what all the facts hold.
    """

    model: str
    arm: str
    question_set: str
    label: str
    """The value of the sweep, "" for the base."""
    parameters: int
    exposures: float | None
    by_seed: tuple[float, ...]
    accuracy: float
    chance: float
    n_facts: int
    bits: float
    low: float
    high: float
    most_bits: float
    per_parameter: float


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """A least-squares line through accuracies of single seeds over log2 of what is doubled (`along`).

    `slope` is accuracy gained at each doubling, with its 95% interval (Student's t), `intercept` the accuracy at 1.
    `fixed` names what stays the same: a value of the sweep ("" for the base), or a base model.
    """

    question_set: str
    along: Literal["parameters", "exposures"]
    fixed: str
    n: int
    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """Knowledge of base models of several sizes, and how it grows."""

    points: tuple[ScalingPoint, ...]
    fits: tuple[ScalingFit, ...]
