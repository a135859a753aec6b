"""reStructuredText, notebooks, and MediaWiki's XML export."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kinject.disk import content_id, read_bytes
from kinject.documents.html import page_of
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.symbols import raised
from kinject.documents.text import (
    decode,
    fenced,
    first_heading,
    heading,
    import_extra,
    library_errors,
    markdown_table,
    one_line,
    shown_markdown,
    spanned,
    whole_file,
)
from kinject.errors import InputError
from kinject.terminal import format_count
from kinject.types import Document


class WikiCode(Protocol):
    """The part of mwparserfromhell's parsed markup that is used."""

    def strip_code(self, *, normalize: bool, collapse: bool, keep_template_params: bool) -> str: ...


class WikiParser(Protocol):
    """The module mwparserfromhell."""

    def parse(self, value: str) -> WikiCode: ...


_LONGEST_ARTICLE = 2_000_000
"""Characters of an article, which is parsed as a whole."""
_ROLE = re.compile(r":(?P<role>[a-zA-Z][\w:.+-]*):`(?P<text>[^`]*)`")
"""A role of docutils or Sphinx, whose text is kept without the role."""
_PARSED_ROLES = frozenset(["code", "math", "sub", "subscript", "sup", "superscript"])
"""Roles that stay for docutils: without them 10⁶ is 106, and \\beta is beta."""
_NUMBERED = frozenset({"pep", "rfc"})
"""Roles that show their name: PEP 8."""
_TARGET = re.compile(r"^(.*\S)\s*<[^<>]+>$", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*\.\. +([\w:+.-]+)::", re.MULTILINE)
_LINKS = """autosummary bibliography currentmodule default-domain highlight index
    literalinclude module moduleauthor py:currentmodule py:module sectionauthor tabularcolumns
    testcleanup testsetup toctree"""
_UNSHOWN = frozenset(_LINKS.split())
"""Directives of Sphinx that show nothing, or what is in other files."""
_PROGRAMS = """console digraph doctest graph graphviz ipython mermaid plantuml productionlist prompt
    terminal testcode testoutput uml"""
_VERBATIM = frozenset(_PROGRAMS.split())
"""Directives whose content is no markup."""
_VERSIONS = {
    "deprecated": "Deprecated since version",
    "versionadded": "Added in version",
    "versionchanged": "Changed in version",
    "versionremoved": "Removed in version",
}
_ERROR = 3
"""The level of docutils's messages from which it has left out what it could not parse."""
_DOCUTILS = {
    # No file is read but this one, and no faults are printed.
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "_disable_config": True,
    "report_level": 5,
    "halt_level": 5,
    "embed_stylesheet": False,
    "stylesheet_path": None,
    "syntax_highlight": "none",
    "output_encoding": "unicode",
    # The first heading stays in the text.
    "doctitle_xform": False,
    "initial_header_level": 1,
    # docutils parses nothing of a file with a line beyond its own limit of 10,000 characters.
    "line_length_limit": 1_000_000,
}


def read_rst(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a reStructuredText file; files that it includes are not read, nor raw HTML."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    core = import_extra("docutils.core", path)

    def shown(role: re.Match[str]) -> str:
        name, content = role["role"].lower(), role["text"]
        if name in _PARSED_ROLES:
            return role[0]
        target = _TARGET.match(content)
        if target:
            return target[1]
        if name in _NUMBERED:
            return f"{name.upper()} {content}"
        # Sphinx shows the last part of a name after "~", and no link after "!".
        if content.startswith("~"):
            return content.rpartition(".")[2]
        return content.lstrip("!")

    with library_errors(path, "reStructuredText file", "Repair its markup, or rename it to .txt."):
        plain = _ROLE.sub(shown, text)
        _register_directives(path, set(_DIRECTIVE.findall(plain)))
        tree = core.publish_doctree(plain, settings_overrides=_DOCUTILS)
        _keep_unparsed(path, tree)
        page = core.publish_from_doctree(tree, writer="html5", settings_overrides=_DOCUTILS)
        # Its style sheet writes the colon: "x : int" would be "xint".
        page = page.replace('<span class="classifier">', '<span class="classifier"> : ')
        _, body, _ = page_of(path, page, whole_page=True)
    yield whole_file(path, first_heading(body), body, meta)


class RstNode(Protocol):
    """The part of docutils's nodes that is used; the library has no types."""

    def findall(self, condition: RstNode) -> Iterator[RstNode]: ...

    def get(self, key: str) -> int: ...

    def replace_self(self, new: Sequence[RstNode]) -> None: ...


class RstDirective(Protocol):
    """The part of docutils's directives that is used."""

    name: str
    arguments: list[str]
    options: dict[str, str]
    content: Sequence[str]
    lineno: int
    content_offset: int
    state: Any


class _AnyOption(dict[str, Callable[[str | None], str]]):
    """Options of a directive, of which those that docutils does not know are texts."""

    def __missing__(self, name: str) -> Callable[[str | None], str]:
        return _option_text


def _option_text(value: str | None) -> str:
    return value or ""


def _register_directives(path: Path, names: set[str]) -> None:
    """Let docutils read the directives of Sphinx and of its extensions, of which it would leave out
    the content."""
    directives = import_extra("docutils.parsers.rst.directives", path)
    known = import_extra("docutils.parsers.rst.languages.en", path).directives
    base = import_extra("docutils.parsers.rst", path).Directive
    settings = {
        "has_content": True,
        "optional_arguments": 1,
        "final_argument_whitespace": True,
        "option_spec": _AnyOption(title=_option_text),
        "run": _directive_nodes,
    }
    for name in names - set(known):
        directives.register_directive(name.lower(), type("Directive", (base,), settings))
    # Sphinx's have options that docutils refuses: emphasize-lines, label.
    body = import_extra("docutils.parsers.rst.directives.body", path)
    owners = dict.fromkeys(("code", "code-block", "sourcecode"), body.CodeBlock)
    for name, own in {**owners, "math": body.MathBlock}.items():
        changes = {"option_spec": _AnyOption(own.option_spec), "run": _nodes_with_caption}
        directives.register_directive(name, type("Directive", (own,), changes))


def _nodes_with_caption(directive: RstDirective) -> list[RstNode]:
    """Return what a directive of docutils shows, below the caption that Sphinx gives it."""
    nodes = import_extra("docutils.nodes", Path(directive.name))
    shown: list[RstNode] = super(type(directive), directive).run()  # type: ignore[misc]
    caption = directive.options.get("caption")
    if caption:
        shown.insert(0, nodes.paragraph("", caption))
    return shown


def _directive_nodes(directive: RstDirective) -> list[RstNode]:
    """Return what a directive of Sphinx shows: its argument, and its content below."""
    nodes = import_extra("docutils.nodes", Path(directive.name))
    name = directive.name.lower()
    if name in _UNSHOWN or name.startswith("auto"):
        return []
    argument = " ".join(directive.arguments)
    if name in _VERBATIM:
        code = "\n".join(directive.content) or argument
        return [nodes.literal_block(code, code)]
    argument = one_line(argument)
    # Conditions, and numbers of columns.
    if name in ("only", "ifconfig") or (name not in _VERSIONS and argument.isdecimal()):
        argument = ""
    if name in _VERSIONS:
        version, _, change = argument.partition(" ")
        argument = f"{_VERSIONS[name]} {version}: {change}".removesuffix(": ")
    shown: list[RstNode] = []
    # The signature of a function, in a domain: its asterisks are no markup.
    if argument and ":" in name:
        shown.append(nodes.paragraph("", argument))
    elif argument:
        parsed, messages = directive.state.inline_text(argument, directive.lineno)
        shown += [nodes.paragraph("", "", *parsed), *messages]
    content = nodes.container()
    directive.state.nested_parse(directive.content, directive.content_offset, content)
    return [*shown, *content.children]


def _keep_unparsed(path: Path, tree: RstNode) -> None:
    """Put what docutils cannot parse, such as a table whose columns are not level, into the text as
    it is written."""
    nodes = import_extra("docutils.nodes", path)
    for message in list(tree.findall(nodes.system_message)):
        if message.get("level") >= _ERROR:
            message.replace_self(list(message.findall(nodes.literal_block)))


def read_notebook(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a Jupyter notebook: its Markdown, and its code in fences without outputs."""
    text, _ = decode(path, read_bytes(path, options.largest, stream))
    with library_errors(path, "notebook", "Save it again."):
        book = json.loads(text)
        stated = book.get("metadata", {})
        # Before its first run a notebook has only the language of its kernel.
        kernel = stated.get("kernelspec", {}).get("language", "python")
        language = str(stated.get("language_info", {}).get("name", kernel))
        parts = []
        for cell in book["cells"]:
            source = "".join(cell["source"]).strip()
            if source and cell["cell_type"] == "code":
                source = fenced(source, language)
            elif cell["cell_type"] == "markdown":
                source = shown_markdown(source)
            parts.append(source)
    body = "\n\n".join(filter(None, parts))
    yield whole_file(path, first_heading(body), body)


def read_mediawiki(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the articles of a MediaWiki export (the newest revision of each), without redirects,
    talk and templates."""
    etree = import_extra("lxml.etree", path)
    parser = import_extra("mwparserfromhell", path)
    number = 0
    with library_errors(path, "MediaWiki export", "Export it again."):
        for _, page in etree.iterparse(
            stream, tag="{*}page", resolve_entities=False, no_network=True, huge_tree=False
        ):
            number += 1
            title = one_line(page.findtext("{*}title") or "")
            text = date = ""
            revisions = page.findall("{*}revision")
            if revisions:
                text = revisions[-1].findtext("{*}text") or ""
                date = revisions[-1].findtext("{*}timestamp") or ""
            is_article = (page.findtext("{*}ns") or "0") == "0" and page.find("{*}redirect") is None
            # An export may be larger than memory: pages that are read leave the tree.
            page.clear()
            while page.getprevious() is not None:
                del page.getparent()[0]
            if is_article and text.strip():
                location = f"{path}: page {number}"
                yield location, _article(location, title, text, date, parser)


def _article(
    location: str, title: str, text: str, date: str, parser: WikiParser
) -> Document | InputError:
    try:
        with library_errors(Path(location), "wiki text", "Take the page out."):
            if len(text) > _LONGEST_ARTICLE:
                raise InputError(
                    f"{location}: an article of {format_count(len(text), 'character')}, "
                    f"allowed: {_LONGEST_ARTICLE:,}. Split it."
                )
            body = wiki_text(text, parser)
    except InputError as error:
        return error
    if body:
        body = f"{heading(1, title)}\n\n{body}"
    meta = {"date": date[:10]} if date else {}
    return Document(content_id(title, body), title, body, location, meta)


_WIKI_TABLE = re.compile(r"^[ \t:]*\{\|(?:(?!^[ \t:]*\{\|)(?s:.))*?^[ \t]*\|\}", re.MULTILINE)
_WIKI_HEADING = re.compile(r"^(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*$", re.MULTILINE)
_WIKI_ITEM = re.compile(r"^([*#:;]+)[ \t]*", re.MULTILINE)
_NO_TEXT = "category|kategorie|catégorie|categoría|file|image|datei|bild|fichier|archivo"
_LANGUAGE_LINK = re.compile(
    rf"\[\[(?:[a-z]{{2,3}}(?:-[a-z]+)?|{_NO_TEXT}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*+\]\]",
    re.IGNORECASE,
)
_DROPPED = re.compile(
    r"<(ref|gallery|timeline|imagemap|score)\b[^<>]*(?:/>|>(?s:.*?)</\1\s*>)|<!--(?s:.*?)-->",
    re.IGNORECASE,
)
_EQUATION = re.compile(r"<(math|chem|ce)\b[^<>]*>((?s:.*?))</\1\s*>", re.IGNORECASE)
_RAISED = re.compile(r"<sup\b[^<>]*>([^<>]*)</sup\s*>", re.IGNORECASE)
_LINE_END = re.compile(r"<br\b[^<>]*>", re.IGNORECASE)
_CODE = re.compile(r"<(syntaxhighlight|source|pre)\b([^<>]*)>((?s:.*?))</\1\s*>", re.IGNORECASE)


def wiki_text(text: str, parser: WikiParser) -> str:
    """Return wiki markup as Markdown; references, files, categories, and templates whose text is on
    another page are left out."""
    blocks: list[str] = []

    def keep(block: str) -> str:
        blocks.append(block)
        return f"\n\n\x02{len(blocks) - 1}\x03\n\n"

    def code(match: re.Match[str]) -> str:
        language = re.search(r"lang\s*=\s*[\"']?([\w+#-]+)", match[2])
        name = language[1].lower() if language else ""
        return keep(fenced(html.unescape(match[3]), name))

    def table(match: re.Match[str]) -> str:
        return keep(_wiki_table(match[0], parser))

    def block(match: re.Match[str]) -> str:
        return blocks[int(match[1])]

    def equation(match: re.Match[str]) -> str:
        # Its braces and bars are no templates and cells.
        blocks.append(f"\\({one_line(html.unescape(match[2]))}\\)")
        return f"\x02{len(blocks) - 1}\x03"

    text = _CODE.sub(code, text.replace("\x02", "").replace("\x03", ""))
    text = _LANGUAGE_LINK.sub("", _DROPPED.sub("", _EQUATION.sub(equation, text)))
    # The parser takes these marks away: 10<sup>6</sup> would be 106, east<br>west one word.
    text = _LINE_END.sub(" ", _RAISED.sub(_raised_text, text))
    text = _with_templates(text)
    for _ in range(3):  # the innermost tables first
        text, n = _WIKI_TABLE.subn(table, text)
        if not n:
            break
    text = _plain(text, parser)
    text = _WIKI_ITEM.sub(_mark, text)
    text = _WIKI_HEADING.sub(_markdown_heading, text)
    for _ in range(4):  # a table may hold the code and the tables within it
        text = re.sub("\x02(\\d+)\x03", block, text)
    lines = [line.rstrip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


_TEMPLATE = re.compile(r"\{\{([^{}|]*)((?:\|[^{}]*)?)\}\}")
"""A template with no other in it."""
_DEEPEST_TEMPLATES = 12
_LINK_OR_BAR = re.compile(r"\[\[[^\[\]]*\]\]|\|")
"""What parts the arguments of a template, unless it is within a link."""
_PARAMETER = re.compile(r"(?<!\{)\{\{\{[\w -]+(?:\|([^{}]*))?\}\}\}(?!\})")
"""An argument of the page itself, with its default."""
_NAMED = re.compile(r"\s*([A-Za-z_][\w -]*|\d+)\s*=(.*)", re.DOTALL)
_OF_FIRST = """abbr blockquote chem2 flag ill nobr nowrap quote small smallcaps big math mvar var
    interlanguage_link"""
_FIRST = frozenset(_OF_FIRST.split())
"""Templates that show their first argument."""
_LISTS = frozenset({"flatlist", "hlist", "plainlist", "ubl", "unbulleted_list"})
_OF_DATES = """birth_date birth_date_and_age death_date death_date_and_age end_date start_date
    start_date_and_age film_date birth_year_and_age"""
_DATES = frozenset(_OF_DATES.split())
_CURRENCIES = {"us$": "US$", "usd": "US$", "gbp": "£", "£": "£", "eur": "€", "€": "€", "inr": "₹"}
_MARKS = {
    **{"ndash": "–", "–": "–", "mdash": "—", "snd": " – ", "spnd": " – ", "spaced_ndash": " – "},
    **{"nbsp": " ", "thinsp": " ", "'": "'", '"': '"', "co2": "CO2", "h2o": "H2O"},
    # They part nothing where they are written so: their signs come last.
    **{"=": "\x07", "!": "\x08"},
}
_NAMES = "January February March April May June July August September October November December"
_MONTHS = {str(number): name for number, name in enumerate(_NAMES.split(), start=1)}
_JOINERS = {"to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "+/-": " ± "}
_JOINERS |= {"-": "–", "–": "–", "×": " × ", "±": " ± "}
_SMALLER = {"ft": "in", "lb": "oz", "st": "lb", "yd": "ft", "mi": "yd"}
_UNITS = {"c": "°C", "f": "°F", "km2": "km²", "m2": "m²", "m3": "m³", "sqmi": "sq mi"}
_AMOUNT = re.compile(r"[-−+]?\d[\d.,/+]*(?:e[+-]?\d+)?")


def _with_templates(text: str) -> str:
    """Return wiki text with what a reader sees of the templates whose text is in their arguments
    (40 m of ``{{convert|40|m|ft}}``), and without the others; what holds a table stays."""
    text = _PARAMETER.sub(_default, text)
    for _ in range(_DEEPEST_TEMPLATES):  # the innermost first
        text, n = _TEMPLATE.subn(_template_text, text)
        if not n:
            break
    return text.replace("\x07", "=").replace("\x08", "|")


def _default(match: re.Match[str]) -> str:
    return match[1] or ""


def _arguments(text: str) -> list[str]:
    """Return what is behind each bar of the arguments of a template."""
    bars = [match.start() for match in _LINK_OR_BAR.finditer(text) if match[0] == "|"]
    return [text[bar + 1 : end] for bar, end in pairwise([*bars, len(text)])]


def _template_text(match: re.Match[str]) -> str:
    name = "_".join(match[1].lower().replace("_", " ").split())
    values, named = [], {}
    for argument in _arguments(match[2]):
        pair = _NAMED.match(argument)
        if pair is None:
            values.append(argument.strip())
        elif pair[1].isdecimal():
            values.append(pair[2].strip())
        else:
            named[pair[1].strip()] = pair[2].strip()
    if "text" in named:
        values.insert(0, named["text"])
    if name in _MARKS:
        return _MARKS[name]
    if name.startswith("formatnum:"):
        return name.partition(":")[2]
    if not any(values):
        return ""
    return _text_of_arguments(name, values, named)


def _text_of_arguments(name: str, values: list[str], named: dict[str, str]) -> str:
    """Return what is shown of a template's arguments, "" of one that is not known here."""
    if name in _FIRST or name.startswith("lang-"):
        return values[0]
    if name in ("lang", "langx", "transl", "transliteration"):
        return "".join(values[1:][-1:])  # the first names the language
    if name in ("convert", "cvt"):
        return _measure(values)
    if name in _DATES:
        return _date(values)
    if name in _LISTS:
        return ", ".join(filter(None, values))
    if name == "chem":
        return "".join(values)
    if name in _CURRENCIES:
        return f"{_CURRENCIES[name]}{values[0]}"
    if name in ("c.", "ca.", "circa"):
        return f"c. {' – '.join(values[:2])}"
    if name == "as_of":
        return f"As of {_date(values)}"
    if name in ("frac", "sfrac", "fraction"):
        return _fraction(values)
    if name == "val":
        number = " ± ".join(values[:2])
        if "e" in named:
            number += f" × 10^{named['e']}"
        return f"{number} {named.get('u', '')}".rstrip()
    return ""


def _measure(values: Sequence[str]) -> str:
    """Return a number, or several, with the unit in which it is stated: what follows is the unit of
    the conversion."""
    text = ""
    for index, value in enumerate(values):
        if _AMOUNT.fullmatch(value):
            text += value
            continue
        if value in _JOINERS and text:
            text += _JOINERS[value]
            continue
        text += f" {_UNITS.get(value.lower(), value)}"
        # 6 ft 2 in
        smaller = _SMALLER.get(value)
        if smaller is None or list(values[index + 2 : index + 3]) != [smaller]:
            break
        text += " "
    return text.strip()


def _date(values: Sequence[str]) -> str:
    """Return the date of year, month and day, as far as they are given."""
    date: list[str] = []
    for value in values[:3]:
        name = value
        if len(date) == 1:  # behind the year
            name = _MONTHS.get(value.lstrip("0"), value)
        date.insert(0, name)
    return " ".join(filter(None, date))


def _fraction(values: Sequence[str]) -> str:
    if len(values) == 1:
        return f"1/{values[0]}"
    *whole, above, below = values[:3]
    return " ".join([*whole, f"{above}/{below}"])


def _raised_text(match: re.Match[str]) -> str:
    return raised(html.unescape(match[1]))


def _markdown_heading(match: re.Match[str]) -> str:
    return f"\n\n{heading(len(match[1]), match[2])}\n\n"


def _plain(text: str, parser: WikiParser) -> str:
    """Return wiki text without templates, links and emphasis; headings and list marks stay."""
    # The parser would take the marks of headings and lists away, and knows no control characters.
    marked = _WIKI_HEADING.sub("\x04\\1\x05\\2\x05\\1\x04", text)
    marked = re.sub(r"^([*#:;]+)", "\x06\\1\x06", marked, flags=re.MULTILINE)
    code = parser.parse(marked)
    plain = str(code.strip_code(normalize=True, collapse=False, keep_template_params=False))
    plain = re.sub("\x04(=+)\x05(.*?)\x05=+\x04", r"\1\2\1", plain)
    return plain.replace("\x06", "").replace("__NOTOC__", "")


def _mark(match: re.Match[str]) -> str:
    marks = match[1]
    # A paragraph that is indented, or a term and what it means: no list.
    if set(marks) <= set(":;"):
        return ""
    kinds = {"*": "- ", "#": "1. "}
    return "  " * (len(marks) - 1) + kinds.get(marks[-1], "")


def _wiki_table(text: str, parser: WikiParser) -> str:
    """Return a table of wiki markup as Markdown, its caption above."""
    rows: list[list[tuple[str, int, int]]] = [[]]
    headers = [0]
    caption = ""
    for line in re.split(r"\n(?=[ \t]*[|!])", text)[1:]:
        line = line.strip()
        if line.startswith("|}"):
            break
        if line.startswith("|+"):
            caption = _cell(line[2:], parser)[0]
        elif line.startswith("|-"):
            rows.append([])
            headers.append(0)
        else:
            is_header = line.startswith("!")
            cells = re.split(r"\|\||!!" if is_header else r"\|\|", line[1:])
            rows[-1] += [_cell(cell, parser) for cell in cells]
            if is_header:
                headers[-1] += len(cells)
    are_headers = [n == len(row) for row, n in zip(rows, headers, strict=True) if row]
    rows = [row for row in rows if row]
    if not rows:
        return caption
    n_header = [*are_headers, False].index(False)
    table = markdown_table(spanned(rows), max(1, min(n_header, len(rows) - 1)))
    return "\n\n".join(filter(None, [caption, table]))


def _cell(cell: str, parser: WikiParser) -> tuple[str, int, int]:
    """Return the text of a cell with the rows and columns that it spans."""
    attributes, bar, content = cell.partition("|")
    if not bar or "[[" in attributes or "{{" in attributes:
        attributes, content = "", cell
    text = one_line(_plain(content.strip(), parser).replace("\n", " "))
    return text, _span(attributes, "rowspan"), _span(attributes, "colspan")


def _span(attributes: str, name: str) -> int:
    span = re.search(rf"{name}\s*=\s*[\"']?(\d{{1,3}})", attributes)
    return int(span[1]) if span else 1
