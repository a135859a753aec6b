"""Writes documents.jsonl from the parsed files, without copies and boilerplate; reads it back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinject.disk import open_to_read, read_jsonl, write_jsonl
from kinject.heap.copies import (
    Copy,
    CopyFinder,
    Edit,
    count_words,
    edited,
    only_words,
    shared_lines,
)
from kinject.heap.parse import FoundFile, Parsed, parsed_of, read_record
from kinject.recipe import DocumentsSection
from kinject.terminal import Progress, format_count
from kinject.types import Document

_LEAST_SHARING = 10
"""Documents that must have a line for it to be boilerplate."""
_DATE_IN_NAME = re.compile(
    r"(?<!\d)((?:19|20)\d\d)(?:[-_. ]?(0[1-9]|1[0-2])(?:[-_. ]?([0-2]\d|3[01]))?)?(?!\d)"
)
_FIRST_SECOND = datetime(1, 1, 1, tzinfo=UTC).timestamp()
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def read_rows(path: Path) -> Iterator[Document]:
    """Yield the documents of a documents.jsonl that `collect` has written."""
    for _, row in read_jsonl(path):
        yield Document(row["id"], row["title"], row["text"], row["source"], row["meta"])


@dataclass
class HeapFile:
    """A file with the hash of its content, and the path of its record, or the fault."""

    found: FoundFile
    sha256: str
    record: Path
    fault: str

    def read(self) -> Iterator[tuple[int, int, Parsed]]:
        """Yield (start, bytes, content) of each line of the record."""
        if self.fault:
            yield 0, 0, Parsed("", None, {}, self.fault)
            return
        n_documents = 0
        for document in read_record(self.record):
            yield document
            n_documents += 1
        if not n_documents:
            yield 0, 0, Parsed("", None, {}, "holds no documents.")


def day_of(mtime: float) -> str:
    """Return the day of a time stamp (UTC)."""
    # Some file systems hold times of other years than 1 to 9999.
    seconds = min(max(mtime, _FIRST_SECOND), _LAST_SECOND)
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


@dataclass
class _Found:
    """A document of the heap, which stays on the disk: its place in its file's record, its date,
    and its facts."""

    file: int
    start: int
    n_bytes: int
    location: str
    date: str
    facts: Mapping[str, Any]
    copy: Copy | None = None


@dataclass
class HeapWriter:
    """Writes the files of a heap into `folder`, and counts. Beside one text, memory holds some 5
    KiB for each document."""

    heap: Sequence[HeapFile]
    section: DocumentsSection
    folder: Path
    found: list[_Found] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    omitted: list[dict[str, Any]] = field(default_factory=list)
    boilerplate: dict[str, list[str]] = field(default_factory=dict)
    ids: Counter[str] = field(default_factory=Counter)
    written: list[_Found] = field(default_factory=list)
    n_words: int = 0

    def write(self) -> dict[str, Any]:
        """Write the files; return the counts of the manifest. Raises `DiskError` if a file cannot
        be read or written."""
        self._find()
        self._find_copies()
        kept = [found for found in self.found if found.copy is None]
        self._find_boilerplate(kept)
        write_jsonl(self.folder / "documents.jsonl", self._rows(kept))
        write_jsonl(self.folder / "files.jsonl", self._file_rows())
        left = [
            {key: value for key, value in row.items() if key != "number"} for row in self.skipped
        ]
        write_jsonl(self.folder / "skipped.jsonl", left)
        lines = self._line_rows()
        write_jsonl(self.folder / "duplicates.jsonl", [*self.omitted, *lines])
        return self._counts(kept, len(lines))

    def _file_rows(self) -> list[dict[str, Any]]:
        """Return the rows of files.jsonl."""
        documents = Counter(found.file for found in self.written)
        skipped = Counter(row["number"] for row in self.skipped)
        copies = Counter(found.file for found in self.found if found.copy is not None)
        rows = []
        for number, file in enumerate(self.heap):
            rows.append(
                {
                    "file": file.found.name,
                    "bytes": file.found.size,
                    "sha256": file.sha256,
                    "documents": documents[number],
                    "skipped": skipped[number],
                    "copies": copies[number],
                }
            )
        return rows

    def _line_rows(self) -> list[dict[str, Any]]:
        """Return the rows of duplicates.jsonl of the lines that were taken out."""
        rows = []
        for line, names in self.boilerplate.items():
            if len(names) > 1:
                dropped = format_count(len(names) - 1, "document")
                rows.append({"dropped": dropped, "kept": names[0], "how": "line", "line": line})
        return rows

    def _counts(self, kept: Sequence[_Found], n_lines: int) -> dict[str, Any]:
        """Return the counts of the manifest."""
        read = {found.file for found in self.found}
        suffixes = [Path(self.heap[number].found.name).suffix.lower() for number in read]
        repeats = [found.facts["n_repeats"] for found in kept if found.facts["n_repeats"]]
        copies = Counter(found.copy.kind for found in self.found if found.copy is not None)
        n_left_out = sum(row["left_out"] for row in self.skipped)
        # The first document that has a line keeps it.
        n_removed = sum(map(len, self.boilerplate.values())) - len(self.boilerplate)
        return {
            "n_files": len(self.heap),
            "n_read": len(read),
            "n_documents": len(self.written),
            "n_words": self.n_words,
            "n_bytes": sum(file.found.size for file in self.heap),
            "kinds": _ranked(suffix or "no suffix" for suffix in suffixes),
            "languages": _ranked(found.facts["language"] for found in self.written),
            "skipped": len(self.skipped) - n_left_out,
            "left_out": n_left_out,
            "duplicates": {kind: copies[kind] for kind in ("exact", "near")},
            "repeats": {"documents": len(repeats), "passages": sum(repeats)},
            "boilerplate": {"lines": n_lines, "removed": n_removed},
        }

    def _name(self, found: _Found) -> str:
        return self.heap[found.file].found.name + found.location

    def _find(self) -> None:
        """Read all records once."""
        for number, file in enumerate(self.heap):
            name = file.found.name
            for start, n_bytes, parsed in file.read():
                if parsed.document is not None:
                    date = _date(name, parsed.document, file.found.mtime)
                    self.found.append(
                        _Found(number, start, n_bytes, parsed.location, date, parsed.facts)
                    )
                else:
                    self._skip(number, parsed.location, parsed.fault)

    def _skip(self, number: int, location: str, fault: str) -> None:
        file = self.heap[number].found
        where = file.name + location
        self.skipped.append(
            {
                "number": number,
                "file": file.name,
                "where": where,
                "detail": fault,
                "left_out": file.left_out,
            }
        )

    def _find_copies(self) -> None:
        """Mark each document that is a copy of one of the same day, or a newer one."""
        finder = CopyFinder(self.section.near_duplicates, self._text)
        # Of equal dates the first file in order: sorting backwards keeps it.
        dates = [found.date for found in self.found]
        for number in sorted(range(len(dates)), key=dates.__getitem__, reverse=True):
            found = self.found[number]
            sketch = bytes.fromhex(found.facts["sketch"])
            found.copy = finder.find(number, found.facts["exact"], sketch)
        for version in finder.versions:
            self.omitted.append(
                {
                    "version": self._name(self.found[version.number]),
                    "kept": self._name(self.found[version.other]),
                    "how": "both kept",
                    "words_only_here": [version.fact],
                    "words_only_there": [version.other_fact],
                }
            )
        for found in self.found:
            if found.copy is not None:
                self.omitted.append(self._copy_row(found, found.copy))
            elif found.facts["n_repeats"]:
                self.omitted.append(self._repeats_row(found))

    def _copy_row(self, found: _Found, copy: Copy) -> dict[str, Any]:
        """Return the row of duplicates.jsonl of a copy."""
        kept = self.found[copy.kept]
        row = {
            "dropped": self._name(found),
            "kept": self._name(kept),
            "how": copy.kind,
            "overlap": round(copy.overlap, 3),
        }
        if copy.kind == "near":
            words = only_words(self._document(found).text, self._document(kept).text)
            if words:
                row["words_only_here"] = words
        return row

    def _repeats_row(self, found: _Found) -> dict[str, Any]:
        """Return the row of duplicates.jsonl of a document with repeats."""
        name = self._name(found)
        how = "line of a log" if found.facts["log"] else "passage"
        return {"dropped": name, "kept": name, "how": how, "passages": found.facts["n_repeats"]}

    def _text(self, number: int) -> str:
        """Return the text of a document by its number."""
        return self._document(self.found[number]).text

    def _document(self, found: _Found) -> Document:
        with open_to_read(self.heap[found.file].record) as file:
            file.seek(found.start)
            document = parsed_of(file.read(found.n_bytes)).document
        assert document is not None
        return document

    def _find_boilerplate(self, kept: Sequence[_Found]) -> None:
        """Find the lines that many documents share."""
        least = max(_LEAST_SHARING, round((self.section.boilerplate or 1) * len(kept)))
        if self.section.boilerplate is None or len(kept) < least:
            return
        counts = Counter[str]()
        for found in kept:
            counts.update({line for line, _ in shared_lines(self._document(found).text)})
        self.boilerplate = {line: [] for line, n in counts.items() if n >= least}

    def _cuts(self, name: str, text: str) -> list[Edit]:
        """Return the edits that take lines out of a document that an earlier one has; the first one
        keeps them."""
        edits = []
        if not self.boilerplate:
            return []
        for line, (start, end) in shared_lines(text):
            names = self.boilerplate.get(line)
            if names is None or name in names[:1]:
                continue
            names.append(name)
            if len(names) > 1:
                edits.append((start, min(end + 1, len(text)), ""))
        return edits

    def _rows(self, kept: Sequence[_Found]) -> Iterator[dict[str, Any]]:
        """Yield the rows of documents.jsonl; note what is written, and count its words."""
        with Progress("writing", len(kept), "documents") as progress:
            for found in kept:
                document, name = self._document(found), self._name(found)
                cuts = self._cuts(name, document.text)
                text, meta = edited(document.text, cuts, document.meta)
                progress.advance()
                if not text.strip():
                    fault = "nothing but lines that many documents share."
                    self._skip(found.file, found.location, fault)
                    continue
                self.written.append(found)
                n_cut = sum(count_words(document.text[start:end]) for start, end, _ in cuts)
                self.n_words += found.facts["words"] - n_cut
                licence = meta.get("licence") or meta.get("license")
                extra = {"language": found.facts["language"], "licence": licence}
                meta.update({key: value for key, value in extra.items() if value})
                title, source = document.title, document.source
                # In a heap a file is named by its path below the heap.
                if found.facts["named"]:
                    title = Path(self.heap[found.file].found.name).stem
                if source in ("", found.location):
                    source = name
                yield {
                    "id": self._id(found, document),
                    "title": title,
                    "text": text,
                    "source": source,
                    "meta": meta,
                }

    def _id(self, found: _Found, document: Document) -> str:
        """Return the id of a document: a row's own, else the file's name (with the member's) and a
        hash of the text.

        Without the number of a line, which a row that is put in before it changes. An id that is
        taken gets a number.
        """
        name = self.heap[found.file].found.name
        member = re.sub(r":.*", "", found.location) if found.location.startswith("/") else ""
        identity = document.id or f"{name}{member}#{found.facts['exact'][:10]}"
        if document.id and identity in self.ids:
            identity = f"{name}#{identity}"
        self.ids[identity] += 1
        n = self.ids[identity]
        return f"{identity}-{n}" if n > 1 else identity


def _date(name: str, document: Document, mtime: float) -> str:
    """Return the date of a document: that in the file's name, else the one inside, else that of its
    last change."""
    match = _DATE_IN_NAME.search(Path(name).name)
    if match:
        return "-".join(filter(None, match.groups()))
    stated = str(document.meta.get("date", ""))[:10]
    if re.fullmatch(r"(?:19|20)\d\d-\d\d-\d\d", stated):
        return stated
    return day_of(mtime)


def _ranked(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
