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
from kinject.types import Document

LocatedDocument = tuple[str, Document | InputError]
"""The location (file, file:line, file: page 3, archive.zip/member.pdf), and the document or its
error."""
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
LANGUAGES: Mapping[str, str] = {
    **{f".{name}": name for name in _SAME.split()},
    ".py": "python", ".js": "javascript", ".rb": "ruby", ".rs": "rust", ".cs": "csharp", ".h": "c", ".hpp": "cpp",
    ".cc": "cpp", ".m": "matlab", ".jl": "julia", ".hs": "haskell", ".ps1": "powershell", ".bash": "bash", ".yml": "yaml",
    ".dart": "dart", ".ex": "elixir", ".clj": "clojure", ".f90": "fortran", ".pas": "pascal", ".proto": "protobuf",
    ".tf": "hcl", ".groovy": "groovy", ".tex": "latex", ".pl": "perl",
}  # fmt: skip
"""Suffix of source code -> the name of its language, as it is written behind a fence of Markdown.
"""
KINDS: Mapping[str, Kind] = {
    "text": Kind((".txt", ".text", ".log", ".asc", ""), "text:read_text"),
    "markdown": Kind((".md", ".markdown"), "text:read_markdown"),
    "rst": Kind((".rst",), "markup:read_rst"),
    "code": Kind(tuple(LANGUAGES), "text:read_code"),
    "notebook": Kind((".ipynb",), "markup:read_notebook"),
    "html": Kind((".html", ".htm", ".xhtml"), "html:read_html"),
    "mediawiki": Kind((), "markup:read_mediawiki"),
    "pdf": Kind((".pdf",), "pdf:read_pdf"),
    "docx": Kind((".docx", ".docm", ".dotx"), "office:read_docx"),
    "pptx": Kind((".pptx", ".pptm", ".ppsx"), "office:read_pptx"),
    "xlsx": Kind((".xlsx", ".xlsm"), "office:read_xlsx"),
    "epub": Kind((".epub",), "archives:read_epub"),
    "odf": Kind((".odt", ".ods", ".odp"), "archives:read_open_document"),
    "rtf": Kind((".rtf",), "markup:read_rtf"),
    "msg": Kind((".msg",), "mail:read_msg"),
    "mail": Kind((".eml",), "mail:read_eml"),
    "mailbox": Kind((".mbox",), "mail:read_mbox"),
    "csv": Kind((".csv", ".tsv", ".tab"), "rows:read_csv"),
    "jsonl": Kind((".jsonl", ".ndjson"), "rows:read_json_rows"),
    "json": Kind((".json",), "rows:read_json"),
    "parquet": Kind((".parquet",), "rows:read_parquet"),
    "zip": Kind((".zip",), "archives:read_zip"),
    "gzip": Kind((".gz",), "archives:read_gzip"),
    "tar": Kind((".tar", ".tgz", ".tbz", ".txz"), "archives:read_tar"),
}
"""Name -> kind. Whoever adds one adds a test to tests/corpus/test_kinds_of_documents.py and a row
to docs/own-documents.md."""
SUFFIXES: Mapping[str, str] = {
    suffix: name for name, kind in KINDS.items() for suffix in kind.suffixes if suffix
}
_BINARY = frozenset(
    {"pdf", "docx", "pptx", "xlsx", "epub", "parquet", "zip", "gzip", "odf", "msg", "tar"}
)
_ARCHIVES = frozenset({"zip", "gzip", "tar"})
_TAR = re.compile(r"\.(?:tar(?:\.(?:gz|bz2|xz))?|tgz|tbz2?|txz)$", re.IGNORECASE)
MOST_WITHIN = 4
"""Archives and mails that a file may lie in."""
_SIGNATURES = (
    (b"\x1f\x8b", "gzip"), (b"PAR1", "parquet"), (b"{\\rtf", "rtf"),
)  # fmt: skip
_IMAGE = "an image. ocrmypdf makes a PDF with text of it; or take it out"
_OLD = (
    "an Office file of before 2007, or one locked with a password. Save it as .docx, .xlsx or .pptx"
)
_REFUSED = (
    (b"\xd0\xcf\x11\xe0", _OLD),
    *(
        (signature, _IMAGE)
        for signature in (b"\x89PNG", b"\xff\xd8\xff", b"II*\0", b"MM\0*", b"GIF8", b"BM")
    ),
    *(
        (start, "an archive. Unpack it")
        for start in (b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")
    ),
)
"""(beginning of a file, its kind and the fix), for kinds that no reader reads."""
_ROOT = re.compile(
    rb"\s*(?:<\?(?s:.*?)\?>\s*|<!--(?s:.*?)-->\s*|<!doctype(?P<type>[^>\[]*)(?:\[[^\]]*\])?>\s*)*+<(?P<root>[a-z][\w:-]*)",
    re.IGNORECASE,
)
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
    suffix = path.suffix.lower()
    named = SUFFIXES.get(suffix)
    if not head:
        raise InputError(f"{path}: holds no documents: the file is empty. Take it out.")
    if (_TAR.search(path.name) and head[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7")) or head[
        257:262
    ] == b"ustar":
        return "tar"
    if head.startswith(b"\xd0\xcf\x11\xe0") and named == "msg":
        return "msg"
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        return _kind_of_zip(path, head, named)
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    for signature, reason in _REFUSED:
        if head.startswith(signature) and not (signature.isalpha() and named and b"\0" not in head):
            raise InputError(f"{path}: found {reason}.")
    if b"\0" in head and not _is_utf16(head) and named not in ("jsonl", "csv"):
        description = f"bytes that are no text, and of no kind that has a reader (suffix {path.suffix!r}). Take it out"
        raise InputError(f"{path}: found {description}.")
    return _kind_of_text(path, head.removeprefix(codecs.BOM_UTF8), named)


def _is_utf16(head: bytes) -> bool:
    """Return whether bytes are text in UTF-16: by their mark, or as every other byte is NUL."""
    half = max(head[:2000:2].count(0), head[1:2000:2].count(0))
    return head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or half > 0.35 * len(
        head[:2000]
    )


def _kind_of_zip(path: Path, head: bytes, named: str | None) -> str:
    """Return the kind of a file that is a zip, by the names of the first files in it."""
    if b"[Content_Types].xml" in head or named in ("docx", "pptx", "xlsx"):
        kinds = {"docx": b"word/", "xlsx": b"xl/", "pptx": b"ppt/"}
        kinds_inside = [kind for kind, folder in kinds.items() if folder in head]
        return kinds_inside[0] if len(kinds_inside) == 1 else named or "zip"
    if head[30:].startswith(b"mimetypeapplication/epub"):
        return "epub"
    if named == "odf" or b"mimetypeapplication/vnd.oasis" in head:
        return "odf"
    return "epub" if named == "epub" else "zip"


def _kind_of_text(path: Path, head: bytes, named: str | None) -> str:
    """Return the kind of a file that is text: by its first tag or header, else by its suffix."""
    root = _ROOT.match(head)
    name = root["root"].lower().decode() if root else ""
    markup = {"html": "html", "mediawiki": "mediawiki"}.get(name)
    if b"\x1f\nFile: " in head:  # the manual of a program, as info shows it
        return "text"
    if markup and named != "markdown":
        return markup
    if root and root["type"] and b"html" in root["type"].lower():
        return "html"
    if (
        named is None
        and path.suffix.lower() in ("", ".mbx", ".mail", ".msg")
        and _MAILBOX.match(head)
    ):
        return "mailbox"
    if named == "mail" or (named is None and len(set(_MAIL_HEADER.findall(head[:4000]))) > 2):
        return "mailbox" if _MAILBOX.match(head) else "mail"
    if named in _BINARY:
        raise InputError(
            f"{path}: not a readable {path.suffix[1:].upper()}: it holds plain text. Rename it to .txt, or take it out."
        )
    if named is None and name and path.suffix.lower() in (".xml", ".xsd", ".rss", ".svg", ""):
        raise InputError(
            f"{path}: found XML whose root is <{name}>, can read MediaWiki's. Export HTML, or convert it."
        )
    if named is None and path.suffix and not _is_plain_text(head):
        known = ", ".join(sorted(set(SUFFIXES) - set(LANGUAGES)))
        raise InputError(
            f"{path}: found suffix {path.suffix!r} and no text, can read {known} and source code. Convert it or take it out."
        )
    return named or "text"


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
                f"{path}: lies in {options.within} mails and archives, allowed: {MOST_WITHIN}. Unpack it."
            )
        for location, document in reader_of(name)(path, stream, options):
            yield (
                location,
                document
                if isinstance(document, InputError)
                else fault_of(document, location) or document,
            )
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
                f"{location}: {key}: {len(text):,} characters, allowed: {LONGEST_LINE:,}. Split the document."
            )
        if "\0" in text:
            return InputError(
                f"{location}: {key}: a NUL character at position {text.index(chr(0))}. Is this a text file? Take it out."
            )
        surrogate = _SURROGATE.search(text)
        if surrogate:
            return InputError(
                f"{location}: {key}: half a surrogate pair (\\u{ord(surrogate[0]):04x}) at position {surrogate.start()}, "
                "which UTF-8 cannot hold. Repair the text where it was exported."
            )
    return None
