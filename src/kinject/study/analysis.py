"""From a study's finished stages to its report: results with intervals, claims and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import fmean
from typing import Any, Literal

from kinject.eval.results import (
    Matrices,
    correct_families,
    correct_family,
    make_result,
    with_leaders,
)
from kinject.executors import LOG
from kinject.question_formats import FORMATS
from kinject.recipe.sections import ClaimSection
from kinject.report.formatting import format_p, format_percent, format_points
from kinject.results import (
    ALPHA,
    FEWEST,
    ArmResult,
    Claim,
    Cost,
    Failure,
    Price,
    Role,
    Scope,
    Sweep,
    Verdict,
    fewest_for,
)
from kinject.stats.comparisons import trend
from kinject.stats.intervals import (
    Estimate,
    bounded_accuracy,
    chance_p,
    difference_estimate,
    equivalence_p,
    holm,
)
from kinject.stats.matrix import CorrectnessMatrix, aligned
from kinject.study.arms import BASE, Arm, value_label
from kinject.study.records import AskSetting, Records
from kinject.study.scheduler import StageStatus
from kinject.study.stages import ArmRun
from kinject.types import RAG, ArmName


def summarize_arms(
    records: Records, arms: Sequence[Arm], roles: Mapping[str, Role], chosen_k: Mapping[Any, int]
) -> list[ArmResult]:
    """Return every arm in every setting it was asked in, then the recipe's own arms by subject
    where there are several.

    Comparisons are Holm-corrected in families: those of the recipe's own arms, those of sweeps
    (each in two: the headline and the other settings, `correct_families`), those by subject.
    """
    summary = _Summary(records, roles, chosen_k)
    results = [
        summary.result(arm, setting)
        for arm in arms
        for setting in records.settings(arm.model, arm.name)
    ]
    swept = {(arm.model, arm.name) for arm in arms if arm.sweep}
    parts = [
        summary.result(arm, setting, subject)
        for arm in arms if not arm.sweep
        for setting in records.settings(arm.model, arm.name) if FORMATS[setting.format].shows_question
        for subject in summary.subjects(arm, setting)
    ]  # fmt: skip
    unswept = correct_families(
        [result for result in results if (result.model, result.arm) not in swept]
    )
    varied = correct_families([result for result in results if (result.model, result.arm) in swept])
    trained = {(arm.model, arm.name) for arm in arms if arm.trained}

    def matrix(of: ArmResult) -> CorrectnessMatrix:
        return records.matrix(
            of.model, of.arm, AskSetting(of.question_set, of.format, of.shots, of.k)
        )

    def net(of: ArmResult) -> CorrectnessMatrix | None:
        setting = AskSetting(of.question_set, of.format, of.shots, of.k)
        if not records.has_control(of.model, of.arm, setting):
            return None
        return records.matrix(of.model, of.arm, setting, net=True)

    return [*with_leaders(unswept, trained, matrix, net), *varied, *correct_family(parts)]


@dataclass(frozen=True)
class _Summary:
    records: Records
    roles: Mapping[str, Role]
    chosen_k: Mapping[Any, int]

    def subjects(self, arm: Arm, setting: AskSetting) -> list[str]:
        """Return the subjects of a set, [] where there are not several."""
        answers = self.records.every_answer(arm.model, arm.name, setting)
        names = list(dict.fromkeys(answer.subject for answer in answers))
        return names if len(names) > 1 else []

    def result(self, arm: Arm, setting: AskSetting, subject: str = "") -> ArmResult:
        def matrices(name: str, k: int) -> Matrices | None:
            other = setting._replace(k=k)
            has_answers = k >= 0 and other in self.records.settings(arm.model, name)
            return (
                partial(self.records.matrix, arm.model, name, other, subject)
                if has_answers
                else None
            )

        matrix_of = partial(self.records.matrix, arm.model, arm.name, setting, subject)
        one_seed = arm.trained and len(self.records.seeds(arm.model, arm.name)) == 1
        rag = ArmName(BASE, arm.retrieval or RAG)  # with the same passages
        base_name = rag.answers_of
        base_k = self.chosen_k.get((arm.model, base_name, setting.question_set), -1)
        chosen = (
            setting.k > 0
            and self.chosen_k.get((arm.model, arm.name, setting.question_set)) == setting.k
        )
        others = {
            "to_base": (BASE, matrices(BASE, 0) if arm.trained or setting.k else None),
            "to_rag": (
                str(rag),
                matrices(base_name, base_k) if arm.trained and (chosen or not setting.k) else None,
            ),
            "to_plain": (arm.name, matrices(arm.name, 0) if chosen and arm.trained else None),
        }
        control = self.records.control(arm.model, arm.name, setting, subject)
        if control is not None and arm.name != BASE:
            control = replace(control, base=self.records.control(arm.model, BASE, setting, subject))
        return make_result(
            [] if subject else self.records.every_answer(arm.model, arm.name, setting), matrix_of,
            {key: (name, of) for key, (name, of) in others.items() if of is not None},
            n=self.records.n_asked(arm.model, arm.name, setting, subject), scope="these models" if one_seed else "method",
            model=arm.model, arm=arm.name, question_set=setting.question_set, format=setting.format, shots=setting.shots,
            k=setting.k, role=self.roles[setting.question_set] if FORMATS[setting.format].shows_question else "baseline",
            n_cut=self.records.n_cut(arm.model, arm.name, setting, subject), chosen_k=chosen,
            score=self.records.score(setting), subject=subject, control=control,
        )  # fmt: skip


def make_prices(
    records: Records, arms: Sequence[Arm], costs: Sequence[Cost], chosen_k: Mapping[tuple[str, str, str], int],
    price: Sequence[float],
) -> list[Price]:  # fmt: skip
    """Return what each arm of no sweep costs, without passages and with its chosen K, over the sets
    that get passages.

    `price` is study.price.
    """
    prices: list[Price] = []
    for arm in (arm for arm in arms if not arm.sweep):
        sets = {
            item.question_set
            for item in records.headline_settings(arm.model, BASE, chosen_k)
            if item.k
        }
        asked = [
            s
            for s in records.headline_settings(arm.model, arm.name, chosen_k)
            if s.question_set in sets
        ]
        training = _training_price(
            [cost for cost in costs if (cost.model, cost.arm) == (arm.model, arm.name)], price
        )
        for settings in (
            [item for item in asked if not item.k],
            [item for item in asked if item.k],
        ):
            if not settings:
                continue
            n = [records.n_asked(arm.model, arm.name, item) for item in settings]
            prompts = [records.prompt_tokens.get((arm.model, arm.name, item)) for item in settings]
            of_prompt = None if None in prompts else fmean([tokens or 0.0 for tokens in prompts], n)
            of_answer = fmean(
                [records.answer_tokens(arm.model, arm.name, item) for item in settings], n
            )
            asking = (
                None if of_prompt is None else (of_prompt * price[0] + of_answer * price[1]) / 1000
            )
            rag = next((p for p in prices if (p.model, p.arm) == (arm.model, BASE) and p.k), None)
            pays = (
                _pays_after(training, asking, rag.asking)
                if rag is not None and arm.trained
                else None
            )
            prices.append(
                Price(
                    arm.model, arm.name, settings[0].k, of_prompt, of_answer, asking, training, pays
                )
            )
    return prices


def _pays_after(
    training: float, asking: float | None, rag: float | None
) -> int | Literal["never", "no difference", "not known"]:
    """Return from how many questions on a training pays, against those of the base with passages,
    which cost `rag`."""
    if asking is None or rag is None:
        return "not known"
    if abs(rag - asking) < _ALIKE * rag:
        return "no difference"
    return ceil(1000 * training / (rag - asking)) if asking < rag else "never"


_ALIKE = 0.01
"""The fraction of a price within which two are called alike: passages of one retriever differ by
less from arm to arm."""


def _training_price(costs: Sequence[Cost], price: Sequence[float]) -> float:
    """Return the price of one training: its tokens, what a teacher read and what was written,
    unless it was paid already."""
    mine = [cost for cost in costs if cost.seed == costs[0].seed]
    tokens = (
        sum(cost.teacher_tokens for cost in mine),
        sum(cost.written_tokens for cost in mine if not cost.money),
        sum(
            cost.tokens for cost in mine if cost.stage == "train" and cost.work_seconds
        ),  # not of the arm it is matched to
    )
    paid = sum(cost.money for cost in mine if cost.stage in ("augment", "train"))
    return paid + sum(n * each for n, each in zip(tokens, price, strict=True)) / 1e6


@dataclass(frozen=True)
class Evidence:
    """Evidence for claims on one base model: the answers, the sweeps, and each arm's chosen K by
    question set."""

    records: Records
    model: str
    prompt_format: Callable[[str], tuple[str, int]]
    """The format and number of shots that decide on a question set."""
    chosen_k: Mapping[tuple[str, str], int]
    sweeps: Mapping[str, Sweep]
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Question set -> its role."""

    def setting(self, arm: str, claim: ClaimSection) -> AskSetting:
        """Return how the arm was asked the claim's questions; K is -1 where it has no passages
        chosen."""
        asked, name = ArmName.parse(arm), claim.question_set
        k = self.chosen_k.get((asked.answers_of, name), -1) if asked.retrieval else 0
        return AskSetting(name, *self.prompt_format(name), k)

    def is_net(self, arms: Sequence[str], claim: ClaimSection) -> bool:
        """Return whether the claim compares what the arms answer beyond their choices without the
        question."""
        if claim.net is not None:
            return claim.net
        if self.roles.get(claim.question_set) != "learning" or claim.outcome != "right":
            return False
        named = [(ArmName.parse(arm).answers_of, self.setting(arm, claim)) for arm in arms]
        return all(self.records.has_control(self.model, bare, setting) for bare, setting in named)

    def matrix(
        self, arm: str, claim: ClaimSection, *, net: bool = False
    ) -> CorrectnessMatrix | None:
        """Return which of the arm's answers have the claim's outcome; None where it was not asked
        (it failed, or has no K).

        With `net`, what they have beyond the arm's answers without the question.
        """
        bare, setting = ArmName.parse(arm).answers_of, self.setting(arm, claim)
        if setting not in self.records.settings(self.model, bare):
            return None
        if net and not self.records.has_control(self.model, bare, setting):
            return None
        return self.records.matrix(self.model, bare, setting, "", claim.outcome, net=net)

    def arm_name(self, arm: str | Mapping[str, Any] | None) -> str:
        """Return the name of a claim's arm; of a point of a sweep that of the arm which has its
        value."""
        if not isinstance(arm, Mapping):
            return arm or ""
        ((name, value),) = arm.items()
        points = self.sweeps[name].points if name in self.sweeps else ()
        return next(
            (point.arm for point in points if point.value == value), f"{name} {value_label(value)}"
        )

    def scope(self, *arms: str) -> Scope:
        """Return the scope of a claim on `arms`: if one was trained with a single seed, these
        models only."""
        trained = {ArmName.parse(arm).arm for arm in arms} - {BASE}
        return (
            "these models"
            if any(len(self.records.seeds(self.model, arm)) == 1 for arm in trained)
            else "method"
        )


