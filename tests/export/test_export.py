"""kinject export: a model folder that loads again, with its card."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from study_samples import make_report

import kinject
from kinject.cli import main
from kinject.disk import lock_dir, write_json, write_manifest, write_sha256sums
from kinject.errors import DiskError, InputError
from kinject.eval.chat import ChatSetup, open_chat
from kinject.eval.scoring.answers import hash_model
from kinject.export import ExportOptions, _model_card, _name_of, _own_arm, _Source, export
from kinject.manifests import read_manifest
from kinject.models import load_model
from kinject.recipe import Recipe, read_recipe
from kinject.results import to_json
from kinject.train import train
from small import write_training


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, write_rows: Callable[..., Path]) -> Path:
    """A finished run of an adapter."""
    corpus = write_rows(
        "corpus.jsonl",
        [{"text": f"Person {n} was born in Lowmere.", "origin": "original"} for n in range(8)],
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


def test_a_run_becomes_a_folder_that_loads_with_its_card(
    run: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").mkdir()
    write_json(tmp_path / "eval" / "report.json", to_json(make_report()))
    models = {"base": str(tiny_model), "par": str(run / "model")}
    write_manifest(
        tmp_path / "eval" / "manifest.json", stage="eval", inputs={},
        recipe={"eval": {"models": models, "questions": {"new": "new.jsonl"}}},
        counts={"answers": 0, "scored_now": 0, "stored": 0},
    )  # fmt: skip
    words = ["export", str(run), "--report", str(tmp_path / "eval"), "--license", "apache-2.0"]
    for _ in range(2):  # again: the folder is replaced
        assert main(words) == 0
    out = capsys.readouterr().out
    model = run / "export" / "model"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = [
            load_model(str(folder)).model(ids).logits
            for folder in (model, run / "model", tiny_model)
        ]
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)

    card = (model / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["library_name"]) == ("apache-2.0", "transformers")
    assert "base_model" not in front  # a folder of this machine
    assert str(tmp_path) not in card
    assert "| model | new: to be learned | known: to be kept |" in card
    assert "| steps | 2 |" in card
    assert "This model is the arm **par**." in card

    served = [line.strip() for line in out.splitlines() if "serve " in line]
    assert f"vllm serve {model} --served-model-name run" in served
    assert (
        f"vllm serve {tiny_model} --enable-lora --lora-modules run={run / 'model'}  # rank up to 16, no DoRA"
        in served
    )
    assert {path.name for path in model.iterdir()} == {
        "README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_a_model_has_the_name_of_its_documents_and_no_base_that_the_hub_refuses(
    tmp_path: Path,
) -> None:
    names = ("runs/ponds/train", "runs/ponds/pilot/train", "runs/cpt/model", "other/train", "runs")
    found = [_name_of(tmp_path / name) for name in names]
    assert found == ["ponds", "ponds-pilot", "cpt", "train", "runs"]
    source = _Source(tmp_path, "package:some-model", False, None)
    card = _model_card("ponds", source, ExportOptions(tmp_path))
    assert "Trained from the model of the Python package some-model with" in card
    assert "base_model" not in card
    for elsewhere in ("/home/me/llama", "runs/sandbox/base", "../base", "~/models/base"):
        card = _model_card("ponds", replace(source, base=elsewhere), ExportOptions(tmp_path))
        assert "Trained from a model in a local folder with" in card
        assert elsewhere not in card
    card = _model_card("ponds", replace(source, base="some-owner/base"), ExportOptions(tmp_path))
    assert "base_model: some-owner/base" in card


def test_a_card_names_the_revision_of_the_base(tmp_path: Path) -> None:
    model = {"path": "some-owner/base", "revision": "step512"}
    write_training(tmp_path, {"corpus": {"path": "c.jsonl"}, "model": model, "trainer": {}})
    whole = _Source(tmp_path, "some-owner/base", False, read_manifest(tmp_path))
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "revision": "v2"})
    adapter = _Source(tmp_path, "some-owner/base", True, None)
    for source, revision in ((whole, "step512"), (adapter, "v2")):
        card = _model_card("ponds", source, ExportOptions(tmp_path))
        assert f"Trained from some-owner/base (revision {revision}) with" in card
        assert "base_model: some-owner/base\n" in card


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"adapter": {"r": 2, "merge": True}}, r"Trained from random weights with .* \(a LoRA adapter, folded in\)\."),
        ({"adapter": {"type": "oft"}}, r"Trained .* \(an adapter of peft's type OFT, folded in\)\."),
        ({"model": {"freeze": ["*.mlp.*"]}}, r"Trained .* \(a part of the weights\)\."),
        ({}, r"Trained from random weights with .* \(all weights\)\."),
        (None, r"Exported with kinject \S+ from a folder without the run of its training\."),
    ],
)  # fmt: skip
def test_a_card_names_what_was_trained(
    tmp_path: Path, sections: dict[str, Any] | None, sentence: str
) -> None:
    manifest = None
    if sections is not None:
        recipe = {"corpus": {"path": "c.jsonl"}, "model": {}, "trainer": {}, **sections}
        write_training(tmp_path, recipe)
        manifest = read_manifest(tmp_path)
    source = _Source(tmp_path, "", False, manifest)
    card = _model_card("ponds", source, ExportOptions(tmp_path))
    assert re.search(f"^{sentence}$", card, re.MULTILINE), card


@pytest.mark.parametrize(
    ("kind", "words"),
    [("LORA", "a LoRA adapter, folded in"), ("VERA", "an adapter of peft's type VERA, folded in")],
)
def test_a_card_names_the_kind_of_an_adapter(tmp_path: Path, kind: str, words: str) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": kind})
    source = _Source(tmp_path, "some-owner/base", True, None)
    card = _model_card("ponds", source, ExportOptions(tmp_path))
    assert f"Trained from some-owner/base with kinject {kinject.__version__} ({words})." in card


def test_a_head_of_its_own_is_no_copy_of_the_embedding_for_other_servers_either(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Of a tied config transformers reads the head that is in the files, vLLM the embedding."""
    (tiny_model / "SHA256SUMS").unlink(missing_ok=True)
    weights = load_file(tiny_model / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    for name, head in (("stale", table.flip(0)), ("same", table.clone())):
        config = json.loads((tiny_model / "config.json").read_text())
        write_json(tiny_model / "config.json", {**config, "tie_word_embeddings": True})
        save_file(
            {**weights, "lm_head.weight": head.contiguous()},
            tiny_model / "model.safetensors",
            metadata={"format": "pt"},
        )
        folder = export(ExportOptions(tiny_model, out=tmp_path / name)).folder
        written = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert written == (name == "same")
        assert torch.equal(load_model(str(folder)).model.lm_head.weight, head)


def test_what_cannot_be_exported_is_a_line_and_leaves_what_was_made(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*words: str) -> str:
        assert main(["export", *words]) == 2
        return capsys.readouterr().err.removeprefix("kinject export: ")

    assert fails(str(tmp_path / "none")).startswith(f"{tmp_path / 'none'}: no such folder.")
    assert main(["export", str(run), "--dtype", "bfloat16"]) == 0
    config = run / "export" / "model" / "config.json"
    assert json.loads(config.read_text())["dtype"] == "bfloat16"
    (run / "model" / "adapter_model.safetensors").write_bytes(b"damaged")
    assert "adapter_model.safetensors: " in fails(str(run))
    assert config.is_file()


def test_an_adapter_stays_with_the_base_on_which_it_was_trained(
    run: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.25  # as by a training into the same folder
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["export", str(run)]) == 2
    assert f"{tiny_model}: has changed since {run / 'model'}" in capsys.readouterr().err
    assert not (run / "export" / "model").exists()
    with pytest.raises(InputError, match="on other weights the adapter is another model"):
        hash_model(str(run / "model"), None)
    with pytest.raises(InputError, match="has changed since"):
        open_chat(ChatSetup({"trained": str(run / "model")}))
    shutil.copytree(run / "model", tmp_path / "elsewhere")
    assert main(["export", str(tmp_path / "elsewhere")]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp32"}, "--dtype: found 'fp32', allowed: auto, float32"),
        ({"gguf": "q5_k"}, "--gguf: found 'q5_k', allowed: f16, bf16, q8_0"),
        ({"copies": ("a.gguf",)}, "--copy: is for --prove only"),
    ],
)
def test_an_export_from_python_refuses_what_the_command_refuses(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kinject.export("runs/none", **options)


def test_one_copy_is_no_tuple_of_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ExportOptions] = []
    monkeypatch.setattr(import_module("kinject.export"), "export", seen.append)
    kinject.export("runs/none", copies="b.gguf", prove="runs/eval")
    kinject.export("runs/none", copies=["c", "d"], prove="runs/eval")
    assert [options.copies for options in seen] == [("b.gguf",), ("c", "d")]


