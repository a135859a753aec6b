"""The files of a heap (a folder, a pattern, a file), each once; and parsed in worker processes,
each content once.

The documents of a content are stored by its hash. The name of such a record also depends on the
file's suffix, the options, and the readers' code and libraries: a file that was moved, copied or
touched is not parsed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import has_magic
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kinject.disk import (
    LOCK,
    atomic_file,
    check_regular,
    content_id,
    file_hash,
    is_file,
    is_folder,
    is_left_out,
    open_to_read,
    path_exists,
    unreadable,
)
from kinject.documents.readers import ReadOptions, read_file
from kinject.errors import DiskError, InputError, KinjectError, one_line
from kinject.heap.copies import edited, min_hash, repeats, text_hash, word_hashes
from kinject.language import detect_language, guess_language
from kinject.process import is_shortage
from kinject.types import Document

log = logging.getLogger(__name__)

SECONDS = 120.0
"""Processor seconds after which a file is given up."""
MEMORY = 3.0
"""Memory in GiB, that of the process before included, beyond which a file is given up."""
_LANGUAGE_CHARACTERS = 5_000
_LOCATION = re.compile(r"(:\d+|: page \d+): ")
_SIGNAL = re.compile(r"signal (\d+)")
_KERNEL = ("/proc/", "/sys/", "/dev/")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, not opened: its `name` below the heap (in UTF-8), its `path`, bytes and time of
    change.

    `fault` is the reason if it is not read; `left_out` marks files that nobody misses (hidden ones,
    those of the system).
    """

    name: str
    path: str
    size: int = 0
    mtime: float = 0.0
    fault: str = ""
    left_out: bool = False


def is_heap(path: Path) -> bool:
    """Return whether `path` names several files: a folder, or a pattern (``*``, ``?``, ``[``)."""
    return is_folder(path) if path_exists(path) else has_magic(str(path))


def is_there(path: Path) -> bool:
    """Return whether `path` is there, or is a pattern that some file fits."""
    if path_exists(path) or not has_magic(str(path)):
        return path_exists(path)
    return any(_fitting(path))


def heap_name(sources: Sequence[Path]) -> str:
    """Return a name for the heap: that of its folder or file."""
    first = sources[0]
    if has_magic(str(first)) and not path_exists(first):
        first = _fixed_part(first)
    name = Path(os.path.realpath(first))
    return name.stem if is_file(name) else name.name or "documents"


def find_files(sources: Sequence[Path]) -> list[FoundFile]:
    """Return the files of `sources`, each once, ordered by name. Links to folders, and to files
    elsewhere, are not followed.

    Raises `DiskError` if nothing is at a source, `InputError` if a pattern fits nothing or a source
    holds the system's own files. Any other fault is in the files' `fault`.
    """
    files: dict[str, FoundFile] = {}
    for source in sources:
        for file in _files_of(source, alone=len(sources) == 1):
            files.setdefault(file.name, file)
    return sorted(files.values(), key=_parts)


def check_sources(sources: Sequence[Path]) -> None:
    """Raise as `find_files`, and `InputError` if no source has a file, without a walk through all
    of them."""
    first = [next(_files_of(source, alone=True), None) for source in sources]
    if not any(first):
        fault = "no document there can be read: it is an empty folder. Check the path."
        raise InputError(f"{sources[0]}: {fault}")


def _parts(file: FoundFile) -> list[str]:
    return file.name.split("/")


def _files_of(source: Path, *, alone: bool) -> Iterator[FoundFile]:
    real = os.path.realpath(source)
    if real == "/" or f"{real}/".startswith(_KERNEL):
        raise InputError(
            f"{source}: the root or the devices of the system. Give a folder with documents."
        )
    if path_exists(source):
        prefix = "" if alone else shown(os.path.normpath(source))
        if is_folder(source):
            yield from _walk(str(source), prefix, os.path.realpath(source))
        else:
            yield _file(str(source), source.name if alone else prefix, os.path.realpath(source))
        return
    if not has_magic(str(source)):
        raise DiskError(f"{source}: nothing is there. Check the path.")
    base = _fixed_part(source)
    try:
        paths = sorted(_fitting(source))
    except ValueError as error:  # ** beside other letters, or a NUL
        raise InputError(
            f"{source}: not a pattern ({one_line(error)}). ** is a whole part of a path, as in "
            "docs/**/*.txt."
        ) from error
    if not paths:
        raise InputError(
            f"{source}: no file fits this pattern. Check it; ** matches folders of any depth."
        )
    for path in paths:
        if not path.is_dir():
            name = path.relative_to(base) if alone else path
            yield _entry(str(path), shown(name), os.path.realpath(base))


def _fitting(pattern: Path) -> Iterator[Path]:
    """Yield what fits a pattern. Raises `ValueError` for one that is none."""
    base = _fixed_part(pattern)
    yield from base.glob(str(pattern.relative_to(base)))


def _fixed_part(pattern: Path) -> Path:
    """Return the folder before the first part of `pattern` with a wildcard."""
    n_fixed = next(i for i, part in enumerate(pattern.parts) if has_magic(part))
    return Path(*pattern.parts[:n_fixed])


