"""Atomic writes: a reader sees the old file or the whole new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kinject.disk.faults import unwritable

_PART = ".part"
LOCK = ".lock"
"""The file in a run folder that says which process holds it."""


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` when the block ends without an exception, and vanishes when it does not.

    Parent folders are made. Raises `DiskError` when the place cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding = None if "b" in mode else "utf-8"
        with tempfile.NamedTemporaryFile(
            mode, encoding=encoding, dir=path.parent, prefix=f".{path.name}.", suffix=_PART, delete=False
        ) as file:
            temporary = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(
                OSError
            ):  # the disk that refused the file may refuse this too; what counts was told
                temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a file, if it is there. Raises `DiskError` when it cannot be."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error, "deleted") from error


def delete_parts(folder: Path) -> None:
    """Delete what processes that were killed left of `atomic_file` below `folder`, but for folders with a lock of their own.

    Whoever calls this holds the folder.
    """
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not os.path.exists(f"{where}/{name}/{LOCK}")]
        for name in names:
            if name.startswith(".") and name.endswith(_PART):
                Path(where, name).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with LF line ends, atomically."""
    with atomic_file(path, "wb") as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused: JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
