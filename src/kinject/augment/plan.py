"""What to ask for: documents to passages to slots, each slot one paraphrase with an id of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.augment.prompts import ask
from kinject.augment.styles import STYLES, Style
from kinject.corpus.documents import read_documents
from kinject.corpus.passages import TokenSpans, split_passages, token_spans
from kinject.disk import content_id, read_jsonl
from kinject.errors import InputError
from kinject.types import Document, Message, Passage


@dataclass(frozen=True, slots=True)
class Group:
    """The rewritings of one passage in one style: they must differ from each other, so one worker fills them all.

    `given` holds their texts where they exist already and are not asked for.
    """

    document: Document
    passage: Passage
    style: Style
    n_samples: int
    given: tuple[str, ...] | None = None

    def messages(self, sample: int, notes: tuple[str, ...] = ()) -> list[Message]:
        """Return what to ask for one sample."""
        return self.style.messages(self.document.title, self.passage.text, sample, notes)

    def preparation(self) -> list[Message]:
        """Return what to ask once before all samples."""
        return ask(self.document.title, self.passage.text, self.style.prepare)


@dataclass(frozen=True, slots=True)
class VariantRequest:
    """A place for one rewriting: `id` is the id of the variant that will fill it."""

    id: str
    sample: int
    prompt_hash: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's whole work, computed anew on each pass so that it never lies in memory. `styles`: name -> samples."""

    documents_path: Path
    passage_tokens: int
    tokenizer: str | None
    styles: Mapping[str, int]
    seed: int
    identity: dict[str, Any]
    given: Precomputed | None = None

    @property
    def n_samples(self) -> int:
        """How many rewritings a passage gets at most, in all styles."""
        return sum(self.styles.values())

    def passages(self) -> Iterator[tuple[Document, list[Passage]]]:
        """Yield each document with its passages, in order. Raises as `read_documents` and `token_spans`."""
        spans: TokenSpans = token_spans(self.tokenizer)
        for document in read_documents(self.documents_path):
            yield document, split_passages(document, self.passage_tokens, spans)

    def groups(self) -> Iterator[Group]:
        """Yield the groups in order of document, passage and style. Raises as `passages` and `groups_of`."""
        for document, passages in self.passages():
            yield from self.groups_of(document, passages)

    def groups_of(self, document: Document, passages: list[Passage]) -> Iterator[Group]:
        """Yield the groups of one document. Raises `InputError` where its rewritings are given and it is split."""
        texts = self.given.texts.get(document.id, ()) if self.given else ()
        if texts and len(passages) > 1:
            raise InputError(
                f"{document.source}: document {document.id!r} is split into {len(passages)} passages, but what is given "
                f"rewrites it whole. Raise augment.passage_tokens (now {self.passage_tokens})."
            )
        for passage in passages:
            for name, n_samples in self.styles.items():
                style = STYLES[name]
                if self.given is None or style.mechanical:
                    yield Group(document, passage, style, n_samples)
                else:
                    yield Group(document, passage, style, min(n_samples, len(texts)), texts)

    def slots(self, group: Group, notes: tuple[str, ...] | None = None) -> list[VariantRequest]:
        """Return the slots of `group`, by sample: those of a style `per_note` go round the notes (of one, where none are)."""
        n_slots = group.n_samples * (len(notes or ()) or 1 if group.style.per_note else 1)
        return [self._slot(group, sample) for sample in range(n_slots)]

    def notes_id(self, group: Group) -> str:
        """Return the id of the notes that the preparation of `group` makes."""
        return content_id("notes", group.passage.id, group.style.name, group.preparation(), self.identity, self.seed)

    def _slot(self, group: Group, sample: int) -> VariantRequest:
        style = group.style
        # Of a prepared style the task as it is without notes: what the notes will be is known only when they are asked for.
        asked = group.messages(sample) if group.given is None else group.given[sample]
        prompt_hash = content_id(asked, style.prepare, style.verify)
        identity = {} if style.mechanical else self.identity
        return VariantRequest(
            content_id("variant", group.passage.id, style.name, prompt_hash, identity, self.seed, sample),
            sample,
            prompt_hash,
        )

    def sample_seed(self, prompt_hash: str, sample: int, attempt: int) -> int:
        """Return the seed (31 bits) of one attempt; it depends on the words alone."""
        return int(content_id("seed", self.seed, prompt_hash, sample, attempt)[:8], 16) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Precomputed:
    """The texts of a file by document, in its order; `lines` holds the line of each document's first."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def check_documents(self, known: Iterable[str]) -> None:
        """Raise `InputError` (file:line) where a text belongs to no document."""
        strangers = self.texts.keys() - set(known)
        if strangers:
            first = min(strangers, key=lambda name: self.lines[name])
            raise InputError(
                f"{self.path}:{self.lines[first]}: document_id {first!r} is the id of no document. "
                f"{len(strangers)} such ids in all; they must be those of augment.documents."
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
    return Precomputed(path, {name: tuple(found) for name, found in texts.items()}, lines)
