"""The claims that a study wrote down beforehand, tested and corrected as one family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kinject.eval.statistics import chance, holm
from kinject.recipe.study_section import ClaimSection
from kinject.results import ALPHA, Claim, Sweep
from kinject.study.arms import RAG
from kinject.study.inference import CorrectnessMatrix, interval, near_p, sign_flip_p, trend_p
from kinject.study.records import AskSetting, Records


@dataclass(frozen=True)
class Evidence:
    """Evidence for claims on one base model: the answers, the sweeps, and each arm's chosen K by question set."""

    records: Records
    model: str
    format: str
    shots: int
    chosen_k: Mapping[tuple[str, str], int]
    sweeps: Mapping[str, Sweep]

    def setting(self, arm: str, question_set: str) -> tuple[str, AskSetting]:
        """Return the arm without ``+rag``, and its setting."""
        bare = arm.removesuffix(RAG)
        k = self.chosen_k.get((bare, question_set), -1) if arm.endswith(RAG) else 0
        return bare, AskSetting(question_set, self.format, self.shots, k)

    def matrix(self, arm: str, question_set: str) -> CorrectnessMatrix | None:
        """Return the arm's matrix, None where it was not asked (it failed, or has no K)."""
        bare, setting = self.setting(arm, question_set)
        return (
            self.records.matrix(self.model, bare, setting)
            if setting in self.records.settings(self.model, bare)
            else None
        )

    def chance(self, arm: str, question_set: str) -> float:
        """Return the accuracy of guessing on the set."""
        bare, setting = self.setting(arm, question_set)
        return chance([len(answer.log_probs) for answer in self.records.answers(self.model, bare, setting)])


def judge_claims(claims: Mapping[str, ClaimSection], evidence: Evidence) -> list[Claim]:
    """Return each claim with its verdict, p corrected by Holm (1979) over all that could be tested."""
    found = [_tested(name, claim, evidence) for name, claim in claims.items()]
    tested = [claim for claim in found if claim.p is not None]
    corrected = dict(zip((claim.name for claim in tested), holm([claim.p or 0.0 for claim in tested]), strict=True))
    return [_with_verdict(claim, claims[claim.name], corrected.get(claim.name)) for claim in found]


def _with_verdict(claim: Claim, section: ClaimSection, p_holm: float | None) -> Claim:
    if p_holm is None or claim.effect is None:
        return claim
    if section.test == "near_chance":
        return replace(claim, p_holm=p_holm, verdict="shown" if p_holm < ALPHA else "not shown")
    as_claimed = (
        claim.effect > 0 if section.test == "above_chance" or section.direction == "higher" else claim.effect < 0
    )
    verdict = "not shown" if p_holm >= ALPHA else "shown" if as_claimed else "opposite shown"
    return replace(claim, p_holm=p_holm, verdict=verdict)  # type: ignore[arg-type]


def _tested(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    test = {"difference": _difference, "trend": _trend, "above_chance": _above_chance, "near_chance": _near_chance}
    return test[claim.test](name, claim, evidence)


def _untested(name: str, claim: ClaimSection, why: str) -> Claim:
    return Claim(name, claim.statement, "cannot be tested", why, None, None, None, None, None, claim.source)


def _judgeable(
    name: str, claim: ClaimSection, finding: str, effect: float, bounds: tuple[float, float], p: float
) -> Claim:
    return Claim(name, claim.statement, "not shown", finding, effect, *bounds, p, None, claim.source)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _difference(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    assert claim.arm is not None
    assert claim.baseline is not None
    one, other = evidence.matrix(claim.arm, claim.question_set), evidence.matrix(claim.baseline, claim.question_set)
    missing = [arm for arm, matrix in ((claim.arm, one), (claim.baseline, other)) if matrix is None]
    if one is None or other is None:
        return _untested(name, claim, f"no answers of {' and '.join(missing)} on {claim.question_set}")
    delta = one.mean() - other.mean()
    low, high = interval(one, other)
    finding = (
        f"{claim.arm} {_percent(one.mean())}, {claim.baseline} {_percent(other.mean())} on {claim.question_set}: "
        f"{_points(delta)} points ({_points(low)} to {_points(high)})"
    )
    return _judgeable(name, claim, finding, delta, (low, high), sign_flip_p(one, other))


def _trend(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    sweep = evidence.sweeps.get(claim.sweep or "")
    points = [(point.label, evidence.matrix(point.arm, claim.question_set)) for point in sweep.points] if sweep else []
    there = [(label, matrix) for label, matrix in points if matrix is not None]
    if len(there) < 3 or len(there) < len(points):
        return _untested(
            name, claim, f"{len(there)} of {len(points)} points of {claim.sweep} were answered; three are needed"
        )
    matrices = [matrix for _, matrix in there]
    delta = matrices[-1].mean() - matrices[0].mean()
    rising = trend_p(matrices if claim.direction == "higher" else matrices[::-1])
    finding = (
        f"{', '.join(f'{label}: {_percent(matrix.mean())}' for label, matrix in there)} on {claim.question_set}; "
        f"last over first {_points(delta)} points"
    )
    return _judgeable(name, claim, finding, delta, interval(matrices[-1], matrices[0]), rising)


def _above_chance(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    return _against_chance(name, claim, evidence, near=False)


def _near_chance(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    return _against_chance(name, claim, evidence, near=True)


def _against_chance(name: str, claim: ClaimSection, evidence: Evidence, *, near: bool) -> Claim:
    assert claim.arm is not None
    matrix = evidence.matrix(claim.arm, claim.question_set)
    if matrix is None:
        return _untested(name, claim, f"no answers of {claim.arm} on {claim.question_set}")
    guess = evidence.chance(claim.arm, claim.question_set)
    low, high = interval(matrix)
    finding = (
        f"{claim.arm} {_percent(matrix.mean())} ({_percent(low)} to {_percent(high)}) on {claim.question_set}, "
        f"guessing {_percent(guess)}" + (f", margin {_points(claim.margin)}" if near else "")
    )
    p = near_p(matrix, guess, claim.margin) if near else sign_flip_p(matrix, guess)
    return _judgeable(name, claim, finding, matrix.mean() - guess, (low - guess, high - guess), p)
