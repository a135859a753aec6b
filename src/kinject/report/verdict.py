"""The verdict in words: did it learn, what did it forget, would retrieval have done better.

Pure: every number comes from the report's cells. The headline of a question set is the way of asking that the recipe
lists first (chosen before the answers were seen); the other ways are summed up behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kinject.report.formatting import (
    arm_names,
    deciding_p,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_way,
    is_significant,
    join_words,
)
from kinject.types import Cell, Difference, Report

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution

_MOST_NAMED = 4  # arms in one lead; more are counted


@dataclass(frozen=True, slots=True)
class Claim:
    """One finding about an arm on a set: a `tag` of a few words, its `tone` (good, bad, flat), and the sentence.

    `change` is the difference of accuracies that the tag judges.
    """

    arm: str
    question_set: str
    tag: str
    tone: str
    change: float
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """One of the practitioner's questions, its answer in one line, and the claims which carry it."""

    question: str
    lead: str
    claims: tuple[Claim, ...]


def render_verdict(report: Report) -> tuple[Answered, ...]:
    """Return the three questions with their answers, every number of which is derived from the cells of `report`."""
    names = arm_names(report.cells)
    groups = list(dict.fromkeys((cell.role, cell.question_set) for cell in report.cells))
    learning = [_Group(report, names, name) for role, name in groups if role == "learning"]
    retention = [_Group(report, names, name) for role, name in groups if role == "retention"]
    return (
        Answered("Did it learn?", *_answer(learning, _learning_claims, _NOTHING_TO_LEARN)),
        Answered("What did it forget?", *_answer(retention, _retention_claims, _NOTHING_TO_FORGET)),
        Answered("Would retrieval have done better?", *_answer(learning, _retrieval_claims, _NO_RETRIEVAL)),
    )


_NOTHING_TO_LEARN = "This run cannot say: it has no trained model with a question set of the role “learning”."
_NOTHING_TO_FORGET = "This run cannot say: it has no trained model with a question set of the role “retention”."
_NO_RETRIEVAL = "This run cannot say: it has no trained model beside retrieved context on a set of the role “learning”."

_LEADS = {
    "learned": "{arms} learned",
    "no learning shown": "no learning is shown for {arms}",
    "not above chance": "{arms} gained, yet cannot be told from chance",
    "got worse": "{arms} got worse",
    "gained": "{arms} gained",
    "no loss shown": "no loss is shown for {arms}",
    "forgot": "{arms} forgot",
    "better than retrieval": "{arms} did better than retrieval alone",
    "retrieval better": "retrieval alone did better than {arms}",
    "no difference shown": "no difference to retrieval alone is shown for {arms}",
}
"""What a tag says of the arms that bear it. The figure behind each arm is its change in points."""


class _Group:
    """One question set, asked in the recipe's first way: its base cell, and the others by (model, k)."""

    def __init__(self, report: Report, names: dict[tuple[str, int], str], question_set: str) -> None:
        self.report, self.names, self.question_set = report, names, question_set
        cells = [cell for cell in report.cells if cell.question_set == question_set]
        self.way = format_way(cells[0])
        self.cells = [cell for cell in cells if format_way(cell) == self.way]
        self.base = next((cell for cell in self.cells if cell.difference is None), self.cells[0])
        self.k = next((cell.k for cell in self.cells if cell.k), 0)
        self.trained = [cell for cell in self.cells if not cell.k and cell.model != self.base.model]

    def claim(self, cell: Cell, change: float, judgement: tuple[str, str], *sentences: str) -> Claim:
        text = " ".join(sentence for sentence in sentences if sentence)
        return Claim(self.names[cell.arm, cell.k], format_name(self.question_set), *judgement, change, text)

    def with_context(self, model: str) -> Cell | None:
        return next((cell for cell in self.cells if self.k and cell.k == self.k and cell.model == model), None)

    def other_ways(self, cell: Cell) -> str:
        """Return what the other ways of asking found for the same arm and set, or "" where there is no other."""
        others = [
            other.difference
            for other in self.report.cells
            if (other.question_set, other.arm, other.k) == (cell.question_set, cell.arm, cell.k)
            and format_way(other) != self.way
            and other.difference is not None
        ]
        if not others:
            return ""
        deltas, n_significant = (
            [other.delta for other in others],
            sum(is_significant(deciding_p(other)) for other in others),
        )
        spread = list(dict.fromkeys(format_points(delta) for delta in (min(deltas), max(deltas))))
        asked = "way" if len(others) == 1 else f"{len(others)} ways"
        significant = f"significant in {n_significant} of {len(others)}"
        return f"In the other {asked} of asking: {' to '.join(spread)} points, {significant}."


