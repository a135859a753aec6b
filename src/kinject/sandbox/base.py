"""The sandbox's base model, which ships as a finished run of recipes/sandbox/base.yaml with its weights in bfloat16.

`write_base` copies that run to where the recipes look for it, so that every machine starts from the same weights.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

from kinject.disk import SHA256SUMS, atomic_file, check_sha256sums, file_hash, lock_dir, read_bytes, read_manifest
from kinject.errors import InputError

log = logging.getLogger(__name__)

BASE_RUN: Final = Path("runs/sandbox/base")
"""The run folder that the recipes name, relative to the working directory."""
BASE_CORPUS: Final = Path("runs/sandbox/base-corpus.jsonl")
"""The base model's corpus, which the recipes replay."""
REPLAY_CORPUS: Final = Path("runs/sandbox/replay.jsonl")
"""A part of it whose rows name their documents."""
SHIPPED: Final = Path(__file__).parent / "base_model"
"""The run as it ships: README.md (its card), manifest.json, recipe.yaml, logs, and model/."""


def write_base(run_dir: Path = BASE_RUN) -> bool:
    """Copy the shipped run to `run_dir`; return False if a finished base is there already.

    A base that was trained there by the same recipe from the same corpus is kept, and the log says so. A damaged copy is
    replaced, a half-written one completed: the manifest comes last. Raises `InputError` if the folder holds another run,
    `DiskError` if it cannot be written or another process uses it.
    """
    if not (SHIPPED / "manifest.json").is_file():
        raise InputError(f"{SHIPPED}: no base model there; kinject was installed without it. Install it again.")
    with lock_dir(run_dir):
        if _has_base(run_dir):
            return False
        part = run_dir / ".model.part"
        shutil.rmtree(part, ignore_errors=True)
        for source in sorted((SHIPPED / "model").iterdir()):
            _copy(source, part / source.name)
        shutil.rmtree(run_dir / "model", ignore_errors=True)
        os.replace(part, run_dir / "model")
        names = [path.name for path in sorted(SHIPPED.iterdir()) if path.is_file() and path.name != "manifest.json"]
        for name in (*names, "manifest.json"):
            _copy(SHIPPED / name, run_dir / name)
    return True


def base_id() -> str:
    """Return the hash of the shipped run's manifest, which names its recipe, corpus, weights and tokenizer."""
    return file_hash(SHIPPED / "manifest.json")


def holds_shipped_base(run_dir: Path = BASE_RUN) -> bool:
    """Return whether the model in `run_dir` is a copy of the shipped one, whole or damaged."""
    sums = run_dir / "model" / SHA256SUMS
    return sums.is_file() and read_bytes(sums) == read_bytes(SHIPPED / "model" / SHA256SUMS)


def _has_base(run_dir: Path) -> bool:
    """Return whether `run_dir` holds a finished base; False if it is empty, or holds a part or a damaged copy of ours.

    Raises `InputError` for anything else.
    """
    manifest, shipped = (read_manifest(folder / "manifest.json") for folder in (run_dir, SHIPPED))
    fault = check_sha256sums(run_dir / "model")[1]
    if holds_shipped_base(run_dir):
        if fault:
            log.warning(f"{fault}. It is written again.")
        return manifest is not None and not fault
    found, ours = (item or {"inputs": {}, "counts": {}, "outputs": {}} for item in (manifest, shipped))
    has_model = (run_dir / "model").exists()
    is_new = manifest is None or found["outputs"] == ours["outputs"]
    if is_new and not has_model and not any(run_dir.glob("checkpoint-*")):
        return False
    same = found["inputs"].get("fingerprint") == ours["inputs"].get("fingerprint")
    if not same or not found["counts"].get("finished") or not has_model or fault:
        raise InputError(
            f"{run_dir}: holds another run, or one that is unfinished or damaged. Delete it or move it away. "
            "To continue an unfinished training of the base: kinject train recipes/sandbox/base.yaml --resume"
        )
    log.info(f"{run_dir}: the base model that was trained here stays; it is not the one that ships")
    return True


def _copy(source: Path, target: Path) -> None:
    with atomic_file(target, "wb") as file:
        file.write(read_bytes(source))
