"""Readers of files that are one document each: plain text, Markdown, HTML, PDF."""

from __future__ import annotations

import codecs
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import LARGEST_FILE, content_id, format_size, read_bytes
from kinject.errors import InputError
from kinject.types import Document

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

Located = tuple[str, Document]
"""The location of a document (file:line, or file: page), and the document."""

_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
_HEADING = re.compile(r"^#[ \t]+(.*)$", re.MULTILINE)
_LEVEL = re.compile("h[1-6]")
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)([^>]*)")
_DEEPEST = 20_000
_MOST_ATTRIBUTES = 2_000
"""The parser's time grows with the square of both."""
_MOST_OPERATIONS = 200_000
"""Drawing operations of one page of a PDF: a dense map has some ten thousand."""
_MOST_OPERATIONS_IN_ALL = 10_000_000
_CLOSED_BY_OTHERS = frozenset({
    "p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody", "tfoot", "option", "optgroup", "rt", "rp", "colgroup",
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
})  # fmt: skip
_CHARSETS = frozenset(codecs.lookup(name).name for name in (
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "ascii", "latin-1", "iso8859-2", "iso8859-3",
    "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7", "iso8859-8", "iso8859-10", "iso8859-13", "iso8859-14",
    "iso8859-15", "iso8859-16", "iso8859-9", "koi8-r", "koi8-u", "cp866", "cp874", "cp1250", "cp1251", "cp1252",
    "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "mac-roman", "mac-cyrillic", "gbk", "gb2312",
    "gb18030", "big5", "big5hkscs", "euc-jp", "shift_jis", "iso2022_jp", "euc-kr",
))  # fmt: skip
"""Encodings that a page may declare: those of the web, none of which runs code or takes long."""
_SPACE = re.compile(r"\s+")
_UNREAD = "head script style noscript template nav footer aside form button select svg iframe object canvas"
_SKIPPED = frozenset(_UNREAD.split())
_PARAGRAPHS = "p h1 h2 h3 h4 h5 h6 blockquote pre table ul ol dl section article header figure hr"
_LINES = "li tr br div dt dd caption figcaption"
_BREAKS = {
    **dict.fromkeys(_PARAGRAPHS.split(), "\n\n"),
    **dict.fromkeys(_LINES.split(), "\n"),
    **dict.fromkeys(("td", "th"), " "),
}
"""Tag -> the white space before and after its text."""


def read_text(path: Path) -> Iterator[Located]:
    """Yield the one document in a text file, named as the file."""
    text = _decode(path)
    yield f"{path}:1", Document(content_id(path.stem, text), path.stem, text, str(path))


def read_markdown(path: Path) -> Iterator[Located]:
    """Yield the one document in a Markdown file, named by its first heading of level 1."""
    text = _decode(path)
    headings = (match[1].strip().rstrip("#").strip() for match in _HEADING.finditer(text))
    title = next(filter(None, headings), path.stem)
    yield f"{path}:1", Document(content_id(title, text), title, text, str(path))


def read_html(path: Path) -> Iterator[Located]:
    """Yield the text of a web page: of its <main> or only <article> where it has one; no menus, forms, scripts."""
    parser = import_extra("selectolax.lexbor", path).LexborHTMLParser
    data = read_bytes(path)
    charset = _CHARSET.search(data[:4096])
    source = _decode(path, charset[1].decode("ascii") if charset else "utf-8-sig")
    _check_page(path, source)
    tree = parser(source)
    articles = tree.css("article")
    root = tree.css_first("main") or (articles[0] if len(articles) == 1 else tree.body)
    text = page_text(root) if root is not None else ""
    heading = tree.css_first("title") or tree.css_first("h1")
    title = " ".join(heading.text().split()) if heading is not None else ""
    title = title or path.stem
    yield f"{path}:1", Document(content_id(title, text), title, text, str(path))


def _check_page(path: Path, source: str) -> None:
    """Raise `InputError` if the parser would take very long."""
    depth = 0
    for tag in _TAG.finditer(source):
        name, rest = tag[2].lower(), tag[3]
        if name not in _CLOSED_BY_OTHERS:
            depth += -1 if tag[1] else 1
        if depth > _DEEPEST:
            line = source.count("\n", 0, tag.start()) + 1
            raise InputError(
                f"{path}:{line}: elements lie more than {_DEEPEST:,} deep. Repair the page, or take it out."
            )
        if len(rest) > 2 * _MOST_ATTRIBUTES and len(_QUOTED.sub("", rest).split()) > _MOST_ATTRIBUTES:
            line = source.count("\n", 0, tag.start()) + 1
            raise InputError(f"{path}:{line}: an element with more than {_MOST_ATTRIBUTES:,} attributes. Take it out.")


_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")


def page_text(root: LexborNode) -> str:
    """Return the text below `root`, blank lines between paragraphs, white space as a browser shows it.

    Headings are those of Markdown (``## Care``), so that passages know what they stand under.
    """
    gap = mark = ""
    parts: list[str] = []
    stack: list[tuple[Any, bool, bool]] = [(root, False, False)]
    while stack:
        node, closing, verbatim = stack.pop()
        tag = node.tag or ""
        if tag == "-text":
            text = node.text_content or ""
            text = text if verbatim else _SPACE.sub(" ", text)
            if text.strip():
                parts += [gap, mark, text if verbatim or not (gap or mark) else text.lstrip()]
                gap = mark = ""
            elif text and not gap:
                gap = " "
            continue
        if _LEVEL.fullmatch(tag):
            mark = "" if closing else "#" * int(tag[1]) + " "
        gap = max(gap, _BREAKS.get(tag, ""), key=lambda space: (space.count("\n"), len(space)))
        if not closing and tag not in _SKIPPED and tag[:1].isalpha():
            stack.append((node, True, verbatim))
            children = list(node.iter(include_text=True))
            stack += [(child, False, verbatim or tag == "pre") for child in reversed(children)]
    return "\n".join(line.rstrip(" \t") for line in "".join(parts).split("\n")).strip()


def read_pdf(path: Path) -> Iterator[Located]:
    """Yield the text of a PDF as one document: lines of a paragraph joined, hyphenated words rejoined.

    Raises `InputError` naming the page that cannot be read, or where no page holds text (scanned images).
    """
    pypdf = import_extra("pypdf", path)
    data = read_bytes(path)
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
    title = title or path.stem
    yield f"{path}: page 1", Document(content_id(title, text), title, text, str(path))


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


def import_extra(module: str, path: Path) -> Any:
    """Return a module of the extra `documents`. Raises `InputError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.suffix} needs {module.partition('.')[0]}, which is not installed. "
            "Run: pip install 'kinject[documents]'"
        ) from error


def _decode(path: Path, charset: str = "utf-8-sig") -> str:
    data = read_bytes(path)
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
