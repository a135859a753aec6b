"""The claims of a study: each tested on the answers, corrected for their number, with a verdict;
and before it runs, what each could tell."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinject.disk import content_id, file_lock, is_amount, read_json, write_json
from kinject.errors import InputError
from kinject.recipe.sections import ClaimSection, EvalSection, StudySection
from kinject.report.formatting import format_p, format_percent, format_points, join_words
from kinject.results import ALPHA, FEWEST, MARGIN, Claim, Role, Scope, Sweep, Verdict, fewest_for
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
from kinject.stats.power import Design, Spread, cheapest, detectable, spread_of
from kinject.study.arms import BASE, Arm, head_format, n_trainings, value_label
from kinject.study.records import AskSetting, Records, find_twins, joint_name
from kinject.study.scheduler import documents_of
from kinject.terminal import format_count, format_number
from kinject.types import ArmName, Question


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
        names, chosen = claim.sets(), self.chosen_ks(arm, claim)
        ks = {0}
        if ArmName.parse(arm).retrieval:
            ks = {chosen.get(name, -1) for name in names}
        # Sets that were asked with different numbers of passages are not one.
        k = ks.pop() if len(ks) == 1 else -1
        return AskSetting(joint_name(names), *self.prompt_format(names[0]), k)

    def chosen_ks(self, arm: str, claim: ClaimSection) -> dict[str, int]:
        """Return the number of passages with which the arm counts on each of the claim's question
        sets, where one was chosen."""
        keys = {name: (ArmName.parse(arm).answers_of, name) for name in claim.sets()}
        return {name: self.chosen_k[key] for name, key in keys.items() if key in self.chosen_k}

    def records_of(self, claim: ClaimSection) -> Records:
        """Return the answers, those to the claim's question sets as one set."""
        return self.records.joined(claim.sets())

    def is_net(self, arms: Sequence[str], claim: ClaimSection) -> bool:
        """Return whether the claim compares what the arms answer beyond their choices without the
        question."""
        if claim.net is not None:
            return claim.net
        # Strings are recognised in what is to be learned; a control chooses, so it is right or
        # wrong only.
        roles = {self.roles.get(name) for name in claim.sets()}
        if roles != {"learning"} or claim.outcome != "right":
            return False
        records = self.records_of(claim)
        named = [(ArmName.parse(arm).answers_of, self.setting(arm, claim)) for arm in arms]
        return all(records.has_control(self.model, bare, setting) for bare, setting in named)

    def matrix(
        self, arm: str, claim: ClaimSection, *, net: bool = False
    ) -> CorrectnessMatrix | None:
        """Return which of the arm's answers have the claim's outcome; None where it was not asked
        (it failed, or has no K).

        With `net`, what they have beyond the arm's answers without the question.
        """
        bare, setting = ArmName.parse(arm).answers_of, self.setting(arm, claim)
        records = self.records_of(claim)
        if setting not in records.settings(self.model, bare):
            return None
        if net and not records.has_control(self.model, bare, setting):
            return None
        return records.matrix(self.model, bare, setting, "", claim.outcome, net=net)

    def arm_name(self, arm: str | Mapping[str, Any] | None) -> str:
        """Return the name of a claim's arm; of a point of a sweep that of the arm which has its
        value."""
        if not isinstance(arm, Mapping):
            return arm or ""
        ((name, value),) = arm.items()
        # A point may be an arm with another name, which has its weights already.
        if name in self.sweeps:
            for point in self.sweeps[name].points:
                if point.value == value:
                    return point.arm
        return f"{name} {value_label(value)}"

    def scope(self, *arms: str) -> Scope:
        """Return the scope of a claim on `arms`: if one was trained with a single seed, these
        models only."""
        trained = {ArmName.parse(arm).arm for arm in arms} - {BASE}
        if any(len(self.records.seeds(self.model, arm)) == 1 for arm in trained):
            return "these models"
        return "method"


