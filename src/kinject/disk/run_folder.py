"""Run folders: one process at a time, names of files, no links that lead out; and the manifest beside every output.

On network file systems a folder is held by a file that one process can create, and that shows its last sign of life: the
kernel's locks (flock) do not hold between machines on all of them (NFS without its lock service, SMB, FUSE). The holder's
file is touched every 15 s; once it was not for 2 minutes, by the file server's clock, the holder counts as ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kinject.disk.checksums import content_id, file_hash, file_hashes, read_checked_json, write_checked_json
from kinject.disk.files import LOCK, delete_parts, kind_of, read_bytes, unwritable
from kinject.disk.format import FORMAT_VERSION, check_version, mark_folder
from kinject.errors import DiskError, InputError
from kinject.secrets import without_secrets

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
    device_number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == device_number and line.partition(" - ")[2].split()[0] in _TYPES for line in lines)


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


_MOST_LOCK_BYTES = 1000
_PLAIN_NAME = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?\Z")
_RESERVED_NAME = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|\Z)", re.IGNORECASE)
_MOST_NAME_BYTES = 100


@contextlib.contextmanager
def lock_dir(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process while the block runs, and delete temporary files of killed processes.

    The lock is the kernel's (flock), so it ends with the process, however that ends; on a network file system it is a file
    (`hold`). A warning names a process of another machine that did not release the folder.

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


_PACKAGES = (
    "kinject", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy", "scipy",
    "bm25s", "openai",
)  # fmt: skip
"""Packages that decide a number, and the client of endpoints."""


@cache
def _versions() -> Mapping[str, str]:
    """Return package -> version; reading them from the packages' metadata takes a tenth of a second."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def write_manifest(
    path: Path, *, stage: str, inputs: Mapping[str, str], recipe: Mapping[str, Any], counts: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the manifest of `stage`: inputs (name -> hash), recipe, versions, counts, and the hashes of `outputs`.

    `outputs` are finished files beside `path`; `check_output` finds out whether one has changed since.
    """
    write_checked_json(path, {
        "format_version": FORMAT_VERSION, "stage": stage, "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["kinject", *map(without_secrets, sys.argv[1:])],
        "inputs": dict(inputs), "recipe": dict(recipe), "versions": _versions(),
        "machine": {"system": platform.system(), "processor": platform.machine()}, "counts": dict(counts),
        "outputs": dict(zip(outputs, file_hashes([path.parent / name for name in outputs]), strict=True)),
    })  # fmt: skip


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest at `path`, or None if there is none.

    Raises `InputError` if it is damaged or was written by a newer kinject.
    """
    if not path.exists():
        return None
    fix = "Delete it and run the same command again (kinject train: with --resume)."
    value = read_checked_json(path, fix)
    if "format_version" not in value or not all(isinstance(value.get(key), dict) for key in ("inputs", "counts")):
        raise InputError(f"{path}: damaged: format_version, inputs or counts are missing or of another shape. {fix}")
    check_version(value["format_version"], str(path))
    return value


def check_output(path: Path, fix: str) -> str:
    """Return the SHA-256 of a file that a stage may have written.

    Raises `InputError` with `fix` if the manifest beside it names the file with another hash, `DiskError` as
    `file_hash`.
    """
    sha256 = file_hash(path)
    outputs = manifest_beside(path).get("outputs")
    if isinstance(outputs, dict) and outputs.get(path.name, sha256) != sha256:
        raise InputError(
            f"{path}: its bytes are not those that were written (manifest.json beside it has their hash). {fix}"
        )
    return sha256


def manifest_beside(path: Path) -> dict[str, Any]:
    """Return the manifest in the folder of `path`; {} if kinject wrote none there. Raises as `read_manifest`."""
    manifest = path.parent / "manifest.json"
    return {} if not manifest.is_file() or _is_foreign(manifest) else read_manifest(manifest) or {}


def _is_foreign(path: Path) -> bool:
    """Return whether a manifest.json is another program's."""
    try:
        value = json.loads(read_bytes(path))
    except ValueError:
        return False
    return not isinstance(value, dict) or not {"stage", "format_version"} & value.keys()
