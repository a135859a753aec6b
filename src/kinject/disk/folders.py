"""Whole folders: replaced in one step, and kept in a cache by name, with the lock of a single file
that both need."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kinject.disk.files import (
    check_sha256sums,
    open_regular,
    part_path,
    unwritable,
    write_sha256sums,
)
from kinject.errors import DiskError

log = logging.getLogger(__name__)
_HERE = -100
"""AT_FDCWD of Linux: paths are those of this process."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux's renameat2."""


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True, holder: str = "") -> Iterator[None]:
    """Hold the lock file `path`, made if missing, while the block runs; `wait` for the process or
    thread that holds it.

    What is read, changed and written again is one step under it. The file stays: one that is made
    again would let two processes hold two locks. `holder` says what holds it, for the line that is
    logged before a long wait. Raises `DiskError` if it cannot be locked, and without `wait` if it
    is held.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unwritable(path, error, "locked") from error
    try:
        try:
            _take(path, descriptor, holder, wait=wait)
        except OSError as error:
            raise unwritable(path, error, "locked") from error
        yield
    finally:
        os.close(descriptor)


def _take(path: Path, descriptor: int, holder: str, *, wait: bool) -> None:
    """Lock a file, as `file_lock` says. The kernel releases it with the process, however that
    ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if not wait:
            raise DiskError(
                f"{path.parent}: in use by another process. Wait until it is done, then run the "
                "same command again."
            ) from error
        if holder:
            log.info(f"{holder} Waiting for it.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def replace_folder(part: Path, final: Path) -> None:
    """Let the folder `part` take the name of `final`, whose content is deleted. Raises `DiskError`.

    A process that is killed leaves the old one or the new one there, each whole. Where the file
    system cannot exchange two names (NFS), a kill between two renames leaves neither; then the old
    one has the name with a dot before it and .old behind it until the next call.
    """
    aside = final.with_name(f".{final.name}.old")
    try:
        _delete(aside)
        if not os.path.lexists(final):
            os.rename(part, final)
            return
        if not _exchange(part, final):
            os.rename(final, aside)
            os.rename(part, final)
            part = aside
        _delete(part)
    except OSError as error:
        raise unwritable(final, error) from error


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; return whether the system could."""
    # Here, since every verb imports this module, and few replace a folder.
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0)


def _delete(path: Path) -> None:
    """Delete a folder, or the link or file that has its name, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cached_folder(folder: Path, key: str, write: Callable[[Path], None], fix: str = "") -> Path:
    """Return the entry `key` of the cache `folder`, whole; if it is missing or its bytes are not
    those that were written, `write` fills a new one.

    Processes that need the same entry wait for the first. A process that dies leaves no entry.
    Raises `DiskError`, with `fix` at its end, when it cannot be written.
    """
    entry = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _fault(entry):
            return entry
        with file_lock(folder / f".{key}.lock", holder=f"{entry}: another process makes it."):
            for torn in folder.glob(f".{glob.escape(key)}.*.part"):  # of a process that was killed
                shutil.rmtree(torn)
            fault = _fault(entry)  # another process may have made it meanwhile
            if fault:
                if os.path.lexists(entry):
                    log.warning(f"{fault}. It is made again.")
                _write(entry, write)
    except OSError as error:
        raise unwritable(folder, error, fix=fix) from error
    return entry


def _fault(entry: Path) -> str:
    """Return the reason to make the entry; "" if it exists and is whole."""
    if not entry.is_dir():
        return f"{entry}: is not there, or is no folder"
    sums, fault = check_sha256sums(entry)
    if not sums and not fault:
        return f"{entry}: has no SHA256SUMS"
    return fault


def _write(entry: Path, write: Callable[[Path], None]) -> None:
    part = part_path(entry)
    part.mkdir()
    try:
        write(part)
        write_sha256sums(part)
        # At once: a reader that found it whole before it was damaged still finds a folder there.
        replace_folder(part, entry)
    finally:
        shutil.rmtree(part, ignore_errors=True)
