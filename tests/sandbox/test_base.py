"""The base model that ships: whole, made by the recipe beside it, laid down once, never over somebody's own run."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors

from kinject.cli import main
from kinject.disk import content_id, read_manifest, write_checked_json
from kinject.errors import InputError
from kinject.recipe import read_recipe
from kinject.sandbox.base import SHIPPED, holds_shipped_base, write_base
from kinject.train.run import run as train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The manifest that ships."""
    found = read_manifest(SHIPPED / "manifest.json")
    assert found is not None
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run folder with the shipped base."""
    assert write_base(tmp_path / "base")
    return tmp_path / "base"


def _bytes(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_recipe_weights_and_tokenizer_are_those_of_one_run(manifest: dict[str, Any]) -> None:
    recipe = read_recipe(ROOT / "recipes/sandbox/base.yaml")
    sections = {key: recipe.raw.get(key) for key in ("seed", "method", "model", "adapter", "corpus", "trainer")}
    inputs = {"corpus": manifest["inputs"]["corpus"]}  # tests/test_first_run.py compares it with the corpus
    assert manifest["inputs"] == {**inputs, "fingerprint": content_id(inputs, sections)}, (
        "the recipe was changed: ship again"
    )
    assert manifest["counts"]["finished"]
    assert manifest["counts"]["steps"] == recipe.trainer["max_steps"]
    for name, digest in manifest["outputs"].items():
        assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == digest
    listed = dict(line.split("  ")[::-1] for line in (SHIPPED / "model/SHA256SUMS").read_text().splitlines())
    assert listed == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in _bytes(SHIPPED / "model").items()
        if name != "SHA256SUMS"
    }
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= listed.keys()


def test_the_weights_are_small_and_of_the_recipes_shape(manifest: dict[str, Any]) -> None:
    config = json.loads((SHIPPED / "model/config.json").read_text())
    wanted = manifest["recipe"]["model"]["new"]
    assert {key: config[key] for key in wanted} == wanted
    with safetensors.safe_open(SHIPPED / "model/model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert sum(len(content) for content in _bytes(SHIPPED).values()) < 2.3e6
    card = (SHIPPED / "README.md").read_text("utf-8")
    assert f"{sum(tensor.numel() for tensor in tensors.values()):,} parameters" in card
    assert f"{manifest['counts']['steps']:,} steps" in card


def test_it_is_laid_down_once(base: Path) -> None:
    assert _bytes(base) == _bytes(SHIPPED)
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*") if path.name != ".lock"}
    assert not write_base(base)
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*") if path.name != ".lock"} == before


def test_a_stop_at_any_file_and_a_damaged_copy_are_repaired(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base / "manifest.json").unlink()  # it is written last
    (base / "log.jsonl").unlink()
    (base / ".model.part").mkdir()
    (base / ".model.part" / "config.json").write_text("{")
    assert write_base(base)
    assert _bytes(base) == _bytes(SHIPPED)
    weights = base / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert write_base(base)
    assert "model.safetensors: its bytes are not those that were written" in caplog.text
    assert _bytes(base) == _bytes(SHIPPED)
    shutil.rmtree(base / "model")
    assert write_base(base)
    assert _bytes(base) == _bytes(SHIPPED)


def test_somebodys_own_run_is_never_written_over(base: Path, manifest: dict[str, Any], tmp_path: Path) -> None:
    (base / "model/SHA256SUMS").unlink()  # now it is not ours: a base trained here, by the same recipe
    (base / "model/model.safetensors").write_bytes(b"mine")
    before = _bytes(base)
    assert not write_base(base)
    assert not holds_shipped_base(base)
    for change in ({"inputs": {"fingerprint": "of another recipe"}}, {"counts": {"finished": False}}):
        write_checked_json(base / "manifest.json", {**manifest, **change})
        with pytest.raises(InputError, match="holds another run, or one that is unfinished or damaged"):
            write_base(base)
    (base / "manifest.json").write_bytes(before["manifest.json"])
    assert _bytes(base) == before
    (tmp_path / "begun/checkpoint-500").mkdir(parents=True)
    with pytest.raises(InputError, match=r"kinject train recipes/sandbox/base\.yaml --resume"):
        write_base(tmp_path / "begun")


def test_the_command_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sandbox", "base"]) == main(["sandbox", "base"]) == 0
    assert capsys.readouterr().out == (
        "runs/sandbox/base/model: the base model that ships\n"
        "runs/sandbox/base/model: already there: the base model that ships\n"
    )


def test_training_finds_it_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    write_base()
    corpus = tmp_path / "runs/sandbox/base-corpus.jsonl"
    corpus.write_text("{}\n")
    digest = manifest["inputs"]["corpus"]
    monkeypatch.setattr("kinject.train.run.check_output", lambda path, fix: digest)
    recipe = read_recipe(ROOT / "recipes/sandbox/base.yaml", verb="train")
    result = train(recipe, resume=False, overwrite=False)
    assert result.already_done
    assert "the weights were rounded to bfloat16, to ship" in result.notes
