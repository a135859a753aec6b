"""JSON objects that tell when a bit of them has changed: their last key is a checksum of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinject.disk.atomic import write_json
from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.disk.ids import content_id
from kinject.disk.reading import read_bytes
from kinject.errors import DiskError, InputError

SEAL = "_checksum"
"""The key that holds `content_id` of the rest. Objects of an older kinject have none and are read as they are."""


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as `write_json` does, with its seal as the last key."""
    write_json(path, sealed(value))


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` as JSON will give it back, with its seal as the last key. NaN and infinities are refused."""
    plain = json.loads(json.dumps(value, allow_nan=False))  # keys become strings, tuples lists
    return {**plain, SEAL: content_id(plain)}


def read_sealed(path: Path, cure: str) -> dict[str, Any]:
    """Return the object in `path` without its seal.

    Raises `DiskError` when the file cannot be read, and `InputError` with `cure` when it is no JSON object or not the one
    that was written.
    """
    try:
        data = read_bytes(path)
    except DiskError as error:
        raise DiskError(f"{error} {cure}") from error
    return unsealed(path, data, cure)


def unsealed(path: Path, data: bytes, cure: str) -> dict[str, Any]:
    """Return the object in `data`, the bytes of `path`, as `read_sealed` does.

    Raises `InputError` as `check_version` where it says that a newer kinject wrote it, whose seal may be another.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: not JSON ({error}). {cure}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged: found {type(value).__name__}, an object is needed. {cure}")
    version = value.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        check_version(version, str(path))
    if SEAL in value:
        seal = value.pop(SEAL)
        if seal != _id_of(value):
            raise InputError(f"{path}: damaged: its values are not those that were written ({SEAL}). {cure}")
    return value


def _id_of(value: dict[str, Any]) -> str | None:
    try:
        return content_id(value)
    except ValueError:  # NaN or an infinity, which were never written
        return None