def _answer(
    groups: Sequence[_Group], claims_of: Callable[[_Group], tuple[list[Claim], list[Claim]]], otherwise: str
) -> tuple[str, tuple[Claim, ...]]:
    """Return the lead and all claims; `claims_of` a group gives (all its claims, those that judge a trained model)."""
    claims: list[Claim] = []
    leads: list[str] = []
    for group in groups:
        found, judged = claims_of(group)
        claims += found
        if judged:
            leads.append(_lead(group, judged))
    return (" ".join(leads) or otherwise, tuple(claims))


def _lead(group: _Group, judged: Sequence[Claim]) -> str:
    """Return ``On new, par (+61.8 points) learned; no learning is shown for reg (+1.0 points).``"""
    parts = []
    for tag in dict.fromkeys(claim.tag for claim in judged):
        same = [claim for claim in judged if claim.tag == tag]
        arms = join_words([f"{claim.arm} ({format_points(claim.change)} points)" for claim in same])
        if len(same) > _MOST_NAMED:
            low, high = min(claim.change for claim in same), max(claim.change for claim in same)
            arms = f"{len(same)} arms ({format_points(low)} to {format_points(high)} points)"
        parts.append(_LEADS[tag].replace("{arms}", arms))
    return f"On {format_name(group.question_set)}, {'; '.join(parts)}."


def _learning_claims(group: _Group) -> tuple[list[Claim], list[Claim]]:
    base = _base_claim(group, "nothing shows that it knew these facts", "some of this it could answer already")
    trained = [_learned(group, cell, cell.difference) for cell in group.trained if cell.difference is not None]
    return [base, *trained], trained


def _retention_claims(group: _Group) -> tuple[list[Claim], list[Claim]]:
    base = _base_claim(group, "a loss could not show here", "there is something to lose")
    trained = [_retained(group, cell, cell.difference) for cell in group.trained if cell.difference is not None]
    return [base, *trained], trained


def _base_claim(group: _Group, at_chance: str, above_chance: str) -> Claim:
    base, unscored = group.base, ""
    judgement = _against_chance(base)
    if base.n_unscored:
        unscored = f"{base.n_unscored:,} of them could not be scored and count as wrong."
    asked = f"{base.n:,} questions ({group.way}; 95% interval {_interval(base)})"
    level, chance = f"answers {format_percent(base.accuracy)} of {asked}", f"chance ({format_percent(base.chance)})"
    meaning = {
        "at chance": f"not to be told from {chance}: {at_chance}.",
        "above chance": f"above {chance}: {above_chance}.",
        "below chance": f"below {chance}: it prefers wrong answers, so look at the format.",
    }[judgement[0]]
    return group.claim(base, 0.0, judgement, f"{level}, {meaning}", unscored)


def _learned(group: _Group, cell: Cell, difference: Difference) -> Claim:
    place, _ = _against_chance(cell)
    judgement = _judged(difference, ("learned", "no learning shown", "got worse"))
    if judgement[0] == "learned" and place != "above chance":
        judgement = ("not above chance", "flat")
    relation = {"above chance": "lies above", "at chance": "holds", "below chance": "lies below"}[place]
    chance = f"Its 95% interval, {_interval(cell)}, {relation} chance ({format_percent(cell.chance)})."
    return group.claim(cell, difference.delta, judgement, _change(cell, difference), chance, group.other_ways(cell))


