"""Files that changed after they were finished are refused by name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kinject.disk import (
    check_output,
    check_sha256sums,
    folder_hash,
    read_json,
    verified_hashes,
    write_manifest,
    write_sha256sums,
)
from kinject.errors import InputError


@pytest.mark.parametrize(("text", "message"), [
    ("{", "damaged: not JSON"), ("[1]", "damaged: found list, an object is needed. Fix."),
    ('{"a": 1, "a": 2}', "the key 'a' is there 2 times"),
    ('{"format_version": 99}', "written by a newer kinject"), ('{"format_version": "1"}', "damaged: format_version is '1'"),
])  # fmt: skip
def test_a_file_that_is_no_object_of_this_version_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        read_json(path, "Fix.")
    path.write_text('\ufeff{"format_version": 1}')
    assert read_json(path, "") == {"format_version": 1}


def test_sums_are_those_of_sha256sum_and_every_change_is_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = {"a.bin": bytes(range(256)), "sub/b.txt": b"two words", "empty": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    write_sha256sums(tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)
    assert check_sha256sums(tmp_path)[1] == ""
    assert folder_hash(tmp_path, "*.bin", verified_hashes(tmp_path)) == folder_hash(tmp_path, "*.bin")
    for name, data in files.items():
        for changed in (data + b"x", data[:-1], bytes([data[0] ^ 4]) + data[1:] if data else b"y"):
            if changed != data:
                (tmp_path / name).write_bytes(changed)
                with pytest.raises(InputError, match=f"{tmp_path / name}: its bytes are not those that were written"):
                    verified_hashes(tmp_path)
        (tmp_path / name).unlink()
        assert check_sha256sums(tmp_path)[1] == f"{tmp_path / name}: is missing, but SHA256SUMS beside it names it"
        (tmp_path / name).write_bytes(data)
    sums = (tmp_path / "SHA256SUMS").read_text()
    (tmp_path / "SHA256SUMS").write_text(sums.replace("  a.bin", " a.bin"))
    assert check_sha256sums(tmp_path)[1].startswith(f"{tmp_path / 'SHA256SUMS'}:1: damaged")
    (tmp_path / "SHA256SUMS").unlink()
    assert verified_hashes(tmp_path) == {}


def test_a_finished_file_is_held_to_the_manifest_beside_it_and_a_users_own_is_not(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "born in 1987"}\n')
    alone = check_output(path, "")
    for foreign in ("[1, 2]", '{"start_url": "/"}'):
        (tmp_path / "manifest.json").write_text(foreign)
        assert check_output(path, "") == alone
    write_manifest(
        tmp_path / "manifest.json", stage="augment", inputs={}, recipe={}, counts={}, outputs=["corpus.jsonl"]
    )
    assert check_output(path, "") == alone
    path.write_text('{"text": "born in 1986"}\n')
    with pytest.raises(InputError, match=r"corpus\.jsonl: its bytes are not those that were written .* Do so\."):
        check_output(path, "Do so.")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    check_output(tmp_path / "mine.jsonl", "")
