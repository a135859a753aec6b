"""A process knows its rank and its memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kinject import process
from kinject.errors import InputError

MIB = 2**20


def test_without_a_launcher_a_process_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (process.is_launched(), process.rank(), process.world_size(), process.is_first_process()) == (
        False,
        0,
        1,
        True,
    )


def test_a_launched_process_has_the_launchers_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (process.is_launched(), process.rank(), process.world_size(), process.is_first_process()) == (
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
    assert process.resident_memory(os.getpid()) == pytest.approx(before, rel=0.1)
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


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the environment by one of the test's own."""
    values: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", values)
    return values


@pytest.mark.parametrize("value", ["two", "-1", "0.5", "9" * 30, "\u0663", "1e3", "0x2"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"])
def test_a_variable_that_is_no_number_is_refused_by_name(name: str, value: str, environ: dict[str, str]) -> None:
    environ[name] = value
    with pytest.raises(InputError, match=rf"variable {name}: found .*, expected a whole number\. .* unset it\.$"):
        process.check_environment()


@pytest.mark.parametrize(
    "values", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "3", "WORLD_SIZE": "4"}, {"OMP_NUM_THREADS": "4,2"}]
)
def test_values_of_launchers_and_users_are_kept(values: dict[str, str], environ: dict[str, str]) -> None:
    environ.clear()
    environ.update(values)
    process.check_environment()
    assert environ == values


def test_an_empty_variable_counts_as_not_set(environ: dict[str, str]) -> None:
    environ.clear()
    environ.update({"RANK": "", "WORLD_SIZE": " ", "OMP_NUM_THREADS": "", "LANG": ""})
    process.check_environment()
    assert environ == {"LANG": ""}


@pytest.mark.parametrize(
    "values", [{"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": ""}, {"RANK": "2", "WORLD_SIZE": "2"}]
)
def test_a_rank_without_a_world_or_beyond_it_is_refused(values: dict[str, str], environ: dict[str, str]) -> None:
    environ.clear()
    environ.update(values)
    with pytest.raises(InputError, match="RANK and WORLD_SIZE"):
        process.check_environment()
