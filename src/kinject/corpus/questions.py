"""Question sets from files: kinject's own rows, MMLU's CSV and JSONL, ARC, SQuAD-like answers; and the plain prompt."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.grading import GoldIndex, plain_text
from kinject.disk import Row, content_id, read_jsonl
from kinject.documents.rows import csv_rows
from kinject.errors import InputError
from kinject.terminal import show
from kinject.types import Message, Question

Layout = Literal["auto", "open"]

_MAX_FAULTS = 20
_CSV_SUFFIXES = ("_test", "_dev", "_val", ".test", ".dev", ".val")
_MOST_SHUFFLED = 1000  # answers of one document
_LABELS = ("id", "subject", "document_id", "fact_id")


def question_prompt(question: str) -> str:
    """Return the plain prompt of a question, ``Question: ...\\nAnswer:``; an answer follows after a space."""
    return f"Question: {question}\nAnswer:"


def choice_fault(choices: Sequence[str]) -> str:
    """Return why the texts `choices` are no choices of one question (empty, two that read the same, a NUL); else ""."""
    seen: set[str] = set()
    for index, choice in enumerate(choices):
        plain = plain_text(choice)
        if not plain:
            return f"choice {index} is empty. Every choice must hold a text."
        if "\0" in plain:
            return f"choice {index} holds a NUL character. Take it out."
        if plain in seen:
            return f"{choice!r:.80} occurs twice. Every choice must differ from the others."
        seen.add(plain)
    return ""


def read_questions(
    path: Path, layout: Layout = "auto", n_choices: int = 4, golds: GoldIndex | None = None
) -> list[Question]:
    """Return the questions in the file `path`, in order; for layouts other than kinject's own see `read_rows`.

    Rows are ``{question, choices, answer, id?, subject?, document_id?, fact_id?}``; `answer` is the index of the correct
    choice, other keys are not read. An open question has ``answers``, the accepted texts, instead of choices (or beside them),
    or ``checks`` of its answer (an object); ``messages`` are the turns of a chat before it, as ``{role, content}``.
    A question without an id gets the hash of its text, choices and answer. `golds` has
    the golds of files that belong to this one. A question that repeats another one's text and choices under another id is left
    out. Raises `DiskError` when the file cannot be read and `InputError` with every
    fault (file:line, the first 20) when it holds no question, an unusable one, or one question with two golds.
    """
    reader = _Reader(path, golds or GoldIndex())
    try:
        for number, row in read_rows(path, layout, n_choices):
            _add_row(reader, number, row)
    except InputError as error:  # no JSON object on a line: nothing after it is read
        reader.add_faults(str(error))
    if reader.faults:
        more = [f"{path}: ... and {reader.n_more} more."] if reader.n_more else []
        raise InputError("\n".join([*reader.faults, *more]))
    if not reader.questions:
        raise InputError(f"{path}: holds no questions. Each row needs question, and choices and answer, or answers.")
    if reader.n_repeated:
        _warn_of_repeated(path, reader.n_repeated)
    return reader.questions


@dataclass
class _Reader:
    """The questions, the line of each id, and the faults read so far."""

    path: Path
    golds: GoldIndex
    questions: list[Question] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    contents: set[Any] = field(default_factory=set)
    n_repeated: int = 0
    faults: list[str] = field(default_factory=list)
    n_more: int = 0

    def add_faults(self, *faults: str) -> None:
        """Keep the first faults; count the others."""
        n_kept = max(_MAX_FAULTS - len(self.faults), 0)
        self.faults.extend(faults[:n_kept])
        self.n_more += len(faults[n_kept:])


def _add_row(reader: _Reader, number: int, row: Row) -> None:
    """Add the question on line `number`, or its faults."""
    location = f"{reader.path}:{number}"
    faults: list[str] = []

    def report(message: str) -> None:
        faults.append(f"{location}: {message}")

    question = _text(row, "question", report, needed=True)
    accepted = _accepted(row, location, faults)
    checks, before = _checks(row, report), _turns(row, report)
    is_open = (accepted is not None or bool(checks)) and row.get("choices") is None
    choices = [] if is_open else _choices(row, report)
    answer = 0 if is_open else _answer(row, len(choices), report)
    row_id = row.get("id")
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        row = {**row, "id": str(row_id)}
    identity = (
        _text(row, "id", report) if row_id is not None
        else content_id("question", question, choices, accepted if is_open else answer, *((checks, before) if checks else ()))
    )  # fmt: skip
    labels = {key: _text(row, key, report) for key in ("subject", "document_id", "fact_id")}
    if faults:
        reader.add_faults(*faults)
        return
    if not identity:
        reader.add_faults(f"{location}: id: is empty. Give it a text, or leave it out.")
        return
    first = reader.lines.setdefault(identity, number)
    if first != number:
        problem = f"two questions have the id {identity!r}" if row_id is not None else "the same question occurs twice"
        reader.add_faults(f"{location}: {problem}, the first on line {first}. Each needs an id of its own.")
        return
    item = Question(
        identity, question, tuple(choices), answer, **labels, answers=tuple(accepted or ()), checks=checks, messages=before
    )  # fmt: skip
    conflict = "" if checks or before else reader.golds.conflict(item, location)
    content = _content(item)
    if conflict:
        reader.add_faults(f"{location}: {conflict}")
    elif content in reader.contents:
        reader.n_repeated += 1
    else:
        reader.contents.add(content)
        reader.questions.append(item)


def _content(question: Question) -> Any:
    """Return what makes two questions one, whatever their ids and documents: the text and the choices as people read them."""
    texts = frozenset(plain_text(text).casefold() for text in question.choices or question.answers)
    turns = tuple(turn["content"] for turn in question.messages)
    return plain_text(question.question).casefold(), texts, turns, repr(question.checks)


@cache
def _warn_of_repeated(path: Path, n: int) -> None:
    """Print once that questions of a file repeat others."""
    show(f"{path}: {n} questions repeat another one under another id; each counts once", file=sys.stderr)


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
    if needed and not plain_text(value):
        report(f"{key}: is empty. It must hold the question.")
    elif "\0" in value:
        report(f"{key}: a NUL character at position {value.index(chr(0))}. Take it out.")
    return value


def _checks(row: Row, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the checks of the answer; {} if there are none."""
    value = row.get("checks")
    if value is None:
        return {}
    if not isinstance(value, dict) or not value:
        report(f"checks: found {value!r:.60}, expected an object, for example {{max_words: 20}}.")
        return {}
    if row.get("choices") is not None:
        report("checks: are for written answers, but the question has choices. Keep one of the two.")
    return value


