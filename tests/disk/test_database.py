"""The index of a journal against a dictionary, across its writes to disk."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinject.disk import OffsetIndex
from kinject.errors import DiskError, InputError

IDS = st.sampled_from([f"{number:016x}" for number in (0, 1, 255, 2**63 - 1, 2**63, 2**64 - 1)])


@given(st.lists(st.tuples(IDS, st.integers(0, 40)), max_size=60), st.integers(1, 9), st.integers(1, 3))
def test_every_id_has_its_places_in_order_wherever_they_wait(
    added: list[tuple[str, int]], most_new: int, most_asked: int
) -> None:
    expected: dict[str, set[int]] = {}
    with pytest.MonkeyPatch.context() as patch, OffsetIndex() as index:
        patch.setattr("kinject.disk.database._MOST_NEW", most_new)
        patch.setattr("kinject.disk.database._MOST_IDS", most_asked)
        for number, (identity, offset) in enumerate(added, 1):
            index.add(identity, offset)
            expected.setdefault(identity, set()).add(offset)
            assert sum(map(len, index._new.values())) == number % most_new  # what waits is written when it is much
            assert index.offsets_of(identity) == sorted(expected[identity])
        ids = [*expected, "f" * 15, "no id at all....", f"{12345:016x}"]
        assert index.offsets_of_all(ids) == [*(sorted(expected[i]) for i in expected), [], [], []]
        assert len(index) == len(expected)
        assert sorted(index.ids()) == sorted(expected)


def test_places_are_told_in_order_whether_written_or_new() -> None:
    with OffsetIndex() as index:
        index.add("0" * 16, 9)
        index.add("0" * 16, 3)
        assert index.offsets_of("0" * 16) == [3, 9]
        assert len(index) == 1  # written now
        index.add("0" * 16, 5)
        index.add("0" * 16, 3)
        assert index.offsets_of("0" * 16) == [3, 5, 9]
        assert index.offsets_of_all(["0" * 16, "1" * 16, "0" * 16]) == [[3, 5, 9], [], [3, 5, 9]]


@pytest.mark.parametrize("identity", ["", "xyz", "0" * 15, "0" * 17, "-" + "1" * 15, "g" * 16])
def test_what_is_no_id_is_refused_by_name_and_found_nowhere(identity: str) -> None:
    with OffsetIndex() as index:
        with pytest.raises(InputError) as caught:
            index.add(identity, 1)
        assert str(caught.value) == f"found id {identity!r}, expected 16 hex digits"
        assert index.offsets_of(identity) == []


def test_a_temporary_folder_without_room_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    message = (
        r"^the temporary folder cannot hold the index of a journal \(database or disk is full\)\. Free space there, or set "
        r"SQLITE_TMPDIR\.$"
    )
    with OffsetIndex() as index:
        index.add("0" * 16, 1)
        index._database.execute("DROP TABLE offsets")
        with pytest.raises(DiskError, match="no such table"):
            len(index)
    monkeypatch.setattr("sqlite3.connect", full)
    with pytest.raises(DiskError, match=message):
        OffsetIndex()


def test_a_closed_index_answers_no_more() -> None:
    index = OffsetIndex()
    index.close()
    with pytest.raises(sqlite3.ProgrammingError):
        index._database.execute("SELECT 1")
