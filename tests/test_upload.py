"""Uploads of a model and of a corpus, to a server on this machine that speaks the hub's interface."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from peft import LoraConfig, get_peft_model

from hub_server import TOKEN, Hub, running
from kinject.cli import main
from kinject.corpus.fetched import local_corpus
from kinject.corpus.rows import CorpusFile
from kinject.disk import write_manifest
from kinject.models import load_model, load_tokenizer, model_hash


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine."""
    with running(monkeypatch) as server:
        yield server


@pytest.fixture
def augmented(
    tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A finished augmentation of one document, with rows for SFT."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "augment"
    run.mkdir(parents=True)
    rows = [
        {"id": "a", "document_id": "d", "origin": "original", "text": "Anna lives in Bergen.",
         "licence": "CC BY 4.0", "source": "https://example.org/anna"},
        {"id": "b", "document_id": "d", "origin": "paraphrase", "text": "Bergen is Anna's home."},
    ]  # fmt: skip
    write_rows(run / "corpus.jsonl", rows)
    sft = [{"id": "c", "origin": "qa", "prompt": "Where?", "completion": "Bergen."}]
    write_rows(run / "sft.jsonl", sft)
    recipe = {"run_dir": str(run), "augment": {"documents": str(tmp_path / "secret" / "d.jsonl")}}
    write_manifest(
        run / "manifest.json",
        stage="augment",
        inputs={},
        recipe=recipe,
        counts={"asked": 1, "got": 1},
        outputs=["corpus.jsonl", "sft.jsonl"],
    )
    return run


def front_matter(card: bytes) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return metadata


def test_a_corpus_arrives_as_a_data_set_that_a_recipe_names(
    augmented: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(augmented), "--upload", "me/mine", "--license", "cc-by-4.0"]
    assert main(words) == 0
    assert "uploaded: " in capsys.readouterr().out
    assert hub.created["type"] == "dataset"
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert hub.files.keys() == {"README.md", "corpus.jsonl", "sft.jsonl"}
    assert hub.files["corpus.jsonl"] == (augmented / "corpus.jsonl").read_bytes()
    assert (hub.commits, hub.tokens, hub.unknown) == (
        ["Upload dataset with kinject"], {f"Bearer {TOKEN}"}, [],
    )  # fmt: skip
    card = hub.files["README.md"]
    assert front_matter(card)["license"] == "cc-by-4.0"
    assert b"| corpus.jsonl | paraphrase | 1 |" in card
    assert b"Licences of the documents: CC BY 4.0." in card
    assert b"secret" not in card
    assert str(tmp_path).encode() not in card

    copy = tmp_path / "copy"  # as a user of the hub gets it
    copy.mkdir()
    for name, content in hub.files.items():
        (copy / name).write_bytes(content)
    assert datasets.load_dataset(str(copy), "sft", split="train")["prompt"] == ["Where?"]
    rows = CorpusFile(Path(local_corpus("copy:corpus", Path("cache"))))
    assert [(row.id, row.document_id, row.text) for row in rows] == [
        (row.id, row.document_id, row.text) for row in CorpusFile(augmented / "corpus.jsonl")
    ]


def test_a_corpus_that_has_changed_is_not_uploaded(
    augmented: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    (augmented / "corpus.jsonl").write_text('{"text": "Another."}\n')
    assert main(["export", str(augmented), "--upload", "me/mine"]) == 2
    assert "its bytes are not those that were written" in capsys.readouterr().err
    assert not hub.files


@pytest.mark.parametrize("has_adapter", [False, True])
def test_templates_of_a_chat_beside_the_default_one_arrive_with_a_model(
    has_adapter: bool, tiny_model: Path, hub: Hub, tmp_path: Path
) -> None:
    folder, served = tmp_path / "named", tmp_path / "out" / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = {"default": "{{ 'a' }}", "rag": "{{ 'b' }}", "tool_use": "{{ 'c' }}"}
    tokenizer.save_pretrained(folder)
    if has_adapter:
        loaded, folder = load_model(str(folder)).model, tmp_path / "adapter"
        get_peft_model(loaded, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    words = ["export", str(folder), "--out", str(served.parent), "--upload", "me/mine"]
    assert main(words) == 0
    assert load_tokenizer(str(served)).chat_template == tokenizer.chat_template
    assert hub.files["additional_chat_templates/rag.jinja"] == b"{{ 'b' }}"
    before = model_hash(served)
    (served / "SHA256SUMS").unlink()
    assert model_hash(served) == before
    (served / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'd' }}")
    assert model_hash(served) != before


def test_a_model_arrives_as_it_was_exported(
    tiny_model: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(tiny_model), "--out", str(tmp_path / "out"), "--upload", "me/mine"]
    assert main([*words, "--public"]) == 0
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out/model").iterdir()}
    assert hub.files == exported
    assert {"README.md", "model.safetensors", "SHA256SUMS"} <= hub.files.keys()
    assert hub.created.get("type", "model") == "model"
    assert hub.created.get("private", False) is False
    assert hub.created.get("visibility", "public") == "public"

    hub.full = True
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "me/mine: not uploaded: " in error
    assert "507" in error


def test_nothing_is_exported_for_an_upload_that_cannot_be(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = ["export", str(tiny_model), "--out", str(out)]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for options, message in (
        (["--upload", "me/mine"], "--upload: the hub is switched off (HF_HUB_OFFLINE). Unset"),
        (["--upload", "me/mine/ours"], "Give OWNER/NAME"),
        (["--public"], "--public: is for --upload only"),
        (["--upload", "me/mine", "--average-with", "base"], "--upload: is for one result"),
    ):
        assert main([*words, *options]) == 2
        assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "words", [["--gguf", "q8_0"], ["--prove"], ["--license", "mit"], ["--copy", "a.gguf"]]
)
def test_a_merge_refuses_what_is_for_one_model(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "run"), "--average-with", "base", *words]) == 2
    assert f"{words[0]}: is for one result. Export the merged" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--dtype", "bfloat16"], ["--out", "here"], ["--prove"]])
def test_an_upload_of_a_corpus_refuses_what_is_for_models(
    words: list[str], augmented: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(augmented), "--upload", "me/texts", *words]) == 2
    assert f"{words[0]}: is for models. {augmented} holds a corpus" in capsys.readouterr().err
