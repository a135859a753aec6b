"""Whether the header of a GGUF file counts no more than the file holds.

gguf's reader (0.19) believes the counts: behind the end of the file it reads empty arrays, and goes
on until memory is full. So the header is walked here first.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from kinject.disk import open_to_read

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
