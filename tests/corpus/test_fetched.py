"""Data sets as corpora and as documents: `datasets` reads a local folder as it reads the hub."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from kinject.api import plan, train
from kinject.corpus.fetched import local_corpus
from kinject.corpus.rows import CorpusFile
from kinject.errors import InputError, RecipeError
from kinject.heap import document_hashes, read_documents
from kinject.hub_data import HubDataSet, parse_data_set
from kinject.recipe import read_recipe

TEXTS = ["= Anna =", "", "Anna lives in Bergen.", " ", "She sails.", "= Anna ="]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data set `wiki`, of the layout of the hub: two configurations, two splits."""
    folder = tmp_path / "wiki"
    configs = []
    for config, column in (("raw", "text"), ("qa", "answer")):
        files = []
        for split, rows in (("train", TEXTS), ("test", TEXTS[2:3])):
            path = folder / config / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            table = {column: rows, "topic": ["people"] * len(rows)}
            datasets.Dataset.from_dict(table).to_parquet(path)
            files.append({"split": split, "path": f"{config}/{split}.parquet"})
        configs.append({"config_name": config, "data_files": files})
    card = yaml.safe_dump({"configs": configs})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubDataSet("org/name")),
        ("org/name@v2:en:test", HubDataSet("org/name", "v2", "en", "test")),
        ("org/name::test:body", HubDataSet("org/name", None, None, "test", "body")),
        ("wikitext:wikitext-2-raw-v1", HubDataSet("wikitext", None, "wikitext-2-raw-v1")),
        ("org/name:en:train[:20]", HubDataSet("org/name", None, "en", "train", "", 20)),
        ("wikitext", None),
        ("a b/c", None),
        ("org/name:en:test:body:more", None),
    ],
)
def test_the_form_of_a_name(text: str, expected: HubDataSet | None) -> None:
    assert parse_data_set(text) == expected


def test_a_corpus_is_a_split_and_column_as_the_library_reads_them(here: Path) -> None:
    loaded = datasets.load_dataset(str(here / "wiki"), "raw", split="train")
    path = Path(local_corpus("wiki:raw:train", Path("cache")))
    assert [row.text for row in CorpusFile(path)] == [
        text for text in loaded["text"] if text.strip()
    ]
    assert json.loads(path.with_name("source.json").read_text("utf-8"))["rows"] == 4

    named = Path(local_corpus("wiki:qa:test:answer", Path("cache")))
    assert [row.text for row in CorpusFile(named)] == ["Anna lives in Bergen."]
    first = Path(local_corpus("wiki:raw:train[:3]", Path("cache")))
    assert [row.text for row in CorpusFile(first)] == ["= Anna =", "Anna lives in Bergen."]


def test_a_call_of_one_tool_has_no_arguments_of_another(here: Path) -> None:
    rows = []
    for name, argument, value in (("time", "zone", "CET"), ("ferry", "pier", 3)):
        properties = {argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties}
        call = {"name": name, "arguments": {argument: value}}
        rows.append({
            "messages": [
                {"role": "user", "content": f"Ask {name}."},
                {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            ],
            "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        })  # fmt: skip
    datasets.Dataset.from_list(rows).save_to_disk(here / "calls")
    written = Path(local_corpus("calls", Path("cache"))).read_text("utf-8")
    assert [json.loads(line) for line in written.splitlines()] == rows


def test_a_corpus_is_fetched_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = local_corpus("wiki:raw", Path("cache"))
    monkeypatch.setattr(HubDataSet, "rows", lambda self: pytest.fail("read again"))
    assert local_corpus("wiki:raw", Path("cache")) == path


def test_a_folder_that_the_library_saved_is_a_corpus(here: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS[2:3]}).save_to_disk(here / "saved")
    splits = {"train": datasets.Dataset.from_dict({"text": ["One."]})}
    datasets.DatasetDict(splits).save_to_disk(here / "splits")
    for folder, text in (("saved", TEXTS[2]), ("splits", "One.")):
        rows = CorpusFile(Path(local_corpus(folder, Path("cache"))))
        assert [row.text for row in rows] == [text]
    with pytest.raises(InputError, match=r"no split 'test'\. It has train\."):
        local_corpus("splits::test", Path("cache"))


def test_an_uploaded_corpus_keeps_which_texts_are_originals(here: Path) -> None:
    rows = [
        {"document_id": "d1", "origin": "original", "text": "Anna lives in Bergen."},
        {"document_id": "d1", "origin": "variant", "text": "Bergen is where Anna lives."},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(here / "uploaded")
    read = CorpusFile(Path(local_corpus("uploaded", Path("cache"))))
    assert [row.origin for row in read] == ["original", "variant"]
    of_places = [{**row, "origin": {"country": "Norway"}} for row in rows]
    datasets.Dataset.from_list(of_places).save_to_disk(here / "others")
    read = CorpusFile(Path(local_corpus("others", Path("cache"))))
    assert {row.origin for row in read} == {"original"}


def test_the_columns_are_named_where_none_is_a_text(here: Path) -> None:
    with pytest.raises(
        InputError, match=r"^wiki:qa:1: .*Its columns: answer, topic\. Name the one"
    ):
        local_corpus("wiki:qa", Path("cache"))
    with pytest.raises(InputError, match=r"no column 'body'\. Found: text, topic\.$"):
        local_corpus("wiki:raw:train:body", Path("cache"))
    with pytest.raises(InputError, match=r"split 'dev', it cannot be read after 0 rows"):
        local_corpus("wiki:raw:dev", Path("cache"))
    assert not list(Path("cache").glob("data-*"))


@pytest.mark.parametrize("title", [datetime.time(4), math.inf, {"raw": b"x"}])
def test_what_json_does_not_have_is_named_by_its_row(
    here: Path, monkeypatch: pytest.MonkeyPatch, title: object
) -> None:
    rows = [{"text": "Kelm has a mill."}, {"text": "Arden has none.", "title": title}]
    monkeypatch.setattr(HubDataSet, "rows", lambda _: iter(rows))
    with pytest.raises(InputError, match=r"^wiki:raw:2: found a value that a line of JSON cannot"):
        local_corpus("wiki:raw", Path("cache"))


def test_messages_of_a_chat_data_set_stay_messages(here: Path) -> None:
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": turns, "turns": turns, "score": 1.0}]
    datasets.Dataset.from_list(rows).save_to_disk(here / "chat")
    for name in ("chat", "chat::train:turns"):
        (row,) = CorpusFile(Path(local_corpus(name, Path("cache"))))
        assert row.messages == tuple(turns)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("chat", {"instruction": "Hi.", "input": None, "output": "Hello.", "topic": "greetings"}),
        ("chat", {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}], "score": 1.0}),
        ("chat::train:turns", {"turns": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]}),
    ],
)  # fmt: skip
def test_data_sets_of_other_trainers_are_chat(here: Path, name: str, row: dict[str, Any]) -> None:
    datasets.Dataset.from_list([row]).save_to_disk(here / "chat")
    (read,) = CorpusFile(Path(local_corpus(name, Path("cache"))))
    assert [message["content"] for message in read.messages] == ["Hi.", "Hello."]
    assert [message["role"] for message in read.messages] == ["user", "assistant"]


