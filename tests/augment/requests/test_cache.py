"""Paid answers: none counts before it is on disk, none is lost."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kinject.errors import DiskError
from kinject.llm.cache import AnswerCache, request_key
from kinject.types import Completion, Usage


def n_rows(path: Path) -> int:
    """Count the answers as another process would see them."""
    with sqlite3.connect(path) as database:
        return int(database.execute("SELECT count(*) FROM answers").fetchone()[0])


def answer(number: int) -> Completion:
    return Completion(f"text {number}", "stop", Usage(number, 2 * number))


def test_answers_that_come_together_are_on_disk_when_any_of_them_counts(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    seen: list[int] = []

    async def keep(cache: AnswerCache, number: int) -> None:
        await cache.keep(bytes([number]), answer(number))
        seen.append(n_rows(path))

    async def run() -> None:
        with AnswerCache(path) as cache:
            await asyncio.gather(*(keep(cache, number) for number in range(20)))
            assert [cache.get(bytes([number])) for number in range(20)] == [answer(number) for number in range(20)]

    asyncio.run(run())
    assert seen == [20] * 20  # one transaction, and nobody went on before it


def test_answers_that_wait_when_the_run_ends_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        with AnswerCache(tmp_path / "cache.sqlite") as cache:
            waiting = asyncio.ensure_future(cache.keep(b"k", answer(1)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert n_rows(tmp_path / "cache.sqlite") == 1


def test_a_kill_right_after_an_answer_counted_does_not_lose_it(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal, sys\nfrom pathlib import Path\n"
        "from kinject.llm.cache import AnswerCache\nfrom kinject.types import Completion\n"
        "async def run():\n"
        "    with AnswerCache(Path(sys.argv[1])) as cache:\n"
        "        await asyncio.gather(*(cache.keep(bytes([n]), Completion('x')) for n in range(9)))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(run())\n"
    )
    path = tmp_path / "cache.sqlite"
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=dict(os.environ), check=False)
    assert done.returncode == -9
    with AnswerCache(path) as cache:
        assert len(cache) == 9


def test_every_answer_of_a_transaction_that_fails_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"

    async def run() -> list[object]:
        with AnswerCache(path) as cache:
            await cache.keep(b"a", answer(1))
            with sqlite3.connect(path) as other:
                other.execute("DROP TABLE answers")
            kept = [cache.keep(bytes([n]), answer(n)) for n in range(3)]
            return list(await asyncio.gather(*kept, return_exceptions=True))

    results = asyncio.run(run())
    assert len(results) == 3
    assert all(isinstance(error, DiskError) and "What was stored so far is safe" in str(error) for error in results)


def test_a_key_depends_on_all_that_shapes_an_answer_and_on_nothing_else() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "ü \ud83d"}]
    identity = {"model": "m", "temperature": 1.0}
    key = request_key(identity, messages, 1)
    assert key == request_key({"temperature": 1.0, "model": "m"}, json.loads(json.dumps(messages)), 1)
    others = [({**identity, "model": "n"}, messages, 1), (identity, messages[:1], 1), (identity, messages, 2)]
    assert len({key, *(request_key(*other) for other in others)}) == 4


def test_a_file_that_is_no_cache_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_text("no database" * 100)
    with pytest.raises(DiskError, match="cannot be opened as the cache of answers"):
        AnswerCache(path)
