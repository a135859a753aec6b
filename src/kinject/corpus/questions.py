"""Question sets from files: kinject's own rows, MMLU's CSV and JSONL, ARC, SQuAD-like answers; and the plain prompt."""

from __future__ import annotations

import csv
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.documents.tables import text_lines
from kinject.disk import Row, content_id, read_jsonl
from kinject.errors import InputError
from kinject.types import Question

Layout = Literal["auto", "native", "mmlu", "arc", "squad"]

_MAX_FAULTS = 20
_CSV_SUFFIXES = ("_test", "_dev", "_val", ".test", ".dev", ".val")
_MOST_SHUFFLED = 1000  # answers of one document
_LABELS = ("id", "subject", "document_id", "fact_id")


def question_prompt(question: str) -> str:
    """Return the plain prompt of a question, ``Question: ...\\nAnswer:``; an answer follows after a space."""
    return f"Question: {question}\nAnswer:"


def read_questions(path: Path, layout: Layout = "auto", n_choices: int = 4) -> list[Question]:
    """Return the questions in the file `path`, in order; for layouts other than kinject's own see `read_rows`.

    Rows are ``{question, choices, answer, id?, subject?, document_id?, fact_id?}``; `answer` is the index of the correct
    choice, other keys are not read. A question without an id gets the hash of its text, choices and answer. Raises
    `DiskError` when the file cannot be read and `InputError` with every fault (file:line, the first 20) when it holds
    no question, or an unusable one.
    """
    reader = _Reader(path)
    try:
        for number, row in read_rows(path, layout, n_choices):
            _add_row(reader, number, row)
    except InputError as error:  # no JSON object on a line: nothing after it is read
        reader.add_faults(str(error))
    if reader.faults:
        more = [f"{path}: ... and {reader.n_more} more."] if reader.n_more else []
        raise InputError("\n".join([*reader.faults, *more]))
    if not reader.questions:
        raise InputError(f"{path}: holds no questions. Each row needs question, choices and answer.")
    return reader.questions


@dataclass
class _Reader:
    """The questions, the line of each id, and the faults read so far."""

    path: Path
    questions: list[Question] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    n_more: int = 0

    def add_faults(self, *faults: str) -> None:
        """Keep the first faults; count the others."""
        n_kept = max(_MAX_FAULTS - len(self.faults), 0)
        self.faults.extend(faults[:n_kept])
        self.n_more += len(faults[n_kept:])


def _add_row(reader: _Reader, number: int, row: Row) -> None:
    """Add the question on line `number`, or its faults."""
    where = f"{reader.path}:{number}"
    faults: list[str] = []

    def report(message: str) -> None:
        faults.append(f"{where}: {message}")

    question = _text(row, "question", report, needed=True)
    choices = _choices(row, report)
    answer = _answer(row, len(choices), report)
    row_id = row.get("id")
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        row = {**row, "id": str(row_id)}
    identity = _text(row, "id", report) if row_id is not None else content_id("question", question, choices, answer)
    rest = {key: _text(row, key, report) for key in ("subject", "document_id", "fact_id")}
    if faults:
        reader.add_faults(*faults)
        return
    if not identity:
        reader.add_faults(f"{where}: id: is empty. Give it a text, or leave it out.")
        return
    first = reader.lines.setdefault(identity, number)
    if first != number:
        problem = f"two questions have the id {identity!r}" if row_id is not None else "the same question occurs twice"
        reader.add_faults(f"{where}: {problem}, the first on line {first}. Each needs an id of its own.")
        return
    reader.questions.append(Question(identity, question, tuple(choices), answer, **rest))


def _text(row: Row, key: str, report: Callable[[str], None], *, needed: bool = False) -> str:
    """Return the string at `key`; "" (and a fault) if it is of another type, or missing although needed."""
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
        repeated = sorted(choice for choice, n in Counter(value).items() if n > 1)
        if empty:
            report(f"choices: choice {empty[0]} is empty. Every choice must hold a text.")
        elif repeated:
            report(f"choices: {repeated[0]!r} occurs twice. Every choice must differ from the others.")
        return value
    return []


def _answer(row: Row, n_choices: int, report: Callable[[str], None]) -> int:
    """Return the index of the correct choice, or 0 after reporting why it cannot be one."""
    value = row.get("answer")
    allowed = f"0 to {n_choices - 1}" if n_choices else "from 0"
    if value is None:
        report(f"answer: missing. It is the index of the correct choice ({allowed}).")
    elif isinstance(value, bool) or not isinstance(value, int):
        report(f"answer: found {value!r}, expected the index of the correct choice ({allowed}).")
    elif n_choices and not 0 <= value < n_choices:
        report(f"answer: found {value}, but with {n_choices} choices it can be {allowed}.")
    else:
        return value
    return 0


