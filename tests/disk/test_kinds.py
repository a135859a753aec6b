"""What is no file on a disk is refused where it is opened, and no opening waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinject.disk import Journal, check_regular, lock_dir, open_to_read, read_bytes
from kinject.errors import DiskError


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail a test that waits for 5 seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def special(folder: Path) -> Iterator[dict[str, Path]]:
    """Yield one path of each kind that is no file."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link to a pipe").symlink_to("pipe")
    os.chdir(folder)  # the name of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        yield {
            "a folder": folder / "folder", "a pipe": folder / "link to a pipe", "a socket": folder / "socket",
            "a device": Path("/dev/zero"),
        }  # fmt: skip


def test_each_kind_is_named_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with special(tmp_path) as paths:
        for kind, path in paths.items():
            for open_it in (check_regular, open_to_read, read_bytes):
                with pytest.raises(DiskError, match=f"{path}: found {kind}, expected a file"):
                    open_it(path)
            if kind in ("a pipe", "a folder"):
                with pytest.raises(DiskError):
                    Journal(path)
    check_regular(Path(__file__))


def test_a_descriptor_of_a_file_on_disk_is_that_file_and_one_of_a_pipe_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows").write_bytes(b"row\n")
    with (tmp_path / "rows").open("rb") as file:  # as in: kinject ... /dev/stdin < rows
        assert read_bytes(Path(f"/proc/self/fd/{file.fileno()}")) == b"row\n"
    reader, writer = os.pipe()
    with pytest.raises(DiskError, match="found a pipe"):
        read_bytes(Path(f"/proc/self/fd/{reader}"))
    os.close(reader)
    os.close(writer)


def test_a_run_folder_with_a_pipe_or_a_socket_is_refused_and_the_root_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with special(tmp_path):
        (tmp_path / "folder" / "log.jsonl").symlink_to(tmp_path / "pipe")
        expected = r"(pipe|socket): found a (pipe|socket) in the run folder. Remove it"
        with pytest.raises(DiskError, match=expected), lock_dir(tmp_path):
            pass
    monkeypatch.setattr(os, "scandir", None)  # no folder below it is read
    with pytest.raises(DiskError, match="the root of the file system"), lock_dir(Path("/")):
        pass
