"""Questions that an arm answers rightly where base does not, or the other way round: text, context, both choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kinject.disk import Row
from kinject.eval.cells import is_right, is_scored
from kinject.eval.plan import Arm, Plan, QuestionSet
from kinject.eval.results import Results
from kinject.eval.scores import rescored
from kinject.eval.scoring.answers import finite_or_none
from kinject.recipe.sections import EvalSection
from kinject.types import Answer, Passage, Question


def find_flips(plan: Plan, section: EvalSection, results: Results) -> Iterator[Row]:
    """Yield a row for each question and arm whose rightness differs from base's, asked in the same way.

    Base is the first model without context; choices are compared by their summed log-probs, rotations taken together.
    `gold`, `chosen` and `base_chosen` are places in `choices` (None: could not be scored); `passages` is what stood before
    the question, the best first, before anything was cut to fit (`truncated` tokens).
    """
    for question_set in plan.sets:
        if question_set.chooses_k_for:
            continue
        for arm in question_set.arms:
            base = replace(arm, model=next(iter(section.models)), k=0)
            if arm != base:
                yield from _flips_of(question_set, arm, base, results)


def _flips_of(question_set: QuestionSet, arm: Arm, base: Arm, results: Results) -> Iterator[Row]:
    before = {answer.question_id: answer for answer in rescored(results[question_set.name, base], "sum")}
    after = {answer.question_id: answer for answer in rescored(results[question_set.name, arm], "sum")}
    contexts = question_set.contexts or ((),) * len(question_set.questions)
    for question, context in zip(question_set.questions, contexts, strict=True):
        was, now = before[question.id], after[question.id]
        if is_right(was) != is_right(now):
            about = {"question_set": question_set.name, "role": question_set.role, "base_arm": base.name}
            yield about | _row(arm, question, context[: arm.k], was, now)


def _row(arm: Arm, question: Question, passages: tuple[Passage, ...], was: Answer, now: Answer) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "format": arm.format,
        "shots": arm.shots,
        "k": arm.k,
        "change": "wrong to right" if is_right(now) else "right to wrong",
        "question_id": question.id,
        "subject": question.subject,
        "document_id": question.document_id,
        "question": question.question,
        "choices": list(question.choices),
        "gold": question.answer,
        "chosen": _chosen(now),
        "base_chosen": _chosen(was),
        "log_probs": finite_or_none(now.log_probs),
        "base_log_probs": finite_or_none(was.log_probs),
        "truncated": now.truncated,
        "passages": [{"id": item.id, "document_id": item.document_id, "text": item.text} for item in passages],
    }


def _chosen(answer: Answer) -> int | None:
    return answer.log_probs.index(max(answer.log_probs)) if is_scored(answer) else None
