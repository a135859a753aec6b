"""Knowledge of base models of several sizes in bits, and how it grows with parameters and with exposures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kinject.disk import read_checked_json
from kinject.errors import InputError
from kinject.eval.statistics import CorrectnessMatrix, bounded_mean, chance
from kinject.recipe.study_section import ScalingSection
from kinject.results import Scaling, ScalingFit, ScalingPoint, Sweep
from kinject.study.arms import BASE
from kinject.study.records import AskSetting, Records
from kinject.study.stages import ArmRun

_FEWEST_VALUES = 3
"""Different values of the doubled quantity that a line needs: any two points lie on a line."""


@dataclass(frozen=True)
class Measures:
    """What the points are made from: answers, runs, the sweep on each base model, the first format and shots, parameters."""

    records: Records
    runs: Sequence[ArmRun]
    sweeps: Sequence[Sweep]
    head: tuple[str, int]
    parameters: Mapping[str, int]


def make_scaling(section: ScalingSection, roles: Mapping[str, str], measures: Measures) -> Scaling:
    """Return the points and lines of `section.question_sets`. Raises `InputError` for a subject without its values."""
    points: list[ScalingPoint] = []
    for name in section.question_sets:
        for model in measures.parameters:
            if roles[name] == "retention":
                points += _scaling_points(section, measures, (model, BASE, name), "")
                continue
            sweep = next((item for item in measures.sweeps if item.model == model and item.name == section.sweep), None)
            for point in sweep.points if sweep is not None else ():
                points += _scaling_points(section, measures, (model, point.arm, name), point.label)
    return Scaling(tuple(points), tuple(_scaling_fits(points)))


def _scaling_points(
    section: ScalingSection, measures: Measures, place: tuple[str, str, str], label: str
) -> Iterator[ScalingPoint]:
    """Yield the point of (model, arm, question set), nothing where the arm has no answers."""
    model, arm, name = place
    setting = AskSetting(name, *measures.head, 0)
    if setting not in measures.records.settings(model, arm):
        return
    answers = measures.records.answers(model, arm, setting)
    for answer in answers:
        if answer.subject not in section.values:
            raise InputError(
                f"study.scaling.values: a question of {name} is on {answer.subject!r}; found {', '.join(section.values)}. "
                "Say how many values a fact of it can take."
            )
    n_choices = [len(answer.log_probs) for answer in answers]
    n_values = [section.values[answer.subject] for answer in answers]
    matrix = measures.records.matrix(model, arm, setting)
    worth = bits_matrix(matrix, n_choices, n_values)
    n_facts = (section.facts or {}).get(name, len(answers))
    most = sum(map(math.log2, n_values)) / len(n_values)
    found = bounded_mean(worth, 0.0, most)
    parameters = measures.parameters[model]
    yield ScalingPoint(
        model=model, arm=arm, question_set=name, label=label, parameters=parameters,
        exposures=_mean_exposures(measures, model, arm, {answer.document_id for answer in answers}) if label else None,
        by_seed=tuple(float(value) for value in matrix.correct.mean(1)), accuracy=matrix.mean(),
        chance=chance(n_choices), n_facts=n_facts, bits=n_facts * found.value,
        low=n_facts * found.low, high=n_facts * found.high, most_bits=n_facts * most,
        per_parameter=n_facts * found.value / parameters,
    )  # fmt: skip


def _mean_exposures(measures: Measures, model: str, arm: str, documents: set[str | None]) -> float | None:
    """Return how often the runs of an arm read each of `documents`, on average; None where none was counted."""
    counts: list[float] = []
    for run in measures.runs:
        train = run.train
        path = train.folder / "exposures.json" if train is not None else None
        if (run.arm.model, run.arm.name) == (model, arm) and path is not None and path.is_file():
            read: dict[str, float] = read_checked_json(path, "Delete its folder to train again.")
            counts += [count for document, count in read.items() if document in documents]
    return sum(counts) / len(counts) if counts else None


def _scaling_fits(points: Sequence[ScalingPoint]) -> Iterator[ScalingFit]:
    for name in dict.fromkeys(point.question_set for point in points):
        own = [point for point in points if point.question_set == name]
        for label in dict.fromkeys(point.label for point in own):
            yield from _scaling_fit(name, "parameters", label, [point for point in own if point.label == label])
        for model in dict.fromkeys(point.model for point in own):
            yield from _scaling_fit(name, "exposures", model, [point for point in own if point.model == model])


def _scaling_fit(
    name: str, along: Literal["parameters", "exposures"], fixed: str, points: Sequence[ScalingPoint]
) -> Iterator[ScalingFit]:
    pairs = [(x, y) for point in points if (x := getattr(point, along)) for y in point.by_seed]
    if len({x for x, _ in pairs}) >= _FEWEST_VALUES:
        slope, low, high, intercept, r_squared = fit_line(*zip(*pairs, strict=True))
        yield ScalingFit(name, along, fixed, len(pairs), slope, low, high, intercept, r_squared)


def bits_matrix(matrix: CorrectnessMatrix, n_choices: Sequence[int], n_values: Sequence[int]) -> CorrectnessMatrix:
    """Return `matrix` with the bits of each question in place of right or wrong, corrected for guessing.

    log2(values) x (right - 1 / choices) / (1 - 1 / choices): its mean is the share of facts known, times their bits, of a
    reader who knows a fact or guesses evenly among the choices, values being equally likely.
    """
    import numpy as np

    chances = 1 / np.array(n_choices, dtype=np.float64)
    worth = np.log2(np.array(n_values, dtype=np.float64))
    return CorrectnessMatrix((matrix.correct - chances) / (1 - chances) * worth, matrix.question_ids, matrix.clusters)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float, float, float | None]:
    """Return (slope, low, high, intercept, r squared) of least squares of `ys` over log2 of `xs`; 95%, Student's t.

    Where all `ys` are the same the line is level, and r squared None.
    """
    from scipy.stats import linregress, t

    if len(set(ys)) == 1:
        return 0.0, 0.0, 0.0, ys[0], None
    found = linregress([math.log2(x) for x in xs], ys)
    half = float(t.ppf(0.975, len(xs) - 2)) * float(found.stderr)
    slope = float(found.slope)
    return slope, slope - half, slope + half, float(found.intercept), float(found.rvalue) ** 2
