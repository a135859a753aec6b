"""Web pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kinject.corpus.documents.readers import Found, ReadOptions
from kinject.corpus.documents.text import decode, import_extra, whole_file
from kinject.disk import read_bytes
from kinject.errors import InputError

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
_LEVEL = re.compile("h[1-6]")
_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)([^>]*)")
_DEEPEST = 20_000
_MOST_ATTRIBUTES = 2_000
"""The parser's time grows with the square of both."""
_CLOSED_BY_OTHERS = frozenset({
    "p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody", "tfoot", "option", "optgroup", "rt", "rp", "colgroup",
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
})  # fmt: skip
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


def read_html(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[Found]:
    """Yield the text of a web page: of its <main> or only <article> where it has one; no menus, forms, scripts."""
    parser = import_extra("selectolax.lexbor", path).LexborHTMLParser
    data = read_bytes(path, options.largest, stream)
    charset = _CHARSET.search(data[:4096])
    source = decode(path, data, charset[1].decode("ascii") if charset else "utf-8-sig")
    _check_page(path, source)
    tree = parser(source)
    articles = tree.css("article")
    root = tree.css_first("main") or (articles[0] if len(articles) == 1 else tree.body)
    text = page_text(root) if root is not None else ""
    heading = tree.css_first("title") or tree.css_first("h1")
    title = " ".join(heading.text().split()) if heading is not None else ""
    yield whole_file(path, title, text)


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
