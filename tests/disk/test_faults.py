"""A disk that refuses: every call of every write, in every way, ends in one line and loses nothing that was stored."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import ERRNOS, FaultyDisk

from kinject.disk import Journal, lock_dir, read_journal, write_json, write_jsonl, write_manifest
from kinject.errors import DiskError


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_a_journal_keeps_every_row_that_it_took_whichever_call_fails(
    tmp_path: Path, number: int, for_good: bool
) -> None:
    def fill(path: Path) -> list[int]:
        taken: list[int] = []
        with Journal(path) as journal:
            for row in range(3):
                journal.append({"id": row})
                taken.append(row)
        return taken

    with FaultyDisk(tmp_path) as counting:
        fill(tmp_path / "all.jsonl")
    assert {"open", "write", "fsync"} <= set(counting.calls)
    for index, call in enumerate(counting.calls):
        if call == "mkdir":  # of a folder that is there: nothing is lost by its refusal
            continue
        path = tmp_path / f"{index}.jsonl"
        message = rf"{index}\.jsonl: cannot be .*{os.strerror(number)}"
        with (
            FaultyDisk(tmp_path, number, index, for_good=for_good),
            pytest.raises(DiskError, match=message),
        ):
            fill(path)
        with Journal(path) as journal:
            stored = [row["id"] for row in journal.rows]
            assert stored == list(range(len(stored)))
            for row in range(len(stored), 3):
                journal.append({"id": row})
        assert [row["id"] for _, row in read_journal(path)] == [0, 1, 2]


def test_a_journal_on_a_disk_that_takes_part_of_a_line_stays_whole(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom kinject.disk import Journal, read_journal\n"
        "from kinject.errors import DiskError\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "for limit in range(0, 50):\n"
        "    path = Path(sys.argv[1]) / f'{limit}.jsonl'\n"
        "    taken = 0\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))\n"
        "    try:\n"
        "        with Journal(path, sync=False) as journal:\n"
        "            for row in range(5): journal.append({'id': row}); taken += 1\n"
        "    except DiskError as error: assert 'File too large' in str(error), error\n"
        "    else: raise AssertionError('it never filled')\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "    assert path.stat().st_size <= limit\n"
        "    assert [row['id'] for _, row in read_journal(path)] == list(range(taken)), limit\n"
        "print('kept')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("kept\n", "")


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_a_file_is_the_old_one_or_the_new_one_whichever_call_fails(
    tmp_path: Path, number: int, for_good: bool
) -> None:
    writers = {
        "a.json": lambda path, new: write_json(path, {"new": new}),
        "b.jsonl": lambda path, new: write_jsonl(path, [{"new": new}] * 3),
        "c/manifest.json": lambda path, new: write_manifest(
            path, stage="s", inputs={}, recipe={}, counts={"new": new}
        ),
    }
    for name, write in writers.items():
        path = tmp_path / name
        write(path, 0)
        old = path.read_bytes()
        with FaultyDisk(tmp_path) as counting:
            write(path, 0)
        for index, call in enumerate(counting.calls):
            if call == "mkdir":
                continue
            path.write_bytes(old)
            with (
                FaultyDisk(tmp_path, number, index, for_good=for_good),
                pytest.raises(DiskError, match=f"{name}: cannot be"),
            ):
                write(path, 1)
            assert path.read_bytes() == old
            if not for_good:
                assert list(path.parent.glob("*.part")) == []


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_locked_is_refused_and_no_lock_is_left(
    tmp_path: Path, number: int
) -> None:
    with FaultyDisk(tmp_path) as counting, lock_dir(tmp_path / "count"):
        pass
    for index, call in enumerate(
        counting.calls[:-1]
    ):  # the last one only empties what is there for people to read
        if index and call == "mkdir":  # of a folder that is there
            continue
        folder = tmp_path / f"{index}"
        with (
            FaultyDisk(tmp_path, number, index),
            pytest.raises(DiskError, match=rf"{folder}.*{os.strerror(number)}"),
        ):
            _hold(folder)
        _hold(folder)


def _hold(folder: Path) -> None:
    with lock_dir(folder):
        pass


HOLD = """
import sys
from pathlib import Path
from kinject.disk import lock_dir
with lock_dir(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_sees_pid_host_and_start_of_the_first_and_a_dead_one_does_not_block(
    tmp_path: Path,
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        message = rf"in use by process {first.pid} on {socket.gethostname()} since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\. "
        with pytest.raises(DiskError, match=message):
            _hold(tmp_path)
    finally:
        first.kill()
        first.communicate()
    _hold(tmp_path)


@pytest.mark.parametrize("change", ["deleted", "renamed", "replaced"])
def test_a_folder_that_vanishes_is_reported_at_the_next_row_and_not_written_into_nothing(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "run" / "a.jsonl"
    with Journal(path) as journal:
        journal.append({"id": 1})
        if change == "renamed":
            path.parent.rename(tmp_path / "other")
        else:
            shutil.rmtree(path.parent)
        if change == "replaced":
            path.parent.mkdir()
            path.write_text("{}\n")
        with pytest.raises(
            DiskError, match=r"a\.jsonl: was deleted or replaced while this run was writing it"
        ):
            journal.append({"id": 2})


@pytest.mark.parametrize("name", ["file", "file/below", "device"])
def test_a_file_is_no_run_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    folder = Path("/dev/null") if name == "device" else tmp_path / name
    with (
        pytest.raises(DiskError, match=f"{folder}: cannot be a run folder: it is a file.*run_dir"),
        lock_dir(folder),
    ):
        pass
    assert (tmp_path / "file").read_text() == "text"
