"""Run folders: one process at a time, names of files in them, and no links that lead out."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kinject.disk.checksums import content_id
from kinject.disk.files import LOCK, delete_parts, kind_of, unwritable
from kinject.disk.format import mark_folder
from kinject.disk.network import hold, is_network
from kinject.errors import DiskError

log = logging.getLogger(__name__)

_MOST_LOCK_BYTES = 1000
_PLAIN_NAME = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?\Z")
_RESERVED_NAME = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|\Z)", re.IGNORECASE)
_MOST_NAME_BYTES = 100


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process while the block runs, and delete temporary files of killed processes.

    The lock is the kernel's (flock), so it ends with the process, however that ends; on a network file system it is a file
    (`kinject.disk.network`). A warning names a process of another machine that did not release the folder.

    Raises `DiskError` with the holder (process, machine, since when), or if nothing can be locked, and `InputError` if a
    newer kinject wrote the folder (`kinject.disk.format`).
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_outside_links(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError) as error:
        raise DiskError(f"{folder}: cannot be a run folder: it is a file. Choose another run_dir.") from error
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        with hold(folder, _this_process()) if is_network(folder) else _flock(folder, descriptor):
            mark_folder(folder)
            delete_parts(folder)
            yield
    finally:
        os.close(descriptor)


def _this_process() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"


@contextlib.contextmanager
def _flock(folder: Path, descriptor: int) -> Iterator[None]:
    _lock(folder, descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # then the next process warns of a holder that has ended
            os.ftruncate(descriptor, 0)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = _read_holder(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_process().encode(), 0)
    except BlockingIOError as error:
        holder = _read_holder(descriptor) or "another process"
        raise DiskError(f"{folder}: in use by {holder}. Wait for it or choose another run folder.") from error
    except OSError as error:
        raise unwritable(folder / LOCK, error, "locked") from error
    if before and f" on {socket.gethostname()} since " not in before:
        log.warning(
            f"{folder}: {before} did not end in order. Should it still run there, end one of the two: this file system "
            "may not share locks between machines."
        )


def _read_holder(descriptor: int) -> str:
    """Return the text that the holder wrote, as one printable line."""
    text = os.pread(descriptor, _MOST_LOCK_BYTES, 0).decode("utf-8", "replace")
    return "".join(character for character in text if character.isprintable()).strip()


def file_name(name: str) -> str:
    """Return a file name for any `name`: the name itself if it is a plain word, else a similar one with a hash.

    The result has no separator, begins with a letter or digit, is short, and differs for different names.
    """
    if _PLAIN_NAME.match(name) and len(name.encode()) <= _MOST_NAME_BYTES and not _RESERVED_NAME.match(name):
        return name
    similar = re.sub(r"[^\w+=@-]+", "_", name).strip("_-+=@")
    similar = similar.encode()[:_MOST_NAME_BYTES].decode("utf-8", "ignore")
    return f"{similar or 'name'}-{content_id(name)[:8]}"


def refuse_outside_links(folder: Path) -> None:
    """Raise `DiskError` if a link below `folder` leads out of it, or an entry is no file (a pipe, a socket, a device).

    Files written through the link would land elsewhere; opening a pipe, here or in a library, may never end. The root
    of the file system is no run folder: looking through it takes minutes.
    """
    root = folder.resolve()
    if root == root.parent:
        raise DiskError(f"{folder}: the root of the file system. Choose a folder for this run alone as run_dir.")
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(root):
                raise DiskError(
                    f"{path}: a link that leads out of the run folder. Remove it, or give its target as run_dir."
                )
        for name in files:
            with contextlib.suppress(OSError):  # gone meanwhile, or a link to nothing: nothing can be opened
                kind = kind_of(os.stat(os.path.join(parent, name)).st_mode)
                if kind:
                    raise DiskError(f"{os.path.join(parent, name)}: found {kind} in the run folder. Remove it.")
