"""A loopback endpoint in a thread, documents of the sandbox, and recipes over both."""

import json
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from faulty_server import FaultySandbox, Hostile, Talk
from kinject.recipe import Recipe, read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country


@pytest.fixture
def serving() -> Iterator[Callable[..., FaultySandbox]]:
    """Start an endpoint: serving(faults={...}, ...) -> its URL and what it saw."""
    servers: list[FaultySandbox] = []

    def start(**options: Any) -> FaultySandbox:
        servers.append(FaultySandbox(**options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Twelve sandbox entries."""
    people = create_country(n_known=1, n_new=12).new
    rows = [{"id": p.name, "title": p.name, "text": render_entry(p, 0)} for p in people]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_recipe(tmp_path: Path, documents: Path) -> Callable[..., Recipe]:
    """A recipe over `documents`: make_recipe(url or None, key=value, ...); dotted keys as on the command line."""

    def make(url: str | None = None, **overrides: Any) -> Recipe:
        kind = f"{{kind: openai, base_url: '{url}', model: sandbox}}" if url else "{kind: sandbox}"
        path = tmp_path / "recipe.yaml"
        path.write_text(
            f"run_dir: {tmp_path}/run\naugment:\n  documents: {documents}\n  styles: {{paraphrase: 3}}\n  generator: {kind}\n"
        )
        settings = [
            f"augment.{key.replace('__', '.')}={json.dumps(value)}"
            for key, value in overrides.items()
        ]
        return read_recipe(path, settings, verb="augment")

    return make


@pytest.fixture
def exact_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only exact copies count as echoes, so that a run of the sandbox's short entries refuses none by chance."""
    monkeypatch.setattr(import_module("kinject.augment.checks.checker"), "MAX_OVERLAP", 0.99)


@pytest.fixture(autouse=True)
def the_key_is_left_nowhere(canary_key: str) -> None:
    """Every test of this folder has a key, and leaves it in no file, output, log or error."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait milliseconds."""
    monkeypatch.setattr("kinject.llm.sender.FIRST_PAUSE", 0.002)


@pytest.fixture
def hostile() -> Iterator[Callable[..., Hostile]]:
    """Start a server: hostile(script)."""
    servers: list[Hostile] = []

    def start(script: Callable[[Talk, int], bool | None]) -> Hostile:
        server = Hostile(script)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def few(
    make_recipe: Callable[..., Recipe], documents: Path, exact_copies_only: None
) -> Callable[..., Recipe]:
    """A recipe over the first four documents, asked for one at a time: few(url, key=value, ...)."""
    documents.write_text("".join(documents.read_text().splitlines(keepends=True)[:4]))

    def recipe(url: str, **fields: Any) -> Recipe:
        settings = {"styles": {"paraphrase": 1}, "generator__concurrency": 1, "max_attempts": 2}
        return make_recipe(url, **(settings | fields))

    return recipe


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes takes milliseconds."""
    monkeypatch.setattr("kinject.llm.sender.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr("kinject.llm.sender.LONGEST_WAIT", 0.02)
    monkeypatch.setattr("kinject.llm.endpoint.MOST_BYTES", 1_000_000)
