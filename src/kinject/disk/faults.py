"""What a disk says when it refuses, and what a user does about it."""

from __future__ import annotations

import errno
from pathlib import Path

from kinject.errors import DiskError

_CURES = (
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, "Free space there, or choose another folder."),
    ({errno.EROFS, errno.EACCES, errno.EPERM}, "Make it writable for this user, or choose another folder."),
    ({errno.EIO, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO}, "The disk or its connection fails: choose another."),
    ({errno.ESTALE, errno.ETIMEDOUT}, "The file server is gone: wait for it, then run the same command again."),
    ({errno.EMFILE, errno.ENFILE}, "Too many files are open: raise the limit (ulimit -n)."),
    ({errno.EISDIR}, "A folder stands in its place: move it away."),
    ({errno.ENOENT, errno.ENOTDIR}, "A folder on the way is missing: was it deleted? Run the same command again."),
)
_WORLD = frozenset(number for numbers, _ in _CURES[:5] for number in numbers)


def unwritable(path: Path, error: OSError, doing: str = "written") -> DiskError:
    """Return the fault to raise where `path` cannot be written, with what the system said and what to do."""
    return DiskError(f"{path}: cannot be {doing}: {error.strerror or error}. {cure_of(error)}")


def cure_of(error: OSError) -> str:
    """Return what a user does about what the system said."""
    return next((cure for numbers, cure in _CURES if error.errno in numbers), "Check the path.")


def is_of_the_world(error: OSError) -> bool:
    """Return whether no program could have avoided the error: a disk full, read-only, failing or gone."""
    return error.errno in _WORLD
