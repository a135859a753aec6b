"""The sandbox's models, which ship as finished runs of their recipes with their weights in bfloat16: the base, and instruct.

`write_base` copies such a run to where the recipes look for it, so that every machine starts from the same weights.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kinject.disk import SHA256SUMS, atomic_file, check_sha256sums, file_hash, lock_dir, read_bytes, read_manifest
from kinject.errors import InputError

log = logging.getLogger(__name__)

BASE_RUN: Final = Path("runs/sandbox/base")
"""The run folder that the recipes name, relative to the working directory."""
BASE_CORPUS: Final = Path("runs/sandbox/base-corpus.jsonl")
"""The base model's corpus, which the recipes replay."""


@dataclass(frozen=True, slots=True)
class ShippedRun:
    """A run that ships in `folder`: README.md (its card), manifest.json, recipe.yaml, logs, and model/.

    `recipe` made it, and its copy goes to `run_dir`.
    """

    name: str
    folder: Path
    run_dir: Path
    recipe: str

    @property
    def id(self) -> str:
        """The hash of the manifest, which names recipe, corpus, weights and tokenizer."""
        return file_hash(self.folder / "manifest.json")


_HERE = Path(__file__).parent
BASE: Final = ShippedRun("base", _HERE / "base_model", BASE_RUN, "recipes/sandbox/base.yaml")
INSTRUCT: Final = ShippedRun(
    "instruct", _HERE / "instruct_model", Path("runs/sandbox/instruct"), "recipes/sandbox/instruct.yaml"
)
SHIPPED: Final = BASE.folder


def write_base(run_dir: Path | None = None, shipped: ShippedRun = BASE) -> bool:
    """Copy a shipped run to `run_dir` (None: its own place); return False if a finished one is there already.

    A model that was trained there by the same recipe from the same corpus is kept, and the log says so. A damaged copy is
    replaced, a half-written one completed: the manifest comes last. Raises `InputError` if the folder holds another run,
    `DiskError` if it cannot be written or another process uses it.
    """
    folder, run_dir = shipped.folder, run_dir or shipped.run_dir
    if not (folder / "manifest.json").is_file():
        raise InputError(
            f"{folder}: no {shipped.name} model there; kinject was installed without it. Install it again."
        )
    with lock_dir(run_dir):
        if _has_model(run_dir, shipped):
            return False
        part = run_dir / ".model.part"
        shutil.rmtree(part, ignore_errors=True)
        for source in sorted((folder / "model").iterdir()):
            _copy(source, part / source.name)
        shutil.rmtree(run_dir / "model", ignore_errors=True)
        os.replace(part, run_dir / "model")
        names = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"]
        for name in (*names, "manifest.json"):
            _copy(folder / name, run_dir / name)
    return True


def holds_shipped_base(run_dir: Path = BASE_RUN, shipped: ShippedRun = BASE) -> bool:
    """Return whether the model in `run_dir` is a copy of the shipped one, whole or damaged."""
    sums = run_dir / "model" / SHA256SUMS
    return sums.is_file() and read_bytes(sums) == read_bytes(shipped.folder / "model" / SHA256SUMS)


def _has_model(run_dir: Path, shipped: ShippedRun) -> bool:
    """Return whether `run_dir` holds such a model, finished; False if it is empty, or holds a part or a damaged copy of ours.

    Raises `InputError` for anything else.
    """
    manifest, original = (read_manifest(folder / "manifest.json") for folder in (run_dir, shipped.folder))
    fault = check_sha256sums(run_dir / "model")[1]
    if holds_shipped_base(run_dir, shipped):
        if fault:
            log.warning(f"{fault}. It is written again.")
        return manifest is not None and not fault
    found, ours = (item or {"inputs": {}, "counts": {}, "outputs": {}} for item in (manifest, original))
    has_model = (run_dir / "model").exists()
    is_new = manifest is None or found["outputs"] == ours["outputs"]
    if is_new and not has_model and not any(run_dir.glob("checkpoint-*")):
        return False
    same = found["inputs"].get("fingerprint") == ours["inputs"].get("fingerprint")
    if not same or not found["counts"].get("finished") or not has_model or fault:
        raise InputError(
            f"{run_dir}: holds another run, or one that is unfinished or damaged. Delete it or move it away. "
            f"To continue an unfinished training of it: kinject train {shipped.recipe} --resume"
        )
    log.info(f"{run_dir}: the {shipped.name} model that was trained here stays; it is not the one that ships")
    return True


def _copy(source: Path, target: Path) -> None:
    with atomic_file(target, "wb") as file:
        file.write(read_bytes(source))
