"""Public data sets, from rows in place of the hub."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest

from kinject.cli import main
from kinject.corpus.public_data import DATA_SETS, get_data
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl
from kinject.errors import InputError

QUESTIONS = {
    "anatomy": [("Which bone, \"the hyoid\"?", ["a, b", "c", "d", "e"], 1), ("Line\nbreak?", ["1", "2", "3", "4"], 3)],
    "miscellaneous": [("What?", ["w", "x", "y", "z"], 0)],
}  # fmt: skip
MMLU = [
    {"question": question, "subject": subject, "choices": choices, "answer": answer}
    for subject, questions in QUESTIONS.items() for question, choices, answer in questions
]  # fmt: skip

Hub = dict[tuple[str, str | None, str], list[dict[str, Any]]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The rows of the hub by (source, configuration, split), at the pinned revisions alone."""
    rows: Hub = {("cais/mmlu", "all", split): MMLU for split in ("dev", "validation", "test")}
    revisions = {data.source: data.revision for data in DATA_SETS.values()}

    def load(
        path: str, name: str | None, *, split: str, revision: str, streaming: bool
    ) -> list[dict[str, Any]]:
        assert revision == revisions[path]
        return rows[path, name, split]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return rows


def test_mmlu_is_written_as_its_authors_give_it_and_read_by_the_recipes(
    hub: Hub, tmp_path: Path
) -> None:
    paths = get_data(DATA_SETS["mmlu"], tmp_path / "data")
    assert {path.relative_to(tmp_path / "data/mmlu").as_posix() for path in paths} == {
        f"{split}/{subject}_{split}.csv"
        for split in ("dev", "val", "test")
        for subject in QUESTIONS
    }
    for subject, expected in QUESTIONS.items():
        path = tmp_path / f"data/mmlu/test/{subject}_test.csv"
        with path.open(newline="") as file:
            assert [row[5] for row in csv.reader(file)] == [
                "ABCD"[answer] for _, _, answer in expected
            ]
        questions = read_questions(path)
        assert [
            (question.question, list(question.choices), question.answer) for question in questions
        ] == expected
    hub.clear()
    assert get_data(DATA_SETS["mmlu"], tmp_path / "data") == []


def test_nothing_of_the_users_is_written_over(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(InputError, match="is there already, and nothing is written over"):
        get_data(DATA_SETS["mmlu"], tmp_path)


def test_without_a_hub_nothing_is_left(hub: Hub, tmp_path: Path) -> None:
    del hub["cais/mmlu", "all", "test"]
    with pytest.raises(InputError, match=r"the hub is switched off .* copy the hub's cache"):
        get_data(DATA_SETS["mmlu"], tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["sources"]


def test_instructions_become_rows_of_prompt_and_completion(hub: Hub, tmp_path: Path) -> None:
    hub["databricks/databricks-dolly-15k", None, "train"] = [
        {"instruction": "Say it.", "context": "", "response": "It.", "category": "x"},
        {"instruction": "Sum up.", "context": "A text.", "response": " Short. ", "category": "x"},
        {"instruction": "Empty.", "context": "", "response": "", "category": "x"},
    ]
    (path,) = get_data(DATA_SETS["instructions"], tmp_path)
    assert [row for _, row in read_jsonl(path)] == [
        {"prompt": "Say it.\n\n", "completion": "It."}, {"prompt": "Sum up.\n\nA text.\n\n", "completion": "Short."},
    ]  # fmt: skip


def test_general_text_to_watch_is_not_replayed(hub: Hub, tmp_path: Path) -> None:
    hub["HuggingFaceFW/fineweb-edu", "sample-10BT", "train"] = [
        {"id": str(n), "text": f"Page {n}.", "url": f"https://example.org/{n}", "score": 4.0}
        for n in range(510)
    ]
    replayed, watched = get_data(DATA_SETS["replay"], tmp_path)[::-1]
    assert [row["id"] for _, row in read_jsonl(watched)] == [str(n) for n in range(500)]
    assert next(row for _, row in read_jsonl(replayed)) == {
        "id": "500", "text": "Page 500.", "source": "https://example.org/500",
    }  # fmt: skip


def test_a_fetch_that_was_killed_between_two_files_is_made_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["HuggingFaceFW/fineweb-edu", "sample-10BT", "train"] = [
        {"id": str(n), "text": f"Page {n}.", "url": "https://example.org", "score": 4.0}
        for n in range(510)
    ]
    with monkeypatch.context() as patch:
        replace, calls = os.replace, []

        def dying(source: Path, target: Path) -> None:
            # Atomic files are replaced by the same call.
            if Path(source).parent != Path(target).parent:
                calls.append(target)
                if len(calls) == 2:
                    raise KeyboardInterrupt
            replace(source, target)

        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            get_data(DATA_SETS["replay"], tmp_path)
    first = calls[0].read_bytes()
    (tmp_path / ".fetched-left").mkdir()
    assert len(get_data(DATA_SETS["replay"], tmp_path)) == 2
    assert calls[0].read_bytes() == first
    assert calls[1].is_file()
    assert not list(tmp_path.glob(".fetched-*"))
    assert get_data(DATA_SETS["replay"], tmp_path) == []


def test_the_command_says_licence_size_and_revision_first(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    output = capsys.readouterr().out
    assert "licence   MIT" in output
    assert f"revision {DATA_SETS['mmlu'].revision}" in output
    assert output.endswith("mmlu: 6 files written\n")
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    assert capsys.readouterr().out.endswith("mmlu: was there already\n")
    assert main(["recipes", "data", "get", "mmlo"]) == 2
    assert "found 'mmlo'. Did you mean mmlu?" in capsys.readouterr().err
    assert main(["recipes", "data"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in DATA_SETS)
