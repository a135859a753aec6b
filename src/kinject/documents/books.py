"""Books (EPUB): pages in a zip."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from kinject.disk import read_bytes
from kinject.documents.charsets import declared_charset
from kinject.documents.html import page_of
from kinject.documents.readers import LocatedDocument, ReadOptions, UnreadPart
from kinject.documents.text import (
    XmlElement,
    check_archive,
    decode,
    joined,
    library_errors,
    parse_xml,
    whole_file,
)
from kinject.errors import InputError

_PACKAGE = "{http://www.idpf.org/2007/opf}"
_FIELDS = {"title": "title", "author": "creator", "licence": "rights"}
"""Key of meta -> element of Dublin Core."""


def read_epub(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a book as one document, its chapters in reading order. `chapters` in meta are [start,
    file] of each."""
    data = io.BytesIO(read_bytes(path, options.largest, stream))
    check_archive(path, data, options)
    with library_errors(path, "EPUB", "Export it again."), zipfile.ZipFile(data) as book:
        container = parse_xml(path, book.read("META-INF/container.xml"))
        root = next(_named(container, "rootfile")).get("full-path")
        package = parse_xml(path, book.read(root))
        files = _files_in_order(package)
        meta = {}
        for key, name in _FIELDS.items():
            texts = [(element.text or "").strip() for element in _named(package, name)]
            separator = " "
            if key == "author":
                separator = ", "
            meta[key] = separator.join(filter(None, texts))
        meta["date"] = _date_of_book(package)
        folder = posixpath.dirname(root)
        chapters: list[tuple[int | str, str]] = []
        faults = []
        names = {_file_name("", name): name for name in book.namelist()}
        locked = _locked_files(path, book, names)
        for file in files:
            name = _file_name(folder, file)
            if name in locked or name not in names:
                reason = "missing from the file. Export it again."
                if name in locked:
                    reason = "locked by its shop. Take the book out."
                faults.append((f"{path}: {file}", UnreadPart(f"{path}: {file}: {reason}")))
                continue
            page = book.read(names[name])
            source, _ = decode(path, page, declared_charset(page))
            chapters.append((file, page_of(path, source, whole_page=True)[1]))
    if faults and not chapters:
        raise InputError(str(faults[0][1]))
    yield from faults
    text, starts = joined([(name, text) for name, text in chapters if text])
    title = meta.pop("title")
    stated = {key: value for key, value in meta.items() if value}
    yield whole_file(path, title, text, {**stated, "chapters": starts})


def _date_of_book(package: XmlElement) -> str:
    """Return the date at which a book was published, "" without one. Older books state that of each
    change of the file as well, in any order."""
    first = ""
    for element in _named(package, "date"):
        date = (element.text or "").strip()
        if element.get(f"{_PACKAGE}event") == "publication":
            return date
        first = first or date
    return first


def _files_in_order(package: XmlElement) -> list[str]:
    """Return the files of a book along its spine; what is beside the text (notes, answers) follows
    it."""
    items = {}
    for item in _named(package, "item"):
        # A picture may be a page.
        if not re.match("image/(?!svg)", item.get("media-type", "")):
            items[item.get("id")] = item.get("href", "")
    spine = list(_named(package, "itemref"))
    linear = [item for item in spine if item.get("linear") != "no"]
    others = [item for item in spine if item.get("linear") == "no"]
    files = [items.get(item.get("idref"), "") for item in (*linear, *others)]
    return list(filter(None, files))


def _file_name(folder: str, file: str) -> str:
    """Return the name of a file in a book as it is compared: some programs write other cases."""
    name = unquote(file).partition("#")[0]
    return posixpath.normpath(posixpath.join(folder, name)).lower()


def _locked_files(path: Path, book: zipfile.ZipFile, names: Mapping[str, str]) -> set[str]:
    """Return the names of the files that are encrypted; the fonts of most books are."""
    locked: set[str] = set()
    place = names.get("meta-inf/encryption.xml", "")
    if place:
        for reference in _named(parse_xml(path, book.read(place)), "CipherReference"):
            locked.add(_file_name("", reference.get("URI", "")))
    return locked


def _named(root: XmlElement, name: str) -> Iterator[XmlElement]:
    """Yield the elements of a local name, whatever their namespace."""
    yield from root.iter(f"{{*}}{name}")
