"""Question sets from files, every fault of a file told at once as file:line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kinject.corpus.question_layouts import Layout, read_rows
from kinject.disk import Row, content_id
from kinject.errors import InputError
from kinject.types import Question

_MOST_FAULTS = 20


@dataclass
class _Reading:
    """What was read so far: the questions, the line of each id, the faults."""

    path: Path
    questions: list[Question] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    n_more: int = 0

    def add_faults(self, *faults: str) -> None:
        """Note faults: the first in words, all in number."""
        n_told = max(_MOST_FAULTS - len(self.faults), 0)
        self.faults.extend(faults[:n_told])
        self.n_more += len(faults[n_told:])


def read_questions(path: Path, layout: Layout = "auto", n_choices: int = 4) -> list[Question]:
    """Return the questions in the file `path`, in order; other layouts than kinject's own as in `layouts.read_rows`.

    Rows are ``{question, choices, answer, id?, subject?, document_id?, fact_id?}``; `answer` is the index of the right
    choice, other keys are not read. A question without an id gets the hash of its text, choices and answer. Raises
    `DiskError` when the file cannot be read and `InputError` with every fault (file:line, the first 20) when it holds
    no question, or one that cannot be asked.
    """
    reading = _Reading(path)
    try:
        for number, row in read_rows(path, layout, n_choices):
            _read_row(reading, number, row)
    except InputError as error:  # a line that is no JSON object ends the reading, but not the telling
        reading.add_faults(str(error))
    if reading.faults:
        more = [f"{path}: ... and {reading.n_more} more."] if reading.n_more else []
        raise InputError("\n".join([*reading.faults, *more]))
    if not reading.questions:
        raise InputError(f"{path}: holds no questions. Each row needs question, choices and answer.")
    return reading.questions


def _read_row(reading: _Reading, number: int, row: Row) -> None:
    """Add the question on line `number`, or its faults."""
    where = f"{reading.path}:{number}"
    faults: list[str] = []

    def report(what: str) -> None:
        faults.append(f"{where}: {what}")

    question = _text(row, "question", report, needed=True)
    choices = _choices(row, report)
    answer = _answer(row, len(choices), report)
    given = row.get("id")
    if isinstance(given, int) and not isinstance(given, bool):
        row = {**row, "id": str(given)}
    identity = _text(row, "id", report) if given is not None else content_id("question", question, choices, answer)
    rest = {key: _text(row, key, report) for key in ("subject", "document_id", "fact_id")}
    if faults:
        reading.add_faults(*faults)
        return
    if not identity:
        reading.add_faults(f"{where}: id: is empty. Give it a text, or leave it out.")
        return
    first = reading.lines.setdefault(identity, number)
    if first != number:
        what = f"two questions have the id {identity!r}" if given is not None else "the same question stands twice"
        reading.add_faults(f"{where}: {what}, the first on line {first}. Each needs an id of its own.")
        return
    reading.questions.append(Question(identity, question, tuple(choices), answer, **rest))


def _text(row: Row, key: str, report: Callable[[str], None], *, needed: bool = False) -> str:
    """Return the string at `key`, or "" (and a fault when it is of another type, or needed and not there)."""
    value = row.get(key)
    if value is None and not needed:
        return ""
    if value is None:
        report(f"{key}: missing. Found {', '.join(map(repr, row)) or 'no keys'}; needed are question, choices, answer.")
        return ""
    if not isinstance(value, str):
        report(f"{key}: found {value!r}, expected a text.")
        return ""
    if needed and not value.strip():
        report(f"{key}: is empty. It must hold the question.")
    return value


def _choices(row: Row, report: Callable[[str], None]) -> list[str]:
    """Return the choices, or [] after reporting why they cannot be used."""
    value = row.get("choices")
    if value is None:
        report("choices: missing. They are a list of at least two texts.")
    elif not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        report(f"choices: found {value!r:.80}, expected a list of at least two texts.")
    elif len(value) < 2:
        report(f"choices: found {len(value)}, expected at least two; a question with fewer measures nothing.")
    else:
        empty = [index for index, choice in enumerate(value) if not choice.strip()]
        doubled = sorted(choice for choice, n in Counter(value).items() if n > 1)
        if empty:
            report(f"choices: choice {empty[0]} is empty. Every choice must hold a text.")
        elif doubled:
            report(f"choices: {doubled[0]!r} stands there twice. Every choice must differ from the others.")
        return value
    return []


def _answer(row: Row, n_choices: int, report: Callable[[str], None]) -> int:
    """Return the gold index, or 0 after reporting why it cannot be one."""
    value = row.get("answer")
    allowed = f"0 to {n_choices - 1}" if n_choices else "from 0"
    if value is None:
        report(f"answer: missing. It is the index of the right choice ({allowed}).")
    elif isinstance(value, bool) or not isinstance(value, int):
        report(f"answer: found {value!r}, expected the index of the right choice ({allowed}).")
    elif n_choices and not 0 <= value < n_choices:
        report(f"answer: found {value}, but with {n_choices} choices it can be {allowed}.")
    else:
        return value
    return 0
