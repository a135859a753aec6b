"""What a CPU's heap takes for the tensors of a step: glibc's malloc, replayed on the sizes that the step asks for.

Large blocks are mapped one by one and go back when they are freed. Once one was freed, blocks up to its size (32 MiB at
most) come from the heap instead, whose holes stay resident and fit only what is no larger. So a step holds the most that
its heap ever spanned and, on top, the large blocks of the moment: more than its tensors at any one time.
Source: mallopt(3), M_MMAP_THRESHOLD and its dynamic adjustment.
"""

from __future__ import annotations

import bisect

_FIRST_MAPPED = 128 * 2**10
"""Bytes from which a block is mapped at the start."""
_LARGEST_HEAPED = 32 * 2**20
"""Bytes of the largest block that can raise that limit."""
_ALIGNED = 64
"""torch asks for blocks at multiples of 64 bytes."""
_PAGE = 4096


class Heap:
    """The resident bytes of blocks that come and go; `peak` is the most so far. Holes are filled best fit, neighbours joined."""

    def __init__(self) -> None:
        self.peak = 0
        self._mapped_from = _FIRST_MAPPED
        self._mapped = 0
        self._top = 0  # the end of the last block
        self._spanned = 0  # the furthest end so far: pages that were touched stay
        self._held: dict[object, tuple[int | None, int]] = {}
        self._holes: list[tuple[int, int]] = []  # (size, start), sorted
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # end of a hole -> its start

    def take(self, key: object, n_bytes: int) -> None:
        """Take a block and know it as `key`."""
        size = -(-(n_bytes + _ALIGNED) // 16) * 16
        if size >= self._mapped_from:
            size = -(-size // _PAGE) * _PAGE
            self._held[key] = None, size
            self._mapped += size
        else:
            self._held[key] = self._place(size), size
        self.peak = max(self.peak, self._mapped + self._spanned)

    def give_back(self, key: object) -> None:
        """Free the block of `key`."""
        start, size = self._held.pop(key)
        if start is None:
            self._mapped -= size
            if size <= _LARGEST_HEAPED:
                self._mapped_from = max(self._mapped_from, size)
            return
        end = start + size
        before = self._starts.get(start)
        if before is not None:
            self._fill(before)
            start = before
        if end in self._sizes:
            end += self._fill(end)
        if end == self._top:
            self._top = start
        else:
            self._dig(start, end - start)

    def _place(self, size: int) -> int:
        at = bisect.bisect_left(self._holes, (size, -1))
        if at == len(self._holes):
            start, self._top = self._top, self._top + size
            self._spanned = max(self._spanned, self._top)
            return start
        start = self._holes[at][1]
        left = self._fill(start) - size
        if left:
            self._dig(start + size, left)
        return start

    def _dig(self, start: int, size: int) -> None:
        bisect.insort(self._holes, (size, start))
        self._sizes[start], self._starts[start + size] = size, start

    def _fill(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._holes[bisect.bisect_left(self._holes, (size, start))]
        return size
