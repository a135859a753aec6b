"""Paid answers: none counts before it is on disk, none is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kinject.errors import DiskError
from kinject.llm.cache import AnswerCache, request_key


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
    with pytest.raises(DiskError, match="cannot be opened as the cache of answers"):
        AnswerCache(path)
