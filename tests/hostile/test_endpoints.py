"""Drawn answers of an endpoint that no standard allows: a run ends, costs no less than nothing, and a rerun completes it.

KINJECT_DRAWS (60) answers are drawn, all in one run of a generator that answers well otherwise.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from endpoints import recipe_of, serving
from faulty_server import Hostile, Talk

from kinject.cli import main
from kinject.disk import read_jsonl, read_manifest

_BATCH = 60
Act = Callable[[Talk], bool]

STATUSES = (
    100,
    199,
    204,
    206,
    208,
    299,
    400,
    406,
    408,
    409,
    418,
    422,
    425,
    429,
    429,
    429,
    451,
    500,
    502,
    503,
    503,
    504,
    529,
    599,
)
WAITS: tuple[Callable[[random.Random], str], ...] = (
    lambda draw: str(-draw.randrange(10**9)), lambda draw: str(draw.randrange(10**12)), lambda draw: f"{draw.random():.9f}",
    lambda draw: formatdate(draw.randrange(10**9), usegmt=True),
    lambda draw: formatdate(4e9 + draw.randrange(10**9), usegmt=True),
    lambda draw: draw.choice(["soon", "", " ", "1e9", "inf", "NaN", "0x10", "1_0", "9" * 4000, "-0", "5, 5", "\xb2", "1 year"]),
)  # fmt: skip
USAGES: tuple[Any, ...] = (
    None, [], "many", 5, {}, {"prompt_tokens": -(10**9), "completion_tokens": -1}, {"prompt_tokens": float("nan")},
    {"prompt_tokens": float("-inf"), "completion_tokens": 1e300}, {"prompt_tokens": "7"}, {"prompt_tokens": {"a": 1}},
    {"prompt_tokens": True, "completion_tokens": 10**30},
)  # fmt: skip
BODIES = (
    b"", b" ", b"null", b"0", b"[]", b"{}", b'"text"', b"<html><h1>Log in</h1>", b'{"choices": []}', b'{"choices": {}}',
    b'{"choices": [null]}', b'{"choices": [[]]}', b'{"choices": "abc"}', b'{"choices": [{"message": 5}]}', b'{"error": null}',
    b'{"error": {"code": 429}}', b'{"error": "overloaded"}', b'{"error": {"status": "RESOURCE_EXHAUSTED"}}', b"\xff\xfe{\x00",
    b'{"error": {"code": 1e400}}', b'{"object": "error", "code": 503}', b'{"error": [{"code": 429}]}', b"NaN",
    b'{"choices": [{"message": {"content": "a"}, "finish_reason": 5}], "error": 5}', b'{"choices": [{"error": {"code": []}}]}',
)  # fmt: skip


def drawn(draw: random.Random) -> Act:
    """Return what a server does to one request."""
    wait, usage, body = draw.choice(WAITS)(draw), draw.choice(USAGES), draw.choice(BODIES)
    status, size = draw.choice(STATUSES), draw.randrange(200)

    def head(talk: Talk, headers: str, content: bytes, status: int = 200) -> bool:
        talk.close_connection = True
        return talk.raw(f"HTTP/1.1 {status} As Drawn\r\n{headers}\r\n".encode("latin-1") + content)

    def refuse(talk: Talk) -> bool:
        return head(talk, f"retry-after: {wait}\r\nconnection: close\r\n", body, status)

    def miscount(talk: Talk) -> bool:
        return head(talk, f"content-length: {draw.choice([size, -size, '1e3', '', '7, 8'])}\r\n", talk.completion())

    def bad_chunks(talk: Talk) -> bool:
        chunks = draw.choice(
            [b"zz\r\n{}\r\n0\r\n\r\n", b"ffffffffffffffff\r\n{}", b"-1\r\n", b"2\r\n{}", b"2\r\n{}\r\n0"]
        )
        return head(talk, "transfer-encoding: chunked\r\n", chunks)

    def drop(talk: Talk) -> bool:
        """Answer well, promise to keep the connection alive, and reset it."""
        talk.say(200, talk.completion(), connection="keep-alive", keep_alive="timeout=600")
        return talk.reset()

    acts: list[Act] = [
        refuse, refuse, miscount, bad_chunks, drop, lambda talk: talk.say(200, body), lambda talk: talk.say(200, body),
        lambda talk: talk.say(200, talk.completion(lambda value: value.update(usage=usage))),
        lambda talk: talk.say(200, talk.completion(lambda value: value.update(choices=[], model=wait))),
        lambda talk: talk.say(200, talk.completion(lambda value: value.update(model=draw.choice(["gpt-9", 5, "x" * 9999])))),
        lambda talk: talk.say(200, json.dumps({"error": {"code": status, "message": wait}}).encode(), retry_after="-3"),
    ]  # fmt: skip
    return draw.choice(acts)


def test_a_run_against_drawn_answers_ends_and_its_rerun_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "FIRST_PAUSE": 0.002,
        "LONGEST_PAUSE": 0.01,
        "LONGEST_WAIT": 0.02,
        "N_TRIES": 2,
        "N_FAILURES_IN_A_ROW": 10**6,
    }
    for name, value in settings.items():
        monkeypatch.setattr(f"kinject.llm.sender.{name}", value)
    for first in range(0, int(os.environ.get("KINJECT_DRAWS", _BATCH)), _BATCH):
        draw = random.Random(first)
        acts = [drawn(draw) for _ in range(_BATCH)]
        folder = tmp_path / str(first)
        folder.mkdir()
        server = Hostile(lambda talk, number, acts=acts: acts[number](talk) if number < len(acts) else None)  # type: ignore[misc]
        with serving(server):
            command = [*recipe_of(folder, server.url, _BATCH), "augment.generator.timeout=5", "augment.budget=1000"]
            command += ["augment.generator.price_in=1", "augment.generator.price_out=1", "augment.max_attempts=2"]
            start = time.monotonic()
            assert main(command) in (0, 1)
            assert time.monotonic() - start < 120
            first_cost = read_manifest(folder / "run" / "manifest.json")["counts"]["cost"]  # type: ignore[index]
            good = len(server.good)
            assert main(command) in (0, 1)
        counts = read_manifest(folder / "run" / "manifest.json")["counts"]  # type: ignore[index]
        assert counts["failed"] == {}
        assert 0 < first_cost <= counts["cost"] < 10
        assert good <= len(server.good) <= good + counts["asked"]
        ids = [row["id"] for _, row in read_jsonl(folder / "run" / "corpus.jsonl")]
        assert len(ids) == len(set(ids)) == counts["got"] + _BATCH
        assert "Traceback" not in capsys.readouterr().err
