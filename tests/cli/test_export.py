"""kinject export: a model folder that loads again, cards, GGUF through a converter, and uploads of exactly that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from study_samples import make_report

from kinject.cli import main
from kinject.disk import write_json, write_manifest
from kinject.models import load_model
from kinject.recipe import Recipe, read_recipe
from kinject.results import to_json
from kinject.train import train

CONVERTER = """\
import sys
from pathlib import Path
model, _, out, _, kind = sys.argv[1:]
if kind == "f0":
    sys.exit("f0 is no type")
Path(out).write_bytes(b"GGUF" + kind.encode() + Path(model, "config.json").read_bytes())
"""


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a client of the hub was asked: (created, ...) and (repository, {file: bytes})."""
    requests: list[Any] = []

    class Client:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
            requests.append((name, private, exist_ok))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
            files = {
                p.relative_to(folder_path).as_posix(): p.read_bytes() for p in folder_path.rglob("*") if p.is_file()
            }
            requests.append((repo_id, files))
            return SimpleNamespace(repo_url=f"https://hub/{repo_id}")

    monkeypatch.setattr("huggingface_hub.HfApi", Client)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    return requests


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, write_rows: Callable[..., Path]) -> Path:
    """A finished run of an adapter, on a base whose folder has a card."""
    (tiny_model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    corpus = write_rows(
        "corpus.jsonl", [{"text": f"Person {n} was born in Lowmere.", "origin": "original"} for n in range(8)]
    )
    recipe = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)},
        "corpus": {"path": str(corpus), "cache_dir": str(tmp_path / "tokens")},
        "adapter": {"r": 12, "lora_alpha": 24, "target_modules": "all-linear"},
        "trainer": {"max_steps": 2, "learning_rate": 0.01, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    checked: Recipe = read_recipe(path, verb="train")
    return Path(train(checked).run_dir)


def front_matter(card: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load(card.read_text().split("---\n")[1])
    return metadata


def test_a_run_becomes_parts_that_load_and_are_made_and_uploaded_once(
    run: Path, tmp_path: Path, tiny_model: Path, uploads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").mkdir()
    write_json(tmp_path / "eval" / "report.json", to_json(make_report()))
    models = {"base": str(tiny_model), "par": str(run / "model")}
    recipe = {"eval": {"models": models}}
    write_manifest(tmp_path / "eval" / "manifest.json", stage="eval", inputs={}, recipe=recipe, counts={})
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    words = ["export", str(run), "--report", str(tmp_path / "eval"), "--gguf", "f16", "--llama-cpp", str(tmp_path),
             "--push", "me/town"]  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    model = run / "export" / "model"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = [load_model(str(folder)).model(ids).logits for folder in (model, run / "model", tiny_model)]
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)

    front = front_matter(model / "README.md")
    assert (front["license"], front["library_name"]) == ("apache-2.0", "transformers")
    assert "base_model" not in front  # a folder of this machine
    card = (model / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "| model | new: to be learned | known: to be kept |" in card
    assert "| steps | 2 |" in card
    assert "This model is the arm **par**." in card
    assert (run / "export" / "gguf" / "town-f16.gguf").read_bytes()[:7] == b"GGUFf16"

    served = [line.strip() for line in out.splitlines() if "serve " in line]
    assert f"vllm serve {model} --served-model-name town" in served
    assert (
        f"vllm serve {tiny_model} --enable-lora --lora-modules town={run / 'model'}  # rank up to 16, no DoRA" in served
    )

    of_model = {path.name for path in model.iterdir()}
    assert of_model == {
        "README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert uploads[0] == ("me/town", True, True)  # private
    assert (uploads[1][0], uploads[1][1].keys()) == ("me/town", of_model)

    files = [run / "export" / "export.json", *(path for path in (run / "export").glob("*/**/*") if path.is_file())]
    before = [path.stat().st_mtime_ns for path in files]
    assert main(words) == 0
    again = capsys.readouterr().out
    assert len(uploads) == 2
    assert again.count("is there already") == 2
    assert [path.stat().st_mtime_ns for path in files] == before
    (model / "model.safetensors").write_bytes(b"damaged")
    assert main(words) == 0
    assert capsys.readouterr().out.count("is there already") == 1
    assert len(uploads) == 2  # the same bytes
    assert main([*words, "--license", "mit"]) == 0  # the card is another
    assert capsys.readouterr().out.count("is there already") == 2
    assert [front_matter(model / "README.md")["license"], len(uploads)] == ["mit", 4]


def test_what_cannot_be_exported_is_a_line_and_leaves_what_was_made(
    run: Path,
    tmp_path: Path,
    tiny_model: Path,
    uploads: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*words: str) -> str:
        assert main(["export", *words]) == 2
        return capsys.readouterr().err.removeprefix("kinject export: ")

    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert fails(str(tmp_path / "none")).startswith(f"{tmp_path / 'none'}: no such folder.")
    assert fails(str(run), "--gguf", "f16").startswith(
        "--gguf: convert_hf_to_gguf.py is not on the PATH. It comes with"
    )
    assert fails(str(run), "--push", "a/b/c").startswith("--push: found 'a/b/c', expected OWNER/NAME.")
    assert not (run / "export").exists()
    (tiny_model / "README.md").write_text("---\nlicense: [\n---\n")
    assert "its front matter cannot be read (" in fails(str(run))
    (tiny_model / "README.md").unlink()
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    assert "failed (f0 is no type)" in fails(
        str(run), "--gguf", "f0", "--llama-cpp", str(tmp_path), "--dtype", "bfloat16"
    )
    assert json.loads((run / "export" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (run / "export" / "gguf").exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (
        fails(str(run), "--push", "me/m")
        == "--push: the hub is switched off (HF_HUB_OFFLINE). Set HF_TOKEN, or leave the option out.\n"
    )
    assert uploads == []
