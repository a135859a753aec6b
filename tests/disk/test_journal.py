"""The journal survives what a kill does to a file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kinject.disk import Journal, OffsetIndex, content_id, read_jsonl
from kinject.disk.checksums import add_line_checksum
from kinject.errors import InputError


def test_rows_are_there_on_reopening(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.append({"id": 1})
        journal.append({"id": 2})
    with Journal(tmp_path / "a.jsonl") as journal:
        assert journal.rows == [{"id": 1}, {"id": 2}]


def test_every_possible_torn_tail_is_cut_and_appending_goes_on(tmp_path: Path) -> None:
    whole = b"".join(add_line_checksum(body) + b"\n" for body in (b'{"id": "\xc3\xa9"}', b'{"id": "b"}'))
    for size in range(len(whole) + 1):
        path = tmp_path / f"{size}.jsonl"
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        with Journal(path) as journal:
            assert len(journal.rows) == kept
            journal.append({"id": "c"})
        assert [row["id"] for _, row in read_jsonl(path)] == [*["é", "b"][:kept], "c"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(add_line_checksum(b'{"id": 1}') + b'\n{"id": \n{"id": 3}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: not JSON"):
        Journal(tmp_path / "a.jsonl")


def test_nan_is_refused_because_json_has_none(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl") as journal:
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.append({"x": float("nan")})
        journal.append({"x": 1})
    assert (tmp_path / "a.jsonl").read_text() == '{"x": 1, "crc32": "df78ddc4"}\n'  # cksum of gzip: crc32 '{"x": 1}'


def test_rows_are_read_again_by_their_place_and_none_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, second = (add_line_checksum(body) for body in (b'{"id": "\xc3\xa9"}', b'{"id": "b"}'))
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\n\n" + second + b'\n{"torn')
    seen: dict[str, int] = {}
    with Journal(path, on_row=lambda offset, row: seen.update({row["id"]: offset})) as journal:
        assert (journal.rows, list(seen), journal.torn_bytes) == ([], ["é", "b"], 6)
        offsets = [journal.append({"id": name}) for name in ("c", "ö")]
        assert [journal.row_at(offset)["id"] for offset in (*offsets, *seen.values())] == ["c", "ö", "é", "b"]
        assert path.read_bytes()[offsets[1] :].decode() == '{"id": "ö", "crc32": "fb40441f"}\n'


def test_places_are_found_by_id_as_a_dictionary_would() -> None:
    rng = random.Random(0)
    expected: dict[str, set[int]] = {}
    with OffsetIndex() as index:
        for _ in range(3000):
            identity, offset = content_id(rng.randrange(1000)), rng.randrange(2**40)
            expected.setdefault(identity, set()).add(offset)
            index.add(identity, offset)
        for identity in ("f" * 16, "0" * 16):
            expected[identity] = {7}
            index.add(identity, 7)
        assert len(index) == len(expected)
        assert set(index.ids()) == expected.keys()
        assert {identity: index.offsets_of(identity) for identity in expected} == {
            identity: sorted(offsets) for identity, offsets in expected.items()
        }
        assert index.offsets_of(content_id("absent")) == index.offsets_of("no id") == index.offsets_of("") == []
        with pytest.raises(InputError, match="found id 'x', expected 16 hex digits"):
            index.add("x", 0)
