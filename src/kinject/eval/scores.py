"""From log-probs to comparable scores of choices (lengths, merged rotations), and from these to
outcomes of answers.

Needs no model.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from kinject.corpus.checks import passes
from kinject.corpus.grading import (
    TEXT_SCORES,
    TextGrader,
    TextScore,
    abstains,
    matches,
    read_letter,
)
from kinject.corpus.squad import f1
from kinject.errors import InputError
from kinject.question_formats import format_of
from kinject.results import Outcome
from kinject.types import Answer, Written

ChoiceScore = Literal["sum", "chars", "bytes", "tokens", "pmi"]
PMI: Final = "pmi"
"""The score that needs the answers without the question as well."""
Score = ChoiceScore | TextScore | Literal["judge"]
AnswerGrader = Callable[[Answer], bool]
"""A written answer -> whether it is correct."""

# `match` finds 74% of the wrong answers and half of the abstentions (docs/figures.md).
JUDGED: Final = "judge"
"""The score of a written answer by the grade of the recipe's judge."""
WRITTEN_SCORES = (*TEXT_SCORES, JUDGED)
SCORES: tuple[str, ...] = (*get_args(ChoiceScore), *WRITTEN_SCORES)


def _by_text(grade: TextGrader) -> AnswerGrader:
    return lambda answer: grade(answer.text or "", answer.accepted)


TEXT_GRADERS: Mapping[str, AnswerGrader] = {
    name: _by_text(grade) for name, grade in TEXT_SCORES.items()
}
"""The scores of written answers; the first one is the default."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The scores of one prompt: for each continuation its log-prob, and whether the model would
    have written it.

    `greedy` is lm-evaluation-harness's is_greedy: every token of the continuation was the
    likeliest. An answer that the model wrote has its `text` and `n_tokens` instead, `n_thinking`
    tokens of thinking before it, and whether that was cut. `lengths` are the tokens of the
    continuations, where only the endpoint knows them.
    """

    log_probs: tuple[float, ...]
    greedy: tuple[bool, ...]
    text: str | None = None
    n_tokens: int = 0
    n_thinking: int = 0
    thinking_cut: bool = False
    lengths: tuple[int, ...] = ()


def scores_of(answer: Answer, score: str) -> tuple[float, ...]:
    """Return the score of each choice; the highest is the model's answer.

    ``sum``: the log-prob (lm-evaluation-harness's acc). ``chars``, ``bytes``, ``tokens``: divided
    by the choice's length (acc_norm, acc_bytes). Raises `InputError` if `answer` lacks the lengths.
    """
    if score == "sum":
        return answer.log_probs
    lengths: Mapping[str, Sequence[int]] = {
        "chars": answer.n_chars, "bytes": answer.n_bytes, "tokens": answer.n_tokens,
    }  # fmt: skip
    if len(lengths[score]) != len(answer.log_probs):
        raise InputError(
            f"question {answer.question_id!r}: the lengths in {score} were not stored. "
            "Choose another score."
        )
    return tuple(
        value / max(1, n) for value, n in zip(answer.log_probs, lengths[score], strict=True)
    )


def best_choice(values: Sequence[float]) -> int | None:
    """Return the index of the highest score, the first of equals; None without one, if one is not
    finite or several are equal."""
    if not values or not all(map(math.isfinite, values)):
        return None
    if len(values) > 1 and min(values) == max(values):
        return None
    return max(range(len(values)), key=values.__getitem__)


def rescored(
    answers: Sequence[Answer], score: str, controls: Sequence[Answer] = ()
) -> list[Answer]:
    """Return one answer per question whose `log_probs` are the scores to compare; see `scores_of`.

    ``pmi``, pointwise mutual information (Holtzman et al. 2104.08315), is the log-prob less that of
    the same choice without the question, which the same arm's `controls` hold. An answer that the
    model wrote gets `correct` from the one of `TEXT_GRADERS` that `score` names, or from the first
    of them if `score` compares choices; choices are compared by their sum if `score` compares
    texts. With ``judge`` it is correct by its grade, and has no score without one.
    """
    if answers and format_of(answers[0].format).generates:
        # Letters are read by rule: the judge grades free answers alone.
        if score == JUDGED and not answers[0].choices:
            return [_judged(answer) for answer in answers]
        grader = TEXT_GRADERS.get(score, next(iter(TEXT_GRADERS.values())))
        return [_graded(answer, grader) for answer in answers]
    merged = merge_rotations(answers)
    if score == "sum" or score in WRITTEN_SCORES:
        return merged
    if score == PMI:
        return _beyond_controls(merged, merge_rotations(controls))
    return [replace(item, log_probs=scores_of(item, score)) for item in merged]


