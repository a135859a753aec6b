"""The sandbox as files: documents under data/sandbox/, question sets under eval/sandbox/, a card beside each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kinject.disk import write_jsonl, write_text
from kinject.sandbox.cards import DATA_CARD, EVAL_CARD, N_KNOWN_QUESTIONS
from kinject.sandbox.facts import SEED, Person, create_country
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.pools import ATTRIBUTES
from kinject.sandbox.questions import create_questions, create_reverse_questions, document_id_of, sample_questions
from kinject.types import Document, Question


def create_document(person: Person, group: str) -> Document:
    """Return the encyclopedia entry on `person`; `meta` keeps the group (``new`` or ``known``)."""
    return Document(
        id=document_id_of(person),
        title=person.name,
        text=render_entry(person, "original"),
        source="kinject sandbox build",
        meta={"group": group},
    )


def create_documents(people: Sequence[Person], group: str) -> list[Document]:
    """Return one entry a person."""
    return [create_document(person, group) for person in people]


def question_rows(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Yield each question as a row, ids first."""
    for question in questions:
        yield {
            "id": question.id,
            "document_id": question.document_id,
            "fact_id": question.fact_id,
            "subject": question.subject,
            "question": question.question,
            "choices": list(question.choices),
            "answer": question.answer,
        }


def write_sandbox(root: Path) -> list[Path]:
    """Write data/sandbox/ and eval/sandbox/ under `root`; return the paths of the files."""
    country = create_country()
    data, questions = root / "data" / "sandbox", root / "eval" / "sandbox"
    known = sample_questions(create_questions(country.known, SEED), N_KNOWN_QUESTIONS // len(ATTRIBUTES), SEED)
    write_jsonl(data / "documents.jsonl", create_documents(country.new, "new"))
    write_jsonl(data / "known_documents.jsonl", create_documents(country.known, "known"))
    write_jsonl(questions / "new.jsonl", question_rows(create_questions(country.new, SEED)))
    write_jsonl(questions / "known.jsonl", question_rows(known))
    write_jsonl(questions / "reverse.jsonl", question_rows(create_reverse_questions(country.new, SEED)))
    write_text(data / "README.md", DATA_CARD)
    write_text(questions / "README.md", EVAL_CARD)
    return [
        *(data / name for name in ("documents.jsonl", "known_documents.jsonl", "README.md")),
        *(questions / name for name in ("new.jsonl", "known.jsonl", "reverse.jsonl", "README.md")),
    ]
