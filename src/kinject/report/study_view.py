"""What stands where in a study's result: the lookups that its pages and figures share. Computes no statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kinject.report.formatting import format_asked, format_name, is_significant
from kinject.results import ArmInfo, Curve, ExposureBin, Point, Score, StudyResult

Way = tuple[str, int]
"""Format and shots."""


class View:
    """A result by model, arm, question set and way of asking. Scores without questions or of one subject stand apart."""

    def __init__(self, result: StudyResult) -> None:
        self.result = result
        self.whole = [score for score in result.scores if score.role != "baseline" and not score.subject]
        self.arms = {(arm.model, arm.name): arm for arm in result.arms}
        self._found = {
            (score.model, score.arm, score.question_set, (score.format, score.shots), score.k): score
            for score in self.whole
        }
        self._places: dict[tuple[str, str, str, Way, str], list[Score]] = {}
        for score in result.scores:
            if score.role != "baseline":
                where = (score.model, score.arm, score.question_set, (score.format, score.shots), score.subject)
                self._places.setdefault(where, []).append(score)
        self._ways: dict[str, list[Way]] = {}
        for score in self.whole:
            ways = self._ways.setdefault(score.question_set, [])
            if (score.format, score.shots) not in ways:
                ways.append((score.format, score.shots))

    @property
    def several_models(self) -> bool:
        """Whether the study has more than one base model."""
        return len(self.result.models) > 1

    def source(self, model: str) -> str:
        """Return where a base model comes from, its name where that is not known."""
        return self.result.model_sources.get(model, model)

    def own_arms(self, model: str) -> list[ArmInfo]:
        """Return the arms of `model` that are not points of a curve, the untrained first."""
        own = [arm for arm in self.result.arms if arm.model == model and not arm.curve]
        return sorted(own, key=lambda arm: arm.trained)

    def sets(self, role: str = "", model: str = "") -> list[str]:
        """Return the names of the question sets (of `role`, asked of `model`), in order."""
        return list(dict.fromkeys(
            score.question_set for score in self.whole
            if (not role or score.role == role) and (not model or score.model == model)
        ))  # fmt: skip

    def ways(self, question_set: str) -> list[Way]:
        """Return how `question_set` was asked; the first is the headline."""
        return self._ways.get(question_set, [])

    def headline(self, question_set: str) -> Way:
        """Return the way of asking that the recipe lists first."""
        return self.ways(question_set)[0]

    def score(self, model: str, arm: str, question_set: str, k: int = 0, way: Way | None = None) -> Score | None:
        """Return the score of an arm, asked in the set's first way unless `way` says otherwise; None where there is none."""
        if question_set not in self._ways:
            return None
        return self._found.get((model, arm, question_set, way or self.headline(question_set), k))

    def chosen(self, model: str, arm: str, question_set: str, way: Way | None = None) -> Score | None:
        """Return the score of an arm with its chosen K, None where none was chosen."""
        if question_set not in self._ways:
            return None
        own = self.every_k(model, arm, question_set, way or self.headline(question_set))
        return next((score for score in own if score.chosen_k), None)

    def every_k(self, model: str, arm: str, question_set: str, way: Way, subject: str = "") -> list[Score]:
        """Return the scores of an arm asked in one way (of one subject's questions), with every K, as they come."""
        return self._places.get((model, arm, question_set, way, subject), [])

    def base(self, model: str) -> str:
        """Return the name of the arm that is the untrained model, "" where there is none."""
        return next((arm.name for arm in self.own_arms(model) if not arm.trained), "")

    def shown(self, model: str, question_set: str, way: Way | None = None) -> list[Score]:
        """Return the scores of the study's own arms, without context and then with the chosen K, in order of the arms."""
        arms = self.own_arms(model)
        plain = [self.score(model, arm.name, question_set, 0, way) for arm in arms]
        context = [self.chosen(model, arm.name, question_set, way) for arm in arms]
        return [score for score in (*plain, *context) if score is not None]

    def by_k(self, model: str, arm: str, question_set: str) -> list[Score]:
        """Return the scores of an arm for every K it was asked with, none included, in order of K."""
        return sorted(self.every_k(model, arm, question_set, self.headline(question_set)), key=lambda score: score.k)

    def point(self, curve: Curve, point: Point, question_set: str) -> Score | None:
        """Return the score of a curve's point, None where its arm did not finish."""
        return self.score(curve.model, point.arm, question_set)

    def set_label(self, question_set: str, way: Way, model: str = "") -> str:
        """Return a set's name, with the way of asking where there are several and the model where there are several."""
        parts = [format_name(model)] if model and self.several_models else []
        parts.append(format_name(question_set))
        if len(self.ways(question_set)) > 1:
            parts.append(format_asked(*way))
        return ", ".join(parts)


def arm_label(score: Score, longest: int | None = None) -> str:
    """Return ``ft-par`` or ``ft-par+rag``, with K where it was not chosen."""
    name = format_name(score.arm, longest)
    return name if not score.k else f"{name}+rag" if score.chosen_k else f"{name}+rag, K = {score.k}"


def tone_of(score: Score) -> str:
    """Return good or bad where the score differs from base at 5% after Holm's correction, else ""."""
    contrast = score.to_base
    if contrast is None or not is_significant(contrast.p_holm):
        return ""
    return "good" if contrast.delta > 0 else "bad"


def is_reverse(question_set: str) -> bool:
    """Return whether a set asks in the direction opposite to that of its documents: its name says so."""
    return "reverse" in question_set.lower()


def slug(name: str, taken: Iterable[str] = ()) -> str:
    """Return `name` in letters, digits and hyphens, not one of `taken`: the stem of a figure's file."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
    used, found, number = set(taken), stem, 2
    while found in used:
        found, number = f"{stem}-{number}", number + 1
    return found


def seeds_text(seeds: Sequence[int]) -> str:
    """Return ``3 seeds`` or ``1 seed``."""
    return f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}"


def exposures_label(bin: ExposureBin) -> str:
    """Return ``under 1``, ``1`` or ``4 – 7``: low is inside the bin, high is not."""
    if bin.low == 0:
        return f"under {bin.high:g}"
    last = bin.high - 1
    return f"{bin.low:g}" if last <= bin.low else f"{bin.low:g} – {last:g}"
