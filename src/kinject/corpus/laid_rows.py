"""Training rows as a plan over token rows: which pieces stand in which row. A row is joined when it is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kinject.corpus.tokens import IGNORED, TokenRow


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a batch, unpadded: ids, labels (`IGNORED` where nothing is learned) and positions, of equal length.

    `replayed` marks the learned tokens that come from replay. `documents` are the ids of the documents in it, and
    `round` is the part of the epoch in which it is due (always 0 unless rows are spread).
    """

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    replayed: list[bool]
    documents: tuple[str, ...] = ()
    round: int = 0


class LaidRows(Sequence[TrainingRow]):
    """The training rows of an epoch. In memory are 24 bytes a piece, not the tokens, which stay where `source` has them.

    Where `joined`, the pieces of a row are one text (``wrapped``): positions go on through it.
    """

    def __init__(self, source: Sequence[TokenRow], *, joined: bool) -> None:
        self.source, self.joined = source, joined
        self._pieces, self._ends, self._rounds = array("q"), array("q"), array("q")

    def append(self, pieces: Sequence[tuple[int, int, int]], number: int) -> None:
        """Add a row of pieces (row of the source, start, end) that is due in round `number`."""
        for piece in pieces:
            self._pieces.extend(piece)
        self._ends.append(len(self._pieces) // 3)
        self._rounds.append(number)

    @property
    def rounds(self) -> Sequence[int]:
        """The round of each row."""
        return self._rounds

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each row."""
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 3)
        sums = np.concatenate([[0], np.cumsum(pieces[:, 2] - pieces[:, 1])])
        ends = np.concatenate([[0], np.array(self._ends, dtype=np.int64)])
        return np.asarray(sums[ends[1:]] - sums[ends[:-1]])

    def longest_text(self) -> int:
        """Return the most positions that a row counts in a stretch."""
        if self.joined:
            return int(self.lengths().max(initial=0))
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 3)
        return int((pieces[:, 2] - pieces[:, 1]).max(initial=0))

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return what stands in one row: (row of the source, start, end) of each piece."""
        at = range(len(self))[index]
        first = self._ends[at - 1] if at else 0
        held = self._pieces[3 * first : 3 * self._ends[at]]
        return list(zip(held[::3], held[1::3], held[2::3], strict=True))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TrainingRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingRow]: ...
    def __getitem__(self, index: int | slice) -> TrainingRow | list[TrainingRow]:
        """Join one row, or some."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        placed = self.pieces(at)
        texts = [self.source[number] for number, _, _ in placed]
        documents = tuple(dict.fromkeys(text.document_id for text in texts))
        row = TrainingRow([], [], [], [], documents, self._rounds[at])
        for text, (_, start, end) in zip(texts, placed, strict=True):
            ids = np.asarray(text.input_ids[start:end]).tolist()
            learned = np.asarray(text.learned[start:end]).tolist()
            if not self.joined or not row.input_ids:
                learned[0] = False
            counted = len(row.input_ids) if self.joined else 0
            row.input_ids.extend(ids)
            row.labels.extend(token if bears else IGNORED for token, bears in zip(ids, learned, strict=True))
            row.position_ids.extend(range(counted, counted + len(ids)))
            row.replayed.extend(learned if text.origin == "replay" else [False] * len(ids))
        return row
