"""Passages for questions: split from documents and retrieved (`retrievers`), or prepared by the user; and their recall."""

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
    """Return the prepared passages of each of `questions`: rows ``{question_id, passages: [...]}``, the best first.

    A passage is a text or ``{text, id?, document_id?}``; one without an id gets the hash of its text. Raises
    `InputError` (file:line) for a row of another shape, and for a question that has no row.
    """
    contexts: dict[str, tuple[Passage, ...]] = {}
    for number, row in read_jsonl(path):
        question_id, passages = row.get("question_id"), row.get("passages")
        if not isinstance(question_id, str | int) or not isinstance(passages, list):
            raise InputError(f"{path}:{number}: expected question_id and passages (a list of texts).")
        contexts[str(question_id)] = tuple(_prepared_passage(item, f"{path}:{number}") for item in passages)
    missing = [question.id for question in questions if question.id not in contexts]
    if missing:
        raise InputError(
            f"{path}: no passages for {len(missing)} of {len(questions)} questions, such as {missing[0]!r}."
        )
    return [contexts[question.id] for question in questions]


def _prepared_passage(item: object, where: str) -> Passage:
    fields = item if isinstance(item, dict) else {"text": item}
    text, identity = fields.get("text"), fields.get("id")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: passages: found {item!r:.60}, expected a text, or text with id and document_id.")
    name = str(identity) if identity else content_id("context", text)
    return Passage(name, str(fields.get("document_id") or ""), 0, len(text), text)


def read_passages(paths: Sequence[Path], n_tokens: int) -> list[Passage]:
    """Return the passages of the documents in `paths`, of at most `n_tokens` words and punctuation marks, each once.

    Raises `InputError` or `DiskError` as `read_documents` does.
    """
    passages: dict[str, Passage] = {}
    for path in paths:
        for document in read_documents(path):
            for passage in split_passages(document, n_tokens, word_spans):
                passages.setdefault(passage.id, passage)
    return list(passages.values())


def measure_recall(name: str, questions: Sequence[Question], contexts: Sequence[Sequence[Passage]], k: int) -> Recall:
    """Return recall at `k` over the questions of the set `name` that name a document; `contexts` are in their order."""
    hits = [
        question.document_id in {passage.document_id for passage in context[:k]}
        for question, context in zip(questions, contexts, strict=True)
        if question.document_id
    ]
    return Recall(name, k, sum(hits), len(hits))
