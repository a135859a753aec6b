"""A study's verdict in words: did it learn, what did it forget, would retrieval have done better, what stays open.

Pure: every number comes from the result, and significance is that of its p after Holm's correction. Each question set is
judged in the way of asking that the recipe lists first; the other ways stand in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from kinject.report.formatting import (
    format_asked,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_relative,
    is_significant,
    join_words,
)
from kinject.report.study_view import View, arm_label
from kinject.report.verdict import Answered, Claim
from kinject.results import Contrast, Score

_MOST_NAMED = 4  # arms in one lead; more are counted
_MOST_PLACES = 4  # question sets by models with a sentence each
_LEARNED = ("learned", "no learning shown", "got worse")
_KEPT = ("gained", "no loss shown", "forgot")
_RETRIEVED = ("retrieval helps", "no help shown", "retrieval hurts")
_AGAINST = ("better than retrieval", "no difference shown", "retrieval better")
_ADDED = ("adds to retrieval", "no addition shown", "hurts retrieval")
_LEADS = {
    "learned": "{arms} learned",
    "not above chance": "{arms} gained, yet cannot be told from chance",
    "no learning shown": "no learning is shown for {arms}",
    "got worse": "{arms} got worse",
    "gained": "{arms} gained",
    "no loss shown": "no loss is shown for {arms}",
    "forgot": "{arms} forgot",
    "better than retrieval": "{arms} did better than retrieval alone",
    "retrieval better": "retrieval alone did better than {arms}",
    "no difference shown": "no difference to retrieval alone is shown for {arms}",
    "adds to retrieval": "{arms} did better than retrieval alone",
    "both help": "both help: {arms} did better than either alone",
    "no addition shown": "that training adds to retrieval is not shown for {arms}",
    "hurts retrieval": "training made retrieval worse in {arms}",
    "not tested": "{arms} cannot be compared with retrieval: the result holds no paired test",
}
"""What a tag says of the arms that bear it; the figure behind each arm is its change in points."""

_NO_LEARNING = "This study cannot say: it has no trained arm with a question set of the role “learning”."
_NO_RETENTION = "This study cannot say: it has no trained arm with a question set of the role “retention”."
_NO_RETRIEVAL = "This study cannot say: it has no trained arm beside the base with retrieved context (and a chosen K)."


def render_verdict(view: View) -> tuple[Answered, ...]:
    """Return the practitioner's three questions with their answers, base model by base model."""
    learning = [(model, name) for model in view.result.models for name in view.sets("learning", model)]
    retention = [(model, name) for model in view.result.models for name in view.sets("retention", model)]
    return (
        _answer("Did it learn?", _NO_LEARNING, [_Findings(view, *place).learning() for place in learning]),
        _answer("What did it forget?", _NO_RETENTION, [_Findings(view, *place).retention() for place in retention]),
        _answer("Would retrieval have done better, or do both help?", _NO_RETRIEVAL,
                [_Findings(view, *place).retrieval() for place in learning]),
    )  # fmt: skip


def _answer(question: str, otherwise: str, found: Sequence[tuple[str, list[Claim]]]) -> Answered:
    leads = [lead for lead, _ in found if lead]
    claims = [claim for _, own in found for claim in own]
    if len(leads) <= _MOST_PLACES:
        return Answered(question, " ".join(leads) or otherwise, tuple(claims))
    # Too many for a sentence each: count them, and put what is shown first.
    return Answered(question, _counted(claims), tuple(sorted(claims, key=_is_aside)))


def _is_aside(claim: Claim) -> bool:
    """Return whether a finding shows nothing, or is of the base alone."""
    return claim.tone == "flat" or claim.tag not in _LEADS


