"""Atomic writes, JSON lines, hashes and manifests."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kinject.disk import content_id, read_jsonl, write_jsonl, write_sha256sums, write_text
from kinject.disk.files import atomic_file
from kinject.errors import DiskError, InputError


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail_half_way() -> None:
        with atomic_file(path) as file:
            file.write("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_decides_who_may_read_what_is_written_by_libraries_too(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        weights = tmp_path / "model" / "deep" / "model.safetensors"
        weights.parent.mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, weights)
        write_text(tmp_path / "model/config.json", "{}")
        write_sha256sums(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert modes == dict.fromkeys(("model.safetensors", "config.json", "SHA256SUMS"), mode)


def test_rows_come_back_with_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xc3\xa9"}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (3, {"a": "é"})]


def test_a_file_in_the_way_of_a_folder_is_no_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(DiskError, match=r"A folder of its path is a file: choose another path\.$"):
        write_text(tmp_path / "notes" / "deep" / "rows.jsonl", "{}")
    with pytest.raises(DiskError, match=r"A folder of its path is a file"):
        list(read_jsonl(tmp_path / "notes" / "rows.jsonl"))


def test_a_missing_file_and_an_unwritable_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"none\.jsonl: cannot be read"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        write_jsonl(tmp_path / "file" / "a.jsonl", [])


def test_ids_depend_on_content_only() -> None:
    assert content_id("a", {"x": 1, "y": 2}) == content_id("a", {"y": 2, "x": 1})
    assert content_id("ab", "c") != content_id("a", "bc")
    assert content_id("a") == hashlib.blake2b(b'["a"]', digest_size=8).hexdigest()


@pytest.mark.parametrize(
    "row", ['{"text": "a\\ud800"}', '{"\\udc00": 1}', '{"a": [{"b": "\\udfff\\ud83d"}]}']
)
def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 and \\u00e9"}\n' + row + "\n")
    rows = read_jsonl(path)
    assert next(rows) == (1, {"text": "\N{GRINNING FACE} and \u00e9"})
    with pytest.raises(InputError, match=r"rows\.jsonl:2: half a surrogate pair \(\\ud"):
        next(rows)