def _turns(row: Row, report: Callable[[str], None]) -> tuple[Message, ...]:
    """Return the turns before the question: at most one of the system, then user and assistant in turn."""
    value = row.get("messages")
    if value is None:
        return ()
    turns = value if isinstance(value, list) else []
    roles = [turn.get("role") for turn in turns if isinstance(turn, dict) and isinstance(turn.get("content"), str)]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if not roles or len(roles) != len(turns) or talk != ["user", "assistant"] * (len(talk) // 2):
        report(
            "messages: expected the turns before the question, as {role, content}: system, if any, then user and assistant in "
            "turn; the question itself is the last turn of the user."
        )
        return ()
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


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
        fault = choice_fault(value)
        if fault:
            report(f"choices: {fault}")
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


def _accepted(row: Row, location: str, faults: list[str]) -> list[str] | None:
    """Return the accepted texts of a row, None if it has none; adds a fault if they are not texts."""
    if row.get("answers") is None:
        return None
    try:
        return list(dict.fromkeys(_answers(row, location, with_choices="choices" in row)))
    except InputError as error:
        faults.append(str(error))
        return []


def read_rows(path: Path, layout: Layout = "auto", n_choices: int = 4) -> Iterator[tuple[int, Row]]:
    """Yield (line, row in kinject's own layout) of the question file `path`.

    The layout is found by the file's suffix and the keys of each row: ``.csv`` is MMLU's (question, options, letter; no
    header; the subject is the file's name), a letter as `answer` becomes its index, a row with `answerKey` is ARC's, one with
    `answers` is SQuAD-like (`choices` are then the first answer and `n_choices` - 1 answers to other questions, drawn from
    the same paragraph or title first, the same ones each time). With ``open`` a row with `answers`, or with `answer` as
    text, list of texts or TriviaQA's object, is an open question; an empty list means that the question has no answer.
    Raises `DiskError` when the file cannot be read, `InputError` for a damaged line and for a row whose gold is not clear;
    other faults of a row are left to `read_questions`.
    """
    if path.suffix.lower() == ".csv":
        yield from _csv_rows(path)
        return
    squad_rows: list[tuple[int, Row]] = []
    for number, row in _flat_rows(path):
        if "answerKey" in row:
            yield number, _from_arc(row, f"{path}:{number}")
        elif "choices" in row:
            yield number, _with_index(row)
        elif layout == "open":
            yield number, _from_open(row, f"{path}:{number}")
        elif "answers" in row:
            squad_rows.append((number, row))
        else:
            yield number, row
    yield from _with_distractors(path, squad_rows, n_choices)


def _flat_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of `path`; the one object of SQuAD's own files (data, paragraphs, qas) as a row a question."""
    for number, row in read_jsonl(path):
        if not isinstance(row.get("data"), list):
            yield number, row
            continue
        try:
            for article in row["data"]:
                for index, paragraph in enumerate(article["paragraphs"]):
                    for question in paragraph["qas"]:
                        yield number, {"document_id": f"{article.get('title', '')}#{index}", **question}
        except (KeyError, TypeError) as error:
            fault = f"data: not SQuAD's layout, data: [{{title, paragraphs: [{{qas: [...]}}]}}] ({error!r:.60})"
            raise InputError(f"{path}:{number}: {fault}.") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    subject = path.stem
    for suffix in _CSV_SUFFIXES:
        subject = subject.removesuffix(suffix)
    for number, cells in csv_rows(path):
        if len(cells) < 4 or not _is_letter(cells[-1].strip(), len(cells) - 2):
            actual = f"found {len(cells)} cells, the last {cells[-1:]!r:.80}"
            expected = "expected question, options, and the letter of the correct one, between commas, without a header"
            raise InputError(f"{path}:{number}: {actual}, {expected}.")
        question, *choices = (cell.replace("\r\n", "\n") for cell in cells[:-1])
        gold = ord(cells[-1].strip()) - ord("A")
        yield number, {"question": question, "choices": choices, "answer": gold, "subject": subject}


def _is_letter(text: str, n: int) -> bool:
    return len(text) == 1 and 0 <= ord(text) - ord("A") < n


def _with_index(row: Row) -> Row:
    """Return `row` with a letter as `answer` replaced by its index, unless another choice is that very letter."""
    answer, choices = row.get("answer"), row.get("choices")
    if isinstance(answer, str) and isinstance(choices, list) and _is_letter(answer.strip(), len(choices)):
        index = ord(answer.strip()) - ord("A")
        return row if answer.strip() in choices[:index] + choices[index + 1 :] else {**row, "answer": index}
    return row


def _from_arc(row: Row, location: str) -> Row:
    """Return a row of ARC in kinject's layout, from its authors' files (`question.stem`) or the hub's (`choices.text`).

    Raises `InputError` at `location` unless each text has a label, and `answerKey` is one of these.
    """
    stem: Any = row.get("question")
    choices: Any = row.get("choices")
    if isinstance(stem, dict):
        stem, choices = stem.get("stem"), stem.get("choices")
    try:
        if isinstance(choices, list):
            choices = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        texts, labels = choices["text"], choices["label"]
        gold = dict(zip(labels, range(len(texts)), strict=True))[row["answerKey"]]
    except (KeyError, TypeError, ValueError) as error:
        fault = f"choices: not ARC's layout ({type(error).__name__}: {error})"
        raise InputError(f"{location}: {fault}. Give each text a label, and one of these as answerKey.") from error
    return {**{k: v for k, v in row.items() if k in _LABELS}, "question": stem, "choices": texts, "answer": gold}


def _with_distractors(path: Path, rows: Sequence[tuple[int, Row]], n_choices: int) -> Iterator[tuple[int, Row]]:
    """Yield rows with `answers` as multiple choice: wrong options are correct answers to other questions."""
    answers = [_answers(row, f"{path}:{number}") for number, row in rows]
    by_document: dict[str, list[str]] = {}
    of_question: dict[tuple[str, str], tuple[int, set[str]]] = {}
    for (number, row), texts in zip(rows, answers, strict=True):
        if texts:
            by_document.setdefault(_document(row), []).append(texts[0])
            first_line, correct = of_question.setdefault(_same_question(row), (number, set()))
            new = {plain_text(text).lower() for text in texts}
            if correct and not correct & new:
                fault = (
                    f"answers: {texts[0]!r:.80} is not among those on line {first_line}, where the question is the same"
                )
                raise InputError(f"{path}:{number}: {fault}. Keep one.")
            correct |= new
    everywhere = list(dict.fromkeys(texts[0] for texts in answers if texts))
    by_document = {document: list(dict.fromkeys(texts)) for document, texts in by_document.items()}
    for (number, row), texts in zip(rows, answers, strict=True):
        if not texts:
            continue  # SQuAD 2 has questions without an answer: no choice would be correct
        first = texts[0]
        rng = random.Random(_seed(row, first))
        correct = of_question[_same_question(row)][1]
        near = _shuffled(by_document[_document(row)], rng, n_choices + len(correct))
        far = rng.sample(everywhere, min(len(everywhere), n_choices + len(correct) + len(near)))
        wrong: dict[str, str] = {}
        for text in (*near, *far):
            plain = plain_text(text).lower()
            if plain not in correct:
                wrong.setdefault(plain, text)
        choices = [first, *list(wrong.values())[: n_choices - 1]]
        rng.shuffle(choices)
        labels = {key: row[key] for key in _LABELS if key in row}
        yield number, {
            "document_id": _document(row), **labels,
            "question": row.get("question"), "choices": choices, "answer": choices.index(first), "answers": texts,
        }  # fmt: skip


def _shuffled(texts: Sequence[str], rng: random.Random, n_needed: int) -> list[str]:
    """Return `texts` shuffled; of very many only as many as needed, so that a question costs little."""
    if len(texts) > _MOST_SHUFFLED:
        return rng.sample(texts, min(n_needed, len(texts)))
    shuffled = list(texts)
    rng.shuffle(shuffled)
    return shuffled


def _answers(row: Row, location: str, *, with_choices: bool = False) -> list[str]:
    """Return the correct answers of a SQuAD-like row, [] if there is none. Raises `InputError` for other shapes."""
    answers: Any = row.get("answers")
    if isinstance(answers, dict):  # the hub's layout: {"text": [...], "answer_start": [...]}
        answers = answers.get("text")
    if not isinstance(answers, list):
        raise InputError(f"{location}: answers: found {row.get('answers')!r:.80}, expected a list of texts.")
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in answers]
    wrong = [text for text in texts if not isinstance(text, str) or not plain_text(text)]
    if wrong:
        raise InputError(
            f"{location}: answers: found {wrong[0]!r:.60}, expected texts. Leave the list empty for no answer."
        )
    if not with_choices and row.get("answer") is not None and row["answer"] not in texts:
        fault = f"answer: found {row['answer']!r:.60}, which is not in answers. Are those the choices? Call them so"
        raise InputError(f"{location}: {fault}.")
    return texts


def _from_open(row: Row, location: str) -> Row:
    """Return a row of an open question in kinject's layout: SQuAD's, TriviaQA's (`answer.aliases`), NQ's (a list)."""
    if row.get("checks") is not None:
        return row
    if row.get("answers") is None:
        answer: Any = row.get("answer")
        if isinstance(answer, dict):
            answer = [answer.get("value"), *(answer.get("aliases") or ())]
        row = {**row, "answers": [answer] if isinstance(answer, str) else answer, "answer": None}
    labels = {key: row[key] for key in _LABELS if key in row}
    return {
        "document_id": _document(row),
        **labels,
        "question": row.get("question"),
        "answers": _answers(row, location),
    }


def _same_question(row: Row) -> tuple[str, str]:
    return plain_text(str(row.get("question"))), _document(row)


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
