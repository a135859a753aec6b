"""The documents of a run with their passages: read from their source, and kept in a temporary
file."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kinject.augment.plan import Plan
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import unwritable
from kinject.heap import read_documents, read_numbered
from kinject.shards import WHOLE, Shard
from kinject.types import Document, Passage

PlannedDocument = tuple[Document, list[Passage]]
"""A document and its passages, in order."""
Numbered = tuple[int, Document, list[Passage]]
"""The same with the document's number among those of all shards."""


def passages_of(documents: Iterable[PlannedDocument]) -> Iterator[tuple[Document, Passage]]:
    """Yield each passage with its document."""
    for document, passages in documents:
        for passage in passages:
            yield document, passage


@dataclass(frozen=True)
class PlannedDocuments:
    """The documents of a plan's shard. Each iteration reads and splits them again, in order.

    Where styles show two documents at once it has those of the other shards as well: each shard
    finds all pairs, and writes its own.

    It raises as `read_documents`, and `InputError` if a precomputed text belongs to no document.
    """

    plan: Plan

    def __iter__(self) -> Iterator[PlannedDocument]:
        return ((document, passages) for _, document, passages in self.numbered())

    def numbered(self) -> Iterator[Numbered]:
        """Yield the same documents, each with its number."""
        plan, n_known = self.plan, 0
        others = bool(plan.styles_of("pair"))
        shard = plan.shard
        if others or plan.precomputed:
            shard = WHOLE
        for number, document in read_numbered(plan.documents_path, plan.documents, shard):
            if plan.precomputed and plan.precomputed.texts_of(document.id):
                n_known += 1
            if others or plan.shard.has(document.id):
                yield number, document, split_passages(document, plan.passage_tokens, word_spans)
        if plan.precomputed and n_known < plan.precomputed.n_documents:
            # Only now, for the message: the ids of all documents may be more than memory.
            documents = read_documents(plan.documents_path, plan.documents)
            plan.precomputed.refuse_unknown({document.id for document in documents})


@dataclass(frozen=True)
class _Documents:
    """Documents that are read again in each iteration."""

    read: Callable[[], Iterator[PlannedDocument]]

    def __iter__(self) -> Iterator[PlannedDocument]:
        return self.read()


class PassageFile:
    """The documents of a run with their passages, in a temporary file of the run folder.

    Documents are read, split and hashed once and added here. Everything later iterates over this
    file, one document in memory at a time; of `meta`, the licence stays. `counts` are those of
    documents, passages, and passages cut short. Iteration and `counts` are about the documents of
    the run's shard; `with_others` has all that were added.
    """

    def __init__(self, run_dir: Path, shard: Shard = WHOLE) -> None:
        """Open an empty file. Raises `DiskError` if it cannot be written."""
        self._path = run_dir / ".passages.part"  # `lock_dir` deletes a .part after a kill
        self._file = self._open("w")
        self._shard = shard
        self.counts = Counter[str](documents=0, passages=0, cut=0)

    def add(self, document: Document, passages: list[Passage], number: int = 0) -> None:
        """Append a document with its number. Raises `DiskError` if it cannot be written."""
        if self._shard.has(document.id):
            n_cut = sum(passage.cut for passage in passages)
            self.counts.update(documents=1, passages=len(passages), cut=n_cut)
        spans = [
            (passage.id, passage.start, passage.end, passage.path, passage.header, passage.cut)
            for passage in passages
        ]
        row = [
            number,
            document.id,
            document.title,
            document.text,
            document.source,
            document.meta.get("licence"),
            spans,
        ]
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise unwritable(self._path, error) from error

    @property
    def with_others(self) -> Iterable[PlannedDocument]:
        """All documents, those of other shards too where there are any."""
        return _Documents(self._read)

    def __iter__(self) -> Iterator[PlannedDocument]:
        return ((document, passages) for _, document, passages in self.numbered())

    def numbered(self) -> Iterator[Numbered]:
        """Yield the documents of the run's shard, each with its number."""
        return (found for found in self._read_numbered() if self._shard.has(found[1].id))

    def _read(self) -> Iterator[PlannedDocument]:
        return ((document, passages) for _, document, passages in self._read_numbered())

    def _read_numbered(self) -> Iterator[Numbered]:
        try:
            # The last rows may still be in Python's buffer.
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        with self._open("r") as file:
            for line in file:
                number, identity, title, text, source, licence, spans = json.loads(line)
                passages = [
                    Passage(name, identity, start, end, text[start:end], tuple(path), *others)
                    for name, start, end, path, *others in spans
                ]
                meta = {"licence": licence} if licence else {}
                yield number, Document(identity, title, text, source, meta), passages

    def _open(self, mode: str) -> IO[str]:
        try:  # surrogatepass: a file's name may be no UTF-8
            return self._path.open(mode, encoding="utf-8", errors="surrogatepass", newline="\n")
        except OSError as error:
            raise unwritable(self._path, error, "opened") from error

    def __enter__(self) -> PassageFile:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by `add`
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
