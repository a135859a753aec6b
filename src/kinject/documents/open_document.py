"""Documents of OpenOffice and LibreOffice (ODT, ODS, ODP), rich text (RTF), and mails that Outlook saved (MSG)."""

from __future__ import annotations

import html
import re
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from kinject.disk import content_id, read_bytes
from kinject.documents.html import page_of
from kinject.documents.readers import LocatedDocument, ReadOptions, read_member
from kinject.documents.text import check_archive, import_extra, library_errors, markdown_table, parse_xml, whole_file
from kinject.types import Document

_TAGS = {
    "h": "h{level}", "p": "p", "list": "ul", "list-item": "li", "table-row": "tr", "table-cell": "td", "covered-table-cell": "",
    "line-break": "br", "page": "section", "annotation": "", "tracked-changes": "", "forms": "", "note-citation": "",
}  # fmt: skip
"""Element of OpenDocument -> that of HTML; "" leaves it out with its content, others are their content."""
_MOST_REPEATED = 50
"""Cells of the same content in a row that are written; a sheet's empty rest repeats thousands of times."""


def read_open_document(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a text, a workbook (a heading for each sheet) or slides of OpenDocument, by way of HTML."""
    data = BytesIO(read_bytes(path, options.largest, stream))
    check_archive(path, data, options)
    with library_errors(path, "OpenDocument file", "Save it again."), zipfile.ZipFile(data) as archive:
        body = parse_xml(path, archive.read("content.xml")).find("{*}body")
        stated = parse_xml(path, archive.read("meta.xml")) if "meta.xml" in archive.namelist() else body
        fields = {"title": "title", "author": "creator", "date": "date"}
        meta = {
            key: (stated.findtext(f".//{{http://purl.org/dc/elements/1.1/}}{name}") or "").strip()
            for key, name in fields.items()
        }
        _, text, _ = page_of(path, f"<html><body>{_as_html(body)}</body></html>", whole_page=True)
    heading = re.search(r"^#+ (.+)$", text, re.MULTILINE)
    title = meta.pop("title") or (heading[1] if heading else "")
    yield whole_file(
        path, title, text, {key: value[:10] if key == "date" else value for key, value in meta.items() if value}
    )


def _as_html(element: Any) -> str:
    """Return the content of an element, with what follows its children, as HTML."""
    parts = [html.escape(element.text or "")]
    for child in element:
        name = str(child.tag).rpartition("}")[2]
        values = {str(key).rpartition("}")[2]: value for key, value in child.attrib.items()}
        tag = _TAGS.get(name)
        if name == "s":
            parts.append(" ")
        elif name == "tab":
            parts.append("\t")
        elif name == "table":
            sheet = f"<h1>{html.escape(values.get('name', ''))}</h1>" if element.tag.endswith("spreadsheet") else ""
            parts.append(f"{sheet}<table>{_as_html(child)}</table>")
        elif name == "note":
            parts.append(f" ({re.sub('</?p>', '', _as_html(child)).strip()})")
        elif tag != "" and isinstance(child.tag, str):
            tag = (tag or "").format(level=min(int(values.get("outline-level", 1)), 6))
            spans = "".join(
                f" {key}={values[f'number-{key[:-4]}s-spanned']}"
                for key in ("rowspan", "colspan")
                if f"number-{key[:-4]}s-spanned" in values
            )
            inner = _as_html(child)
            n = min(int(values.get("number-columns-repeated", 1)), _MOST_REPEATED) if inner else 1
            parts.append((f"<{tag}{spans}>{inner}</{tag}>" if tag else inner) * n)
        parts.append(html.escape(child.tail or ""))
    return "".join(parts)


def read_rtf(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a file of rich text: its paragraphs, and its tables."""
    striprtf = import_extra("striprtf.striprtf", path)
    data = read_bytes(path, options.largest, stream)
    with library_errors(path, "RTF file", "Save it as .docx."):
        text = striprtf.rtf_to_text(data.decode("latin-1"), errors="replace")

    def table(match: re.Match[str]) -> str:
        return markdown_table([line.rstrip("|").split("|") for line in match[0].strip().split("\n")]) + "\n\n"

    text = re.sub(r"(?:^[^\n|]*\|[^\n]*\|\n?){2,}", table, text, flags=re.MULTILINE)
    yield whole_file(path, "", re.sub(r"\n{3,}", "\n\n", text).strip())


def read_msg(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a mail that Outlook saved, then the documents of its attachments."""
    olefile = import_extra("olefile", path)
    with library_errors(path, "Outlook mail", "Save it as .eml."):
        mail = olefile.OleFileIO(BytesIO(read_bytes(path, options.largest, stream)))
        subject, sender, body = (_property(mail, "", name) for name in ("0037", "0C1A", "1000"))
        folders = sorted({entry[0] for entry in mail.listdir() if entry[0].startswith("__attach")})
        attachments = []
        for folder in folders:
            if mail.exists(content := f"{folder}/__substg1.0_37010102"):
                name = _property(mail, f"{folder}/", "3707") or _property(mail, f"{folder}/", "3704") or folder
                attachments.append((name, mail.openstream(content).read()))
    title = " ".join(subject.split())
    text = f"# {title}\n\n{body.strip()}" if title and body.strip() else body.strip()
    meta = {"author": sender} if sender else {}
    yield str(path), Document(content_id(title, text), title or path.stem, text.replace("\r\n", "\n"), str(path), meta)
    for name, data in attachments:
        yield from read_member(Path(f"{path}/{Path(name).name}"), data, options)


def _property(mail: Any, folder: str, name: str) -> str:
    """Return a text of a mail, "" without one: in UTF-16, else in the encoding of Windows."""
    for kind, charset in (("001F", "utf-16-le"), ("001E", "cp1252")):
        stream = f"{folder}__substg1.0_{name}{kind}"
        if mail.exists(stream):
            return str(mail.openstream(stream).read().decode(charset, "replace")).rstrip("\0")
    return ""
