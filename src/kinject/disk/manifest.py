"""The manifest beside every output: its stage, inputs, recipe, versions and counts."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kinject.disk.checksums import file_hash, file_hashes, read_checked_json, write_checked_json
from kinject.disk.files import read_bytes
from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.errors import InputError
from kinject.secrets import without_secrets

_PACKAGES = (
    "kinject", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy", "scipy",
    "bm25s", "openai",
)  # fmt: skip
"""Packages that decide a number, and the client of endpoints."""


@cache
def _versions() -> Mapping[str, str]:
    """Return package -> version; reading them from the packages' metadata takes a tenth of a second."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def write_manifest(
    path: Path, *, stage: str, inputs: Mapping[str, str], recipe: Mapping[str, Any], counts: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the manifest of `stage`: inputs (name -> hash), recipe, versions, counts, and the hashes of `outputs`.

    `outputs` are finished files beside `path`; `check_output` finds out whether one has changed since.
    """
    write_checked_json(path, {
        "format_version": FORMAT_VERSION, "stage": stage, "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["kinject", *map(without_secrets, sys.argv[1:])],
        "inputs": dict(inputs), "recipe": dict(recipe), "versions": _versions(),
        "machine": {"system": platform.system(), "processor": platform.machine()}, "counts": dict(counts),
        "outputs": dict(zip(outputs, file_hashes([path.parent / name for name in outputs]), strict=True)),
    })  # fmt: skip


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest at `path`, or None if there is none.

    Raises `InputError` if it is damaged or was written by a newer kinject.
    """
    if not path.exists():
        return None
    fix = "Delete it and run the same command again (kinject train: with --resume)."
    value = read_checked_json(path, fix)
    if "format_version" not in value or not all(isinstance(value.get(key), dict) for key in ("inputs", "counts")):
        raise InputError(f"{path}: damaged: format_version, inputs or counts are missing or of another shape. {fix}")
    check_version(value["format_version"], str(path))
    return value


def check_output(path: Path, fix: str) -> str:
    """Return the SHA-256 of a file that a stage may have written.

    Raises `InputError` with `fix` if the manifest beside it names the file with another hash, `DiskError` as
    `file_hash`.
    """
    sha256 = file_hash(path)
    outputs = manifest_beside(path).get("outputs")
    if isinstance(outputs, dict) and outputs.get(path.name, sha256) != sha256:
        raise InputError(
            f"{path}: its bytes are not those that were written (manifest.json beside it has their hash). {fix}"
        )
    return sha256


def manifest_beside(path: Path) -> dict[str, Any]:
    """Return the manifest in the folder of `path`; {} if kinject wrote none there. Raises as `read_manifest`."""
    manifest = path.parent / "manifest.json"
    return {} if not manifest.is_file() or _is_foreign(manifest) else read_manifest(manifest) or {}


def _is_foreign(path: Path) -> bool:
    """Return whether a manifest.json is another program's."""
    try:
        value = json.loads(read_bytes(path))
    except ValueError:
        return False
    return not isinstance(value, dict) or not {"stage", "format_version"} & value.keys()
