"""Web pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kinject.disk import read_bytes
from kinject.documents.charsets import declared_charset
from kinject.documents.elements import page_text
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    decode,
    html_of_xhtml,
    import_extra,
    one_line,
    whole_file,
)

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_READINGS = frozenset({"rt", "rp", "rtc"})
"""How words are read, above them: for 東京 in a sentence a reader would see it twice."""
_SOFT_HYPHEN = re.compile("\u00ad|&(?:shy|#173|#xad);", re.IGNORECASE)
"""It shows at the end of a line only."""
_NO_SCRIPT = re.compile(r"<noscript\b[^>]*>(?:(?!<noscript|-->).)*?</noscript\s*>", re.I | re.S)
"""What is shown without scripts."""
_UNIT = re.compile(r"(?:^(`{3,}).*\n(?s:.*?)^\1\n?|(?:^\|.*\n?)+|^.*\n|^.+\Z)", re.MULTILINE)
"""A fenced code, a table, or a line."""
_ITEM = re.compile(r" *(?:-|\d+\.|[a-z]\.|[ivxlc]+\.) ", re.IGNORECASE)
"""The mark of an item, which trafilatura writes as a hyphen whatever its number or letter is."""
_NO_INDENT = 1_000
"""Deeper than any item: nothing is below it."""
_EQUATION = re.compile(r"\\\(.*?\\\)")
_SHORT_LINE = 4
"""Words below which a line is short."""
_SHORT_PAGE = 500
"""Characters up to which a page is read whole."""
_SHARED = 0.6
"""The fraction of the word triples of a line that the main text holds as well."""
_FOUND = 0.8
"""The fraction of trafilatura's text that must be found among the lines of the page."""
_OF_A_SITE = "nav, footer, aside, form, button, iframe, script:not([src*=athjax])"
"""What a page of a site has beside its text: a script in each of 181 pages. Programs that save a
document as a page write none but for its equations."""
_SHOWN_LATER = 5
"""How many times as much text as the visible one is hidden in a page whose script shows its parts
one after another."""
_MOST_LINKS = 0.1
"""The fraction of the text of a page without these that may link to other pages: more is a menu."""
_META = (
    ("author", "meta[name=author]", "content"),
    ("date", "meta[property='article:published_time']", "content"),
    ("date", "meta[name=date]", "content"),
    ("licence", "link[rel=license]", "href"),
    ("licence", "a[rel=license]", "href"),
    ("licence", "meta[name='dcterms.license']", "content"),
)
"""(key of meta, selector of an element, the attribute that holds the value)."""
# With the class: #main-content of any site, taken for Confluence's, cost .02 of F1.
_WIKI_PAGE = "#main-content.wiki-content"
"""The text of a page that Confluence exported."""


