"""From a run's answers to its report: accuracies, paired differences, changed answers, and notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kinject.disk import Row
from kinject.eval.plan import EvalArm, Plan, QuestionSet
from kinject.eval.retrieval import measure_recall
from kinject.eval.scores import (
    PMI,
    WRITTEN_SCORES,
    Score,
    best_choice,
    counts_for,
    has_outcome,
    is_correct,
    is_scored,
    letter_mass,
    other_outcomes,
    outcome_of,
    rescored,
    summarize_written,
    text_score,
    written_choices,
)
from kinject.eval.scoring.answers import finite_or_none
from kinject.question_formats import FORMATS
from kinject.recipe.sections import EvalSection
from kinject.results import (
    ArmInfo,
    ArmResult,
    Contrast,
    Control,
    Outcome,
    OutcomeResult,
    Perplexity,
    PromptFormat,
    Recall,
    Report,
    Scope,
    UnscoredResult,
)
from kinject.stats.comparisons import correct_contrasts, lead, make_contrast, net_contrast
from kinject.stats.intervals import bounded_accuracy
from kinject.stats.matrix import CorrectnessMatrix, beyond, mean_of_alike
from kinject.types import Answer, Question

Answers = dict[tuple[str, EvalArm], list[Answer]]
"""(question set, arm) -> its answers, in the order of the questions."""


Matrices = Callable[[Outcome], CorrectnessMatrix]
"""Outcome -> which answers of an arm have it."""


@dataclass(frozen=True)
class ControlAnswers:
    """The answers of an arm without the question, in the format `format`, and what its answers have
    beyond them.

    `base` holds those of the base, None for the base itself.
    """

    format: str
    matrix: CorrectnessMatrix
    net: CorrectnessMatrix
    base: ControlAnswers | None = None


def make_control(
    answers: ControlAnswers, to_base: Contrast | None, base_name: str, scope: Scope
) -> Control:
    """Return the control of an arm whose comparison with the base, with the question, is `to_base`."""
    bounds, base = bounded_accuracy(answers.matrix), answers.base
    control = Control(
        answers.format, _by_seed(answers.matrix), bounds.value, bounds.low, bounds.high
    )
    if base is None or to_base is None:
        return control
    return replace(
        control,
        to_base=make_contrast(answers.matrix, base.matrix, base_name, scope),
        net=net_contrast(to_base, answers.net, base.net),
    )


def make_result(
    answers: Sequence[Answer], matrices: Matrices, others: Mapping[str, tuple[str, Matrices]], n: int,
    scope: Scope = "these models", control: ControlAnswers | None = None, **more: Any,
) -> ArmResult:  # fmt: skip
    """Return the result of one arm on the `n` questions of one set, with the fields `more`.

    `others` are the arms that it is compared with: field of the result -> (name, matrices).
    `answers` are the arm's scored ones, of every seed; without any, the result has no outcomes
    beside right. `control`: its answers without the question.
    """
    matrix, outcomes = matrices("right"), []
    estimate = bounded_accuracy(matrix)
    contrasts = {
        field: make_contrast(matrix, of("right"), name, scope)
        for field, (name, of) in others.items()
    }
    base_name, base = others.get("to_base", ("", None))
    for outcome in other_outcomes(answers):
        part = matrices(outcome)
        bounds = bounded_accuracy(part)
        to_base = make_contrast(part, base(outcome), base_name, scope) if base else None
        outcomes.append(
            OutcomeResult(
                outcome,
                len(part.question_ids),
                _by_seed(part),
                bounds.value,
                bounds.low,
                bounds.high,
                to_base,
            )
        )
    fields: dict[str, Any] = {
        "to_base": None, **contrasts, "n": n, "by_seed": _by_seed(matrix), "accuracy": estimate.value,
        "low": estimate.low, "high": estimate.high, "interval": matrix.interval_name, "chance": matrix.chance,
        "n_documents": matrix.n_documents, "n_effective": matrix.n_effective,
        "n_correct": int(matrix.correct.sum()) if matrix.n_seeds == 1 else None,
        "n_unscored": n - len(matrix.question_ids), "written": summarize_written(answers), "outcomes": tuple(outcomes),
        "control": make_control(control, contrasts.get("to_base"), base_name, scope) if control else None,
    }  # fmt: skip
    return ArmResult(**fields, **more)


def _by_seed(matrix: CorrectnessMatrix) -> tuple[float, ...]:
    return tuple(float(value) for value in matrix.correct.mean(1))


def summarize_arm(
    answers: Sequence[Answer], base: Sequence[Answer] | None, *, model: str, arm: str, role: str = "learning",
    score: str = "sum", rag: Sequence[Answer] | None = None, control: ControlAnswers | None = None,
) -> ArmResult:  # fmt: skip
    """Return the result of one arm with one seed; `base` are the base arm's answers, None for the
    base itself.

    `rag` are those of the base with passages, if the arm is to be compared with them. Answers are
    those that `kinject.eval.scores.rescored` returns; `score` names the numbers in them. At least
    one must have a score; those that have none are counted, and left out of every other number.
    """
    first, others = answers[0], {"to_base": base, "to_rag": rag}
    return make_result(
        list(filter(is_scored, answers)), partial(correctness, [answers]),
        {field: (of[0].arm, partial(correctness, [of])) for field, of in others.items() if of is not None},
        n=len(answers), model=model, arm=arm, question_set=first.question_set, role=role, format=first.format,
        shots=first.shots, k=first.k, score=score, mass=letter_mass(answers), control=control,
        n_cut=len({answer.question_id for answer in answers if answer.truncated}),
    )  # fmt: skip


def correctness(runs: Sequence[Sequence[Answer]], outcome: Outcome = "right") -> CorrectnessMatrix:
    """Return which answers have `outcome`, by seed and question, where each of `runs` (one a seed)
    has a score.

    All have the same questions. Guessing has a chance of being right only.
    """
    import numpy as np

    by_id = [sorted(run, key=lambda answer: answer.question_id) for run in runs]
    kept = [
        same
        for same in zip(*by_id, strict=True)
        if all(counts_for(answer, outcome) for answer in same)
    ]
    correct = np.array(
        [[float(has_outcome(same[seed], outcome)) for same in kept] for seed in range(len(runs))]
    )
    ids, documents = (
        [same[0].question_id for same in kept],
        [same[0].document_id or "" for same in kept],
    )
    chances = tuple(same[0].chance for same in kept) if outcome == "right" else ()
    return CorrectnessMatrix(correct, tuple(ids), tuple(documents), chances)


def control_correctness(runs: Sequence[Sequence[Answer]]) -> CorrectnessMatrix:
    """Return which answers without the question are right, by seed and question, as `correctness`.

    Without the question, nothing tells apart the questions that have the same choices: which of
    them the chosen one answers is no property of the model. So each of them has the mean of all,
    which removes that noise and changes no accuracy. Where each choice is right once, it is exactly
    that of guessing.
    """
    import numpy as np

    matrix = correctness(runs)
    choice_sets = {answer.question_id: answer.choice_set for answer in runs[0]}
    keys = [choice_sets[question_id] or question_id for question_id in matrix.question_ids]
    correct = np.array([mean_of_alike(row, keys) for row in matrix.correct.tolist()])
    return replace(matrix, correct=correct)


def answers_without_question(
    asked: Sequence[Answer], alone: Sequence[Answer]
) -> ControlAnswers | None:
    """Return the control of the answers `asked` from those of the same arm `alone`, without the
    question.

    None where no question has a score in both.
    """
    if not asked or not alone:
        return None
    matrix, answered = control_correctness([alone]), correctness([asked])
    if not set(matrix.question_ids) & set(answered.question_ids):
        return None
    return ControlAnswers(alone[0].format, matrix, beyond(answered, matrix))


_COMPARISONS = ("to_base", "to_rag", "to_plain")


_Compared = TypeVar("_Compared", ArmResult, OutcomeResult, Control)


def _correct(
    results: Sequence[_Compared], comparisons: Sequence[str] = _COMPARISONS
) -> list[_Compared]:
    """Return `results` with their `comparisons` (names of fields) corrected as one family."""
    family = [
        (i, name)
        for i, result in enumerate(results)
        for name in comparisons
        if getattr(result, name, None)
    ]
    corrected = list(results)
    contrasts = correct_contrasts([getattr(results[i], name) for i, name in family])
    for (i, name), contrast in zip(family, contrasts, strict=True):
        changed: dict[str, Any] = {name: contrast}
        corrected[i] = replace(corrected[i], **changed)
    return corrected


def correct_family(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return `results` with all their comparisons corrected as one family.

    Those of their outcomes, the rises of their controls and their net gains are three families
    more.
    """
    outcomes = iter(_correct([item for result in results for item in result.outcomes]))
    found = [result.control for result in results if result.control]
    controls = iter(_correct(_correct(found, ("to_base",)), ("net",)))
    return [
        replace(
            result,
            outcomes=tuple(next(outcomes) for _ in result.outcomes),
            control=next(controls) if result.control else None,
        )
        for result in _correct(results)
    ]


