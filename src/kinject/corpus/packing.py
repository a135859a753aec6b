"""Token rows to training rows of one block: no token is lost unnoticed, and no document sees
another.

Three strategies, named as SFTConfig names them:

* ``bfd_split``: documents packed whole by best-fit decreasing; one longer than the block is split
  into blocks. Positions restart at each document, so that attention (with the KV cache off) stays
  inside it.
* ``bfd``: the same, but tokens beyond the block are cut off and counted as truncated.
* ``wrapped``: all documents joined and cut every block tokens: the plain chunks of arXiv
  2312.05934. Documents see each other.

Without packing each document is a row of its own, cut at max_length.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kinject.corpus.rows import LazyRows
from kinject.corpus.tokenize import IGNORED, TokenAccount, TokenRow, TokenStore
from kinject.disk.offsets import number_names

_ROUND_BLOCKS = 8
"""A round of the epoch holds at least this many blocks; smaller ones would leave too much room
unused."""

_WINDOW = 1 << 18
"""Token rows that are packed together at most: a larger window fills rows no better."""


@dataclass(frozen=True)
class PackingConfig:
    """Settings by which token rows become training rows: `strategy` None is one document a row;
    `block` None does not cut.

    Unless texts are ``wrapped``, the rows of one document are spread evenly over an epoch, and no
    packed row holds two of them (paraphrases in one row would be learned as one text).
    """

    block: int | None
    strategy: str | None = None

    @property
    def cut_at(self) -> int | None:
        """The tokens of a row behind which none is read; None where all are."""
        return None if self.strategy in ("bfd_split", "wrapped") else self.block


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of a batch, unpadded: ids, labels (`IGNORED` for tokens without loss) and positions,
    of equal length.

    `replayed` marks the learned tokens that come from replay.
    """

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    replayed: list[bool]


class Segment(NamedTuple):
    """The tokens `start` to `end` of one token row. The first of them is never learned: no token
    precedes it."""

    row: int
    start: int
    end: int
    document: str

    @property
    def size(self) -> int:
        """Tokens in it."""
        return self.end - self.start


class ConcatRows(LazyRows[TokenRow]):
    """Several sequences of token rows as one, without a copy."""

    def __init__(self, parts: Sequence[Sequence[TokenRow]]) -> None:
        self.parts = [part for part in parts if len(part)]
        lengths = map(len, self.parts[:-1])
        self._starts = [0, *accumulate(lengths)]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def read_row(self, index: int) -> TokenRow:
        """Return the row with this number."""
        part = bisect_right(self._starts, index) - 1
        return self.parts[part][index - self._starts[part]]


