"""Single files: atomic writes, bounded reads, SHA-256, ids by content, and the fix for an error of
the disk.

The files of a model, a checkpoint or a token store are listed in SHA256SUMS, as coreutils'
``sha256sum -c`` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from kinject.errors import DiskError, InputError
from kinject.terminal import format_count

LONGEST_LINE = 2**26
"""Bytes of a line, and so of a row or a document in one: 64 MiB, some forty times the longest
novel."""
LARGEST_FILE = 2**28
"""Bytes of a file that is read whole (a page, a PDF, a text that is one document): 256 MiB."""
LOCK = ".lock"
"""The file in a run folder that names the process that holds it."""
_PART = ".part"
path_exists, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir
"""False for a name that no file can have (too long, or with a NUL), for which pathlib's raise."""

SHA256SUMS = "SHA256SUMS"
# Sorted: the order of keys in a file must not change an id.
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False)
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MOST_THREADS = 8

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FIXES = (
    (_FULL, "Free space there, or choose another folder."),
    (
        {errno.EROFS, errno.EACCES, errno.EPERM},
        "Make it writable for this user, or choose another folder.",
    ),
    (
        {errno.EIO, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO},
        "The disk or its connection fails: choose another.",
    ),
    (
        {errno.ESTALE, errno.ETIMEDOUT},
        "The file server does not answer: wait for it, then run the same command again.",
    ),
    ({errno.EMFILE, errno.ENFILE}, "Too many files are open: raise the limit (ulimit -n)."),
    ({errno.EISDIR}, "A folder has its name: move it away."),
    ({errno.ENOTDIR}, "A folder of its path is a file: choose another path."),
    (
        {errno.ENOENT},
        "A folder of its path is missing: was it deleted? Run the same command again.",
    ),
)
# The first five are the system's; a folder in the way or a missing one may be anyone's.
_SYSTEM_FAILURES = frozenset(number for numbers, _ in _FIXES[:5] for number in numbers)
_REFUSED_WRITE = re.compile(
    "No space left|File too large|quota exceeded|PytorchStreamWriter|file write failed"
    # torch's, where the end of a file, or what a stream has kept back, is not written.
    r"|unexpected pos \d+ vs \d+|basic_ios::clear"
)


def fix_for(error: OSError) -> str:
    """Return the user's fix for an error of the operating system."""
    return next((fix for numbers, fix in _FIXES if error.errno in numbers), "Check the path.")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def system_failure(error: BaseException) -> OSError | None:
    """Return the fault behind `error` that no program could have avoided: of a full, read-only,
    failing or unreachable disk.

    safetensors and torch raise an error of their own over it, or in its place.
    """
    for seen in causes(error):
        if isinstance(seen, OSError) and seen.errno in _SYSTEM_FAILURES:
            # An error of a copy names the file that is read first: the other one's disk is full.
            if seen.errno in _FULL and seen.filename2 is not None:
                return OSError(seen.errno, seen.strerror, seen.filename2)
            return seen
        if not isinstance(seen, OSError) and _REFUSED_WRITE.search(str(seen)):
            return OSError(
                errno.ENOSPC,
                "a file could not be written whole: the disk is full, or over its quota",
            )
    return None


def unwritable(path: Path, error: OSError, doing: str = "written", fix: str = "") -> DiskError:
    """Return the error to raise if `path` cannot be written, with the system's message, its fix,
    and the caller's `fix`."""
    message = f"{path}: cannot be {doing}: {error.strerror or error}. {fix_for(error)} {fix}"
    return DiskError(message.rstrip())


