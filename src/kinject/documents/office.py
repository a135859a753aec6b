"""The package of an Open XML file (.docx, .pptx, .xlsx): its parts, and what all three kinds hold.

A part is opened when its text is wanted. So a picture that is missing, a damaged theme or a link
to nowhere cannot lose a text, as it does in libraries that open all parts first.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote

from kinject.disk import read_bytes
from kinject.documents.number_formats import shown_number
from kinject.documents.readers import LocatedDocument, ReadOptions, read_member
from kinject.documents.symbols import raised
from kinject.documents.text import (
    DAMAGED_ARCHIVE,
    XmlElement,
    check_archive,
    import_extra,
    markdown_table,
    one_line,
)
from kinject.errors import InputError

RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_MARKUP = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
ALTERNATIVES = f"{_MARKUP}AlternateContent"
FALLBACK = f"{_MARKUP}Fallback"
"""What programs show that cannot read the content beside it: the same content again."""
CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}"
OFF = frozenset({"0", "false", "off"})
"""How a switch of Word is turned off."""
_CORE = "{http://schemas.openxmlformats.org/package/2006/metadata/core-properties}"
_DUBLIN = "{http://purl.org/dc/elements/1.1/}"
_TERMS = "{http://purl.org/dc/terms/}"
_STRICT = re.compile(rb"""(=\s*["'])http://purl\.oclc\.org/ooxml/(\w+)/""")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MAIN_PARTS = ("word/document.xml", "ppt/presentation.xml", "xl/workbook.xml")
# SyntaxError is lxml's of a text that is no XML.
_UNREADABLE = (KeyError, SyntaxError, *DAMAGED_ARCHIVE)


class _Relation(NamedTuple):
    kind: str
    target: str


_NOWHERE = _Relation("", "")


class Package:
    """The parts of an Open XML file by their names, and the relations between them."""

    def __init__(self, path: Path, stream: BinaryIO, options: ReadOptions) -> None:
        data = BytesIO(read_bytes(path, options.largest, stream))
        check_archive(path, data, options)
        self.path = path
        self._options = options
        self.faults: list[LocatedDocument] = []
        """Parts of the text that cannot be read: (location, error)."""
        self._archive = zipfile.ZipFile(data)
        self._members = {_plain_name(name): name for name in self._archive.namelist()}
        self._relations: dict[str, dict[str, _Relation]] = {}
        main = self.related("", "officeDocument")
        self.main = next(iter(main), "") or self._usual_main()

    def _usual_main(self) -> str:
        """Return the main part by its usual name, for a package whose own relations are lost."""
        for name in _MAIN_PARTS:
            if name in self._members:
                return name
        raise InputError(
            f"{self.path}: not a readable Office file: it has no main part. Save it again."
        )

    def add_fault(self, what: str, reason: str) -> None:
        """Name a part of the text that is left out."""
        location = f"{self.path}: {what}"
        self.faults.append((location, InputError(f"{location}: {reason}")))

    def data(self, name: str) -> bytes:
        """Return the bytes of a part, the names of Strict Open XML as those of Transitional."""
        data = self._archive.read(self._members[_plain_name(name)])
        if b"purl.oclc.org" in data:
            data = _STRICT.sub(rb"\1http://schemas.openxmlformats.org/\2/2006/", data)
        return data

    def text_of_file(self, name: str) -> str:
        """Return the text of a part that is a file of its own; what is unread of it is named."""
        try:
            data = self.data(name)
        except _UNREADABLE:
            self.add_fault("inserted file", "missing from the file, or damaged. Insert it again.")
            return ""
        texts = []
        place = self.path / posixpath.basename(name)
        for location, document in read_member(place, data, self._options):
            if isinstance(document, InputError):
                self.faults.append((location, document))
            else:
                texts.append(document.text)
        return "\n\n".join(texts)

    def root(self, name: str) -> XmlElement:
        """Return the root of a part. No entity is expanded, nothing is fetched."""
        etree = import_extra("lxml.etree", self.path)
        parser = etree.XMLParser(resolve_entities=False, no_network=True)
        root: XmlElement = etree.fromstring(self.data(name), parser)
        return root

    def elements(self, name: str, *tags: str) -> Iterator[XmlElement]:
        """Yield the elements of a large part with one of these tags; each is emptied after it."""
        etree = import_extra("lxml.etree", self.path)
        stream = BytesIO(self.data(name))
        for _, element in etree.iterparse(stream, tag=tags, resolve_entities=False):
            yield element
            element.clear()

    def optional(self, name: str) -> XmlElement | None:
        """Return the root of a part that the text can do without (styles), None if unreadable."""
        try:
            return self.root(name)
        except _UNREADABLE:
            return None

    def wanted(self, name: str, what: str) -> XmlElement | None:
        """Return the root of a part that holds text; one that is unreadable is named as `what`."""
        try:
            return self.root(name)
        except _UNREADABLE:
            self.add_fault(what, "missing from the file, or damaged. Save the file again.")
            return None

    def optional_roots(self, part: str, kind: str) -> Iterator[XmlElement]:
        """Yield the roots of the parts of a kind that `part` refers to, as `optional`."""
        for name in self.related(part, kind):
            root = self.optional(name)
            if root is not None:
                yield root

    def wanted_roots(self, part: str, kind: str, what: str) -> Iterator[XmlElement]:
        """Yield the roots of the parts of a kind that `part` refers to, as `wanted`."""
        for name in self.related(part, kind):
            root = self.wanted(name, what)
            if root is not None:
                yield root

    def related(self, part: str, kind: str) -> list[str]:
        """Return the parts of a kind (``footnotes``) that a part refers to."""
        relations = self._relations_of(part).values()
        return [relation.target for relation in relations if relation.kind == kind]

    def target(self, part: str, relation_id: str) -> str:
        """Return the part to which a relation of `part` leads, "" without one."""
        return self._relations_of(part).get(relation_id, _NOWHERE).target

    def _relations_of(self, part: str) -> Mapping[str, _Relation]:
        if part not in self._relations:
            self._relations[part] = self._read_relations(part)
        return self._relations[part]

    def _read_relations(self, part: str) -> dict[str, _Relation]:
        folder, name = posixpath.split(part)
        root = self.optional(posixpath.join(folder, "_rels", f"{name}.rels"))
        relations: dict[str, _Relation] = {}
        if root is None:
            return relations
        for element in root.iterchildren():
            target = element.get("Target", "")
            # A link to a page, or one that a program has left without a target.
            if not target or target == "NULL" or element.get("TargetMode") == "External":
                continue
            target = posixpath.normpath(posixpath.join("/", folder, unquote(target)))
            kind = element.get("Type", "").rpartition("/")[2]
            relations[element.get("Id", "")] = _Relation(kind, _plain_name(target))
        return relations

    def properties(self) -> tuple[str, dict[str, str]]:
        """Return the title ("" without one), and author and date as meta."""
        root = next(self.optional_roots("", "core-properties"), None)
        if root is None:
            return "", {}
        author = (root.findtext(f"{_DUBLIN}creator") or "").strip()
        # The library writes its own name where there is no author.
        if author == "openpyxl":
            author = ""
        meta = {"author": author}
        for tag in ("created", "modified"):
            date = _DATE.match((root.findtext(f"{_TERMS}{tag}") or "").strip())
            if date:
                meta["date"] = date[0]
        title = (root.findtext(f"{_DUBLIN}title") or "").strip()
        return title, {key: value for key, value in meta.items() if value}


def _plain_name(name: str) -> str:
    """Return the name of a part as it is compared: some programs write other cases and slashes."""
    return name.replace("\\", "/").lstrip("/").lower()


def attribute_at(parent: XmlElement, path: str, key: str, default: str = "") -> str:
    """Return the attribute `key` of the element at `path`, `default` if there is none."""
    element = parent.find(path)
    if element is None:
        return default
    value: str = element.get(key, default)
    return value


def whole_number(value: str | None, default: int = 0) -> int:
    """Return the number in an attribute, `default` if it holds none."""
    if value is None or not value.isascii() or not value.isdecimal():
        return default
    return int(value[:9])


def runs_text(parent: XmlElement) -> str:
    """Return the paragraphs of a shape on one line. Programs part a word where its print, or its
    spelling, changes: between runs is no space."""
    lines = []
    for paragraph in parent.iter(f"{DRAWING}p"):
        parts = []
        for element in paragraph.iter(f"{DRAWING}*"):
            if element.tag == f"{DRAWING}br":
                parts.append(" ")
            elif element.tag == f"{DRAWING}t":
                text = element.text or ""
                place = attribute_at(element.getparent(), f"{DRAWING}rPr", "baseline")
                if whole_number(place.rstrip("%")):
                    text = raised(text)
                parts.append(text)
        lines.append("".join(parts))
    return one_line(" ".join(lines))


def comment_text(text: str, author: str, place: str = "") -> str:
    """Return a comment on one line, with its author."""
    head = "Comment"
    if place:
        head += f" on {place}"
    if author.strip():
        head += f" by {one_line(author)}"
    return f"{head}: {one_line(text)}"


def drawing_texts(package: Package, part: str, drawing: XmlElement) -> list[str]:
    """Return the charts (title and values) and diagrams in an element of `part`."""
    texts = []
    for chart in drawing.iter(f"{CHART}chart"):
        root = package.wanted(package.target(part, chart.get(f"{RELATION}id", "")), "chart")
        if root is not None:
            texts.append(chart_text(root, package.path))
    for diagram in drawing.iter(f"{DIAGRAM}relIds"):
        root = package.wanted(package.target(part, diagram.get(f"{RELATION}dm", "")), "diagram")
        if root is not None:
            texts.append(diagram_text(root))
    return texts


def diagram_text(root: XmlElement) -> str:
    """Return the texts of a diagram as a list."""
    lines = []
    for point in root.iter(f"{DIAGRAM}t"):
        line = runs_text(point)
        if line:
            lines.append(f"- {line}")
    return "\n".join(lines)


def chart_text(root: XmlElement, path: Path) -> str:
    """Return the title of a chart, and its values as a table: a row for each category."""
    title = root.find(f".//{CHART}chart/{CHART}title")
    texts = []
    if title is not None:
        texts.append(runs_text(title) or title.findtext(f".//{CHART}v") or "")
    # Curves over other categories, or over values of their own as in a scatter plot.
    tables: defaultdict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for series in root.iter(f"{CHART}ser"):
        categories = _points(series, "cat", path) or _points(series, "xVal", path)
        values = _points(series, "val", path) or _points(series, "yVal", path)
        if not values:
            continue
        length = max([*categories, *values]) + 1
        curve = [series.findtext(f"{CHART}tx//{CHART}v") or ""]
        curve += [values.get(index, "") for index in range(length)]
        places = [categories.get(index, str(index + 1)) for index in range(length)]
        tables[tuple(places)].append(curve)
    for shared, curves in tables.items():
        texts.append(markdown_table(list(zip(["", *shared], *curves, strict=True))))
    return "\n\n".join(filter(None, texts))


# Points of one curve that are read.
_MOST_POINTS = 10_000


def _points(series: XmlElement, name: str, path: Path) -> dict[int, str]:
    """Return index -> text of the categories or values of a curve."""
    data = series.find(f"{CHART}{name}")
    if data is None:
        return {}
    number_format = data.findtext(f".//{CHART}formatCode") or ""
    points = {}
    # Of categories in levels the first is the innermost.
    innermost = data.find(f".//{CHART}lvl")
    if innermost is not None:
        data = innermost
    for point in data.iter(f"{CHART}pt"):
        index = whole_number(point.get("idx"))
        text = (point.findtext(f"{CHART}v") or "").strip()
        if index < _MOST_POINTS:
            points[index] = _point_text(text, number_format, path)
    return points


def _point_text(text: str, number_format: str, path: Path) -> str:
    try:
        return shown_number(float(text), number_format, None, path)
    except ValueError:  # the name of a category
        return text
