"""Ids by content, and SHA-256 of whole files.

The files of a model, a checkpoint or a token store are listed in SHA256SUMS, as coreutils' ``sha256sum -c`` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kinject.disk.files import open_to_read, read_bytes, unreadable, write_text
from kinject.errors import InputError

SHA256SUMS = "SHA256SUMS"
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False)
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MOST_THREADS = 8


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def content_id(*parts: object) -> str:
    """Return 16 hex digits that depend on `parts` (JSON values) and nothing else."""
    return hashlib.blake2b(_canonical(parts), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises `DiskError` if it cannot be read."""
    try:
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """Return `file_hash` of each of several files, read in parallel. Raises `DiskError` as it does."""
    n_threads = min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(paths)))
    with ThreadPoolExecutor(n_threads) as threads:
        return list(threads.map(file_hash, paths))


def folder_hash(folder: Path, pattern: str = "**/*", known: Mapping[str, str] | None = None) -> str:
    """Return one SHA-256 over the names and bytes of the files below `folder` that match `pattern`.

    `known` are hashes by name that were just computed, so that no file is read twice.
    """
    hashes = known or {}
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{hashes.get(name) or file_hash(path)}\n".encode())
    return digest.hexdigest()


def write_sha256sums(folder: Path) -> None:
    """Write SHA256SUMS over every file below `folder`, and give each the mode of a new file. Raises `DiskError`.

    safetensors writes files that their owner alone may read, whatever the umask.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SHA256SUMS]
    hashes = zip(file_hashes(paths), paths, strict=True)
    lines = (f"{digest}  {path.relative_to(folder).as_posix()}\n" for digest, path in hashes)
    sums = folder / SHA256SUMS
    write_text(sums, "".join(lines))
    mode = stat.S_IMODE(sums.stat().st_mode)
    for path in paths:
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def verified_hashes(folder: Path) -> dict[str, str]:
    """Return name -> hash of the files in SHA256SUMS of a model folder; {} if it has none.

    Raises `InputError` with the first file that has changed, `DiskError` if one cannot be read.
    """
    hashes, fault = check_sha256sums(folder)
    if fault:
        raise InputError(f"{fault}. Make the model again; if you changed it yourself, delete {SHA256SUMS}.")
    return hashes


def check_sha256sums(folder: Path) -> tuple[dict[str, str], str]:
    """Return (name -> present hash, first fault or "") of the files in SHA256SUMS of `folder`; ({}, "") if it has none.

    A fault names the file. Raises `DiskError` if a file cannot be read.
    """
    path = folder / SHA256SUMS
    if not path.exists():
        return {}, ""
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            return {}, f"{path}:{number}: damaged: no hash and name of a file"
        expected[match[2]] = match[1]
    missing = next((name for name in expected if not (folder / name).is_file()), None)
    if missing is not None:
        return {}, f"{folder / missing}: is missing, but {SHA256SUMS} beside it names it"
    present = dict(zip(expected, file_hashes([folder / name for name in expected]), strict=True))
    changed = next((name for name, digest in present.items() if digest != expected[name]), None)
    if changed is not None:
        return present, f"{folder / changed}: its bytes are not those that were written ({SHA256SUMS} beside it)"
    return present, ""
