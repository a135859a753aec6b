"""SHA256SUMS in a folder of large files, as coreutils' ``sha256sum -c`` reads it: what was written is what is there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kinject.disk.atomic import write_text
from kinject.disk.reading import open_to_read, read_bytes, unreadable
from kinject.errors import InputError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MOST_THREADS = 8


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises `DiskError` when it cannot be read."""
    try:
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """Return `file_hash` of each of several files, read side by side. Raises as it does."""
    n_threads = min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(paths)))
    with ThreadPoolExecutor(n_threads) as threads:
        return list(threads.map(file_hash, paths))


def tree_hash(folder: Path, pattern: str = "**/*", known: Mapping[str, str] | None = None) -> str:
    """Return one SHA-256 over the names and bytes of the files below `folder` that match `pattern`.

    `known` are hashes by name that were just taken, so that no file is read twice.
    """
    held = known or {}
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{held.get(name) or file_hash(path)}\n".encode())
    return digest.hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every file below `folder`. Raises `DiskError`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SUMS]
    lines = zip(file_hashes(paths), paths, strict=True)
    write_text(folder / SUMS, "".join(f"{held}  {path.relative_to(folder).as_posix()}\n" for held, path in lines))


def checked_hashes(folder: Path) -> dict[str, str]:
    """Return name -> hash of the files that SHA256SUMS in a model's folder names; {} where it has none.

    Raises `InputError` naming the first file that is not as it was written, `DiskError` when one cannot be read.
    """
    found, fault = read_sums(folder)
    if fault:
        raise InputError(f"{fault}. Make the model again; if you changed it yourself, delete {SUMS}.")
    return found


def read_sums(folder: Path) -> tuple[dict[str, str], str]:
    """Return (name -> hash of what is there, the first fault found or "") of a folder with SHA256SUMS; without, ({}, "").

    A fault names the file. Raises `DiskError` when a file cannot be read.
    """
    path = folder / SUMS
    if not path.exists():
        return {}, ""
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    wanted: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            return {}, f"{path}:{number}: damaged: no hash and name of a file"
        wanted[match[2]] = match[1]
    missing = next((name for name in wanted if not (folder / name).is_file()), None)
    if missing is not None:
        return {}, f"{folder / missing}: is missing, but {SUMS} beside it names it"
    found = dict(zip(wanted, file_hashes([folder / name for name in wanted]), strict=True))
    changed = next((name for name, held in found.items() if held != wanted[name]), None)
    if changed is not None:
        return found, f"{folder / changed}: its bytes are not those that were written ({SUMS} beside it)"
    return found, ""