def judge_claims(claims: Mapping[str, ClaimSection], evidence: Evidence) -> list[Claim]:
    """Return each claim with its verdict, p corrected by Holm (1979) over all that were tested."""
    results = [_TESTS[claim.test](claim, evidence) for claim in claims.values()]
    tested = [result.p for result in results if result.p is not None]
    corrected = iter(holm(tested))
    judged = []
    for (name, section), result in zip(claims.items(), results, strict=True):
        p_holm = None
        if result.p is not None:
            p_holm = next(corrected)
        judged.append(_with_verdict(name, section, result, p_holm, len(tested)))
    return judged


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
    verdict, reason = _judge(result, p_holm, family)
    return Claim(
        name,
        section.statement,
        verdict,
        result.finding + reason,
        result.effect,
        result.low,
        result.high,
        result.p,
        p_holm,
        section.source,
        scope=result.scope,
    )


def _judge(result: _Tested, p_holm: float | None, family: int) -> tuple[Verdict, str]:
    """Return the verdict, and what to add to the finding where the family decides it."""
    if result.p is None or p_holm is None:
        return "cannot be tested", ""
    if p_holm < ALPHA:
        if result.as_claimed:
            return "shown", ""
        return "opposite shown", ""
    reason = ""
    if result.p < ALPHA:
        p = format_p(result.p)
        reason = f"; {p} in a test by itself, but {family} claims are corrected for"
    n, needed = result.n_documents, fewest_for(family)
    if n is None or n >= needed:
        return "not shown", reason
    # Flipped signs of so few documents give no p that could survive the correction.
    too_few = (
        f"; {format_number(n)} documents (effective) are too few for {family} claims, "
        f"{needed} are needed"
    )
    return "cannot be tested", reason + too_few


def _bounded(low: float | None, high: float | None, words: Callable[[float], str]) -> str:
    # One document has no variance, so no bounds.
    if low is None or high is None:
        return ""
    return f" ({words(low)} to {words(high)})"


def _enough(matrix: CorrectnessMatrix) -> str:
    """Return the reason why the questions cannot decide a claim, "" if there are effective
    documents enough."""
    n = matrix.n_effective
    if n >= FEWEST:
        return ""
    unit = "documents (effective)"
    if n == len(matrix.question_ids):
        unit = "questions"
    return f"; {format_number(n)} {unit} are too few to tell, {FEWEST} are needed"


def _compared(
    claim: ClaimSection, evidence: Evidence, labels: Mapping[str, str]
) -> tuple[list[CorrectnessMatrix], str]:
    """Return the answers of arms (label -> arm) to the questions that all have a score for, and why
    there are none."""
    # Guessing is the chance of a question with its text, so against it nothing is subtracted.
    against_chance = claim.test in ("above_chance", "near_chance")
    net = not against_chance and evidence.is_net(list(labels.values()), claim)
    matrices = []
    missing = []
    for label, arm in labels.items():
        ks = evidence.chosen_ks(arm, claim)
        if ArmName.parse(arm).retrieval and len(set(ks.values())) > 1:
            shown = join_words([f"{k} on {name}" for name, k in ks.items()])
            why = f"{label} has other numbers of passages on each set ({shown})"
            return [], f"{why}, whose questions therefore do not count as one"
        matrix = evidence.matrix(arm, claim, net=net)
        if matrix is None:
            missing.append(label)
        else:
            matrices.append(matrix)
    if missing:
        why = f"no scored answers of {' and '.join(missing)} on {joint_name(claim.sets())}"
        if net:
            why += " with and without the question"
        return [], why
    # On the questions of all: accuracies on others are not to be compared.
    matrices = aligned(*matrices)
    if matrices[0].question_ids:
        return matrices, ""
    arms = " and ".join(labels)
    return [], f"no question of {joint_name(claim.sets())} has a score from each of {arms}"