class PickedRows(LazyRows[TokenRow]):
    """The rows of `source` with the numbers `indices`, without a copy."""

    def __init__(
        self, source: Sequence[TokenRow], indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def read_row(self, index: int) -> TokenRow:
        """Return the row with this number."""
        return self.source[self.indices[index]]


class PackedRows(LazyRows[TrainingRow]):
    """The training rows of an epoch. A row is made when it is read.

    In memory are 12 bytes a segment and 12 a row; the tokens stay in `source`. If `joined`, the
    segments of a row are one text (``wrapped``): positions continue through it. `rounds` has the
    round of each row: the part of the epoch in which it is read.
    """

    def __init__(self, source: Sequence[TokenRow], *, joined: bool) -> None:
        self.source, self.joined = source, joined
        # 32 bits: half of the memory, for up to 4 billion rows of the source.
        self._segments, self._ends = array("I"), array("q")
        self.rounds = array("I")

    def append(self, segments: Sequence[tuple[int, int, int]], number: int) -> None:
        """Add a row of segments (row of the source, start, end) that is read in round `number`."""
        for segment in segments:
            self._segments.extend(segment)
        self._ends.append(len(self._segments) // 3)
        self.rounds.append(number)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each row."""
        if not self._ends:
            return np.empty(0, np.int64)
        starts = np.concatenate([[0], np.frombuffer(self._ends, np.int64)[:-1]])
        return np.asarray(np.add.reduceat(self._sizes(), starts, dtype=np.int64))

    def longest_text(self) -> int:
        """Return the most positions that a row counts without a restart."""
        if self.joined:
            return int(self.lengths().max(initial=0))
        return int(self._sizes().max(initial=0))

    def _sizes(self) -> npt.NDArray[np.uintc]:
        """Return the tokens of each segment."""
        segments = np.frombuffer(self._segments, np.uintc).reshape(-1, 3)
        return np.asarray(segments[:, 2] - segments[:, 1])

    def segments(self, index: int) -> list[tuple[int, int, int]]:
        """Return (row of the source, start, end) of each segment of one row."""
        index = range(len(self))[index]
        first = self._ends[index - 1] if index > 0 else 0
        values = self._segments[3 * first : 3 * self._ends[index]]
        return list(zip(values[::3], values[1::3], values[2::3], strict=True))

    def __len__(self) -> int:
        return len(self._ends)

    def read_row(self, index: int) -> TrainingRow:
        """Return the row with this number."""
        segments = self.segments(index)
        texts = [self.source[number] for number, _, _ in segments]
        row = TrainingRow([], [], [], [])
        for text, (_, start, end) in zip(texts, segments, strict=True):
            ids = np.asarray(text.input_ids[start:end]).tolist()
            learned = np.asarray(text.learned[start:end]).tolist()
            if not self.joined or not row.input_ids:
                learned[0] = False  # nothing is before it, from which it could be predicted
            position = 0
            if self.joined:
                position = len(row.input_ids)
            row.input_ids.extend(ids)
            for token, in_loss in zip(ids, learned, strict=True):
                row.labels.append(token if in_loss else IGNORED)
            row.position_ids.extend(range(position, position + len(ids)))
            is_replayed = text.origin == "replay"
            row.replayed.extend(is_replayed and in_loss for in_loss in learned)
        return row


def pack(
    rows: Sequence[TokenRow], config: PackingConfig, seed: int
) -> tuple[PackedRows, TokenAccount]:
    """Return the training rows in an order drawn from `seed`, and the account of every token.

    If a document is split, a segment begins with the last token of the one before it, so that every
    token but a document's first is learned exactly once. Such repeated tokens are in no count.
    """
    account = TokenAccount()
    joined = config.strategy == "wrapped"
    divide = _chunks if joined else _windows
    packed = PackedRows(rows, joined=joined)
    for number, part in enumerate(_rounds(rows, _order(len(rows), seed), config, seed)):
        for segments in divide(rows, part, config, account):
            spans = [(segment.row, segment.start, segment.end) for segment in segments]
            packed.append(spans, number)
    account.masked = account.source - account.trained - account.lost
    return packed, account


def _order(n_rows: int, seed: int) -> array[int]:
    """Return the numbers of all rows in an order drawn from `seed`."""
    order = array("I", range(n_rows))
    random.Random(seed).shuffle(order)
    return order


def document_numbers(rows: Sequence[TokenRow]) -> npt.NDArray[np.integer[Any]]:
    """Return the number of each row's document by first appearance, -1 for none. Raises
    `DiskError`."""
    if isinstance(rows, ConcatRows) and len(rows.parts) == 1:
        rows = rows.parts[0]
    if isinstance(rows, TokenStore):
        return rows.documents
    return np.frombuffer(number_names(row.document_id for row in rows), np.intc)


def rows_by_document(
    documents: npt.NDArray[np.integer[Any]],
) -> tuple[int, npt.NDArray[np.uintc]]:
    """Return the rows without a document, and the rows of each document, by `document_numbers`."""
    n_alone = 0
    counts = np.zeros(1 + documents.max(initial=-1), np.uintc)
    # A part at a time: numpy's bincount takes 16 bytes a row.
    for start in range(0, len(documents), _WINDOW):
        part = documents[start : start + _WINDOW]
        n_alone += int(np.count_nonzero(part < 0))
        numbers, n_rows = np.unique(part[part >= 0], return_counts=True)
        counts[numbers] += n_rows.astype(np.uintc)
    return n_alone, counts


def _windows(
    rows: Sequence[TokenRow], part: Sequence[int], config: PackingConfig, account: TokenAccount
) -> Iterator[list[Segment]]:
    """Yield the packed rows of a round; memory does not grow with its size."""
    for start in range(0, len(part), _WINDOW):
        segments: list[Segment] = []
        for index in part[start : start + _WINDOW]:
            segments += cut(rows[index], index, config, account)
        if config.strategy is None or config.block is None:
            yield from ([segment] for segment in segments)
        else:
            yield from _best_fit(segments, config.block)


def _rounds(
    rows: Sequence[TokenRow], order: Sequence[int], config: PackingConfig, seed: int
) -> list[Sequence[int]]:
    """Deal rows to the rounds of an epoch; ``wrapped`` texts have one.

    There are as many rounds as the most frequent document has rows, each of at least
    `_ROUND_BLOCKS` blocks; the k-th of a document's n rows goes to round ``floor((k + u) * rounds /
    n)`` with one u in [0, 1) a document. Rows without a document go anywhere.
    """
    if config.strategy == "wrapped":
        return [order]
    documents = document_numbers(rows)
    # Rows of each document; plain integers are read faster from an array than from numpy's.
    counts = array("I", rows_by_document(documents)[1].tobytes())
    n_tokens = longest = 0
    for row in rows:
        n_tokens += len(row.input_ids)
        longest = max(longest, len(row.input_ids))
    n_rounds = max(1, n_tokens // (_ROUND_BLOCKS * max(1, config.block or longest)))
    n_rounds = min(max(counts, default=1), n_rounds)
    rng = random.Random(seed)
    offsets = array("d", (rng.random() for _ in counts))
    dealt = array("I", bytes(4 * len(counts)))
    rounds: list[array[int]] = [array("I") for _ in range(n_rounds)]
    for index in order:
        document = documents[index]
        if document < 0:
            rounds[int(rng.random() * n_rounds)].append(index)
            continue
        position = (dealt[document] + offsets[document]) * n_rounds / counts[document]
        # An offset next to 1 is rounded up to it.
        rounds[min(int(position), n_rounds - 1)].append(index)
        dealt[document] += 1
    return [part for part in rounds if part]


def cut(row: TokenRow, index: int, config: PackingConfig, account: TokenAccount) -> list[Segment]:
    """Return the segments of a row with tokens in the loss, each of at most a block; only the first
    unless rows are split."""
    length = len(row.input_ids)
    account.source += length + row.n_left_out + row.n_unread
    account.dropped += row.n_left_out
    size = config.block or length
    if config.cut_at is not None and length > config.cut_at:
        account.truncated += length - config.cut_at
        length = config.cut_at
    learned = np.asarray(row.learned[:length], dtype=np.bool_)
    segments: list[Segment] = []
    n_kept = reached = 0
    # A segment begins with the last token of the one before it, from which its first is predicted.
    for start in range(0, max(length - 1, 1), max(size - 1, 1)):
        end = min(start + size, length)
        n_learned = int(np.count_nonzero(learned[start + 1 : end]))
        # A segment of a prompt alone would be read for nothing.
        if n_learned:
            segments.append(Segment(index, start, end, row.document_id))
            account.trained += n_learned
            # The token that is repeated counts once.
            n_kept += end - max(start, reached)
            reached = end
    account.dropped += length - n_kept
    return segments


def _chunks(
    rows: Sequence[TokenRow], order: Sequence[int], config: PackingConfig, account: TokenAccount
) -> Iterator[list[Segment]]:
    """Yield rows of a block cut from all texts joined; each begins with the last token of the one
    before."""
    ends = array("q", (0,))
    for index in order:
        row = rows[index]
        ends.append(ends[-1] + len(row.input_ids))
        account.source += row.n_left_out + row.n_unread
        account.dropped += row.n_left_out
    account.source += ends[-1]
    size = config.block or ends[-1]
    n_kept = reached = 0
    for start in range(0, max(ends[-1] - 1, 1), max(size - 1, 1)):
        end = min(start + size, ends[-1])
        segments: list[Segment] = []
        n_learned = 0
        for i in range(bisect_right(ends, start) - 1, bisect_left(ends, end)):
            row = rows[order[i]]
            low, high = max(start - ends[i], 0), min(end, ends[i + 1]) - ends[i]
            if low < high:
                first = low
                if not segments:  # the first token of a chunk is not learned
                    first = low + 1
                segments.append(Segment(order[i], low, high, row.document_id))
                learned = np.asarray(row.learned[first:high], dtype=np.bool_)
                n_learned += int(np.count_nonzero(learned))
        if n_learned:
            account.trained += n_learned
            n_kept += end - max(start, reached)
            reached = end
            yield segments
    account.dropped += ends[-1] - n_kept


def _best_fit(segments: Sequence[Segment], block: int) -> list[list[Segment]]:
    """Group segments into bins of `block` tokens: longest first, each into the fullest bin that
    still has room.

    No bin holds two segments of one document. Ties keep the order of `segments`.
    There is one stack of bins for each size of free room, so a step costs O(log block).
    """
    bins: list[list[Segment]] = []
    documents: list[set[str]] = []  # of each bin
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for segment in sorted(segments, key=attrgetter("size"), reverse=True):
        found = _find_room(segment, rooms, by_room, documents)
        if found is None:
            bins.append([])
            documents.append(set())
            index, room = len(bins) - 1, block
        else:
            i, j = found
            room = rooms[i]
            # `j` is near the end as a rule: removing by value would search from the front.
            index = by_room[room].pop(j)
            if not by_room[room]:
                rooms.pop(i)
        bins[index].append(segment)
        documents[index].add(segment.document)
        _add_room(by_room, rooms, room - segment.size, index)
    return bins


def _find_room(
    segment: Segment,
    rooms: Sequence[int],
    by_room: Mapping[int, Sequence[int]],
    documents: Sequence[set[str]],
) -> tuple[int, int] | None:
    """Return where the fullest bin is that has room for a segment and nothing of its document:
    (index in `rooms`, index in the stack of that room); None if there is none."""
    for i in range(bisect_left(rooms, segment.size), len(rooms)):
        stack = by_room[rooms[i]]
        for j in reversed(range(len(stack))):
            # Rows without a document are no paraphrases of one another.
            if not segment.document or segment.document not in documents[stack[j]]:
                return i, j
    return None


def _add_room(by_room: dict[int, list[int]], rooms: list[int], room: int, index: int) -> None:
    """Record that bin `index` has `room` left; `rooms` stays sorted."""
    if room > 0:
        if not by_room.setdefault(room, []):
            insort(rooms, room)
        by_room[room].append(index)
