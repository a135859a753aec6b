"""Run folders on network file systems, which this machine lacks: the same folder, said to be on one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kinject.disk import is_network, lock_dir, run_folder
from kinject.errors import DiskError


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as one on a network file system."""
    monkeypatch.setattr(run_folder, "is_network", lambda folder: True)
    return tmp_path / "run"


def test_the_type_of_the_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    read = Path.read_text

    def mounted(kind: str) -> None:
        line = f"1 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} server:/home rw\n"
        monkeypatch.setattr(
            Path, "read_text", lambda path, *a, **k: line if path.name == "mountinfo" else read(path, *a, **k)
        )

    for kind, expected in {"nfs4": True, "lustre": True, "fuse.sshfs": True, "ext4": False, "overlay": False}.items():
        mounted(kind)
        assert is_network(tmp_path) is expected


def test_one_process_holds_a_shared_folder_and_leaves_nothing(shared: Path) -> None:
    with lock_dir(shared):
        assert run_folder.is_held(shared)
        with (
            pytest.raises(DiskError, match=f"in use by process {os.getpid()} on .* free 120 s later"),
            lock_dir(shared),
        ):
            pass
    assert not run_folder.is_held(shared)
    assert not [path for path in shared.iterdir() if path.name.startswith((".held", ".clock"))]
    with lock_dir(shared):
        pass


def test_a_holder_without_signs_of_life_is_named_and_passed_over(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared.mkdir()
    heartbeat = shared / ".held"
    heartbeat.write_text("process 7 on elsewhere since 2026-01-01")
    os.utime(heartbeat, (time.time() - 100,) * 2)
    with pytest.raises(DiskError, match="process 7 on elsewhere"), lock_dir(shared):
        pass
    os.utime(heartbeat, (time.time() - 130,) * 2)
    with lock_dir(shared):
        assert f"process {os.getpid()} " in heartbeat.read_text()
    assert "process 7 on elsewhere since 2026-01-01 did not end in order" in caplog.text


def test_a_holder_shows_signs_of_life(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_BEAT", 0.01)
    with lock_dir(shared):
        os.utime(shared / ".held", (0, 0))
        deadline = time.monotonic() + 20
        while not run_folder.is_held(shared) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert run_folder.is_held(shared)
