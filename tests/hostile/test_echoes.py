"""An endpoint that echoes parts of keys in drawn forms through every channel: no byte that leaves the process holds one.

KINJECT_DRAWS (60) parts are drawn, `_BATCH` of them in one run. `find_parts` is the judge: it shares no code with kinject.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endpoints import recipe_of, serving
from faulty_server import Hostile, Talk
from keys import FORMS, draw_key, draw_part, find_parts

from kinject.cli import main

_BATCH = 60
_VARIABLES = ("OPENAI_API_KEY", "HF_TOKEN", "K_SECRET")
Echo = Callable[[Talk, str], bool]


def changed(change: Callable[[dict[str, Any], str], None]) -> Echo:
    return lambda talk, part: talk.say(200, talk.completion(lambda value: change(value, part)))


def message(name: str) -> Echo:
    return changed(lambda value, part: value["choices"][0]["message"].update({name: f"It is {part}, of course."}))


def error(status: int, **more: str) -> Echo:
    def act(talk: Talk, part: str) -> bool:
        value = {"error": {"message": f"wrong key: {part}", **dict.fromkeys(more, part)}}
        return talk.say(status, json.dumps(value, ensure_ascii=len(part) % 2 == 0).encode())

    return act


def line(text: str) -> str:
    """Return a text as a header can hold it."""
    return " ".join(text.split()).encode("latin-1", "ignore").decode("latin-1")


def spread(talk: Talk, part: str) -> bool:
    """Send a good answer with `part` in it, a few bytes in each chunk."""
    content = talk.completion(lambda value: value["choices"][0]["message"].update(content=f"Yes: {part} it is."))
    chunks = [content[start : start + 5] for start in range(0, len(content), 5)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return talk.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body)


def packed(talk: Talk, part: str) -> bool:
    content = talk.completion(lambda value: value["choices"][0]["message"].update(content=f"Yes: {part} it is."))
    return talk.say(200, gzip.compress(content), content_encoding="gzip")


def head(text: str, status: int = 200) -> Echo:
    def act(talk: Talk, part: str) -> bool:
        content = talk.completion() if status == 200 else b"{}"
        reply = text.replace("PART", line(part)).encode("latin-1")
        return talk.raw(b"%s\r\ncontent-length: %d\r\n\r\n" % (reply, len(content)) + content)

    return act


def torn(talk: Talk, part: str) -> bool:
    """Break HTTP's grammar with `part` in the broken place."""
    talk.close_connection = True
    return talk.raw(f"HTTP/1.1 200 OK\r\n{line(part)}\r\n\r\n".encode("latin-1"))


