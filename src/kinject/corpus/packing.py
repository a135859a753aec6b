"""Token rows to training rows of one block: nothing is lost in silence, and no document sees another.

Three layouts, named as SFTConfig names them:

* ``bfd_split``: documents packed whole by best-fit decreasing; one longer than the block is split into blocks. Positions
  restart at each document, so that attention (with the KV cache off) stays inside it.
* ``bfd``: the same, but what exceeds the block is cut off and counted as truncated.
* ``wrapped``: all documents joined and cut every block tokens: the plain chunks of arXiv 2312.05934. Documents see each other.

Without packing each document is a row of its own, cut at max_length.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kinject.corpus.laid_rows import LaidRows
from kinject.corpus.tokens import TokenAccount, TokenRow

_ROUND_BLOCKS = 8
"""A round of the epoch holds at least this many blocks, or packing would leave too much room unused."""

_WINDOW = 1 << 18
"""Token rows that are packed together at most: a larger window fills rows no better."""


@dataclass(frozen=True)
class Layout:
    """How rows are laid out: `strategy` None is one document a row; `block` None does not cut.

    `spread` deals the rows of one document evenly over the epoch and lets no packed row hold two of them: paraphrases
    that stand together would be learned as one text.
    """

    block: int | None
    strategy: str | None = None
    spread: bool = False


class Piece(NamedTuple):
    """A run of tokens of one row: from `start` up to `end`. The first of them is never learned: nothing precedes it."""

    row: int
    start: int
    end: int
    document: str

    @property
    def size(self) -> int:
        """Tokens in it."""
        return self.end - self.start


def lay_out(rows: Sequence[TokenRow], layout: Layout, seed: int) -> tuple[LaidRows, TokenAccount]:
    """Return the training rows in an order drawn from `seed`, and the account of every token.

    A document that is split goes on in a piece that begins with the last token of the piece before, so that every
    token but a document's first is learned exactly once. Such repeated tokens are in no count.
    """
    order = array("q", range(len(rows)))
    random.Random(seed).shuffle(order)
    account = TokenAccount()
    joined = layout.strategy == "wrapped"
    laid = LaidRows(rows, joined=joined)
    for number, part in enumerate(_rounds(rows, order, layout, seed)):
        for pieces in _chunks(rows, part, layout, account) if joined else _windows(rows, part, layout, account):
            laid.append([(piece.row, piece.start, piece.end) for piece in pieces], number)
    account.masked = account.source - account.trained - account.lost
    return laid, account


def _windows(
    rows: Sequence[TokenRow], part: Sequence[int], layout: Layout, account: TokenAccount
) -> Iterator[list[Piece]]:
    """Yield the packed rows of a round; what is in memory does not grow with it."""
    for at in range(0, len(part), _WINDOW):
        yield from _bins(rows, part[at : at + _WINDOW], layout, account)


def _bins(rows: Sequence[TokenRow], part: Sequence[int], layout: Layout, account: TokenAccount) -> list[list[Piece]]:
    pieces = [piece for index in part for piece in _cut(rows[index], index, layout, account)]
    if layout.strategy is None:
        return [[piece] for piece in pieces]
    assert layout.block is not None
    return _best_fit_apart(pieces, layout.block) if layout.spread else _best_fit(pieces, layout.block)


def _rounds(rows: Sequence[TokenRow], order: Sequence[int], layout: Layout, seed: int) -> list[Sequence[int]]:
    """Deal rows to the rounds of an epoch, so that the rows of one document lie as far apart as their number allows.

    There are as many rounds as the most frequent document has rows, each of at least `_ROUND_BLOCKS` blocks. The k-th
    of a document's n rows goes to round ``floor((k + u) * rounds / n)`` with one u in [0, 1) a document.
    """
    if not layout.spread or layout.strategy == "wrapped":
        return [order]
    numbers: dict[str, int] = {}
    documents, counts = array("q"), array("q")  # each row's document by number, -1 for none; rows of each document
    n_tokens = longest = 0
    for row in rows:
        documents.append(numbers.setdefault(row.document_id, len(counts)) if row.document_id else -1)
        if documents[-1] == len(counts):
            counts.append(0)
        if row.document_id:
            counts[documents[-1]] += 1
        n_tokens += len(row.input_ids)
        longest = max(longest, len(row.input_ids))
    del numbers
    n_rounds = max(1, min(max(counts, default=1), n_tokens // (_ROUND_BLOCKS * max(1, layout.block or longest))))
    rng = random.Random(seed)
    offsets = array("d", (rng.random() for _ in counts))
    dealt = array("q", bytes(8 * len(counts)))
    rounds: list[array[int]] = [array("q") for _ in range(n_rounds)]
    for index in order:
        document = documents[index]
        if document < 0:
            rounds[int(rng.random() * n_rounds)].append(index)
            continue
        rounds[int((dealt[document] + offsets[document]) * n_rounds / counts[document])].append(index)
        dealt[document] += 1
    return [part for part in rounds if part]


def _cut(row: TokenRow, index: int, layout: Layout, account: TokenAccount) -> list[Piece]:
    """Return one row as pieces of at most a block (all of them where it is split, else the first) that bear loss."""
    length = len(row.input_ids)
    account.source += length
    size = layout.block or length
    if layout.strategy != "bfd_split" and length > size:
        account.truncated += length - size
        length = size
    learned = np.asarray(row.learned[:length], dtype=np.bool_)
    pieces: list[Piece] = []
    n_kept = reached = 0
    for start in range(0, max(length - 1, 1), max(size - 1, 1)):
        end = min(start + size, length)
        n_learned = int(np.count_nonzero(learned[start + 1 : end]))
        if n_learned:
            pieces.append(Piece(index, start, end, row.document_id))
            account.trained += n_learned
            n_kept += end - max(start, reached)
            reached = end
    account.dropped += length - n_kept
    return pieces


def _chunks(
    rows: Sequence[TokenRow], order: Sequence[int], layout: Layout, account: TokenAccount
) -> Iterator[list[Piece]]:
    """Yield rows of a block cut from all texts joined; one begins with the last token of the one before."""
    ends = array("q", (0,))
    for index in order:
        ends.append(ends[-1] + len(rows[index].input_ids))
    account.source += ends[-1]
    size = layout.block or ends[-1]
    n_kept = reached = 0
    for start in range(0, max(ends[-1] - 1, 1), max(size - 1, 1)):
        end = min(start + size, ends[-1])
        pieces, n_learned = [], 0
        for at in range(bisect_right(ends, start) - 1, bisect_left(ends, end)):
            row, low, high = rows[order[at]], max(start - ends[at], 0), min(end - ends[at], ends[at + 1] - ends[at])
            if low < high:
                pieces.append(Piece(order[at], low, high, row.document_id))
                first = low + 1 if len(pieces) == 1 else low
                n_learned += int(np.count_nonzero(np.asarray(row.learned[first:high], dtype=np.bool_)))
        if n_learned:
            account.trained += n_learned
            n_kept += end - max(start, reached)
            reached = end
            yield pieces
    account.dropped += ends[-1] - n_kept


def _best_fit_apart(pieces: Sequence[Piece], block: int) -> list[list[Piece]]:
    """Group pieces as `_best_fit` does, but never two of one document: each goes into the fullest bin without its own."""
    bins: list[list[Piece]] = []
    held: list[set[str]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        found = next(
            (
                (at, place)
                for at in range(bisect_left(rooms, piece.size), len(rooms))
                for place in reversed(range(len(by_room[rooms[at]])))
                if not piece.document or piece.document not in held[by_room[rooms[at]][place]]
            ),
            None,
        )
        if found is None:
            bins.append([])
            held.append(set())
            index, room = len(bins) - 1, block
        else:
            at, place = found
            room = rooms[at]
            index = by_room[room].pop(place)  # near the end as a rule: removing by value would search from the front
            if not by_room[room]:
                rooms.pop(at)
        bins[index].append(piece)
        held[index].add(piece.document)
        _leave(by_room, rooms, room - piece.size, index)
    return bins


def _best_fit(pieces: Sequence[Piece], block: int) -> list[list[Piece]]:
    """Group pieces into bins of `block` tokens: longest first, each into the fullest bin that still has room.

    Ties keep the order given. Bins wait in one stack for each size of free room, so a placement costs O(log block).
    """
    bins: list[list[Piece]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        at = bisect_left(rooms, piece.size)
        if at == len(rooms):
            bins.append([])
            index, room = len(bins) - 1, block
        else:
            room = rooms[at]
            index = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        bins[index].append(piece)
        _leave(by_room, rooms, room - piece.size, index)
    return bins


def _leave(by_room: dict[int, list[int]], rooms: list[int], room: int, index: int) -> None:
    """Note that bin `index` has `room` left."""
    if room > 0:
        if not by_room.setdefault(room, []):
            insort(rooms, room)
        by_room[room].append(index)
