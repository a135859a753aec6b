"""The page of a run of kinject documents, documents.html.

Counts come from the manifest, texts and names from the run's files. All of them are untrusted: the page escapes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kinject.corpus.documents.collect import DocumentsResult, listing, named_languages
from kinject.corpus.documents.write import read_rows
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import Row, read_jsonl
from kinject.report.formatting import format_count, format_date, format_name, format_percent, join_words
from kinject.report.page import (
    Block,
    Cell,
    Code,
    Heading,
    Page,
    Section,
    TableBlock,
    Text,
    line,
    without_empty_columns,
    write_page,
)

PAGE = "documents.html"
_MOST_ROWS = 500
_UNFOLDED = 20
_N_SAMPLES, _MOST_PASSAGES, _PASSAGE_TOKENS = 3, 4, 256
_LONGEST_NAME, _LONGEST_TEXT = 100, 600


def write_documents_report(folder: Path) -> Path:
    """Write documents.html of a finished run of kinject documents; return its path.

    Raises `InputError` when `folder` holds none, or one of its files is damaged; `DiskError` on I/O.
    """
    return write_page(folder, "documents", PAGE, partial(_make_page, folder))


def _make_page(folder: Path, manifest: Mapping[str, Any]) -> Page:
    counts = manifest["counts"]
    copies = [row for _, row in read_jsonl(folder / "duplicates.jsonl")]
    boilerplate = [row for _, row in read_jsonl(folder / "boilerplate.jsonl")]
    result = DocumentsResult(folder, str(counts["fingerprint"]), counts)
    command = format_name(" ".join(manifest.get("command", ())))
    sections = (
        Section("Skipped", tuple(_skipped_tables(result))),
        Section("Largest and strangest documents", tuple(_extremes(counts))),
        Section("Copies and repeats", tuple(_copies(copies))),
        Section("Boilerplate", tuple(_boilerplate(boilerplate))),
        Section("Personal data and licences", tuple(_flags(counts))),
        Section("A sample with its passages", tuple(_samples(folder / "documents.jsonl", counts["n_documents"]))),
        Section("Run it again", (Code((command,)),) if command else ()),
    )
    versions = manifest.get("versions") or {}
    return Page(
        title=f"{format_name(Path(next(iter(manifest['inputs']), folder.name)).name)}: documents collected",
        subtitle="kinject documents", description="", facts=tuple(_facts(manifest, counts)), headline=_headline(counts),
        verdict=(), sections=tuple(section for section in sections if section.blocks),
        footer=format_name(f"Written {manifest.get('written', '')} with kinject {versions.get('kinject', '')}."),
    )  # fmt: skip


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:,.1f} KiB"


def _facts(manifest: Mapping[str, Any], counts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "date", format_date(str(manifest.get("written", "")))
    yield "from", join_words([format_name(name, 60) for name in manifest["inputs"]])
    yield "files", f"{counts['n_files']:,} ({_size(counts['n_bytes'])})"
    yield "read, by kind", format_name(listing(counts["kinds"]), 200)
    yield "words", f"{counts['n_words']:,}"
    yield "documents by language", format_name(listing(named_languages(counts["languages"])), 200)


def _headline(counts: Mapping[str, Any]) -> str:
    n_skipped = sum(counts["skipped"].values())
    copies = sum(counts["duplicates"].values())
    text = f"{counts['n_documents']:,} documents from {counts['n_read']:,} of {counts['n_files']:,} files"
    text += f"; {n_skipped:,} files or parts of one could not be read" if n_skipped else "; everything could be read"
    text += f"; {copies:,} copies were left out" if copies else ""
    lines = counts["boilerplate"]
    text += (
        f"; {lines['lines']:,} lines that many documents share were left out {lines['removed']:,} times"
        if lines["lines"]
        else ""
    )
    return text + "."


def _skipped_tables(result: DocumentsResult) -> Iterator[Block]:
    rows, counts, reasons = result.skipped(), result.counts, result.skipped_by_reason()
    if not reasons:
        yield Text(
            "Every file was read."
            + (f" {counts['left_out']:,} hidden or of the system were left out." if counts["left_out"] else "")
        )
        return
    lines = tuple(
        line(_name(reason), f"{len(locations):,}", format_name(detail, _LONGEST_TEXT))
        for reason, (locations, detail) in reasons.items()
    )
    yield TableBlock("By reason", "skipped.jsonl has all", ("reason", "files or parts", "the first"), lines, wordy=True)
    listed = [row for row in rows if not row["left_out"]] + [row for row in rows if row["left_out"]]
    table = tuple(line(_name(row["where"]), format_name(row["detail"], _LONGEST_TEXT)) for row in listed[:_MOST_ROWS])
    subtitle = f"the first {_MOST_ROWS:,} of {len(listed):,}" if len(listed) > _MOST_ROWS else ""
    yield TableBlock("Each of them", subtitle, ("file", "why"), table, wordy=True, folded=len(table) > _UNFOLDED)


def _extremes(counts: Mapping[str, Any]) -> Iterator[Block]:
    largest = tuple(line(_name(location), f"{n:,}") for location, n in counts["largest"])
    yield TableBlock("The largest", "", ("document", "words"), largest, folded=len(largest) > 10)
    strangest = tuple(line(_name(location), format_name(why, 200)) for location, why in counts["strangest"])
    if strangest:
        about = "many characters that are no letters, very long words, repeats, another language than the others"
        yield TableBlock("The strangest", about, ("document", "why"), strangest, wordy=True)


def _copies(rows: list[Row]) -> Iterator[Block]:
    documents = [row for row in rows if row["how"] != "passage"]
    within = [row for row in rows if row["how"] == "passage"]
    if documents:
        lines = tuple(
            line(
                _name(row["dropped"]),
                _name(row["kept"]),
                row["how"],
                format_percent(row["overlap"]),
                format_name(" ".join(row.get("words_only_here", ())), 120),
            )
            for row in documents[:_MOST_ROWS]
        )
        table = TableBlock(
            f"{format_count(len(documents), 'document')} left out", "as copies of one that is kept; duplicates.jsonl has all",
            ("left out", "kept", "how", "words in common", "words only in the copy"), lines,
            heads=2, wordy=True, folded=len(lines) > _UNFOLDED,
        )  # fmt: skip
        yield without_empty_columns(table)
    if within:
        lines = tuple(
            line(_name(row["dropped"]), f"{row['passages']:,}", format_name(row["first"][0][0], 120))
            for row in sorted(within, key=lambda row: -row["passages"])[:_MOST_ROWS]
        )
        yield TableBlock(
            f"Repeats within {format_count(len(within), 'document')}", "passages, or lines of a log, that are there before",
            ("document", "left out", "the first"), lines, wordy=True, folded=len(lines) > _UNFOLDED,
        )  # fmt: skip


def _boilerplate(rows: list[Row]) -> Iterator[Block]:
    lines = tuple(
        line(format_name(row["line"], _LONGEST_TEXT), f"{row['documents']:,}", _name(row["kept_in"]))
        for row in rows[:_MOST_ROWS]
    )
    if lines:
        title = f"{format_count(len(rows), 'line')} that many documents share"
        yield TableBlock(
            title, "", ("line", "left out of documents", "kept in"), lines, wordy=True, folded=len(lines) > _UNFOLDED
        )


def _name(text: str) -> str:
    return format_name(text, _LONGEST_NAME)


def _flags(counts: Mapping[str, Any]) -> Iterator[Block]:
    personal = counts["personal_data"]
    if personal:
        lines = tuple(line(kind, f"{n:,}", f"{documents:,}") for kind, (documents, n) in personal.items())
        about = (
            "masked in the documents" if counts["masked"] else "flagged in meta; documents.personal_data=mask masks it"
        )
        yield TableBlock("Personal data", about, ("kind", "found", "documents"), lines)
    if counts["licences"]:
        lines = tuple(line(_name(name), f"{n:,}") for name, n in counts["licences"].items())
        yield TableBlock("Licences", "", ("licence", "documents"), lines)


def _samples(path: Path, n_documents: int) -> Iterator[Block]:
    """Yield some documents from the beginning, the middle and the end, with their first passages."""
    sample_numbers = sorted({round(i * (n_documents - 1) / max(1, _N_SAMPLES - 1)) for i in range(_N_SAMPLES)})
    for number, document in enumerate(read_rows(path)):
        if number not in sample_numbers:
            continue
        passages = split_passages(document, _PASSAGE_TOKENS, word_spans)
        yield Heading(format_name(f"{document.title or document.id} ({document.source})", 160))
        lines = tuple(
            line(
                Cell(
                    f"{i} of {len(passages)}",
                    "",
                    format_name(" > ".join((*passage.path, passage.location)).strip(" >"), 120),
                ),
                format_name(passage.text, _LONGEST_TEXT),
            )
            for i, passage in enumerate(passages[:_MOST_PASSAGES], 1)
        )
        yield TableBlock("", "", ("passage", f"text, at most {_PASSAGE_TOKENS} words and marks"), lines, wordy=True)
