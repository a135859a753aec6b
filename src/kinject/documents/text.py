"""Plain text and Markdown, read and written, and the parts common to all readers: decoding,
optional libraries."""

from __future__ import annotations

import codecs
import contextlib
import html
import importlib
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import yaml

from kinject.disk import content_id, format_size, read_bytes
from kinject.documents.charsets import (
    CHARSETS,
    DETECTED,
    WESTERN_CODECS,
    codec_of_letters,
    declared_codec,
    high_part,
    is_mostly_high,
    mostly_utf8,
)
from kinject.documents.readers import LANGUAGES, LocatedDocument, ReadOptions
from kinject.documents.symbols import raised
from kinject.errors import InputError, KinjectError
from kinject.terminal import format_count
from kinject.types import Document

_FRONT_MATTER = re.compile(
    r"---[ \t]*\n((?:(?!---|\.\.\.).*\n){1,200})(?:---|\.\.\.)[ \t]*(?:\n\s*|\Z)"
)
_INFO = re.compile(
    "\n?\x1f\n(?:File: [^\n]*\n|Tag Table:\n[^\x1f]*|Local Variables:\n[^\x1f]*"
    "|End Tag Table\n*|Indirect:\n[^\x1f]*)?|\x1f"
)
"""The navigation between the nodes of an info manual."""
# What ends the line is stripped afterwards: `^#\s+(.+?)\s*#*\s*$` took cubic time on a line of
# spaces.
_HEADING = re.compile(r"^#[ \t]+(.*)$|^(?=[^\W_])(.+)\n=+[ \t]*$", re.MULTILINE)
"""A heading of level 1, with its mark before it or a line below it."""
_FENCED = re.compile(r"^ {0,3}(```+|~~~+)[^\n`]*\n(?s:.*?)(?:^ {0,3}\1|\Z)", re.MULTILINE)
"""Code between fences, in which # begins a comment."""
# Bounded, and nothing within its like: what never ends would be sought to the end each time.
_UNLIKE_SHOWN = re.compile(
    r"""
    (?P<code> (?<!`) (?P<ticks>`+) (?!`) .{1,400}? (?<!`) (?P=ticks) (?!`) )
    | (?P<comment> <!-- (?:(?!<!--).)*? --> )
    | (?P<picture> !\[ (?P<alt>[^][]*) \] \( \s* <? data:image/ [^()<>!]* >? \) )
    | (?P<sup> <sup> (?P<up>[^<>\n]{1,40}) </sup> )
    | (?P<break> <br \s* /? > )
    | (?P<tag> </? (?P<element> a|center|details|div|font|img|p|picture|small|source|span|sub
        |summary|sup ) (?: \s [^<>]*)? /? > )
    | (?P<target> ^ [ ]{0,3} \[ (?P<label>[^][\n]+) \]: [ \t]* <? data:image/ [^()<>!\n]* >? \n? )
    | & (?: \#[0-9]{1,7} | \#x[0-9a-f]{1,6} | [a-z][a-z0-9]{1,30} ) ;
    """,
    re.DOTALL | re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""Of Markdown outside fences: code, which is shown as it is, comments, pictures whose bytes are in
the text, tags of HTML that show nothing, and characters by their names. A <name> stays, since few
mean it as a tag."""
_END_TAG = re.compile(r"</([a-z]+)\s*>", re.IGNORECASE)
_SEVEN_BIT = {"iso2022_jp": b"\x1b", "iso2022_kr": b"\x1b", "hz": b"~{", "utf-7": b"+"}
"""Codecs whose bytes are those of ASCII -> what begins another letter."""
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a]")
_JAPANESE = (b"\x1b$B", b"\x1b$@")
"""What begins Japanese in ISO-2022-JP, and is in no other text."""
# Every other byte of Latin letters in UTF-16 is NUL; some of the text may be of other letters.
_MOSTLY_NUL = 0.7
MOST_MEMBERS = 100_000
# RuntimeError is zipfile's for a locked member, NotImplementedError for a compression that it does
# not know.
DAMAGED_ARCHIVE = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zlib.error,
)
"""The errors of zipfile and gzip for damaged or unknown archives."""


def read_text(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the one document in a text file, named as the file."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    yield whole_file(path, "", _INFO.sub("\n", text), meta)


def read_markdown(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the one document in a Markdown file, named by its first heading of level 1."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    text, stated = _front_matter(text)
    text = shown_markdown(text)
    title = str(stated.pop("title", "")) or first_heading(text)
    yield whole_file(path, title, text, {**stated, **meta})


def shown_markdown(text: str) -> str:
    """Return Markdown without comments and tags, which nobody sees, and the bytes of pictures; each
    character that is written by its name, such as ``&eacute;``, is itself. Code stays as it is."""
    parts: list[str] = []
    labels: list[str] = []
    closed = {name.lower() for name in _END_TAG.findall(text)}
    as_shown = partial(_as_shown, labels, closed)
    end = 0
    for fence in _FENCED.finditer(text):
        parts += [_UNLIKE_SHOWN.sub(as_shown, text[end : fence.start()]), fence[0]]
        end = fence.end()
    parts.append(_UNLIKE_SHOWN.sub(as_shown, text[end:]))
    shown = "".join(parts)
    for label in labels:
        shown = shown.replace(f"![][{label}]", "")
    return shown


def _as_shown(labels: list[str], closed: Set[str], match: re.Match[str]) -> str:
    """Return what a reader sees of a match; the label of a picture that is left out goes to
    `labels`. Elements that are `closed` somewhere are tags."""
    # In "cp <source> <target>" is none.
    is_name = match["tag"] and "=" not in match["tag"] and match["element"].lower() not in closed
    if match["code"] or is_name:
        return match[0]
    if match["picture"]:
        return match["alt"]
    if match["sup"]:
        return raised(match["up"])
    if match["break"]:
        return " "
    if match["target"]:
        labels.append(match["label"])
    if match["comment"] or match["tag"] or match["target"]:
        return ""
    character = html.unescape(match[0])
    if character == "|":
        return match[0]  # it would end the cell of a table
    if character.isspace():
        return " "
    return character.replace("\u00ad", "")


def first_heading(text: str) -> str:
    """Return the first heading of level 1 of Markdown, "" without one."""
    for match in _HEADING.finditer(_FENCED.sub("", text)):
        found = (match[1] or match[2] or "").strip().rstrip("#").strip()
        if found:
            return found
    return ""


def _front_matter(text: str) -> tuple[str, dict[str, Any]]:
    """Return Markdown without the YAML mapping between its first lines ``---``, and the mapping."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return text, {}
    try:
        stated = json.loads(json.dumps(yaml.safe_load(match[1]), default=str))
    # A rule above text that is no YAML.
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        return text, {}
    if not isinstance(stated, dict):
        return text, {}
    return text[match.end() :], stated


def read_code(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a file of source code as one fenced block, with its language, below its name."""
    text, meta = decode(path, read_bytes(path, options.largest, stream))
    language = LANGUAGES[path.suffix.lower()]
    body = ""
    if text.strip():
        body = f"# {path.name}\n\n{fenced(text, language)}"
    yield whole_file(path, path.name, body, {**meta, "language": language})


def joined(parts: Sequence[tuple[int | str, str]]) -> tuple[str, list[list[int | str]]]:
    """Return the texts of (name, text) with blank lines between them, and [start in characters,
    name] of each."""
    starts: list[list[int | str]] = []
    texts: list[str] = []
    length = 0
    for name, text in parts:
        if not text:
            continue
        if texts:
            length += 2
        starts.append([length, name])
        texts.append(text)
        length += len(text)
    return "\n\n".join(texts), starts


def whole_file(
    path: Path, title: str, text: str, meta: Mapping[str, Any] | None = None
) -> LocatedDocument:
    """Return the location and the document of a file that is one document. Without a title it has
    the file's name."""
    title = title or path.stem
    return str(path), Document(content_id(title, text), title, text, str(path), meta or {})


def import_extra(module: str, path: Path) -> Any:
    """Return a module of the extra `documents`. Raises `InputError` with the command that installs
    it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.suffix} needs {module.partition('.')[0]}, which is not "
            "installed. Run: pip install 'kinject[documents]'"
        ) from error


@contextlib.contextmanager
def library_errors(path: Path, kind: str, fix: str) -> Iterator[None]:
    """Turn every error of a library into an `InputError`: damaged files make their readers raise
    anything."""
    try:
        with warnings.catch_warnings():  # libraries warn of broken files
            warnings.simplefilter("ignore")
            yield
    except KinjectError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise InputError(f"{path}: not a readable {kind} ({reason}). {fix}") from error


def is_utf16(data: bytes) -> bool:
    """Return whether a text that begins with a letter of ASCII is in UTF-16."""
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in data[:2]


def decode(path: Path, data: bytes, declared: str = "") -> tuple[str, dict[str, str]]:
    """Return the text of `path`, whose bytes are `data`, with LF line ends, and its encoding as
    meta unless it is UTF-8.

    Raises `InputError` if it is none of those of the web.
    """
    for charset in _charsets(path, data, declared):
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode(charset).removeprefix("\ufeff")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            return text, {} if charset == "utf-8" else {"encoding": charset}
        if charset == "utf-8":
            text = mostly_utf8(data)
            if text:
                text = text.replace("\r\n", "\n").replace("\r", "\n")
                return text, {"encoding": "utf-8, in part cp1252"}
    raise InputError(f"{path}: neither UTF-8 nor text in another known encoding. Save it as UTF-8.")


def _charsets(path: Path, data: bytes, declared: str) -> Iterator[str]:
    """Yield encodings that `data` may have: by its byte-order mark, UTF-8, the `declared` one, by
    its letters."""
    # Any bytes are text in most encodings: those that can be checked come first.
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        yield "utf-16"
    for wide, half in (("utf-16-le", data[1:2000:2]), ("utf-16-be", data[:2000:2])):
        if half.count(0) > _MOSTLY_NUL * len(half):
            yield wide
    name = declared_codec(declared)
    if name in _SEVEN_BIT and _SEVEN_BIT[name] in data:
        yield name
    if any(start in data for start in _JAPANESE):
        yield "iso2022_jp"
    # Cyrillic in UTF-16 is valid in UTF-8, as control characters.
    if name.startswith("utf-16") and _CONTROL.search(data):
        yield name
    yield "utf-8"
    # Mailers declare ASCII, or a western encoding, for what they do not know.
    is_plausible = name not in WESTERN_CODECS or not is_mostly_high(data)
    if name in CHARSETS and is_plausible:
        yield name
    likely = codec_of_letters(data)
    if likely:
        yield likely
    detector = import_extra("charset_normalizer", path)
    best = detector.from_bytes(high_part(data), cp_isolation=list(DETECTED)).best()
    if best is not None:
        yield best.encoding.replace("_", "-")
    if name in WESTERN_CODECS:
        yield "cp1252"


def check_archive(path: Path, stream: BinaryIO, options: ReadOptions) -> int:
    """Return the bytes that a zip unpacks to, which is one document. Raises `InputError` if they
    are too many, or locked."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except DAMAGED_ARCHIVE as error:
        raise InputError(
            f"{path}: damaged: not a readable zip ({str(error)[:100]}). Save it again."
        ) from error
    finally:
        stream.seek(0)
    if any(member.flag_bits & 1 for member in members):
        raise InputError(f"{path}: locked with a password. Save a copy without one.")
    # A small archive may unpack to more than memory holds.
    unpacked = sum(member.file_size for member in members)
    if unpacked > options.largest or len(members) > MOST_MEMBERS:
        raise InputError(
            f"{path}: unpacks to {format_size(unpacked)} in {format_count(len(members), 'part')}, "
            f"allowed: {format_size(options.largest)} in {MOST_MEMBERS:,}. Split it."
        )
    return unpacked


_XHTML = re.compile(r"<\?xml\b|<html\b[^>]*\bxmlns\s*=", re.IGNORECASE)
_CLOSED = re.compile(
    r"""<([a-z][a-z0-9]*)((?:\s+[^\s<>=/"']+(?:\s*=\s*(?:"[^"]*"|'[^']*'))?)*+)\s*/>"""
)
"""An element that ends where it begins."""
_CDATA = "<![CDATA["
_ENDLESS = "area base br col embed hr img input link meta param source track wbr"
_VOID = frozenset(_ENDLESS.split())


def html_of_xhtml(source: str) -> str:
    """Return XHTML as HTML, which does not close <title/> and <script/>: the page would be in them;
    other pages as they are."""
    if _XHTML.search(source[:2_000]) is None:
        return source
    first, *sections = source.split(_CDATA)
    parts = [first]
    for section in sections:
        content, end, rest = section.partition("]]>")
        if end:
            content = html.escape(content)
        parts.append(content + rest)
    return _CLOSED.sub(_opened_and_closed, "".join(parts))


def _opened_and_closed(element: re.Match[str]) -> str:
    name, attributes = element.groups()
    if name in _VOID:
        return element[0]
    return f"<{name}{attributes}></{name}>"


class XmlElement(Protocol):
    """The part of lxml's elements that readers use; the library has no types."""

    @property
    def tag(self) -> str: ...

    @property
    def attrib(self) -> Mapping[str, str]: ...

    @property
    def text(self) -> str | None: ...

    @property
    def tail(self) -> str | None: ...

    def __iter__(self) -> Iterator[Self]: ...

    def find(self, path: str) -> Self | None: ...

    def findtext(self, path: str) -> str | None: ...

    def get(self, key: str, default: str = ...) -> Any: ...

    def getparent(self) -> Self: ...

    def iter(self, tag: str) -> Iterator[Self]: ...

    def iterancestors(self) -> Iterator[Self]: ...

    def iterchildren(self, *tags: str) -> Iterator[Self]: ...

    def iterfind(self, path: str) -> Iterator[Self]: ...

    def itersiblings(self) -> Iterator[Self]: ...

    def remove(self, child: Self) -> None: ...

    def set(self, key: str, value: str) -> None: ...


def parse_xml(path: Path, data: bytes) -> XmlElement:
    """Return the root of an XML text: no entity is expanded, nothing is fetched."""
    etree = import_extra("lxml.etree", path)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, recover=True)
    root: XmlElement = etree.fromstring(data, parser)
    return root


_MOST_CELLS = 2_000_000
"""Cells of one table, after cells that span rows and columns are repeated in each."""
DEEPEST_ITEM = 8
"""Levels of a list within lists that are shown by indentation."""
WideRow = tuple[list[str], bool]
"""The cells of a row of a sheet, and whether one of them spans some of the columns."""
_LONGEST_NAME = 100
"""Characters of the name of a row, and of a cell in a table of one column."""
_NUMBER = re.compile(r"[-+]?[\d.,:%€$£ -]*\d[\d.,:%€$£ -]*")
_VALUE = re.compile(r"(?!(?:19|20)\d\d\Z)[-+−–±<>≈~]?\s?[$€£¥]?\s?\d")
"""The beginning of a number that is no year, which may be the name of a column."""
_SPACE = re.compile(r"\s+")
_FENCES = re.compile(r"^\s*(`{3,})", re.MULTILINE)


def one_line(text: str) -> str:
    """Return `text` with single spaces between its words."""
    return _SPACE.sub(" ", text).strip()


def heading(level: int, text: str) -> str:
    """Return a heading of level 1 to 6 (deeper ones are 6)."""
    return f"{'#' * min(max(level, 1), 6)} {one_line(text)}"


def fenced(code: str, language: str = "") -> str:
    """Return `code` between fences that none of its own lines closes."""
    longest = max((len(match[1]) for match in _FENCES.finditer(code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}"


def markdown_table(rows: Sequence[Sequence[str]], n_header: int = 1) -> str:
    """Return rows of cells as a Markdown table whose header is the first `n_header` rows, joined
    column by column.

    Empty rows and columns are left out. Rows that hold one text across all columns are lines above
    and, as rows with an empty rest, within the table. One row is no table, nor is a column of
    sentences: its cells are lines.
    """
    width = max(map(len, rows), default=0)
    grid = [_padded(row, width) for row in rows]
    above = []
    # A row of one text is a title over all columns.
    while len(grid) > 1 and width > 1 and len(set(grid[0])) == 1:
        above.append(grid.pop(0)[0])
        n_header = max(1, n_header - 1)
    header = [_joined_cells(column) for column in zip(*grid[:n_header], strict=True)]
    body = [row for row in grid[n_header:] if any(row)]
    columns = [index for index in range(len(header)) if any(row[index] for row in [header, *body])]
    lines = [_body_line([row[index] for index in columns]) for row in (header, *body)]
    if not body or (len(columns) == 1 and any(map(_is_sentence, chain(*lines)))):
        text = [" | ".join(filter(None, row)) for row in lines]
    else:
        text = [_markdown_row(row) for row in lines]
        text.insert(1, "|" + " --- |" * len(columns))
    table = "\n".join(filter(None, text))
    head = "\n\n".join(filter(None, above))
    return f"{head}\n\n{table}" if head else table


def _is_sentence(cell: str) -> bool:
    """Return whether a cell is longer than a name, or ends as sentences do: a table of one column
    that holds such text is a frame around it."""
    return len(cell) > _LONGEST_NAME or cell.endswith((".", "!", "?"))


def below_table(table: str, inner: Sequence[tuple[str, str]]) -> str:
    """Return a table, and below it the (name of the row, table) that its cells hold: Markdown has
    no tables within cells, and on one line nobody knows which cell was below which."""
    blocks = [table]
    for name, text in inner:
        if len(name) > _LONGEST_NAME:
            name = ""
        blocks += [f"{name}:" if name else "", text]
    return "\n\n".join(filter(None, blocks))


def _padded(row: Sequence[str], width: int) -> list[str]:
    """Return the cells of a row as lines, with empty ones up to `width`."""
    return [*map(one_line, row), *[""] * (width - len(row))]


def _joined_cells(column: Iterable[str]) -> str:
    """Return the different texts of the header's cells above one another."""
    return " ".join(dict.fromkeys(filter(None, column)))


def _body_line(row: list[str]) -> list[str]:
    """Return a row; words across three columns or more only once, as a heading inside a table is.

    One word or number in each cell is data: of `3 | 3 | 3` two would be lost.
    """
    if len(row) < 3 or len(set(row)) > 1:
        return row
    text = row[0]
    if " " in text and not any(map(str.isdigit, text)):
        return [text, *[""] * (len(row) - 1)]
    return row


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def goes_on_below(header: Sequence[str], row: Sequence[str]) -> bool:
    """Return whether `row` parts the merged cells of the `header` above it, which are repeated in
    each column. A row of values has a name below that of the first column, or a number below
    another name that is not merged."""
    for index, (name, cell) in enumerate(zip(header, row, strict=False)):
        is_merged = name in (*header[max(0, index - 1) : index], *header[index + 1 : index + 2])
        if not name or is_merged or cell in ("", name):
            continue
        if index == 0 or _VALUE.match(cell):
            return False
    return True


def spanned(rows: Iterable[Iterable[tuple[str, int, int]]]) -> list[list[str]]:
    """Return the grid of rows of (text, rows spanned, columns spanned): a text is in each grid cell
    that its own cell spans.

    Raises `ValueError` if the grid is larger than any table.
    """
    grid: list[list[str]] = []
    hanging: dict[int, tuple[str, int]] = {}
    n_cells = 0
    for cells in rows:
        line: list[str] = []

        def hang(line: list[str] = line) -> None:
            while len(line) in hanging:
                text, n_left = hanging.pop(len(line))
                if n_left > 1:
                    hanging[len(line)] = text, n_left - 1
                line.append(text)

        for text, n_rows, n_columns in cells:
            hang()
            for _ in range(max(1, n_columns)):
                if n_rows > 1:
                    hanging[len(line)] = text, n_rows - 1
                line.append(text)
                if n_cells + len(line) > _MOST_CELLS:
                    raise ValueError(f"a table of more than {_MOST_CELLS:,} cells")
        hang()
        n_cells += len(line)
        grid.append(line)
    return grid


def tables_of(rows: Sequence[Sequence[str]], wide: Sequence[bool] = ()) -> str:
    """Return a sheet's rows as text and tables: blank rows and blank columns part them, lone cells
    are lines of text.

    `wide[i]`: row i has a cell that spans some of the columns, so the next row belongs to its
    header. A block that follows a blank row under the same columns, and begins with a number,
    continues the table before it.
    """
    is_wide = list(wide) or [False] * len(rows)
    blocks: list[tuple[tuple[int, int], list[WideRow]]] = []
    for indices in _runs([any(map(str.strip, row)) for row in rows]):
        for columns in _column_runs([rows[index] for index in indices]):
            first, last = columns
            block = [(list(rows[index][first:last]), is_wide[index]) for index in indices]
            earlier_columns, earlier = blocks[-1] if blocks else ((0, 0), [])
            is_table = earlier_columns == columns and len(earlier[0][0]) > 1
            if is_table and _has_number(block[0][0]):
                earlier += block
            else:
                blocks.append((columns, block))
    return "\n\n".join(_block_text(block) for _, block in blocks)


def _runs(filled: Sequence[bool]) -> list[list[int]]:
    """Return the runs of indices whose value is true."""
    runs: list[list[int]] = []
    for index, is_filled in enumerate(filled):
        if not is_filled:
            continue
        if index and filled[index - 1]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _column_runs(block: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return (first, past the last) of the runs of columns that are not blank in `block`."""
    filled = [any(map(str.strip, column)) for column in zip_longest(*block, fillvalue="")]
    return [(run[0], run[-1] + 1) for run in _runs(filled)]


def _has_number(row: Sequence[str]) -> bool:
    return any(_NUMBER.fullmatch(cell.strip()) for cell in row)


def _block_text(block: list[WideRow]) -> str:
    """Return a block as lines of text as long as rows hold one cell, then as a table."""
    lines = []
    while block and len(block[0][0]) > 1:
        texts = {cell for cell in block[0][0] if cell.strip()}
        if len(texts) != 1:
            break
        lines.append(one_line(texts.pop()))
        del block[0]
    n_header = 1
    while n_header < len(block) - 1 and block[n_header - 1][1]:
        if not goes_on_below(block[n_header - 1][0], block[n_header][0]):
            break
        n_header += 1
    table = markdown_table([row for row, _ in block], n_header) if block else ""
    return "\n\n".join(filter(None, [*lines, table]))
