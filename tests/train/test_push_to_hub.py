"""push_to_hub against a server on this machine that speaks the hub's interface: the model arrives as it was saved."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kinject.errors import TrainingError
from kinject.recipe import Recipe
from kinject.train import train

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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which the hub's client takes for the only one."""
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


def test_the_model_arrives_as_it_was_saved_and_nothing_else(
    make_recipe: Callable[..., Recipe], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_private_repo": True}
    recipe = make_recipe(
        trainer={**publish, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    )
    model = Path(train(recipe).model_dir)
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json", "SHA256SUMS"} <= hub.files.keys()
    assert (hub.commits, hub.tokens) == (["Model save"], {f"Bearer {TOKEN}"})
    assert (hub.created["name"], hub.created["organization"]) == ("mine", "me")
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert hub.unknown == []
    assert not (recipe.run_dir / "README.md").exists()


def test_the_branch_is_made_before_the_first_step_and_gets_the_model(
    make_recipe: Callable[..., Recipe], hub: Hub
) -> None:
    publish = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_revision": "v2"}
    recipe = make_recipe(trainer={**publish, "max_steps": 1})
    train(recipe)
    assert (hub.branches, hub.committed_to) == (["v2"], ["v2"])


def test_an_upload_that_the_hub_refuses_is_one_line_and_leaves_the_model(
    make_recipe: Callable[..., Recipe], hub: Hub
) -> None:
    hub.full = True
    recipe = make_recipe(trainer={"push_to_hub": True, "hub_model_id": "me/mine", "max_steps": 2})
    message = r"run/model is written, but was not uploaded to me/mine: .*507.* Upload it: hf upload me/mine "
    with pytest.raises(TrainingError, match=message) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    assert (recipe.run_dir / "model" / "model.safetensors").is_file()


def test_a_repository_that_the_hub_refuses_is_one_line_before_the_first_step(
    make_recipe: Callable[..., Recipe], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"{hub.url}/elsewhere")
    recipe = make_recipe(trainer={"push_to_hub": True, "hub_model_id": "me/mine", "max_steps": 2})
    with pytest.raises(
        TrainingError, match=r"trainer\.push_to_hub: .*404.* Check HF_TOKEN and"
    ) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    assert not (recipe.run_dir / "log.jsonl").exists()
