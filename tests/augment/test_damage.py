"""A run folder of augment that the disk has damaged: the rerun comes to the same corpus and counts, or names the file."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyDisk

from kinject.augment import augment
from kinject.errors import DiskError, KinjectError
from kinject.llm.cache import AnswerCache
from kinject.recipe import Recipe
from kinject.types import Completion, Usage

MakeRecipe = Callable[..., Recipe]


def outcome(recipe: Recipe) -> Any:
    """What a run comes to, whatever was stored before (but for the cost: that of the answers in the cache)."""
    result = augment(recipe)
    counts = (
        result.asked,
        result.got,
        dict(result.refused),
        result.tokens_in,
        result.tokens_out,
        result.short,
    )
    return counts, result.corpus_path.read_bytes()


def test_what_was_deleted_is_written_again_from_the_cache(
    make_recipe: MakeRecipe, serving: Callable[..., Any], tmp_path: Path
) -> None:
    server = serving(faults={"echo": 0.2}, by_request=True)
    recipe = make_recipe(server.url)
    wanted, n_requests = outcome(recipe), server.n_requests
    for name in ("variants", "rejected", "notes"):
        (tmp_path / "run" / f"{name}.jsonl").unlink()
    assert (outcome(recipe), server.n_requests) == (wanted, n_requests)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "cache.sqlite"
    with AnswerCache(path) as cache:
        for index in range(40):
            cache.put(_key(index), Completion(_text(index), "stop", Usage(100 + index, 10)))
    return path


def _key(index: int) -> bytes:
    return random.Random(index).randbytes(16)


def _text(index: int) -> str:
    return f"Arden, born in {1900 + index}, é. " * (1 + index % 7 * 12)


def test_a_cache_that_was_deleted_under_a_run_is_reported_at_the_next_answer(filled: Path) -> None:
    with AnswerCache(filled) as cache:
        for other in filled.parent.glob("cache.sqlite*"):
            other.unlink()
        with pytest.raises(DiskError, match=r"cache\.sqlite: cannot be written"):
            cache.put(_key(50), Completion("x", "stop", Usage()))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_run_continues_to_the_same_corpus_after_any_call_was_refused(
    make_recipe: MakeRecipe, tmp_path: Path, number: int
) -> None:
    recipe = make_recipe()
    with FaultyDisk(tmp_path / "run") as counting:
        wanted = outcome(recipe)
    n_calls = len(counting.calls)
    assert n_calls > 50
    rng = random.Random(number)
    for index in sorted(rng.sample(range(n_calls), 6)):
        shutil.rmtree(tmp_path / "run")
        with FaultyDisk(tmp_path / "run", number, index, for_good=True):
            try:
                augment(recipe)
            except KinjectError as error:
                message = str(error)
            else:
                message = "done"
        last = counting.calls[index:]
        assert os.strerror(number) in message or (
            message == "done" and set(last) <= {"ftruncate", "mkdir"}
        ), (
            index,
            message,
        )
        assert outcome(recipe) == wanted


FILL = """
import resource, signal, sys
from kinject.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # it would be cut off, too
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
sys.exit(main(["augment", sys.argv[1]]))
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="files are limited",
)
def test_a_disk_that_fills_ends_augment_with_a_line_and_code_2_and_nothing_is_paid_twice(
    make_recipe: MakeRecipe, serving: Callable[..., Any], tmp_path: Path
) -> None:
    running = serving()
    recipe = make_recipe(running.url)
    command = [sys.executable, "-c", FILL, str(recipe.path)]
    done = subprocess.run([*command, "9000"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert f"{tmp_path / 'run'}" in line
    assert "same command then resumes" in line or "Free space" in line
    augment(recipe)
    assert running.n_requests <= 36 + 8  # those whose answer found no room any more
