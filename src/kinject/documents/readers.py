"""The table of kinds of files with their readers, and the one function that reads an open file."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from kinject.disk import LARGEST_FILE, LONGEST_LINE
from kinject.errors import InputError
from kinject.terminal import format_count
from kinject.types import Document

LocatedDocument = tuple[str, Document | InputError]
"""The location (file, file:line, file: page 3, archive.zip/member.pdf), and the document or its
error."""


class UnreadPart(InputError):
    """A part of a document that cannot be read, a page of a PDF; the rest of it is."""


HEAD = 16_384
"""The bytes of a file's beginning from which its kind is found."""
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading files. `text_field`, `title_field` and `id_field` name the keys of rows
    and the columns of tables (None: found by name). A file, or a member of an archive, that is held
    whole in memory has at most `largest` bytes. `within` counts the archives and mails that the
    file lies in.
    """

    text_field: str | None = None
    title_field: str | None = None
    id_field: str | None = None
    largest: int = LARGEST_FILE
    within: int = 0


Reader = Callable[[Path, BinaryIO, ReadOptions], Iterator[LocatedDocument]]
"""Yields the documents of an open file. It may raise `InputError` for the whole file, at any
document."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: the suffixes of its names, and ``module:function`` of its reader in this
    package.

    A reader is imported when its first file is read, and its libraries with it.
    """

    suffixes: tuple[str, ...]
    reader: str


_SAME = "c cpp go java kt lua php r scala sh sql swift ts vb yaml toml ini tsx jsx"
_OTHER = """
    .py python  .js javascript  .rb ruby  .rs rust  .cs csharp  .h c  .hpp cpp  .cc cpp  .m matlab
    .jl julia  .hs haskell  .ps1 powershell  .bash bash  .yml yaml  .dart dart  .ex elixir
    .clj clojure  .f90 fortran  .pas pascal  .proto protobuf  .tf hcl  .groovy groovy  .tex latex
    .pl perl
