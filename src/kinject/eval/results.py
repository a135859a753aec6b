"""From the answers of an evaluation to its report: accuracies and paired differences."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from kinject.corpus.questions import about_sets
from kinject.eval.plan import EvalArm, Plan, QuestionSet
from kinject.eval.retrieval import measure_recall
from kinject.eval.scores import (
    PMI,
    WRITTEN_SCORES,
    Score,
    counts_for,
    has_outcome,
    is_scored,
    letter_mass,
    other_outcomes,
    rescored,
    summarize_written,
    text_score,
)
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
from kinject.stats.advice import advise
from kinject.stats.comparisons import correct_contrasts, lead, make_contrast, net_contrast
from kinject.stats.intervals import bounded_accuracy
from kinject.stats.matrix import CorrectnessMatrix, beyond, mean_of_alike
from kinject.types import Answer

Answers = dict[tuple[str, EvalArm], list[Answer]]
"""(question set, arm) -> its answers, in the order of the questions."""


@dataclass(frozen=True)
class Evaluation:
    """The plan of an evaluation and the answers to it so far. Its base is the first model without
    context.

    `prompt_tokens` has the tokens of the prompts of each question; 0 where they are not counted.
    """

    plan: Plan
    section: EvalSection
    answers: Answers = field(default_factory=dict)
    prompt_tokens: dict[tuple[str, EvalArm], Counter[str]] = field(default_factory=dict)

    @property
    def base_model(self) -> str:
        """The name of the first model."""
        return next(iter(self.section.models))

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of retrieved passages, without repeats."""
        retrieval = self.section.retrieval
        return () if retrieval is None else tuple(dict.fromkeys(retrieval.k))

    def base_of(self, arm: EvalArm) -> EvalArm:
        """Return the base, asked in the way of `arm`."""
        return replace(arm, model=self.base_model, k=0)

    def rag_of(self, question_set: QuestionSet, arm: EvalArm) -> EvalArm | None:
        """Return the base with passages, if the trained `arm` is to be compared with it: without
        context, or with as many passages."""
        if not self.ks or arm.model == self.base_model or arm.k not in (0, self.ks[0]):
            return None
        rag = replace(self.base_of(arm), k=self.ks[0])
        return rag if (question_set.name, rag) in self.answers else None

    def by_subject(self) -> dict[str, Evaluation]:
        """Return the evaluation of each subject's questions alone."""
        # Once for all: kinject questions gives every document a subject of its own, and to score
        # all answers for each of 400 subjects took 24 s, for 1,600 a quarter of an hour.
        parts: dict[str, Answers] = {}
        for asked, answers in self.answers.items():
            for answer in answers:
                parts.setdefault(answer.subject, {}).setdefault(asked, []).append(answer)
        return {subject: replace(self, answers=part) for subject, part in parts.items()}

    def scored(self, question_set: QuestionSet, arm: EvalArm, score: str) -> list[Answer]:
        """Return the answers of `arm` as `score` compares them."""
        controls = self.answers.get((question_set.name, arm.control), ())
        return rescored(self.answers[question_set.name, arm], score, controls)

    def control(self, question_set: QuestionSet, arm: EvalArm, score: str) -> ControlAnswers | None:
        """Return the answers of `arm` without the question; None with passages, and where no such
        answer has a score."""
        if score == PMI:  # it is beyond the choices by themselves already
            return None
        if arm.k or (question_set.name, arm.control) not in self.answers:
            return None
        alone = self.scored(question_set, arm.control, score)
        return answers_without_question(self.scored(question_set, arm, score), alone)

    def result(
        self, question_set: QuestionSet, arm: EvalArm, score: str, subject: str = ""
    ) -> ArmResult:
        """Return the result of `arm`, compared with the base; `subject` is that of all questions,
        if they are one subject's."""
        base, rag = self.base_of(arm), self.rag_of(question_set, arm)
        of_base = of_rag = None
        control = self.control(question_set, arm, score)
        if arm != base:
            of_base = self.scored(question_set, base, score)
            if control is not None:
                base_control = self.control(question_set, base, score)
                control = replace(control, base=base_control)
        if rag is not None:
            of_rag = self.scored(question_set, rag, score)
        answers = self.scored(question_set, arm, score)
        result = summarize_arm(
            answers, of_base, model=base.model, arm=arm.model, rag=of_rag, control=control
        )
        asked = (question_set.name, arm)
        return replace(
            result,
            # Nothing is learned or forgotten without the question, so no finding is about it.
            role=question_set.role if FORMATS[arm.format].shows_question else "baseline",
            score=score,
            # Of the stored answers: scores to compare are no probabilities any more.
            mass=letter_mass(self.answers[asked]),
            chosen_k=arm.k > 0 and len(self.ks) == 1,
            subject=subject,
            prompt_tokens=self.mean_prompt_tokens(asked),
        )

    def mean_prompt_tokens(self, asked: tuple[str, EvalArm]) -> float | None:
        """Return the mean tokens of the prompts of a question; None where they are not counted."""
        tokens = self.prompt_tokens.get(asked, Counter())
        # Of these answers alone, which may be those of one subject.
        ids = {answer.question_id for answer in self.answers[asked]}
        return sum(tokens[question_id] for question_id in ids) / len(ids) or None

    def scores_for(self, arm: EvalArm) -> tuple[str, ...]:
        """Return the scores that mean something for `arm`: letters, scored or written, are all
        equally long."""
        scores: tuple[Score, ...] = tuple(dict.fromkeys(self.section.scores))
        form = FORMATS[arm.format]
        if form.is_open:
            written = tuple(score for score in scores if score in WRITTEN_SCORES)
            return written or (text_score(scores),)
        if form.letters or form.generates:
            return ("sum",)
        left_out: set[str] = {*WRITTEN_SCORES}
        if not form.control:
            left_out.add(PMI)
        return tuple(score for score in scores if score not in left_out) or ("sum",)

    def asked(self) -> Iterator[tuple[QuestionSet, EvalArm, str, list[Answer]]]:
        """Yield each question set, arm and score, with the answers to compare."""
        for question_set in self.plan.sets:
            for arm in question_set.arms:
                for score in self.scores_for(arm):
                    yield question_set, arm, score, self.scored(question_set, arm, score)


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
    """Return the control of an arm whose comparison with the base, with the question, is
    `to_base`."""
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
    answers: Sequence[Answer],
    matrices: Matrices,
    others: Mapping[str, tuple[str, Matrices]],
    n: int,
    scope: Scope = "these models",
    control: ControlAnswers | None = None,
    **more: Any,
) -> ArmResult:
    """Return the result of one arm on the `n` questions of one set, with the fields `more`.

    `others` are the arms that it is compared with: field of the result -> (name, matrices).
    `answers` are the arm's scored ones, of every seed; without any, the result has no outcomes
    beside right. `control`: its answers without the question.
    """
    matrix = matrices("right")
    estimate = bounded_accuracy(matrix)
    fields: dict[str, Any] = {"to_base": None}
    for field_name, (name, of) in others.items():
        fields[field_name] = make_contrast(matrix, of("right"), name, scope)
    if control is not None:
        base_name, _ = others.get("to_base", ("", None))
        fields["control"] = make_control(control, fields["to_base"], base_name, scope)
    if matrix.n_seeds == 1:
        fields["n_correct"] = int(matrix.correct.sum())
    return ArmResult(
        n=n,
        by_seed=_by_seed(matrix),
        accuracy=estimate.value,
        low=estimate.low,
        high=estimate.high,
        interval=matrix.interval_name,
        chance=matrix.chance,
        n_documents=matrix.n_documents,
        n_effective=matrix.n_effective,
        n_unscored=n - len(matrix.question_ids),
        written=summarize_written(answers),
        outcomes=_outcomes(answers, matrices, others.get("to_base"), scope),
        **fields,
        **more,
    )


