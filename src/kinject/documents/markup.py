"""reStructuredText, rich text (RTF), notebooks, and MediaWiki's XML export."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kinject.disk import content_id, read_bytes
from kinject.documents.html import page_of
from kinject.documents.readers import LocatedDocument, ReadOptions
from kinject.documents.text import (
    decode,
    fenced,
    heading,
    import_extra,
    library_errors,
    markdown_table,
    one_line,
    spanned,
    whole_file,
)
from kinject.errors import InputError
from kinject.types import Document

_ROLE = re.compile(r":[a-zA-Z][\w:.+-]*:`([^`]*)`")
"""A role of docutils or Sphinx, whose text is kept without the role."""
_TARGET = re.compile(r"^(.*\S)\s*<[^<>]+>$", re.DOTALL)


def read_rst(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a reStructuredText file; files that it includes are not read, nor raw HTML."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    core = import_extra("docutils.core", path)

    def shown(role: re.Match[str]) -> str:
        target = _TARGET.match(role[1])
        return (
            target[1]
            if target
            else role[1].rpartition(".")[2]
            if role[1].startswith("~")
            else role[1].lstrip("!")
        )

    settings = {
        "file_insertion_enabled": False, "raw_enabled": False, "report_level": 5, "halt_level": 5, "_disable_config": True,
        "embed_stylesheet": False, "stylesheet_path": None, "syntax_highlight": "none", "output_encoding": "unicode",
        "doctitle_xform": False, "initial_header_level": 1, "line_length_limit": 1_000_000,
    }  # fmt: skip
    with library_errors(path, "reStructuredText file", "Repair its markup, or rename it to .txt."):
        page = core.publish_string(
            _ROLE.sub(shown, text), writer="html5", settings_overrides=settings
        )
        _, body, _ = page_of(path, page, whole_page=True)
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    yield whole_file(path, title[1] if title else "", body, meta)


def read_rtf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a file of rich text: its paragraphs, and its tables."""
    striprtf = import_extra("striprtf.striprtf", path)
    data = read_bytes(path, options.largest, stream)
    with library_errors(path, "RTF file", "Save it as .docx."):
        text = striprtf.rtf_to_text(data.decode("latin-1"), errors="replace")

    def table(match: re.Match[str]) -> str:
        return (
            markdown_table([line.rstrip("|").split("|") for line in match[0].strip().split("\n")])
            + "\n\n"
        )

    text = re.sub(r"(?:^[^\n|]*\|[^\n]*\|\n?){2,}", table, text, flags=re.MULTILINE)
    yield whole_file(path, "", re.sub(r"\n{3,}", "\n\n", text).strip())