def _counted(claims: Sequence[Claim]) -> str:
    """Return ``ft-par, on 18 sets: learned 3, no learning shown 15 (...).`` for each arm that was judged."""
    parts = []
    for arm in dict.fromkeys(claim.arm for claim in claims if claim.tag in _LEADS):
        own = [claim for claim in claims if claim.arm == arm and claim.tag in _LEADS]
        tags = [f"{tag} {sum(claim.tag == tag for claim in own)}" for tag in dict.fromkeys(claim.tag for claim in own)]
        low, high = min(claim.change for claim in own), max(claim.change for claim in own)
        spread = f"{format_points(low)} to {format_points(high)} points"
        parts.append(f"{arm}, on {len(own)} sets: {', '.join(tags)} ({spread}).")
    return " ".join(parts)


class _Findings:
    """What is found for one base model on one question set."""

    def __init__(self, view: View, model: str, question_set: str) -> None:
        self.view, self.model, self.question_set = view, model, question_set
        way = view.headline(question_set)
        self.way = format_asked(*way)
        self.label = format_name(question_set) + (f" ({format_name(model)})" if view.several_models else "")
        shown = view.shown(model, question_set)
        self.base = view.score(model, view.base(model), question_set)
        self.context = view.chosen(model, view.base(model), question_set)
        trained = [score for score in shown if view.arms[model, score.arm].trained]
        self.plain = [score for score in trained if not score.k]
        self.both = [score for score in trained if score.k]

    def learning(self) -> tuple[str, list[Claim]]:
        """Return the lead and the findings on learning."""
        claims = [self._claim(score, *_learned(score, contrast)) for score, contrast in _compared(self.plain)]
        at_chance, above = "nothing shows that it knew these facts", "some of this it could answer already"
        return self._lead(claims), [*self._start(at_chance, above), *claims]

    def retention(self) -> tuple[str, list[Claim]]:
        """Return the lead and the findings on forgetting."""
        claims = [
            self._claim(score, *_judged(contrast, _KEPT), contrast.delta, _change(score, contrast))
            for score, contrast in _compared(self.plain)
        ]
        return self._lead(claims), [*self._start("a loss could not show here", "there is something to lose"), *claims]

    def retrieval(self) -> tuple[str, list[Claim]]:
        """Return the lead and the findings on retrieval against training."""
        if self.context is None or not (self.plain or self.both):
            return "", []
        start = []
        if self.context.to_base is not None:
            contrast = self.context.to_base
            text = f"{_passages(self.context.k)}: {_change(self.context, contrast)}"
            start = [self._claim(self.context, *_judged(contrast, _RETRIEVED), contrast.delta, text)]
        claims = [self._beside(score, _AGAINST) for score in self.plain]
        claims += [self._beside(score, _ADDED) for score in self.both]
        return self._lead(claims), [*start, *claims]

    def _beside(self, score: Score, tags: tuple[str, str, str]) -> Claim:
        assert self.context is not None
        levels = f"{format_percent(score.accuracy)} against {format_percent(self.context.accuracy)} for "
        levels += arm_label(self.context)
        contrast, plain = score.to_rag, score.to_plain
        if contrast is None:
            change = score.accuracy - self.context.accuracy
            text = f"{levels}: {format_points(change)} points, without a paired test in this result."
            return self._claim(score, "not tested", "flat", change, text)
        tag, tone = _judged(contrast, tags)
        text = f"{levels}: {_difference(contrast)}{_unseen(contrast)}."
        if plain is not None:
            text += f" Against {format_name(score.arm)} without context: {_difference(plain)}{_unseen(plain)}."
            if tag == "adds to retrieval" and is_significant(plain.p_holm) and plain.delta > 0:
                tag = "both help"
        return self._claim(score, tag, tone, contrast.delta, text)

    def _start(self, at_chance: str, above: str) -> list[Claim]:
        """Return what is to be said of the base, first."""
        base = self.base
        if base is None:
            return []
        tag, tone = _place(base)
        meaning = {
            "at chance": f"not to be told from chance ({format_percent(base.chance)}): {at_chance}.",
            "above chance": f"above chance ({format_percent(base.chance)}): {above}.",
            "below chance": f"below chance ({format_percent(base.chance)}): it prefers wrong answers, so look at the format.",
        }[tag]
        text = (
            f"answers {format_percent(base.accuracy)} of {base.n:,} questions ({self.way}; 95% interval "
            f"{_interval(base)}), {meaning}"
        )
        return [self._claim(base, tag, tone, 0.0, text)]

    def _claim(self, score: Score, tag: str, tone: str, change: float, text: str) -> Claim:
        return Claim(arm_label(score), self.label, tag, tone, change, text)

    def _lead(self, claims: Sequence[Claim]) -> str:
        """Return ``On new, ft-par (+61.8 points) learned; no learning is shown for ft-reg (+1.0 points).``"""
        parts = []
        for tag in dict.fromkeys(claim.tag for claim in claims):
            same = [claim for claim in claims if claim.tag == tag]
            arms = join_words([f"{claim.arm} ({format_points(claim.change)} points)" for claim in same])
            if len(same) > _MOST_NAMED:
                low, high = min(claim.change for claim in same), max(claim.change for claim in same)
                arms = f"{len(same)} arms ({format_points(low)} to {format_points(high)} points)"
            parts.append(_LEADS[tag].replace("{arms}", arms))
        return f"On {self.label}, {'; '.join(parts)}." if parts else ""