def _difference(claim: ClaimSection, evidence: Evidence) -> _Tested:
    arm, baseline = evidence.arm_name(claim.arm), evidence.arm_name(claim.baseline)
    labels = {_in_words(arm): arm, _in_words(baseline): baseline}
    matrices, missing = _compared(claim, evidence, labels)
    if missing or arm == baseline:
        return _Tested(missing or f"{_in_words(arm)} is compared with itself")
    found, too_few = difference_estimate(matrices[0], matrices[1]), _enough(matrices[0])
    accuracies = []
    for name, matrix in zip((arm, baseline), matrices, strict=True):
        asked = None
        if evidence.is_net([arm, baseline], claim):
            asked = evidence.matrix(name, claim)
        accuracies.append(f"{_in_words(name)} {_accuracy(matrix, asked)}")
    finding = (
        f"{', '.join(accuracies)} {claim.outcome} on {joint_name(claim.sets())}"
        f"{_beyond([arm, baseline], claim, evidence, ', ')}: {_points(found)}"
    )
    scope = evidence.scope(arm, baseline)
    if claim.test == "difference":
        return _tested(claim, found, finding + too_few, too_few, scope, matrices[0])
    finding += f", margin {format_points(claim.margin)}{too_few}"
    p = None
    # A claim without a p takes no part in Holm's correction of the others.
    if not too_few:
        p = equivalence_p(matrices[0], matrices[1], claim.margin)
    # The test is that the arms are alike, so it has no opposite.
    return _Tested(finding, found.value, found.low, found.high, p, True, scope)


def _beyond(
    arms: Sequence[str], claim: ClaimSection, evidence: Evidence, separator: str = " "
) -> str:
    """Return the words for a comparison of net gains, "" where the claim makes none."""
    if not evidence.is_net(arms, claim):
        return ""
    return f"{separator}beyond the choices without the question"


def _in_words(arm: str) -> str:
    return ArmName.parse(arm).words


def _points(found: Estimate) -> str:
    bounds = _bounded(found.low, found.high, format_points)
    return f"{format_points(found.value)} points{bounds}"


def _accuracy(compared: CorrectnessMatrix, asked: CorrectnessMatrix | None) -> str:
    """Return ``41.0%``, where net gains are `compared` ``41.0% (25.2% without the question)`` by
    the answers of those `asked`."""
    if asked is None:
        return format_percent(compared.mean())
    # Of the questions that are compared: the accuracies of others contradict the difference.
    accuracy = aligned(compared, asked)[1].mean()
    without_question = format_percent(accuracy - compared.mean())
    return f"{format_percent(accuracy)} ({without_question} without the question)"


def _tested(
    claim: ClaimSection,
    found: Estimate,
    finding: str,
    too_few: str,
    scope: Scope,
    matrix: CorrectnessMatrix,
) -> _Tested:
    """Return the numbers of a claim that names a direction."""
    p = found.p
    if too_few:
        p = None
    as_claimed = (found.value > 0) == (claim.direction == "higher")
    return _Tested(
        finding, found.value, found.low, found.high, p, as_claimed, scope, matrix.n_effective
    )


_FEWEST_POINTS = 3
"""Points of a trend: two are a difference."""


def _trend(claim: ClaimSection, evidence: Evidence) -> _Tested:
    labels = {}
    sweep = evidence.sweeps.get(claim.sweep or "")
    if sweep is not None:
        labels = {point.label: point.arm for point in sweep.points}
    if len(labels) < _FEWEST_POINTS:
        return _Tested(f"{claim.sweep}: three points are needed")
    matrices, missing = _compared(claim, evidence, labels)
    if missing:
        return _Tested(f"{claim.sweep}: {missing}")
    too_few, (found, monotone) = _enough(matrices[0]), trend(matrices)
    accuracies = [
        f"{label}: {format_percent(matrix.mean())}"
        for label, matrix in zip(labels, matrices, strict=True)
    ]
    arms = list(labels.values())
    finding = (
        f"{', '.join(accuracies)} {claim.outcome} on {joint_name(claim.sets())}"
        f"{_beyond(arms, claim, evidence)}; later over earlier {_points(found)}{too_few}"
    )
    if not monotone:
        direction = "falling"
        if found.value > 0:
            direction = "rising"
        finding += f"; {direction} on the whole, but not at every step"
    return _tested(claim, found, finding, too_few, evidence.scope(*arms), matrices[0])


