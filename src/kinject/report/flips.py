"""The answers that changed, as the report shows them: flips.jsonl in, a few of each arm out, the rest counted.

All of it is text of question files and documents, so it is data: the pages escape it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import Row, check_output, read_jsonl
from kinject.errors import InputError
from kinject.report.formatting import arm_names, escape_markdown, format_name, format_text, format_way
from kinject.types import Cell

CHANGES = ("right to wrong", "wrong to right")
_SHOWN = 5  # of each change of an arm on a question set
_LONGEST = 2_000  # characters of a passage


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a question; `marks` say whether it is right and who chose it."""

    text: str
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flip:
    """One question whose answer changed, with what stood before it."""

    question: str
    about: str
    choices: tuple[Choice, ...]
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The first few flips of one arm on one question set in one direction, of `n`."""

    title: str
    change: str
    n: int
    shown: tuple[Flip, ...]

    @property
    def said(self) -> str:
        """How many are shown of how many: ``5 of 54 shown``."""
        return f"{len(self.shown)} of {self.n:,} shown" if len(self.shown) < self.n else f"all {self.n:,} shown"


@dataclass(frozen=True, slots=True)
class Flips:
    """Everything that changed, in groups; `is_known` is False where the run has no flips.jsonl."""

    groups: tuple[Group, ...]
    is_known: bool

    @property
    def said(self) -> str:
        """What stands here, in one sentence."""
        if not self.groups:
            return "No arm answered a question otherwise than base: nothing became right, nothing wrong."
        most = f"At most {_SHOWN} of each kind are shown"
        return f"{most}; flips.jsonl in the run folder holds all {sum(group.n for group in self.groups):,}."


NO_FLIPS = Flips((), False)


def read_flips(path: Path, cells: Sequence[Cell]) -> Flips:
    """Return what flips.jsonl at `path` holds, in the order and with the names of `cells`; `NO_FLIPS` without the file.

    Raises `InputError` (file:line) for a row of another shape, `DiskError` when the file cannot be read.
    """
    if not path.exists():
        return NO_FLIPS
    check_output(path, "Run kinject eval again.")
    rows: dict[tuple[Any, ...], list[Flip]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for number, row in read_jsonl(path):
        try:
            key = (row["question_set"], row["format"], row["shots"], row["arm"], row["k"], row["change"])
            if row["change"] not in CHANGES:
                raise ValueError(f"change is {row['change']!r}")
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= _SHOWN:
                rows.setdefault(key, []).append(_flip(row))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(
                f"{path}:{number}: no flip of this kinject ({error!r:.80}). Run kinject eval again."
            ) from error
    names, groups = arm_names(cells), []
    for cell in dict.fromkeys(_asked_once(cells)):
        for change in CHANGES:
            key = (cell.question_set, cell.format, cell.shots, cell.arm, cell.k, change)
            if key in rows:
                title = f"{names[cell.arm, cell.k]} on {format_name(cell.question_set)}, {format_way(cell)}"
                groups.append(Group(title, change, counts[key], tuple(rows[key])))
    return Flips(tuple(groups), True)


def _asked_once(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell for each way of asking: other scores are other readings of the same answers."""
    return [cell for cell in cells if cell.score == "sum"]


def _flip(row: Row) -> Flip:
    about = [f"{key.removesuffix('_id')} {row[key]}" for key in ("subject", "document_id") if row[key]]
    if row["truncated"]:
        about.append(f"{int(row['truncated'])} tokens cut to fit")
    who = ((row["gold"], "right"), (row["base_chosen"], "base"), (row["chosen"], "this arm"))
    choices = tuple(
        Choice(format_text(text), tuple(mark for place, mark in who if place == index))
        for index, text in enumerate(row["choices"])
    )
    passages = tuple(_passage(item) for item in row["passages"])
    about.append(f"id {row['question_id']}")
    return Flip(format_text(row["question"]), format_name(", ".join(about)), choices, passages)


def _passage(item: Mapping[str, Any]) -> str:
    text = str(item["text"])
    cut = f"\n[... {len(text) - _LONGEST:,} characters more]" if len(text) > _LONGEST else ""
    return format_text(text[:_LONGEST]) + cut


def markdown_flips(flips: Flips) -> list[str]:
    """Return the lines of the Markdown page, [] where it is not known what changed."""
    if not flips.is_known:
        return []
    lines = ["## Answers that changed", "", flips.said, ""]
    for group in flips.groups:
        lines += [f"### {escape_markdown(group.title)}: {group.change} ({group.said})", ""]
        for flip in group.shown:
            lines += [f"- {_one_line(flip.question)} ({escape_markdown(flip.about)})"]
            for choice in flip.choices:
                marks = f" **({', '.join(choice.marks)})**" if choice.marks else ""
                lines += [f"  - {_one_line(choice.text)}{marks}"]
            lines += [f"  - context: {_one_line(passage)}" for passage in flip.passages]
        lines += [""]
    return lines


def _one_line(text: str) -> str:
    return escape_markdown(" / ".join(line for line in text.splitlines() if line.strip()))