def read_html(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the main text of a web page with its tables, headings and code; no menus, forms,
    scripts, related pages."""
    data = read_bytes(path, options.largest, stream)
    source, encoding = decode(path, data, declared_charset(data))
    source = source.replace("\0", "")
    title, text, meta = page_of(path, source)
    yield whole_file(path, title, text, {**meta, **encoding})


def page_of(
    path: Path, source: str, *, whole_page: bool = False
) -> tuple[str, str, dict[str, str]]:
    """Return the title ("" without one), the Markdown and the meta (author, date, licence) of the
    HTML text `source`.

    trafilatura finds the lines of the main text. If it finds none, or the page is short, or a
    document that a program saved, the main text is that of <main> or the only <article>, else the
    whole page, as with `whole_page`. What trafilatura finds in a script of the page is its text
    where the page shows less.
    """
    parser = import_extra("selectolax.lexbor", path).LexborHTMLParser
    source = _NO_SCRIPT.sub(_closed_or_nothing, _SOFT_HYPHEN.sub("", html_of_xhtml(source)))
    tree = parser(source)
    n_unseen = _leave_out_unseen(tree)
    text = _whole_text(tree, whole_page)
    if n_unseen > _SHOWN_LATER * len(text):
        tree = parser(source)
        text = _whole_text(tree, whole_page)
    elif n_unseen:
        source = tree.html or ""
    main = text if whole_page else ""
    if not main:
        main = _main_text(path, source, tree, text)
    # DocBook's heading is above authors and dates, which are not of the main text.
    main_heading = tree.css_first(".titlepage h1, .titlepage h2")
    if main_heading is not None and one_line(main_heading.text()) not in main[:2_000]:
        main = f"# {one_line(main_heading.text())}\n\n{main}"
    heading = tree.css_first("title") or tree.css_first("h1")
    title = " ".join(heading.text().split()) if heading is not None else ""
    return title, main, _meta(tree)


def _closed_or_nothing(no_script: re.Match[str]) -> str:
    """Return what is shown without scripts, nothing if it opens an element that does not end in it:
    to the parser, the rest of the page would be within it."""
    html = no_script[0].lower()
    if html.count("<div") != html.count("</div"):
        return ""
    return no_script[0]


def _whole_text(tree: LexborHTMLParser, has_asides: bool) -> str:
    if tree.body is None:
        return ""
    return page_text(tree.body, has_asides=has_asides)


def _leave_out_unseen(tree: LexborHTMLParser) -> int:
    """Take out of a page what nobody sees in its text, and return how many characters it had."""
    # A section behind a button or the name of a tab is text, though it is hidden until then.
    opened: set[str] = set()
    for key in ("aria-controls", "for", "href", "data-target", "data-bs-target"):
        for node in tree.css(f"[{key}]"):
            opened.update((node.attributes.get(key) or "").replace("#", " ").split())
    n_characters = 0
    found = tree.css("rt, rp, rtc, [hidden], [style], [aria-hidden=true]")
    # From the end, as what is within another goes before it; each is found once a selector.
    for node in reversed({node.mem_id: node for node in found}.values()):
        if node.tag in _READINGS or _is_hidden(node, opened) or _is_drawn_math(node):
            n_characters += len(node.text(strip=True))
            node.decompose()
    return n_characters


def _is_hidden(node: LexborNode, opened: set[str]) -> bool:
    """Return whether an element is hidden, and stays so."""
    style = node.attributes.get("style") or ""
    if "hidden" not in node.attributes and _HIDDEN.search(style) is None:
        return False
    if node.attributes.get("hidden") == "until-found" or node.attributes.get("role"):
        return False
    # A page that a script shows at once, or the MathML of an equation that is a picture.
    if node.tag == "body" or node.css_first("main, article, h1, math") is not None:
        return False
    return node.attributes.get("id") not in opened


def _is_drawn_math(node: LexborNode) -> bool:
    """Return whether an element is the drawing of an equation, of which the MathML is beside it for
    those who cannot see."""
    parent = node.parent
    if parent is None or node.attributes.get("aria-hidden") != "true":
        return False
    is_inline = parent.tag in ("span", "mjx-container")
    has_math = parent.css_first("math") is not None and node.css_first("math") is None
    return is_inline and has_math


def _main_text(path: Path, source: str, tree: LexborHTMLParser, text: str) -> str:
    """Return the main text of a page whose whole text is `text`."""
    # Token F1 on 181 pages: trafilatura's text .959, but without tables, headings and code; its
    # lines as a filter over our own text .950, with them; <main> or the only <article> .791.
    main = extracted = ""
    if tree.css_first(_WIKI_PAGE) is None and not _is_saved_document(tree, text):
        trafilatura = import_extra("trafilatura", path)
        extracted = trafilatura.extract(source, include_comments=False) or ""
        if len(text) > _SHORT_PAGE:
            main = _lines_within(text, extracted, {_plain(link.text()) for link in tree.css("a")})
    main = main or _main_element(tree) or text
    # Most of the text is in a script of the page.
    if len(main) < _FOUND * len(extracted):
        return extracted
    return main


def _main_element(tree: LexborHTMLParser) -> str:
    """Return the text of <main>, or of the only <article>."""
    root = tree.css_first(f"main, {_WIKI_PAGE}")
    articles = tree.css("article")
    # Several articles are a list of them, as on the front page of a blog.
    if root is None and len(articles) == 1:
        root = articles[0]
    if root is None:
        return ""
    return page_text(root)


def _is_saved_document(tree: LexborHTMLParser, text: str) -> bool:
    """Return whether a page is a document that a program saved as HTML, and no page of a site: of
    such a document trafilatura would leave out captions, terms and lines of verse."""
    if tree.css_first(_OF_A_SITE) is not None:
        return False
    n_linked = 0
    for link in tree.css("a[href]"):
        # Notes and tables of contents lead to places in the document.
        if not (link.attributes.get("href") or "").startswith("#"):
            n_linked += len(link.text())
    return n_linked <= _MOST_LINKS * len(text)


def _meta(tree: LexborHTMLParser) -> dict[str, str]:
    """Return author, date and licence, where the page states them."""
    meta: dict[str, str] = {}
    for key, selector, attribute in _META:
        node = tree.css_first(selector)
        if node is None:
            continue
        value = (node.attributes.get(attribute) or "").strip()
        if value:
            meta.setdefault(key, value)
    return meta


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _lines_within(text: str, main: str, links: set[str]) -> str:
    """Return the lines of the Markdown `text` whose words are in `main`, with headings, tables and
    code among them.

    Items of a list below them stay, too, unless they are `links`, as menus and lists of related
    pages are.
    """
    triples = set(_triples(_words_of(main)))
    lines = {" ".join(_words_of(line)) for line in main.splitlines()}
    units = [match[0] for match in _UNIT.finditer(text)]
    kept = [_is_within(unit, triples, lines) for unit in units]
    if not any(kept):
        return ""
    _keep_short_lines(units, kept, triples)
    last = _end_of_main(units, len(kept) - kept[::-1].index(True))
    _keep_items(units, kept, last, links)
    _keep_structure(units, kept, kept.index(True), last)
    lines_kept = []
    for unit, keep in zip(units, kept, strict=True):
        if keep or not unit.strip():
            lines_kept.append(unit)
    return re.sub(r"\n{3,}", "\n\n", "".join(lines_kept)).strip()


def _keep_short_lines(
    units: Sequence[str], kept: list[bool], triples: set[tuple[str, str, str]]
) -> None:
    """Keep the short lines that are in the main text between the same words as on the page: where
    trafilatura joins the lines of a paragraph, none of them is a line of its text."""
    filled = [index for index, unit in enumerate(units) if re.search(r"\w", unit)]
    words = {index: _words_of(units[index]) for index in filled}
    for before, index, after in zip(filled, filled[1:], filled[2:], strict=False):
        if not kept[index] and len(words[index]) < _SHORT_LINE:
            around = _triples([*words[before][-2:], *words[index], *words[after][:2]])
            kept[index] = bool(around) and triples.issuperset(around)


def _end_of_main(units: Sequence[str], last: int) -> int:
    """Return the end of the main text, whose last line found is before `last`: a table or code
    below a heading belongs to it."""
    if units[last - 1].startswith("#"):
        for index in range(last, len(units)):
            if units[index].startswith(("| ", "```")):
                return index + 2
            if units[index].strip():
                break
    return last


def _keep_items(units: Sequence[str], kept: list[bool], last: int, links: set[str]) -> None:
    """Keep the items of a list, up to the unit `last`, that follow a kept line and are no links;
    links, too, if they are below an item of words ("In progress:")."""
    follows_kept = False
    indent_of_words = _NO_INDENT
    for index, unit in enumerate(units):
        if not unit.strip():
            continue
        item = _ITEM.match(unit)
        if item is None:
            follows_kept = kept[index]
            indent_of_words = _NO_INDENT
            continue
        indent = len(unit) - len(unit.lstrip(" "))
        is_link = _plain(unit[item.end() :]) in links
        is_of_words = indent > indent_of_words
        if follows_kept and index < last and (is_of_words or not is_link):
            kept[index] = True
        follows_kept = kept[index]
        if not is_of_words:
            indent_of_words = _NO_INDENT
            if kept[index] and not is_link:
                indent_of_words = indent


def _keep_structure(units: Sequence[str], kept: list[bool], first: int, last: int) -> None:
    """Keep the tables and code between two units, and the headings above what is kept."""
    following = False
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        if not unit.strip():
            continue
        if unit.startswith("#"):
            kept[index] = kept[index] or following
            following = False
            continue
        if first <= index < last and unit.startswith(("| ", "```", "\\(")):
            kept[index] = True
        following = kept[index]


def _is_within(unit: str, triples: set[tuple[str, str, str]], lines: set[str]) -> bool:
    words = _words_of(unit)
    # Triples of a short line are too few, and found anywhere: the whole line must be there.
    if len(words) < _SHORT_LINE:
        return bool(words) and " ".join(words) in lines
    unit_triples = _triples(words)
    return sum(triple in triples for triple in unit_triples) >= _SHARED * len(unit_triples)


def _words_of(unit: str) -> list[str]:
    """Return the words of a line, without the mark of an item and what is in equations, of which
    trafilatura writes nothing, or the signs without their order."""
    item = _ITEM.match(unit)
    if item is not None:
        unit = unit[item.end() :]
    return re.findall(r"\w+", _EQUATION.sub(" ", unit).lower())


def _triples(words: Sequence[str]) -> list[tuple[str, str, str]]:
    return list(zip(words, words[1:], words[2:], strict=False))
