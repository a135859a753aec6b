"""Passages for questions: by words (BM25), by meaning, by both, or prepared; in an order that never depends on chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kinject.corpus.documents import read_documents
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import content_id, read_jsonl
from kinject.errors import InputError
from kinject.results import Recall
from kinject.types import Passage, Question


def read_contexts(path: Path, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    """Return prepared passages of each of `questions`, from rows ``{question_id, passages: [...]}``, the best first.

    A passage is a text or ``{text, id?, document_id?}``; one without an id gets the hash of its text. Raises
    `InputError` (file:line) for a row of another shape, and for a question that has no row.
    """
    found: dict[str, tuple[Passage, ...]] = {}
    for number, row in read_jsonl(path):
        asked, listed = row.get("question_id"), row.get("passages")
        if not isinstance(asked, str | int) or not isinstance(listed, list):
            raise InputError(f"{path}:{number}: expected question_id and passages (a list of texts).")
        found[str(asked)] = tuple(_prepared(item, f"{path}:{number}") for item in listed)
    missing = [question.id for question in questions if question.id not in found]
    if missing:
        raise InputError(
            f"{path}: no passages for {len(missing)} of {len(questions)} questions, such as {missing[0]!r}."
        )
    return [found[question.id] for question in questions]


def _prepared(item: object, where: str) -> Passage:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: passages: found {item!r:.60}, expected a text, or text with id and document_id.")
    given = item if isinstance(item, dict) else {}
    identity, document = given.get("id"), given.get("document_id")
    name = str(identity) if identity else content_id("context", text)
    return Passage(name, str(document or ""), 0, len(text), text)


def read_passages(paths: Sequence[Path], n_tokens: int) -> list[Passage]:
    """Return the passages of the documents in `paths`, of at most `n_tokens` words and punctuation marks, each once.

    Raises `InputError` or `DiskError` as `read_documents` does.
    """
    found: dict[str, Passage] = {}
    for path in paths:
        for document in read_documents(path):
            for passage in split_passages(document, n_tokens, word_spans):
                found.setdefault(passage.id, passage)
    return list(found.values())


def measure_recall(name: str, questions: Sequence[Question], contexts: Sequence[Sequence[Passage]], k: int) -> Recall:
    """Return recall at `k` over the questions of the set `name` that name a document; `contexts` are in their order."""
    asked = [
        question.document_id in {passage.document_id for passage in context[:k]}
        for question, context in zip(questions, contexts, strict=True)
        if question.document_id
    ]
    return Recall(name, k, sum(asked), len(asked))