CHANNELS: dict[str, Echo] = {
    "content": message("content"),
    "within a good answer": changed(
        lambda value, part: value["choices"][0]["message"].update(content=value["choices"][0]["message"]["content"] + part)
    ),
    "parts of content": changed(
        lambda value, part: value["choices"][0]["message"].update(
            content=[{"type": "text", "text": part[: len(part) // 2]}, {"type": "text", "text": part[len(part) // 2 :]}]
        )
    ),
    "chunks": spread,
    "gzip": packed,
    "reasoning": message("reasoning_content"),
    "refusal": message("refusal"),
    "finish_reason": changed(lambda value, part: value["choices"][0].update(finish_reason=part)),
    "model": changed(lambda value, part: value.update(model=part)),
    "id": changed(lambda value, part: value.update(id=part, system_fingerprint=part)),
    "usage": changed(lambda value, part: value.update(usage={"prompt_tokens": part, part: 3})),
    "error 400": error(400, code="", type=""),
    "error 500": error(500),
    "error 429": error(429, type=""),
    "error in a 200": error(200, code=""),
    "error as text": lambda talk, part: talk.say(400, f"<p>wrong key: {part}</p>".encode()),
    "page": lambda talk, part: talk.say(200, f"{part} is no key".encode(), content_type="text/html"),
    "reason phrase": head("HTTP/1.1 400 PART", 400),
    "good with a reason phrase": head("HTTP/1.1 200 PART"),
    "header": head("HTTP/1.1 200 OK\r\nx-request-id: PART\r\nset-cookie: key=PART; path=/"),
    "retry-after": head("HTTP/1.1 429 Too Many\r\nretry-after: PART", 429),
    "status line": head("HTTP/PART 200 OK"),
    "broken header": torn,
}  # fmt: skip
FATAL: dict[str, Echo] = {
    "401": error(401, code=""), "402": error(402), "403": lambda talk, part: talk.say(403, part.encode()), "404": error(404),
    "redirect": head("HTTP/1.1 307 Moved\r\nlocation: https://elsewhere.example/?key=PART", 307),
}  # fmt: skip
"""Channels of answers that stop a run."""


def leaks_of(
    tmp_path: Path, cases: list[tuple[Echo, str]], keys: list[str], capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> tuple[int, list[str]]:  # fmt: skip
    """Run augment on an endpoint that answers by `cases`; return its exit code and the parts that were found."""

    def script(talk: Talk, number: int) -> bool | None:
        if number >= len(cases):
            return None
        echo, part = cases[number]
        return echo(talk, part)

    server = Hostile(script)
    caplog.clear()
    with serving(server):
        code = main(recipe_of(tmp_path, server.url, len(cases)))
    captured = capsys.readouterr()
    texts = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    texts |= {"names": "\n".join(texts).encode(), "stdout": captured.out.encode(), "stderr": captured.err.encode()}
    texts["log"] = "\n".join(map(str, caplog.messages)).encode()
    assert len(server.seen) >= min(len(cases), 1)
    return code, find_parts(keys, texts)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FIRST_PAUSE": 0.002,
        "LONGEST_PAUSE": 0.01,
        "N_TRIES": 2,
        "N_FAILURES_IN_A_ROW": 10**6,
    }.items():
        monkeypatch.setattr(f"kinject.requests.sender.{name}", value)


def test_no_part_of_a_key_in_any_form_leaves_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_draws, all_leaks = int(os.environ.get("KINJECT_DRAWS", _BATCH)), []
    for first in range(0, n_draws, _BATCH):
        draw = random.Random(first)
        keys = [draw_key(draw) for _ in _VARIABLES]
        for name, key in zip(_VARIABLES, keys, strict=True):
            monkeypatch.setenv(name, key)
        names = [*CHANNELS, *draw.choices(list(CHANNELS), k=_BATCH)][:_BATCH]
        drawn = [(name, draw.choice(list(FORMS)), draw_part(draw, draw.choice(keys))) for name in names]
        folder = tmp_path / f"batch-{first}"
        folder.mkdir()
        cases = [(CHANNELS[name], FORMS[form](part)) for name, form, part in drawn]
        code, leaks = leaks_of(folder, cases, keys, capsys, caplog)
        assert code == 1
        rejected = (folder / "run" / "rejected.jsonl").read_bytes()
        assert b"(key)" in rejected
        assert b'"reason":"secret"' in rejected.replace(b": ", b":")
        all_leaks += leaks
        name, form = draw.choice(list(FATAL)), draw.choice(list(FORMS))
        folder = tmp_path / f"fatal-{first}"
        folder.mkdir()
        code, leaks = leaks_of(folder, [(FATAL[name], FORMS[form](draw_part(draw, keys[0])))], keys, capsys, caplog)
        assert code == 2
        all_leaks += leaks
    assert all_leaks == []


def test_the_judge_finds_each_form() -> None:
    draw = random.Random(0)
    for form, write in FORMS.items():
        key = draw_key(draw)
        text = f"The answer is {write(draw_part(draw, key))}.".encode()
        assert find_parts([key], {"x": text}), (form, key, text)
        assert find_parts(["0f8fad5b-d9cb-469f-a165-70867728950e"], {"x": text}) == []