def test_an_export_does_not_replace_the_model_that_it_is_of(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine" / "model"
    shutil.copytree(tiny_model, mine)
    before = (mine / "model.safetensors").read_bytes()
    words = ["export", str(mine), "--out", str(tmp_path / "mine"), "--dtype", "float16"]
    assert main(words) == 2
    assert f"--out: {mine} would be replaced by its export" in capsys.readouterr().err
    assert (mine / "model.safetensors").read_bytes() == before


def test_an_export_holds_its_folder_until_its_last_file_is_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, steps = tmp_path / "out", []

    def step(*_: object) -> list[Any]:
        if not steps:  # the questions are read first, before the folder changes
            steps.append(sorted(path.name for path in out.glob("[!.]*")))
            return []
        with pytest.raises(DiskError, match="in use by"), lock_dir(out):
            pass
        steps.append(sorted(path.name for path in out.glob("[!.]*")))
        return []

    out.mkdir()
    (out / "model-bf16.gguf").write_bytes(b"of another model")
    module = import_module("kinject.export")
    monkeypatch.setattr(module, "write_gguf", step)
    monkeypatch.setattr(module, "prove", step)
    monkeypatch.setattr(module, "read_evaluation", step)
    export(ExportOptions(tiny_model, out, gguf="bf16", prove=tmp_path / "eval.yaml"))
    # The file of another model is gone.
    assert steps == [["model-bf16.gguf"], ["model"], ["model"]]


def test_a_model_that_changes_while_it_is_copied_is_no_export(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sha256sums(tiny_model)
    copy = shutil.copyfile

    def torn(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name == "tokenizer.json":
            target.write_bytes(target.read_bytes()[:-9])

    monkeypatch.setattr(shutil, "copyfile", torn)
    with pytest.raises(InputError, match=r"tokenizer\.json: changed while it was copied"):
        export(ExportOptions(tiny_model, tmp_path / "out"))
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_weights_that_are_not_finite_are_no_matter_of_the_dtype(
    tiny_model: Path, tmp_path: Path, dtype: str | None
) -> None:
    path = tiny_model / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"^(?!--dtype).*model\.norm\.weight holds a value"):
        export(ExportOptions(tiny_model, tmp_path / "out", dtype=dtype))


def test_a_card_shows_no_results_of_other_weights_as_its_own(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "evaluated"
    folder.mkdir()
    write_json(folder / "report.json", to_json(make_report()))

    def evaluated(path: str, inputs: dict[str, str]) -> str:
        section = {"models": {"own": path}, "questions": {}}
        counts = {"answers": 0, "scored_now": 0, "stored": 0}
        write_manifest(
            folder / "manifest.json",
            stage="eval", inputs=inputs, recipe={"eval": section}, counts=counts,
        )  # fmt: skip
        export(ExportOptions(tiny_model, tmp_path / "out", report=folder))
        return (tmp_path / "out" / "model" / "README.md").read_text()

    path = str(tiny_model)
    assert "the arm **own**" in evaluated(path, {path: hash_model(path, None)})
    with pytest.raises(
        InputError, match=f"^--report: {folder} evaluated {path} while it had other"
    ):
        evaluated(path, {path: "0" * 64})
    assert "does not tell which of its models this is" in evaluated("elsewhere", {})
    assert f"{folder} names other models than {path}" in caplog.text


@pytest.mark.parametrize("path", ["a\0b", "round", "e" * 280])
def test_a_model_that_no_path_can_lead_to_is_not_the_exported_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("round").symlink_to("round")
    section = {"models": {"odd": path, "own": "model"}, "questions": {}}
    counts = {"answers": 0, "scored_now": 0, "stored": 0}
    manifest = Path("manifest.json")
    write_manifest(manifest, stage="eval", inputs={}, recipe={"eval": section}, counts=counts)
    assert _own_arm(Path("report.json"), Path("model")) == "own"
