"""Question sets of a study: their validation questions, on which it chooses, kept apart from those it reports."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.disk import file_name, write_jsonl
from kinject.errors import InputError
from kinject.recipe.sections import EvalSection, QuestionSetSection
from kinject.types import Question


@dataclass(frozen=True)
class SplitSet:
    """One set: eval.questions' entry for its test questions, and for its validation questions where it has some."""

    name: str
    role: str
    test: dict[str, Any]
    validation: dict[str, Any] | None


def split_sets(section: EvalSection, shares: Mapping[str, float], folder: Path) -> list[SplitSet]:
    """Return the sets of `section`; those in `shares` are split by source document into files in `folder`.

    Whether a document is validation depends on its id and the share alone. A set without a share that names a validation
    file has those questions for validation. Raises `InputError` when a side is empty.
    """
    found = []
    for name, value in section.questions.items():
        item = QuestionSetSection(path=value) if isinstance(value, str) else value
        entry: dict[str, Any] = {key: field for key, field in asdict(item).items() if field is not None}
        entry.pop("validation", None)
        if name not in shares:
            own_file = {**entry, "path": item.validation} if item.validation else None
            found.append(SplitSet(name, item.role, entry, own_file))
            continue
        questions = read_questions(Path(item.path), item.layout, item.n_choices)
        parts: dict[str, list[Question]] = {"validation": [], "test": []}
        for question in questions:
            parts["validation" if _draw(name, question) < shares[name] else "test"].append(question)
        entries = {}
        for part, own in parts.items():
            if not own:
                raise InputError(f"{item.path}: study.validation.{name}: {shares[name]} leaves no {part} question.")
            path = folder / f"{file_name(name)}.{part}.jsonl"
            write_jsonl(path, (asdict(question) for question in own))
            entries[part] = {**entry, "path": str(path), "layout": "native"}
        found.append(SplitSet(name, item.role, entries["test"], entries["validation"]))
    return found


def _draw(name: str, question: Question) -> float:
    """Return a number in [0, 1) that depends on the question's document (or the question, where it has none)."""
    key = f"{name}\0{question.document_id or question.id}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
