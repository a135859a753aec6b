"""Files parsed in worker processes, each once: a batch of files opens each, hashes it, and parses it unless that is stored.

The documents of a file are stored by the hash of its content, its suffix, the options and the readers' code and libraries:
a file that was moved, copied or touched is not parsed again. A file that exceeds its limits ends the worker process and
nothing else; the batch's journal names the file.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple

from kinject.corpus.documents.copies import edited, min_hash, repeats, shared_lines, text_hash, word_hashes
from kinject.corpus.documents.files import shown
from kinject.corpus.documents.personal_data import count_personal_data
from kinject.corpus.documents.readers import ReadOptions, read_file
from kinject.disk import content_id, open_to_read, unreadable
from kinject.errors import DiskError, InputError, KinjectError
from kinject.language.detect import detect_language, guess_language
from kinject.process import is_shortage
from kinject.recipe import DocumentsSection
from kinject.types import Document

_LIBRARIES = (
    "pypdf", "pypdfium2", "selectolax", "trafilatura", "lxml", "lxml_html_clean", "python-docx", "python-pptx", "openpyxl",
    "docutils", "mwparserfromhell", "charset-normalizer", "pytesseract", "pyarrow", "pycld2", "rensa", "phonenumbers",
)  # fmt: skip
"""Libraries of the readers, where they are installed."""
_GIB = 2**30
SECONDS = 120.0
"""Processor seconds after which a file is given up."""
MEMORY = 2.0
"""Memory in GiB beyond which a file is given up."""
_WAITING = 10
"""Times its processor seconds that a file may take in all: a file server that hangs takes no processor time."""
_LANGUAGE_CHARACTERS = 5_000
_LONG_WORD = re.compile(r"[!-~\u00a1-\u024f\u0370-\u058f]{60,}")
_LETTERS = re.compile(r"[^\W\d_]+")
_LOCATION = re.compile(r"(:\d+|: page \d+): ")
_FRESH_NS = 2_000_000_000
"""A file that changed so shortly before it was opened may change again without another time stamp."""


class Parsed(NamedTuple):
    """One document of a file, or the reason for none: its location behind the file's name (``:12``, ``/member.pdf``), and

    either `document` and `facts` (`named`: its title is the name of the file), or the `fault`.
    """

    location: str
    document: Document | None
    facts: Mapping[str, Any]
    fault: str = ""


@dataclass(frozen=True)
class ParseOptions:
    """The options that decide the stored documents of a file."""

    read: ReadOptions
    near_duplicates: float | None
    count_personal: bool
    phone_region: str | None
    seconds: float
    memory: float
    version: str

    @classmethod
    def of(cls, section: DocumentsSection) -> ParseOptions:
        """Return the options of a recipe's section."""
        names = section.fields or {}
        read = ReadOptions(names.get("text"), names.get("title"), names.get("id"), section.ocr)
        counts = section.personal_data != "ignore"
        region = section.phone_region if counts else None
        return cls(read, section.near_duplicates, counts, region, SECONDS, MEMORY, readers_version())

    def key(self, sha256: str, path: str) -> str:
        """Return the name under which the content of a file is stored."""
        return content_id("parsed", asdict(self), sha256, Path(path).suffix.lower())


def record_path(cache: Path, key: str) -> Path:
    """Return the path of the record stored under `key`."""
    return cache / key[:2] / f"{key}.jsonl"


