"""Questions whose answer an arm changed: right, wrong or abstained, and another of them before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kinject.disk import Row
from kinject.eval.plan import EvalArm, QuestionSet
from kinject.eval.results import Evaluation
from kinject.eval.scores import best_choice, is_correct, is_scored, outcome_of, written_choices
from kinject.eval.scoring.answers import finite_or_none
from kinject.question_formats import FORMATS
from kinject.results import Outcome
from kinject.types import Answer, Question


def find_flips(evaluation: Evaluation) -> Iterator[Row]:
    """Yield a row for each question whose answer is right, wrong or abstained by an arm, and
    another of them by base.

    Base is the first model without context, asked in the same way. The first score of the format
    decides, as in the report's headline. Log-probs are summed over tokens whatever the score,
    rotations taken together; of written answers the choices are the accepted texts, base's answer
    and the arm's, without log-probs. Questions without a score on either side are left out.
    `gold`, `chosen` and `base_chosen` are indices of `choices`; `passages` are the retrieved ones,
    the best first, before anything was cut to fit (`truncated` tokens).
    """
    for question_set in evaluation.plan.sets:
        for arm in question_set.arms:
            # Of the control the question was not asked, so it is no changed answer to it.
            if arm != evaluation.base_of(arm) and FORMATS[arm.format].shows_question:
                yield from _flips_of(evaluation, question_set, arm)


def _flips_of(evaluation: Evaluation, question_set: QuestionSet, arm: EvalArm) -> Iterator[Row]:
    base, score = evaluation.base_of(arm), evaluation.scores_for(arm)[0]
    before, after = (_by_question(evaluation, question_set, of, score) for of in (base, arm))
    summed_before, summed_after = before, after
    # Scores to compare, per character for example, are no log-probs.
    if not FORMATS[arm.format].generates and score != "sum":
        summed_before, summed_after = (
            _by_question(evaluation, question_set, of, "sum") for of in (base, arm)
        )
    # Without retrieval there are none, and each question is paired with one.
    contexts = question_set.contexts or ((),) * len(question_set.questions)
    for question, context in zip(question_set.questions, contexts, strict=True):
        was, now = before[question.id], after[question.id]
        if is_scored(was) and is_scored(now) and outcome_of(was) != outcome_of(now):
            passages = [
                {"id": p.id, "document_id": p.document_id, "text": p.text} for p in context[: arm.k]
            ]
            yield {
                "role": question_set.role,
                "base_arm": base.name,
                "arm": arm.name,
                "truncated": now.truncated,
                "log_probs": finite_or_none(summed_after[question.id].log_probs),
                "base_log_probs": finite_or_none(summed_before[question.id].log_probs),
                **flip_row(question, [now], [was]),
                "passages": passages,
            }


def _by_question(
    evaluation: Evaluation, question_set: QuestionSet, arm: EvalArm, score: str
) -> dict[str, Answer]:
    answers = evaluation.scored(question_set, arm, score)
    return {answer.question_id: answer for answer in answers}


def flip_row(question: Question, now: Sequence[Answer], before: Sequence[Answer]) -> Row:
    """Return the row of a question whose answers, one a seed, changed from `before`."""
    first, gold = now[0], question.answer
    after, was = most_common_outcome(now), most_common_outcome(before)
    return {
        "question_set": first.question_set,
        "format": first.format,
        "shots": first.shots,
        "k": first.k,
        "change": f"{was} to {after}",
        "question_id": question.id,
        "subject": question.subject,
        "document_id": question.document_id,
        "question": question.question,
        "choices": list(question.choices),
        "gold": gold,
        "chosen": _vote(now, gold),
        "base_chosen": _vote(before, gold),
        "seeds": [sum(map(is_correct, now)), len(now)] if len(now) > 1 else [],
        "context_ids": first.context_ids,
        **written_choices(_first_of(before, was), _first_of(now, after)),
    }


def _first_of(answers: Sequence[Answer], outcome: Outcome | None) -> Answer:
    return next(answer for answer in answers if outcome_of(answer) == outcome)


def most_common_outcome(answers: Sequence[Answer]) -> Outcome | None:
    """Return the outcome of more than half of the seeds' answers to a question; None if there is
    none."""
    for outcome, n in Counter(map(outcome_of, answers)).most_common(1):
        if 2 * n > len(answers):
            return outcome
    return None


def _vote(answers: Sequence[Answer], gold: int) -> int | None:
    """Return the choice of most answers; `gold` only if more than half of them chose it."""
    chosen = [_choice(answer, gold) for answer in answers]
    if 2 * chosen.count(gold) <= len(chosen):
        # Most of them are wrong, each in its own way: two of five are not the choice.
        chosen = [index for index in chosen if index != gold]
    ((index, _),) = Counter(chosen).most_common(1)
    return index


def _choice(answer: Answer, gold: int) -> int | None:
    """Return the index of the choice of an answer; of a written one `gold` if it is correct, else
    -1."""
    if answer.text is None:
        return best_choice(answer.log_probs)
    return gold if is_correct(answer) else -1
