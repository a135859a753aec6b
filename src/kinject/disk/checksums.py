"""Checksums: ids by content, a CRC-32 in each record that kinject writes, and SHA-256 for whole files.

A line of a journal and an object in a JSON file end in the key `CHECKSUM`, the CRC-32 of the rest in hex; a row in SQLite
has it as its last column. The files of a model, a checkpoint or a token store are listed in SHA256SUMS, as coreutils'
``sha256sum -c`` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kinject.disk.files import open_to_read, read_bytes, unreadable, write_json, write_text
from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.disk.jsonl import parse_json
from kinject.errors import DiskError, InputError

CHECKSUM = "crc32"
"""The last key of a checked line or object."""
SHA256SUMS = "SHA256SUMS"
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False)
_BEFORE, _AFTER = f', "{CHECKSUM}": "'.encode(), b'"}'
_N_TAIL = len(_BEFORE) + 8 + len(_AFTER)
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MOST_THREADS = 8


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def content_id(*parts: object) -> str:
    """Return 16 hex digits that depend on `parts` (JSON values) and nothing else."""
    return hashlib.blake2b(_canonical(parts), digest_size=8).hexdigest()


# Lines of journals.


def add_line_checksum(line: bytes) -> bytes:
    """Return the JSON object `line` with the CRC-32 of its bytes as its last key."""
    separator = _BEFORE if len(line) > 2 else _BEFORE[2:]
    return b"%b%b%08x%b" % (line[:-1], separator, zlib.crc32(line), _AFTER)


def remove_line_checksum(line: bytes) -> bytes | None:
    """Return the line that `add_line_checksum` was given, None if it has no checksum. Raises `ValueError` if it changed."""
    tail = line[-_N_TAIL:]
    if not tail.endswith(_AFTER) or _BEFORE[2:] not in tail:
        return None
    start = line.rindex(_BEFORE[2:])
    bare = line[:start].removesuffix(b", ") + b"}"
    if b"%08x" % zlib.crc32(bare) != line[start + len(_BEFORE) - 2 : -len(_AFTER)]:
        raise ValueError(f"its bytes are not those that were written ({CHECKSUM})")
    return bare


# Objects in JSON files.


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` as JSON gives it back, with its checksum as the last key. NaN and infinities raise `ValueError`."""
    plain = json.loads(json.dumps(value, allow_nan=False))  # keys become strings, tuples become lists
    return {**plain, CHECKSUM: f"{zlib.crc32(_canonical(plain)):08x}"}


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as `write_json` does, with its checksum as the last key."""
    write_json(path, with_checksum(value))


def read_checked_json(path: Path, fix: str) -> dict[str, Any]:
    """Return the object in `path` without its checksum.

    Raises `DiskError` if the file cannot be read, and `InputError` with `fix` if it is not the object that was written.
    """
    try:
        data = read_bytes(path)
    except DiskError as error:
        raise DiskError(f"{error} {fix}") from error
    return parse_checked_json(path, data, fix)


def parse_checked_json(path: Path, data: bytes, fix: str) -> dict[str, Any]:
    """Return the object in `data`, the bytes of `path`, as `read_checked_json` does.

    Raises `InputError` as `check_version` if a newer kinject wrote it: its checksum may be another.
    """
    try:
        value = parse_json(data.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: not JSON ({error}). {fix}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged: found {type(value).__name__}, an object is needed. {fix}")
    version = value.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        check_version(version, str(path))
    if CHECKSUM not in value:  # edited by hand: its reader checks its shape
        return value
    checksum = value.pop(CHECKSUM)
    try:
        is_whole = checksum == f"{zlib.crc32(_canonical(value)):08x}"
    except ValueError:  # NaN or an infinity, which are never written
        is_whole = False
    if not is_whole:
        raise InputError(f"{path}: damaged: its values are not those that were written ({CHECKSUM}). {fix}")
    return value


# Rows in SQLite.


def row_checksum(values: Iterable[object]) -> int:
    """Return the CRC-32 of a row's values and their lengths; text counts as its UTF-8 bytes."""
    return zlib.crc32(b"".join(b"%d:%b" % (len(data), data) for data in map(_bytes_of, values)))


def _bytes_of(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b"\0" + repr(value).encode()


# Whole files.


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
