"""Plain text and Markdown, and what all readers of files share: decoding, and libraries that may be missing."""

from __future__ import annotations

import codecs
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kinject.corpus.documents.readers import Found, ReadOptions
from kinject.disk import content_id, read_bytes
from kinject.errors import InputError
from kinject.types import Document

_HEADING = re.compile(r"^#[ \t]+(.*)$", re.MULTILINE)
_CHARSETS = frozenset(codecs.lookup(name).name for name in (
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "ascii", "latin-1", "iso8859-2", "iso8859-3",
    "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7", "iso8859-8", "iso8859-10", "iso8859-13", "iso8859-14",
    "iso8859-15", "iso8859-16", "iso8859-9", "koi8-r", "koi8-u", "cp866", "cp874", "cp1250", "cp1251", "cp1252",
    "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "mac-roman", "mac-cyrillic", "gbk", "gb2312",
    "gb18030", "big5", "big5hkscs", "euc-jp", "shift_jis", "iso2022_jp", "euc-kr",
))  # fmt: skip
"""Encodings that a page may declare: those of the web, none of which runs code or takes long."""


def read_text(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the one document in a text file, named as the file."""
    yield whole_file(path, "", decode(path, read_bytes(path, options.largest, stream)))


def read_markdown(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the one document in a Markdown file, named by its first heading of level 1."""
    text = decode(path, read_bytes(path, options.largest, stream))
    headings = (match[1].strip().rstrip("#").strip() for match in _HEADING.finditer(text))
    yield whole_file(path, next(filter(None, headings), ""), text)


def whole_file(path: Path, title: str, text: str, meta: Mapping[str, Any] | None = None) -> Found:
    """Return the location and the document of a file that is one document. Without a title it has the file's name."""
    title = title or path.stem
    return str(path), Document(content_id(title, text), title, text, str(path), meta or {})


def import_extra(module: str, path: Path) -> Any:
    """Return a module of the extra `documents`. Raises `InputError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.suffix} needs {module.partition('.')[0]}, which is not installed. "
            "Run: pip install 'kinject[documents]'"
        ) from error


def decode(path: Path, data: bytes, charset: str = "utf-8-sig") -> str:
    """Return the text of `path`, whose bytes are `data`, with LF line ends and no byte-order mark.

    Raises `InputError` (file:line) if the charset is unknown or is not that of the file.
    """
    try:
        if codecs.lookup(charset).name not in _CHARSETS:
            raise LookupError
        return data.decode(charset).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except LookupError as error:
        raise InputError(f"{path}:1: unknown charset {charset!r}. Save the file as UTF-8.") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        name = "UTF-8" if charset.lower().startswith("utf-8") else charset
        raise InputError(f"{path}:{line}: not {name} (byte {error.start}). Save the file as UTF-8.") from error
