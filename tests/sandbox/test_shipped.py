"""The models that ship: whole, made by the recipe beside them, laid down once, never over somebody's own run."""

from __future__ import annotations

import hashlib
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.disk import content_id, read_manifest_fields, write_json
from kinject.errors import InputError
from kinject.models import model_hash
from kinject.recipe import read_recipe
from kinject.sandbox import BASE, INSTRUCT, ShippedRun
from kinject.train.run import run as train

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[BASE, INSTRUCT], ids=lambda run: run.name)
def shipped(request: pytest.FixtureRequest) -> ShippedRun:
    """Each run that ships."""
    run: ShippedRun = request.param
    return run


@pytest.fixture
def manifest(shipped: ShippedRun) -> dict[str, Any]:
    """The manifest that ships with it."""
    return _manifest(shipped)


@pytest.fixture
def copy(tmp_path: Path, shipped: ShippedRun) -> Path:
    """A run folder with its copy."""
    assert shipped.write(tmp_path / "copy")
    return tmp_path / "copy"


def _manifest(run: ShippedRun) -> dict[str, Any]:
    manifest = read_manifest_fields(run.folder / "manifest.json")
    assert manifest is not None
    return manifest


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_recipe_weights_and_tokenizer_are_those_of_one_run(
    shipped: ShippedRun, manifest: dict[str, Any]
) -> None:
    recipe = read_recipe(ROOT / shipped.recipe)
    sections = {
        key: recipe.raw.get(key)
        for key in ("seed", "method", "model", "adapter", "corpus", "trainer")
    }
    # test_first_run.py and test_chat.py compare this hash with the corpora
    inputs = {"corpus": manifest["inputs"]["corpus"]}
    if shipped is INSTRUCT:
        inputs |= {
            "replay": _manifest(BASE)["inputs"]["corpus"],
            "model": model_hash(BASE.folder / "model"),
        }
    assert manifest["inputs"] == {**inputs, "fingerprint": content_id(inputs, sections)}, (
        "the recipe was changed: ship again"
    )
    assert manifest["counts"]["finished"]
    assert manifest["counts"]["steps"] == recipe.trainer["max_steps"]
    for name, digest in manifest["outputs"].items():
        assert hashlib.sha256((shipped.folder / name).read_bytes()).hexdigest() == digest
    listed = dict(
        line.split("  ")[::-1]
        for line in (shipped.folder / "model/SHA256SUMS").read_text().splitlines()
    )
    assert listed == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in _bytes(shipped.folder / "model").items()
        if name != "SHA256SUMS"
    }
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= listed.keys()


def test_a_shipped_model_is_installed_once(shipped: ShippedRun, copy: Path) -> None:
    assert _bytes(copy) == _bytes(shipped.folder)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"}
    assert not shipped.write(copy)
    assert {
        path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"
    } == before


def test_a_whole_copy_is_known_by_its_bytes_and_another_by_its_manifest(
    shipped: ShippedRun, copy: Path, manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Reading it imports pydantic, two fifths of `kinject sandbox base` where all is there.
        patch.setattr("kinject.manifests.read_manifest", None)
        assert not shipped.write(copy)
    write_json(copy / "manifest.json", {**manifest, "written": "2020-02-29T12:00:00+00:00"})
    before = _bytes(copy)
    assert not shipped.write(copy)
    assert _bytes(copy) == before


def test_a_stop_at_any_file_and_a_damaged_copy_are_repaired(
    shipped: ShippedRun, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "manifest.json").unlink()  # it is written last
    (copy / "log.jsonl").unlink()
    (copy / ".model.part").mkdir()
    (copy / ".model.part" / "config.json").write_text("{")
    assert shipped.write(copy)
    assert _bytes(copy) == _bytes(shipped.folder)
    weights = copy / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    assert shipped.write(copy)
    assert "model.safetensors: its bytes are not those that were written" in caplog.text
    assert _bytes(copy) == _bytes(shipped.folder)
    shutil.rmtree(copy / "model")
    assert shipped.write(copy)
    assert _bytes(copy) == _bytes(shipped.folder)


def test_somebodys_own_run_is_never_written_over(
    shipped: ShippedRun, copy: Path, manifest: dict[str, Any], tmp_path: Path
) -> None:
    (
        copy / "model/SHA256SUMS"
    ).unlink()  # now it is not ours: a model trained here, by the same recipe
    (copy / "model/model.safetensors").write_bytes(b"mine")
    before = _bytes(copy)
    assert not shipped.write(copy)
    assert not shipped.is_in(copy)
    for change in (
        {"inputs": {"fingerprint": "of another recipe"}},
        {"counts": {"finished": False}},
    ):
        write_json(copy / "manifest.json", {**manifest, **change})
        with pytest.raises(
            InputError, match="holds another run, or one that is unfinished or damaged"
        ):
            shipped.write(copy)
    (copy / "manifest.json").write_bytes(before["manifest.json"])
    assert _bytes(copy) == before
    (tmp_path / "begun/checkpoint-500").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"kinject train {re.escape(shipped.recipe)} --resume"):
        shipped.write(tmp_path / "begun")


def test_train_takes_an_installed_model_for_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    BASE.write()
    corpus = tmp_path / "runs/sandbox/base-corpus.jsonl"
    corpus.write_text("{}\n")
    digest = _manifest(BASE)["inputs"]["corpus"]
    monkeypatch.setattr(
        import_module("kinject.train.run"), "check_output", lambda path, fix: digest
    )
    recipe = read_recipe(ROOT / "recipes/sandbox/base.yaml", verb="train")
    result = train(recipe, resume=False, overwrite=False)
    assert result.already_done
    assert "the weights were rounded to bfloat16, to ship" in result.notes
