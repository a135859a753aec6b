"""The index of a journal."""

from __future__ import annotations

import pytest

from kinject.disk import OffsetIndex
from kinject.errors import InputError


def test_offsets_are_in_order_of_addition_by_id() -> None:
    index = OffsetIndex()
    for identity, offset in (("0" * 16, 3), ("f" * 16, 5), ("0" * 16, 9)):
        index.add(identity, offset)
    assert [index.offsets_of(digit * 16) for digit in "0f1"] == [[3, 9], [5], []]
    assert len(index) == 2


@pytest.mark.parametrize("identity", ["", "xyz", "0" * 15, "0" * 17, "-" + "1" * 15, "g" * 16])
def test_another_id_is_refused_by_name_and_has_no_offsets(identity: str) -> None:
    index = OffsetIndex()
    with pytest.raises(InputError, match="16 hex digits"):
        index.add(identity, 1)
    assert index.offsets_of(identity) == []