def judge_claims(claims: Mapping[str, ClaimSection], evidence: Evidence) -> list[Claim]:
    """Return each claim with its verdict, p corrected by Holm (1979) over all that could be tested."""
    results = [_TESTS[claim.test](claim, evidence) for claim in claims.values()]
    tested = [claim.p for claim in results if claim.p is not None]
    corrected = iter(holm(tested))
    return [
        _with_verdict(
            name, section, claim, None if claim.p is None else next(corrected), len(tested)
        )
        for (name, section), claim in zip(claims.items(), results, strict=True)
    ]


@dataclass(frozen=True)
class _Tested:
    """A claim's numbers: `p` is None if it cannot be tested (`finding`: why). `as_claimed`: in the
    claimed direction."""

    finding: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    as_claimed: bool = False
    scope: Scope = "method"
    n_documents: float | None = None
    """The effective documents where signs are flipped, so that p has a least value."""


def _with_verdict(
    name: str, section: ClaimSection, result: _Tested, p_holm: float | None, family: int
) -> Claim:
    verdict: Verdict = "cannot be tested"
    finding = result.finding
    if p_holm is not None:
        shown: Verdict = "shown" if result.as_claimed else "opposite shown"
        verdict = shown if p_holm < ALPHA else "not shown"
        if verdict == "not shown" and result.p is not None and result.p < ALPHA:
            finding += (
                f"; {format_p(result.p)} in a test by itself, but {family} claims are corrected for"
            )
        n, needed = result.n_documents, fewest_for(family)
        if verdict == "not shown" and n is not None and n < needed:
            verdict = "cannot be tested"
            finding += f"; {n:.3g} documents (effective) are too few for {family} claims, {needed} are needed"
    return Claim(
        name, section.statement, verdict, finding, result.effect, result.low, result.high, result.p, p_holm, section.source,
        scope=result.scope,
    )  # fmt: skip


