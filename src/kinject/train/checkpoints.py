"""Whole checkpoints only: a folder counts once the marker written after its last byte agrees with what is in it.

The marker holds sizes, which are looked at often; SHA256SUMS beside it is read before a run goes on from a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from kinject.disk import check_sha256sums, is_system_failure, unwritable, write_json, write_sha256sums
from kinject.errors import DiskError
from kinject.process import is_first_process

log = logging.getLogger(__name__)

_MARKER = "complete.json"
_SIGNS = {
    "No space left": "No space left on device", "File too large": "File too large", "quota exceeded": "Disk quota exceeded",
    "PytorchStreamWriter failed": "a file could not be written whole",
}  # fmt: skip
"""What the writers of safetensors and PyTorch say when the system refuses them, and what it means."""
_NAME = re.compile(r"^checkpoint-(\d+)$")


def mark_complete(checkpoint: Path) -> None:
    """Record the hash and size of every file of a checkpoint that has just been written whole."""
    (checkpoint / _MARKER).unlink(missing_ok=True)
    write_sha256sums(checkpoint)
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in _files(checkpoint)}
    write_json(checkpoint / _MARKER, sizes)


def is_whole(checkpoint: Path) -> bool:
    """Return whether every file that the marker lists is there with its size; False without a readable marker."""
    try:
        sizes = json.loads((checkpoint / _MARKER).read_bytes())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def clear_torn(checkpoint: Path) -> None:
    """Delete what is left of a checkpoint that is not whole, before another is written in its place.

    Raises `DiskError` where it cannot be deleted.
    """
    if checkpoint.exists() and not is_whole(checkpoint):
        try:
            shutil.rmtree(checkpoint)
        except OSError as error:
            raise unwritable(checkpoint, error, "deleted") from error


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every checkpoint folder, whole or not, newest first."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoint-*") if (match := _NAME.match(path.name))]
    return sorted(found, reverse=True)


def newest_whole(run_dir: Path) -> Path | None:
    """Return the newest checkpoint with every file in its size, or None."""
    return next((path for _, path in checkpoints(run_dir) if is_whole(path)), None)


def checkpoint_to_resume(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files are what was written, or None; those left out are told.

    Reads them whole, but for checkpoints of an older kinject, which have no SHA256SUMS.
    """
    for _, path in checkpoints(run_dir):
        fault = check_sha256sums(path)[1] if is_whole(path) else f"{path}: was not written whole"
        if not fault:
            return path
        log.warning(f"{fault}. This checkpoint is left out; an older one, or the start, serves.")
    return None


@contextlib.contextmanager
def disk_faults(run_dir: Path) -> Iterator[None]:
    """Turn what libraries raise when a disk is full or gone into a `DiskError` that names the last whole checkpoint.

    What was half written goes, so that it takes no room from what comes next.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _disk_fault(error)
        if reason is None and not run_dir.is_dir():
            reason = "the run folder is gone"
        if reason is None:
            raise
        torn = [path for _, path in checkpoints(run_dir) if not is_whole(path)] if is_first_process() else []
        for path in (*torn, run_dir / ".model.part"):
            shutil.rmtree(path, ignore_errors=True)
        newest = newest_whole(run_dir)
        rest = f"The newest whole checkpoint is {newest.name}" if newest else "There is no whole checkpoint yet"
        raise DiskError(
            f"{run_dir}: the disk does not take what training writes ({reason}). {rest}. Mend that, then go on with "
            "--resume; trainer.save_total_limit keeps fewer checkpoints."
        ) from error


def _disk_fault(error: BaseException) -> str | None:
    """Return what the disk said, None where the error is of another kind."""
    if isinstance(error, OSError) and is_system_failure(error):
        return error.strerror or str(error)
    said = str(error)
    if isinstance(error, OSError | SafetensorError | RuntimeError):
        for sign, reason in _SIGNS.items():
            if sign in said:
                return reason
    inner = error.__cause__ or error.__context__
    return _disk_fault(inner) if inner is not None else None


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != _MARKER]
