"""Paid answers: none counts before it is on disk, none is lost."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kinject.errors import DiskError
from kinject.llm.cache import AnswerCache, request_key, stored_usage
from kinject.types import Completion, Usage


def test_a_kill_right_after_an_answer_counted_does_not_lose_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from kinject.llm.cache import AnswerCache\nfrom kinject.types import Completion\n"
        "cache = AnswerCache(Path(sys.argv[1]))\n"
        "for n in range(9):\n"
        "    cache.put(bytes([n]), Completion('x'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "cache.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=dict(os.environ), check=False
    )
    assert done.returncode == -9
    with AnswerCache(path) as cache:
        assert all(cache.get(bytes([n])) for n in range(9))


def test_a_key_depends_on_all_that_shapes_an_answer_and_on_nothing_else() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "ü \ud83d"}]
    identity = {"model": "m", "temperature": 1.0}
    key = request_key(identity, messages, 1)
    assert key == request_key(
        {"temperature": 1.0, "model": "m"}, json.loads(json.dumps(messages)), 1
    )
    others = [
        ({**identity, "model": "n"}, messages, 1),
        (identity, messages[:1], 1),
        (identity, messages, 2),
    ]
    assert len({key, *(request_key(*other) for other in others)}) == 4


def test_a_file_that_is_no_cache_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_text("no database" * 100)
    with pytest.raises(DiskError, match="cannot be read as the cache of answers"):
        AnswerCache(path)


def _filled(path: Path) -> None:
    with AnswerCache(path) as cache:
        for number in range(300):
            cache.put(bytes([number % 256, number // 256]), Completion("b" * 400, "stop", Usage(2)))


@pytest.mark.parametrize("page", [2, 5, 20])
def test_a_damaged_page_is_reported_in_one_line(page: int, tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    _filled(path)
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with (
        AnswerCache(path) as cache,
        pytest.raises(DiskError, match=r"judge.sqlite: cannot be read as .*\.recover"),
    ):
        cache.usage()
    assert stored_usage(path) == Usage()


@pytest.mark.parametrize("change", ["tokens_in = 'many'", "text = x'fe'", "thinking = x'00'"])
def test_an_answer_of_other_types_is_reported(change: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    _filled(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"UPDATE answers SET {change} WHERE key = x'0700'")  # noqa: S608
    with AnswerCache(path) as cache:
        assert cache.get(b"\x08\x00") is not None
        with pytest.raises(DiskError, match="an answer of other types"):
            cache.get(b"\x07\x00")


def test_tokens_beyond_all_numbers_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    _filled(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE answers SET tokens_out = 9e999")
    with AnswerCache(path) as cache, pytest.raises(DiskError, match="cannot be read as"):
        cache.usage()
    assert stored_usage(path) == Usage()
