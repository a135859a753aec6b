"""A server on this machine that speaks the interface of the Hugging Face hub for uploads."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

TOKEN = "hf_of_this_test"  # noqa: S105


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded, and the tokens of all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: dict[str, Any] = {}
        self.tokens: set[str] = set()
        self.commits: list[str] = []
        self.branches: list[str] = []
        self.committed_to: list[str] = []
        self.files: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.full = False


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    def _reply(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization", ""))
        self.server.unknown.append(self.path)
        self._reply({"error": "unknown"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization", ""))
        if self.path == "/api/repos/create":
            hub.created = json.loads(body)
            self._reply({"url": f"{hub.url}/me/mine", "name": "me/mine"})
        elif "/branch/" in self.path:
            hub.branches.append(self.path.rpartition("/")[2])
            self._reply({})
        elif self.path == "/api/validate-yaml":
            self._reply({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [item["path"] for item in json.loads(body)["files"]]
            modes = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
            ]
            self._reply({"files": modes})
        elif "/commit/" in self.path and hub.full:
            self._reply({"error": "no space"}, 507)
        elif "/commit/" in self.path:
            rows = [json.loads(line) for line in body.splitlines()]
            hub.committed_to.append(self.path.rpartition("/")[2])
            hub.commits += [row["value"]["summary"] for row in rows if row["key"] == "header"]
            for row in (row["value"] for row in rows if row["key"] == "file"):
                hub.files[row["path"]] = base64.b64decode(row["content"])
            oid = f"{len(hub.commits):040x}"
            self._reply(
                {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/me/mine/commit/{oid}"}
            )
        else:
            hub.unknown.append(self.path)
            self._reply({"error": "unknown"}, 404)


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub on this machine, which the hub's client takes for the only one."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            constants, "HF_HUB_DISABLE_TELEMETRY", True
        )  # as importing kinject sets it
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()