def _retained(group: _Group, cell: Cell, difference: Difference) -> Claim:
    judgement = _judged(difference, ("gained", "no loss shown", "forgot"))
    return group.claim(cell, difference.delta, judgement, _change(cell, difference), group.other_ways(cell))


def _judged(difference: Difference, tags: tuple[str, str, str]) -> tuple[str, str]:
    """Return the one of `tags` (gain, nothing shown, loss) that a paired difference deserves, with its tone."""
    better, neither, worse = tags
    if not is_significant(deciding_p(difference)):
        return neither, "flat"
    return (better, "good") if difference.delta > 0 else (worse, "bad")


def _change(cell: Cell, difference: Difference) -> str:
    before = round((cell.accuracy - difference.delta) * cell.n) / cell.n
    flips = f"{difference.wrong_to_right:,} answers became right, {difference.right_to_wrong:,} wrong"
    corrected = "" if difference.p_holm is None else " after Holm"
    text = (
        f"from {format_percent(before)} to {format_percent(cell.accuracy)}, "
        f"{format_points(difference.delta)} points ({format_p(deciding_p(difference))}{corrected}; {flips})."
    )
    if is_significant(deciding_p(difference)):
        return text
    low, high = paired_interval(difference, cell.n)
    return f"{text} Not significant; changes of {format_points(low)} to {format_points(high)} points remain possible."


def _retrieval_claims(group: _Group) -> tuple[list[Claim], list[Claim]]:
    context = group.with_context(group.base.model)
    if context is None:
        return [], []
    claims, judged = [], []
    if context.difference is not None:
        judgement = _judged(context.difference, ("retrieval helps", "no help shown", "retrieval hurts"))
        asked = f"with {context.k} passage{'' if context.k == 1 else 's'} before the question,"
        found = _change(context, context.difference)
        claims.append(group.claim(context, context.difference.delta, judgement, asked, found))
    for cell in group.trained:
        both = group.with_context(cell.model)
        judged += [_compared(group, other, context) for other in (cell, both) if other is not None]
    return claims + judged, judged


def _compared(group: _Group, cell: Cell, context: Cell) -> Claim:
    """Return how `cell` stands to `context`, the base model with retrieved context."""
    low, high = unpaired_interval(cell, context)
    change, judgement = cell.accuracy - context.accuracy, ("no difference shown", "flat")
    if low > 0:
        judgement = "better than retrieval", "good"
    elif high < 0:
        judgement = "retrieval better", "bad"
    return group.claim(
        cell,
        change,
        judgement,
        f"{format_percent(cell.accuracy)} against {format_percent(context.accuracy)} for "
        f"{group.names[context.arm, context.k]}: {format_points(change)} points "
        f"(95% interval {format_points(low)} to {format_points(high)}).",
    )


def _against_chance(cell: Cell) -> tuple[str, str]:
    if cell.low > cell.chance:
        return "above chance", "good"
    return ("below chance", "bad") if cell.high < cell.chance else ("at chance", "flat")


def _interval(cell: Cell) -> str:
    return f"{format_percent(cell.low)} to {format_percent(cell.high)}"


def paired_interval(difference: Difference, n: int) -> tuple[float, float]:
    """Return the 95% interval of a paired difference of accuracies (Bonett and Price 2012, adjusted Wald)."""
    gained, lost = (difference.wrong_to_right + 1) / (n + 2), (difference.right_to_wrong + 1) / (n + 2)
    middle, half = gained - lost, _Z * math.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
    return max(-1.0, middle - half), min(1.0, middle + half)


def unpaired_interval(cell: Cell, other: Cell) -> tuple[float, float]:
    """Return the 95% interval of ``cell.accuracy - other.accuracy``, as if the questions differed (Newcombe 1998).

    It is built from the two Wilson intervals. The same questions were asked, so it is wider than it need be.
    """
    middle = cell.accuracy - other.accuracy
    below = math.hypot(cell.accuracy - cell.low, other.high - other.accuracy)
    above = math.hypot(cell.high - cell.accuracy, other.accuracy - other.low)
    return middle - below, middle + above
