"""One writer a folder where flock is not shared between machines: two processes, whose flock does nothing."""

import contextlib
import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinject.disk import lock_dir, run_folder
from kinject.errors import DiskError

HOLDER = """
import sys, time
from pathlib import Path
from kinject.disk import lock_dir, run_folder
run_folder.fcntl.flock = lambda *_: None
run_folder.socket.gethostname = lambda: "node-1"
run_folder._LEASE = 0.35
with lock_dir(Path(sys.argv[1])):
    print("held", flush=True)
    if sys.argv[2:] != ["briefly"]:
        time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of another machine than HOLDER's."""
    monkeypatch.setattr(run_folder.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "node-2")
    return tmp_path / "run"


@contextlib.contextmanager
def hold(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder when the block begins."""
    command = [sys.executable, "-c", HOLDER, str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_another_machine_holds_is_refused_and_taken_over_after_its_death(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(folder) as holder:
        # Longer than any load: what ends the wait is the renewal that is seen.
        monkeypatch.setattr(run_folder, "_LEASE", 600.0)
        monkeypatch.setattr(run_folder, "sleep", lambda _: None)
        found = rf"in use by process {holder.pid} on node-1 .*renewed"
        with pytest.raises(DiskError, match=found), lock_dir(folder):
            pass
    monkeypatch.setattr(run_folder, "_LEASE", 0.5)
    with lock_dir(folder):
        assert " on node-2 since " in (folder / ".lock").read_text()
    assert "did not release it" in caplog.text


@pytest.mark.parametrize("wait", [False, True])
def test_a_file_system_without_locks_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    with pytest.raises(DiskError, match="lock: cannot be locked"), lock_dir(folder, wait=wait):
        pass


def test_a_folder_that_was_released_is_taken_at_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(folder, "briefly") as holder:
        holder.wait()
    with lock_dir(folder):
        pass
    assert caplog.text == ""


def test_a_process_whose_folder_was_taken_ends(folder: Path) -> None:
    with hold(folder) as holder:
        # Again and again: a renewal that had begun may write over the other's name once.
        while holder.poll() is None:
            (folder / ".lock").write_text("process 7 on node-3 since today")
            time.sleep(0.02)
    assert holder.returncode == -signal.SIGTERM


@pytest.mark.parametrize("torn", ["p", "process 41 on nod", "process 41 on node-1 since "])
def test_a_name_that_a_full_disk_cut_is_nobodys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, torn: str
) -> None:
    monkeypatch.setattr(run_folder, "sleep", lambda _: pytest.fail("it waits"))
    folder.mkdir()
    (folder / ".lock").write_text(torn)
    with lock_dir(folder):
        assert " on node-2 since " in (folder / ".lock").read_text()