def _outcomes(
    answers: Sequence[Answer],
    matrices: Matrices,
    base: tuple[str, Matrices] | None,
    scope: Scope,
) -> tuple[OutcomeResult, ...]:
    """Return how often `answers` have each outcome beside right, compared with `base` (name,
    matrices)."""
    results = []
    for outcome in other_outcomes(answers):
        part = matrices(outcome)
        bounds, to_base = bounded_accuracy(part), None
        if base is not None:
            name, base_matrices = base
            to_base = make_contrast(part, base_matrices(outcome), name, scope)
        result = OutcomeResult(
            outcome,
            len(part.question_ids),
            _by_seed(part),
            bounds.value,
            bounds.low,
            bounds.high,
            to_base,
        )
        results.append(result)
    return tuple(results)


def _by_seed(matrix: CorrectnessMatrix) -> tuple[float, ...]:
    return tuple(float(value) for value in matrix.correct.mean(1))


def summarize_arm(
    answers: Sequence[Answer],
    base: Sequence[Answer] | None,
    *,
    model: str,
    arm: str,
    rag: Sequence[Answer] | None = None,
    control: ControlAnswers | None = None,
) -> ArmResult:
    """Return the result of one arm with one seed on a set to be learned; `base` are the base arm's
    answers, None for the base itself.

    `rag` are those of the base with passages, if the arm is to be compared with them. Answers are
    those that `kinject.eval.scores.rescored` returns. At least one must have a score; those that
    have none are counted, and left out of every other number.
    """
    others: dict[str, tuple[str, Matrices]] = {}
    for name, of in {"to_base": base, "to_rag": rag}.items():
        if of is not None:
            others[name] = (of[0].arm, partial(correctness, [of]))
    first = answers[0]
    return make_result(
        list(filter(is_scored, answers)),
        partial(correctness, [answers]),
        others,
        n=len(answers),
        control=control,
        model=model,
        arm=arm,
        question_set=first.question_set,
        role="learning",
        format=first.format,
        shots=first.shots,
        k=first.k,
        mass=letter_mass(answers),
        # Where options rotate, a question has several answers.
        n_cut=len({answer.question_id for answer in answers if answer.truncated}),
    )