def _against_chance(claim: ClaimSection, evidence: Evidence) -> _Tested:
    arm, near = evidence.arm_name(claim.arm), claim.test == "near_chance"
    matrices, missing = _compared(claim, evidence, {_in_words(arm): arm})
    if missing:
        return _Tested(missing)
    matrix = matrices[0]
    estimate, too_few, guess = bounded_accuracy(matrix), _enough(matrix), matrix.chance
    bounds = _bounded(estimate.low, estimate.high, format_percent)
    finding = (
        f"{_in_words(arm)} {format_percent(estimate.value)}{bounds} on {joint_name(claim.sets())}, "
        f"guessing {format_percent(guess)}"
    )
    margin = None
    if near:
        margin = claim.margin
        finding += f", margin {format_points(margin)}"
    p = None
    if not too_few:
        p = chance_p(matrix, margin)
    effect = estimate.value - guess
    return _Tested(
        finding + too_few,
        effect,
        estimate.low - guess,
        estimate.high - guess,
        # Near chance has no direction: the test is that the accuracy lies within the margin.
        p,
        near or effect > 0,
        evidence.scope(arm),
    )


_TESTS: Mapping[str, Callable[[ClaimSection, Evidence], _Tested]] = {
    "difference": _difference,
    "equivalence": _difference,
    "trend": _trend,
    "above_chance": _against_chance,
    "near_chance": _against_chance,
}
"""Test of a claim -> the function that makes it."""


_COMPARED = ("difference", "equivalence")


def render_power(
    claims: Mapping[str, ClaimSection],
    evidence: Evidence,
    questions: Mapping[str, Sequence[Question]],
    arms: Sequence[Arm],
    n_seeds: int,
) -> Iterator[str]:
    """Yield a line for each claim that compares two arms: the difference that it can tell, and what
    would tell one of five points.

    `evidence` has the answers of finished stages, `questions` the test questions of each set,
    `arms` are the study's, and `n_seeds` its seeds, of which an arm may have others.
    """
    family = max(1, len(claims))
    for name, claim in claims.items():
        asked = _asked_once({item: questions.get(item, ()) for item in claim.sets()})
        n_questions = sum(map(len, asked.values()))
        # The others compare one arm with guessing, or several: `detectable` is of two arms.
        if claim.test not in _COMPARED or not n_questions:
            continue
        named = [evidence.arm_name(claim.arm), evidence.arm_name(claim.baseline)]
        bare = [ArmName.parse(arm).arm for arm in named]
        n_trained = sum(name != BASE for name in bare)
        trained = [arm for arm in arms if arm.model == evidence.model and arm.trained]
        compared = [arm for arm in trained if arm.name in bare]
        n_documents = len(set().union(*(documents_of(*item) for item in asked.items())))
        # An arm of fewer seeds than the other decides.
        fewest = min((len(arm.seeds) for arm in compared), default=n_seeds)
        n_alike = _n_alike(compared, trained)
        design = Design(n_documents, n_questions / n_documents, fewest, n_trained, family, n_alike)
        net = evidence.is_net(named, claim)
        matrices = [evidence.matrix(arm, claim, net=net) for arm in named]
        spread = _spread_of_answers(matrices)
        needed = fewest_for(family)
        if claim.test == "equivalence":
            needed = FEWEST  # it flips no signs
        change = cheapest(design, spread, MARGIN)
        if n_documents < needed:
            text = (
                f"cannot be tested ({format_count(n_questions, 'question')} on "
                f"{format_count(n_documents, 'document')}, {needed} are needed)"
            )
        else:
            text = _told(design, spread, n_questions)
        if change:
            text += f"; {100 * MARGIN:g} points need {change}"
        yield f"power: {name}: {text}"


def _asked_once(questions: Mapping[str, Sequence[Question]]) -> dict[str, list[Question]]:
    """Return the questions of each set without those that an earlier one has, too."""
    twins = find_twins(questions)
    asked: dict[str, list[Question]] = {}
    for name, of_set in questions.items():
        asked[name] = [question for question in of_set if (name, question.id) not in twins]
    return asked


