"""The answers that changed: read from flips.jsonl, all of them as data for the page's script, the first few as a table.

All text comes from question files and documents: the page shows it as text only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kinject.disk import Row, check_output, read_jsonl
from kinject.errors import InputError
from kinject.report.formatting import format_name, format_prompt, format_text
from kinject.report.view import View, arm_label
from kinject.results import PromptFormat

CHANGES = {
    "right to wrong": False, "wrong to right": True, "right to abstained": False, "abstained to right": True,
    "abstained to wrong": False, "wrong to abstained": True,
}  # fmt: skip
"""Change of an answer -> whether that is good: to decline is better than to be wrong."""
MOST = 50_000
"""Changed answers in a page; a browser holds as many without a pause."""
_SHOWN = 5  # of each change of an arm on a question set, where no script runs
_MOST_SHOWN = 200  # of all, where no script runs
_LONGEST = 2_000  # characters of a passage


@dataclass(frozen=True, slots=True)
class ChangedQuestion:
    """A question that some arm answered differently; `gold` is the index of the correct choice."""

    question_set: str
    document: str
    subject: str
    id: str
    text: str
    choices: tuple[str, ...]
    gold: int

    @property
    def about(self) -> str:
        """The question's subject and id, in words."""
        return (f"subject {self.subject}, " if self.subject else "") + f"id {self.id}"


@dataclass(frozen=True, slots=True)
class Flip:
    """One answer of one arm that changed. `chosen` and `base_chosen` are indices of the choices, None without a choice.

    `log_probs` and `base_log_probs` have one number a choice, means over seeds. `seeds` are the trainings that answered
    correctly, and all; empty with one training. `passages` preceded the question.
    """

    question: ChangedQuestion
    arm: str
    prompt: str
    change: str
    chosen: int | None
    base_chosen: int | None
    log_probs: tuple[float | None, ...]
    base_log_probs: tuple[float | None, ...]
    truncated: int
    seeds: tuple[int, ...]
    passages: tuple[str, ...]

    @property
    def has_log_probs(self) -> bool:
        """Whether choices were compared; of written answers the choices are the accepted texts and both answers."""
        return any(value is not None for value in (*self.log_probs, *self.base_log_probs))

    @property
    def is_good(self) -> bool:
        """Whether the answer became better."""
        return CHANGES[self.change]

    @property
    def notes(self) -> str:
        """The seeds, and the tokens that were cut, in words."""
        notes = ["correct in {} of {} seeds".format(*self.seeds)] if self.seeds else []
        return ", ".join([*notes, *([f"{self.truncated:,} tokens cut to fit"] if self.truncated else [])])

    def choice_lines(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield text, marks (``correct``, ``base`` and ``this arm``, the last two chose it) and log-probs of each choice."""
        marks = ((self.question.gold, "correct"), (self.base_chosen, "base"), (self.chosen, "this arm"))
        for index, text in enumerate(self.question.choices):
            pair = [values[index] if index < len(values) else None for values in (self.base_log_probs, self.log_probs)]
            numbers = (
                " → ".join("–" if value is None else f"{value:.2f}" for value in pair) if self.has_log_probs else ""
            )
            yield text, tuple(mark for marked, mark in marks if marked == index), numbers


@dataclass(frozen=True, slots=True)
class Flips:
    """The answers that changed, by arm and question set in the order of the results; `n` counts those of the file."""

    rows: tuple[Flip, ...]
    n: int

    @property
    def shown(self) -> tuple[Flip, ...]:
        """The first few of each arm, question set and direction: a page without its script holds these."""
        groups = groupby(self.rows, lambda row: (row.question.question_set, row.arm, row.prompt, row.change))
        return tuple(row for _, group in groups for row in tuple(group)[:_SHOWN])[:_MOST_SHOWN]

    @property
    def summary(self) -> str:
        """One sentence on the changed answers of the page."""
        if not self.rows:
            return "No arm answered a question differently from base: nothing became right, nothing wrong."
        ends = [row.change.rpartition(" ")[2] for row in self.rows]
        counts = {name: ends.count(name) for name in ("right", "wrong", "abstained")}
        named = [f"{n:,} became {name}" for name, n in counts.items() if n or name != "abstained"]
        text = f"{len(self.rows):,} answers changed: {', '.join(named).replace('became abstained', 'now abstain')}."
        if len(self.rows) < self.n:
            text += f" These are the first {len(self.rows):,} of {self.n:,}; flips.jsonl in the run folder holds all."
        return text

    @property
    def excerpt(self) -> str:
        """One sentence for a reader who sees `shown` alone."""
        n, few = len(self.rows), len(self.shown)
        return f"The first {few:,} of {n:,}, at most {_SHOWN} of each kind." if few < n else ""

    def as_markup(self) -> Any:
        """Return all rows as JSON for the page's script, texts and questions once each; nothing in it is read as markup."""
        from markupsafe import Markup

        texts: dict[str, int] = {}
        arms: dict[str, int] = {}
        prompts: dict[str, int] = {}
        questions: dict[ChangedQuestion, int] = {}

        def index(table: dict[Any, int], value: Any) -> int:
            return table.setdefault(value, len(table))

        rows = [
            [
                index(questions, row.question), index(arms, row.arm), index(prompts, row.prompt),
                list(CHANGES).index(row.change), row.chosen, row.base_chosen, _rounded(row.log_probs),
                _rounded(row.base_log_probs), [index(texts, text) for text in row.passages], row.notes,
            ] for row in self.rows
        ]  # fmt: skip
        question_rows = [[q.question_set, q.document, q.text, q.choices, q.gold, q.about] for q in questions]
        data = {"changes": list(CHANGES), "good": list(CHANGES.values()),
                "arms": list(arms), "prompts": list(prompts), "texts": list(texts),
                "questions": question_rows, "rows": rows}  # fmt: skip
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - no tag begins without that character


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 3) for value in values]