"""
LANGUAGES: Mapping[str, str] = {
    **{f".{name}": name for name in _SAME.split()},
    **dict(re.findall(r"(\S+) (\S+)", _OTHER)),
}
"""Suffix of source code -> the name of its language, as it is written behind a fence of Markdown.
"""
KINDS: Mapping[str, Kind] = {
    "text": Kind((".txt", ".text", ".log", ".asc", ""), "text:read_text"),
    "markdown": Kind((".md", ".markdown", ".mdx", ".qmd", ".rmd"), "text:read_markdown"),
    "rst": Kind((".rst",), "markup:read_rst"),
    "subtitles": Kind((".srt", ".vtt"), "subtitles:read_subtitles"),
    "code": Kind(tuple(LANGUAGES), "text:read_code"),
    "notebook": Kind((".ipynb",), "markup:read_notebook"),
    "html": Kind((".html", ".htm", ".xhtml"), "html:read_html"),
    "mediawiki": Kind((), "markup:read_mediawiki"),
    "pdf": Kind((".pdf",), "pdf:read_pdf"),
    "docx": Kind((".docx", ".docm", ".dotx"), "word:read_docx"),
    "pptx": Kind((".pptx", ".pptm", ".ppsx"), "slides:read_pptx"),
    "xlsx": Kind((".xlsx", ".xlsm"), "sheets:read_xlsx"),
    "epub": Kind((".epub",), "books:read_epub"),
    "odf": Kind((".odt", ".ods", ".odp"), "open_document:read_open_document"),
    "rtf": Kind((".rtf",), "rtf:read_rtf"),
    "msg": Kind((".msg",), "mail:read_msg"),
    "mail": Kind((".eml", ".mht", ".mhtml"), "mail:read_eml"),
    "mailbox": Kind((".mbox",), "mail:read_mbox"),
    "csv": Kind((".csv", ".tsv", ".tab"), "rows:read_csv"),
    "jsonl": Kind((".jsonl", ".ndjson"), "rows:read_json_rows"),
    "json": Kind((".json",), "rows:read_json"),
    "parquet": Kind((".parquet",), "rows:read_parquet"),
    "zip": Kind((".zip",), "archives:read_zip"),
    "gzip": Kind((".gz",), "archives:read_gzip"),
    "tar": Kind((".tar", ".tgz", ".tbz", ".txz"), "archives:read_tar"),
}
"""Name -> kind. Whoever adds one adds a test to tests/documents/test_kinds_of_documents.py and a
row to docs/own-documents.md."""
SUFFIXES: Mapping[str, str] = {
    suffix: name for name, kind in KINDS.items() for suffix in kind.suffixes if suffix
}
_BINARY = frozenset(
    {"pdf", "docx", "pptx", "xlsx", "epub", "parquet", "zip", "gzip", "odf", "msg", "tar"}
)
_ARCHIVES = frozenset({"zip", "gzip", "tar"})
# The part of a text in UTF-16 that is NUL: half of it if all is ASCII.
_UTF16_NUL = 0.35
# Bytes of a damaged text for one NUL in it; in programs and pictures every third is one.
_TEXT_PER_NUL = 20
_TAR = re.compile(r"\.(?:tar(?:\.(?:gz|bz2|xz))?|tgz|tbz2?|txz)$", re.IGNORECASE)
MOST_WITHIN = 4
"""Archives and mails that a file may lie in."""
_SIGNATURES = ((b"\x1f\x8b", "gzip"), (b"PAR1", "parquet"), (b"{\\rtf", "rtf"))
_IMAGE = "an image. ocrmypdf makes a PDF with text of it; or take it out"
_OLD = (
    "an Office file of before 2007, or one locked with a password. Save it as .docx, .xlsx or .pptx"
)
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"II*\0", b"MM\0*", b"GIF8", b"BM")
_PACKED = (b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")
_REFUSED = {
    b"\xd0\xcf\x11\xe0": _OLD,
    **dict.fromkeys(_IMAGES, _IMAGE),
    **dict.fromkeys(_PACKED, "an archive. Unpack it"),
}
"""Beginning of a file -> its kind and the fix, for kinds that no reader reads."""
_ROOT = re.compile(
    rb"\s*(?:<\?(?s:.*?)\?>\s*|<!--(?s:.*?)-->\s*"
    rb"|<!doctype(?P<type>[^>\[]*)(?:\[[^\]]*\])?>\s*)*+<(?P<root>[a-z][\w:-]*)",
    re.IGNORECASE,
)
_MEMBER = re.compile(rb"PK\x03\x04(?s:.{26})([\w./\[\]-]+)")
"""The name of a member of a zip, after 26 bytes of numbers."""
_MAILBOX = re.compile(rb"From \S+.*\d\d:\d\d.*\n(?:>?[\w-]+:[ \t]|\S)")
_MAIL_HEADER = re.compile(
    rb"^(?:Received|Return-Path|From|To|Subject|Date|Message-ID|MIME-Version|Delivered-To):",
    re.IGNORECASE | re.MULTILINE,
)


def kind_of(path: Path, head: bytes) -> str:
    """Return the name of the kind of the file `path` that begins with the bytes `head`: by these,
    else by its suffix.

    Raises `InputError` with the reason if no reader can read it.
    """
    named = SUFFIXES.get(path.suffix.lower())
    if not head:
        raise InputError(f"{path}: holds no documents: the file is empty. Take it out.")
    kind = _kind_of_binary(path, head, named)
    if kind is not None:
        return kind
    for signature, reason in _REFUSED.items():
        if not head.startswith(signature):
            continue
        # Letters, as "BM", may begin a text: a known suffix and no NUL are evidence of one.
        if signature.isalpha() and named and b"\0" not in head:
            continue
        raise InputError(f"{path}: found {reason}.")
    if b"\0" in head and not _is_utf16(head) and not _may_hold_nul(head, named):
        raise InputError(
            f"{path}: found bytes that are no text, and of no kind that has a reader "
            f"(suffix {path.suffix!r}). Take it out."
        )
    return _kind_of_text(path, head.removeprefix(codecs.BOM_UTF8), named)


def _kind_of_binary(path: Path, head: bytes, named: str | None) -> str | None:
    """Return the kind of a file by its first bytes, None if no signature is among them."""
    is_packed = head[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7")
    if (is_packed and _TAR.search(path.name)) or head[257:262] == b"ustar":
        return "tar"
    # Old Office files begin alike: the name decides.
    if head.startswith(b"\xd0\xcf\x11\xe0") and named == "msg":
        return "msg"
    # As viewers of PDF do: other bytes may be above.
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _kind_of_zip(path, head, named)
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    return None


def _may_hold_nul(head: bytes, named: str | None) -> bool:
    """Return whether the reader of a kind of text takes a NUL in it."""
    # In rows it is the fault of one row, which its reader reports with the line.
    if named in ("jsonl", "csv"):
        return True
    # Mail programs and browsers leave out the few that are in damaged mails and pages.
    return named in ("mail", "mailbox", "html") and head.count(0) * _TEXT_PER_NUL < len(head)


def _is_utf16(head: bytes) -> bool:
    """Return whether bytes are text in UTF-16: by their mark, or as every other byte is NUL."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    n_nul = max(head[:2000:2].count(0), head[1:2000:2].count(0))
    return n_nul > _UTF16_NUL * len(head[:2000])


def _kind_of_zip(path: Path, head: bytes, named: str | None) -> str:
    """Return the kind of a file that is a zip, by the names of the first files in it."""
    if b"[Content_Types].xml" in head or named in ("docx", "pptx", "xlsx"):
        kinds = {"docx": b"word/", "xlsx": b"xl/", "pptx": b"ppt/"}
        # Only in names: packed bytes may be any letters.
        names = b"\n".join(_MEMBER.findall(head))
        kinds_inside = [kind for kind, folder in kinds.items() if folder in names]
        return kinds_inside[0] if len(kinds_inside) == 1 else named or "zip"
    if head[30:].startswith(b"mimetypeapplication/epub"):
        return "epub"
    if named == "odf" or b"mimetypeapplication/vnd.oasis" in head:
        return "odf"
    return "epub" if named == "epub" else "zip"


