"""What the disk's faults say, word for word, and the small rules behind them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from damage import message_of

from kinject.disk import Journal, content_id, file_hash, files, folder_hash, lock_dir, read_jsonl, write_jsonl
from kinject.disk.checksums import check_sha256sums, parse_checked_json, with_checksum
from kinject.disk.database import open_database
from kinject.disk.files import (
    delete_file,
    delete_parts,
    fix_for,
    is_system_failure,
    open_to_read,
    path_exists,
    read_bytes,
    read_lines,
    unreadable,
    unwritable,
    write_json,
)
from kinject.disk.format import check_folder, check_version
from kinject.disk.journal import add_line_checksum, read_journal
from kinject.disk.jsonl import DEEPEST, parse_row
from kinject.disk.run_folder import _read_holder, file_name, refuse_outside_links
from kinject.errors import DiskError

SPACE = "Free space there, or choose another folder."


@pytest.mark.parametrize(
    ("number", "fix", "of_the_world"),
    [
        (errno.ENOSPC, SPACE, True), (errno.EDQUOT, SPACE, True), (errno.EFBIG, SPACE, True),
        (errno.EROFS, "Make it writable for this user, or choose another folder.", True),
        (errno.EIO, "The disk or its connection fails: choose another.", True),
        (errno.ESTALE, "The file server does not answer: wait for it, then run the same command again.", True),
        (errno.EMFILE, "Too many files are open: raise the limit (ulimit -n).", True),
        (errno.EISDIR, "A folder has its name: move it away.", False),
        (errno.ENOENT, "A folder of its path is missing: was it deleted? Run the same command again.", False),
        (errno.EXDEV, "Check the path.", False),
    ],
)  # fmt: skip
def test_each_error_of_the_system_has_its_fix(number: int, fix: str, of_the_world: bool) -> None:
    error = OSError(number, os.strerror(number))
    assert fix_for(error) == fix
    assert is_system_failure(error) is of_the_world
    assert str(unwritable(Path("x"), error)) == f"x: cannot be written: {os.strerror(number)}. {fix}"
    assert str(unwritable(Path("x"), error, "locked")) == f"x: cannot be locked: {os.strerror(number)}. {fix}"
    read = "Check the path." if number == errno.ENOENT else fix.replace("writable", "readable")
    assert str(unreadable(Path("x"), error)) == f"x: cannot be read: {os.strerror(number)}. {read}"


def test_what_is_no_file_cannot_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert message_of(lambda: open_to_read(tmp_path)) == f"{tmp_path}: found a folder, expected a file. Check the path."
    fix = "Save its content as a file and give that: it is read more than once."
    assert message_of(lambda: open_to_read(pipe)) == f"{pipe}: found a pipe, expected a file. {fix}"
    assert message_of(lambda: file_hash(pipe)) == f"{pipe}: found a pipe, expected a file. {fix}"
    assert message_of(lambda: open_to_read(Path("/dev/null"))) == f"/dev/null: found a device, expected a file. {fix}"
    nul = Path("a\0b")
    assert message_of(lambda: open_to_read(nul)).endswith("b: cannot be read: embedded null byte. Check the path.")
    assert not path_exists(nul)
    assert not path_exists(tmp_path / ("x" * 300))
    assert path_exists(pipe)
    big = tmp_path / "big"
    big.write_bytes(b"x" * 1025)
    assert (
        message_of(lambda: read_bytes(big, 1024)) == f"{big}: longer than 1 KiB, the most that is read whole. Split it."
    )
    assert read_bytes(big, 1025) == b"x" * 1025


def test_a_disk_that_fails_while_a_file_is_hashed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", fail)
    (tmp_path / "x").write_text("")
    fix = "The disk or its connection fails: choose another."
    assert (
        message_of(lambda: file_hash(tmp_path / "x")) == f"{tmp_path / 'x'}: cannot be read: Input/output error. {fix}"
    )


def test_a_file_is_removed_once_and_a_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("")
    delete_file(path)
    delete_file(path)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(DiskError) as caught:
        delete_file(path)
    assert str(caught.value).startswith(f"{path}: cannot be deleted: ")
    assert isinstance(caught.value.__cause__, OSError)


def test_parts_of_killed_writers_go_but_not_those_of_folders_that_others_hold(tmp_path: Path) -> None:
    kept = [".x.part.json", "x.part", ".lock"]
    for name in [*kept, ".x.1.part", "below/.y.2.part", "held/.z.3.part", "held/.lock"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    delete_parts(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, "held/.z.3.part", "held/.lock"}


def test_links_inside_a_folder_stay_and_those_that_lead_out_are_refused(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "below").mkdir(parents=True)
    outside.mkdir()
    (run / "file").write_text("")
    (run / "below" / "inner").symlink_to(run / "file")
    (tmp_path / "name").symlink_to(run)
    refuse_outside_links(run)
    refuse_outside_links(tmp_path / "name")
    (run / "below" / "out").symlink_to(outside)
    expected = "a link that leads out of the run folder. Remove it, or give its target as run_dir."
    assert message_of(lambda: refuse_outside_links(run)) == f"{run / 'below' / 'out'}: {expected}"
    assert message_of(lambda: lock_dir(run).__enter__()) == f"{run / 'below' / 'out'}: {expected}"


@pytest.mark.parametrize(("name", "like"), [("X_X/", "X_X"), ("=@+-_X", "X"), ("X-/_", "X")])
def test_names_lose_what_stands_around_them_and_nothing_else(name: str, like: str) -> None:
    assert file_name(name).rsplit("-", 1)[0] == like


def test_versions_of_formats_are_refused_word_for_word(tmp_path: Path) -> None:
    check_version(1, "x")
    other = "choose another run folder."
    assert message_of(lambda: check_version(True, "x")) == (
        f"x: damaged: format_version is True, a whole number from 1 is needed. Restore it from a copy, or {other}"
    )
    assert message_of(lambda: check_version(99, "x")) == (
        f"x: written by a newer kinject (format 99; this one reads up to 1). Update kinject, or {other}"
    )
    assert check_folder(tmp_path) is False
    (tmp_path / ".format.json").write_text('{"format_version": 1}')
    assert check_folder(tmp_path) is True
    with contextlib.closing(open_database(tmp_path / "a.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)


def test_sealed_objects_say_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert (
        message_of(lambda: parse_checked_json(path, b"[1]", "Cure."))
        == f"{path}: damaged: found list, an object is needed. Cure."
    )
    assert message_of(lambda: parse_checked_json(path, b'{"format_version": 99}', "")).startswith(
        f"{path}: written by a newer kinject"
    )
    assert parse_checked_json(path, b'{"format_version": 1}', "") == {"format_version": 1}


def test_rows_of_journals_say_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "below" / "rows.jsonl"
    with Journal(path) as journal:
        offsets = [journal.append(row) for row in ({"a": 1}, {}, {"a": 1, "crc32": "x"}, {"a": "é"})]
        assert [journal.row_at(offset) for offset in offsets] == [{"a": 1}, {}, {"a": 1, "crc32": "x"}, {"a": "é"}]
    assert [row for _, row in read_journal(path)] == [{"a": 1}, {}, {"a": 1, "crc32": "x"}, {"a": "é"}]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"a": 1', b'"a": 2', 1))
    damaged = "damaged: its bytes are not those that were written (crc32)."
    assert message_of(lambda: list(read_journal(path))) == f"{path}:1: {damaged} Run what wrote it again."
    assert message_of(lambda: Journal(path)) == f"{path}:1: {damaged} Delete this line; its row is made again."
    assert message_of(lambda: Journal(path, fix="Mend it.")) == f"{path}:1: {damaged} Mend it."
    path.write_bytes(whole)
    with Journal(path) as journal:
        path.write_bytes(whole.replace(b'"a": 1', b'"a": 2', 1))
        first = f"{path}: byte 0: {damaged} Delete this line; its row is made again."
        assert message_of(lambda: journal.row_at(0)) == first
        path.unlink()
        message = (
            f"{path}: was deleted or replaced while this run was writing it. Leave run folders alone while they are in use; "
            "the same command makes again what is missing."
        )
        assert message_of(lambda: journal.append({})) == message
    assert add_line_checksum(b"{}") == b'{"crc32": "%08x"}' % zlib.crc32(b"{}")


def test_a_row_is_as_deep_as_it_may_be_and_no_deeper(tmp_path: Path) -> None:
    def nested(levels: int) -> bytes:
        inner: Any = 1
        for level in range(levels - 1):
            inner = [inner] if level % 2 else {"a": inner}
        return json.dumps({"b": [[]] * 80, "a": inner}).encode()

    assert parse_row(nested(DEEPEST), "x")["b"] == [[]] * 80
    expected = f"x: nested more than {DEEPEST} levels deep. Each line must hold one plain JSON object."
    assert message_of(lambda: parse_row(nested(DEEPEST + 1), "x")) == expected
    assert write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}, {"a": 2}, {"a": 3}]) == 3
    assert write_jsonl(tmp_path / "none.jsonl", []) == 0
    assert [row["a"] for _, row in read_jsonl(tmp_path / "rows.jsonl")] == [1, 2, 3]


def test_a_lock_says_who_and_a_lock_that_says_nothing_is_another_process(tmp_path: Path) -> None:
    with lock_dir(tmp_path):
        lock = tmp_path / ".lock"
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        assert lock.read_text().endswith("+00:00")
        holder = lock.read_text()
        tail = "Wait for it or choose another run folder."
        assert message_of(lambda: lock_dir(tmp_path).__enter__()) == f"{tmp_path}: in use by {holder}. {tail}"
        os.truncate(lock, 0)
        assert message_of(lambda: lock_dir(tmp_path).__enter__()) == f"{tmp_path}: in use by another process. {tail}"
    lock.write_bytes(b"pro\xffcess 1 \x1b[31m on\n elsewhere since then, which is longer")
    with lock.open("rb") as file:
        assert _read_holder(file.fileno()) == "pro\ufffdcess 1 [31m on elsewhere since then, which is longer"
    with lock_dir(tmp_path):  # what is longer than what comes leaves nothing behind
        assert lock.read_text().endswith("+00:00")


def test_another_machines_process_that_did_not_end_in_order_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".lock").write_text("process 1 on elsewhere since then")
    with lock_dir(tmp_path):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: process 1 on elsewhere since then did not end in order. Should it still run there, end one of the two: "
        "this file system may not share locks between machines."
    ]


def test_sums_that_are_no_text_are_damaged_and_known_hashes_are_believed(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\n")
    assert check_sha256sums(tmp_path) == ({}, f"{tmp_path / 'SHA256SUMS'}:1: damaged: no hash and name of a file")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("x")
    right = folder_hash(folder)
    assert folder_hash(folder, known={"a": file_hash(folder / "a")}) == right
    assert folder_hash(folder, known={"a": "0" * 64}) != right


@pytest.mark.parametrize("n_whole", [0, 1, 10, 65526, 65536, 65537, 140_000])
@pytest.mark.parametrize("n_torn", [0, 1, 65535, 65536, 65537, 140_000])
def test_a_torn_tail_is_cut_after_the_last_newline_however_long(tmp_path: Path, n_whole: int, n_torn: int) -> None:
    path = tmp_path / "rows.jsonl"
    whole = b"" if n_whole == 0 else b" " * (n_whole - 1) + b"\n"
    path.write_bytes(whole + b"x" * n_torn)
    with Journal(path):
        pass
    assert path.read_bytes() == whole


def test_a_journal_that_cannot_be_opened_or_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.mkdir()
    assert message_of(lambda: Journal(path)).startswith(
        f"{path}: cannot be opened for writing: Is a directory. A folder has its name"
    )


def test_a_disk_that_fails_while_a_file_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def read(self, n: int) -> bytes:
            assert n == 2**20
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "open_to_read", lambda _: contextlib.nullcontext(Failing()))
    fix = "The disk or its connection fails: choose another."
    assert message_of(lambda: read_bytes(tmp_path)) == f"{tmp_path}: cannot be read: Input/output error. {fix}"


def test_json_is_written_for_people_and_holds_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": ["é", 1]})
    assert path.read_bytes() == '{\n  "a": [\n    "é",\n    1\n  ]\n}\n'.encode()
    for broken in ({"a": float("nan")}, {"a": float("-inf")}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(path, broken)
        with pytest.raises(ValueError, match="not JSON compliant"):
            with_checksum(broken)
    assert content_id("\ud800") != content_id("\ud801")  # halves of pairs, which a document may hold


def test_a_line_is_as_long_as_it_may_be_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1024)
    path = tmp_path / "x"
    path.write_bytes(b"x" * 1023 + b"\n" + b"x" * 1024)
    assert [len(line) for _, line in read_lines(path)] == [1024, 1024]
    path.write_bytes(b"\n" + b"x" * 1025)
    message = f"{path}:2: a line longer than 1 KiB. Split the document, one row each."
    assert message_of(lambda: list(read_lines(path))) == message

    class Failing:
        def readline(self, n: int) -> bytes:
            assert n == 1025  # one byte more tells that there is more
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "open_to_read", lambda _: contextlib.nullcontext(Failing()))
    fix = "The disk or its connection fails: choose another."
    assert message_of(lambda: list(read_lines(path))) == f"{path}: cannot be read: Input/output error. {fix}"


@pytest.mark.parametrize(
    ("text", "key"),
    [('{"answer": 0, "answer": 1}', "'answer'"), ('{"a": 1, "b": [{"k" : 1, "k": 1}]}', "'k'"),
     ('{"text": "x", "t\\u0065xt": "y"}', "'text'"), ('{"": 1, "": 2}', "''")],
)  # fmt: skip
def test_an_object_that_holds_a_key_twice_is_refused_with_its_line(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": {"b": 1}, "b": [{"b": 1}, {"b": 2}]}\n' + text + "\n", encoding="utf-8")
    message = message_of(lambda: list(read_jsonl(path)))
    assert message == f"{path}:2: the key {key} is there 2 times in one object. Keep one."
    assert f"the key {key} is there 2 times" in message_of(lambda: parse_checked_json(path, text.encode(), "Fix."))