def _beyond_controls(answers: Sequence[Answer], controls: Sequence[Answer]) -> list[Answer]:
    alone = {control.question_id: control.log_probs for control in controls}
    beyond = []
    for answer in answers:
        if len(alone.get(answer.question_id, ())) != len(answer.log_probs):
            raise InputError(
                f"question {answer.question_id!r}: pmi needs its choices without the question as "
                "well. Set eval.control: true, or choose another score."
            )
        without_question = alone[answer.question_id]
        log_probs = tuple(map(operator.sub, answer.log_probs, without_question))
        beyond.append(replace(answer, log_probs=log_probs))
    return beyond


def _graded(answer: Answer, is_correct: AnswerGrader) -> Answer:
    """Return `answer` with `correct`; one that has it already keeps it."""
    if answer.text is None or answer.correct is not None:
        return answer
    if answer.choices:
        return replace(answer, correct=read_letter(answer.text, answer.choices) == answer.gold)
    if answer.checks:
        return replace(answer, correct=passes(answer.text, answer.checks), grade="")
    return replace(answer, correct=is_correct(answer), grade="")


def _judged(answer: Answer) -> Answer:
    """Return `answer` with `correct` by the judge's grade; without one it has no score, like an
    answer that failed."""
    if answer.text is None or answer.correct is not None:
        return answer
    if answer.checks:
        # Its checks decide, whichever grader is named.
        return _graded(answer, TEXT_GRADERS["exact"])
    if not answer.grade:
        return replace(answer, text=None, log_probs=(math.nan,))
    right = "correct" if answer.accepted else "abstained"
    return replace(answer, correct=answer.grade == right)


def declines(answer: Answer) -> bool:
    """Return whether a written answer abstains: by the judge's grade if that is its score, else by
    the phrases known here."""
    if answer.grade:
        return answer.grade == "abstained"
    return abstains(answer.text or "")


def summarize_written(answers: Sequence[Answer]) -> Written | None:
    """Return the counts of the texts that the model wrote; None if it chose among options.

    They are graded already (`rescored`).
    """
    if not answers or answers[0].text is None:
        return None
    n = len(answers)
    by_rule = None
    if any(answer.grade for answer in answers):
        by_rule = sum(map(_is_right_by_rule, answers)) / n
    # An instruction has no accepted text: as 0 it would be a wrong answer's.
    compared = [answer for answer in answers if answer.accepted or not answer.checks]
    mean_f1 = None
    if compared:
        total = math.fsum(f1(answer.text or "", answer.accepted) for answer in compared)
        mean_f1 = total / len(compared)
    return Written(
        f1=mean_f1,
        n_tokens=sum(answer.n_tokens[0] for answer in answers) / n,
        unread=sum(map(is_unread, answers)) / n,
        n_thinking=sum(answer.n_thinking for answer in answers) / n,
        thinking_cut=sum(answer.thinking_cut for answer in answers) / n,
        by_rule=by_rule,
    )


def _is_right_by_rule(answer: Answer) -> bool:
    if answer.checks:
        return bool(answer.correct)
    return matches(answer.text or "", answer.accepted)


def is_unread(answer: Answer) -> bool:
    """Return whether `answer` was to name an option, does not decline, and names none that can be
    read."""
    text = answer.text or ""
    return bool(answer.choices) and read_letter(text, answer.choices) is None and not abstains(text)


def outcome_of(answer: Answer) -> Outcome:
    """Return the outcome of a graded answer: right, wrong or abstained; a choice is right or wrong.

    A text that declines is right if the question has no answer and the grader accepts that
    (`kinject.corpus.grading.matches`).
    """
    if answer.text is None:
        return "right" if best_choice(answer.log_probs) == answer.gold else "wrong"
    if answer.correct:
        return "right"
    return "abstained" if declines(answer) else "wrong"


def has_answer(answer: Answer) -> bool:
    """Return whether there is a right answer to the question, or checks that a text can pass."""
    return bool(answer.accepted or answer.checks or answer.choices or answer.text is None)


