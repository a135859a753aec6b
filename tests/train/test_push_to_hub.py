"""`trainer.push_to_hub` against a local server with the hub's interface: huggingface_hub makes every request itself."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load, load_file
from transformers.utils import hub as transformers_hub

from kinject.cli import main
from kinject.recipe import Recipe
from kinject.train import train

MakeRecipe = Callable[..., Recipe]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
TOKEN = "hf_7f3A9zQw0Xk5e1bD0pLm2vR8tYc"  # noqa: S105


class Hub:
    """What a hub keeps of the requests of an upload: repositories, large files by hash, and the committed files."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.tokens: set[str | None] = set()
        self.endpoint = ""

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any] | None:
        """Return the JSON that answers a request, None if the interface has no such request."""
        if (method, path) == ("GET", "/api/whoami-v2"):
            return {"type": "user", "name": "arden", "auth": {"accessToken": {"role": "write"}}}
        if (method, path) == ("POST", "/api/repos/create"):
            self.created.append(json.loads(body))
            return {"url": f"{self.endpoint}/arden/{self.created[-1]['name']}"}
        if path == "/api/validate-yaml":  # the head of the model card
            return {"errors": [], "warnings": []}
        if path.startswith("/large/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/large/")
            self.large[path.removeprefix("/large/")] = body
            return {}
        if not path.startswith(("/api/models/arden/injected/", "/arden/injected.git/")):
            return None
        if path.endswith("/preupload/main"):
            return {"files": [{"path": file["path"], "shouldIgnore": False,
                               "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                              for file in json.loads(body)["files"]]}  # fmt: skip
        if path.endswith("/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{self.endpoint}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]]}  # fmt: skip
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            values = [line["value"] for line in lines]
            files = {value["path"]: base64.b64decode(value["content"]) if "content" in value else self.large[value["oid"]]
                     for value in values[1:]}  # fmt: skip
            self.commits.append((values[0]["summary"], files))
            return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.endpoint}/arden/injected/commit/0"}
        if method == "GET" and "/revision/" in path:
            return {"id": "arden/injected", "sha": "0" * 40, "siblings": []}
        return None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, and a token for it."""
    kept = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                body += self.rfile.read(size)
                self.rfile.readline()
            path = self.path.partition("?")[0]
            if path.startswith(("/api/repos/", "/api/models/", "/arden/")):
                kept.tokens.add(self.headers.get("Authorization"))
            answer = kept.answer(self.command, path, body)
            self.send_response(404 if answer is None else 200)
            text = json.dumps(answer or {}).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else text)

        do_GET = do_POST = do_PUT = do_HEAD = _handle

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", kept.endpoint)  # HF_ENDPOINT, read when it is imported
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # xet has a protocol of its own
        monkeypatch.setattr(transformers_hub, "_hf_api", None)  # made for the endpoint at its first use
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield kept
        server.shutdown()


def test_a_trained_model_is_pushed_whole_and_without_the_token(make_recipe: MakeRecipe, hub: Hub) -> None:
    recipe = make_recipe(
        trainer={"push_to_hub": True, "hub_model_id": "injected", "hub_private_repo": True, "max_steps": 3}
    )
    train(recipe)
    assert [(made["name"], made["visibility"]) for made in hub.created] == [("injected", "private")]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    summary, files = hub.commits[-1]
    assert summary == "End of training"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    pushed, kept = load(files["model.safetensors"]), load_file(recipe.run_dir / "model" / "model.safetensors")
    assert pushed.keys() == kept.keys()
    assert all(bool((pushed[name] == kept[name]).all()) for name in kept)
    assert not any(name.startswith("checkpoint-") for name in files)
    assert not any(TOKEN.encode() in content for content in files.values())
    assert not any(TOKEN.encode() in path.read_bytes() for path in recipe.run_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize(("refused", "left"), [("/api/repos/create", False), ("/commit/main", True)])
def test_a_hub_that_refuses_is_one_line_and_costs_no_model(
    make_recipe: MakeRecipe, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    refused: str, left: bool,
) -> None:  # fmt: skip
    answer = hub.answer
    monkeypatch.setattr(
        hub, "answer", lambda method, path, body: None if path.endswith(refused) else answer(method, path, body)
    )
    recipe = make_recipe(trainer={"push_to_hub": True, "hub_model_id": "injected", "max_steps": 1})
    assert main(["train", str(recipe.path)]) == 2
    err = capsys.readouterr().err
    assert "kinject train: trainer.push_to_hub: Client error '404 Not Found'" in err
    assert ("hf upload arden/injected" in err) == left
    assert (recipe.run_dir / "model" / "model.safetensors").exists() == left
