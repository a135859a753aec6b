"""A process knows its rank and its memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from kinject import process

MIB = 2**20


def test_without_a_launcher_a_process_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (
        process.is_launched(),
        process.rank(),
        process.world_size(),
        process.is_first_process(),
    ) == (
        False,
        0,
        1,
        True,
    )


def test_a_launched_process_has_the_launchers_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (
        process.is_launched(),
        process.rank(),
        process.world_size(),
        process.is_first_process(),
    ) == (
        True,
        3,
        4,
        False,
    )
    monkeypatch.setenv("RANK", "0")
    assert process.is_first_process()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_resident_set_and_its_peak_are_those_of_the_process() -> None:
    before, peak = process.resident_memory(), process.peak_memory()
    assert before is not None
    assert peak >= before > MIB
    assert process.resident_memory(os.getpid()) is not None
    assert process.resident_memory(2**22 + 1) is None  # beyond the largest process id
    # in a process of its own: one that has freed as much memory grows by nothing
    script = (
        "from kinject import process\n"
        "before = process.resident_memory()\n"
        f"block = b'x' * {64 * MIB}\n"
        f"assert process.resident_memory() > before + {32 * MIB}\n"
        "del block\n"
        f"assert process.peak_memory() > before + {32 * MIB}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_process_may_open_more_files_up_to_the_systems_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        process.allow_open_files(50)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (250, hard)
        process.allow_open_files(1 << 40)
        raised, same = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert same == hard
        assert raised == hard or hard == resource.RLIM_INFINITY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
