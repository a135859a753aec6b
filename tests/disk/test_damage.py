"""Bits that flip on disk: each is noticed where it stands, whatever still parses."""

from __future__ import annotations

import json
import random
import subprocess
import zlib
from pathlib import Path

import pytest

from kinject.disk import (
    Journal,
    check_output,
    check_sha256sums,
    folder_hash,
    read_checked_json,
    read_journal,
    read_manifest,
    write_checked_json,
    write_manifest,
    write_sha256sums,
)
from kinject.disk.checksums import verified_hashes
from kinject.errors import InputError

ROWS = [{"id": "a", "text": "born in 1987"}, {"id": "b", "text": "é"}, {"id": "c"}]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    with Journal(path, sync=False) as journal:
        for row in ROWS:
            journal.append(row)
    return path


def test_a_line_ends_in_the_crc_of_what_other_tools_see_without_it(journal: Path) -> None:
    for line, row in zip(journal.read_text("utf-8").splitlines(), ROWS, strict=True):
        body = json.dumps(row, ensure_ascii=False)
        assert line == body[:-1] + f', "crc32": "{zlib.crc32(body.encode()):08x}"}}'
        assert json.loads(line) == {**row, "crc32": f"{zlib.crc32(body.encode()):08x}"}


def test_no_flipped_bit_of_a_journal_gives_another_row(journal: Path) -> None:
    whole = journal.read_bytes()
    refused = unnamed = 0
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        journal.write_bytes(data)
        try:
            list(read_journal(journal))
        except InputError as error:
            refused += 1
            number = whole[: bit // 8].count(b"\n") + 1
            unnamed += not str(error).startswith((f"{journal}:{number}: ", f"{journal}:{number + 1}: "))
    assert refused == len(whole) * 8
    assert unnamed == 0


def test_an_opened_journal_with_a_flipped_bit_is_refused_or_loses_its_torn_last_line(journal: Path) -> None:
    whole = journal.read_bytes()
    rng, unnamed = random.Random(0), 0
    for _ in range(300):
        bit = rng.randrange(len(whole) * 8)
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        journal.write_bytes(data)
        try:
            with Journal(journal, sync=False) as opened:
                rows = opened.rows
        except InputError as error:
            unnamed += str(journal) not in str(error) or "Delete this line" not in str(error)
        else:
            shown = [{key: row.get(key) for key in wanted} for row, wanted in zip(rows, ROWS, strict=False)]
            assert shown in (ROWS, ROWS[:-1])
    assert unnamed == 0


def test_a_row_read_by_its_place_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, sync=False) as journal:
        offset = journal.append({"text": "born in 1987"})
        path.write_bytes(path.read_bytes().replace(b"1987", b"1986"))
        with pytest.raises(InputError, match=r"a\.jsonl: byte 0: damaged: its bytes are not those that were written"):
            journal.row_at(offset)


@pytest.mark.parametrize("line", ['{"id": 4}', "{}", '{"id": 2, "more": {"x": []}}'])
def test_a_line_without_its_checksum_is_damaged(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append({"id": 3})
        journal.append({})
    assert [row for _, row in read_journal(path)] == [{"id": 3}, {}]
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError, match=r"a\.jsonl:3: damaged: its crc32 is missing"):
        list(read_journal(path))


def test_no_flipped_bit_of_a_manifest_gives_another_value(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, stage="train", inputs={"a": "1"}, recipe={"x": [1e-5, None]}, counts={"loss": 1.25, "n": 3})
    wanted, whole = read_manifest(path), path.read_bytes()
    rng = random.Random(0)
    seen = {"same": 0, "refused": 0, "without a cure": 0}
    for index in range(len(whole)):
        data = bytearray(whole)
        data[index] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            manifest = read_manifest(path)
        except InputError as error:
            cured = f"{path}: " in str(error) and "Delete it and run the same command again" in str(error)
            seen["refused" if cured else "without a cure"] += 1
        else:  # space for space, or the name of the checksum alone
            assert manifest is not None
            assert {key: manifest[key] for key in wanted or {}} == wanted
            seen["same"] += 1
    assert seen["refused"] > 10 * seen["same"]
    assert seen["without a cure"] == 0


@pytest.mark.parametrize("value", [{1: "a", 10: "b", 9: "c"}, {"x": (1, 2.5)}, {"é": {"b": 1, "a": None}}, {}])
def test_a_checked_object_comes_back_as_json_gives_it(tmp_path: Path, value: dict[object, object]) -> None:
    write_checked_json(tmp_path / "a.json", value)  # type: ignore[arg-type]
    assert read_checked_json(tmp_path / "a.json", "") == json.loads(json.dumps(value))


def test_an_object_without_a_checksum_is_read_and_other_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_checked_json(path, "") == {"a": 1}
    for text in ("", "[1]", "7", '{"a": NaN, "crc32": "0"}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(InputError, match=rf"{path}: damaged: .* Make it again\."):
            read_checked_json(path, "Make it again.")


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
