"""Web pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kinject.disk import read_bytes
from kinject.documents.charsets import declared_charset
from kinject.documents.equations import mathml_text
from kinject.documents.numbering import item_number
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import raised
from kinject.documents.text import (
    DEEPEST_ITEM,
    below_table,
    decode,
    fenced,
    html_of_xhtml,
    import_extra,
    markdown_table,
    one_line,
    spanned,
    whole_file,
)

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_LEVEL = re.compile("h[1-6]")
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_RAISING = re.compile(r"vertical-align\s*:\s*super", re.IGNORECASE)
_READINGS = frozenset({"rt", "rp", "rtc"})
"""How words are read, above them: for 東京 in a sentence a reader would see it twice."""
_SPACE = re.compile(r"\s+")
_SOFT_HYPHEN = re.compile("\u00ad|&(?:shy|#173|#xad);", re.IGNORECASE)
"""It shows at the end of a line only."""
_CODE_CLASS = re.compile(r"(?:language|lang|highlight-source|highlight|brush:?)[- ]([\w+#]+)")
_UNIT = re.compile(r"(?:^(`{3,}).*\n(?s:.*?)^\1\n?|(?:^\|.*\n?)+|^.*\n|^.+\Z)", re.MULTILINE)
"""A fenced code, a table, or a line."""
_ITEM = re.compile(r" *(?:-|\d+\.) ")
_SHORT_PAGE = 500
"""Characters up to which a page is read whole."""
_SHARED = 0.6
"""The fraction of the word triples of a line that the main text holds as well."""
_FOUND = 0.8
"""The fraction of trafilatura's text that must be found among the lines of the page."""
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
_LONGEST_CELL = 2_000
"""Characters: where a cell holds more, the table lays out a page."""
_LONGEST_BLOCK = 500
"""The same, where cells hold headings, code or tables, and none is a header."""
_MOST_WITHIN = 20
"""Tables within one that shows data."""
_UNREAD = "head script style noscript template nav footer aside form button select svg iframe"
# Text that was taken out of a page is shown struck; the last ones hold what old browsers show.
_SKIPPED = frozenset([*_UNREAD.split(), "del", "object", "canvas", "video", "audio"])
_NOTE = re.compile("(?:foot|end|rear)note")
_NAVIGATION = frozenset({"nav-panel", "navheader", "navfooter", "header"})
"""Classes of Texinfo's and DocBook's navigation; "header" where it names the next page."""
_PARAGRAPHS = """p h1 h2 h3 h4 h5 h6 blockquote pre table ul ol dl section article aside header
    footer figure hr"""