def read_flips(path: Path, view: View) -> Flips | None:
    """Return the flips in `path` (flips.jsonl), in the order and with the names of the results; None without the file.

    Raises `InputError` (file:line) for a row of another shape, `DiskError` when the file cannot be read.
    """
    if not path.exists():
        return None
    check_output(path, "Run it again.")
    labels = _labels(view)
    groups: dict[tuple[Any, ...], list[Flip]] = {(*key, change): [] for key in labels for change in CHANGES}
    reader = _Reader()
    n = 0
    for number, row in read_jsonl(path):
        try:
            arm = (row.get("model", view.report.models[0]), row["arm"], row["k"])
            key = (*arm, row["question_set"], row["format"], row["shots"])
            if row["change"] not in CHANGES:
                raise ValueError(f"change is {row['change']!r}")
            if key in labels:
                n += 1
                if n <= MOST:
                    groups[*key, row["change"]].append(reader.flip(row, *labels[key]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(f"{path}:{number}: not a row of flips.jsonl ({error!r:.80}). Run it again.") from error
    return Flips(tuple(flip for group in groups.values() for flip in group), n)


def _labels(view: View) -> dict[tuple[Any, ...], tuple[str, str]]:
    """Return (model, arm, K, set, format, shots) -> names of the arm and of the prompt, in the order of the results."""
    labels: dict[tuple[Any, ...], tuple[str, str]] = {}
    for result in view.report.results:
        arm = f"{result.arm}+rag" if result.k else result.arm
        name = arm_label(result) + (f" ({format_name(result.model)})" if view.several_models else "")
        form = result.prompt_format if view.is_study else PromptFormat(result.format, result.shots)  # it compares sums
        prompt = format_prompt(form)
        key = (result.model, arm, result.k, result.question_set, result.format, result.shots)
        labels.setdefault(key, (name, prompt))
    return labels


class _Reader:
    """Makes flips from rows; a question or passage that comes again is formatted once."""

    def __init__(self) -> None:
        self._passages: dict[str, str] = {}
        self._questions: dict[tuple[Any, ...], ChangedQuestion] = {}

    def flip(self, row: Row, arm: str, prompt: str) -> Flip:
        """Return the flip of `row`. Raises what a row of another shape causes."""
        return Flip(
            self._question(row), arm, prompt, row["change"], row["chosen"], row["base_chosen"], _numbers(row["log_probs"]),
            _numbers(row["base_log_probs"]), int(row["truncated"]), tuple(map(int, row.get("seeds", ()))),
            tuple(map(self._passage, row["passages"])),
        )  # fmt: skip

    def _question(self, row: Row) -> ChangedQuestion:
        key = (row["question_set"], row["question_id"], row["question"], tuple(row["choices"]), row["gold"])
        if key not in self._questions:
            names = [
                format_name(str(row[name] or "")) for name in ("question_set", "document_id", "subject", "question_id")
            ]
            choices = tuple(map(format_text, row["choices"]))
            self._questions[key] = ChangedQuestion(names[0], names[1], names[2], names[3], format_text(row["question"]), choices,
                                         int(row["gold"]))  # fmt: skip
        return self._questions[key]

    def _passage(self, item: Mapping[str, Any]) -> str:
        text = str(item["text"])
        if text not in self._passages:
            cut = f"\n[... {len(text) - _LONGEST:,} characters more]" if len(text) > _LONGEST else ""
            self._passages[text] = format_text(text[:_LONGEST]) + cut
        return self._passages[text]


def _numbers(values: Sequence[float | None]) -> tuple[float | None, ...]:
    return tuple(None if value is None else float(value) for value in values)
