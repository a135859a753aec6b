"""pytest --workers runs every test once, reports each, and goes on where a worker dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED = """
import os, time, pytest
from pathlib import Path

@pytest.fixture(scope="module")
def once():
    with Path("made").open("a") as made:
        made.write(f"{os.getpid()}\\n")
    yield

@pytest.mark.parametrize("number", range(3))
def test_shared(once, number):
    assert not number or Path("made").read_text().split() == [str(os.getpid())]
"""
FAULTS = """
import os, sys, pytest

def test_before():
    print("not shown")

def test_dies():
    os.kill(os.getpid(), 9)

def test_fails():
    print("shown with its failure")
    assert 7 == 8

@pytest.fixture
def leaves():
    yield
    raise OSError("the end of a fixture")

def test_ends_badly(leaves): pass
@pytest.mark.skip(reason="no reason")
def test_skipped(): pass
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_every_test_is_run_once_and_a_worker_that_dies_fails_the_test_that_it_ran(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["parallel"]\n')
    (tmp_path / "test_faults.py").write_text(FAULTS)
    (tmp_path / "test_shared.py").write_text(SHARED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--workers", "2", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert re.match("2 failed, 5 passed, 1 skipped,.* 1 error in", lines[-1]), done.stdout
    assert "test_faults.py::test_dies - its process ended in this test, with -9" in done.stdout
    assert "E       assert 7 == 8" in done.stdout
    assert "shown with its failure" in lines
    assert "not shown" not in lines
    assert "OSError: the end of a fixture" in done.stdout
