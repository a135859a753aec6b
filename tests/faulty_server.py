"""Endpoints with faults: one that writes what it likes into the socket, and the sandbox's with faults by chance."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kinject.augment.checks.judge import plant_error
from kinject.augment.prompts import passage_of
from kinject.augment.sandbox import Connection, SandboxServer, generate_answer

FAULTY_ANSWERS: Mapping[str, Callable[[str, Any], tuple[str | None, str]]] = {
    "truncated": lambda text, messages: (text[: len(text) // 2], "length"),
    "null": lambda text, messages: (None, "stop"),
    "filtered": lambda text, messages: ("", "content_filter"),
    "refusal": lambda text, messages: (
        "I'm sorry, but I can't help with rewriting this text.",
        "stop",
    ),
    "wrapped": lambda text, messages: (
        f"Sure, here is a paraphrase of the passage:\n\n{text}",
        "stop",
    ),
    "trailing": lambda text, messages: (
        f"{text}\n\nLet me know if you would like another version!",
        "stop",
    ),
    "echo": lambda text, messages: (
        passage_of(messages) if "<passage>" in messages[-1]["content"] else text,
        "stop",
    ),
    "changed": lambda text, messages: (
        plant_error("number", text, random.Random(len(text))) or text,
        "stop",
    ),
}
"""Name -> (good answer, messages) to (faulty answer, finish_reason)."""


@dataclass(eq=False)
class FaultySandbox(SandboxServer):
    """The sandbox's endpoint with settings: `faults` maps names to fractions of the requests.

    Above `capacity` requests at once it answers 429. It requires `key`, if set, and refuses every key after `revoke_after`
    answers. Faults are drawn by the number of the request, or with `by_request` by the request itself; then a passing
    fault does not occur again. No answer comes before `held`, if there is one, is set. `answered` counts good answers by
    request body, `met` the faults sent.
    """

    latency: float = 0.0
    faults: Mapping[str, float] = field(default_factory=dict)
    capacity: int | None = None
    key: str | None = None
    revoke_after: int | None = None
    by_request: bool = False
    held: threading.Event | None = None
    n_requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    answered: Counter[bytes] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._rng = random.Random(0)
        self._came = Counter[bytes]()
        super().__init__()

    def draw(self, body: bytes) -> str:
        """Return the fault of a request, "" for none."""
        self._came[body] += 1
        mark = (random.Random(body) if self.by_request else self._rng).random()
        for fault, fraction in self.faults.items():
            mark -= fraction
            if mark < 0:
                passed = self.by_request and self._came[body] > 1 and fault not in FAULTY_ANSWERS
                self.met[fault] += not passed
                return "" if passed else fault
        return ""


class _Faulty(Connection):
    server: FaultySandbox

    def answer(self, body: bytes) -> None:
        server = self.server
        with server.lock:
            server.n_requests += 1
            revoked = (
                server.revoke_after is not None and server.answered.total() >= server.revoke_after
            )
            full = server.capacity is not None and server.in_flight >= server.capacity
            if revoked or (server.key and self.headers["authorization"] != f"Bearer {server.key}"):
                return self.fail(401, "Incorrect API key provided.", "invalid_api_key")
            if full:
                return self.fail(429, "Too many requests at once.", "rate_limit_exceeded")
            self.fault = server.draw(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        if self.fault == "hang":
            server.ended.wait(60)
        if server.held:
            server.held.wait()
        time.sleep(server.latency)
        with server.lock:
            server.in_flight -= 1
            self.body = body
            if self.fault.isdigit():
                return self.fail(
                    int(self.fault), "Requested fault.", "requested", retry_after="0.01"
                )
            if self.fault == "malformed":
                return self.say(200, b'{"id": "x", "choices": [{"message": {"con')
            if self.fault in ("reset", "hang"):
                self.close_connection = True
                return None
        return super().answer(body)

    def complete(self, text: str | None, reason: str, n_in: int) -> None:
        if self.fault in FAULTY_ANSWERS:
            text, reason = FAULTY_ANSWERS[self.fault](str(text), json.loads(self.body)["messages"])
        if self.fault == "no_choices":
            return self.say(200, {"choices": []})
        with self.server.lock:
            self.server.answered[self.body] += 1
        return super().complete(text, reason, n_in)


FaultySandbox.connection_class = _Faulty


class Hostile(ThreadingHTTPServer):
    """A server that does to POST number n (from 0) what `script` says; None lets it answer well."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, script: Callable[[Talk, int], bool | None]) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.script = script
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.seen: list[bytes] = []
        self.good: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # no farewell: a reset stays one

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client left in the middle of our nonsense


class Talk(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Hostile

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            number = len(self.server.seen)
            self.server.seen.append(self.body)
        if self.server.script(self, number) is None:
            self.say(200, self.completion())

    def do_GET(self) -> None:
        self.say(200, json.dumps({"data": [{"id": "sandbox"}, {"id": "other"}]}).encode())

    def completion(self, change: Callable[[dict[str, Any]], None] = lambda value: None) -> bytes:
        """Return a good answer, changed."""
        request = json.loads(self.body)
        text = generate_answer(request["messages"], request["seed"]).text
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        value: dict[str, Any] = {"id": "x", "model": "sandbox", "choices": [choice], "usage": usage}
        change(value)
        with self.server.lock:
            self.server.good.append(self.body)
        return json.dumps(value).encode()

    def say(self, status: int, content: bytes, **headers: str) -> bool:
        """Send a whole answer."""
        sent_headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **headers,
        }
        head = "".join(
            f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent_headers.items()
        )
        self.raw(f"HTTP/1.1 {status} Some Phrase\r\n{head}\r\n".encode() + content)
        return True

    def raw(self, content: bytes) -> bool:
        self.wfile.write(content)
        self.wfile.flush()
        return True

    def reset(self) -> bool:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        return True

    def until_left(self, chunk: bytes, pause: float) -> bool:
        """Send a piece ever again until the client has left, or the test is over."""
        self.close_connection = True
        while not self.server.ended.wait(pause):
            self.raw(chunk)
        return True

    def log_message(self, *args: object) -> None:
        pass
