"""The heap of `kinject plan`: against one that looks at every byte, and against what malloc's manual says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kinject.plan.heap import Heap

MIB = 2**20


class Naive:
    """A heap as an array of cells of 16 bytes, without mapped blocks: the smallest hole that fits, the first of such."""

    def __init__(self) -> None:
        self.cells = bytearray()
        self.held: dict[int, tuple[int, int]] = {}

    def take(self, key: int, n_bytes: int) -> None:
        n = -(-(n_bytes + 64) // 16)
        used = self.cells.rstrip(b"\0")
        runs = [(len(run), start) for start, run in _runs(bytes(used)) if len(run) >= n]
        start = min(runs)[1] if runs else len(used)
        self.cells.extend(bytes(max(0, start + n - len(self.cells))))
        self.cells[start : start + n] = b"x" * n
        self.held[key] = start, n

    def give_back(self, key: int) -> None:
        start, n = self.held.pop(key)
        self.cells[start : start + n] = bytes(n)

    @property
    def peak(self) -> int:
        return 16 * len(self.cells)


def _runs(cells: bytes) -> list[tuple[int, bytes]]:
    found, start = [], None
    for at, cell in enumerate(cells):
        if cell == 0 and start is None:
            start = at
        if cell and start is not None:
            found.append((start, cells[start:at]))
            start = None
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.integers(0, 10**6)), max_size=60))
def test_small_blocks_lie_where_an_array_of_cells_has_them(events: list[tuple[bool, int, int]]) -> None:
    heap, naive = Heap(), Naive()
    held: list[int] = []
    for number, (free, n_bytes, which) in enumerate(events):
        if free and held:
            key = held.pop(which % len(held))
            heap.give_back(key)
            naive.give_back(key)
        else:
            heap.take(number, n_bytes)
            naive.take(number, n_bytes)
            held.append(number)
        assert heap.peak == naive.peak


def test_a_large_block_goes_back_and_its_like_come_from_the_heap_afterwards() -> None:
    heap = Heap()
    heap.take("a", 8 * MIB)
    heap.give_back("a")
    first = heap.peak
    assert 8 * MIB < first < 8.01 * MIB
    heap.take("b", 4 * MIB)  # smaller than what was freed: from the heap now, where it stays resident
    heap.give_back("b")
    heap.take("c", 40 * MIB)  # mapped, on top of the heap's hole
    assert 44 * MIB < heap.peak < 44.01 * MIB
    heap.give_back("c")  # too large to raise the limit
    heap.take("d", 40 * MIB)
    assert heap.peak < 44.01 * MIB
