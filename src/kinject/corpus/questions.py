"""Question sets from files: kinject's own rows, MMLU's CSV and JSONL, ARC, SQuAD-like answers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.checks import check_names
from kinject.corpus.gold_answers import GoldIndex
from kinject.corpus.grading import plain_text
from kinject.corpus.rows import LineFaults
from kinject.corpus.squad import normalize_answer
from kinject.disk import Row, content_id, read_jsonl
from kinject.documents.rows import csv_rows
from kinject.errors import InputError
from kinject.terminal import format_count, show
from kinject.types import Message, Question

Layout = Literal["auto", "open"]

_N_CHOICES = 4
"""Choices of a question that is made from answers."""
# MMLU's files are named by subject and split: abstract_algebra_test.csv.
_CSV_SUFFIXES = ("_test", "_dev", "_val", ".test", ".dev", ".val")
_MOST_SHUFFLED = 1000  # answers of one document
_LABELS = ("id", "subject", "document_id", "fact_id", "about", "messages")
"""Keys that a row of any layout may have beside its question and answers."""
_NO_CHECKS: dict[str, Any] = {}
"""The checks of most questions: an empty dictionary for each takes 64 bytes."""


def read_questions(
    path: Path, layout: Layout = "auto", golds: GoldIndex | None = None
) -> list[Question]:
    """Return the questions in the file `path`, in order.

    Rows are ``{question, choices, answer, id?, subject?, document_id?, fact_id?, about?}``;
    `answer` is the index of the correct choice, other keys are not read. An open question has
    ``answers``, the accepted texts, instead of choices (or beside them), or ``checks`` of its
    answer (an object); ``messages`` are the turns of a chat before it, as ``{role, content}``. A
    question without an id gets the hash of its text, choices and answer. For other layouts see
    `_rows`. `golds` has the golds of files that belong to this one. A question that repeats another
    one's text and choices under another id is left out. Raises `DiskError` when the file cannot be
    read and `InputError` with the faults of its rows (file:line, the first 20) when it holds no
    question, an unusable one, or one question with two golds.
    """
    faults, golds = LineFaults(), golds or GoldIndex()
    questions: list[Question] = []
    contents: set[bytes] = set()
    lines: dict[str, int] = {}
    n_repeated = 0
    try:
        for number, row in _rows(path, layout, faults):
            location = f"{path}:{number}"
            try:
                question = _question(row)
                _check_id(question, number, lines, has_id=row.get("id") is not None)
                # Behind other turns, or with other checks, the same words are another question.
                if not question.checks and not question.messages:
                    golds.add(question, location)
            except InputError as error:
                faults.add(f"{location}: {error}")
                continue
            n_before = len(contents)
            contents.add(question_content(question))
            if len(contents) > n_before:
                questions.append(question)
            n_repeated += len(contents) == n_before
    except InputError as error:  # no JSON object on a line: nothing after it is read
        faults.add(str(error))
    faults.raise_if_any()
    if not questions:
        raise InputError(
            f"{path}: holds no questions. "
            "Each row needs question, and choices and answer, or answers."
        )
    if n_repeated:
        _warn(
            f"{path}: questions that repeat another one under another id: {n_repeated}; each "
            "counts once"
        )
    return questions


def about_sets(sets: Mapping[str, Sequence[Question]]) -> dict[str, str]:
    """Return the name of each question set whose questions are all of one kind, with its words."""
    found = {}
    for name, questions in sets.items():
        kinds = {question.about for question in questions}
        if len(kinds) == 1 and kinds != {""}:
            found[name] = kinds.pop()
    return found


def _check_id(question: Question, number: int, lines: dict[str, int], *, has_id: bool) -> None:
    """Raise `InputError` if another line has the id; `lines` are those of earlier questions by
    id."""
    first = lines.setdefault(question.id, number)
    if first != number:
        problem = "the same question occurs twice"
        if has_id:
            problem = f"two questions have the id {question.id!r}"
        raise InputError(f"{problem}, the first on line {first}. Each needs an id of its own.")


def _question(row: Row) -> Question:
    """Return the question in a row of kinject's own layout. Raises `InputError` for the first key
    that does not fit."""
    if row.get("question") is None:
        keys = ", ".join(map(repr, row)) or "no keys"
        raise InputError(f"question: missing. Found {keys}; needed are question, choices, answer.")
    question = _text(row, "question")
    if not plain_text(question):
        raise InputError("question: is empty. It must hold the question.")
    accepted: list[str] | None = None
    if row.get("answers") is not None:
        accepted = list(dict.fromkeys(_answers(row)))
    checks, before = _checks(row), _turns(row)
    choices: list[str] = []
    answer = 0
    gold: list[str] | int | None = accepted
    if row.get("choices") is not None or (accepted is None and not checks):
        choices = _choices(row)
        gold = answer = _answer(row, len(choices))
    # Behind other turns, or with other checks, the same words are another question.
    of_answer: tuple[Any, ...] = ()
    if checks or before:
        of_answer = (checks, before)
    identity = _identity(row, question, choices, gold, of_answer)
    labels = {key: _text(row, key) for key in ("subject", "document_id", "fact_id", "about")}
    return Question(
        id=identity,
        question=question,
        choices=tuple(choices),
        answer=answer,
        **labels,
        answers=tuple(accepted or ()),
        checks=checks,
        messages=before,
    )


def _identity(
    row: Row,
    question: str,
    choices: Sequence[str],
    gold: Sequence[str] | int | None,
    of_answer: tuple[Any, ...],
) -> str:
    """Return the id in a row, a number as text; without one the hash of the question's content."""
    row_id = row.get("id")
    if row_id is None:
        return content_id("question", question, choices, gold, *of_answer)
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        return str(row_id)
    identity = _text(row, "id")
    if not identity:
        raise InputError("id: is empty. Give it a text, or leave it out.")
    return identity


