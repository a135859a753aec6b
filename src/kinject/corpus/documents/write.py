"""Writes documents.jsonl from the parsed files, without copies and boilerplate; reads it back. Two passes over the records.

The first pass counts lines, the second decides and writes one document after the other. Beside the text of one document,
memory holds some 5 KiB for each.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kinject.corpus.documents.copies import (
    Boilerplate,
    CopyFinder,
    count_lines,
    edited,
    min_hash,
    only_words,
    text_hash,
    word_hashes,
)
from kinject.corpus.documents.files import FoundFile
from kinject.corpus.documents.parse import Parsed, read_record, unpacked
from kinject.corpus.documents.personal_data import mask_edits
from kinject.disk import atomic_file, open_jsonl, read_jsonl, write_jsonl
from kinject.recipe import DocumentsSection
from kinject.terminal import Progress
from kinject.types import Document

_MOST_KEPT = 20
"""Documents in each list of the page."""
_MANY_OTHERS, _LONG, _MOST_REPEATS = 0.35, 60, 5
_MAIN_LANGUAGE = 0.8
_NUMBERS = re.compile(r"(?<![\w-])\d[\d,.]*")
_PARTS = re.compile(r"[:.;,](?:\s|$)|\s[(\['\"]|['\"]")
_MOST_WORDS = 12
_MOST_NAMES = 50


@dataclass(frozen=True, slots=True)
class HeapFile:
    """A file with the `key` of its record, or the `fault`, or the name of the file that it links to."""

    file: FoundFile
    key: str
    sha256: str
    fault: str
    link_to: str


def reason_of(fault: str) -> str:
    """Return the reason in a fault: its first words, without names, numbers and examples, by which files are counted."""
    words: list[str] = []
    for part in _PARTS.split(fault):
        words += _NUMBERS.sub("N", part).split()
        if len(words) > 1:
            break
    return " ".join(words[:_MOST_WORDS]) or "not readable"


def read_rows(path: Path) -> Iterator[Document]:
    """Yield the documents of a documents.jsonl that `HeapWriter` has written."""
    for _, row in read_jsonl(path):
        yield Document(row["id"], row["title"], row["text"], row["source"], row["meta"])


@dataclass
class _Counts:
    """Counts made while the documents are written."""

    documents: int = 0
    words: int = 0
    characters: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    repeats: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    personal_data: Counter[str] = field(default_factory=Counter)
    with_personal: Counter[str] = field(default_factory=Counter)
    largest: list[tuple[int, int, str]] = field(default_factory=list)
    strangest: list[tuple[float, int, str, str]] = field(default_factory=list)
    left_out: int = 0
    read_files: int = 0
    bytes: int = 0


class HeapWriter:
    """Writes the files of a heap into `folder`, and counts."""

    def __init__(self, files: Sequence[HeapFile], section: DocumentsSection, cache: Path, folder: Path) -> None:
        self._files, self._section, self._cache, self._folder = files, section, cache, folder
        self._counts = _Counts()
        self._boilerplate = Boilerplate({}, 1)
        self._masks = section.personal_data == "mask"
        self._n_lines_removed = 0
        self._main_language = ""
        self._ids: dict[str, int] = {}
        self._written: list[tuple[int, int, str]] = []  # offset and length of a row, and the document's name
        self._finder = CopyFinder(section.near_duplicates, self._words_of)
        self._per_file = Counter[str]()
        self._rows: IO[bytes]

    def write(self) -> dict[str, Any]:
        """Write the files; return the counts of the manifest. Raises `DiskError` if a file cannot be read or written."""
        self._boilerplate = self._count_lines()
        with ExitStack() as stack:
            self._rows = stack.enter_context(atomic_file(self._folder / "documents.jsonl", "w+b"))
            self._write_skipped = stack.enter_context(open_jsonl(self._folder / "skipped.jsonl"))
            self._write_line = stack.enter_context(open_jsonl(self._folder / "files.jsonl"))
            self._write_copy = stack.enter_context(open_jsonl(self._folder / "duplicates.jsonl"))
            progress = stack.enter_context(Progress("writing", len(self._files), "files"))
            for heap_file in self._files:
                self._per_file = Counter[str]()
                self._write_file(heap_file)
                numbers = {key: self._per_file[key] for key in ("documents", "copies", "skipped")}
                self._write_line(
                    {"file": heap_file.file.name, "bytes": heap_file.file.size, "sha256": heap_file.sha256, **numbers}
                )
                progress.advance()
        rows = (
            {
                "line": self._masked(line),
                "kept_in": names[0],
                "documents": len(names) - 1,
                "left_out_of": names[1 : _MOST_NAMES + 1],
            }
            for line, names in sorted(self._boilerplate.lines.values(), key=lambda entry: (-len(entry[1]), entry[0]))
            if len(names) > 1
        )
        n_lines = write_jsonl(self._folder / "boilerplate.jsonl", rows)
        return self._manifest_counts(n_lines)

    def _count_lines(self) -> Boilerplate:
        """Read all records once; return the lines that many documents share, and find the heap's language."""
        import numpy as np

        lines, languages = [], Counter[str]()
        seen = set[str]()
        for heap_file in self._files:
            for parsed in read_record(self._cache, heap_file.key) if heap_file.key else ():
                if parsed.document is not None and parsed.facts["text"] not in seen:
                    seen.add(parsed.facts["text"])
                    languages[parsed.facts["language"]] += 1
                    lines.append(np.frombuffer(unpacked(parsed.facts["lines"]), np.uint64))
        code, n = languages.most_common(1)[0] if languages else ("", 0)
        self._main_language = code if n >= _MAIN_LANGUAGE * languages.total() else ""
        return count_lines(lines, self._section.boilerplate)

    def _write_file(self, heap_file: HeapFile) -> None:
        name, counts = heap_file.file.name, self._counts
        counts.bytes += heap_file.file.size
        if heap_file.link_to:
            self._copy(name, heap_file.link_to, "link", 1.0, [])
            return
        if heap_file.fault:
            self._skip(name, "", heap_file.fault, left_out=heap_file.file.left_out)
            return
        for parsed in read_record(self._cache, heap_file.key):
            if parsed.document is None:
                self._skip(name, parsed.location, parsed.fault)
            else:
                self._write_document(name, parsed, parsed.document)
        if self._per_file["documents"] + self._per_file["copies"]:
            counts.read_files += 1
            counts.kinds[Path(name).suffix.lower() or "no suffix"] += 1
        elif not self._per_file["skipped"]:
            self._skip(name, "", "holds no documents.")

    def _copy(self, dropped: str, original: str, kind: str, overlap: float, new: Sequence[str]) -> None:
        self._per_file["copies"] += 1
        self._counts.duplicates[kind] += 1
        words = {"words_only_here": [self._masked(word) for word in new]} if new else {}
        self._write_copy({"dropped": dropped, "kept": original, "how": kind, "overlap": round(overlap, 3), **words})

    def _skip(self, name: str, location: str, fault: str, *, left_out: bool = False) -> None:
        self._per_file["skipped"] += 1
        reason = reason_of(fault)
        if left_out:
            self._counts.left_out += 1
        else:
            self._counts.skipped[reason] += 1
        row = {"file": name, "where": name + location, "reason": reason, "detail": fault, "left_out": left_out}
        self._write_skipped(row)

    def _write_document(self, name: str, parsed: Parsed, document: Document) -> None:
        facts, location = parsed.facts, name + parsed.location
        edits = self._boilerplate.cuts(location, document.text)
        text, meta = edited(document.text, edits, document.meta)
        self._n_lines_removed += len(edits)
        if self._masks and facts["personal"]:
            masks = mask_edits(text, self._section.phone_region)
            text, meta = edited(text, masks, meta)
            edits = [*edits, *masks]
        if not text.strip():
            self._skip(name, parsed.location, "nothing but lines that many documents share.")
            return
        exact, sketch, n_words = facts["text"], unpacked(facts["sketch"]), facts["words"]
        if edits:
            words = word_hashes(text)
            exact, sketch, n_words = text_hash(text), min_hash(words), len(words)
        copy = self._finder.find(exact, sketch, lambda: word_hashes(text))
        if copy is not None:
            new = [] if copy.kind == "exact" else only_words(text, self._text_of(copy.original))
            self._copy(location, self._written[copy.original][2], copy.kind, copy.overlap, new)
            return
        self._write_repeats(location, facts)
        licence = meta.get("licence") or meta.get("license") or self._section.licence
        extra = {"language": facts["language"], "personal_data": facts["personal"], "licence": licence}
        row = {
            "id": self._id(name, parsed), "title": self._masked(Path(name).stem if facts["named"] else document.title),
            "text": text,
            "source": location if document.source in ("", parsed.location) else self._masked(document.source),
            "meta": {**meta, **{key: value for key, value in extra.items() if value}},
        }  # fmt: skip
        number = len(self._written)
        self._finder.add(number, exact, sketch)
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        start = self._rows.seek(0, 2)
        self._rows.write(data)
        self._written.append((start, len(data), location))
        self._count(number, location, parsed, n_words, len(text), str(licence or ""))

    def _id(self, name: str, parsed: Parsed) -> str:
        """Return the id of a document: a row's own, else the file's name (with the member's) and a hash of the text.

        Without the number of a line, which a row that is put in before it changes. An id that is taken gets a number.
        """
        document = parsed.document
        member = parsed.location if parsed.location.startswith("/") else ""
        identity = (document and document.id) or f"{name}{re.sub(r':.*', '', member)}#{parsed.facts['text'][:10]}"
        if document and document.id and identity in self._ids:
            identity = f"{name}#{identity}"
        self._ids[identity] = self._ids.get(identity, 0) + 1
        return identity if self._ids[identity] == 1 else f"{identity}-{self._ids[identity]}"

    def _write_repeats(self, location: str, facts: Mapping[str, Any]) -> None:
        if facts["n_repeats"]:
            self._counts.repeats["documents"] += 1
            self._counts.repeats["passages"] += facts["n_repeats"]
            first = [[self._masked(text), alike] for text, alike in facts["repeats"]]
            self._write_copy(
                {
                    "dropped": location,
                    "kept": location,
                    "how": "passage",
                    "passages": facts["n_repeats"],
                    "first": first,
                }
            )

    def _count(self, number: int, location: str, parsed: Parsed, n_words: int, n_characters: int, licence: str) -> None:
        counts, facts = self._counts, parsed.facts
        self._per_file["documents"] += 1
        counts.documents += 1
        counts.words += n_words
        counts.characters += n_characters
        counts.languages[facts["language"]] += 1
        counts.licences[licence] += 1
        counts.personal_data.update(facts["personal"])
        counts.with_personal.update(facts["personal"].keys())
        _push(counts.largest, (n_words, -number, location))
        reasons = self._strangeness(facts)
        if reasons:
            _push(
                counts.strangest,
                (sum(weight for weight, _ in reasons), -number, location, "; ".join(text for _, text in reasons)),
            )

    def _strangeness(self, facts: Mapping[str, Any]) -> list[tuple[float, str]]:
        """Return (weight, reason) of each respect in which a document is unlike text, or unlike the others."""
        reasons = []
        if facts["others"] > _MANY_OTHERS:
            reasons.append((facts["others"] / _MANY_OTHERS, f"{facts['others']:.0%} of its characters are no letters"))
        if facts["longest"] >= _LONG:
            reasons.append((1 + min(facts["longest"] / 1000, 1), f"a word of {facts['longest']:,} characters"))
        before, after = facts["characters"]
        if facts["n_repeats"] > _MOST_REPEATS:
            lost = 1 - after / max(1, before)
            reasons.append((1 + lost, f"{facts['n_repeats']:,} repeated lines or passages, {lost:.0%} of it"))
        if self._main_language and facts["language"] not in (self._main_language, ""):
            reasons.append((1.0, f"its language is {facts['language']}, that of most others {self._main_language}"))
        return reasons

    def _masked(self, text: str) -> str:
        return edited(text, mask_edits(text, self._section.phone_region), {})[0] if self._masks else text

    def _text_of(self, number: int) -> str:
        start, length, _ = self._written[number]
        self._rows.seek(start)
        return str(json.loads(self._rows.read(length))["text"])

    def _words_of(self, number: int) -> Any:
        return word_hashes(self._text_of(number))

    def _manifest_counts(self, n_lines: int) -> dict[str, Any]:
        counts = self._counts
        personal = {kind: [counts.with_personal[kind], n] for kind, n in sorted(counts.personal_data.items())}
        return {
            "n_files": len(self._files), "n_read": counts.read_files, "n_documents": counts.documents,
            "n_words": counts.words, "n_characters": counts.characters, "n_bytes": counts.bytes,
            "kinds": dict(counts.kinds.most_common()), "languages": dict(counts.languages.most_common()),
            "licences": {name: n for name, n in counts.licences.most_common() if name},
            "skipped": dict(counts.skipped.most_common()), "left_out": counts.left_out,
            "duplicates": {kind: counts.duplicates[kind] for kind in ("exact", "near", "link")},
            "repeats": {kind: counts.repeats[kind] for kind in ("documents", "passages")},
            "boilerplate": {"lines": n_lines, "removed": self._n_lines_removed},
            "personal_data": personal, "masked": self._masks,
            "largest": [[location, n] for n, _, location in sorted(counts.largest, reverse=True)],
            "strangest": [[location, reason] for _, _, location, reason in sorted(counts.strangest, reverse=True)],
        }  # fmt: skip


def _push(heap: list[Any], item: Any) -> None:
    """Keep the largest few."""
    heapq.heappush(heap, item)
    if len(heap) > _MOST_KEPT:
        heapq.heappop(heap)