def _kind_of_text(path: Path, head: bytes, named: str | None) -> str:
    """Return the kind of a file that is text: by its first tag or header, else by its suffix."""
    if b"\x1f\nFile: " in head:  # the manual of a program, as info shows it
        return "text"
    root = _ROOT.match(head)
    root_name = root["root"].lower().decode() if root else ""
    # Markdown may begin with a tag.
    if root_name in ("html", "mediawiki") and named != "markdown":
        return root_name
    if root and root["type"] and b"html" in root["type"].lower():
        return "html"
    suffix = path.suffix.lower()
    is_mailbox = _MAILBOX.match(head) is not None
    if is_mailbox and named is None and suffix in ("", ".mbx", ".mail", ".msg"):
        return "mailbox"
    if named == "mail" or (named is None and len(set(_MAIL_HEADER.findall(head[:4000]))) > 2):
        return "mailbox" if is_mailbox else "mail"
    if named is None:
        _check_unnamed(path, head, root_name)
    elif named in _BINARY:
        raise InputError(
            f"{path}: not a readable {path.suffix[1:].upper()}: it holds plain text. "
            "Rename it to .txt, or take it out."
        )
    return named or "text"


def _check_unnamed(path: Path, head: bytes, root_name: str) -> None:
    """Raise `InputError` if a file whose suffix is of no kind is XML (its root is `root_name`), or
    no text."""
    # Of another suffix it may be a text that begins with a tag, unless it declares itself.
    is_named = path.suffix.lower() in (".xml", ".xsd", ".rss", ".svg", "")
    if root_name and (is_named or head.startswith(b"<?xml")):
        raise InputError(
            f"{path}: found XML whose root is <{root_name}>, can read MediaWiki's. "
            "Export HTML, or convert it."
        )
    if path.suffix and not _is_plain_text(head):
        known = ", ".join(sorted(set(SUFFIXES) - set(LANGUAGES)))
        raise InputError(
            f"{path}: found suffix {path.suffix!r} and no text, can read {known} and source code. "
            "Convert it or take it out."
        )


def _is_plain_text(head: bytes) -> bool:
    """Return whether the beginning of a file of another suffix (README.Debian, ssh.1) is text:
    UTF-8 without control codes."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    return _NO_TEXT.search(text) is None


def read_file(
    path: Path, stream: BinaryIO, options: ReadOptions | None = None
) -> Iterator[LocatedDocument]:
    """Yield the documents in `stream`, the file `path` opened for reading bytes, and an error for
    each that is unreadable.

    The stream can be sought, and is at its beginning. Each document holds text that UTF-8 and
    tokenizers can hold. Raises `DiskError` if the disk fails; every fault of the file is yielded.
    """
    options = options or ReadOptions()
    try:
        name = kind_of(path, stream.read(HEAD))
        stream.seek(0)
        if options.within and name in _ARCHIVES:
            raise InputError(f"{path}: an archive within an archive is not read. Unpack it.")
        if options.within > MOST_WITHIN:
            raise InputError(
                f"{path}: lies in {options.within} mails and archives, allowed: {MOST_WITHIN}. "
                "Unpack it."
            )
        for location, document in reader_of(name)(path, stream, options):
            fault = fault_of(document, location) if isinstance(document, Document) else None
            yield location, fault or document
    except InputError as error:
        yield str(path), error


def read_member(path: Path, data: bytes, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield as `read_file` the documents of a member of an archive, or an attachment; `path` is
    ``archive.zip/member.pdf``."""
    yield from read_file(path, io.BytesIO(data), replace(options, within=options.within + 1))


def reader_of(name: str) -> Reader:
    """Return the reader of the kind `name`."""
    module, _, function = KINDS[name].reader.partition(":")
    reader: Reader = getattr(import_module(f"kinject.documents.{module}"), function)
    return reader


def fault_of(document: Document, location: str) -> InputError | None:
    """Return the error of a document whose text is blank or has characters that UTF-8 or tokenizers
    lack, else None."""
    if not document.text.strip():
        return InputError(
            f"{location}: empty document. Each must hold some text; take it out or fill it."
        )
    for key, text in (("text", document.text), ("title", document.title)):
        if len(text) > LONGEST_LINE:
            return InputError(
                f"{location}: {key}: {format_count(len(text), 'character')}, allowed: "
                f"{LONGEST_LINE:,}. Split the document."
            )
        if "\0" in text:
            return InputError(
                f"{location}: {key}: a NUL character at position {text.index(chr(0))}. "
                "Is this a text file? Take it out."
            )
        surrogate = _SURROGATE.search(text)
        if surrogate:
            return InputError(
                f"{location}: {key}: half a surrogate pair (\\u{ord(surrogate[0]):04x}) "
                f"at position {surrogate.start()}, which UTF-8 cannot hold. "
                "Repair the text where it was exported."
            )
    return None
