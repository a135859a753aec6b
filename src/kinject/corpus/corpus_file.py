"""A corpus on disk, read row by row when it is asked for: it may be larger than memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from kinject.corpus.rows import CorpusRow, LineFaults, Shape, parse_corpus_row
from kinject.disk import open_to_read, parse_row, read_lines
from kinject.errors import InputError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CorpusFile(Sequence[CorpusRow]):
    """The rows of a JSONL corpus in order. In memory are only where lines begin, 16 bytes a row.

    `path` is the file, `shapes` the first row id of each shape that occurs. `origin`, where given, replaces the rows' own.
    """

    def __init__(self, path: Path, origin: str = "") -> None:
        """Read the file through once. Raises `InputError` with every faulty line (the first 20), each as file:line."""
        self.path, self.origin = path, origin
        self.shapes: dict[Shape, str] = {}
        self._starts, self._numbers = array("q"), array("q")
        faults = LineFaults(path)
        at = 0
        for number, line in read_lines(path):
            start, at = at, at + len(line)
            if not line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip():
                continue
            self._starts.append(start)
            self._numbers.append(number)
            try:
                row = self._parse(line, number)
                self.shapes.setdefault(row.shape, row.id)
            except InputError as error:
                faults.add(str(error))
        faults.tell(len(self._starts))

    def _parse(self, line: bytes, number: int) -> CorpusRow:
        where = f"{self.path}:{number}"
        raw = parse_row(line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b""), where)
        try:
            return parse_corpus_row(raw, self.origin)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> CorpusRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[CorpusRow]: ...
    def __getitem__(self, index: int | slice) -> CorpusRow | list[CorpusRow]:
        """Read one row, or some."""
        if isinstance(index, slice):
            return self.pick(range(*index.indices(len(self))))
        return self.pick([range(len(self))[index]])[0]

    def pick(self, indices: Sequence[int]) -> list[CorpusRow]:
        """Return the rows of `indices`, in their order."""
        found = []
        with open_to_read(self.path) as file:
            for index in indices:
                file.seek(self._starts[index])
                found.append(self._parse(file.readline(), self._numbers[index]))
        return found

    def __iter__(self) -> Iterator[CorpusRow]:
        """Yield every row, in one pass through the file."""
        with open_to_read(self.path) as file:
            for start, number in zip(self._starts, self._numbers, strict=True):
                file.seek(start)
                yield self._parse(file.readline(), number)
