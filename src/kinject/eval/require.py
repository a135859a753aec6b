"""The gate of `kinject eval` in CI: requirements on its accuracies (`eval.require`).

The 95% interval decides, not the number: a requirement is met where the whole interval is, not met
where none of it is, and else cannot be told from so few questions, which fails a gate, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as Xml

from kinject.disk import write_json, write_text
from kinject.errors import InputError
from kinject.results import ArmResult, Contrast, Report
from kinject.types import ArmName

Verdict = Literal["met", "not met", "cannot be told"]
_FORM = re.compile(
    r"\s*((?P<arm>[^:]+):)?(?P<questions>[^:]+?)\s*>=\s*"
    r"(?P<sign>[+-]?)(?P<number>0|1|0?\.\d+|1\.0+)(?P<net>\s+net)?\s*"
)
"""[ARM:]SET>=NUMBER, +NUMBER, -NUMBER or +NUMBER net."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """`questions` a set's name, `arm` an arm's ("": every model but the base, without retrieval).

    The accuracy must be at least `least`; with `change` its difference from the base's, with `net`
    what that has beyond the difference without the question (`eval.control`).
    """

    text: str
    arm: str
    questions: str
    least: float
    change: bool
    net: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """What became of a requirement for one arm in one prompt format: `low` and `high` bound the
    number at 95%."""

    requirement: str
    arm: str
    format: str
    verdict: Verdict
    number: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        """The check in one line."""
        return (
            f"{self.verdict}: {self.requirement} ({self.arm}, {self.format}: {self.number:+.3f}, "
            f"95% interval {self.low:+.3f} to {self.high:+.3f}, {self.n} questions)"
        )


def read_requirements(texts: Sequence[str], sets: Sequence[str]) -> list[Requirement]:
    """Return the requirements that `texts` write, each on one of the question sets `sets`. Raises
    `InputError` for others."""
    requirements = []
    for text in texts:
        match = _FORM.fullmatch(text)
        # A net gain is one of a change, which is written with a sign.
        if match is None or match["questions"] not in sets or (match["net"] and not match["sign"]):
            raise InputError(
                f"eval.require: found {text!r}, expected [ARM:]SET>=NUMBER with a SET of "
                f"{', '.join(sets)}: 0.8 is an accuracy, -0.02 a change from the base, +0.1 net a "
                "change beyond that without the question."
            )
        requirement = Requirement(
            text=text.strip(),
            arm=(match["arm"] or "").strip(),
            questions=match["questions"],
            least=float(match["sign"] + match["number"]),
            change=bool(match["sign"]),
            net=bool(match["net"]),
        )
        requirements.append(requirement)
    return requirements


def check_requirements(requirements: Sequence[Requirement], report: Report) -> list[Check]:
    """Return a check of each requirement for each arm that it is about.

    Raises `InputError` if it is about none, or one of these has no score, or nothing to be compared
    with.
    """
    checks = []
    for requirement in requirements:
        results = list(_results(requirement, report))
        if not results:
            arms = dict.fromkeys(ArmName.asked(result.arm, result.k) for result in report.results)
            raise InputError(
                f"eval.require: {requirement.text}: no arm has scores of these questions. "
                f"Arms: {', '.join(arms) or 'none'}."
            )
        checks += [_check(requirement, result) for result in results]
    return checks


def _results(requirement: Requirement, report: Report) -> Iterator[ArmResult]:
    base = report.arms[0].name
    for result in report.results:
        if requirement.arm:
            is_meant = requirement.arm == ArmName.asked(result.arm, result.k)
        else:
            is_meant = not result.k and result.arm != base
        if is_meant and result.question_set == requirement.questions and not result.subject:
            yield result


def _check(requirement: Requirement, result: ArmResult) -> Check:
    number, low, high = result.accuracy, result.low, result.high
    if requirement.change:
        contrast = _contrast(requirement, result)
        number = contrast.delta
        # Without an interval the change may be anything.
        low = -1.0 if contrast.low is None else contrast.low
        high = 1.0 if contrast.high is None else contrast.high
    # Of 600 questions -0.02 passes an unchanged model in 95% of tries or more, and a loss of five
    # points in 20% or less (docs/reports.md).
    verdict: Verdict = "cannot be told"
    if low >= requirement.least:
        verdict = "met"
    elif high < requirement.least:
        verdict = "not met"
    arm = ArmName.asked(result.arm, result.k)
    return Check(requirement.text, arm, result.format, verdict, number, low, high, result.n_scored)


def _contrast(requirement: Requirement, result: ArmResult) -> Contrast:
    """Return the change that `requirement` is about."""
    contrast = result.to_base
    if requirement.net:
        if result.control is None:
            raise InputError(
                f"eval.require: {requirement.text}: {result.arm} was not asked without the "
                "question. Set eval.control: true and a format that compares choices."
            )
        contrast = result.control.net
    if contrast is None:
        raise InputError(
            f"eval.require: {requirement.text}: {result.arm} is not compared with a base."
        )
    return contrast


def write_checks(checks: Sequence[Check], folder: Path) -> None:
    """Write requirements.json and, for CI, requirements.xml in JUnit's form, in which every check
    is a test."""
    write_json(folder / "requirements.json", [asdict(check) for check in checks])
    # What cannot be told from so few questions fails a gate as well (docs/reports.md).
    failed = [check for check in checks if check.verdict != "met"]
    suite = Xml.Element(
        "testsuite", name="kinject eval", tests=str(len(checks)), failures=str(len(failed))
    )
    for check in checks:
        case = Xml.SubElement(
            suite, "testcase", classname=check.arm, name=f"{check.requirement} ({check.format})"
        )
        if check in failed:
            Xml.SubElement(case, "failure", message=str(check))
    write_text(folder / "requirements.xml", Xml.tostring(suite, "unicode", xml_declaration=True))
