"""A disk that refuses: the calls that a program makes of the files below a folder, numbered, and one of them failing.

Python's own file calls only (open, write, flush to disk, rename, make, delete, cut); SQLite, safetensors and PyTorch write
by themselves, and have tests of their own with a limit on the size of files.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.ESTALE)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultyDisk:
    """Refuses call number `at` (from 0) with `number`, and with `for_good` every later one; without `at` it only counts."""

    def __init__(
        self, folder: Path, number: int = 0, index: int | None = None, *, for_good: bool = False
    ) -> None:
        self.folder, self.number, self.index, self.for_good = folder, number, index, for_good
        self.calls: list[str] = []
        self.real = {name: getattr(os, name) for name in _PATHS + _DESCRIPTORS}
        self.real_open, self.real_os_open = io.open, os.open

    def call(self, name: str, path: object = None) -> None:
        """Count a call, or refuse it."""
        here = len(self.calls)
        self.calls.append(name)
        if self.index is not None and (here == self.index or (self.for_good and here > self.index)):
            raise OSError(
                self.number, os.strerror(self.number), None if path is None else str(path)
            )

    def is_mine(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(
            str(self.folder)
        )

    def open(self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
             newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        if not set(mode) & set("wax+") or not self.is_mine(file):
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        self.call("open", file)
        raw = _Raw(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def os_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & _WRITES and self.is_mine(path):
            self.call("os.open", path)
        return self.real_os_open(path, flags, *args, **options)

    def _of_path(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.is_mine(path):
                self.call(name, path)
            return self.real[name](path, *args, **options)

        return call

    def _of_descriptor(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.call(name)
            return self.real[name](*args, **options)

        return call

    def __enter__(self) -> FaultyDisk:
        self._stack = contextlib.ExitStack()
        for target, name, value in (
            (io, "open", self.open), (builtins, "open", self.open), (os, "open", self.os_open),
            *((os, name, self._of_path(name)) for name in _PATHS),
            *((os, name, self._of_descriptor(name)) for name in _DESCRIPTORS),
        ):  # fmt: skip
            self._stack.enter_context(mock.patch.object(target, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


_PATHS = ("replace", "rename", "mkdir", "unlink", "rmdir", "truncate")
_DESCRIPTORS = ("fsync", "ftruncate", "pwrite")


class _Raw(io.FileIO):
    def __init__(self, disk: FaultyDisk, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self.disk = disk

    def write(self, data: Any) -> int:
        self.disk.call("write")
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self.disk.call("truncate")
        return super().truncate(size)
