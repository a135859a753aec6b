"""Question files of other makers as rows of kinject's own: MMLU's CSV and JSONL, ARC, SQuAD-like answers."""

from __future__ import annotations

import csv
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from kinject.corpus.readers_rows import text_lines
from kinject.disk import Row, read_jsonl
from kinject.errors import InputError

Layout = Literal["auto", "native", "mmlu", "arc", "squad"]

_CSV_SUFFIXES = ("_test", "_dev", "_val", ".test", ".dev", ".val")
_MOST_SHUFFLED = 1000  # answers of one document


def read_rows(path: Path, layout: Layout = "auto", n_choices: int = 4) -> Iterator[tuple[int, Row]]:
    """Yield (line, row in kinject's own layout) of the question file `path`.

    ``auto`` tells layouts apart by the file's ending and the keys of each row: ``.csv`` is MMLU's (question, options,
    letter; no header; the subject is the file's name), a row with `answerKey` is ARC's, one with `answers` is SQuAD-like
    (`choices` are then the first answer and `n_choices` - 1 answers to other questions, drawn from the same paragraph or
    title first, the same ones each time). With ``mmlu`` a letter as `answer` is its place. A row that does not fit is
    passed on as it is, for the reader's own faults. Raises `DiskError` when the file cannot be read, `InputError` for
    a damaged line.
    """
    if path.suffix == ".csv":
        yield from _csv_rows(path)
        return
    answered: list[tuple[int, Row]] = []
    for number, row in read_jsonl(path):
        if layout == "squad" or (layout == "auto" and "answers" in row and "choices" not in row):
            answered.append((number, row))
        elif layout == "arc" or (layout == "auto" and "answerKey" in row):
            yield number, _from_arc(row)
        else:
            yield number, _with_index(row) if layout == "mmlu" else row
    yield from _with_distractors(answered, n_choices)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    subject = path.stem
    for suffix in _CSV_SUFFIXES:
        subject = subject.removesuffix(suffix)
    reader = csv.reader(text_lines(path))
    try:
        for cells in reader:
            number = reader.line_num
            if len(cells) < 4 or not _is_letter(cells[-1].strip(), len(cells) - 2):
                what = f"found {len(cells)} cells, the last {cells[-1:]!r:.80}"
                raise InputError(
                    f"{path}:{number}: {what}, expected question, options, and the letter of the right one."
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
    """Return `row` with a letter as `answer` turned into its place."""
    answer, choices = row.get("answer"), row.get("choices")
    if isinstance(answer, str) and isinstance(choices, list) and _is_letter(answer.strip(), len(choices)):
        return {**row, "answer": ord(answer.strip()) - ord("A")}
    return row


def _from_arc(row: Row) -> Row:
    """Return a row of ARC as its authors publish it (`question.stem`), or as the hub holds it (`choices.text`)."""
    asked: Any = row.get("question")
    stem = asked.get("stem") if isinstance(asked, dict) else asked
    listed: Any = asked.get("choices") if isinstance(asked, dict) else row.get("choices")
    if isinstance(listed, dict):
        texts, labels = listed.get("text"), listed.get("label")
    elif isinstance(listed, list) and all(isinstance(item, dict) for item in listed):
        texts, labels = [item.get("text") for item in listed], [item.get("label") for item in listed]
    else:
        texts, labels = listed, None
    key = row.get("answerKey")
    answer = labels.index(key) if isinstance(labels, list) and key in labels else key
    return {**{k: v for k, v in row.items() if k in _KEPT}, "question": stem, "choices": texts, "answer": answer}


_KEPT = ("id", "subject", "document_id", "fact_id")


def _with_distractors(rows: Sequence[tuple[int, Row]], n_choices: int) -> Iterator[tuple[int, Row]]:
    """Yield rows with `answers` as multiple choice: wrong options are right answers to other questions."""
    firsts = [_first_answer(row) for _, row in rows]
    by_document: dict[str, list[str]] = {}
    for (_, row), first in zip(rows, firsts, strict=True):
        if first:
            by_document.setdefault(_document(row), []).append(first)
    everywhere = list(dict.fromkeys(first for first in firsts if first))
    by_document = {document: list(dict.fromkeys(own)) for document, own in by_document.items()}
    for (number, row), first in zip(rows, firsts, strict=True):
        if not first:
            continue  # SQuAD 2 has questions without an answer: there is no right choice among them
        own = random.Random(_seed(row, first))
        right = {str(text).strip().lower() for text in _answers(row)}
        near = _in_any_order(by_document[_document(row)], own, n_choices + len(right))
        far = own.sample(everywhere, min(len(everywhere), n_choices + len(right) + len(near)))
        wrong: dict[str, str] = {}
        for text in (*near, *far):
            if text.strip().lower() not in right:
                wrong.setdefault(text.strip().lower(), text)
        choices = [first, *list(wrong.values())[: n_choices - 1]]
        own.shuffle(choices)
        kept = {key: row[key] for key in _KEPT if key in row}
        yield number, {
            "document_id": _document(row), **kept,
            "question": row.get("question"), "choices": choices, "answer": choices.index(first),
        }  # fmt: skip


def _in_any_order(texts: Sequence[str], draw: random.Random, n_needed: int) -> list[str]:
    """Return `texts` shuffled; of very many as many as are needed, or each question would cost all the others."""
    if len(texts) > _MOST_SHUFFLED:
        return draw.sample(texts, min(n_needed, len(texts)))
    shuffled = list(texts)
    draw.shuffle(shuffled)
    return shuffled


def _answers(row: Row) -> list[Any]:
    found: Any = row.get("answers")
    if isinstance(found, dict):  # the hub's layout: {"text": [...], "answer_start": [...]}
        found = found.get("text")
    if isinstance(found, list):
        return [item.get("text") if isinstance(item, dict) else item for item in found]
    return []


def _first_answer(row: Row) -> str:
    return next((text for text in _answers(row) if isinstance(text, str) and text.strip()), "")


def _document(row: Row) -> str:
    """Return what names the paragraph: document_id, paragraph, context_id, or the title."""
    for key in ("document_id", "paragraph", "context_id", "title"):
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _seed(row: Row, first: str) -> int:
    text = f"{row.get('id', '')}\0{row.get('question', '')}\0{first}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
