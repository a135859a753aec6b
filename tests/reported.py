"""The figures on the page of findings, beside what docs/results keeps of the report that they come from.

A section that has the command of a study (`kinject study recipes/studies/NAME.yaml`) is about docs/results/NAME.json, as
benchmarks/study/keep.py writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from published import DIFFERENCE, plain

_STUDY = re.compile(r"kinject study recipes/studies/([\w.-]+)\.yaml")
_SAID_P = r"p (?P<relation>[<=]) (?P<p>\d\.\d+)"
_DIFFERENCE = re.compile(rf"(?<![\d.]){DIFFERENCE}\)?(?:[,;] {_SAID_P})?")
_P = re.compile(_SAID_P)
_PERCENT = re.compile(r"(?<![\d.+-])(\d+(?:\.\d+)?)%")
_NUMBER = re.compile(r"(?<![\d.A-Za-z])(\d+(?:\.\d+)?)(?![\d.]*[A-Za-z])")


def study_of(text: str) -> str | None:
    """Return the name of the study whose command a section has."""
    match = _STUDY.search(text)
    return match[1] if match else None


@dataclass
class Kept:
    """What is kept of a report: percentages of each arm (`base+rag`: with a passage), and differences."""

    of_arm: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Arm -> question set, perplexity or "work" -> its figures: accuracy and bounds in percent, perplexity, seconds."""
    differences: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Difference and bounds in points, p after Holm: of claims, and of each result."""

    @classmethod
    def of(cls, report: dict[str, Any]) -> Kept:
        """Read a file of docs/results."""
        kept = cls()
        for item in report["results"]:
            arm = item["arm"]
            # With passages of another retrieval it has that one's name: base+oracle.
            if item["k"] and "+" not in arm:
                arm += "+rag"
            figures = [100 * item[key] for key in ("accuracy", "low", "high") if key in item]
            figures += [100 * value for value in item["by_seed"]]
            for outcome in item.get("outcomes", ()):
                figures += [100 * outcome[key] for key in ("rate", "low", "high")]
            kept._add(arm, item["question_set"], figures)
            for name in ("to_base", "to_plain", "to_rag", "net"):
                kept._add_difference(item.get(name), "delta")
        for item in report["perplexities"]:
            kept._add(item["arm"], "perplexity", [item["per_token"], *item["by_seed"]])
        for arm, seconds in report["work_seconds"].items():
            if seconds:
                kept._add(arm, "work", [sum(seconds) / len(seconds), *seconds])
        for claim in report["claims"]:
            kept._add_difference(claim, "effect")
        return kept

    def _add(self, arm: str, name: str, figures: list[float]) -> None:
        self.of_arm.setdefault(arm, {}).setdefault(name, []).extend(figures)

    def _add_difference(self, item: dict[str, Any] | None, key: str) -> None:
        if item and item.get("low") is not None and item.get(key) is not None:
            points = (100 * item[name] for name in (key, "low", "high"))
            self.differences.append((*points, item.get("p_holm", 1.0)))

    def figures(self, arm: str | None = None, column: str | None = None) -> list[float]:
        """Return the figures of an arm (of all) in a column (in all): one that is named after a set is about it alone."""
        arms = [self.of_arm[arm]] if arm else list(self.of_arm.values())
        found = []
        for of_set in arms:
            for name, figures in of_set.items():
                if column is None or column == name:
                    found += figures
        return found

    def is_column(self, name: str) -> bool:
        """Return whether a set, or "perplexity", or "work", has that name."""
        return any(name in of_set for of_set in self.of_arm.values())


def unreported(text: str, kept: Kept) -> list[str]:
    """Return the figures of a section that its report does not have.

    A row that begins with the name of an arm is checked number by number against that arm's figures; other text by its
    differences (with interval and p, where they follow), its p and its percentages.
    """
    missing, prose, columns = [], [], []
    for line in plain(text).splitlines():
        if not line.startswith("|"):
            prose.append(line)
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = cells
        if cells[0] in kept.of_arm:
            missing += _missing_of_row(cells, columns, kept)
        else:
            prose.append(line)
    return missing + list(_missing_of_prose(" ".join(" ".join(prose).split()), kept))


def _missing_of_row(cells: list[str], columns: list[str], kept: Kept) -> list[str]:
    missing = []
    for name, cell in zip(columns[1:], cells[1:], strict=False):
        # "+oracle" has what the arm of the row answers with those passages.
        arm = cells[0] + name if name.startswith("+") else cells[0]
        column = name if kept.is_column(name) else None
        figures = kept.figures(arm, column) if arm in kept.of_arm else []
        wrong = (number for number in _NUMBER.findall(cell) if not _is_among(number, figures))
        missing += [f"{cells[0]}, {name}: {number}" for number in wrong]
    return missing


def _is_among(number: str, figures: list[float]) -> bool:
    """Return whether a figure is this number, at its decimals."""
    decimals = len(number.partition(".")[2])
    half = 0.5 * 10**-decimals + 1e-6
    return any(abs(figure - float(number)) <= half for figure in figures)


def _missing_of_prose(text: str, kept: Kept) -> Iterator[str]:
    for said in _DIFFERENCE.finditer(text):
        if not any(_is_difference(said, difference) for difference in kept.differences):
            yield said[0]
    for said in _P.finditer(text):
        if not any(_is_p(said, difference[3]) for difference in kept.differences):
            yield said[0]
    for number in _PERCENT.findall(text):
        if "." in number and not _is_among(number, kept.figures()):
            yield f"{number}%"


def _is_difference(said: re.Match[str], difference: tuple[float, float, float, float]) -> bool:
    """Return whether a difference, with its interval and p as far as they follow it, is this one."""
    for text, value in zip(said.groups()[:3], difference, strict=False):
        if text is not None and abs(float(text) - value) > 0.051:
            return False
    return said["p"] is None or _is_p(said, difference[3])


def _is_p(said: re.Match[str], p: float) -> bool:
    """Return whether `p < 0.001`, or `p = 0.13` at its decimals, is true of a p."""
    number = said["p"]
    if said["relation"] == "<":
        return p < float(number)
    return _is_among(number, [p])
