"""Files that changed after they were finished are refused by name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kinject.disk import check_sha256sums, folder_hash, verified_hashes, write_sha256sums
from kinject.errors import InputError


def test_sums_are_those_of_sha256sum_and_every_change_is_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = {"a.bin": bytes(range(256)), "sub/b.txt": b"two words", "empty": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    write_sha256sums(tmp_path)
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True
    )
    assert check_sha256sums(tmp_path)[1] == ""
    for name, data in files.items():
        for changed in (data + b"x", data[:-1], bytes([data[0] ^ 4]) + data[1:] if data else b"y"):
            if changed != data:
                (tmp_path / name).write_bytes(changed)
                with pytest.raises(
                    InputError,
                    match=f"{tmp_path / name}: its bytes are not those that were written",
                ):
                    verified_hashes(tmp_path)
        (tmp_path / name).unlink()
        assert (
            check_sha256sums(tmp_path)[1]
            == f"{tmp_path / name}: is missing, but SHA256SUMS beside it names it"
        )
        (tmp_path / name).write_bytes(data)
    sums = (tmp_path / "SHA256SUMS").read_text()
    (tmp_path / "SHA256SUMS").write_text(sums.replace("  a.bin", " a.bin"))
    assert check_sha256sums(tmp_path)[1].startswith(f"{tmp_path / 'SHA256SUMS'}:1: damaged")
    longest = "a" * 290  # no file has such a name
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {longest}\n")
    assert check_sha256sums(tmp_path)[1].startswith(f"{tmp_path / longest}: is missing")
    (tmp_path / "SHA256SUMS").unlink()
    assert verified_hashes(tmp_path) == {}


def test_a_folder_is_known_by_names_that_are_no_utf_8_too(tmp_path: Path) -> None:
    seen = {folder_hash(tmp_path)}
    for name in (b"caf\xe9.txt", b"\x80"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("a")
        seen.add(folder_hash(tmp_path))
    assert len(seen) == 3