_LINES = "li tr br div dt dd caption figcaption summary details address legend"
_BREAKS = {
    **dict.fromkeys(_PARAGRAPHS.split(), "\n\n"),
    **dict.fromkeys(_LINES.split(), "\n"),
    **dict.fromkeys(("td", "th"), " "),
}
"""Tag -> the white space before and after its text."""


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

    trafilatura finds the lines of the main text. If it finds none, or the page is short, the main
    text is that of <main> or the only <article>, else the whole page, as with `whole_page`.
    """
    parser = import_extra("selectolax.lexbor", path).LexborHTMLParser
    source = _SOFT_HYPHEN.sub("", html_of_xhtml(source))
    tree = parser(source)
    if _leave_out_unseen(tree):
        source = tree.html or ""
    text = page_text(tree.body, has_asides=whole_page) if tree.body is not None else ""
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


def _leave_out_unseen(tree: LexborHTMLParser) -> bool:
    """Take out of a page what nobody sees in its text, and return whether there was anything."""
    # A section behind a button or the name of a tab is text, though it is hidden until then.
    opened: set[str] = set()
    for key in ("aria-controls", "for", "href", "data-target", "data-bs-target"):
        for node in tree.css(f"[{key}]"):
            opened.update((node.attributes.get(key) or "").replace("#", " ").split())
    is_any = False
    found = tree.css("rt, rp, rtc, [hidden], [style], [aria-hidden=true]")
    # From the end, as what is within another goes before it; each is found once a selector.
    for node in reversed({node.mem_id: node for node in found}.values()):
        if node.tag in _READINGS or _is_hidden(node, opened) or _is_drawn_math(node):
            node.decompose()
            is_any = True
    return is_any


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
    if len(text) > _SHORT_PAGE and tree.css_first(_WIKI_PAGE) is None:
        trafilatura = import_extra("trafilatura", path)
        extracted: str = trafilatura.extract(source, include_comments=False) or ""
        main = _lines_within(text, extracted, {_plain(link.text()) for link in tree.css("a")})
        # Most of the text is in a script of the page.
        if len(main) < _FOUND * len(extracted):
            return extracted
        if main:
            return main
    root = tree.css_first(f"main, {_WIKI_PAGE}")
    articles = tree.css("article")
    # Several articles are a list of them, as on the front page of a blog.
    if root is None and len(articles) == 1:
        root = articles[0]
    return text if root is None else page_text(root)


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
    words = re.findall(r"\w+", main.lower())
    triples = set(zip(words, words[1:], words[2:], strict=False))
    lines = set(map(_plain, main.splitlines()))
    units = [match[0] for match in _UNIT.finditer(text)]
    kept = [_is_within(unit, triples, lines) for unit in units]
    if not any(kept):
        return ""
    last = _end_of_main(units, len(kept) - kept[::-1].index(True))
    _keep_items(units, kept, last, links)
    _keep_structure(units, kept, kept.index(True), last)
    lines_kept = []
    for unit, keep in zip(units, kept, strict=True):
        if keep or not unit.strip():
            lines_kept.append(unit)
    return re.sub(r"\n{3,}", "\n\n", "".join(lines_kept)).strip()


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
    """Keep the items of a list, up to the unit `last`, that follow a kept line and are no links."""
    below = False
    for index, unit in enumerate(units):
        item = _ITEM.match(unit)
        if item is not None and below and index < last and not kept[index]:
            kept[index] = _plain(unit[item.end() :]) not in links
        if unit.strip():
            below = kept[index]


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
    words = re.findall(r"\w+", unit.lower())
    # Triples of a short line are too few, and found anywhere: the whole line must be there.
    if len(words) < 4:
        return bool(words) and " ".join(words) in lines
    unit_triples = list(zip(words, words[1:], words[2:], strict=False))
    return sum(triple in triples for triple in unit_triples) >= _SHARED * len(unit_triples)


def page_text(
    root: LexborNode, within: list[str] | None = None, *, has_asides: bool = False
) -> str:
    """Return the content below `root` as Markdown: headings, lists, tables with header, code; space
    as a browser shows it.

    The content of a cell has no marks of headings and code; tables in it go to `within`. What is
    beside the text of a page is left out unless it `has_asides`: in a book they are boxes and
    notes.
    """
    page = _Page(in_cell=within is not None)
    stack: list[tuple[LexborNode, bool]] = [(root, False)]
    while stack:  # pages may be nested deeper than Python recurses
        node, closing = stack.pop()
        tag = node.tag or ""
        if tag == "-text":
            page.add_text(node.text_content or "")
        elif closing:
            page.close(tag)
        elif tag == "math" and not page.verbatim:
            page.add_text(mathml_text(node.html or ""))
        elif not page.verbatim and _is_raised(node, tag) and raised(node.text()) != node.text():
            page.add_text(raised(node.text()))
        elif tag[:1].isalpha() and not _is_skipped(node, tag, has_asides):
            if tag == "table" and _is_placed(node, page, within):
                continue
            page.open(node, tag)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(list(node.iter(include_text=True)))]
    return page.text()


def _is_placed(table: LexborNode, page: _Page, within: list[str] | None) -> bool:
    """Write a <table> that shows data, or give it to `within`; return whether it is one."""
    if page.verbatim:
        return False
    text = _data_table(table)
    if not text:
        return False
    if within is None:
        page.add_block(text)
    else:
        within.append(text)
    return True


class _Page:
    """The Markdown of a page as its elements open and close."""

    def __init__(self, *, in_cell: bool) -> None:
        self.parts: list[str] = []
        self._in_cell = in_cell
        self.verbatim = 0
        self._gap = self._mark = ""
        self._heading = False
        self._lists: list[tuple[str, int, int]] = []
        self._code = (0, "")

    def add_text(self, text: str) -> None:
        if not self.verbatim:
            text = _SPACE.sub(" ", text)
        if text.strip() or (self.verbatim and text):
            # Beside an element that is not read are the spaces of both its sides.
            before = self._gap + self._mark or "".join(self.parts[-1:])[-1:]
            if not self.verbatim and before != before.rstrip():
                text = text.lstrip()
            self.parts += [self._gap, self._mark, text]
            self._gap = self._mark = ""
        elif text and not self._gap and not "".join(self.parts[-1:]).endswith(" "):
            self._gap = " "

    def add_block(self, text: str) -> None:
        self._widen("\n\n")
        self.parts += [self._gap, text]
        self._gap, self._mark = "\n\n", ""

    def open(self, node: LexborNode, tag: str) -> None:
        self._space(tag)
        if self.verbatim:
            self.verbatim += tag == "pre"
        elif tag == "pre":
            self.verbatim, self._code = 1, (len(self.parts), _language(node))
        elif tag in ("ul", "ol"):
            kind, step, first = "", 1, 1
            if tag == "ol":
                kind = node.attributes.get("type") or "1"
            if "reversed" in node.attributes:
                step, first = -1, sum(child.tag == "li" for child in node.iter())
            self._lists.append((kind, _number_of(node, "start", first) - step, step))
        elif tag == "li" and self._lists:
            kind, n, step = self._lists[-1]
            number = _number_of(node, "value", n + step)
            self._lists[-1] = kind, number, step
            self._mark = "  " * min(len(self._lists) - 1, DEEPEST_ITEM)
            mark = "-"
            if kind:
                mark = f"{item_number(number, kind)}."
            self._mark += f"{mark} "
        elif tag == "q":
            self.add_text("“")
        elif _LEVEL.fullmatch(tag) and not self._in_cell:
            self._mark, self._heading = "#" * int(tag[1]) + " ", True

    def close(self, tag: str) -> None:
        if self.verbatim:
            self.verbatim -= tag == "pre"
            if not self.verbatim:
                self._close_code()
        elif tag in ("ul", "ol") and self._lists:
            self._lists.pop()
        elif tag == "q":
            self.add_text("”")
        elif tag == "li" or _LEVEL.fullmatch(tag):
            self._mark, self._heading = "", False
        self._space(tag)

    def _close_code(self) -> None:
        """Write what was in a <pre> as one block."""
        start, language = self._code
        code = "".join(self.parts[start:])
        del self.parts[start:]
        if not code.strip():
            return
        if self._in_cell:
            self.add_block(code.strip())
            return
        self.add_block(code.strip("\n") if _is_prose(code) else fenced(code, language))

    def text(self) -> str:
        # Not by a pattern for space before line ends, which took quadratic time in a <pre>.
        return "\n".join(line.rstrip(" \t") for line in "".join(self.parts).split("\n")).strip()

    def _space(self, tag: str) -> None:
        """Widen the white space before the next text as the tag `tag` does."""
        if self.verbatim:
            if tag == "br":
                self.parts.append("\n")
            return
        space = _BREAKS.get(tag, "")
        if self._heading and space == "\n":
            space = " "
        # Within a list no blank line parts its items.
        if tag in ("ul", "ol", "p") and self._lists:
            space = "\n"
        self._widen(space)

    def _widen(self, space: str) -> None:
        self._gap = max(self._gap, space, key=_width_of_space)


_ITEM_NUMBER = re.compile(r"\s*(-?\d{1,9})(?!\d)")


def _number_of(node: LexborNode, name: str, otherwise: int) -> int:
    """Return the number of a list or of an item in its attribute; `otherwise` without one, as
    browsers do."""
    match = _ITEM_NUMBER.match(node.attributes.get(name) or "")
    if match is None:
        return otherwise
    return int(match[1])


def _is_raised(node: LexborNode, tag: str) -> bool:
    """Return whether an element is shown above the line: by its tag, its style, or as the mark of a
    note."""
    if tag not in ("span", "a"):
        return tag == "sup"
    kind = f"{node.attributes.get('role')} {node.attributes.get('epub:type')}"
    return "noteref" in kind or _RAISING.search(node.attributes.get("style") or "") is not None


def _width_of_space(space: str) -> tuple[int, int]:
    return space.count("\n"), len(space)


def _is_skipped(node: LexborNode, tag: str, has_asides: bool) -> bool:
    """Return whether the element holds no text of the page, as an aside does unless it
    `has_asides`. A form around the whole page is none of its forms."""
    names = set((node.attributes.get("class") or "").split()) & _NAVIGATION
    if names:
        is_menu = node.text().lstrip().startswith(("Next:", "Previous:", "Up:"))
        if is_menu or names != {"header"}:
            return True
    if tag == "form" and node.css_first("h1, h2, p, table") is not None:
        return False
    # The number of a printed page within a sentence; a mark that was not closed holds the page.
    kind = f"{node.attributes.get('role')} {node.attributes.get('epub:type')}"
    if "pagebreak" in kind and len(node.text().split()) < 3:
        return True
    # A heading that opens what is below it.
    if tag == "button" and _is_in_heading(node):
        return False
    return tag in _SKIPPED and not _is_content(node, tag, has_asides)


def _is_in_heading(node: LexborNode) -> bool:
    """Return whether an element is a part of a heading or of a term."""
    for _ in range(3):
        parent = node.parent
        if parent is None:
            return False
        if _LEVEL.fullmatch(parent.tag or "") or parent.tag in ("summary", "dt", "legend"):
            return True
        node = parent
    return False


def _is_content(node: LexborNode, tag: str, has_asides: bool) -> bool:
    """Return whether an aside or a footer is a part of the text: a note, or within a cell or a
    quotation."""
    if tag not in ("aside", "footer"):
        return False
    if node.parent is not None and node.parent.tag in ("td", "th", "blockquote"):
        return True
    if tag == "footer":
        return False
    kind = f"{node.attributes.get('role')} {node.attributes.get('epub:type')}"
    return has_asides or _NOTE.search(kind) is not None


def _language(node: LexborNode) -> str:
    """Return the programming language that the class of a <pre>, or of the <code> in it, names."""
    classes = node.attributes.get("class") or ""
    code = node.css_first("code")
    if code is not None:
        classes += f" {code.attributes.get('class') or ''}"
    match = _CODE_CLASS.search(classes)
    return match[1].lower() if match else ""


def _is_prose(code: str) -> bool:
    """Return whether preformatted text is sentences, as mails are in their archives."""
    # Lines of code hold fewer words.
    lines = [line for line in code.splitlines() if line.strip()]
    words = sum(len(re.findall(r"[^\W\d_]{2,}", line)) for line in lines)
    return len(lines) > 8 and words > 7 * len(lines)


def _data_table(table: LexborNode) -> str:
    """Return a <table> as Markdown, those in its cells below it, or "" where it only lays out the
    page."""
    rows = _table_rows(table)
    if _is_layout(table, rows):
        return ""
    n_header = 0
    inner: list[tuple[str, str]] = []
    texts: list[list[tuple[str, int, int]]] = []
    left_in_groups = _rows_left_in_groups([row for row, _ in rows])
    for (row, cells), n_left in zip(rows, left_in_groups, strict=True):
        if n_header == len(texts) and _is_header(row, cells, is_first=not texts):
            n_header += 1
        within: list[str] = []
        texts.append([_cell_with_spans(cell, within, n_left) for cell in cells])
        inner += [(texts[-1][0][0], text) for text in within]
    try:
        grid = spanned(texts)
    except ValueError:  # spans far beyond any table: its cells are read as they come
        return ""
    width = max(map(len, grid))
    lines = []
    for (_, cells), line in zip(rows, grid, strict=True):
        if len(line) == width or not _names_rows(cells):
            lines.append(line)
    text = below_table(markdown_table(lines, max(1, min(n_header, len(lines) - 1))), inner)
    caption = table.css_first("caption")
    if caption is None:
        return text
    return "\n\n".join(filter(None, [one_line(page_text(caption)), text]))


def _is_header(row: LexborNode, cells: list[LexborNode], *, is_first: bool) -> bool:
    """Return whether a row that no row of values precedes is one of the header."""
    if row.parent is not None and row.parent.tag == "thead":
        return True
    return all(cell.tag == "th" for cell in cells) and (is_first or not _names_rows(cells))


def _names_rows(cells: list[LexborNode]) -> bool:
    """Return whether a row only holds names of the rows below it."""
    return all(_span(cell, "rowspan") > 1 for cell in cells)


def _rows_left_in_groups(rows: Sequence[LexborNode]) -> list[int]:
    """Return for each row how many there are from it to the end of its <thead> or <tbody>."""
    left: list[int] = []
    following = None
    for row in reversed(rows):
        group = row.parent.mem_id if row.parent is not None else 0
        left.append(left[-1] + 1 if group == following else 1)
        following = group
    return left[::-1]


def _cell_with_spans(cell: LexborNode, within: list[str], n_left: int) -> tuple[str, int, int]:
    """Return the text of a cell with the rows and columns that it spans: none of another group of
    rows, of which `n_left` are left."""
    text = one_line(page_text(cell, within))
    n_rows = _span(cell, "rowspan")
    # By the standard 0 is all that are left.
    if n_rows == 0 or n_rows > n_left:
        n_rows = n_left
    return text, n_rows, max(1, _span(cell, "colspan"))


def _is_layout(table: LexborNode, rows: list[tuple[LexborNode, list[LexborNode]]]) -> bool:
    """Return whether a table only places the parts of a page: as it states, by its one row or
    column, or by the length of its cells."""
    n_within = len(table.css("table")) - 1
    is_stated = table.attributes.get("role") in ("presentation", "none")
    if is_stated or n_within > _MOST_WITHIN or len(rows) < 2:
        return True
    if max(len(cells) for _, cells in rows) < 2:
        return True
    cells = list(chain.from_iterable(cells for _, cells in rows))
    has_header = table.css_first("caption") is not None or any(cell.tag == "th" for cell in cells)
    longest = _LONGEST_CELL
    if not has_header and (n_within or table.css_first("h1, h2, h3, pre") is not None):
        longest = _LONGEST_BLOCK
    return any(len(one_line(cell.text())) > longest for cell in cells)


def _table_rows(table: LexborNode) -> list[tuple[LexborNode, list[LexborNode]]]:
    """Return the rows of a table with their cells, but for those of tables within it."""
    rows: list[LexborNode] = []
    # Older pages have the last rows first.
    for part in sorted(table.iter(), key=_is_foot):
        is_group = part.tag in ("thead", "tbody", "tfoot")
        children = list(part.iter()) if is_group else [part]
        rows += [row for row in children if row.tag == "tr"]
    return [(row, _cells_of(row)) for row in rows]


def _is_foot(part: LexborNode) -> bool:
    return part.tag == "tfoot"


def _cells_of(row: LexborNode) -> list[LexborNode]:
    return [cell for cell in row.iter() if cell.tag in ("td", "th")]


def _span(cell: LexborNode, name: str) -> int:
    """Return how many rows or columns a cell spans, at most as many as browsers allow."""
    value = cell.attributes.get(name) or "1"
    # Not isdigit, which is true of "²", for which int() raises.
    if value.isascii() and value.isdecimal() and len(value) < 6:
        return min(int(value), 1000)
    return 1
