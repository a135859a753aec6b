"""Indexes on disk find what a dictionary finds."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kinject.disk import offsets
from kinject.disk.offsets import NameNumbers, number_names

NAMES = ["a", "", "über", "a\udcff", "b" * 300, "a", "", "über", "zz", "zz", "b" * 300, "0"]


@pytest.mark.parametrize("one_hash", [False, True])
def test_names_get_the_numbers_of_their_first_appearance(
    monkeypatch: pytest.MonkeyPatch, one_hash: bool
) -> None:
    if one_hash:
        monkeypatch.setattr(offsets, "_id", lambda name: 7)
    names = NAMES + random.Random(1).choices(NAMES, k=200)
    known: dict[str, int] = {}
    expected = [known.setdefault(name, len(known)) if name else -1 for name in names]
    assert list(number_names(names)) == expected


def test_the_names_lie_joined_in_their_file(tmp_path: Path) -> None:
    with (tmp_path / "names").open("w+b") as names, (tmp_path / "ends").open("w+b") as ends:
        numbers = NameNumbers(names, ends)
        assert [numbers.number(name) for name in ("mill", "é", "mill", "bridge")] == [0, 1, 0, 2]
        numbers.close()
    assert (tmp_path / "names").read_bytes().decode() == "millébridge"
    assert np.fromfile(tmp_path / "ends", np.int64).tolist() == [4, 6, 12]
