"""Runs a faulty endpoint around a block, and writes a recipe for it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from faulty_server import Hostile

from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country


def recipe_of(tmp_path: Path, url: str, n: int) -> list[str]:
    people = create_country(n_known=1, n_new=n).new
    rows = [{"id": person.name, "title": person.name, "text": render_entry(person, 0)} for person in people]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\naugment: {{documents: {tmp_path}/documents.jsonl, styles: {{paraphrase: 1}}, "
        f"max_attempts: 1, generator: {{kind: openai, base_url: '{url}', model: sandbox, concurrency: 1}}}}\n"
    )
    return ["augment", str(path)]


@contextlib.contextmanager
def serving(server: Hostile) -> Iterator[None]:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
