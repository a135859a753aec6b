"""The batch API of the local endpoint: files in, batches over them, files out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

Reply = tuple[int, Any, dict[str, str]]
Complete = Callable[[bytes], Reply | None]
"""A request's body -> (status, body, headers), None where the connection would break."""


class Batches:
    """Files and batches in memory. A batch ends `seconds` after it was made, in the endpoint's own time."""

    def __init__(self, complete: Complete, seconds: float) -> None:
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self._complete = complete
        self._seconds = seconds

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        """Return the answer to a request under /v1/files or /v1/batches; None where `path` is neither."""
        path = path.partition("?")[0].rstrip("/")
        parts = path.removeprefix("/v1/").split("/")
        if (method, parts) == ("POST", ["files"]):
            return 200, self._file_object(self._store(file_in(body, headers.get("content-type", "")))), {}
        if (method, parts) == ("POST", ["batches"]):
            return self._make(json.loads(body))
        if (method, parts) == ("GET", ["batches"]):
            return 200, {"object": "list", "data": list(map(self._shown, self.batches)), "has_more": False}, {}
        if method == "GET" and parts[0] == "batches" and parts[-1] in self.batches:
            return 200, self._shown(parts[-1]), {}
        if method == "GET" and parts[0] == "files" and len(parts) == 3 and parts[1] in self.files:
            return 200, self.files[parts[1]], {}
        return None

    def _store(self, content: bytes) -> str:
        name = f"file-{len(self.files)}"
        self.files[name] = content
        return name

    def _file_object(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        return {"id": name, "object": "file", "bytes": size, "created_at": 0, "filename": name, "purpose": "batch",
                "status": "processed"}  # fmt: skip

    def _make(self, request: Mapping[str, Any]) -> Reply:
        if request.get("input_file_id") not in self.files:
            return 400, {"error": {"message": "no such input file", "code": "invalid_request"}}, {}
        name = f"batch-{len(self.batches)}"
        self.batches[name] = {
            "id": name, "object": "batch", "endpoint": request.get("endpoint"), "status": "in_progress",
            "input_file_id": request["input_file_id"], "completion_window": "24h", "created_at": int(time.time()),
            "metadata": request.get("metadata"), "ends": time.monotonic() + self._seconds,
        }  # fmt: skip
        return 200, self._shown(name), {}

    def _shown(self, name: str) -> dict[str, Any]:
        batch = self.batches[name]
        if batch["status"] == "in_progress" and time.monotonic() >= batch["ends"]:
            good, bad = self._work(self.files[batch["input_file_id"]])
            batch.update(status="completed", output_file_id=self._store(good), error_file_id=self._store(bad))
        return {key: value for key, value in batch.items() if key != "ends"}

    def _work(self, content: bytes) -> tuple[bytes, bytes]:
        """Return the result file and the error file."""
        files: tuple[list[str], list[str]] = ([], [])
        for line in content.splitlines():
            row = json.loads(line)
            reply = self._complete(json.dumps(row["body"]).encode())
            status, body, _ = reply or (500, {"error": {"message": "lost", "code": "lost"}}, {})
            shown = body if not isinstance(body, bytes) else {"broken": body.decode("utf-8", "replace")}
            result = {"custom_id": row["custom_id"], "response": {"status_code": status, "body": shown}, "error": None}
            files[status != 200].append(json.dumps(result) + "\n")
        return "".join(files[0]).encode(), "".join(files[1]).encode()


def file_in(body: bytes, content_type: str) -> bytes:
    """Return the file in a multipart form. Raises `ValueError` where there is none."""
    boundary = content_type.partition("boundary=")[2].strip('"').encode()
    if not boundary:
        raise ValueError("no multipart form")
    for part in body.split(b"--" + boundary):
        head, _, content = part.partition(b"\r\n\r\n")
        if b'name="file"' in head:
            return content.removesuffix(b"\r\n")
    raise ValueError("no file in the form")
