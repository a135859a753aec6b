"""An endpoint that writes what it likes into the socket, around good answers of the sandbox's paraphraser."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kinject.augment.sandbox import generate_answer


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
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        value: dict[str, Any] = {"id": "x", "model": "sandbox", "choices": [choice], "usage": usage}
        change(value)
        with self.server.lock:
            self.server.good.append(self.body)
        return json.dumps(value).encode()

    def say(self, status: int, content: bytes, **headers: str) -> bool:
        """Send a whole answer."""
        sent_headers = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent_headers.items())
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
