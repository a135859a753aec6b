"""Which reader reads which file: the table of kinds, and the one function that reads an open file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from kinject.disk import LARGEST_FILE, LONGEST_LINE
from kinject.errors import InputError
from kinject.types import Document

Found = tuple[str, Document | InputError]
"""The location (file, file:line, file: page 3, archive.zip/member.pdf), and the document or why it cannot be read."""
HEAD = 16_384
"""The bytes of a file's beginning from which its kind is found."""
_MOST_ERRORS = 1_000
"""Documents of one file that cannot be read, before the rest of it is left unread."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    `text_field`, `title_field` and `id_field` name the keys of rows and the columns of tables (None: found by name).
    `ocr` reads scans by optical character recognition. A file, or a member of an archive, that is held whole in memory has
    at most `largest` bytes.
    """

    text_field: str | None = None
    title_field: str | None = None
    id_field: str | None = None
    ocr: bool = False
    largest: int = LARGEST_FILE


Reader = Callable[[Path, BinaryIO, ReadOptions], Iterator[Found]]
"""Yields what an open file holds. It may raise `InputError` for the whole file, at any document."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: the suffixes of its names, and ``module:function`` of its reader in this package.

    A reader is imported when its first file is read, and its libraries with it.
    """

    suffixes: tuple[str, ...]
    reader: str


KINDS: Mapping[str, Kind] = {
    "text": Kind((".txt",), "text:read_text"),
    "markdown": Kind((".md",), "text:read_markdown"),
    "html": Kind((".html", ".htm"), "html:read_html"),
    "pdf": Kind((".pdf",), "pdf:read_pdf"),
    "csv": Kind((".csv",), "rows:read_csv"),
    "jsonl": Kind((".jsonl",), "rows:read_json_rows"),
    "parquet": Kind((".parquet",), "rows:read_parquet"),
}
"""Name -> kind. Whoever adds one adds a test to tests/corpus/test_readers.py and a row to docs/own-documents.md."""
SUFFIXES: Mapping[str, str] = {suffix: name for name, kind in KINDS.items() for suffix in kind.suffixes}


def kind_of(path: Path, head: bytes) -> str:
    """Return the name of the kind of the file `path` that begins with the bytes `head`.

    Raises `InputError` with the reason if no reader can read it.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        known = ", ".join(sorted(SUFFIXES))
        raise InputError(f"{path}: found suffix {path.suffix!r}, can read {known}. Convert it or take it out.")
    return SUFFIXES[suffix]


def read_file(path: Path, stream: BinaryIO, options: ReadOptions | None = None) -> Iterator[Found]:
    """Yield the documents in `stream`, the file `path` opened for reading bytes, and an error for each that is unreadable.

    The stream can be sought, and stands at its beginning. Each document holds text that UTF-8 and tokenizers can hold.
    Raises `DiskError` if the disk fails; every fault of the file is yielded.
    """
    n_errors = 0
    try:
        name = kind_of(path, stream.read(HEAD))
        stream.seek(0)
        for where, found in reader_of(name)(path, stream, options or ReadOptions()):
            fault = found if isinstance(found, InputError) else fault_of(found, where)
            yield where, fault or found
            n_errors += fault is not None
            if n_errors >= _MOST_ERRORS:
                raise InputError(f"{path}: {n_errors:,} documents cannot be read; the rest is left unread. Repair it.")
    except InputError as error:
        yield str(path), error


def reader_of(name: str) -> Reader:
    """Return the reader of the kind `name`."""
    module, _, function = KINDS[name].reader.partition(":")
    reader: Reader = getattr(import_module(f"kinject.corpus.documents.{module}"), function)
    return reader


def fault_of(document: Document, where: str) -> InputError | None:
    """Return the error of a document whose text is blank or holds what UTF-8 files or tokenizers cannot hold, else None."""
    if not document.text.strip():
        return InputError(f"{where}: empty document. Each must hold some text; take it out or fill it.")
    for key, text in (("text", document.text), ("title", document.title)):
        if len(text) > LONGEST_LINE:
            return InputError(
                f"{where}: {key}: {len(text):,} characters, allowed: {LONGEST_LINE:,}. Split the document."
            )
        if "\0" in text:
            return InputError(
                f"{where}: {key}: a NUL character at position {text.index(chr(0))}. Is this a text file? Take it out."
            )
        surrogate = _SURROGATE.search(text)
        if surrogate:
            return InputError(
                f"{where}: {key}: half a surrogate pair (\\u{ord(surrogate[0]):04x}) at position {surrogate.start()}, "
                "which UTF-8 cannot hold. Repair the text where it was exported."
            )
    return None
