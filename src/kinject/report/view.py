"""Lookups in a report that its pages and figures share. Computes no statistics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kinject.report.formatting import format_name, format_p, format_percent, format_points, format_prompt
from kinject.results import (
    ArmInfo,
    ArmResult,
    Perplexity,
    PromptFormat,
    Report,
    Sweep,
    SweepPoint,
    UnscoredResult,
)


@dataclass(frozen=True, slots=True)
class Training:
    """The training of one arm, from its manifest: `reading` in words what it read, `epochs` how often (None: not counted)."""

    reading: str
    steps: int
    epochs: float | None
    finished: bool


@dataclass(frozen=True, slots=True)
class Series:
    """One logged number over a run: the (rising) `steps` and the value at each, NaN where it is not finite (null)."""

    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """The log of one run: each logged number by its name in log.jsonl."""

    name: str
    series: Mapping[str, Series]

    @property
    def loss(self) -> Series:
        """The training loss."""
        return self.series.get("loss", Series())

    def epoch_ends(self) -> tuple[float, ...]:
        """Return the (interpolated) steps at which one epoch ended and another began."""
        epochs = self.series.get("epoch", Series())
        if not epochs.values:
            return ()
        import numpy as np

        between = np.arange(math.floor(epochs.values[0]) + 1, math.ceil(epochs.values[-1]))
        return tuple(float(step) for step in np.interp(between, epochs.values, epochs.steps))


class View:
    """A report's results by model, arm, question set and prompt format.

    `set_results` are the results on whole question sets: neither those without the question nor those of one subject.
    `trainings` are known by (model, arm) where their run folders still exist.
    """

    def __init__(self, report: Report, trainings: Mapping[tuple[str, str], Training] | None = None) -> None:
        self.report = report
        self.trainings = dict(trainings or {})
        self.set_results = [result for result in report.results if result.role != "baseline" and not result.subject]
        self.arms = {(arm.model, arm.name): arm for arm in report.arms}
        self._by_k: dict[tuple[str, str, str, PromptFormat, str], list[ArmResult]] = {}
        for result in report.results:
            if result.role != "baseline":
                key = (result.model, result.arm, result.question_set, result.prompt_format, result.subject)
                self._by_k.setdefault(key, []).append(result)
        for results in self._by_k.values():
            results.sort(key=lambda result: result.k)
        self._formats: dict[str, list[PromptFormat]] = {}
        for result in self.set_results:
            formats = self._formats.setdefault(result.question_set, [])
            if result.prompt_format not in formats:
                formats.append(result.prompt_format)

    @property
    def is_study(self) -> bool:
        """Whether the report is a study's; else it is an evaluation's."""
        return self.report.kind == "study"

    @property
    def several_models(self) -> bool:
        """Whether there is more than one base model."""
        return len(self.report.models) > 1

    def source(self, model: str) -> str:
        """Return the folder or hub name of a base model, its name if that is not known."""
        return self.report.model_sources.get(model, model)

    def reading(self, model: str, arm: str) -> str:
        """Return in words what a trained arm read, "" where neither its manifest nor the study describes it."""
        training = self.trainings.get((model, arm))
        if training is not None and training.reading:
            return training.reading
        about = format_name(self.arms[model, arm].description) if self.is_study else ""
        return "" if about == format_name(arm) else about

    def headline_results(self) -> Iterator[ArmResult]:
        """Yield the results of the report's own arms that are judged: each set's first format, with the chosen K if any."""
        for _, _, _, results in self.groups(n_formats=1):
            yield from results

    def own_arms(self, model: str) -> list[ArmInfo]:
        """Return the arms of `model` that are not points of a sweep, the untrained first."""
        arms = [arm for arm in self.report.arms if arm.model == model and not arm.sweep]
        return sorted(arms, key=lambda arm: arm.trained)

    def sets(self, role: str = "", model: str = "") -> list[str]:
        """Return the names of the question sets (of `role`, asked of `model`), in order."""
        return list(dict.fromkeys(
            result.question_set for result in self.set_results
            if (not role or result.role == role) and (not model or result.model == model)
        ))  # fmt: skip

    def first(self, question_set: str) -> ArmResult:
        """Return the first result on a question set."""
        return next(result for result in self.set_results if result.question_set == question_set)

    def perplexities(self) -> Iterator[tuple[str, list[Perplexity]]]:
        """Yield each base model's file of held-out texts, in words, and its perplexities, that of the base first."""
        items = self.report.perplexities
        for model, name in dict.fromkeys((item.model, item.name) for item in items):
            of_model = f", {format_name(model)}" if self.several_models and model else ""
            yield f"{format_name(name)}{of_model}", [item for item in items if (item.model, item.name) == (model, name)]

    def formats(self, question_set: str) -> list[PromptFormat]:
        """Return the prompt formats of `question_set`; the first is the headline."""
        return self._formats.get(question_set, [])

    def headline(self, question_set: str) -> PromptFormat:
        """Return the prompt format that the recipe lists first."""
        return self.formats(question_set)[0]

    def every_k(
        self, model: str, arm: str, question_set: str, form: PromptFormat | None = None, subject: str = ""
    ) -> list[ArmResult]:
        """Return an arm's results in one format (of one subject's questions), by K; in the headline without `form`."""
        if question_set not in self._formats:
            return []
        key = (model, arm, question_set, form or self.headline(question_set), subject)
        return self._by_k.get(key, [])

    def result(
        self, model: str, arm: str, question_set: str, k: int = 0, form: PromptFormat | None = None
    ) -> ArmResult | None:
        """Return an arm's result with `k` passages, None if there is none."""
        return next((r for r in self.every_k(model, arm, question_set, form) if r.k == k), None)

    def chosen(
        self, model: str, arm: str, question_set: str, form: PromptFormat | None = None, subject: str = ""
    ) -> ArmResult | None:
        """Return an arm's result with its chosen K, None if none was chosen."""
        return next((r for r in self.every_k(model, arm, question_set, form, subject) if r.chosen_k), None)

    def retrieval(self, model: str, question_set: str) -> ArmResult | None:
        """Return the base with retrieval that trained arms are compared with: its chosen K, in an evaluation else the first."""
        chosen = self.chosen(model, self.base(model), question_set)
        if chosen is not None or self.is_study:
            return chosen
        key = (model, self.base(model), question_set, self.headline(question_set))
        results = (r for r in self.set_results if (r.model, r.arm, r.question_set, r.prompt_format) == key)
        return next((r for r in results if r.k), None)

    def base(self, model: str) -> str:
        """Return the name of the arm that is the untrained model, "" if there is none."""
        return next((arm.name for arm in self.own_arms(model) if not arm.trained), "")

    def shown(self, model: str, question_set: str, form: PromptFormat | None = None) -> list[ArmResult]:
        """Return the results of the report's own arms: without context, then with the chosen K (each K if none was chosen)."""
        arms = [arm.name for arm in self.own_arms(model)]
        plain = [self.result(model, arm, question_set, 0, form) for arm in arms]
        results = [result for result in plain if result is not None]
        for arm in arms:
            chosen = self.chosen(model, arm, question_set, form)
            every_k = self.every_k(model, arm, question_set, form)
            results += [result for result in every_k if result.k] if chosen is None else [chosen]
        return results

    def groups(
        self, role: str = "", n_formats: int | None = None
    ) -> Iterator[tuple[str, str, PromptFormat, list[ArmResult]]]:
        """Yield (model, question set, prompt format, `shown` results) of all sets (of `role`), in their first `n_formats`."""
        for model in self.report.models:
            for name in self.sets(role, model):
                for form in self.formats(name)[:n_formats]:
                    results = self.shown(model, name, form)
                    if results:
                        yield model, name, form, results

    def point(self, sweep: Sweep, point: SweepPoint, question_set: str) -> ArmResult | None:
        """Return the result of a sweep's point, None if its arm did not finish."""
        return self.result(sweep.model, point.arm, question_set)

    def set_label(self, question_set: str, form: PromptFormat, model: str = "") -> str:
        """Return a set's name, with the prompt format and the model, each if there are several."""
        parts = [format_name(model)] if model and self.several_models else []
        parts.append(format_name(question_set))
        if len(self.formats(question_set)) > 1:
            parts.append(format_prompt(form))
        return ", ".join(parts)