def read_rows(path: Path, layout: Layout = "auto", n_choices: int = 4) -> Iterator[tuple[int, Row]]:
    """Yield (line, row in kinject's own layout) of the question file `path`.

    ``auto`` finds the layout by the file's suffix and the keys of each row: ``.csv`` is MMLU's (question, options,
    letter; no header; the subject is the file's name), a row with `answerKey` is ARC's, one with `answers` is SQuAD-like
    (`choices` are then the first answer and `n_choices` - 1 answers to other questions, drawn from the same paragraph or
    title first, the same ones each time). With ``mmlu`` a letter as `answer` becomes its index. A row that does not fit
    is passed on unchanged, for `read_questions` to report. Raises `DiskError` when the file cannot be read, `InputError`
    for a damaged line.
    """
    if path.suffix == ".csv":
        yield from _csv_rows(path)
        return
    squad_rows: list[tuple[int, Row]] = []
    for number, row in read_jsonl(path):
        if layout == "squad" or (layout == "auto" and "answers" in row and "choices" not in row):
            squad_rows.append((number, row))
        elif layout == "arc" or (layout == "auto" and "answerKey" in row):
            yield number, _from_arc(row)
        else:
            yield number, _with_index(row) if layout == "mmlu" else row
    yield from _with_distractors(squad_rows, n_choices)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    subject = path.stem
    for suffix in _CSV_SUFFIXES:
        subject = subject.removesuffix(suffix)
    reader = csv.reader(text_lines(path))
    try:
        for cells in reader:
            number = reader.line_num
            if len(cells) < 4 or not _is_letter(cells[-1].strip(), len(cells) - 2):
                found = f"found {len(cells)} cells, the last {cells[-1:]!r:.80}"
                raise InputError(
                    f"{path}:{number}: {found}, expected question, options, and the letter of the correct one."
                )
            row = {"question": cells[0], "choices": cells[1:-1], "answer": cells[-1].strip(), "subject": subject}
            yield number, _with_index(row)
    except csv.Error as error:
        raise InputError(
            f"{path}:{reader.line_num}: not CSV: {error}. Quote cells that hold quotes or line ends."
        ) from error


def _is_letter(text: str, n: int) -> bool:
    return len(text) == 1 and 0 <= ord(text) - ord("A") < n


def _with_index(row: Row) -> Row:
    """Return `row` with a letter as `answer` replaced by its index."""
    answer, choices = row.get("answer"), row.get("choices")
    if isinstance(answer, str) and isinstance(choices, list) and _is_letter(answer.strip(), len(choices)):
        return {**row, "answer": ord(answer.strip()) - ord("A")}
    return row


def _from_arc(row: Row) -> Row:
    """Return a row of ARC in kinject's layout, from its authors' files (`question.stem`) or the hub's (`choices.text`)."""
    question: Any = row.get("question")
    stem = question.get("stem") if isinstance(question, dict) else question
    choices: Any = question.get("choices") if isinstance(question, dict) else row.get("choices")
    if isinstance(choices, dict):
        texts, labels = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and all(isinstance(item, dict) for item in choices):
        texts, labels = [item.get("text") for item in choices], [item.get("label") for item in choices]
    else:
        texts, labels = choices, None
    key = row.get("answerKey")
    answer = labels.index(key) if isinstance(labels, list) and key in labels else key
    return {**{k: v for k, v in row.items() if k in _LABELS}, "question": stem, "choices": texts, "answer": answer}


def _with_distractors(rows: Sequence[tuple[int, Row]], n_choices: int) -> Iterator[tuple[int, Row]]:
    """Yield rows with `answers` as multiple choice: wrong options are correct answers to other questions."""
    firsts = [_first_answer(row) for _, row in rows]
    by_document: dict[str, list[str]] = {}
    for (_, row), first in zip(rows, firsts, strict=True):
        if first:
            by_document.setdefault(_document(row), []).append(first)
    everywhere = list(dict.fromkeys(first for first in firsts if first))
    by_document = {document: list(dict.fromkeys(answers)) for document, answers in by_document.items()}
    for (number, row), first in zip(rows, firsts, strict=True):
        if not first:
            continue  # SQuAD 2 has questions without an answer: no choice would be correct
        rng = random.Random(_seed(row, first))
        correct = {str(text).strip().lower() for text in _answers(row)}
        near = _shuffled(by_document[_document(row)], rng, n_choices + len(correct))
        far = rng.sample(everywhere, min(len(everywhere), n_choices + len(correct) + len(near)))
        wrong: dict[str, str] = {}
        for text in (*near, *far):
            if text.strip().lower() not in correct:
                wrong.setdefault(text.strip().lower(), text)
        choices = [first, *list(wrong.values())[: n_choices - 1]]
        rng.shuffle(choices)
        labels = {key: row[key] for key in _LABELS if key in row}
        yield number, {
            "document_id": _document(row), **labels,
            "question": row.get("question"), "choices": choices, "answer": choices.index(first),
        }  # fmt: skip


def _shuffled(texts: Sequence[str], rng: random.Random, n_needed: int) -> list[str]:
    """Return `texts` shuffled; of very many only as many as needed, so that a question costs little."""
    if len(texts) > _MOST_SHUFFLED:
        return rng.sample(texts, min(n_needed, len(texts)))
    shuffled = list(texts)
    rng.shuffle(shuffled)
    return shuffled


def _answers(row: Row) -> list[Any]:
    answers: Any = row.get("answers")
    if isinstance(answers, dict):  # the hub's layout: {"text": [...], "answer_start": [...]}
        answers = answers.get("text")
    if isinstance(answers, list):
        return [item.get("text") if isinstance(item, dict) else item for item in answers]
    return []


def _first_answer(row: Row) -> str:
    return next((text for text in _answers(row) if isinstance(text, str) and text.strip()), "")


def _document(row: Row) -> str:
    """Return the name of the paragraph: document_id, paragraph, context_id, or the title."""
    for key in ("document_id", "paragraph", "context_id", "title"):
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _seed(row: Row, first: str) -> int:
    text = f"{row.get('id', '')}\0{row.get('question', '')}\0{first}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
