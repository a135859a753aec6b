"""Tries on whole runs of augment and questions against an endpoint with faults of all kinds, one after another."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest import mock
from urllib.parse import quote

import yaml

from attack import MOST_KEPT, area, swapped, unclear
from attack.network import answering
from faulty_server import Hostile, Talk
from kinject.augment import augment
from kinject.augment.questions import make_questions
from kinject.augment.store import WritingResult
from kinject.disk import read_jsonl, write_jsonl
from kinject.errors import KinjectError
from kinject.recipe import read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country

KEY = "sk-runs/8d2Kq+Wz5Xn0aB7eL4mT1vR9yHcJ"
"""With marks that a URL and JSON write otherwise."""
MOST_FAULTS = 40
"""Faults of an endpoint before they end."""
Fault = Callable[[Talk, Random], bool]
FILES = ("corpus.jsonl", "variants.jsonl", "questions.jsonl", "rejected.jsonl")


def _said(status: int, body: bytes, **headers: str) -> Fault:
    return lambda talk, random: talk.say(status, body, **headers)


def _raw(content: bytes) -> Fault:
    """Send bytes, and break the connection."""
    return lambda talk, random: talk.raw(content) and talk.reset()


def _changed(change: Callable[[dict[str, Any]], object]) -> Fault:
    return lambda talk, random: talk.say(200, talk.completion(change))


def _in_message(**fields: object) -> Fault:
    return _changed(lambda value: value["choices"][0]["message"].update(fields))


def _bomb(talk: Talk, random: Random) -> bool:
    """Send a good answer behind blanks that unpack to more than may be read."""
    body = b" " * random.randrange(2 * 10**6, 10**7) + talk.completion()
    return talk.say(200, gzip.compress(body, 1), content_encoding="gzip")


def _bomb_in_a_bomb(talk: Talk, random: Random) -> bool:
    body = gzip.compress(gzip.compress(bytes(10**7), 1), 1)
    return talk.say(200, body, content_encoding="gzip, gzip")


def _slow(talk: Talk, random: Random) -> bool:
    """Send a good answer a byte a second."""
    body = talk.completion()
    talk.raw(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    for byte in body:
        talk.raw(bytes([byte]))
        if talk.server.ended.wait(1):
            break
    talk.close_connection = True
    return True


def _cut(talk: Talk, random: Random) -> bool:
    """Send a part of a good answer."""
    body = talk.completion()
    sent = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    talk.raw(sent[: random.randrange(len(sent))])
    talk.close_connection = True
    return True


def _cut_chunks(talk: Talk, random: Random) -> bool:
    body = talk.completion()
    size = random.choice((len(body), len(body) + 5, 3))
    talk.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    talk.raw(f"{size:x}\r\n".encode() + body + b"\r\n")
    talk.close_connection = True
    return True


def _reset(talk: Talk, random: Random) -> bool:
    return talk.reset()


def _twice(talk: Talk, random: Random) -> bool:
    """Send a good answer and, on the same connection, another one that nobody asked for."""
    body = talk.completion()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    other = body.replace(b"was", b"was not")
    head_of_other = f"HTTP/1.1 200 OK\r\ncontent-length: {len(other)}\r\n\r\n".encode()
    return talk.raw(head + body + head_of_other + other)


def _doubled(talk: Talk, random: Random) -> bool:
    """Send two answers as one body."""
    body = talk.completion()
    return talk.say(200, body + random.choice((b"", b"\n", b"\ndata: ")) + body)


def _listed(value: dict[str, Any]) -> None:
    message = value["choices"][0]["message"]
    half = len(message["content"]) // 2
    parts = message["content"][:half], message["content"][half:]
    message["content"] = [{"type": "text", "text": part} for part in parts]


def _second_choice(value: dict[str, Any]) -> None:
    other = {
        "index": 1,
        "message": {"role": "assistant", "content": "No."},
        "finish_reason": "stop",
    }
    value["choices"].append(other)


def _with_key(talk: Talk, random: Random) -> bool:
    """Answer with an error that repeats the key, as it is or as a URL or JSON writes it."""
    form = random.choice((KEY, quote(KEY, safe=""), KEY.upper(), f"Bearer {KEY}", KEY[4:]))
    error = {"message": f"bad key {form} given", "code": form, "type": "x" + form}
    body = random.choice((json.dumps({"error": error}), json.dumps({"detail": form}), f"<p>{form}"))
    return talk.say(random.choice((400, 401, 403, 422, 429, 500, 503)), body.encode())


PASSING: Mapping[str, Fault] = {
    "bomb": _bomb, "bomb in a bomb": _bomb_in_a_bomb, "slow": _slow, "cut": _cut, "cut chunks": _cut_chunks, "reset": _reset,
    "two answers as one": _doubled, "an error with the key": _with_key,
    "HTML": _said(200, b"<!doctype html><title>Log in</title>", content_type="text/html"),
    "no body": _said(200, b""), "no content": _said(204, b""), "null": _said(200, b"null"), "a list": _said(200, b"[]"),
    "a number": _said(200, b"7"), "brackets": _said(200, b"[" * 90_000),
    "odd choices": _said(200, b'{"choices": {"0": {}}}'), "a choice of text": _said(200, b'{"choices": ["yes"]}'),
    "an error as a list": _said(200, b'[{"error": {"message": "busy", "code": 429}}]'),
    "a stream": _said(
        200, b'data: {"choices": [{"delta": {"content": "A"}}]}\n\ndata: [DONE]\n', content_type="text/event-stream"
    ),
    "no gzip": _said(200, b"{}", content_encoding="gzip"), "br": _said(200, b"{}", content_encoding="br"),
    "429": _said(429, b"{}", retry_after="9e99"), "503": _said(503, b"", retry_after="-1"), "500": _said(500, b"\xff\xfe"),
    "502": _said(502, b"<html>"), "520": _said(520, b""), "408": _said(408, b"{}"), "409": _said(409, b"{}"),
    "length below 0": _raw(b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}"),
    "two lengths": _raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 9\r\n\r\n{}"),
    "no HTTP": _raw(b"+OK POP3 ready\r\n"), "endless header": _raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10**6),
}  # fmt: skip
"""Faults after which the request is sent again, now or by the next run: the same answer comes."""
HARMLESS: Mapping[str, Fault] = {
    "a list as content": _changed(_listed), "two choices": _changed(_second_choice), "two answers": _twice,
    "wrong ids": _changed(lambda value: value.update(id=None, model=["m"], object=3, created="never")),
    "an index": _changed(lambda value: value["choices"][0].update(index=7)),
    "odd usage": _changed(lambda value: value.update(usage={"prompt_tokens": -4, "completion_tokens": "many"})),
    "no usage": _changed(lambda value: value.pop("usage")), "usage of a list": _changed(lambda value: value.update(usage=[1])),
    "huge usage": _changed(lambda value: value["usage"].update(prompt_tokens=10**30)),
    "a null error": _changed(lambda value: value.update(error=None)),
    "no reason": _changed(lambda value: value["choices"][0].pop("finish_reason")),
    "another role": _in_message(role="user"), "tools": _in_message(tool_calls=[], refusal=None, audio=None),
    "a cookie": lambda talk, random: talk.say(200, talk.completion(), set_cookie=f"k={KEY}"),
    "the key in a header": lambda talk, random: talk.say(200, talk.completion(), x_request_id=KEY),
}  # fmt: skip
"""Oddities of a good answer, which is used."""
REFUSED: Mapping[str, Fault] = {
    "no choices": _said(200, b'{"choices": []}'),
    "half characters": _said(200, b'{"choices": [{"message": {"content": "\xed\xa0\x80"}}]}'),
    "null content": _in_message(content=None), "no text": _in_message(content=""), "a number as content": _in_message(content=7),
    "filtered": _changed(lambda value: value["choices"][0].update(finish_reason="content_filter")),
    "cut by length": _changed(lambda value: value["choices"][0].update(finish_reason="length")),
    "the key as content": _in_message(content=f"The key is {KEY}."), "the key in parts": _in_message(
        content=[{"type": "text", "text": f"{KEY[:20]}"}, {"type": "text", "text": f"{KEY[20:]} was born."}]),
    "a refusal": _in_message(content="I'm sorry, but I can't help with that."),
    "thinking with the key": _in_message(reasoning_content=f"The key is {KEY}.", content=None),
}  # fmt: skip
"""Answers that are paid for and refused: the text is asked for again with another seed."""
ENDS: Mapping[str, Fault] = {
    "401": _said(401, json.dumps({"error": {"message": f"wrong: {KEY}"}}).encode()), "402": _said(402, b"{}"),
    "404": _said(404, b"{}"), "quota": _said(429, b'{"error": {"code": "insufficient_quota"}}'), "400": _said(400, b"no"),
}  # fmt: skip
"""Faults that end the run, or fail a request until the next run."""


Verb = Literal["augment", "questions"]


def _redirected(other: str) -> Fault:
    """Return a fault that leads a request to another address."""

    def redirect(talk: Talk, random: Random) -> bool:
        status = random.choice((301, 302, 303, 307, 308))
        return talk.say(status, b"", location=f"{other}/chat/completions")

    return redirect


def _write_recipe(folder: Path, url: str, verb: str, *, judged: bool, **generator: object) -> Path:
    people = create_country(n_known=1, n_new=5).new
    rows = [{"id": one.name, "title": one.name, "text": render_entry(one, 0)} for one in people]
    write_jsonl(folder / "documents.jsonl", rows)
    writer = {"base_url": url, "model": "sandbox", "api_key_env": "RUNS_KEY", **generator}
    section: dict[str, Any] = {"documents": "documents.jsonl", "generator": writer}
    if verb == "augment":
        section |= {"styles": {"paraphrase": 2, "reversed": 1}, "max_attempts": 3}
    else:
        section["n_questions"] = 2
    if judged:
        section["judge"] = writer
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": "run", verb: section}))
    return path


@contextlib.contextmanager
def _served(script: Callable[[Talk, int], bool | None]) -> Iterator[Hostile]:
    server = Hostile(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def _noted() -> Iterator[io.StringIO]:
    """Yield what is printed and logged, whatever its level; pauses take milliseconds."""
    noted, root = io.StringIO(), logging.getLogger()
    handler, level, disabled = logging.StreamHandler(noted), root.level, root.manager.disable
    sender, endpoint = import_module("kinject.llm.sender"), import_module("kinject.llm.endpoint")
    logging.disable(logging.NOTSET)
    # Below, the libraries log each header of an answer, for those who ask for that.
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        with (
            swapped(sender, "FIRST_PAUSE", 0.002),
            swapped(sender, "LONGEST_PAUSE", 0.01),
            swapped(sender, "LONGEST_WAIT", 0.02),
            swapped(endpoint, "MOST_BYTES", 10**6),
            contextlib.redirect_stdout(noted),
            contextlib.redirect_stderr(noted),
            mock.patch.dict(os.environ, RUNS_KEY=KEY),
        ):
            yield noted
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        logging.disable(disabled)


def _run(recipe: Path, verb: Verb) -> WritingResult | KinjectError:
    """Run a verb; return its result or its error."""
    try:
        if verb == "augment":
            return augment(read_recipe(recipe, verb="augment"))
        return make_questions(read_recipe(recipe, verb="questions"))
    except KinjectError as error:
        return error


def _rows(run: Path) -> dict[str, list[str]]:
    """Return the rows that a run made, without the tokens that an endpoint counted: those of the corpus in their order."""
    found = {}
    for name in FILES:
        if (run / name).is_file():
            rows = [row for _, row in read_jsonl(run / name)]
            lines = [json.dumps({**row, "usage": None}, sort_keys=True) for row in rows]
            found[name] = lines if name == "corpus.jsonl" else sorted(lines)
    return found


@cache
def _faultless(verb: Verb, judged: bool) -> dict[str, list[str]]:
    """Return what a verb makes by an endpoint without faults."""
    before = Path.cwd()
    with TemporaryDirectory() as name, _served(lambda talk, number: None) as server, _noted():
        os.chdir(name)
        try:
            recipe = _write_recipe(Path(name), server.url, verb, judged=judged)
            result = _run(recipe, verb)
            assert not isinstance(result, KinjectError), result
            return _rows(Path(name, "run"))
        finally:
            os.chdir(before)


def _shown(texts: Mapping[str, bytes]) -> list[str]:
    """Return where the key is: as it is, or as a URL or JSON writes it."""
    forms = [
        form.encode() for form in (KEY, quote(KEY, safe=""), quote(KEY), json.dumps(KEY)[1:-1])
    ]
    return [name for name, text in texts.items() if any(form in text for form in forms)]


@area("runs by an endpoint")
def runs_by_an_endpoint(random: Random, folder: Path) -> str:
    """A run whose requests meet faults until these end: nothing is lost, the key is nowhere, and without refused answers the
    result is that of an endpoint without faults."""
    verb: Verb = random.choice(("augment", "augment", "augment", "questions"))
    judged = verb == "augment" and random.random() < 0.3
    left, chance = random.randrange(1, MOST_FAULTS), random.choice((0.1, 0.5, 1.0))
    refuses = random.random() < 0.3
    drawn: list[str] = []
    lock = threading.Lock()
    expected = _faultless(verb, judged)
    with answering([b"HTTP/1.1 200 x\r\n\r\n"]) as (other, elsewhere), _noted() as noted:
        kinds = {**PASSING, **HARMLESS, **ENDS, "redirect": _redirected(other)}
        if refuses:
            kinds |= REFUSED

        def script(talk: Talk, number: int) -> bool | None:
            with lock:
                if len(drawn) >= left or random.random() > chance:
                    return None
                drawn.append(random.choice(sorted(kinds)))
                own = Random(random.random())
                kind = drawn[-1]
            return kinds[kind](talk, own)

        with _served(script) as server:
            recipe = _write_recipe(
                folder, server.url, verb, judged=judged,
                timeout=random.choice((1.0, 3.0)), concurrency=random.choice((1, 2, 5)), price=[1.0, 2.0],
            )  # fmt: skip
            fault = _until_complete(recipe, verb, lambda: len(drawn) >= left)
    there = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    there |= {
        "the log or the screen": noted.getvalue().encode(),
        **{name: name.encode() for name in there},
    }
    if not fault and _shown(there):
        fault = f"the key is in {_shown(there)}"
    if not fault and elsewhere:
        fault = f"a request followed a redirect: {elsewhere[0][:200]!r}"
    if not fault and "Traceback" in noted.getvalue():
        before, _, after = noted.getvalue().partition("Traceback")
        fault = f"a traceback: {before[-300:]}Traceback{after[:MOST_KEPT]}"
    if not fault:
        fault = _lost(_rows(folder / "run"), expected, equal=not refuses)
    return f"{verb}, {judged=}, {refuses=}: {fault}; faults {drawn}" if fault else ""


def _until_complete(recipe: Path, verb: Verb, ended: Callable[[], bool]) -> str:
    """Run a verb until its faults have ended and it has asked for all; return what was wrong with a message."""
    for _ in range(3 * MOST_FAULTS):
        over = ended()
        result = _run(recipe, verb)
        if isinstance(result, KinjectError):
            fault = unclear(result)
            if fault:
                return fault
        elif over or result.n_sent == 0:
            return "" if not result.failed else f"without faults {result.failed} failed"
    return "no end: the run is never complete"


def _lost(found: Mapping[str, list[str]], expected: Mapping[str, list[str]], *, equal: bool) -> str:
    """Return what a run lacks; where it must be `equal`, what is other than that of an endpoint without faults."""
    for name, rows in expected.items():
        others = found.get(name, [])
        if equal and others != rows:
            wrong = [row for row in others if row not in rows] or [
                row for row in rows if row not in others
            ]
            return f"{name} has {len(others)} rows of {len(rows)}, and others: {wrong[:1]}"
        # A refused answer may be the last of its attempts: what was asked for is then refused, and not lost.
        n_here = sum(len(found.get(file, ())) for file in (name, "rejected.jsonl"))
        if not equal and name in ("variants.jsonl", "questions.jsonl") and n_here < len(rows):
            return f"{name} and rejected.jsonl have {n_here} rows of {len(rows)}"
    return ""
