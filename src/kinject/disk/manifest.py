"""The manifest beside every output: what made it, from what, with which versions and seed."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kinject.disk.atomic import write_json
from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.disk.reading import open_to_read
from kinject.errors import DiskError, InputError

_PACKAGES = (
    "kinject", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy", "scipy",
    "bm25s", "openai",
)  # fmt: skip
"""Everything that decides a number, and what speaks to endpoints."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False)


def content_id(*parts: object) -> str:
    """Return 16 hex digits that depend on `parts` (JSON values) and nothing else."""
    return hashlib.blake2b(_ENCODER.encode(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises `DiskError` when it cannot be read."""
    try:
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DiskError(f"{path}: cannot be read: {error.strerror}. Check the path.") from error


def tree_hash(folder: Path, pattern: str = "**/*") -> str:
    """Return one SHA-256 over the names and bytes of the files below `folder` that match `pattern`."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            digest.update(f"{path.relative_to(folder).as_posix()}\0{file_hash(path)}\n".encode())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_manifest(
    path: Path, *, stage: str, inputs: Mapping[str, str], recipe: Mapping[str, Any], counts: Mapping[str, Any]
) -> None:
    """Write what `stage` read (name -> hash), its whole recipe, versions, and what it counted."""
    write_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            "stage": stage,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["kinject", *sys.argv[1:]],
            "inputs": dict(inputs),
            "recipe": dict(recipe),
            "versions": _versions(),
            "machine": {"system": platform.system(), "processor": platform.machine()},
            "counts": dict(counts),
        },
    )


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest at `path`, or None where there is none.

    Raises `InputError` when it is damaged or was written by a newer kinject.
    """
    if not path.exists():
        return None
    try:
        value = dict(json.loads(path.read_bytes()))
        version = value["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged manifest ({error}). Delete the run folder to make it anew.") from error
    check_version(version, str(path))
    return value
