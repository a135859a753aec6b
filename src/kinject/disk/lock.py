"""One process a run folder, and who it is."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kinject.disk.atomic import LOCK, delete_parts
from kinject.disk.faults import unwritable
from kinject.disk.format import mark_folder
from kinject.disk.inside import refuse_links_out
from kinject.errors import DiskError

log = logging.getLogger(__name__)

_MOST = 1000
"""Bytes of a .lock that are read."""


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process while the block runs.

    The lock is the kernel's (flock), so it goes with the process, however that ends. On NFS (Linux), GPFS and CephFS it
    holds between machines; where it may not, and another machine's process did not end in order, that is said aloud. What
    a killed process had begun to write is deleted.

    Raises `DiskError` naming the holder (process, machine, since when) where there is one, or where nothing can be locked,
    and `InputError` when a newer kinject wrote the folder (`kinject.disk.format`).
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links_out(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        _take(folder, descriptor)
        try:
            mark_folder(folder)
            delete_parts(folder)
            yield
        finally:
            with contextlib.suppress(OSError):  # whoever comes next is told of a holder that is gone, no more
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(folder: Path, descriptor: int) -> None:
    host = socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = _said(descriptor)
        os.ftruncate(descriptor, 0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {host} since {since}".encode(), 0)
    except BlockingIOError as error:
        holder = _said(descriptor) or "another process"
        raise DiskError(f"{folder}: in use by {holder}. Wait for it or choose another run folder.") from error
    except OSError as error:
        raise unwritable(folder / LOCK, error, "locked") from error
    if before and f" on {host} since " not in before:
        log.warning(
            f"{folder}: {before} did not end in order. Should it still run there, end one of the two: this file system "
            "may not share locks between machines."
        )


def _said(descriptor: int) -> str:
    """Return what the holder wrote, in one line of what can be printed."""
    text = os.pread(descriptor, _MOST, 0).decode("utf-8", "replace")
    return "".join(character for character in text if character.isprintable()).strip()
