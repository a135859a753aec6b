"""The elements of a web page as Markdown: headings, lists, tables, code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kinject.documents.equations import mathml_text
from kinject.documents.numbering import item_number
from kinject.documents.symbols import raised
from kinject.documents.text import (
    DEEPEST_ITEM,
    below_table,
    fenced,
    markdown_table,
    one_line,
    spanned,
)

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_LEVEL = re.compile("h[1-6]")
_RAISING = re.compile(r"vertical-align\s*:\s*super", re.IGNORECASE)
_SPACE = re.compile(r"\s+")
_CODE_CLASS = re.compile(r"(?:language|lang|highlight-source|highlight|brush:?)[- ]([\w+#]+)")
_LONGEST_CELL = 2_000
"""Characters: where a cell holds more, the table lays out a page."""
_LONGEST_BLOCK = 500
"""The same, where cells hold headings, code or tables, and none is a header."""
_MOST_WITHIN = 20
"""Tables within one that shows data."""
_UNREAD = "head script style noscript template nav footer aside form button select svg iframe"
_STRUCK = ("del", "s", "strike")
"""Text that was taken out of a page."""
# The last ones hold what old browsers show.
_SKIPPED = frozenset([*_UNREAD.split(), *_STRUCK, "object", "canvas", "video", "audio"])
_STRIKING = re.compile(r"text-decoration[a-z-]*\s*:[^;]*line-through", re.IGNORECASE)
_NOTE = re.compile("(?:foot|end|rear)note")
_NAVIGATION = frozenset({"nav-panel", "navheader", "navfooter", "header"})
"""Classes of Texinfo's and DocBook's navigation; "header" where it names the next page."""
_PARAGRAPHS = """p h1 h2 h3 h4 h5 h6 blockquote pre table ul ol dl section article aside header
    footer figure hr"""
_LINES = """li tr br div dt dd caption figcaption summary details address legend center dialog
    fieldset form hgroup main menu search"""
_BREAKS = {
    **dict.fromkeys(_PARAGRAPHS.split(), "\n\n"),
    **dict.fromkeys(_LINES.split(), "\n"),
    **dict.fromkeys(("td", "th"), " "),
}
"""Tag -> the white space before and after its text."""


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
            continue
        if closing:
            page.close(tag)
            continue
        whole = ""
        if not page.verbatim:
            whole = _whole_text(node, tag)
        if whole:
            page.add_text(whole)
        elif tag[:1].isalpha() and not _is_skipped(node, tag, has_asides):
            if tag == "table" and _is_placed(node, page, within):
                continue
            page.open(node, tag)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(list(node.iter(include_text=True)))]
    return page.text()


def _whole_text(node: LexborNode, tag: str) -> str:
    """Return the text of an element that is read as a whole: an equation, raised digits, a box of a
    list of tasks; "" for others."""
    if tag == "math":
        # A space for an empty one, whose elements are no text of the page.
        return mathml_text(node.html or "") or " "
    if _is_raised(node, tag) and raised(node.text()) != node.text():
        return raised(node.text())
    return _tick(node, tag)


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
                kind = _kind_of_list(node)
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
            self._mark += f"{mark} {_task_tick(node)}"
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


_LIST_STYLE = re.compile(
    r"list-style(?:-type)?\s*:[^;]*?\b(?P<kind>none|decimal-leading-zero"
    r"|(?:lower|upper)-(?:alpha|latin|roman))\b",
    re.IGNORECASE,
)
_LIST_KINDS = {
    **{"none": "", "decimal-leading-zero": "01", "lower-roman": "i", "upper-roman": "I"},
    **dict.fromkeys(("lower-alpha", "lower-latin"), "a"),
    **dict.fromkeys(("upper-alpha", "upper-latin"), "A"),
}
"""Style of a list -> the kind of its numbers, "" where it shows none."""


def _kind_of_list(node: LexborNode) -> str:
    """Return the kind of numbers of an <ol>: by its style, else by its type."""
    style = _LIST_STYLE.search(node.attributes.get("style") or "")
    if style:
        return _LIST_KINDS[style["kind"].lower()]
    return node.attributes.get("type") or "1"


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
    if "noteref" in _purpose(node):
        return True
    return _RAISING.search(node.attributes.get("style") or "") is not None


def _tick(node: LexborNode, tag: str) -> str:
    """Return the sign of a box of a list of tasks, ticked or not; "" for other elements."""
    names = (node.attributes.get("class") or "").split()
    # Notion draws its boxes.
    is_box = tag == "div" and "checkbox" in names
    is_ticked = "checkbox-on" in names
    if tag == "input" and node.attributes.get("type") == "checkbox":
        is_box, is_ticked = _is_in_item(node), "checked" in node.attributes
    if not is_box:
        return ""
    return _sign(is_ticked)


def _task_tick(item: LexborNode) -> str:
    """Return the sign of an item that is a task of Confluence; "" for other items."""
    if "data-inline-task-id" not in item.attributes:
        return ""
    return _sign("checked" in (item.attributes.get("class") or "").split())


def _sign(is_ticked: bool) -> str:
    if is_ticked:
        return "☒ "
    return "☐ "


def _is_in_item(node: LexborNode) -> bool:
    """Return whether an element is in an item of a list, or in the label or paragraph in it."""
    parent = node.parent
    while parent is not None and parent.tag in ("label", "p", "span"):
        parent = parent.parent
    return parent is not None and parent.tag == "li"


def _purpose(node: LexborNode) -> str:
    """Return what an element is for, as pages state it (doc-noteref) and books (noteref)."""
    return f"{node.attributes.get('role')} {node.attributes.get('epub:type')}"


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
    if "pagebreak" in _purpose(node) and len(node.text().split()) < 3:
        return True
    if _STRIKING.search(node.attributes.get("style") or ""):
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
    return has_asides or _NOTE.search(_purpose(node)) is not None


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
    lines = _without_repeated(grid, texts)
    text = below_table(markdown_table(lines, max(1, min(n_header, len(lines) - 1))), inner)
    caption = table.css_first("caption")
    if caption is None:
        return text
    return "\n\n".join(filter(None, [one_line(page_text(caption)), text]))


def _without_repeated(
    grid: Sequence[list[str]], texts: Sequence[Sequence[tuple[str, int, int]]]
) -> list[list[str]]:
    """Return the rows of a grid, made of rows of (text, rows spanned, columns spanned), without the
    short ones that the rows around them repeat: names of the rows below, and rows without cells.
    """
    width = max(map(len, grid))
    kept: list[list[str]] = []
    for cells, line, below in zip(texts, grid, [*grid[1:], []], strict=True):
        around = set(below)
        if not cells and kept:
            around.update(kept[-1])
        goes_on_below = all(cell[1] > 1 for cell in cells)
        if len(line) == width or not (goes_on_below and around.issuperset(line)):
            kept.append(line)
    return kept


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
