"""Files parsed in worker processes, each content once: its documents are stored by the hash of the content.

The name of a record also depends on the file's suffix, the options, and the readers' code and libraries: a file that was
moved, copied or touched is not parsed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import resource
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kinject.disk import atomic_file, content_id, open_to_read
from kinject.documents.copies import edited, min_hash, repeats, text_hash, word_hashes
from kinject.documents.files import shown
from kinject.documents.readers import ReadOptions, read_file
from kinject.errors import InputError, KinjectError
from kinject.language import detect_language, guess_language
from kinject.process import is_shortage
from kinject.types import Document

SECONDS = 120.0
"""Processor seconds after which a file is given up."""
MEMORY = 3.0
"""Memory in GiB, that of the process before included, beyond which a file is given up."""
_LANGUAGE_CHARACTERS = 5_000
_LOCATION = re.compile(r"(:\d+|: page \d+): ")
_SIGNAL = re.compile(r"signal (\d+)")


class Parsed(NamedTuple):
    """One document of a file, or the reason for none: its location behind the file's name (``:12``, ``/member.pdf``), and

    either `document` and `facts` (`named`: its title is the name of the file), or the `fault`.
    """

    location: str
    document: Document | None
    facts: Mapping[str, Any]
    fault: str = ""


@dataclass(frozen=True)
class Parsing:
    """A file to parse into `record`, for a worker process; `folder` has its log."""

    number: int
    path: str
    record: Path
    folder: Path
    options: ReadOptions

    @property
    def label(self) -> str:
        """The file for people."""
        return shown(self.path)

    def run(self) -> Mapping[str, Any]:
        """Parse the file, within its limits: the kernel ends this process after too many processor seconds."""
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(MEMORY * 2**30)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (most if limits[1] < 0 else min(most, limits[1]), limits[1]))
            write_record(self.record, parse(self.path, self.options))
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {}

    def fault_of_death(self, error: str) -> tuple[str, bool]:
        """Return the fault of the file if its process died with `error`, and whether the file is the reason."""
        match = _SIGNAL.search(error)
        signum = int(match[1]) if match else 0
        if signum == signal.SIGPROF:
            return f"takes more than {SECONDS:g} s. Split it.", True
        if signum == signal.SIGKILL:
            return _memory_fault(), False
        fault = f"ends the process that reads it ({error}). Save it again in another format, or take it out."
        return fault, signum not in (0, signal.SIGTERM, signal.SIGINT)


def parse(path: str, options: ReadOptions) -> Iterator[Parsed]:
    """Yield the documents of a file; every fault of it, and every error of a reader's library, is a `fault`."""
    name = shown(path)
    try:
        with open_to_read(Path(path)) as stream:
            for location, document in read_file(Path(name), stream, options):
                relative = location.removeprefix(name)
                if isinstance(document, InputError):
                    fault = str(document).removeprefix(location).removeprefix(name)
                    match = _LOCATION.match(fault)  # a line or a page stands in the location, not in the fault
                    relative, fault = (relative + match[1], fault[match.end() :]) if match else (relative, fault)
                    yield Parsed(relative, None, {}, fault.removeprefix(": "))
                else:
                    yield _examined(relative, document, name)
    except RecursionError:
        yield Parsed("", None, {}, "nested too deeply to be read. Repair it, or take it out.")
    except KinjectError as error:
        yield Parsed("", None, {}, str(error).removeprefix(f"{name}: "))
    except Exception as error:  # noqa: BLE001 - a library's reader met a file that its authors did not foresee
        fault = f"its reader fails ({type(error).__name__}: {str(error)[:150]}). Save it again in another format."
        yield Parsed("", None, {}, _memory_fault() if is_shortage(error) else fault)


def _memory_fault() -> str:
    return f"takes more than {MEMORY:g} GiB of memory. Split it."


def _examined(location: str, document: Document, path: str) -> Parsed:
    """Return a document without its repeats, with everything about it that needs no other document."""
    edits, is_log = repeats(document.text)
    plain = json.loads(json.dumps(dict(document.meta), default=str), parse_constant=lambda _: None)  # JSON has no NaN
    text, meta = edited(document.text, edits, plain)
    words = word_hashes(text)
    start = text[:_LANGUAGE_CHARACTERS]
    facts = {
        "named": document.title == Path(path).stem, "exact": text_hash(text), "words": len(words),
        "sketch": min_hash(words).hex(), "language": detect_language(start) or guess_language(start),
        "n_repeats": len(edits), "log": is_log,
    }  # fmt: skip
    row_id = "" if document.id == content_id(document.title, document.text) else document.id
    return Parsed(location, Document(row_id, document.title, text, document.source.removeprefix(path), meta), facts)


def write_record(path: Path, documents: Iterable[Parsed]) -> None:
    """Store the documents of a file. Raises `DiskError` if they cannot be written."""
    with atomic_file(path, "wb") as file:
        for location, document, facts, fault in documents:
            fields = document and [document.id, document.title, document.text, document.source, document.meta]
            row = json.dumps([location, fields, facts, fault], ensure_ascii=False)
            file.write(row.encode("utf-8", "replace") + b"\n")


def parsed_of(line: bytes) -> Parsed:
    """Return what a line of a record holds."""
    location, fields, facts, fault = json.loads(line)
    return Parsed(location, Document(*fields) if fields else None, facts, fault)


def record_path(cache: Path, sha256: str, path: str, options: ReadOptions) -> Path:
    """Return where the documents of a file with this content are stored."""
    key = content_id("parsed", asdict(options), readers_version(), sha256, Path(path).suffix.lower())
    return cache / key[:2] / f"{key}.jsonl"


@functools.cache
def readers_version() -> str:
    """Return a hash of this code and the versions of the libraries, which decide the documents of a file."""
    here = Path(__file__).parent
    code = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*sorted(here.glob("*.py")), here.parent / "language" / "__init__.py"]
    ]
    libraries = {re.split(r"[^\w.-]", line)[0] for line in metadata.requires("kinject") or () if "documents" in line}
    versions = []
    for name in sorted({*libraries, "pyarrow", "pycld2", "rensa"}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return content_id(code, versions)
