"""The index of a journal."""

from __future__ import annotations

from kinject.disk import OffsetIndex


def test_offsets_are_in_order_of_addition_by_id() -> None:
    index = OffsetIndex()
    for identity, offset in (("0" * 16, 3), ("f" * 16, 5), ("0" * 16, 9)):
        index.add(identity, offset)
    assert [index.offsets_of(digit * 16) for digit in "0f1"] == [[3, 9], [5], []]
    assert len(index) == 2