def correct_families(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return `results` corrected in two families: the headline, and every other prompt format,
    score and K.

    The outcomes beside right have families of their own, in the same two parts. The headline of a
    question set is its first prompt format, without context and with the chosen K.
    """
    heads = _first_formats(results)
    is_head = [
        result.prompt_format == heads[result.question_set] and (not result.k or result.chosen_k)
        for result in results
    ]
    parts = {}
    for head in (True, False):
        part = [
            result
            for result, in_headline in zip(results, is_head, strict=True)
            if in_headline is head
        ]
        parts[head] = iter(correct_family(part))
    return [next(parts[head]) for head in is_head]


def _first_formats(results: Sequence[ArmResult]) -> dict[str, PromptFormat]:
    """Return the prompt format of the first result on each question set."""
    return {result.question_set: result.prompt_format for result in reversed(results)}


def with_leaders(
    results: Sequence[ArmResult], trained: Collection[tuple[str, str]],
    matrix: Callable[[ArmResult], CorrectnessMatrix], net: Callable[[ArmResult], CorrectnessMatrix | None],
) -> list[ArmResult]:  # fmt: skip
    """Return `results`; on each learning set, the best of several `trained` (model, arm) has
    `to_closest` (`stats.lead`).

    `matrix` gives the answers behind a result, `net` what they have beyond its control, which ranks
    arms that all have one. Only the first prompt format without context counts. It is
    Holm-corrected over the sets.
    """
    heads = _first_formats(results)
    ranked: dict[tuple[str, str], list[int]] = {}
    for i, result in enumerate(results):
        is_head = heads[result.question_set] == result.prompt_format
        known = (
            (result.model, result.arm) in trained
            and result.role == "learning"
            and not result.subject
        )
        if is_head and known and not result.k:
            ranked.setdefault((result.model, result.question_set), []).append(i)
    best: dict[int, Contrast] = {}
    for indices in ranked.values():
        alone = any(len(results[i].by_seed) == 1 for i in indices)
        names = [results[i].arm for i in indices]
        nets = [of for of in (net(results[i]) for i in indices) if of is not None]
        leader = lead(
            [matrix(results[i]) for i in indices],
            names,
            "these models" if alone else "method",
            nets if len(nets) == len(indices) else (),
        )
        if leader is not None:
            best[indices[leader[0]]] = leader[1]
    corrected = dict(zip(best, correct_contrasts(list(best.values())), strict=True))
    return [replace(result, to_closest=corrected.get(i)) for i, result in enumerate(results)]


def make_report(
    run_dir: Path,
    plan: Plan,
    section: EvalSection,
    answers: Answers,
    perplexities: Sequence[Perplexity],
) -> Report:
    """Return the report of an evaluation: every arm against the first model without context. It has
    no notes yet."""
    base = next(iter(section.models))
    logs: dict[Path, str] = {}
    tables = section.tables()
    for name, table in section.local().items():  # two checkpoints of one run share a log
        logs.setdefault(Path(table.adapter or table.path).parent / "log.jsonl", name)
    return Report(
        kind="evaluation",
        title=run_dir.name,
        models=(base,),
        arms=tuple(
            ArmInfo(name, base, str(table), trained=name != base) for name, table in tables.items()
        ),
        results=_summarize(plan, section, answers),
        unscored=tuple(_unscored(plan, section, answers)),
        perplexities=tuple(perplexities),
        recalls=tuple(_recalls(plan, section)),
        logs=tuple(
            (base, name, 0, os.path.relpath(log, run_dir))
            for log, name in logs.items()
            if log.is_file()
        ),
        model_sources={base: str(tables[base])},
    )


def _recalls(plan: Plan, section: EvalSection) -> Iterator[Recall]:
    """Yield the recall of the retrieval for each question set, and each K."""
    for question_set in (item for item in plan.sets if item.contexts):
        for k in dict.fromkeys(section.retrieval.k if section.retrieval else ()):
            recall = measure_recall(
                question_set.name, question_set.questions, question_set.contexts, k
            )
            if recall.n or recall.n_empty:
                yield recall


def _summarize(plan: Plan, section: EvalSection, answers: Answers) -> tuple[ArmResult, ...]:
    """Return one result for each question set, arm and score, compared with the first model without
    context.

    p is Holm-corrected (`correct_families`). Results by subject follow, where a set has several.
    """
    results, parts = [], []
    for question_set, arm, score, scored in _asked(plan, section, answers):
        subjects = dict.fromkeys(answer.subject for answer in scored if is_scored(answer))
        if subjects:
            results.append(_result(question_set, arm, score, section, answers))
        if (
            len({question.subject for question in question_set.questions}) > 1
            and FORMATS[arm.format].shows_question
        ):
            named = filter(None, subjects)
            parts += [
                _result(question_set, arm, score, section, answers, subject) for subject in named
            ]
    base, *others = section.models
    sets = {question_set.name: question_set for question_set in plan.sets}

    def matrix(of: ArmResult) -> CorrectnessMatrix:
        arm = EvalArm(of.arm, of.format, of.shots, of.k)
        return correctness([_scored(sets[of.question_set], arm, of.score, answers)])

    def net(of: ArmResult) -> CorrectnessMatrix | None:
        arm = EvalArm(of.arm, of.format, of.shots, of.k)
        control = _control(sets[of.question_set], arm, of.score, answers)
        return None if control is None else control.net

    led = with_leaders(correct_families(results), {(base, name) for name in others}, matrix, net)
    return (*led, *correct_family(parts))


def _unscored(plan: Plan, section: EvalSection, answers: Answers) -> Iterator[UnscoredResult]:
    """Yield the arms and scores of which no question has a score."""
    for question_set, arm, score, scored in _asked(plan, section, answers):
        if not any(map(is_scored, scored)):
            yield UnscoredResult(
                next(iter(section.models)), arm.model, question_set.name, question_set.role, arm.format, arm.shots,
                arm.k, len(scored), score,
            )  # fmt: skip


def _asked(
    plan: Plan, section: EvalSection, answers: Answers
) -> Iterator[tuple[QuestionSet, EvalArm, str, list[Answer]]]:
    """Yield each question set, arm and score, with the answers to compare."""
    for question_set in plan.sets:
        for arm in question_set.arms:
            for score in _scores_for(arm, section):
                yield question_set, arm, score, _scored(question_set, arm, score, answers)


def _scored(question_set: QuestionSet, arm: EvalArm, score: str, answers: Answers) -> list[Answer]:
    controls = answers.get((question_set.name, arm.control), ())
    return rescored(answers[question_set.name, arm], score, controls)


def _result(
    question_set: QuestionSet, arm: EvalArm, score: str, section: EvalSection, answers: Answers, subject: str | None = None
) -> ArmResult:  # fmt: skip
    base = replace(arm, model=next(iter(section.models)), k=0)
    ks = tuple(dict.fromkeys(section.retrieval.k)) if section.retrieval else ()

    def scored(of: EvalArm) -> list[Answer]:
        return [
            a for a in _scored(question_set, of, score, answers) if subject in (None, a.subject)
        ]

    rag = replace(base, k=ks[0]) if ks else base
    control = _control(question_set, arm, score, answers, subject)
    if control is not None and arm != base:
        control = replace(control, base=_control(question_set, base, score, answers, subject))
    role = question_set.role if FORMATS[arm.format].shows_question else "baseline"
    beside = (
        arm.model != base.model
        and arm.k in (0, rag.k)
        and rag.k
        and (question_set.name, rag) in answers
    )
    result = summarize_arm(
        scored(arm), None if arm == base else scored(base), model=base.model, arm=arm.model, role=role,
        score=score, rag=scored(rag) if beside else None, control=control,
    )  # fmt: skip
    mass = letter_mass(answers[question_set.name, arm])
    return replace(result, mass=mass, chosen_k=arm.k > 0 and len(ks) == 1, subject=subject or "")


def _control(
    question_set: QuestionSet,
    arm: EvalArm,
    score: str,
    answers: Answers,
    subject: str | None = None,
) -> ControlAnswers | None:
    """Return an arm's answers without the question; None with passages, and where no such answer
    has a score."""
    if score == PMI:  # it is beyond the choices by themselves already
        return None
    if arm.k or (question_set.name, arm.control) not in answers:
        return None
    alone = [
        a
        for a in _scored(question_set, arm.control, score, answers)
        if subject in (None, a.subject)
    ]
    asked = [a for a in _scored(question_set, arm, score, answers) if subject in (None, a.subject)]
    return answers_without_question(asked, alone)


def _scores_for(arm: EvalArm, section: EvalSection) -> tuple[str, ...]:
    """Return the scores that mean something for `arm`: letters, scored or written, are all equally
    long."""
    scores: tuple[Score, ...] = tuple(dict.fromkeys(section.scores))
    form = FORMATS[arm.format]
    if form.is_open:
        return tuple(score for score in scores if score in WRITTEN_SCORES) or (text_score(scores),)
    left_out: set[str] = {*WRITTEN_SCORES}
    if not form.control:
        left_out.add(PMI)
    scores = tuple(score for score in scores if score not in left_out) or ("sum",)
    if form.letters or form.generates:
        return ("sum",)
    return scores


def find_flips(plan: Plan, section: EvalSection, answers: Answers) -> Iterator[Row]:
    """Yield a row for each question whose answer is right, wrong or abstained by an arm, and
    another of them by base.

    Base is the first model without context, asked in the same way; choices are compared by their
    summed log-probs, rotations taken together; written answers by the first of their scores: their
    choices are the accepted texts, base's answer and the arm's, without log-probs. Questions
    without a score on either side are left out. `gold`, `chosen` and `base_chosen` are indices of
    `choices`; `passages` are the retrieved ones, the best first, before anything was cut to fit
    (`truncated` tokens).
    """
    for question_set in plan.sets:
        for arm in question_set.arms:
            base = replace(arm, model=next(iter(section.models)), k=0)
            if arm != base:
                score = _scores_for(arm, section)[0] if FORMATS[arm.format].generates else "sum"
                yield from _flips_of(question_set, arm, base, answers, score)


def _flips_of(
    question_set: QuestionSet, arm: EvalArm, base: EvalArm, answers: Answers, score: str
) -> Iterator[Row]:
    before = {answer.question_id: answer for answer in _scored(question_set, base, score, answers)}
    after = {answer.question_id: answer for answer in _scored(question_set, arm, score, answers)}
    contexts = question_set.contexts or ((),) * len(question_set.questions)
    for question, context in zip(question_set.questions, contexts, strict=True):
        was, now = before[question.id], after[question.id]
        if is_scored(was) and is_scored(now) and outcome_of(was) != outcome_of(now):
            passages = [
                {"id": p.id, "document_id": p.document_id, "text": p.text} for p in context[: arm.k]
            ]
            more = {
                "role": question_set.role, "base_arm": base.name, "arm": arm.name, "truncated": now.truncated,
                "log_probs": finite_or_none(now.log_probs), "base_log_probs": finite_or_none(was.log_probs),
            }  # fmt: skip
            yield more | flip_row(question, [now], [was]) | {"passages": passages}


def flip_row(question: Question, now: Sequence[Answer], before: Sequence[Answer]) -> Row:
    """Return the row of a question whose answers, one a seed, changed from `before`."""
    first, gold = now[0], question.answer
    after, was = most_common_outcome(now), most_common_outcome(before)
    return {
        "question_set": first.question_set, "format": first.format, "shots": first.shots,
        "k": first.k, "change": f"{was} to {after}", "question_id": question.id,
        "subject": question.subject, "document_id": question.document_id, "question": question.question,
        "choices": list(question.choices), "gold": gold, "chosen": _vote(now, gold), "base_chosen": _vote(before, gold),
        "seeds": [sum(map(is_correct, now)), len(now)] if len(now) > 1 else [],
        "context_ids": first.context_ids,
        **written_choices(*(next(a for a in of if outcome_of(a) == name) for of, name in ((before, was), (now, after)))),
    }  # fmt: skip


def most_common_outcome(answers: Sequence[Answer]) -> Outcome | None:
    """Return the outcome of more than half of the seeds' answers to a question; None if there is
    none."""
    outcomes = list(map(outcome_of, answers))
    return next(
        (
            outcome
            for outcome in dict.fromkeys(outcomes)
            if 2 * outcomes.count(outcome) > len(outcomes)
        ),
        None,
    )


def _vote(answers: Sequence[Answer], gold: int) -> int | None:
    """Return the choice of most answers; `gold` only if more than half of them chose it."""
    chosen = [
        best_choice(answer.log_probs) if answer.text is None else gold if is_correct(answer) else -1
        for answer in answers
    ]
    return max(set(chosen), key=lambda index: (chosen.count(index), index != gold))
