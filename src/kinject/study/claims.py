"""The claims that a study wrote down beforehand, tested and corrected as one family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kinject.eval.statistics import chance, holm
from kinject.recipe.study_section import ClaimSection
from kinject.results import Claim, Curve
from kinject.study.arms import RAG
from kinject.study.inference import Sheet, interval, near_p, sign_flip_p, trend_p
from kinject.study.records import Records, Way

_ALPHA = 0.05


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by, for one base model: the answers, the curves, and each arm's chosen K by set."""

    records: Records
    model: str
    format: str
    shots: int
    chosen_k: Mapping[tuple[str, str], int]
    curves: Mapping[str, Curve]

    def way(self, arm: str, question_set: str) -> tuple[str, Way]:
        """Return the arm without ``+rag``, and how it was asked."""
        bare = arm.removesuffix(RAG)
        k = self.chosen_k.get((bare, question_set), -1) if arm.endswith(RAG) else 0
        return bare, (question_set, self.format, self.shots, k)

    def sheet(self, arm: str, question_set: str) -> Sheet | None:
        """Return the arm's sheet, None where it was not asked (it failed, or has no K)."""
        bare, way = self.way(arm, question_set)
        return self.records.sheet(self.model, bare, way) if way in self.records.ways(self.model, bare) else None

    def chance(self, arm: str, question_set: str) -> float:
        """Return the accuracy of guessing on the set."""
        bare, way = self.way(arm, question_set)
        return chance([len(answer.log_probs) for answer in self.records.answers(self.model, bare, way)])


def judge_claims(claims: Mapping[str, ClaimSection], evidence: Evidence) -> list[Claim]:
    """Return what the data say of each claim, p corrected by Holm (1979) over all that could be tested."""
    found = [_tested(name, claim, evidence) for name, claim in claims.items()]
    tested = [claim for claim in found if claim.p is not None]
    corrected = dict(zip((claim.name for claim in tested), holm([claim.p or 0.0 for claim in tested]), strict=True))
    return [_with_verdict(claim, claims[claim.name], corrected.get(claim.name)) for claim in found]


def _with_verdict(claim: Claim, section: ClaimSection, p_holm: float | None) -> Claim:
    if p_holm is None or claim.effect is None:
        return claim
    if section.test == "near_chance":
        return replace(claim, p_holm=p_holm, verdict="shown" if p_holm < _ALPHA else "not shown")
    right_way = (
        claim.effect > 0 if section.test == "above_chance" or section.direction == "higher" else claim.effect < 0
    )
    verdict = "not shown" if p_holm >= _ALPHA else "shown" if right_way else "opposite shown"
    return replace(claim, p_holm=p_holm, verdict=verdict)  # type: ignore[arg-type]


def _tested(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    test = {"difference": _difference, "trend": _trend, "above_chance": _above_chance, "near_chance": _near_chance}
    return test[claim.test](name, claim, evidence)


def _untested(name: str, claim: ClaimSection, why: str) -> Claim:
    return Claim(name, claim.statement, "cannot be tested", why, None, None, None, None, None, claim.source)


def _made(name: str, claim: ClaimSection, finding: str, effect: float, bounds: tuple[float, float], p: float) -> Claim:
    return Claim(name, claim.statement, "not shown", finding, effect, *bounds, p, None, claim.source)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _difference(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    assert claim.arm is not None
    assert claim.baseline is not None
    one, other = evidence.sheet(claim.arm, claim.question_set), evidence.sheet(claim.baseline, claim.question_set)
    missing = [arm for arm, sheet in ((claim.arm, one), (claim.baseline, other)) if sheet is None]
    if one is None or other is None:
        return _untested(name, claim, f"no answers of {' and '.join(missing)} on {claim.question_set}")
    delta = one.mean() - other.mean()
    low, high = interval(one, other)
    finding = (
        f"{claim.arm} {_percent(one.mean())}, {claim.baseline} {_percent(other.mean())} on {claim.question_set}: "
        f"{_points(delta)} points ({_points(low)} to {_points(high)})"
    )
    return _made(name, claim, finding, delta, (low, high), sign_flip_p(one, other))


def _trend(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    curve = evidence.curves.get(claim.sweep or "")
    points = [(point.label, evidence.sheet(point.arm, claim.question_set)) for point in curve.points] if curve else []
    there = [(label, sheet) for label, sheet in points if sheet is not None]
    if len(there) < 3 or len(there) < len(points):
        return _untested(
            name, claim, f"{len(there)} of {len(points)} points of {claim.sweep} were answered; three are needed"
        )
    sheets = [sheet for _, sheet in there]
    delta = sheets[-1].mean() - sheets[0].mean()
    rising = trend_p(sheets if claim.direction == "higher" else sheets[::-1])
    finding = (
        f"{', '.join(f'{label}: {_percent(sheet.mean())}' for label, sheet in there)} on {claim.question_set}; "
        f"last over first {_points(delta)} points"
    )
    return _made(name, claim, finding, delta, interval(sheets[-1], sheets[0]), rising)


def _above_chance(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    return _against_chance(name, claim, evidence, near=False)


def _near_chance(name: str, claim: ClaimSection, evidence: Evidence) -> Claim:
    return _against_chance(name, claim, evidence, near=True)


def _against_chance(name: str, claim: ClaimSection, evidence: Evidence, *, near: bool) -> Claim:
    assert claim.arm is not None
    sheet = evidence.sheet(claim.arm, claim.question_set)
    if sheet is None:
        return _untested(name, claim, f"no answers of {claim.arm} on {claim.question_set}")
    guess = evidence.chance(claim.arm, claim.question_set)
    low, high = interval(sheet)
    finding = (
        f"{claim.arm} {_percent(sheet.mean())} ({_percent(low)} to {_percent(high)}) on {claim.question_set}, "
        f"guessing {_percent(guess)}" + (f", margin {_points(claim.margin)}" if near else "")
    )
    p = near_p(sheet, guess, claim.margin) if near else sign_flip_p(sheet, guess)
    return _made(name, claim, finding, sheet.mean() - guess, (low - guess, high - guess), p)
