"""Readers of files that are one document each: plain text, Markdown, HTML, PDF."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import content_id, read_bytes
from kinject.errors import InputError
from kinject.types import Document

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

Placed = tuple[str, Document]
"""Where a document stands (file:line, or file: page), and the document."""

_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
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
"""Tag -> what stands before and after its text."""


def read_text(path: Path) -> Iterator[Placed]:
    """Yield the one document in a text file, named as the file."""
    text = _decoded(path)
    yield f"{path}:1", Document(content_id(path.stem, text), path.stem, text, str(path))


def read_markdown(path: Path) -> Iterator[Placed]:
    """Yield the one document in a Markdown file, named by its first heading of level 1."""
    text = _decoded(path)
    heading = re.search(r"^#\s+(.+?)\s*#*\s*$", text, re.MULTILINE)
    title = heading[1] if heading else path.stem
    yield f"{path}:1", Document(content_id(title, text), title, text, str(path))


def read_html(path: Path) -> Iterator[Placed]:
    """Yield the text of a web page: of its <main> or only <article> where it has one; no menus, forms, scripts."""
    parser = needed("selectolax.lexbor", path).LexborHTMLParser
    data = read_bytes(path)
    charset = _CHARSET.search(data[:4096])
    tree = parser(_decoded(path, charset[1].decode("ascii") if charset else "utf-8-sig"))
    articles = tree.css("article")
    root = tree.css_first("main") or (articles[0] if len(articles) == 1 else tree.body)
    text = page_text(root) if root is not None else ""
    heading = tree.css_first("title") or tree.css_first("h1")
    title = " ".join(heading.text().split()) if heading is not None else ""
    title = title or path.stem
    yield f"{path}:1", Document(content_id(title, text), title, text, str(path))


def page_text(root: LexborNode) -> str:
    """Return the text below `root`, blank lines between paragraphs, white space as a browser shows it."""
    gap = ""
    pieces: list[str] = []
    stack: list[tuple[Any, bool, bool]] = [(root, False, False)]
    while stack:
        node, closing, verbatim = stack.pop()
        tag = node.tag or ""
        if tag == "-text":
            text = node.text_content or ""
            text = text if verbatim else _SPACE.sub(" ", text)
            if text.strip():
                pieces += [gap, text if verbatim or not gap else text.lstrip()]
                gap = ""
            elif text and not gap:
                gap = " "
            continue
        gap = max(gap, _BREAKS.get(tag, ""), key=lambda found: (found.count("\n"), len(found)))
        if not closing and tag not in _SKIPPED and tag[:1].isalpha():
            stack.append((node, True, verbatim))
            children = list(node.iter(include_text=True))
            stack += [(child, False, verbatim or tag == "pre") for child in reversed(children)]
    return re.sub(r"[ \t]+(?=\n)", "", "".join(pieces)).strip()


def read_pdf(path: Path) -> Iterator[Placed]:
    """Yield the text of a PDF as one document: lines of a paragraph joined, words cut at line ends made whole.

    Raises `InputError` naming the page that cannot be read, or where no page holds text (scanned images).
    """
    pypdf = needed("pypdf", path)
    data = read_bytes(path)
    pages: list[str] = []
    place = f"{path}: page 1"
    try:
        import io

        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError(f"{path}: the PDF wants a password. Save a copy without one.")
        for number, page in enumerate(reader.pages, start=1):
            place = f"{path}: page {number}"
            pages.append(unwrap_lines(page.extract_text()))
        title = str((reader.metadata and reader.metadata.title) or "").strip()
    except InputError:
        raise
    except Exception as error:  # what a damaged PDF makes of a parser: any exception
        raise InputError(
            f"{place}: not a readable PDF ({type(error).__name__}: {str(error)[:100]}). Print it to a new PDF, or take it out."
        ) from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise InputError(
            f"{path}: empty document: none of its {len(pages)} pages holds text. Scanned pages need OCR first."
        )
    title = title or path.stem
    yield f"{path}: page 1", Document(content_id(title, text), title, text, str(path))


def unwrap_lines(page: str) -> str:
    """Return the lines of a page joined to paragraphs: a line ends one where it is short or ends a sentence early."""
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


def needed(module: str, path: Path) -> Any:
    """Return a module of the extra `documents`. Raises `InputError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.suffix} needs {module.partition('.')[0]}, which is not installed. "
            "Run: pip install 'kinject[documents]'"
        ) from error


def _decoded(path: Path, charset: str = "utf-8-sig") -> str:
    data = read_bytes(path)
    try:
        return data.decode(charset).removeprefix("\ufeff").replace("\r\n", "\n")
    except LookupError as error:
        raise InputError(f"{path}:1: unknown charset {charset!r}. Save the file as UTF-8.") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        name = "UTF-8" if charset.lower().startswith("utf-8") else charset
        raise InputError(f"{path}:{line}: not {name} (byte {error.start}). Save the file as UTF-8.") from error