def unscored_text(item: UnscoredResult) -> str:
    """Return the sentence on an arm of which no question has a score."""
    arm = arm_name(item.arm, item.k)
    seed = "" if item.seed is None else f", seed {item.seed}"
    prompt = format_prompt(PromptFormat(item.format, item.shots, item.score))
    label = f"{arm}{seed} on {format_name(item.question_set)} ({prompt})"
    return f"{label}: diverged. None of {item.n:,} questions has a score: their log-probs are not finite, or all equal"


def arm_label(result: ArmResult) -> str:
    """Return ``cpt`` or ``cpt with passages``, with K if it was not chosen."""
    return arm_name(result.arm, result.k) + (f", K = {result.k}" if result.k and not result.chosen_k else "")


def arm_name(arm: str, k: int = 0) -> str:
    """Return ``cpt``, or ``cpt with passages``."""
    return format_name(arm) + (" with passages" if k else "")


def result_text(result: ArmResult) -> str:
    """Return an arm's result in a line, for a figure's tip."""
    text = f"{arm_label(result)} on {format_name(result.question_set)}: {format_percent(result.accuracy)}"
    text += f" (95%: {100 * result.low:.1f} to {100 * result.high:.1f}), {result.n:,} questions"
    if len(result.by_seed) > 1:
        text += f", seeds {', '.join(f'{100 * value:.1f}' for value in result.by_seed)}"
    if result.to_base is not None:
        p = result.to_base.deciding_p
        text += f"; to base {format_points(result.to_base.delta)} points" + ("" if p is None else f", {format_p(p)}")
    return text


def tone_of(result: ArmResult) -> str:
    """Return good or bad if the result differs significantly from base, else ""."""
    contrast = result.to_base
    if contrast is None or not contrast.is_significant:
        return ""
    return "good" if contrast.delta > 0 else "bad"


def is_reverse(question_set: str) -> bool:
    """Return whether a set asks in the direction opposite to its documents: ``reverse`` is in its name."""
    return "reverse" in question_set.lower()


def slug(name: str, taken: Iterable[str] = ()) -> str:
    """Return `name` in letters, digits and hyphens, not one of `taken`: the stem of a figure's file."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
    used, unique, number = set(taken), stem, 2
    while unique in used:
        unique, number = f"{stem}-{number}", number + 1
    return unique