@dataclass(frozen=True)
class Batch:
    """Some files (number, path) for one worker process; `folder` holds its journal and the log of all batches."""

    number: int
    folder: Path
    cache: Path
    files: tuple[tuple[int, str], ...]
    options: ParseOptions

    @property
    def label(self) -> str:
        """The batch for people."""
        return f"files {self.files[0][0] + 1} to {self.files[-1][0] + 1}"

    @property
    def journal_path(self) -> Path:
        """A line for each file that was begun, and one for each that is done: {number, path, size, mtime_ns, sha256, fault}."""
        return self.folder / f"batch-{self.number}.jsonl"

    def run(self) -> Mapping[str, Any]:
        """Parse the files."""
        with self.journal_path.open("a", encoding="utf-8", errors="surrogateescape", buffering=1) as journal:
            for number, path in self.files:
                self._parse(number, path, journal)
        return {"files": len(self.files)}

    def _parse(self, number: int, path: str, journal: IO[str]) -> None:
        row: dict[str, Any] = {"number": number, "path": path}
        try:
            self._store(row, path, journal)
        except _UnreadableError as error:
            row["fault"] = str(error)
        journal.write(json.dumps(row) + "\n")

    def _store(self, row: dict[str, Any], path: str, journal: IO[str]) -> None:
        with _opened(path) as stream:
            opened_ns = time.time_ns()
            status = os.fstat(stream.fileno())
            try:
                row["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise _UnreadableError(_relative(str(unreadable(Path(path), error)), f"{path}: ")) from error
            stream.seek(0)
            journal.write(json.dumps({**row, "begun": True}) + "\n")
            key = self.options.key(row["sha256"], path)
            if not has_record(self.cache, key):
                write_record(self.cache, key, parse(Path(shown(path)), stream, self.options))
            if status.st_mtime_ns < opened_ns - _FRESH_NS:
                row |= {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


class _UnreadableError(Exception):
    """The disk refuses a file."""


def _opened(path: str) -> BufferedReader:
    try:
        return open_to_read(Path(path))
    except DiskError as error:
        raise _UnreadableError(_relative(str(error), f"{path}: ")) from error


def parse(path: Path, stream: Any, options: ParseOptions) -> Iterator[Parsed]:
    """Yield the documents of the open file, within its limits. A file that exceeds them ends this process or is a `fault`."""
    try:
        with _limits(options):
            for location, document in read_file(path, stream, options.read):
                relative = _relative(location, str(path))
                if isinstance(document, InputError):
                    yield Parsed(*_located(relative, _relative(str(document), location, str(path))))
                else:
                    yield _examined(relative, document, path, options)
    except MemoryError:
        yield Parsed("", None, {}, memory_fault(options.memory))
    except RecursionError:
        yield Parsed("", None, {}, "nested too deeply to be read. Repair it, or take it out.")
    except (KinjectError, OSError) as error:
        raise _UnreadableError(_relative(str(error), f"{path}: ")) from error
    except Exception as error:  # noqa: BLE001 - a library's reader met a file that its authors did not foresee
        fault = memory_fault(options.memory) if is_shortage(error) else (
            f"its reader fails ({type(error).__name__}: {str(error)[:150]}). Save it again in another format, or take it out."
        )  # fmt: skip
        yield Parsed("", None, {}, fault)


def memory_fault(gib: float) -> str:
    """Return the fault of a file that takes too much memory."""
    return f"takes more than {gib:g} GiB of memory. Split it."


def time_fault(seconds: float) -> str:
    """Return the fault of a file that takes too long."""
    return f"takes more than {seconds:g} s. Split it."


def _examined(location: str, document: Document, path: Path, options: ParseOptions) -> Parsed:
    """Return a document without its repeats, with everything about it that needs no other document."""
    repeated = repeats(document.text, options.near_duplicates)
    plain = json.loads(json.dumps(dict(document.meta), default=str), parse_constant=lambda _: None)  # JSON has no NaN
    text, meta = edited(document.text, [(start, end, "") for (start, end), _ in repeated], plain)
    words = word_hashes(text)
    lines = sorted({number for number, _ in shared_lines(text)})
    start = text[:_LANGUAGE_CHARACTERS]
    n_lines = text.count("\n") + 1
    facts = {
        "named": document.title == path.stem, "text": text_hash(text), "words": len(words), "sketch": _packed(min_hash(words)),
        "lines": _packed(b"".join(number.to_bytes(8, "little") for number in lines)),
        "language": detect_language(start) or guess_language(start),
        "personal": count_personal_data(text, options.phone_region) if options.count_personal else {},
        "others": round(1 - sum(map(len, _LETTERS.findall(text))) / max(1, len(text) - text.count(" ") - n_lines + 1), 3),
        "longest": max(map(len, _LONG_WORD.findall(text)), default=0),
        "repeats": [[document.text[first:last][:200], round(alike, 3)] for (first, last), alike in repeated[:20]],
        "n_repeats": len(repeated), "characters": [len(document.text), len(text)],
    }  # fmt: skip
    row_id = "" if document.id == content_id(document.title, document.text) else document.id
    return Parsed(location, Document(row_id, document.title, text, _relative(document.source, str(path)), meta), facts)


def _packed(data: bytes) -> str:
    return base64.b85encode(data).decode()


def unpacked(text: str) -> bytes:
    """Return the bytes of a value of `facts`."""
    return base64.b85decode(text)


def _located(location: str, fault: str) -> tuple[str, None, dict[str, Any], str]:
    """Return the fields of a fault, the location (line, page) at the beginning of its text moved into the location field."""
    match = _LOCATION.match(fault)
    return (
        (location + match[1], None, {}, fault[match.end() :])
        if match
        else (location, None, {}, fault.removeprefix(": "))
    )


def _relative(text: str, *beginnings: str) -> str:
    """Return `text` without the first of `beginnings` that it has."""
    return next((text[len(beginning) :] for beginning in beginnings if text.startswith(beginning)), text)


@contextlib.contextmanager
def _limits(options: ParseOptions) -> Iterator[None]:
    """Let the kernel end this process after too many processor seconds, and refuse it memory beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    n_used = _data_bytes()
    most = n_used + int(options.memory * _GIB) if n_used else soft
    for timer, seconds in ((signal.ITIMER_PROF, options.seconds), (signal.ITIMER_REAL, _WAITING * options.seconds)):
        signal.setitimer(timer, seconds)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts for this process; 0 where the system does not report them."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status", encoding="utf-8") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:")), 0)


# The stored records.


def has_record(cache: Path, key: str) -> bool:
    """Return whether something is stored under `key`, whole."""
    try:
        with record_path(cache, key).open("rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            return file.read() == _END
    except OSError:
        return False


_END = b"\n[]\n"
"""The end of a complete record: without it, a kill or a crash of the machine came before."""


def write_record(cache: Path, key: str, documents: Iterable[Parsed]) -> None:
    """Store the documents of a file, by renaming a finished file. Raises `OSError` if it cannot be written."""
    path = record_path(cache, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{key}.", suffix=".part", delete=False) as file:
        try:
            for parsed in documents:
                document = parsed.document and [
                    getattr(parsed.document, name) for name in ("id", "title", "text", "source", "meta")
                ]
                row = json.dumps([parsed.location, document, parsed.facts, parsed.fault], ensure_ascii=False)
                file.write(row.encode("utf-8", "replace") + b"\n")
            file.write(_END)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def read_record(cache: Path, key: str) -> Iterator[Parsed]:
    """Yield the documents stored under `key`. Raises `DiskError` if they cannot be read."""
    with open_to_read(record_path(cache, key)) as file:
        for line in file:
            if line.strip() and (row := json.loads(line)):
                location, document, facts, fault = row
                yield Parsed(location, Document(*document) if document else None, facts, fault)


@functools.cache
def readers_version() -> str:
    """Return a hash of this code and the versions of the libraries, which decide the documents of a file."""
    here = Path(__file__).parent
    code = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*here.glob("*.py"), here.parents[1] / "language" / "detect.py"])
    ]
    versions = []
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return content_id(code, versions)