def question_content(question: Question) -> bytes:
    """Return a hash of what makes two questions one, whatever their ids and documents: the text,
    the choices and the right one as people read them."""
    texts = {plain_text(text).casefold() for text in question.choices or question.answers}
    turns = [turn["content"] for turn in question.messages]
    gold = ""
    if question.choices:
        # Yes to a question on one document and no on another are two questions.
        gold = plain_text(question.choices[question.answer]).casefold()
    asked = plain_text(question.question).casefold()
    content = (asked, sorted(texts), gold, turns, question.checks)
    # 16 bytes: the texts themselves took twice the memory of the questions.
    data = repr(content).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


@cache
def _warn(line: str) -> None:
    """Print once which questions of a file are left out."""
    show(line, file=sys.stderr)


def _text(row: Row, key: str) -> str:
    """Return the text at `key`, "" without one."""
    value = row.get(key)
    if not isinstance(value, str | None):
        raise InputError(f"{key}: found {value!r}, expected a text.")
    if "\0" in (value or ""):
        raise InputError(
            f"{key}: a NUL character at position {str(value).index(chr(0))}. Take it out."
        )
    return value or ""


def _checks(row: Row) -> dict[str, Any]:
    """Return the checks of the answer; {} if there are none."""
    value = row.get("checks")
    if value is None:
        return _NO_CHECKS
    if not isinstance(value, dict) or not value:
        raise InputError(
            f"checks: found {value!r:.60}, expected an object, for example {{max_words: 20}}."
        )
    if row.get("choices") is not None:
        raise InputError(
            "checks: are for written answers, but the question has choices. Keep one of the two."
        )
    check_names(value)
    return value