def correctness(runs: Sequence[Sequence[Answer]], outcome: Outcome = "right") -> CorrectnessMatrix:
    """Return which answers have `outcome`, by seed and question, where each of `runs` (one a seed)
    has a score.

    All have the same questions. Guessing has a chance of being right only.
    """
    import numpy as np

    by_id = [sorted(run, key=attrgetter("question_id")) for run in runs]
    counts = partial(counts_for, outcome=outcome)
    # Of each question the answers of all seeds.
    kept = [same for same in zip(*by_id, strict=True) if all(map(counts, same))]
    correct = np.empty((len(runs), len(kept)))
    for column, same in enumerate(kept):
        correct[:, column] = [has_outcome(answer, outcome) for answer in same]
    ids = tuple(same[0].question_id for same in kept)
    documents = tuple(same[0].document_id or "" for same in kept)
    chances: tuple[float, ...] = ()
    if outcome == "right":
        chances = tuple(same[0].chance for same in kept)
    return CorrectnessMatrix(correct, ids, documents, chances)


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
    family = []
    for i, result in enumerate(results):
        family += [(i, name) for name in comparisons if getattr(result, name, None)]
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
    outcomes = iter(_correct(list(chain.from_iterable(result.outcomes for result in results))))
    found = [result.control for result in results if result.control]
    controls = iter(_correct(_correct(found, ("to_base",)), ("net",)))
    corrected = []
    for result in _correct(results):
        result = replace(result, outcomes=tuple(islice(outcomes, len(result.outcomes))))
        if result.control:
            result = replace(result, control=next(controls))
        corrected.append(result)
    return corrected


