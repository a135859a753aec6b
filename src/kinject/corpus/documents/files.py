"""The files of a heap: a folder, a pattern, a list of paths, or several of them; each file once, with its name for people."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from kinject.disk import LOCK, check_regular, is_file, is_folder, path_exists, unreadable
from kinject.errors import DiskError, InputError, KinjectError

_SYSTEM = frozenset({"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r", "__macosx", "$recycle.bin"})
_LISTS = frozenset({".txt", ".lst", ".list", ""})
_LONGEST_LIST_LINE = 4096
_RESERVED = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, not opened: its `name` below the heap (in UTF-8), its `path`, bytes, time of change, and its identity on the disk.

    `fault` is the reason if it is not read; `left_out` marks files that nobody misses (hidden ones, those of the system).
    """

    name: str
    path: str
    size: int = 0
    mtime_ns: int = 0
    inode: tuple[int, int] = (0, 0)
    fault: str = ""
    left_out: bool = False


def is_heap(path: Path) -> bool:
    """Return whether `path` names several files: a folder, a pattern with ``*``, ``?`` or ``[``, or a list of paths."""
    if path_exists(path):
        return is_folder(path) or _is_list(path)
    return has_magic(str(path))


def heap_name(sources: Sequence[Path]) -> str:
    """Return a name for the heap: that of its folder or file."""
    first = sources[0]
    if has_magic(str(first)) and not path_exists(first):
        first = _fixed_part(str(first))
    resolved = first.resolve()
    return resolved.stem if is_file(resolved) else resolved.name or "documents"


def find_files(sources: Sequence[Path]) -> list[FoundFile]:
    """Return the files of `sources`, each once, ordered by name.

    Raises `DiskError` if nothing is at a source, `InputError` if a pattern fits nothing. Any other fault is in
    the files' `fault`.
    """
    files: dict[str, FoundFile] = {}
    for source in sources:
        if os.path.realpath(source) == os.path.realpath("/"):
            raise InputError(f"{source}: the root of the file system. Give a folder with documents.")
        for file in _files_of(source, alone=len(sources) == 1):
            files.setdefault(file.name, file)
    return sorted(files.values(), key=lambda file: file.name.split("/"))


def _files_of(source: Path, *, alone: bool) -> Iterator[FoundFile]:
    if not path_exists(source):
        if not has_magic(str(source)):
            raise DiskError(f"{source}: nothing is there. Check the path.")
        paths = sorted(glob(str(source), recursive=True))
        if not paths:
            raise InputError(f"{source}: no file fits this pattern. Check it; ** matches folders of any depth.")
        base = _fixed_part(str(source))
        yield from _each(paths, base if alone else Path(), str(base) if alone else "")
    elif is_folder(source):
        yield from _walk(str(source), "" if alone else shown(os.path.normpath(source)), ())
    elif _is_list(source):
        yield from _each(_read_list(source), source.parent, str(source.parent))
    else:
        yield _file(str(source), source.name if alone else os.path.normpath(source))


def _each(paths: Sequence[str], base: Path, start: str) -> Iterator[FoundFile]:
    """Yield the files at `paths`; names are relative to `base` if the paths are below it. Folders are walked."""
    for path in paths:
        name = os.path.normpath(path)
        if start and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(base)):
            name = os.path.relpath(path, base)
        if is_folder(path):
            yield from _walk(path, shown(name), ())
        else:
            yield _file(path, name)


def _fixed_part(pattern: str) -> Path:
    """Return the folder before the first part of `pattern` with a wildcard."""
    parts = Path(pattern).parts
    n_fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    return Path(*parts[:n_fixed])


def _is_list(path: Path) -> bool:
    """Return whether the first line of a text file is a path that exists."""
    if path.suffix.lower() not in _LISTS or not is_file(path):
        return False
    try:
        check_regular(path)
        with path.open("rb") as file:
            first = file.readline(_LONGEST_LIST_LINE)
    except (OSError, KinjectError):
        return False  # its reader reports it
    name = os.fsdecode(first.removeprefix(b"\xef\xbb\xbf").strip())
    return bool(name) and any(path_exists(candidate) for candidate in (Path(name), path.parent / name))


def _read_list(path: Path) -> list[str]:
    lines = [os.fsdecode(line.strip()) for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()]
    return [name if path_exists(Path(name)) else str(path.parent / name) for name in lines if name]


def _walk(folder: str, prefix: str, above: tuple[str, ...]) -> Iterator[FoundFile]:
    """Yield the files below `folder`. Links to folders are followed, but not to a folder `above` them."""
    real = os.path.realpath(folder)
    if real in above:
        yield FoundFile(prefix, folder, fault="a link to a folder that it lies in, without end. Take it out.")
        return
    if prefix and os.path.exists(os.path.join(folder, LOCK)):
        yield FoundFile(prefix, folder, fault="a folder that kinject has written.", left_out=True)
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield FoundFile(prefix or shown(folder), folder, fault=_without_path(unreadable(Path(folder), error), folder))
        return
    for entry in entries:
        name = f"{prefix}/{shown(entry.name)}" if prefix else shown(entry.name)
        if _is_left_out(entry.name):
            kind = "hidden" if entry.name.startswith(".") else "the system's"
            yield FoundFile(name, entry.path, fault=f"a file or folder that is {kind}.", left_out=True)
        elif entry.is_dir():
            yield from _walk(entry.path, name, (*above, real))
        else:
            yield _file(entry.path, name)


def _is_left_out(name: str) -> bool:
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM


def _file(path: str, name: str) -> FoundFile:
    try:
        check_regular(Path(path))
        status = os.stat(path)
    except DiskError as error:
        return FoundFile(shown(name), path, fault=_without_path(error, path))
    except (OSError, ValueError) as error:
        return FoundFile(shown(name), path, fault=_without_path(unreadable(Path(path), error), path))
    if not stat.S_ISREG(status.st_mode):
        return FoundFile(shown(name), path, fault="no longer a file.")
    fault = "an empty file (0 bytes)." if not status.st_size else ""
    return FoundFile(shown(name), path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino), fault)


def _without_path(error: KinjectError, path: str) -> str:
    return str(error).removeprefix(f"{Path(path)}: ")


def shown(name: str | os.PathLike[str]) -> str:
    """Return a file's name in characters that UTF-8 has: other bytes as ``\\xe4``."""
    text = os.fspath(name)
    return os.fsencode(text).decode("utf-8", "backslashreplace") if _RESERVED.search(text) else text
