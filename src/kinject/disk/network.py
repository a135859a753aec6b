"""Run folders on network file systems: held by a file that one process can create, and that shows its last sign of life.

The kernel's locks (flock) do not hold between machines on all of them (NFS without its lock service, SMB, FUSE). The
holder's file is touched every 15 s; once it was not for 2 minutes, by the file server's clock, the holder counts as ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from kinject.errors import DiskError

log = logging.getLogger(__name__)

_HELD = ".held"
_TYPES = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "orangefs", "pvfs2", "wekafs", "afs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs",
})  # fmt: skip
"""Types of file systems in /proc/self/mountinfo that machines share."""
_BEAT, _ENDED = 15.0, 120.0


def is_network(folder: Path) -> bool:
    """Return whether an existing folder is on a file system that machines share; False where the system does not report it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    except OSError:
        return False
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == wanted and line.partition(" - ")[2].split()[0] in _TYPES for line in lines)


@contextlib.contextmanager
def hold(folder: Path, holder: str) -> Iterator[None]:
    """Hold `folder` for `holder`, a text of one line, while the block runs. Raises `DiskError` with another holder."""
    path = folder / _HELD
    _remove_ended(folder)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError as error:
        raise DiskError(
            f"{folder}: in use by {_read(path) or 'another process'}. Wait for it or choose another run folder. If it was "
            f"killed, the folder is free {_ENDED:.0f} s later."
        ) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(holder)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_BEAT):
            with contextlib.suppress(OSError):  # the server is away; the next beat tries again
                os.utime(path)

    beat = threading.Thread(target=touch, daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if _read(path) == holder:
            path.unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Return whether a process that shows signs of life holds `folder`."""
    path = folder / _HELD
    return path.exists() and _silence(path) < _ENDED


def _remove_ended(folder: Path) -> None:
    """Remove the file of a holder that has ended without removing it."""
    path = folder / _HELD
    if not path.exists() or _silence(path) < _ENDED:
        return
    holder, removed = _read(path), folder / f"{_HELD}.{socket.gethostname()}.{os.getpid()}.part"
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        os.rename(path, removed)
        if _read(removed) != holder:  # another process has just taken the folder
            os.rename(removed, path)
            return
        removed.unlink()
        log.warning(f"{folder}: {holder or 'a process'} did not end in order.")


def _silence(path: Path) -> float:
    """Return the seconds since `path` was touched, by the clock of its file system."""
    clock = path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
    clock.write_bytes(b"")
    now = clock.stat().st_mtime
    clock.unlink()
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return _ENDED


def _read(path: Path) -> str:
    try:
        text = path.read_bytes()[:1000].decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "".join(character for character in text if character.isprintable()).strip()
