"""Lookups in a report that its pages and figures share. Computes no statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kinject.report.formatting import format_name, format_prompt
from kinject.results import ArmInfo, ArmResult, Perplexity, PromptFormat, Report, UnscoredResult


@dataclass(frozen=True, slots=True)
class Training:
    """The training of one arm, from its manifest: `reading` in words what it read, `epochs` how often (None: not counted)."""

    reading: str
    steps: int
    epochs: float | None
    finished: bool


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
        self._by_k: dict[tuple[str, str, str, PromptFormat], list[ArmResult]] = {}
        self._formats: dict[str, list[PromptFormat]] = {}
        for result in sorted(self.set_results, key=lambda result: result.k):
            key = (result.model, result.arm, result.question_set, result.prompt_format)
            self._by_k.setdefault(key, []).append(result)
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

    def _every_k(self, model: str, arm: str, question_set: str, form: PromptFormat | None) -> list[ArmResult]:
        """Return an arm's results in one format, by K; in the headline without `form`."""
        forms = [form] if form else self.formats(question_set)[:1]
        return self._by_k.get((model, arm, question_set, forms[0]), []) if forms else []

    def result(
        self, model: str, arm: str, question_set: str, k: int = 0, form: PromptFormat | None = None
    ) -> ArmResult | None:
        """Return an arm's result with `k` passages, None if there is none."""
        return next((r for r in self._every_k(model, arm, question_set, form) if r.k == k), None)

    def retrieval(self, model: str, question_set: str) -> ArmResult | None:
        """Return the base with retrieval that trained arms are compared with: its chosen K, in an evaluation else the first."""
        base = self.base(model)
        results = [r for r in self._every_k(model, base, question_set, None) if r.k]
        chosen = next((r for r in results if r.chosen_k), None)
        if chosen is not None or self.is_study or not results:
            return chosen
        return next(r for r in self.set_results if r in results)

    def base(self, model: str) -> str:
        """Return the name of the arm that is the untrained model, "" if there is none."""
        return next((arm.name for arm in self.own_arms(model) if not arm.trained), "")

    def shown(self, model: str, question_set: str, form: PromptFormat | None = None) -> list[ArmResult]:
        """Return the results of the report's own arms: without context, then with the chosen K (each K if none was chosen)."""
        by_arm = [self._every_k(model, arm.name, question_set, form) for arm in self.own_arms(model)]
        results = [result for results in by_arm for result in results if not result.k]
        for every_k in by_arm:
            chosen = [result for result in every_k if result.chosen_k][:1]
            results += chosen or [result for result in every_k if result.k]
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
