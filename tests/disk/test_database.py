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
    held: dict[str, set[int]] = {}
    with pytest.MonkeyPatch.context() as patch, OffsetIndex() as places:
        patch.setattr("kinject.disk.database._MOST_NEW", most_new)
        patch.setattr("kinject.disk.database._MOST_IDS", most_asked)
        for at, (identity, place) in enumerate(added, 1):
            places.add(identity, place)
            held.setdefault(identity, set()).add(place)
            assert sum(map(len, places._new.values())) == at % most_new  # what waits is written when it is much
            assert places.offsets_of(identity) == sorted(held[identity])
        asked = [*held, "f" * 15, "no id at all....", f"{12345:016x}"]
        assert places.offsets_of_all(asked) == [*(sorted(held[i]) for i in held), [], [], []]
        assert len(places) == len(held)
        assert sorted(places.ids()) == sorted(held)


def test_places_are_told_in_order_whether_written_or_new() -> None:
    with OffsetIndex() as places:
        places.add("0" * 16, 9)
        places.add("0" * 16, 3)
        assert places.offsets_of("0" * 16) == [3, 9]
        assert len(places) == 1  # written now
        places.add("0" * 16, 5)
        places.add("0" * 16, 3)
        assert places.offsets_of("0" * 16) == [3, 5, 9]
        assert places.offsets_of_all(["0" * 16, "1" * 16, "0" * 16]) == [[3, 5, 9], [], [3, 5, 9]]


@pytest.mark.parametrize("identity", ["", "xyz", "0" * 15, "0" * 17, "-" + "1" * 15, "g" * 16])
def test_what_is_no_id_is_refused_by_name_and_found_nowhere(identity: str) -> None:
    with OffsetIndex() as places:
        with pytest.raises(InputError) as caught:
            places.add(identity, 1)
        assert str(caught.value) == f"found id {identity!r}, expected 16 hex digits"
        assert places.offsets_of(identity) == []


def test_a_temporary_folder_without_room_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    told = (
        r"^the temporary folder cannot hold the index of a journal \(database or disk is full\)\. Free space there, or set "
        r"SQLITE_TMPDIR\.$"
    )
    with OffsetIndex() as places:
        places.add("0" * 16, 1)
        places._database.execute("DROP TABLE offsets")
        with pytest.raises(DiskError, match="no such table"):
            len(places)
    monkeypatch.setattr("sqlite3.connect", full)
    with pytest.raises(DiskError, match=told):
        OffsetIndex()


def test_a_closed_index_answers_no_more() -> None:
    places = OffsetIndex()
    places.close()
    with pytest.raises(sqlite3.ProgrammingError):
        places._database.execute("SELECT 1")
