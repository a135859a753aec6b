"""The files of a heap: a folder, a pattern, a file, or several of them; each file once, with its name for people."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

from kinject.disk import LOCK, check_regular, is_file, is_folder, path_exists, unreadable
from kinject.errors import DiskError, InputError, KinjectError

_SYSTEM = frozenset({"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r", "__macosx", "$recycle.bin"})
_KERNEL = ("/proc", "/sys", "/dev")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, not opened: its `name` below the heap (in UTF-8), its `path`, bytes and time of change.

    `fault` is the reason if it is not read; `left_out` marks files that nobody misses (hidden ones, those of the system).
    """

    name: str
    path: str
    size: int = 0
    mtime: float = 0.0
    fault: str = ""
    left_out: bool = False


def is_heap(path: Path) -> bool:
    """Return whether `path` names several files: a folder, or a pattern with ``*``, ``?`` or ``[``."""
    return is_folder(path) if path_exists(path) else has_magic(str(path))


def heap_name(sources: Sequence[Path]) -> str:
    """Return a name for the heap: that of its folder or file."""
    first = sources[0]
    if has_magic(str(first)) and not path_exists(first):
        first = _fixed_part(first)
    name = Path(os.path.realpath(first))
    return name.stem if is_file(name) else name.name or "documents"


def find_files(sources: Sequence[Path]) -> list[FoundFile]:
    """Return the files of `sources`, each once, ordered by name. Links to folders, and to files elsewhere, are not followed.

    Raises `DiskError` if nothing is at a source, `InputError` if a pattern fits nothing or a source holds the system's own
    files. Any other fault is in the files' `fault`.
    """
    files: dict[str, FoundFile] = {}
    for source in sources:
        real = os.path.realpath(source)
        if real == "/" or any(real == folder or real.startswith(f"{folder}/") for folder in _KERNEL):
            raise InputError(f"{source}: the root or the devices of the system. Give a folder with documents.")
        for file in _files_of(source, alone=len(sources) == 1):
            files.setdefault(file.name, file)
    return sorted(files.values(), key=lambda file: file.name.split("/"))


def _files_of(source: Path, *, alone: bool) -> Iterator[FoundFile]:
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
    paths = sorted(base.glob(str(source.relative_to(base))))
    if not paths:
        raise InputError(f"{source}: no file fits this pattern. Check it; ** matches folders of any depth.")
    for path in paths:
        if not path.is_dir():
            yield _entry(str(path), shown(path.relative_to(base) if alone else path), os.path.realpath(base))


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
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield FoundFile(prefix or shown(folder), folder, fault=_without_path(unreadable(Path(folder), error), folder))
        return
    for entry in entries:
        name = f"{prefix}/{shown(entry.name)}" if prefix else shown(entry.name)
        if entry.is_dir(follow_symlinks=False) and not _is_left_out(entry.name):
            yield from _walk(entry.path, name, root)
        else:
            yield _entry(entry.path, name, root)


def _entry(path: str, name: str, root: str) -> FoundFile:
    """Return what is at `path`, not a folder, if it is to be read, else with the reason."""
    own = os.path.basename(path)
    if _is_left_out(own):
        kind = "hidden" if own.startswith(".") else "the system's"
        return FoundFile(name, path, fault=f"a file or folder that is {kind}.", left_out=True)
    if os.path.isdir(path):
        return FoundFile(name, path, fault="a link to a folder. Give the path of that folder, if it is meant.")
    return _file(path, name, root)


def _is_left_out(name: str) -> bool:
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM


def _file(path: str, name: str, root: str) -> FoundFile:
    real = os.path.realpath(path)
    if real != root and not real.startswith(f"{root}/"):
        return FoundFile(name, path, fault="a link to a file elsewhere. Give the path of that file, if it is meant.")
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
    return os.fsencode(text).decode("utf-8", "backslashreplace") if _SURROGATE.search(text) else text