def _n_alike(compared: Sequence[Arm], trained: Sequence[Arm]) -> int:
    """Return how many arms have seeds that inform one variance with those of the compared ones."""
    with_seeds = [arm for arm in trained if len(arm.seeds) > 1 and not arm.retrieval]
    counts = Counter(n_trainings(arm, trained) for arm in with_seeds)
    return min((counts[n_trainings(arm, trained)] for arm in compared), default=1)


def _spread_of_answers(matrices: Sequence[CorrectnessMatrix | None]) -> Spread:
    """Return how the difference of two arms varies by their answers, else the assumptions."""
    arm, baseline = matrices
    found = None
    if arm is not None and baseline is not None and arm.question_ids and baseline.question_ids:
        found = spread_of(arm, baseline)
    return found or Spread()


def _told(design: Design, spread: Spread, n_questions: int) -> str:
    """Return in words the difference that a design can tell."""
    tells = detectable(design, spread)
    source = "by stored answers"
    if spread.assumed:
        source = "assumed: two of five answers change, changes on a document correlate by 0.1"
        if design.n_seeds > 1:
            source += ", trainings differ by 2 points"
    seeds = format_count(design.n_seeds, "seed")
    if design.n_seeds == 1:
        seeds += " (so in these models)"
    return (
        f"tells a difference of {100 * tells:.1f} points "
        f"({format_count(n_questions, 'question')} on "
        f"{format_count(round(design.n_documents), 'document')}, "
        f"{seeds}, {format_count(design.family, 'claim')}; {source})"
    )


def declare_claims(section: StudySection, evaluation: EvalSection) -> dict[str, float]:
    """Return when each claim was declared first, by any study with these stages: a file beside them
    records it.

    A claim is its fields without the words, with the arms and the sweep that it names, and how
    `evaluation` asks its question sets.
    """
    declared = {}
    for name, claim in (section.claims or {}).items():
        path = Path(section.cache_dir) / "claims" / f"{_claim_id(section, claim, evaluation)}.json"
        # Two studies may declare it at once: the first time counts.
        with file_lock(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                write_json(path, {"declared": time.time()})
        fix = "Delete it, and its claim counts as declared now."
        found = read_json(path, fix).get("declared")
        if not is_amount(found):
            raise InputError(
                f"{path}: damaged: declared is {found!r:.40}, a time in seconds is needed. {fix}"
            )
        declared[name] = float(found)
    return declared


def _claim_id(section: StudySection, claim: ClaimSection, evaluation: EvalSection) -> str:
    named = [ArmName.parse(arm) for arm in named_arms(claim)]
    parts = [asdict(replace(claim, statement="", source=""))]
    parts += [asdict(section.arms[arm]) for arm, _ in named if arm in section.arms]
    sweeps, retrievals = section.sweeps or {}, section.retrievals or {}
    # A sweep that two of the claim's arms are points of counts once.
    parts += [asdict(sweeps[sweep]) for sweep in dict.fromkeys(sweeps_of(claim))]
    parts += [dict(retrievals[retrieval]) for _, retrieval in named if retrieval in retrievals]
    # A claim on written answers is not as old as the one on chosen answers to the same questions.
    records = Records(evaluation.scores)
    for name in claim.sets():
        question_format, shots = head_format(evaluation, name)
        score = records.score(AskSetting(name, question_format, shots, 0))
        path = evaluation.sets()[name].path
        parts.append({"path": path, "format": question_format, "shots": shots, "score": score})
    return content_id("claim", section.eval, parts)


def named_arms(claim: ClaimSection) -> list[str]:
    """Return the arms that a claim compares, but for points of sweeps."""
    return [arm for arm in (claim.arm, claim.baseline) if isinstance(arm, str)]


def sweeps_of(claim: ClaimSection) -> list[str]:
    """Return the sweeps whose points a claim compares."""
    sweeps: list[str] = []
    for arm in (claim.arm, claim.baseline):
        if isinstance(arm, Mapping):
            sweeps += arm
    if claim.sweep:
        sweeps.append(claim.sweep)
    return sweeps
