"""PDF."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kinject.corpus.documents.readers import Found, ReadOptions
from kinject.corpus.documents.text import import_extra, whole_file
from kinject.disk import LARGEST_FILE, format_size, read_bytes
from kinject.errors import InputError

_MOST_OPERATIONS = 200_000
"""Drawing operations of one page of a PDF: a dense map has some ten thousand."""
_MOST_OPERATIONS_IN_ALL = 10_000_000


def read_pdf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the text of a PDF as one document: lines of a paragraph joined, hyphenated words rejoined.

    Raises `InputError` naming the page that cannot be read, or where no page holds text (scanned images).
    """
    pypdf = import_extra("pypdf", path)
    data = read_bytes(path, options.largest, stream)
    pages: list[str] = []
    where = f"{path}: page 1"
    cost = _PageCost()
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError(f"{path}: the PDF needs a password. Save a copy without one.")
        for number, page in enumerate(reader.pages, start=1):
            where = f"{path}: page {number}"
            pages.append(unwrap_lines(cost.extract_text(page)))
        title = str((reader.metadata and reader.metadata.title) or "").strip()
    except InputError:
        raise
    except Exception as error:  # a damaged PDF makes the parser raise anything
        raise InputError(
            f"{where}: not a readable PDF ({type(error).__name__}: {str(error)[:100]}). Print it to a new PDF, or take it out."
        ) from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise InputError(
            f"{path}: empty document: none of its {len(pages)} pages holds text. Scanned pages need OCR first."
        )
    yield whole_file(path, title, text)


class _PageCost:
    """Counts bytes and drawing operations of a PDF's pages: a small file may cause any amount of work."""

    def __init__(self) -> None:
        self._n_bytes = self._n_operations = 0

    def extract_text(self, page: Any) -> str:
        """Return the text of a page of pypdf's. Raises `ValueError` if it, or all so far, draws too much."""
        contents = page.get_contents()
        self._n_bytes += len(contents.get_data()) if contents is not None else 0
        if self._n_bytes > LARGEST_FILE:
            raise ValueError(f"its pages unpack to more than {format_size(LARGEST_FILE)}")
        before = self._n_operations

        def count(*_: object) -> None:
            self._n_operations += 1
            if self._n_operations - before > _MOST_OPERATIONS or self._n_operations > _MOST_OPERATIONS_IN_ALL:
                raise ValueError(f"more than {_MOST_OPERATIONS:,} drawing operations")

        return str(page.extract_text(visitor_operand_before=count))


def unwrap_lines(page: str) -> str:
    """Return the lines of a page joined to paragraphs: a line ends one if it is short or ends a sentence early."""
    lines = [line.strip() for line in page.splitlines()]
    width = max((len(line) for line in lines), default=0)
    text = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if re.search(r"[^\W\d_]-$", line) and following[:1].islower():
            text += line[:-1]
        elif not line or not following:
            text += f"{line}\n"
        else:
            whole = len(line) < 0.6 * width or (line[-1:] in ".!?:" and len(line) < 0.85 * width)
            text += line + ("\n" if whole else " ")
    return re.sub(r"\n{3,}", "\n\n", text).strip()
