"""Names of files made from anything, and sizes in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.disk import content_id, lock_dir, refuse_outside_links
from kinject.disk.files import format_size
from kinject.disk.run_folder import file_name
from kinject.errors import DiskError


@pytest.mark.parametrize("name", ["base", "arm-1", "a b.c+d=e@f", "é", "0", "x" * 100, "contents"])
def test_a_plain_word_is_its_own_file_name(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("a/b", "a_b"), ("../up", "up"), (" padded ", "padded"), ("-x=", "x"), ("...", "name"), ("", "name"),
        ("a\0b\nc", "a_b_c"),
        ("ends.", "ends"), ("_low_", "low"),
        ("x" * 101, "x" * 100), ("é" * 60, "é" * 50), ("a" + "é" * 60, "a" + "é" * 49),
    ],
)  # fmt: skip
def test_any_other_name_becomes_its_like_with_a_hash(name: str, like: str) -> None:
    assert file_name(name) == f"{like}-{content_id(name)[:8]}"


@pytest.mark.parametrize(
    ("n", "words"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1024 KiB"), (2**20, "1 MiB"),
     (64 << 20, "64 MiB"), (2**30, "1 GiB"), (3 << 29, "1.5 GiB")],
)  # fmt: skip
def test_sizes_are_written_in_the_largest_unit_that_fits(n: int, words: str) -> None:
    assert format_size(n) == words


@pytest.mark.parametrize("name", ["a\0b", "round", "round/inner"])
def test_a_run_folder_that_no_path_can_lead_to_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(DiskError), lock_dir(tmp_path / name):
        pass
    refuse_outside_links(tmp_path / "round")  # nothing is below it