def test_documents_are_read_from_the_same_names(here: Path) -> None:
    documents = list(read_documents(Path("wiki:raw")))
    assert [document.text for document in documents] == [
        "= Anna =",
        "Anna lives in Bergen.",
        "She sails.",
    ]
    assert documents[1].meta == {"topic": "people"}
    (document,) = read_documents(Path("wiki:qa:test:answer"))
    assert document.text == "Anna lives in Bergen."
    before = document_hashes(Path("wiki:raw"))
    (here / "wiki" / "raw" / "more.txt").write_text("x")
    assert document_hashes(Path("wiki:raw")) != before


@pytest.fixture
def recipe(here: Path, tiny_model: Path) -> Callable[[str], Path]:
    """Write a recipe of two steps on a corpus."""

    def write(corpus: str, **others: Any) -> Path:
        path = here / "train.yaml"
        values = {
            "run_dir": "runs/t",
            "model": {"path": str(tiny_model), "device": "cpu"},
            "corpus": {"path": corpus, "eos": False, **others},
            "trainer": {"max_steps": 2, "max_length": 64, "use_cpu": True, "report_to": "none"},
        }
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_a_training_reads_a_data_set_and_records_its_name(
    recipe: Callable[..., Path], here: Path
) -> None:
    replay = {"path": "wiki:qa:train:answer", "fraction": 0.3}
    path = recipe("wiki:raw", replay=replay, validation_corpus="wiki:raw:test")
    planned = plan(read_recipe(path, verb="plan"), calibration=False)
    assert any("wiki:raw" in note and "does not exist yet" in note for note in planned.notes)
    assert not Path("runs/tokens").exists()

    result = train(path)
    manifest = json.loads((here / "runs/t/manifest.json").read_text("utf-8"))
    assert manifest["recipe"]["corpus"]["path"] == "wiki:raw"
    assert result.account["source"] > 0
    assert train(path).already_done


def test_a_corpus_that_is_no_data_set_is_refused(recipe: Callable[..., Path]) -> None:
    for name in ("no.jsonl", "wiki", "wiki/absent"):
        with pytest.raises((RecipeError, InputError)):
            read_recipe(recipe(name), verb="train")


def test_the_hub_is_read_at_one_commit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, config: str | None, **options: Any) -> list[dict[str, str]]:
        asked.append((name, config, options))
        return [{"text": "From the hub."}]

    monkeypatch.setattr("kinject.hub.unreachable_reason", str)
    monkeypatch.setattr(HubDataSet, "commit", lambda self: "c0ffee")
    monkeypatch.setattr(datasets, "load_dataset", load)
    path = Path(local_corpus("wikitext:wikitext-2-raw-v1:test", Path("cache")))
    options = {"split": "test", "streaming": True, "revision": "c0ffee"}
    assert asked == [("wikitext", "wikitext-2-raw-v1", options)]
    assert json.loads(path.with_name("source.json").read_text("utf-8"))["commit"] == "c0ffee"