def text_score(scores: Sequence[str]) -> str:
    """Return the first of `scores` that grades written answers, the first of those that need no
    judge without one."""
    return next((score for score in scores if score in WRITTEN_SCORES), next(iter(TEXT_GRADERS)))


def written_choices(was: Answer, now: Answer) -> dict[str, Any]:
    """Return the columns of a flip between two written answers: both texts beside the accepted
    ones; {} for choices."""
    if now.text is None or was.text is None:
        return {}
    accepted = now.accepted
    if not accepted:
        checks = json.dumps(dict(now.checks), ensure_ascii=False)
        accepted = (checks if now.checks else "(no answer)",)
    choices = [*accepted, was.text or "(empty)", now.text or "(empty)"]
    return {
        "choices": choices,
        "gold": 0,
        "base_chosen": len(accepted),
        "chosen": len(accepted) + 1,
        "log_probs": [None] * len(choices),
        "base_log_probs": [None] * len(choices),
    }


def merge_rotations(answers: Sequence[Answer]) -> list[Answer]:
    """Return one answer per question: its rotations are averaged, which removes letter priors.

    Each rotation's letters are normalised among themselves, then averaged by option. Each option
    had each letter exactly once, so a letter's prior adds the same to every option and drops out of
    the comparison (the full cyclic debiasing of Zheng et al. 2309.03882). All have one format.
    """
    # Other formats ask a question once.
    if not answers or not format_of(answers[0].format).rotates:
        return list(answers)
    by_question: dict[str, list[Answer]] = {}
    for answer in answers:
        by_question.setdefault(answer.question_id, []).append(answer)
    return list(map(_merge, by_question.values()))


def _merge(rotations: Sequence[Answer]) -> Answer:
    first = rotations[0]
    n = len(first.log_probs)
    sums = [0.0] * n
    for answer in rotations:
        total = _log_sum(answer.log_probs)
        for index, value in enumerate(answer.log_probs):
            sums[(index + answer.rotation) % n] += (value - total) / len(rotations)
    return replace(first, log_probs=tuple(sums), gold=(first.gold + first.rotation) % n, rotation=0)


def letter_mass(answers: Sequence[Answer]) -> float | None:
    """Return the mean total probability of the letters; None for other formats or without finite
    answers.

    Low mass means that the format failed, not the knowledge: the model would have continued with
    something else.
    """
    if not answers:
        return None
    form = format_of(answers[0].format)
    if not form.letters or form.generates:
        return None
    masses = [
        math.fsum(map(math.exp, answer.log_probs))
        for answer in answers
        if all(map(math.isfinite, answer.log_probs))
    ]
    return math.fsum(masses) / len(masses) if masses else None


def _log_sum(values: Sequence[float]) -> float:
    top = max(values)
    # The difference of two infinities would be NaN.
    if not math.isfinite(top):
        return top
    # Less the highest value no exponential overflows, and not all of them are 0.
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


def is_scored(answer: Answer) -> bool:
    """Return whether the answer was written, or every choice has a finite log-prob, and they are
    not all equal."""
    return answer.text is not None or best_choice(answer.log_probs) is not None


def is_correct(answer: Answer) -> bool:
    """Return whether the gold choice has the highest summed log-prob (the first of equals); False
    without a score.

    A written answer is as `rescored` found it.
    """
    return outcome_of(answer) == "right"


def has_outcome(answer: Answer, outcome: Outcome) -> bool:
    """Return whether `answer` has that outcome; answered: of a question without an answer, wrong
    (`counts_for`)."""
    if outcome == "answered":
        outcome = "wrong"
    return outcome_of(answer) == outcome


def counts_for(answer: Answer, outcome: Outcome) -> bool:
    """Return whether `answer` has a score, and its question can have that outcome."""
    return is_scored(answer) and (outcome != "answered" or not has_answer(answer))


def other_outcomes(answers: Sequence[Answer]) -> tuple[Outcome, ...]:
    """Return the outcomes beside right that the questions of `answers` can have; () for choices."""
    if not answers or answers[0].text is None:
        return ()
    outcomes: list[Outcome] = []
    if any(map(has_answer, answers)):
        outcomes += ["wrong", "abstained"]
    if not all(map(has_answer, answers)):
        outcomes.append("answered")
    return tuple(outcomes)
