"""The answers that changed: read from flips.jsonl, a few of each arm for the page, the rest counted.

All text comes from question files and documents, so the pages escape it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import Row, check_output, read_jsonl
from kinject.errors import InputError
from kinject.report.formatting import escape_markdown, format_name, format_prompt, format_text
from kinject.report.view import arm_label
from kinject.results import ArmResult

CHANGES = ("right to wrong", "wrong to right")
_SHOWN = 5  # of each change of an arm on a question set
_LONGEST = 2_000  # characters of a passage


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a question; `marks` are of ``correct``, ``base`` and ``this arm`` (the last two chose it)."""

    text: str
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flip:
    """One question whose answer changed, with the passages before it."""

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
    def counts(self) -> str:
        """The number shown of all: ``5 of 54 shown``."""
        return f"{len(self.shown)} of {self.n:,} shown" if len(self.shown) < self.n else f"all {self.n:,} shown"


@dataclass(frozen=True, slots=True)
class Flips:
    """Every answer that changed, in groups."""

    groups: tuple[Group, ...]

    @property
    def summary(self) -> str:
        """One sentence on the flips that are shown."""
        if not self.groups:
            return "No arm answered a question differently from base: nothing became right, nothing wrong."
        most = f"At most {_SHOWN} of each kind are shown"
        return f"{most}; flips.jsonl in the run folder holds all {sum(group.n for group in self.groups):,}."


def read_flips(path: Path, results: Sequence[ArmResult]) -> Flips | None:
    """Return the flips in `path` (flips.jsonl), in the order and with the names of `results`; None without the file.

    Raises `InputError` (file:line) for a row of another shape, `DiskError` when the file cannot be read.
    """
    if not path.exists():
        return None
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
                f"{path}:{number}: not a row of flips.jsonl ({error!r:.80}). Run kinject eval again."
            ) from error
    groups = []
    for result in results:
        if result.score != "sum":
            continue  # other scores compare the same answers
        for change in CHANGES:
            arm = f"{result.arm}+rag" if result.k else result.arm
            key = (result.question_set, result.format, result.shots, arm, result.k, change)
            if key in rows:
                prompt = format_prompt(result.prompt_format)
                title = f"{arm_label(result)} on {format_name(result.question_set)}, {prompt}"
                groups.append(Group(title, change, counts[key], tuple(rows.pop(key))))
    return Flips(tuple(groups))


def _flip(row: Row) -> Flip:
    about = [f"{key.removesuffix('_id')} {row[key]}" for key in ("subject", "document_id") if row[key]]
    if row["truncated"]:
        about.append(f"{int(row['truncated'])} tokens cut to fit")
    marks = ((row["gold"], "correct"), (row["base_chosen"], "base"), (row["chosen"], "this arm"))
    choices = tuple(
        Choice(format_text(text), tuple(mark for marked, mark in marks if marked == index))
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
    """Return the lines of the section in Markdown."""
    lines = [flips.summary, ""]
    for group in flips.groups:
        lines += [f"### {escape_markdown(group.title)}: {group.change} ({group.counts})", ""]
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
