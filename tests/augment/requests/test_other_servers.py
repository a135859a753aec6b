"""The engine against a server that someone else wrote: `transformers serve` with a tiny model made on the spot."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from kinject.augment import augment
from kinject.disk import read_jsonl
from kinject.models import new_model
from kinject.recipe import Recipe

pytest.importorskip("fastapi", reason="transformers[serving] is not installed")
pytest.importorskip("uvicorn", reason="transformers[serving] is not installed")

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
SECONDS_TO_START = 180


@pytest.fixture
def chat_model(tmp_path: Path, tiny_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    """A folder with a random Llama that reads 2,048 tokens and has a chat template."""
    folder = tmp_path / "chat-model"
    new_model(CONFIG, tiny_tokenizer, seed=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def served(chat_model: Path, tmp_path: Path, forked: None) -> Iterator[str]:
    """The base_url of `transformers serve` over the model, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(chat_model)]
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=log, stderr=log, env={**os.environ},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + SECONDS_TO_START
            while not _is_up(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
                assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()[-2000:]
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait(60)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def test_every_answer_of_transformers_serve_is_read_counted_judged_and_kept(
    make_recipe: Callable[..., Recipe], served: str, chat_model: Path
) -> None:
    fields: dict[str, Any] = {
        "generator__model": str(chat_model), "generator__max_tokens": 6, "styles": {"paraphrase": 1},
        "max_attempts": 1,
    }  # fmt: skip
    first = augment(make_recipe(served, **fields))
    assert (first.asked, first.n_sent, first.failed) == (12, 12, {})
    assert first.got + sum(first.refused.values()) == 12
    assert first.tokens_in > 12 * 100
    assert 0 < first.tokens_out <= 12 * 6
    for _, row in read_jsonl(first.rejected_path):
        assert row["text"]
        assert row["usage"]["tokens_out"] <= 6
        if row["usage"]["tokens_out"] == 6:
            assert row["reason"] == "truncated", json.dumps(row)
    again = augment(make_recipe(served, **fields))
    assert (again.n_sent, again.n_cached) == (0, 12)
