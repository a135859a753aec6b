"""The manifest beside every output: what made it, from what, with which versions and seed."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kinject.disk.format import FORMAT_VERSION, check_version
from kinject.disk.reading import read_bytes
from kinject.disk.sealed import read_sealed, write_sealed
from kinject.disk.sums import file_hash, file_hashes
from kinject.errors import InputError

_PACKAGES = (
    "kinject", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy", "scipy",
    "bm25s", "openai",
)  # fmt: skip
"""Everything that decides a number, and what speaks to endpoints."""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_manifest(
    path: Path, *, stage: str, inputs: Mapping[str, str], recipe: Mapping[str, Any], counts: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write what `stage` read (name -> hash), its whole recipe, versions, what it counted, and the hashes of `outputs`.

    `outputs` are files beside `path` that are finished; `check_output` tells when one has changed since.
    """
    write_sealed(
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
            "outputs": dict(zip(outputs, file_hashes([path.parent / name for name in outputs]), strict=True)),
        },
    )


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest at `path`, or None where there is none.

    Raises `InputError` when it is damaged or was written by a newer kinject.
    """
    if not path.exists():
        return None
    cure = "Delete it and run the same command again (kinject train: with --resume)."
    value = read_sealed(path, cure)
    if "format_version" not in value or not all(isinstance(value.get(key), dict) for key in ("inputs", "counts")):
        raise InputError(f"{path}: damaged: format_version, inputs or counts are missing or of another shape. {cure}")
    check_version(value["format_version"], str(path))
    return value


def check_output(path: Path, cure: str) -> str:
    """Return the SHA-256 of a file that a stage may have written.

    Raises `InputError` with `cure` where the manifest beside it names the file with another hash, `DiskError` as
    `file_hash`.
    """
    found = file_hash(path)
    outputs = manifest_beside(path).get("outputs")
    if isinstance(outputs, dict) and outputs.get(path.name, found) != found:
        raise InputError(
            f"{path}: its bytes are not those that were written (manifest.json beside it has their hash). {cure}"
        )
    return found


def manifest_beside(path: Path) -> dict[str, Any]:
    """Return the manifest in the folder of `path`, {} where there is none of kinject's. Raises as `read_manifest`."""
    manifest = path.parent / "manifest.json"
    return {} if not manifest.is_file() or _is_of_others(manifest) else read_manifest(manifest) or {}


def _is_of_others(path: Path) -> bool:
    """Return whether a manifest.json beside a user's file is another program's."""
    try:
        value = json.loads(read_bytes(path))
    except ValueError:
        return False
    return not isinstance(value, dict) or not {"stage", "format_version"} & value.keys()