def correct_families(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return `results` corrected in two families: the headline, and every other prompt format,
    score and K.

    The outcomes beside right have families of their own, in the same two parts. The headline of a
    question set is its first prompt format, without context and with the chosen K.
    """
    heads = _first_formats(results)
    families: dict[bool, list[ArmResult]] = {True: [], False: []}
    in_headline = []
    for result in results:
        is_first_format = result.prompt_format == heads[result.question_set]
        in_headline.append(is_first_format and (not result.k or result.chosen_k))
        families[in_headline[-1]].append(result)
    corrected = {part: iter(correct_family(family)) for part, family in families.items()}
    return [next(corrected[part]) for part in in_headline]


def _first_formats(results: Sequence[ArmResult]) -> dict[str, PromptFormat]:
    """Return the prompt format of the first result on each question set."""
    # Of several results of a set the first one counts: it is the last one here.
    return {result.question_set: result.prompt_format for result in reversed(results)}


def with_leaders(
    results: Sequence[ArmResult],
    trained: Collection[tuple[str, str]],
    matrix: Callable[[ArmResult], CorrectnessMatrix],
    net: Callable[[ArmResult], CorrectnessMatrix | None],
) -> list[ArmResult]:
    """Return `results`; on each learning set, the best of several `trained` (model, arm) has
    `to_closest` (`stats.lead`).

    `matrix` gives the answers behind a result, `net` what they have beyond its control, which ranks
    arms that all have one. Only the first prompt format without context counts. It is
    Holm-corrected over the sets.
    """
    best: dict[int, Contrast] = {}
    for indices in _to_rank(results, trained).values():
        ranked = [results[i] for i in indices]
        has_one_seed = any(len(result.by_seed) == 1 for result in ranked)
        nets = [of for of in map(net, ranked) if of is not None]
        leader = lead(
            list(map(matrix, ranked)),
            [result.arm for result in ranked],
            "these models" if has_one_seed else "method",
            # All by the same measure: a gain with, and one without its control, cannot be ranked.
            nets if len(nets) == len(ranked) else (),
        )
        if leader is not None:
            best[indices[leader[0]]] = leader[1]
    corrected = dict(zip(best, correct_contrasts(list(best.values())), strict=True))
    return [replace(result, to_closest=corrected.get(i)) for i, result in enumerate(results)]


def _to_rank(
    results: Sequence[ArmResult], trained: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[int]]:
    """Return the indices of the results of `trained` that are ranked against each other, by (model,
    question set)."""
    heads = _first_formats(results)
    ranked: dict[tuple[str, str], list[int]] = {}
    for i, result in enumerate(results):
        if (result.model, result.arm) not in trained or result.role != "learning":
            continue
        is_head = heads[result.question_set] == result.prompt_format
        if is_head and not result.subject and not result.k:
            ranked.setdefault((result.model, result.question_set), []).append(i)
    return ranked


def make_report(
    run_dir: Path, evaluation: Evaluation, perplexities: Sequence[Perplexity]
) -> Report:
    """Return the report of an evaluation: every arm against the first model without context. It has
    no notes yet."""
    base, tables = evaluation.base_model, evaluation.section.tables()
    logs: dict[Path, str] = {}
    for name, table in evaluation.section.local().items():
        # Two checkpoints of one run share a log.
        logs.setdefault(Path(table.adapter or table.path).parent / "log.jsonl", name)
    arms = tuple(
        ArmInfo(name, base, str(table), trained=name != base) for name, table in tables.items()
    )
    results = _results(evaluation)
    return Report(
        kind="evaluation",
        title=run_dir.name,
        models=(base,),
        arms=arms,
        results=results,
        advice=advise(results, arms),
        about_sets=about_sets({item.name: item.questions for item in evaluation.plan.sets}),
        unscored=tuple(_unscored(evaluation)),
        perplexities=tuple(perplexities),
        recalls=tuple(_recalls(evaluation)),
        logs=tuple(
            (base, name, 0, os.path.relpath(log, run_dir))
            for log, name in logs.items()
            # A model need not be one that was trained here.
            if log.is_file()
        ),
        model_sources={base: str(tables[base])},
    )


def _recalls(evaluation: Evaluation) -> Iterator[Recall]:
    """Yield the recall of the retrieval for each question set, and each K."""
    for item in evaluation.plan.sets:
        if not item.contexts:
            continue
        for k in evaluation.ks:
            recall = measure_recall(item.name, item.questions, item.contexts, k)
            # Questions that name no document tell nothing of the retriever.
            if recall.n or recall.n_empty:
                yield recall


def _results(evaluation: Evaluation) -> tuple[ArmResult, ...]:
    """Return one result for each question set, arm and score, compared with the first model without
    context.

    p is Holm-corrected (`correct_families`). Results by subject follow, where a set has several.
    """
    results, parts = [], []
    by_subject = evaluation.by_subject()
    for question_set, arm, score, scored in evaluation.asked():
        subjects = dict.fromkeys(answer.subject for answer in scored if is_scored(answer))
        # An arm of which nothing has a score is listed under `unscored`.
        if subjects:
            results.append(evaluation.result(question_set, arm, score))
        has_several = len({question.subject for question in question_set.questions}) > 1
        if has_several and FORMATS[arm.format].shows_question:
            for subject in filter(None, subjects):
                part = by_subject[subject].result(question_set, arm, score, subject)
                parts.append(part)
    base, *others = evaluation.section.models
    sets = {question_set.name: question_set for question_set in evaluation.plan.sets}

    def matrix(of: ArmResult) -> CorrectnessMatrix:
        arm = EvalArm(of.arm, of.format, of.shots, of.k)
        return correctness([evaluation.scored(sets[of.question_set], arm, of.score)])

    def net(of: ArmResult) -> CorrectnessMatrix | None:
        arm = EvalArm(of.arm, of.format, of.shots, of.k)
        control = evaluation.control(sets[of.question_set], arm, of.score)
        return None if control is None else control.net

    led = with_leaders(correct_families(results), {(base, name) for name in others}, matrix, net)
    # Comparisons by subject are a family of their own (docs/studies.md).
    return (*led, *correct_family(parts))


def _unscored(evaluation: Evaluation) -> Iterator[UnscoredResult]:
    """Yield the arms and scores of which no question has a score."""
    for question_set, arm, score, scored in evaluation.asked():
        if not any(map(is_scored, scored)):
            yield UnscoredResult(
                evaluation.base_model,
                arm.model,
                question_set.name,
                question_set.role,
                arm.format,
                arm.shots,
                arm.k,
                len(scored),
                score,
            )