def read_notebook(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a Jupyter notebook: its Markdown, and its code in fences without outputs."""
    text, _ = decode(path, read_bytes(path, options.largest, stream))
    with library_errors(path, "notebook", "Save it again."):
        book = json.loads(text)
        language = str(book.get("metadata", {}).get("language_info", {}).get("name", "python"))
        parts = []
        for cell in book["cells"]:
            source = "".join(cell["source"]).strip()
            if source:
                parts.append(fenced(source, language) if cell["cell_type"] == "code" else source)
    body = "\n\n".join(parts)
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    yield whole_file(path, title[1].strip() if title else "", body)


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
            revisions = page.findall("{*}revision")
            text = (revisions[-1].findtext("{*}text") if revisions else "") or ""
            date = (revisions[-1].findtext("{*}timestamp") if revisions else "") or ""
            is_article = (page.findtext("{*}ns") or "0") == "0" and page.find("{*}redirect") is None
            page.clear()
            while page.getprevious() is not None:
                del page.getparent()[0]
            if is_article and text.strip():
                location = f"{path}: page {number}"
                yield location, _article(location, title, text, date, parser)


def _article(location: str, title: str, text: str, date: str, parser: Any) -> Document | InputError:
    try:
        with library_errors(Path(location), "wiki text", "Take the page out."):
            if len(text) > 2_000_000:
                raise InputError(
                    f"{location}: an article of {len(text):,} characters, allowed: 2,000,000. Split it."
                )
            body = wiki_text(text, parser)
    except InputError as error:
        return error
    body = f"{heading(1, title)}\n\n{body}" if body else ""
    return Document(
        content_id(title, body), title, body, location, {"date": date[:10]} if date else {}
    )


_WIKI_TABLE = re.compile(r"^[ \t:]*\{\|(?:(?!^[ \t:]*\{\|)(?s:.))*?^[ \t]*\|\}", re.MULTILINE)
_WIKI_HEADING = re.compile(r"^(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*$", re.MULTILINE)
_WIKI_ITEM = re.compile(r"^([*#:;]+)[ \t]*", re.MULTILINE)
_NO_TEXT = "category|kategorie|catégorie|categoría|file|image|datei|bild|fichier|archivo"
_LANGUAGE_LINK = re.compile(
    rf"\[\[(?:[a-z]{{2,3}}(?:-[a-z]+)?|{_NO_TEXT}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*+\]\]",
    re.IGNORECASE,
)
_DROPPED = re.compile(
    r"<(ref|gallery|math|timeline|imagemap|score)\b[^<>]*(?:/>|>(?s:.*?)</\1\s*>)|<!--(?s:.*?)-->",
    re.IGNORECASE,
)
_CODE = re.compile(r"<(syntaxhighlight|source|pre)\b([^<>]*)>((?s:.*?))</\1\s*>", re.IGNORECASE)


def wiki_text(text: str, parser: Any) -> str:
    """Return wiki markup as Markdown; templates, references, files and categories are left out."""
    blocks: list[str] = []

    def keep(block: str) -> str:
        blocks.append(block)
        return f"\n\n\x02{len(blocks) - 1}\x03\n\n"

    def code(match: re.Match[str]) -> str:
        language = re.search(r"lang\s*=\s*[\"']?([\w+#-]+)", match[2])
        return keep(fenced(html.unescape(match[3]), language[1].lower() if language else ""))

    text = _CODE.sub(code, text.replace("\x02", "").replace("\x03", ""))
    text = _LANGUAGE_LINK.sub("", _DROPPED.sub("", text))
    for _ in range(3):  # the innermost tables first
        text, n = _WIKI_TABLE.subn(lambda match: keep(_wiki_table(match[0], parser)), text)
        if not n:
            break
    text = _plain(text, parser)
    text = _WIKI_ITEM.sub(_mark, text)
    text = _WIKI_HEADING.sub(lambda match: f"\n\n{heading(len(match[1]), match[2])}\n\n", text)
    for _ in range(4):  # a table may hold the code and the tables within it
        text = re.sub("\x02(\\d+)\x03", lambda match: blocks[int(match[1])], text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip()


def _plain(text: str, parser: Any) -> str:
    """Return wiki text without templates, links and emphasis; headings and list marks stay."""
    marked = _WIKI_HEADING.sub(
        lambda match: f"\x04{match[1]}\x05{match[2]}\x05{match[1]}\x04", text
    )
    marked = re.sub(r"^([*#:;]+)", "\x06\\1\x06", marked, flags=re.MULTILINE)
    plain = str(
        parser.parse(marked).strip_code(normalize=True, collapse=False, keep_template_params=False)
    )
    return (
        re.sub("\x04(=+)\x05(.*?)\x05=+\x04", r"\1\2\1", plain)
        .replace("\x06", "")
        .replace("__NOTOC__", "")
    )


def _mark(match: re.Match[str]) -> str:
    marks = match[1]
    if marks[-1] in ":;":
        return "" if set(marks) <= set(":;") else "  " * (len(marks) - 1)
    return "  " * (len(marks) - 1) + ("- " if marks[-1] == "*" else "1. ")


def _wiki_table(text: str, parser: Any) -> str:
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
            for cell in re.split(r"\|\||!!" if is_header else r"\|\|", line[1:]):
                rows[-1].append(_cell(cell, parser))
                headers[-1] += is_header
    filled = [(row, n == len(row)) for row, n in zip(rows, headers, strict=True) if row]
    n_header = next(
        (index for index, (_, is_header) in enumerate(filled) if not is_header), len(filled)
    )
    table = (
        markdown_table(spanned(row for row, _ in filled), max(1, min(n_header, len(filled) - 1)))
        if filled
        else ""
    )
    return "\n\n".join(filter(None, [caption, table]))


def _cell(cell: str, parser: Any) -> tuple[str, int, int]:
    """Return the text of a cell with the rows and columns that it spans."""
    attributes, bar, content = cell.partition("|")
    if not bar or "[[" in attributes or "{{" in attributes:
        attributes, content = "", cell
    spans = [
        re.search(rf"{name}\s*=\s*[\"']?(\d{{1,3}})", attributes) for name in ("rowspan", "colspan")
    ]
    text = one_line(_plain(content.strip(), parser).replace("\n", " "))
    return text, *(int(span[1]) if span else 1 for span in spans)  # type: ignore[return-value]
