"""Asks kinject view's server as a browser would."""

from __future__ import annotations

import http.client
import json
from typing import Any

from kinject.view import Server


class Client:
    """Asks a server as a browser would."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.server_port

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        host: str = "",
        token: str | None = None,
        kind: str = "application/json",
        origin: str = "",
    ) -> tuple[int, Any]:
        """Return (status, JSON or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        data = (
            None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        headers = {"Host": host or f"127.0.0.1:{self.port}", "Content-Type": kind}
        if origin:
            headers["Origin"] = origin
        path = f"/{self.server.token if token is None else token}/{path}"
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        self.headers = response.headers
        connection.close()
        return response.status, json.loads(text) if response.headers[
            "Content-Type"
        ] == "application/json" else text
