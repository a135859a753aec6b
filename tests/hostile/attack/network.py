"""Tries on what a network brings: an endpoint that answers anything, and a client of kinject view that sends anything."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock
from urllib.parse import quote

from attack import area, swapped
from kinject.disk import write_jsonl, write_manifest
from kinject.errors import EndpointError
from kinject.llm.endpoint import Endpoint
from kinject.recipe import GeneratorSection
from kinject.view import Server

KEY = "sk-attack-0123456789abcdef0123456789"
ANSWER = {
    "id": "x", "object": "chat.completion", "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Arden Holt."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}  # fmt: skip


@contextmanager
def answering(replies: list[bytes], pause: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server that sends these bytes, one a connection, and the requests that came."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        def answer(connection: socket.socket) -> None:
            connection.settimeout(5)
            try:
                requests.append(connection.recv(1 << 20))
                reply = replies[min(len(requests), len(replies)) - 1]
                step = 1 if pause else len(reply) or 1
                for start in range(0, len(reply), step):
                    connection.sendall(reply[start : start + step])
                    stopped.wait(pause)
                    if stopped.is_set():
                        return
            except OSError:
                return  # the client has left

        stopped = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", requests
        finally:
            stopped.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@cache
def _bomb(size: int) -> bytes:
    """Return a body that unpacks to this many bytes."""
    return gzip.compress(bytes(size), 1)


def _reply(random: Random, other: str) -> tuple[bytes, float]:
    """Return the bytes of an answer, and the pause between two of them."""
    good = json.dumps(ANSWER).encode()
    odd = [
        good, b"", b"{", b"[]", b"null", b"[" * 90_000, b'{"choices": []}', b'{"choices": [{}]}', b"\xff\xfe", b"<html>busy",
        json.dumps({"error": {"message": f"bad key {KEY}", "code": KEY}}).encode(), f"no such model; {KEY}".encode(),
        good.replace(b'"Arden Holt."', b"null"), good.replace(b'"stop"', b"7"), good.replace(b": 3", b": 1e999"),
        good.replace(b'"Arden Holt."', b'"\\ud800"'), good.replace(b": 2}", b": -2}"), b'{"a":' * 50_000,
    ]  # fmt: skip
    body, headers = random.choice(odd), ["Content-Type: application/json"]
    kind = random.randrange(8)
    if kind == 0:
        body = _bomb(random.choice((10**6, 2 * 10**8)))
        headers.append("Content-Encoding: gzip")
    elif kind == 1:
        headers.append("Content-Encoding: gzip")  # and it is none
    status = random.choice(
        (200, 200, 200, 400, 401, 403, 404, 429, 500, 503, 302, 307, 308, 99, 777)
    )
    if 300 <= status < 400:
        headers.append(f"Location: {other}/chat/completions")
    if status == 429:
        headers.append(
            f"Retry-After: {random.choice(('0', '-5', 'nan', '1e400', 'soon', '9' * 400))}"
        )
    length = len(body) if random.random() < 0.8 else random.choice((-1, 0, 10**12))
    headers.append(f"Content-Length: {length}")
    reply = f"HTTP/1.1 {status} {KEY if random.random() < 0.1 else 'x'}\r\n".encode()
    reply += "\r\n".join(headers).encode() + b"\r\n\r\n" + body
    if kind == 2:
        reply = reply[: random.randrange(len(reply) + 1)]
    if kind == 3:
        reply = b"x" * random.randrange(2000)
    return reply, 0.05 if kind == 4 else 0.0


@area("endpoint")
def endpoint(random: Random, folder: Path) -> str:
    """An endpoint that answers anything: an answer or one line, soon, and the key goes nowhere else."""
    with answering([b"HTTP/1.1 200 x\r\n\r\n"]) as (other, elsewhere):
        reply, pause = _reply(random, other)
        with answering([reply], pause) as (url, _), mock.patch.dict(os.environ, ATTACK_KEY=KEY):
            section = GeneratorSection(
                base_url=url, model="m", api_key_env="ATTACK_KEY", timeout=0.5
            )

            async def ask() -> str:
                async with Endpoint(section) as opened:
                    if random.random() < 0.2:
                        return " ".join(await opened.models())
                    return (await opened.complete([{"role": "user", "content": "Who?"}], 0)).text

            try:
                text = asyncio.run(ask())
            except EndpointError as error:
                text = str(error)
                if "\n" in text:
                    return f"several lines: {text[:200]!r}"
        if elsewhere:
            return f"the request followed a redirect: {elsewhere[0][:200]!r}"
        if KEY in text:
            return f"the key is shown: {text[:300]!r}"
    return ""


@cache
def _pieces() -> tuple[str, ...]:
    return ("[]\n", "{}\n", "null\n", '{"id": 3}\n', "[" * 3000 + "\n", '{"step": "x", "loss": []}\n', '{"step": 1', "\x00\n",
            '{"id": "a", "decision": "edit", "wrong": 5}\n', '{"id": "v", "style": 1, "text": [1]}\n', "\n\n", '{"a": 1e400}\n',
            '{"counts": null, "recipe": null, "inputs": {}, "format_version": 1, "stage": "train", "command": 5}')  # fmt: skip


@area("view")
def view(random: Random, folder: Path) -> str:
    """Runs with damaged files, and requests that no page sends: each gets an answer, and the overview shows the other runs."""
    for name in ("good", "odd"):
        run = folder / "runs" / name
        write_jsonl(
            run / "variants.jsonl",
            [{"id": "v", "passage_id": "p", "document_id": "d", "style": "s", "text": "x"}],
        )
        counts = {"asked": 1, "got": 1}
        stage = (
            "augment"
            if name == "good"
            else random.choice(("augment", "questions", "train", "eval", "documents"))
        )
        recipe = (
            {"augment": {"documents": "d"}}
            if stage == "augment"
            else {"model": {}, "corpus": {}, "trainer": {}}
        )
        write_manifest(run / "manifest.json", stage=stage, inputs={}, recipe=recipe, counts=counts)
        (run / ".lock").touch()
    files = ("manifest.json", "variants.jsonl", "rejected.jsonl", "decisions.jsonl", "log.jsonl", "questions.jsonl",
             "flips.jsonl", "corpus.jsonl", "outcomes.jsonl", "report.html", "answers.jsonl")  # fmt: skip
    for name in random.sample(files, 3):
        text = "".join(random.choice(_pieces()) for _ in range(random.randrange(1, 4)))
        (folder / "runs" / "odd" / name).write_text(text)
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        failed: list[str] = []
        # What a thread of a request raises would else be printed and forgotten.
        with swapped(server, "handle_error", lambda *_: failed.append("a traceback in the server")):
            for _ in range(3):
                failed += _asked(server, random)
            shown = _ask(server, "GET", f"/{server.token}/runs", None, {})
        server.shutdown()
    if failed:
        return failed[0]
    if shown[0] != 200 or b"runs/good" not in shown[1]:
        return f"the overview: {shown[0]} {shown[1][:300]!r}"
    return ""


def _asked(server: Server, random: Random) -> Iterator[str]:
    """Send one request; yield what is wrong with its answer."""
    route = random.choice(
        (
            "runs",
            "log",
            "numbers",
            "rows",
            "report",
            "page",
            "decide",
            "chat",
            "",
            "../x",
            "%00",
            "é",
        )
    )
    query = random.choice(("", "run=runs/odd", "run=runs/odd&list=accepted", "run=runs/odd&list=refused&offset=-1",
                           "run=runs/odd&list=questions&limit=x", "run=%00", "run=../..",
                           "run=runs/good&list=accepted&q=x"))  # fmt: skip
    value = {"run": "runs/good", "list": "accepted", "id": random.choice(("v", 5, None, [])), "question": 3,
             "decision": random.choice(("keep", "edit", [], "undo", None)),
             "text": random.choice(("x", 5, "\ud800"))}  # fmt: skip
    body = random.choice((None, b"[" * 90_000, b"{}", b"null", json.dumps(value).encode(), b"\xff"))
    headers = random.choice(
        ({}, {"Content-Length": "-1"}, {"Content-Length": "x"}, {"Host": "evil"}, {"Host": ""})
    )
    token = random.choice((server.token, server.token, server.token, "é", "", server.token[:-1]))
    path = quote(f"/{token}/{route}?{query}", safe="/?=&%.-")
    status, answer = _ask(server, "POST" if body is not None else "GET", path, body, headers)
    if status == 0:
        yield f"no answer to {route}?{query} {body!r:.80} {headers}"
    elif status not in (200, 303, 400, 403, 404):
        yield f"{status} {answer[:200]!r}"
    elif token != server.token and status == 200:
        yield f"an answer without the token: {route}"


def _ask(
    server: Server, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Return status and body; 0 for none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    sent = {
        "Host": f"127.0.0.1:{server.server_port}",
        "Content-Type": "application/json",
        **headers,
    }
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, text in sent.items():
            connection.putheader(name, text)
        if body is not None and "Content-Length" not in sent:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    except (http.client.HTTPException, OSError):
        return 0, b""
    finally:
        connection.close()