def _turns(row: Row) -> tuple[Message, ...]:
    """Return the turns before the question: at most one of the system, then user and assistant in
    turn."""
    value = row.get("messages")
    if value is None:
        return ()
    turns = value if isinstance(value, list) else []
    roles = [
        turn.get("role")
        for turn in turns
        if isinstance(turn, dict) and isinstance(turn.get("content"), str)
    ]
    talk = list(roles)
    if roles[:1] == ["system"]:
        del talk[0]
    # An odd number of turns differs too, since half of it is rounded down.
    if not roles or len(roles) != len(turns) or talk != ["user", "assistant"] * (len(talk) // 2):
        raise InputError(
            "messages: expected the turns before the question, as {role, content}: system, if any, "
            "then user and assistant in turn; the question itself is the last turn of the user."
        )
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


def _choices(row: Row) -> list[str]:
    """Return the choices: texts that differ as people read them."""
    value = row.get("choices")
    if value is None:
        raise InputError("choices: missing. They are a list of at least two texts.")
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InputError(f"choices: found {value!r:.80}, expected a list of at least two texts.")
    if len(value) < 2:
        raise InputError(
            f"choices: found {len(value)}, expected at least two; "
            "a question with fewer measures nothing."
        )
    seen: set[str] = set()
    for index, choice in enumerate(value):
        plain = plain_text(choice)
        if not plain:
            raise InputError(f"choices: choice {index} is empty. Every choice must hold a text.")
        if "\0" in plain:
            raise InputError(f"choices: choice {index} holds a NUL character. Take it out.")
        if plain in seen:
            raise InputError(
                f"choices: {choice!r:.80} occurs twice. Every choice must differ from the others."
            )
        seen.add(plain)
    return value


def _answer(row: Row, n_choices: int) -> int:
    """Return the index of the correct choice."""
    value, allowed = row.get("answer"), f"0 to {n_choices - 1}"
    if value is None:
        raise InputError(f"answer: missing. It is the index of the correct choice ({allowed}).")
    # A bool is an int to isinstance: true would be the second choice.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(
            f"answer: found {value!r}, expected the index of the correct choice ({allowed})."
        )
    if not 0 <= value < n_choices:
        raise InputError(
            f"answer: found {value}, but with {format_count(n_choices, 'choice')} it can be "
            f"{allowed}."
        )
    return value


def _rows(path: Path, layout: Layout, faults: LineFaults) -> Iterator[tuple[int, Row]]:
    """Yield (line, row in kinject's own layout) of the question file `path`; rows of another shape
    are added to `faults`.

    The layout is found by the file's suffix and the keys of each row: ``.csv`` is MMLU's (question,
    options, letter; no header; the subject is the file's name), a letter as `answer` becomes its
    index, a row with `answerKey` is ARC's, one with `answers` is SQuAD-like (`choices` are then the
    first answer and answers to other questions, drawn from the same paragraph or title first, the
    same ones each time). With ``open`` a row with `answers`, or with `answer` as text, list of
    texts or TriviaQA's object, is an open question; an empty list means that the question has no
    answer.
    """
    answered: list[tuple[int, Row, list[str]]] = []
    read = _csv_rows if path.suffix.lower() == ".csv" else _flat_rows
    for number, row in read(path):
        try:
            if "answerKey" in row:
                row = _from_arc(row)
            elif "choices" in row:
                row = _with_index(row)
            elif layout == "open":
                row = _from_open(row)
            elif "answers" in row:
                answered.append((number, row, _answers(row)))
                continue
        except InputError as error:
            faults.add(f"{path}:{number}: {error}")
        else:
            yield number, row
    # Last, since wrong options are answers to all other questions.
    yield from _with_distractors(path, answered)


