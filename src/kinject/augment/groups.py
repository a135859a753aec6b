"""The variants of one passage in one style, the requests for them, and what their prompts are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kinject.augment.checks.checker import normal_form
from kinject.augment.prompts import Source, source_of
from kinject.augment.styles import Item, Preparation, Style
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.types import Document, Message, Passage


@dataclass(frozen=True, slots=True)
class Group:
    """The variants of one passage in one style. They must differ from each other, so one worker requests them all.

    `target`, if there is one, is the number of tokens that the variants are to have together; else there are `n_samples`
    of them. `texts` holds variants that a file provides; None if a generator writes them. `skipped` is what the passage
    lacks for the style; then nothing is requested.
    """

    document: Document
    passage: Passage
    style: Style
    n_samples: int
    texts: tuple[str, ...] | None = None
    target: int | None = None
    skipped: str = ""

    @property
    def source(self) -> Source:
        """What the prompts show of the passage."""
        return source_of(self.document, self.passage)


@dataclass(frozen=True, slots=True)
class VariantRequest:
    """A request for one variant, about `item` of the preparations. `id` is the id that the variant will have.

    `turn` counts the requests about the same item. `messages` may be empty: `Plan.messages` has them.
    """

    id: str
    sample: int
    prompt_hash: str
    turn: int = 0
    item: Item = field(default_factory=dict)
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Variants read from a file, by document in file order. `lines` maps each document id to its first line."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def check_documents(self, known: Iterable[str]) -> None:
        """Raise `InputError` (file:line) if a text belongs to no document."""
        unknown = self.texts.keys() - set(known)
        if unknown:
            first = min(unknown, key=lambda name: self.lines[name])
            raise InputError(
                f"{self.path}:{self.lines[first]}: document_id {first!r} is the id of no document. "
                f"{len(unknown)} such ids in all; they must be those of augment.documents."
            )


def read_precomputed(path: Path) -> Precomputed:
    """Read rows of ``document_id`` and ``text``, all into memory. Raises `InputError` (file:line) on any other row."""
    texts: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        for key in ("document_id", "text"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(
                    f"{path}:{number}: {key}: found {row.get(key)!r}, expected a string that is not empty."
                )
        texts.setdefault(row["document_id"], []).append(row["text"])
        lines.setdefault(row["document_id"], number)
    if not texts:
        raise InputError(f"{path}: holds no rewritings. Expected rows with document_id and text.")
    return Precomputed(path, {name: tuple(one) for name, one in texts.items()}, lines)


def new_items(group: Group, step: Preparation, items: Sequence[Item], answers: Sequence[Sequence[str]]) -> list[Item]:
    """Return the items of a preparation: each of `items` with each line of its answer, none twice.

    With `in_passage`, lines that are not in the passage are left out.
    """
    text = group.passage.shown
    passage = f" {normal_form(text)} "
    no_spaces = passage.count(" ") < len(passage) / 20  # Chinese and Japanese part no words
    found: dict[str, Item] = {}
    for item, answer in zip(items, answers, strict=True):
        for line in answer:
            form = normal_form(line)
            if form and (not step.in_passage or f" {form} " in passage or (no_spaces and line in text)):
                found.setdefault(form, {**item, step.name: line})
    return list(found.values())
