"""The journal survives what a kill does to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.disk import Journal, read_jsonl
from kinject.errors import InputError


def test_every_possible_torn_tail_is_cut_and_appending_goes_on(tmp_path: Path) -> None:
    whole = b'{"id": "\xc3\xa9"}\n{"id": "b"}\n'
    for size in range(len(whole) + 1):
        path = tmp_path / f"{size}.jsonl"
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        with Journal(path) as journal:
            assert len(journal.rows) == kept
            journal.append({"id": "c"})
        assert [row["id"] for _, row in read_jsonl(path)] == [*["é", "b"][:kept], "c"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n{"id": \n{"id": 3}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: not JSON"):
        Journal(tmp_path / "a.jsonl")


def test_nan_is_refused_because_json_has_none(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl") as journal:
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.append({"x": float("nan")})
        journal.append({"x": 1})
    assert (tmp_path / "a.jsonl").read_text() == '{"x": 1}\n'


def test_rows_are_read_again_by_their_place_and_none_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, second = b'{"id": "\xc3\xa9"}', b'{"id": "b"}'
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\n\n" + second + b'\n{"torn')
    seen: dict[str, int] = {}
    with Journal(path, on_row=lambda offset, row: seen.update({row["id"]: offset})) as journal:
        assert (journal.rows, list(seen)) == ([], ["é", "b"])
        offsets = [journal.append({"id": name}) for name in ("c", "ö")]
        assert [journal.row_at(offset)["id"] for offset in (*offsets, *seen.values())] == [
            "c",
            "ö",
            "é",
            "b",
        ]
        assert path.read_bytes()[offsets[1] :].decode() == '{"id": "ö"}\n'