def _bounded(low: float | None, high: float | None, words: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f" ({words(low)} to {words(high)})"


def _enough(matrix: CorrectnessMatrix) -> str:
    """Return the reason why the questions cannot decide a claim, "" if there are effective
    documents enough."""
    n = matrix.n_effective
    unit = "questions" if n == len(matrix.question_ids) else "documents (effective)"
    return "" if n >= FEWEST else f"; {n:.3g} {unit} are too few to tell, {FEWEST} are needed"


def _compared(
    claim: ClaimSection, evidence: Evidence, labels: Mapping[str, str]
) -> tuple[list[CorrectnessMatrix], str]:
    """Return the answers of arms (label -> arm) to the questions that all have a score for, and why
    there are none."""
    net = claim.test not in ("above_chance", "near_chance") and evidence.is_net(
        list(labels.values()), claim
    )
    found = {label: evidence.matrix(arm, claim, net=net) for label, arm in labels.items()}
    missing = [label for label, matrix in found.items() if matrix is None]
    if missing:
        without = " with and without the question" if net else ""
        return [], f"no scored answers of {' and '.join(missing)} on {claim.question_set}{without}"
    matrices = aligned(*(matrix for matrix in found.values() if matrix is not None))
    if not matrices[0].question_ids:
        return (
            [],
            f"no question of {claim.question_set} has a score from each of {' and '.join(labels)}",
        )
    return matrices, ""


def _difference(claim: ClaimSection, evidence: Evidence) -> _Tested:
    arm, baseline = evidence.arm_name(claim.arm), evidence.arm_name(claim.baseline)
    matrices, missing = _compared(claim, evidence, {arm: arm, baseline: baseline})
    if missing or arm == baseline:
        return _Tested(missing or f"{arm} is compared with itself")
    found, too_few = difference_estimate(matrices[0], matrices[1]), _enough(matrices[0])
    alike = claim.test == "equivalence"
    finding = (
        f"{_accuracy(arm, claim, evidence)}, {_accuracy(baseline, claim, evidence)} {claim.outcome} on {claim.question_set}"
        f"{', beyond the choices without the question' if evidence.is_net([arm, baseline], claim) else ''}: "
        f"{format_points(found.value)} points{_bounded(found.low, found.high, format_points)}"
        f"{f', margin {format_points(claim.margin)}' if alike else ''}{too_few}"
    )
    scope = evidence.scope(arm, baseline)
    if not alike:
        return _tested(claim, found, finding, too_few, scope, matrices[0])
    p = None if too_few else equivalence_p(matrices[0], matrices[1], claim.margin)
    return _Tested(finding, found.value, found.low, found.high, p, True, scope)


def _accuracy(arm: str, claim: ClaimSection, evidence: Evidence) -> str:
    """Return ``cpt 41.0%``, where the claim compares net gains ``cpt 41.0% (25.2% without the
    question)``."""
    asked = evidence.matrix(arm, claim)
    accuracy = 0.0 if asked is None else asked.mean()
    text = f"{arm} {format_percent(accuracy)}"
    net = evidence.matrix(arm, claim, net=True) if evidence.is_net([arm], claim) else None
    if net is None:
        return text
    return f"{text} ({format_percent(accuracy - net.mean())} without the question)"


def _tested(
    claim: ClaimSection,
    found: Estimate,
    finding: str,
    too_few: str,
    scope: Scope,
    matrix: CorrectnessMatrix,
) -> _Tested:
    """Return the numbers of a claim that names a direction."""
    p, as_claimed = None if too_few else found.p, (found.value > 0) == (claim.direction == "higher")
    return _Tested(
        finding, found.value, found.low, found.high, p, as_claimed, scope, matrix.n_effective
    )


def _trend(claim: ClaimSection, evidence: Evidence) -> _Tested:
    sweep = evidence.sweeps.get(claim.sweep or "")
    labels = {point.label: point.arm for point in sweep.points} if sweep else {}
    matrices, missing = (
        _compared(claim, evidence, labels) if len(labels) >= 3 else ([], "three points are needed")
    )
    if missing:
        return _Tested(f"{claim.sweep}: {missing}")
    too_few, (found, monotone) = _enough(matrices[0]), trend(matrices)
    accuracies = [
        f"{label}: {format_percent(matrix.mean())}"
        for label, matrix in zip(labels, matrices, strict=True)
    ]
    beyond = (
        " beyond the choices without the question"
        if evidence.is_net(list(labels.values()), claim)
        else ""
    )
    finding = (
        f"{', '.join(accuracies)} {claim.outcome} on {claim.question_set}{beyond}; "
        f"later over earlier {format_points(found.value)} points"
        f"{_bounded(found.low, found.high, format_points)}{too_few}"
    )
    if not monotone:
        finding += (
            f"; {'rising' if found.value > 0 else 'falling'} on the whole, but not at every step"
        )
    return _tested(claim, found, finding, too_few, evidence.scope(*labels.values()), matrices[0])


def _against_chance(claim: ClaimSection, evidence: Evidence) -> _Tested:
    arm, near = evidence.arm_name(claim.arm), claim.test == "near_chance"
    matrices, missing = _compared(claim, evidence, {arm: arm})
    if missing:
        return _Tested(missing)
    matrix = matrices[0]
    estimate, too_few, guess = bounded_accuracy(matrix), _enough(matrix), matrix.chance
    finding = (
        f"{arm} {format_percent(estimate.value)}{_bounded(estimate.low, estimate.high, format_percent)} on {claim.question_set}, "
        f"guessing {format_percent(guess)}"
        + (f", margin {format_points(claim.margin)}" if near else "")
        + too_few
    )
    p = None if too_few else chance_p(matrix, claim.margin if near else None)
    effect, as_claimed = estimate.value - guess, near or estimate.value > guess
    return _Tested(
        finding,
        effect,
        estimate.low - guess,
        estimate.high - guess,
        p,
        as_claimed,
        evidence.scope(arm),
    )


_TESTS: Mapping[str, Callable[[ClaimSection, Evidence], _Tested]] = {
    "difference": _difference, "equivalence": _difference, "trend": _trend, "above_chance": _against_chance,
    "near_chance": _against_chance,
}  # fmt: skip
"""Test of a claim -> the function that makes it."""


def make_failures(runs: Sequence[ArmRun], status: StageStatus, records: Records) -> list[Failure]:
    """Return the arms and seeds that are missing, each with the stage that failed, and those that
    diverged."""
    failures = []
    for run in runs:
        failure = status.first_failure(run.all_stages)
        if failure is not None:
            stage, why = failure
            arm = run.arm
            failures.append(
                Failure(arm.name, arm.model, run.seed, stage.kind, why, str(stage.folder / LOG))
            )
        elif run.evaluations and run.seed not in records.seeds(run.arm.model, run.arm.name):
            why, log = "diverged: no question has a score", str(run.evaluations[-1].folder / LOG)
            failures.append(Failure(run.arm.name, run.arm.model, run.seed, "eval", why, log))
    return failures
