"""What a bench measured, and its statistics: each strategy against the vanilla run of the same round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, geometric_mean, quantiles
from typing import Any

from kinject.eval.statistics import seed_interval

WARM_UP = 2
"""Steps that are told apart: torch.compile compiles in the first and, for other row lengths, again in the second."""
LEAST_STEPS = WARM_UP + 2
"""Fewer cannot be measured."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds with its 95% interval; of times, memory and shares the geometric one.

    `low` and `high` are None with one round.
    """

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Measured:
    """One run of one strategy in one round.

    `seconds` is the time of 1,000 learned tokens at the pace of the faster steps (`pace`), without the first `WARM_UP`,
    which took `first_seconds` in all.
    `peak_bytes` is the most memory up to the last step, `accuracy` that of each question set after it.
    """

    strategy: str
    round: int
    seconds: float
    first_seconds: float
    peak_bytes: int
    tokens: int
    loss: float
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One strategy of the table. Without runs, `reason` says why.

    `spread` is the range of `time_share` over its mean; vanilla's is how far its two runs of a round lie apart at most.
    """

    name: str
    label: str
    about: str
    overrides: Mapping[str, Any]
    reason: str = ""
    n_rounds: int = 0
    time: Estimate | None = None
    time_share: Estimate | None = None
    spread: float | None = None
    first_seconds: float | None = None
    peak: Estimate | None = None
    peak_share: Estimate | None = None
    tokens: float | None = None
    loss: Estimate | None = None
    accuracy: Mapping[str, Estimate] | None = None
    gain: Mapping[str, Estimate] | None = None


@dataclass(frozen=True)
class Bench:
    """The whole table: `rows` by time, those that did not run last; `failed` of them broke; `notes` for the reader."""

    recipe: str
    device: str
    rows: tuple[Row, ...]
    sets: tuple[str, ...]
    repeats: int
    steps: int
    notes: tuple[str, ...]
    failed: int


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95% interval."""
    found = seed_interval(values)
    return Estimate(fmean(values), None, None) if found is None else Estimate(found[0], found[2], found[3])


def _as_share(found: Estimate) -> Estimate:
    """Return an estimate whose interval stays between 0 and 1, where accuracies lie."""
    if found.low is None or found.high is None:
        return found
    return Estimate(found.mean, max(0.0, found.low), min(1.0, found.high))


def share_of(values: Sequence[float], vanilla: Sequence[float]) -> Estimate:
    """Return the geometric mean of value / vanilla, paired by round, with Student's 95% interval on the log scale."""
    logs = mean_of([math.log(own / base) for own, base in zip(values, vanilla, strict=True)])
    if logs.low is None or logs.high is None:
        return Estimate(math.exp(logs.mean), None, None)
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def spread_of(values: Sequence[float], vanilla: Sequence[float]) -> float:
    """Return the range of value / vanilla over the rounds, as a share of its mean; 0 with one round."""
    ratios = [own / base for own, base in zip(values, vanilla, strict=True)]
    return (max(ratios) - min(ratios)) / fmean(ratios)


def pace(steps: Sequence[tuple[float, float]]) -> float:
    """Return the lower quartile of seconds per token over steps of (seconds, tokens), two or more.

    A machine that does other things holds steps up and never hastens them: the faster ones tell what a step costs.
    """
    return quantiles([seconds / n_tokens for seconds, n_tokens in steps], n=4, method="inclusive")[0]


def by_round(runs: Sequence[Measured]) -> dict[int, Measured]:
    """Return one measurement a round: where a round has several runs, their time and memory are the geometric means."""
    rounds: dict[int, list[Measured]] = {}
    for run in runs:
        rounds.setdefault(run.round, []).append(run)
    return {
        number: replace(
            some[0], seconds=geometric_mean([run.seconds for run in some]),
            first_seconds=max(run.first_seconds for run in some),
            peak_bytes=round(geometric_mean([run.peak_bytes for run in some])),
        )
        for number, some in rounds.items()
    }  # fmt: skip


def noise_of(runs: Sequence[Measured]) -> float:
    """Return how far two runs of the same strategy and round lie apart in time at most, as a share of their mean."""
    means = {number: run.seconds for number, run in by_round(runs).items()}
    pairs = combinations(runs, 2)
    return max((abs(a.seconds - b.seconds) / means[a.round] for a, b in pairs if a.round == b.round), default=0.0)


def summarise(row: Row, runs: Sequence[Measured], vanilla: Sequence[Measured]) -> Row:
    """Return `row` with the numbers of its `runs`; those of rounds without a vanilla run are left out.

    Time and memory are geometric means like their shares, so that no interval reaches below 0.
    """
    every, references = runs, by_round(vanilla)
    runs = [run for number, run in by_round(runs).items() if number in references]
    if not runs:
        return row
    bases = [references[run.round] for run in runs]
    seconds, base_seconds = [run.seconds for run in runs], [base.seconds for base in bases]
    peaks, base_peaks = [run.peak_bytes for run in runs], [base.peak_bytes for base in bases]
    sets, ones = list(runs[0].accuracy), [1.0] * len(runs)
    return Row(
        name=row.name, label=row.label, about=row.about, overrides=row.overrides, n_rounds=len(runs),
        time=share_of(seconds, ones), time_share=share_of(seconds, base_seconds),
        spread=noise_of(every) if row.name == "vanilla" else spread_of(seconds, base_seconds),
        first_seconds=max(run.first_seconds for run in runs),
        peak=share_of(peaks, ones), peak_share=share_of(peaks, base_peaks),
        tokens=fmean(run.tokens for run in runs), loss=mean_of([run.loss for run in runs]),
        accuracy={name: _as_share(mean_of([run.accuracy[name] for run in runs])) for name in sets},
        gain={
            name: mean_of([run.accuracy[name] - base.accuracy[name] for run, base in zip(runs, bases, strict=True)])
            for name in sets
        },
    )  # fmt: skip


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by time; those without a measurement stand last, as they came."""
    return sorted(rows, key=lambda row: row.time_share.mean if row.time_share else math.inf)
