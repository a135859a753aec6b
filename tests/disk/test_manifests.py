"""Manifests: what they hold, what is refused, whose they are."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kinject.disk import file_hash, read_manifest_fields
from kinject.disk import run_folder as manifest_module
from kinject.disk.run_folder import check_output, read_manifest_beside, write_manifest
from kinject.errors import KinjectError
from kinject.version import package_version


def message_of(call: Callable[[], Any]) -> str:
    """Return the message of a call that fails."""
    with pytest.raises(KinjectError) as caught:
        call()
    return str(caught.value)


def test_a_manifest_of_another_shape_is_refused_and_another_programs_is_left_alone(
    tmp_path: Path,
) -> None:
    path, beside = tmp_path / "manifest.json", tmp_path / "corpus.jsonl"
    fix = "Delete it and run the same command again (kinject train: with --resume)."
    shape = (
        f"{path}: damaged: format_version, inputs or counts are missing or of another shape. {fix}"
    )
    whole = {"stage": "train", "format_version": 1, "inputs": {}, "counts": {}}
    for value in (
        *(
            {name: item for name, item in whole.items() if name != key}
            for key in ("format_version", "inputs", "counts")
        ),
        {**whole, "inputs": []},
        {**whole, "counts": 3},
    ):
        path.write_text(json.dumps(value))
        assert message_of(lambda: read_manifest_fields(path)) == shape
        assert message_of(lambda: read_manifest_beside(beside)) == shape
    path.write_text(json.dumps(whole))
    assert read_manifest_fields(path) == whole
    path.write_text('{"format_version": 99}')
    assert message_of(lambda: read_manifest_fields(path)).startswith(
        f"{path}: written by a newer kinject"
    )
    path.write_text(json.dumps({**whole, "format_version": 0}))
    assert message_of(lambda: read_manifest_fields(path)).startswith(
        f"{path}: damaged: format_version is 0"
    )
    for others in ('{"name": "a web page"}', "[1]"):
        path.write_text(others)
        assert read_manifest_beside(beside) is None
    path.write_text("{")
    assert message_of(lambda: read_manifest_beside(beside)).startswith(
        f"{path}: damaged: not JSON ("
    )
    assert message_of(lambda: read_manifest_beside(beside)).endswith(f"). {fix}")
    beside.write_text("1")
    write_manifest(path, stage="augment", inputs={}, recipe={}, counts={}, outputs=[beside.name])
    assert check_output(beside, "Mend it.") == file_hash(beside)
    beside.write_text("2")
    changed = "its bytes are not those that were written (manifest.json beside it has their hash). Mend it."
    assert message_of(lambda: check_output(beside, "Mend it.")) == f"{beside}: {changed}"


def test_a_manifest_says_what_made_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(manifest_module, "_versions", manifest_module._versions.__wrapped__)
    monkeypatch.setattr(sys, "argv", ["/bin/kinject", "augment", "x.yaml"])
    recipe = {"run_dir": "x"}
    write_manifest(
        tmp_path / "manifest.json",
        stage="augment",
        inputs={"a": "1"},
        recipe=recipe,
        counts={"n": 2},
    )
    manifest = read_manifest_fields(tmp_path / "manifest.json")
    assert manifest is not None
    written = datetime.fromisoformat(manifest.pop("written"))
    assert abs((datetime.now(UTC) - written).total_seconds()) < 3600
    names = (
        "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "numpy",
        "scipy", "bm25s", "openai",
    )  # fmt: skip
    versions = {name: "not installed" if name == "trl" else "1.2" for name in names}
    versions = {"kinject": package_version(), **versions}
    assert manifest == {
        "format_version": 1, "stage": "augment", "command": ["kinject", "augment", "x.yaml"], "inputs": {"a": "1"},
        "recipe": recipe, "versions": {"python": platform.python_version(), **versions},
        "machine": {"system": platform.system(), "processor": platform.machine()}, "counts": {"n": 2}, "outputs": {},
    }  # fmt: skip