def _flat_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of `path`; the one object of SQuAD's own files (data, paragraphs, qas) as a
    row a question."""
    for number, row in read_jsonl(path):
        if not isinstance(row.get("data"), list):
            yield number, row
            continue
        try:
            for article in row["data"]:
                for index, paragraph in enumerate(article["paragraphs"]):
                    for question in paragraph["qas"]:
                        yield (
                            number,
                            {"document_id": f"{article.get('title', '')}#{index}", **question},
                        )
        except (KeyError, TypeError) as error:
            layout = "data: [{title, paragraphs: [{qas: [...]}]}]"
            fault = f"data: not SQuAD's layout, {layout} ({error!r:.60})"
            raise InputError(f"{path}:{number}: {fault}.") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    subject = path.stem
    for suffix in _CSV_SUFFIXES:
        subject = subject.removesuffix(suffix)
    for number, cells in csv_rows(path):
        # A question, two options and the letter at least.
        if len(cells) < 4 or not _is_letter(cells[-1].strip(), len(cells) - 2):
            actual = f"found {format_count(len(cells), 'cell')}, the last {cells[-1:]!r:.80}"
            expected = (
                "expected question, options, and the letter of the correct one, "
                "between commas, without a header"
            )
            raise InputError(f"{path}:{number}: {actual}, {expected}.")
        question, *choices = (cell.replace("\r\n", "\n") for cell in cells[:-1])
        gold = ord(cells[-1].strip()) - ord("A")
        yield number, {"question": question, "choices": choices, "answer": gold, "subject": subject}


def _is_letter(text: str, n: int) -> bool:
    return len(text) == 1 and 0 <= ord(text) - ord("A") < n


def _with_index(row: Row) -> Row:
    """Return `row` with a letter as `answer` replaced by its index, unless another choice is that
    very letter."""
    answer, choices = row.get("answer"), row.get("choices")
    if not isinstance(answer, str) or not isinstance(choices, list):
        return row
    letter = answer.strip()
    if not _is_letter(letter, len(choices)):
        return row
    index = ord(letter) - ord("A")
    if letter in choices[:index] + choices[index + 1 :]:
        return row
    return {**row, "answer": index}


def _from_arc(row: Row) -> Row:
    """Return a row of ARC in kinject's layout, from its authors' files (`question.stem`) or the
    hub's (`choices.text`).

    Raises `InputError` unless each text has a label, and `answerKey` is one of these.
    """
    stem: Any = row.get("question")
    choices: Any = row.get("choices")
    if isinstance(stem, dict):
        stem, choices = stem.get("stem"), stem.get("choices")
    try:
        if isinstance(choices, list):
            choices = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        texts, labels = choices["text"], choices["label"]
        if len({*labels}) < len(labels):
            raise ValueError("a label occurs twice")
        # By label: some of ARC's questions have 1 to 4 instead of A to D.
        gold = dict(zip(labels, range(len(texts)), strict=True))[row["answerKey"]]
    except (KeyError, TypeError, ValueError) as error:
        fault = f"choices: not ARC's layout ({type(error).__name__}: {error})"
        raise InputError(
            f"{fault}. Give each text a label, and one of these as answerKey."
        ) from error
    return {
        **{k: v for k, v in row.items() if k in _LABELS},
        "question": stem,
        "choices": texts,
        "answer": gold,
    }


def _with_distractors(
    path: Path, rows: Sequence[tuple[int, Row, list[str]]]
) -> Iterator[tuple[int, Row]]:
    """Yield rows with their answers as multiple choice: wrong options are correct answers to other
    questions."""
    by_document: dict[str, list[str]] = {}
    of_question: dict[tuple[str, str, str], tuple[int, set[str]]] = {}
    for number, row, texts in rows:
        if texts:
            by_document.setdefault(_document(row), []).append(texts[0])
            first_line, correct = of_question.setdefault(_same_question(row), (number, set()))
            new = set(map(_compared, texts))
            if correct and not correct & new:
                raise InputError(
                    f"{path}:{number}: answers: {texts[0]!r:.80} is not among those on line "
                    f"{first_line}, where the question is the same. Keep one."
                )
            correct |= new
    everywhere = list(dict.fromkeys(texts[0] for _, _, texts in rows if texts))
    by_document = {document: list(dict.fromkeys(texts)) for document, texts in by_document.items()}
    n_unanswered = sum(not texts for _, _, texts in rows)
    if n_unanswered:
        # SQuAD 2 has one for each with an answer.
        _warn(
            f"{path}: questions without an answer are left out: {n_unanswered}; no choice would "
            "be right (eval.formats: [generate] asks them)"
        )
    for number, row, texts in rows:
        if not texts:
            continue
        first = texts[0]
        rng = random.Random(_seed(row, first))
        correct = of_question[_same_question(row)][1]
        # As many more as are correct, so that enough are left without these.
        near = _shuffled(by_document[_document(row)], rng, _N_CHOICES + len(correct))
        far = rng.sample(everywhere, min(len(everywhere), _N_CHOICES + len(correct) + len(near)))
        wrong: dict[str, str] = {}
        for text in (*near, *far):
            compared = _compared(text)
            if compared not in correct:
                wrong.setdefault(compared, text)
        choices = [first, *list(wrong.values())[: _N_CHOICES - 1]]
        rng.shuffle(choices)
        labels = _labels(row)
        made = {"choices": choices, "answer": choices.index(first), "answers": texts}
        question = row.get("question")
        yield number, {"document_id": _document(row), **labels, "question": question, **made}


def _compared(text: str) -> str:
    """Return an answer as SQuAD compares it: "the Rhine" is no wrong option beside "Rhine"."""
    # Of an answer that is an article or a sign nothing would be left.
    return normalize_answer(text) or plain_text(text).lower()


def _shuffled(texts: Sequence[str], rng: random.Random, n_needed: int) -> list[str]:
    """Return `texts` shuffled; of very many only as many as needed, so that a question costs
    little."""
    # A shuffle for each question would take time that grows with the square of the questions.
    if len(texts) > _MOST_SHUFFLED:
        return rng.sample(texts, min(n_needed, len(texts)))
    shuffled = list(texts)
    rng.shuffle(shuffled)
    return shuffled


def _answers(row: Row) -> list[str]:
    """Return the correct answers of a SQuAD-like row, [] if there is none. Raises `InputError` for
    other shapes."""
    answers: Any = row.get("answers")
    if isinstance(answers, dict):  # the hub's layout: {"text": [...], "answer_start": [...]}
        answers = answers.get("text")
    if not isinstance(answers, list):
        raise InputError(f"answers: found {row.get('answers')!r:.80}, expected a list of texts.")
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in answers]
    wrong = [text for text in texts if not isinstance(text, str) or not plain_text(text)]
    if wrong:
        raise InputError(
            f"answers: found {wrong[0]!r:.60}, expected texts. Leave the list empty for no answer."
        )
    if "choices" not in row and row.get("answer") is not None and row["answer"] not in texts:
        fault = f"answer: found {row['answer']!r:.60}, which is not in answers"
        raise InputError(f"{fault}. Are those the choices? Call them so.")
    return texts


def _from_open(row: Row) -> Row:
    """Return a row of an open question in kinject's layout: SQuAD's, TriviaQA's (`answer.aliases`),
    NQ's (a list)."""
    if row.get("checks") is not None:
        return row
    if row.get("answers") is None:
        answer: Any = row.get("answer")
        if isinstance(answer, dict):
            aliases = answer.get("aliases") or []
            # Of a text each letter would be an answer.
            if not isinstance(aliases, list):
                raise InputError(
                    f"answer: aliases: found {aliases!r:.60}, expected a list of texts."
                )
            answer = [answer.get("value"), *aliases]
        if isinstance(answer, str):
            answer = [answer]
        row = {**row, "answers": answer, "answer": None}
    labels = _labels(row)
    return {
        "document_id": _document(row),
        **labels,
        "question": row.get("question"),
        "answers": _answers(row),
    }


def _labels(row: Row) -> Row:
    """Return the labels that a row has; null is none, and hides no title."""
    return {key: row[key] for key in _LABELS if row.get(key) is not None}


def _same_question(row: Row) -> tuple[str, str, str]:
    # Not read yet: the turns of a chat may be anything.
    return plain_text(str(row.get("question"))), _document(row), repr(row.get("messages"))


def _document(row: Row) -> str:
    """Return the name of the paragraph: document_id, paragraph, context_id, or the title."""
    for key in ("document_id", "paragraph", "context_id", "title"):
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _seed(row: Row, first: str) -> int:
    text = f"{row.get('id', '')}\0{row.get('question', '')}\0{first}"
    # Not hash(), which is another one for a text in each process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