def _walk(folder: str, prefix: str, root: str) -> Iterator[FoundFile]:
    """Yield the files below `folder`, which is, or is below, the folder `root`."""
    if prefix and os.path.exists(os.path.join(folder, LOCK)):
        yield FoundFile(prefix, folder, fault="a folder that kinject has written.", left_out=True)
        return
    try:
        entries = sorted(os.scandir(folder), key=attrgetter("name"))
    except OSError as error:
        fault = _without_path(unreadable(Path(folder), error), folder)
        yield FoundFile(prefix or shown(folder), folder, fault=fault)
        return
    for entry in entries:
        name = "/".join(filter(None, [prefix, shown(entry.name)]))
        if entry.is_dir(follow_symlinks=False) and not is_left_out(entry.name):
            yield from _walk(entry.path, name, root)
        else:
            yield _entry(entry.path, name, root)


def _entry(path: str, name: str, root: str) -> FoundFile:
    """Return what is at `path`, not a folder, if it is to be read, else with the reason."""
    own = os.path.basename(path)
    if is_left_out(own):
        kind = "hidden" if own.startswith(".") else "the system's"
        return FoundFile(name, path, fault=f"a file or folder that is {kind}.", left_out=True)
    if os.path.isdir(path):
        fault = "a link to a folder. Give the path of that folder, if it is meant."
        return FoundFile(name, path, fault=fault)
    return _file(path, name, root)


def _file(path: str, name: str, root: str) -> FoundFile:
    real = os.path.realpath(path)
    if real != root and not real.startswith(f"{root}/"):
        fault = "a link to a file elsewhere. Give the path of that file, if it is meant."
        return FoundFile(name, path, fault=fault)
    try:
        check_regular(Path(path))
        status = os.stat(path)
    except DiskError as error:
        return FoundFile(name, path, fault=_without_path(error, path))
    except (OSError, ValueError) as error:
        return FoundFile(name, path, fault=_without_path(unreadable(Path(path), error), path))
    fault = "" if status.st_size else "an empty file (0 bytes)."
    return FoundFile(shown(name), path, status.st_size, status.st_mtime, fault)


def _without_path(error: KinjectError, path: str) -> str:
    return str(error).removeprefix(f"{Path(path)}: ")


def shown(name: str | os.PathLike[str]) -> str:
    """Return a file's name in characters that UTF-8 has: other bytes as ``\\xe4``."""
    text = os.fspath(name)
    if _SURROGATE.search(text) is None:
        return text
    return os.fsencode(text).decode("utf-8", "backslashreplace")


class Parsed(NamedTuple):
    """One document of a file, or the reason for none: its location behind the file's name (``:12``,
    ``/member.pdf``), and

    either `document` and `facts` (`named`: its title is the name of the file), or the `fault`.
    """

    location: str
    document: Document | None
    facts: Mapping[str, Any]
    fault: str = ""


class _ChangedError(Exception):
    """A file has other bytes than when it was hashed."""


@dataclass(frozen=True)
class Parsing:
    """A file to parse into `record`, for a worker process; `folder` has its log."""

    number: int
    path: str
    sha256: str
    record: Path
    folder: Path
    options: ReadOptions

    @property
    def label(self) -> str:
        """The file for people."""
        return shown(self.path)

    def run(self) -> Mapping[str, Any]:
        """Parse the file, within its limits: the kernel ends this process after too many processor
        seconds. Returns its `fault` if it changed meanwhile; then it has no record."""
        # The worker goes on with other files: its limits are set for one, and set back.
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(MEMORY * 2**30)
        # A negative limit is none.
        if limits[1] >= 0:
            most = min(most, limits[1])
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (most, limits[1]))
            write_record(self.record, self._parsed())
        except _ChangedError:
            return {"fault": "changed while it was read. Run the same command again."}
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {}

    def _parsed(self) -> Iterator[Parsed]:
        """Yield the documents. Raises `_ChangedError` if they may be of other bytes than those that
        name the record, which later runs would believe."""
        yield from parse(self.path, self.options)
        try:
            sha256 = file_hash(Path(self.path))
        except DiskError as error:
            raise _ChangedError from error
        if sha256 != self.sha256:
            raise _ChangedError

    def fault_of_death(self, error: str) -> tuple[str, bool]:
        """Return the fault of the file if its process died with `error`, and whether the file is
        the reason."""
        match = _SIGNAL.search(error)
        signum = int(match[1]) if match else 0
        if signum == signal.SIGPROF:
            return f"takes more than {SECONDS:g} s. Split it.", True
        if signum == signal.SIGKILL:
            return f"takes more than {MEMORY:g} GiB of memory. Split it.", False
        fault = (
            f"ends the process that reads it ({error}). "
            "Save it again in another format, or take it out."
        )
        # Somebody may have sent these signals; the file is read again next time.
        return fault, signum not in (0, signal.SIGTERM, signal.SIGINT)


