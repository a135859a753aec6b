"""Names on the hub: an unreachable hub is noticed at once, the local cache works without it, and a slow one has time."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from kinject import hub
from kinject.errors import InputError
from kinject.eval.scoring.answers import hash_model
from kinject.heap import read_documents
from kinject.models import LoadOptions, load_config, load_model, load_tokenizer, model_hash
from kinject.recipe import is_model

_COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def no_proxy_and_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [
        name
        for name in os.environ
        if name.lower().endswith("_proxy") or name == "HF_HUB_ETAG_TIMEOUT"
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub at a port of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


def in_cache(model: Path, cache: Path) -> None:
    """Put a copy of the folder `model` into the cache, as the hub's client does, as org/tiny."""
    folder = cache / "models--org--tiny"
    shutil.copytree(model, folder / "snapshots" / _COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT)


def test_an_unreachable_name_fails_at_the_first_attempt_in_one_line_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused(monkeypatch)
    attempts: list[object] = []
    connect = socket.create_connection

    def count(*address: Any, **options: Any) -> socket.socket:
        attempts.append(address)
        return connect(*address, **options)

    monkeypatch.setattr(socket, "create_connection", count)
    readers = (
        load_model,
        load_tokenizer,
        load_config,
        lambda name: list(read_documents(Path(name))),
    )
    for read in readers:
        attempts.clear()
        with pytest.raises(InputError) as caught:
            read("nobody/nothing")
        assert len(attempts) == 1
        message = str(caught.value)
        assert message.startswith("nobody/nothing: ")
        assert "the hub (127.0.0.1) cannot be reached (Connection refused)" in message
        assert "\n" not in message


def test_a_hub_that_does_not_answer_is_given_up_unless_more_time_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    granted: list[float] = []

    def slow(_: object, timeout: float) -> contextlib.nullcontext[None]:
        granted.append(timeout)
        answers.wait()
        return Closed()

    class Closed(contextlib.nullcontext[None]):
        def close(self) -> None: ...

    monkeypatch.setattr(hub, "_SECONDS", 0.1)
    monkeypatch.setattr(socket, "create_connection", slow)
    assert hub.unreachable_reason() == "the hub (huggingface.co) cannot be reached (no answer)"
    answers.set()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "500")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 500)
    assert hub.unreachable_reason() == ""
    assert granted == [0.1, 500]


def test_a_cached_model_is_loaded_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    refused(monkeypatch)
    in_cache(tiny_model, tmp_path / "cache")
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        loaded, local = load_model("org/tiny"), load_model(str(tiny_model))
        ids = torch.arange(40)[None]
        assert torch.equal(loaded.model(ids).logits, local.model(ids).logits)
        with pytest.raises(
            InputError,
            match="org/other: no model of this name: no such folder, not in the local cache",
        ):
            load_model("org/other")


def test_a_hub_or_a_proxy_that_listens_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.unreachable_reason() == ""
        assert hub.find_source("any/name", "model") == "any/name"
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        assert "cannot be reached" in hub.unreachable_reason()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert hub.unreachable_reason() == ""


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./gone", "a/b/c", "~/x", "", "a" * 5000, "nul\0l", "no such"]
)
def test_a_path_that_is_gone_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(InputError):
        hub.find_source(name, "model")


def test_a_model_in_a_package_has_the_same_name_on_each_machine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "libraries" / "a_small_model")
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    name = "package:a-small-model"
    assert is_model(name)
    loaded = load_model(name, LoadOptions(device="cpu"))
    # An adapter that is trained on it names its base so.
    assert loaded.model.name_or_path == name
    assert not any(str(tmp_path) in note for note in loaded.notes)
    assert model_hash(Path(name)) == model_hash(tiny_model)
    assert hash_model(name, None) == hash_model(str(tiny_model), None)
    # What is not installed is no name of the hub.
    assert not is_model("package:no-such-model")
    with pytest.raises(
        InputError, match=r"no such package. Install it: .* --no-deps no-such-model"
    ):
        load_config("package:no-such-model")
