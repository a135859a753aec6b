"""A loopback server with a chat route that always gives one answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """A running server: its address, the bodies that it was sent, and how it answers."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    chat: str = "The answer is Lowmere."
    fails_after: int | None = None

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer."""
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return 401, {"error": {"message": "the key has expired"}}
        choice = {"index": 0, "message": {"role": "assistant", "content": self.chat}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 11, "completion_tokens": 5}
        return 200, {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}


@contextmanager
def serve() -> Iterator[Served]:
    """Serve from a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.bodies.append(body)
            status, answer = served.reply(body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