def parse(path: str, options: ReadOptions) -> Iterator[Parsed]:
    """Yield the documents of a file; every fault of it, and every error of a reader's library, is a
    `fault`."""
    name = shown(path)
    try:
        with open_to_read(Path(path)) as stream:
            for location, document in read_file(Path(name), stream, options):
                relative = location.removeprefix(name)
                if isinstance(document, InputError):
                    fault = str(document).removeprefix(location).removeprefix(name)
                    # A line or a page is part of the location, not of the fault: equal faults of
                    # many files are counted as one.
                    match = _LOCATION.match(fault)
                    if match:
                        relative += match[1]
                        fault = fault[match.end() :]
                    yield Parsed(relative, None, {}, fault.removeprefix(": "))
                else:
                    yield _examined(relative, document, name)
    except RecursionError:
        yield Parsed("", None, {}, "nested too deeply to be read. Repair it, or take it out.")
    except KinjectError as error:
        yield Parsed("", None, {}, str(error).removeprefix(f"{name}: "))
    # A library's reader met a file that its authors did not foresee.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {str(error)[:150]}"
        fault = f"its reader fails ({reason}). Save it again in another format."
        if is_shortage(error):
            fault = f"takes more than {MEMORY:g} GiB of memory. Split it."
        yield Parsed("", None, {}, fault)


def _examined(location: str, document: Document, path: str) -> Parsed:
    """Return a document without its repeats, with the facts that need no other document."""
    edits, is_log = repeats(document.text)
    meta_json = json.dumps(dict(document.meta), default=str)
    # JSON has no NaN.
    plain = json.loads(meta_json, parse_constant=_none)
    text, meta = edited(document.text, edits, plain)
    words = word_hashes(text)
    start = text[:_LANGUAGE_CHARACTERS]
    facts = {
        "named": document.title == Path(path).stem,
        "exact": text_hash(text),
        "words": len(words),
        "sketch": min_hash(words).hex(),
        "language": detect_language(start) or guess_language(start),
        "n_repeats": len(edits),
        "log": is_log,
    }
    # A row's own id is kept; that of another document is made of its file's name later.
    row_id = document.id
    if row_id == content_id(document.title, document.text):
        row_id = ""
    source = document.source.removeprefix(path)
    return Parsed(location, Document(row_id, document.title, text, source, meta), facts)


def _none(_: str) -> None:
    """Return None for a constant of JSON's extensions."""


def write_record(path: Path, documents: Iterable[Parsed]) -> None:
    """Store the documents of a file, a line each, and the hash of these lines as the last one.
    Raises `DiskError` if they cannot be written."""
    digest = hashlib.sha256()
    with atomic_file(path, "wb") as file:
        for location, doc, facts, fault in documents:
            fields = doc and [doc.id, doc.title, doc.text, doc.source, doc.meta]
            row = json.dumps([location, fields, facts, fault], ensure_ascii=False)
            line = row.encode("utf-8", "replace") + b"\n"
            digest.update(line)
            file.write(line)
        file.write(digest.hexdigest().encode() + b"\n")


def has_record(path: Path) -> bool:
    """Return whether a record is there with the bytes that were written; logs one that is not."""
    if not path.exists():
        return False
    digest, last = hashlib.sha256(), b""
    with open_to_read(path) as file:
        for line in file:
            digest.update(last)
            last = line
    if last == digest.hexdigest().encode() + b"\n":
        return True
    log.warning(f"{path}: its bytes are not those that were written. Its file is read again.")
    return False


def read_record(path: Path) -> Iterator[tuple[int, int, Parsed]]:
    """Yield (start, bytes, content) of each document of a record."""
    start = 0
    with open_to_read(path) as file:
        for line in file:
            if line.startswith(b"["):  # not the hash at its end
                yield start, len(line), parsed_of(line)
            start += len(line)


def parsed_of(line: bytes) -> Parsed:
    """Return what a line of a record holds."""
    location, fields, facts, fault = json.loads(line)
    return Parsed(location, Document(*fields) if fields else None, facts, fault)


def record_path(cache: Path, sha256: str, path: str, options: ReadOptions) -> Path:
    """Return where the documents of a file with this content are stored."""
    suffix = Path(path).suffix.lower()
    key = content_id("parsed", asdict(options), readers_version(), sha256, suffix)
    return cache / key[:2] / f"{key}.jsonl"


@functools.cache
def readers_version() -> str:
    """Return a hash of the readers' code and the versions of the libraries, which decide the
    documents of a file."""
    package = Path(__file__).parents[1]
    modules = [
        *sorted((package / "documents").glob("*.py")),
        *sorted((package / "heap").glob("*.py")),
        package / "language" / "__init__.py",
    ]
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in modules]
    try:
        requirements = metadata.requires("kinject") or ()
    except metadata.PackageNotFoundError:
        requirements = ()  # a checkout that was copied to where its libraries are
    required = [line for line in requirements if "documents" in line]
    libraries = {re.split(r"[^\w.-]", line)[0] for line in required}
    versions = []
    for name in sorted({*libraries, "pyarrow", "pycld2", "rensa"}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return content_id(code, versions)