def unreadable(path: Path, error: OSError | ValueError) -> DiskError:
    """Return the error to raise if `path` cannot be read."""
    fix = "Check the path."
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        fix = fix_for(error).replace("writable", "readable")
    return DiskError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. {fix}")


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` at the end of the block; an exception deletes it and leaves
    `path` as it was.

    Parent folders are made. The umask decides who may read it. Raises `DiskError` if the file
    cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unused = part_path(path)
        encoding = None if "b" in mode else "utf-8"
        # x: a file of that name would be another's, and is not written over.
        with open(unused, mode.replace("w", "x"), encoding=encoding, opener=_open_held) as file:
            temporary = unused
            yield file
            file.flush()
            # The rename may reach the disk before the content: a crash would leave an empty file.
            os.fsync(file.fileno())
            # Before it is closed: until then `delete_parts` of another process leaves it.
            os.replace(temporary, path)
            temporary = None
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            # A disk that refused the write may refuse this; the first error counts.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _open_held(name: str, flags: int) -> int:
    """Return a descriptor of a new temporary file, locked so that `delete_parts` leaves it."""
    while True:
        descriptor = os.open(name, flags | os.O_CLOEXEC, 0o666)
        # A file system without locks has no run folder, so nobody deletes its temporary files.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked, another process may have taken it for left and deleted it.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def part_path(path: Path) -> Path:
    """Return a new name beside `path` for its replacement; `delete_parts` deletes it if the process
    is killed."""
    return path.parent / f".{path.name}.{secrets.token_hex(4)}{_PART}"


def delete_parts(folder: Path) -> None:
    """Delete the temporary files that killed processes left below `folder`, except in folders with
    a lock of their own.

    The caller holds the folder's lock. Others may write in it without that (kinject view, a cache),
    so a temporary file that its process still holds stays. Raises `DiskError`.
    """
    for parent, folders, names in os.walk(folder):
        # In place: os.walk goes on with this list.
        folders[:] = [name for name in folders if not os.path.exists(f"{parent}/{name}/{LOCK}")]
        for name in names:
            if name.startswith(".") and name.endswith(_PART):
                _delete_left(Path(parent, name))


def _delete_left(path: Path) -> None:
    """Delete a temporary file unless the process that writes it lives: then the kernel has it
    locked."""
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return  # finished meanwhile
    except OSError as error:
        raise unwritable(path, error, "deleted") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return
    except OSError as error:
        raise unwritable(path, error, "deleted") from error
    finally:
        os.close(descriptor)


def delete_file(path: Path) -> None:
    """Delete a file if it exists. Raises `DiskError` if it cannot be deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error, "deleted") from error


def file_stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file does: its time of change in nanoseconds, and its bytes."""
    if not path.is_file():
        return 0, 0
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with LF line ends, atomically."""
    with atomic_file(path, "wb") as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities raise `ValueError`: JSON has
    none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def open_to_read(path: Path) -> BufferedReader:
    """Return the file `path`, open for reading bytes.

    Raises `DiskError` if it cannot be opened or `check_regular` refuses it: anything else cannot be
    read twice, or to an end. The open file is checked again, and opening never waits, so that a
    pipe put there meanwhile cannot stop it.
    """
    try:
        check_regular(path)
        return open(path, "rb", opener=open_regular)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unreadable(path, error) from error


def check_regular(path: Path) -> None:
    """Raise `DiskError` unless `path` is a file on a disk, or a link to one. Nothing is opened.

    A folder, pipe, socket or device is refused.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    _refuse_unless_regular(path, status)


def open_regular(name: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a file: the `opener` of every `open` of a path that others can write.
    It never waits.

    Raises `DiskError` as `check_regular`.
    """
    path = Path(name)
    # Until fstat refuses it, a pipe must not block, and a terminal must not become this process's
    # own.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    try:
        _refuse_unless_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise `InputError` if one of `paths`, below a folder of the option --out, is there: nothing
    is written over."""
    for path in paths:
        if path.exists():
            raise InputError(
                f"{path}: is there already, and nothing is written over. Move it away, or give "
                "another --out."
            )


def kind_of(mode: int) -> str:
    """Return the kind of a `st_mode` in words: "a pipe", "a folder"; "" for a file."""
    if stat.S_ISREG(mode):
        return ""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((words for is_kind, words in kinds if is_kind(mode)), "a device")


def _refuse_unless_regular(path: Path, status: os.stat_result) -> None:
    kind = kind_of(status.st_mode)
    if not kind:
        return
    fix = "Save its content as a file and give that: it is read more than once."
    if kind == "a folder":
        fix = "Check the path."
    raise DiskError(f"{path}: found {kind}, expected a file. {fix}")


def read_bytes(path: Path, most: int | None = None, stream: BinaryIO | None = None) -> bytes:
    """Return the bytes of `path`, or those left in `stream`, which was opened from it; at most
    `most` and `LARGEST_FILE`.

    Raises `DiskError` if it cannot be read and `InputError` if it is longer.
    """
    limit = LARGEST_FILE if most is None else min(most, LARGEST_FILE)
    with open_to_read(path) if stream is None else contextlib.nullcontext(stream) as file:
        try:
            # One byte more shows that the file is longer.
            remaining, parts = limit + 1, []
            # One read of the limit would allocate as much.
            while part := file.read(min(remaining, 2**20)):
                parts.append(part)
                remaining -= len(part)
        except OSError as error:
            raise unreadable(path, error) from error
    if not remaining:
        raise InputError(
            f"{path}: longer than {format_size(limit)}, the most that is read whole. Split it."
        )
    return b"".join(parts)


def read_lines(path: Path, stream: BinaryIO | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end) of a file of any length, or of `stream`, which was
    opened from it.

    Raises `DiskError` if it cannot be read and `InputError` (file:line) on a line longer than
    `LONGEST_LINE`.
    """
    with open_to_read(path) if stream is None else contextlib.nullcontext(stream) as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(LONGEST_LINE + 1)
            except OSError as error:
                raise unreadable(path, error) from error
            if len(line) > LONGEST_LINE:
                raise InputError(
                    f"{path}:{number}: a line longer than {format_size(LONGEST_LINE)}. Split the "
                    "document, one row each."
                )
            if not line:
                return
            yield number, line


def format_size(n_bytes: int) -> str:
    """Return a number of bytes as in ``64 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:g} {unit}"
    return format_count(n_bytes, "byte")


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def content_id(*parts: object) -> str:
    """Return 16 hex digits that depend on `parts` (JSON values) and nothing else."""
    return hashlib.blake2b(_canonical(parts), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises `DiskError` if it cannot be read."""
    try:
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """Return `file_hash` of each of several files, read in parallel. Raises `DiskError` as it
    does."""
    n_threads = min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(paths)))
    # Threads are enough: hashlib releases the interpreter's lock.
    with ThreadPoolExecutor(n_threads) as threads:
        return list(threads.map(file_hash, paths))


_SYSTEM = frozenset(
    {"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r", "__macosx", "$recycle.bin"}
)


def is_left_out(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or the system's own: no document."""
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM


def leads_into(path: Path | str, folder: Path) -> bool:
    """Return whether a path is in a folder when all links of both are followed."""
    # Not Path.resolve, which raises for a link that leads to itself.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def folder_hash(folder: Path) -> str:
    """Return one SHA-256 over the names and bytes of the files below `folder`.

    Files that `is_left_out` names do not count: a file manager that notes how it shows a folder
    changes no input.
    """
    digest = hashlib.sha256()
    # The order of a folder's entries differs between file systems.
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(map(is_left_out, name.split("/"))):
            # A name may be of bytes that are no UTF-8, as archives of other systems leave them.
            line = f"{name}\0{file_hash(path)}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def write_sha256sums(folder: Path) -> None:
    """Write SHA256SUMS over every file below `folder`, and give each the mode of a new file. Raises
    `DiskError`.

    safetensors writes files that their owner alone may read, whatever the umask.
    """
    paths = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SHA256SUMS
    ]
    hashes = zip(file_hashes(paths), paths, strict=True)
    lines = (f"{digest}  {path.relative_to(folder).as_posix()}\n" for digest, path in hashes)
    sums = folder / SHA256SUMS
    write_text(sums, "".join(lines))
    mode = stat.S_IMODE(sums.stat().st_mode)
    for path in paths:
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def verified_hashes(folder: Path) -> dict[str, str]:
    """Return name -> hash of the files in SHA256SUMS of a model folder; {} if it has none.

    Raises `InputError` with the first file that has changed, `DiskError` if one cannot be read.
    """
    hashes, fault = check_sha256sums(folder)
    if fault:
        raise InputError(
            f"{fault}. Make the model again; if you changed it yourself, delete {SHA256SUMS}."
        )
    return hashes


def check_sha256sums(folder: Path) -> tuple[dict[str, str], str]:
    """Return (name -> present hash, first fault or "") of the files in SHA256SUMS of `folder`; ({},
    "") if it has none.

    A fault names the file. Raises `DiskError` if a file cannot be read.
    """
    path = folder / SHA256SUMS
    if not path.exists():
        return {}, ""
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            return {}, f"{path}:{number}: damaged: no hash and name of a file"
        expected[match[2]] = match[1]
    missing = next((name for name in expected if not is_file(folder / name)), None)
    if missing is not None:
        return {}, f"{folder / missing}: is missing, but {SHA256SUMS} beside it names it"
    present = dict(zip(expected, file_hashes([folder / name for name in expected]), strict=True))
    changed = next((name for name, digest in present.items() if digest != expected[name]), None)
    if changed is not None:
        fault = f"its bytes are not those that were written ({SHA256SUMS} beside it)"
        return present, f"{folder / changed}: {fault}"
    return present, ""
