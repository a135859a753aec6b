"""Checkpoints: complete or not, checked before a run resumes, and read without running code.

A folder is complete if the marker written after its last byte agrees with its files. The marker holds sizes, which are
checked often; SHA256SUMS beside it is checked before a run resumes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kinject.disk import (
    check_sha256sums,
    is_system_failure,
    open_to_read,
    read_bytes,
    read_json,
    unwritable,
    write_json,
    write_sha256sums,
)
from kinject.errors import DiskError, TrainingError
from kinject.process import is_first_process

log = logging.getLogger(__name__)

_MARKER = "complete.json"
_EXTRA = "extra-checkpoint.json"
_DISK_MESSAGES = {
    "No space left": "No space left on device", "File too large": "File too large", "quota exceeded": "Disk quota exceeded",
    "PytorchStreamWriter failed": "a file could not be written whole",
}  # fmt: skip
"""Words in the messages of safetensors and PyTorch when the system refuses a write -> the reason."""
_NAME = re.compile(r"^checkpoint-(\d+)$")
_METADATA = frozenset({
    ("collections", "OrderedDict"), ("builtins", "set"), ("torch", "Size"), ("torch", "device"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
})  # fmt: skip
_METADATA_CLASSES = "torch.distributed.checkpoint.metadata"


def mark_complete(checkpoint: Path) -> None:
    """Record the hash and size of every file of a checkpoint that has just been written."""
    (checkpoint / _MARKER).unlink(missing_ok=True)
    write_sha256sums(checkpoint)
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in _files(checkpoint)}
    write_json(checkpoint / _MARKER, sizes)


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file that the marker lists is there with its size; False without a readable marker."""
    try:
        sizes = json.loads(read_bytes(checkpoint / _MARKER))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, DiskError):
        return False


def remove_incomplete(checkpoint: Path) -> None:
    """Delete a checkpoint that is not complete, before another is written with its name. Raises `DiskError`."""
    if checkpoint.exists() and not is_complete(checkpoint):
        try:
            shutil.rmtree(checkpoint)
        except OSError as error:
            raise unwritable(checkpoint, error, "deleted") from error


def mark_extra(checkpoint: Path) -> None:
    """Record that an uninterrupted run would not have this checkpoint, so that it goes as soon as it is not needed."""
    write_json(checkpoint.parent / _EXTRA, {"checkpoint": checkpoint.name})


def remove_extra(run_dir: Path, newest: Path | None = None) -> None:
    """Delete the checkpoint of `mark_extra`, if there is one and it is not the `newest` itself.

    Raises `DiskError`, and `InputError` if the record is damaged.
    """
    path = run_dir / _EXTRA
    if not path.exists():
        return
    extra = run_dir / Path(str(read_json(path, "Delete it.").get("checkpoint"))).name
    if _NAME.match(extra.name) and extra.exists() and extra != newest:
        try:
            shutil.rmtree(extra)
        except OSError as error:
            raise unwritable(extra, error, "deleted") from error
    path.unlink()


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every checkpoint folder, complete or not, newest first."""
    matches = ((_NAME.match(path.name), path) for path in run_dir.glob("checkpoint-*"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def newest_complete(run_dir: Path) -> Path | None:
    """Return the newest checkpoint with every file in its size, or None."""
    return next((path for _, path in checkpoints(run_dir) if is_complete(path)), None)


def checkpoint_to_resume(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files have the bytes that were written, or None; logs those it skips."""
    for _, path in checkpoints(run_dir):
        fault = check_sha256sums(path)[1] if is_complete(path) else f"{path}: was not written whole"
        if not fault:
            return path
        log.warning(f"{fault}. This checkpoint is skipped; the run resumes from an older one, or from the start.")
    return None


@contextlib.contextmanager
def disk_faults(run_dir: Path) -> Iterator[None]:
    """Turn the libraries' errors about a full or missing disk into a `DiskError` that names the newest complete checkpoint.

    Half-written checkpoints are deleted to free their room.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _disk_fault(error)
        if reason is None and not run_dir.is_dir():
            reason = "the run folder is missing"
        if reason is None:
            raise
        incomplete = [path for _, path in checkpoints(run_dir) if not is_complete(path)] if is_first_process() else []
        for path in (*incomplete, run_dir / ".model.part"):
            shutil.rmtree(path, ignore_errors=True)
        newest = newest_complete(run_dir)
        newest_text = (
            f"The newest complete checkpoint is {newest.name}" if newest else "There is no complete checkpoint yet"
        )
        raise DiskError(
            f"{run_dir}: the disk refuses a file of training ({reason}). {newest_text}. Fix that, then run again with "
            "--resume; trainer.save_total_limit keeps fewer checkpoints."
        ) from error


def _disk_fault(error: BaseException) -> str | None:
    """Return the reason that the disk gave, None for an error of another kind."""
    if isinstance(error, OSError) and is_system_failure(error):
        return error.strerror or str(error)
    message = str(error)
    if isinstance(error, OSError | SafetensorError | RuntimeError):
        for words, reason in _DISK_MESSAGES.items():
            if words in message:
                return reason
    inner = error.__cause__ or error.__context__
    return _disk_fault(inner) if inner is not None else None


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != _MARKER]


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of torch's distributed checkpoints, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the metadata. Raises `pickle.UnpicklingError` for everything else."""
        import torch

        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        plain = "." not in name and not name.startswith("__")
        if (module, name) in _METADATA or of_torch or (module == _METADATA_CLASSES and plain):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


@contextlib.contextmanager
def numbers_only(checkpoint: Path | None) -> Iterator[None]:
    """Refuse a file of `checkpoint` that holds more than numbers while the block resumes from it; none of its code runs.

    transformers and torch write pickles. transformers reads optimizer, scheduler, scaler and random states with
    ``weights_only``, which refuses by itself; files that torch reads without (the ``.metadata`` of a sharded checkpoint)
    are checked first. DeepSpeed reads its own files without a check. Raises `TrainingError`.
    """
    if checkpoint is None:
        yield
        return
    for path in sorted(checkpoint.rglob(".metadata")):
        try:
            with open_to_read(path) as file:
                _MetadataUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises anything
            raise _refused(checkpoint, path.name, error) from error
    try:
        with _plain_values():
            yield
    except pickle.UnpicklingError as error:
        raise _refused(checkpoint, "its optimizer's, scheduler's or random state", error) from error


@contextlib.contextmanager
def _plain_values() -> Iterator[None]:
    """Let torch's distributed checkpoints refuse a value (of the optimizer's groups) that holds more than numbers."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    load = DefaultLoadPlanner.load_bytes

    def load_bytes(planner: Any, item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        load(planner, item, value)

    planners: Any = DefaultLoadPlanner
    planners.load_bytes = load_bytes
    try:
        yield
    finally:
        planners.load_bytes = load


def _refused(checkpoint: Path, name: str, error: Exception) -> TrainingError:
    lines = str(error).strip().splitlines()
    reason = next((line.strip() for line in lines if "GLOBAL" in line or "Unsupported" in line), "")
    reason = reason or (lines or [type(error).__name__])[0]
    return TrainingError(
        f"{checkpoint}: {name} holds more than numbers, or is damaged ({reason[:200]}). Loading it could run code, so it "
        f"is not loaded. Delete {checkpoint.name} and resume from an older one with --resume, or start over with --overwrite."
    )


def without_tied(model: Any, state_dict: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the weights to save, each once: a tied one under the name of its source. None if the model gives them."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: weight for name, weight in (state_dict or {}).items() if name not in tied} or None