def _compared(scores: Sequence[Score]) -> list[tuple[Score, Contrast]]:
    return [(score, score.to_base) for score in scores if score.to_base is not None]


def _place(score: Score) -> tuple[str, str]:
    if score.low > score.chance:
        return "above chance", "good"
    return ("below chance", "bad") if score.high < score.chance else ("at chance", "flat")


def _learned(score: Score, contrast: Contrast) -> tuple[str, str, float, str]:
    tag, tone = _judged(contrast, _LEARNED)
    place = _place(score)[0]
    if tag == "learned" and place != "above chance":
        tag, tone = "not above chance", "flat"
    relation = {"above chance": "lies above", "at chance": "cannot be told from", "below chance": "lies below"}[place]
    chance = f"It {relation} chance ({format_percent(score.chance)})."
    return tag, tone, contrast.delta, f"{_change(score, contrast)} {chance}"


def _judged(contrast: Contrast, tags: tuple[str, str, str]) -> tuple[str, str]:
    """Return the one of `tags` (gain, nothing shown, loss) that a difference deserves, with its tone."""
    better, neither, worse = tags
    if not is_significant(contrast.p_holm):
        return neither, "flat"
    return (better, "good") if contrast.delta > 0 else (worse, "bad")


def _change(score: Score, contrast: Contrast) -> str:
    seeds = ""
    if len(score.by_seed) > 1:
        low, high = min(score.by_seed), max(score.by_seed)
        seeds = f"; {len(score.by_seed)} seeds, {format_percent(low)} to {format_percent(high)}"
    relative = "" if contrast.relative is None else f", {format_relative(contrast.relative)} of base"
    gained = f"{contrast.wrong_to_right:,} question{'' if contrast.wrong_to_right == 1 else 's'} became right"
    return (
        f"from {format_percent(score.accuracy - contrast.delta)} to {format_percent(score.accuracy)} (95% interval "
        f"{_interval(score)}{seeds}): {_difference(contrast)}{relative}. {gained}, {contrast.right_to_wrong:,} wrong"
        f"{_unseen(contrast)}."
    )


def _difference(contrast: Contrast) -> str:
    """Return ``+61.8 points (+57.0 to +66.1; Holm p < 0.001)``."""
    bounds = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
    return f"{format_points(contrast.delta)} points ({bounds}; Holm {format_p(contrast.p_holm)})"


def _unseen(contrast: Contrast) -> str:
    """Return, where nothing is shown, how large a difference would have been seen."""
    if is_significant(contrast.p_holm) or contrast.smallest is None:
        return ""
    return f"; a difference under {100 * contrast.smallest:.1f} points would likely go unseen"


def _interval(score: Score) -> str:
    return f"{format_percent(score.low)} to {format_percent(score.high)}"


def _passages(k: int) -> str:
    return f"with {k} passage{'' if k == 1 else 's'} before the question"
