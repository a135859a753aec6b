"""Public data sets, from files in place of the hub."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kinject.cli import main
from kinject.corpus import public_data
from kinject.corpus.public_data import DATA_SETS, get_data
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl
from kinject.errors import InputError

QUESTIONS = {
    "anatomy": [("Which bone, \"the hyoid\"?", ["a, b", "c", "d", "e"], 1), ("Line\nbreak?", ["1", "2", "3", "4"], 3)],
    "miscellaneous": [("What?", ["w", "x", "y", "z"], 0)],
}  # fmt: skip


class Source:
    """The hub: `files` by (repository, name, revision); `asked` keeps the names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.asked = folder, dict[tuple[str, str, str], bytes](), list[str]()

    def fetch(self, repo: str, name: str, *, repo_type: str, revision: str) -> str:
        assert repo_type == "dataset"
        self.asked.append(name)
        if (repo, name, revision) not in self.files:
            raise LocalEntryNotFoundError("not in the cache")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[repo, name, revision])
        return str(path)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Files in place of the hub."""
    made = Source(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", made.fetch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return made


def parquet(folder: Path, rows: list[dict[str, Any]]) -> bytes:
    import pandas

    path = folder / "rows.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path.read_bytes()


@pytest.fixture
def mmlu(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MMLU with a few questions, in the layout of its repository, as `source` has it."""
    rows = [
        {"question": question, "subject": subject, "choices": choices, "answer": answer}
        for subject, questions in QUESTIONS.items() for question, choices, answer in questions
    ]  # fmt: skip
    return _on_hub(monkeypatch, source, "mmlu", {name: parquet(tmp_path, rows) for name in DATA_SETS["mmlu"].files})


def _on_hub(monkeypatch: pytest.MonkeyPatch, source: Source, name: str, files: dict[str, bytes]) -> Any:
    data = replace(
        DATA_SETS[name], files={file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    )
    for file, content in files.items():
        source.files[data.source, file, data.revision] = content
    monkeypatch.setattr(public_data, "DATA_SETS", {**public_data.DATA_SETS, name: data})
    return data


def test_mmlu_is_written_as_its_authors_give_it_and_read_by_the_recipes(
    mmlu: Any, source: Source, tmp_path: Path
) -> None:
    paths = get_data(mmlu, tmp_path / "data")
    assert {path.relative_to(tmp_path / "data/mmlu").as_posix() for path in paths.paths} == {
        f"{split}/{subject}_{split}.csv" for split in ("dev", "val", "test") for subject in QUESTIONS
    }
    for subject, expected in QUESTIONS.items():
        path = tmp_path / f"data/mmlu/test/{subject}_test.csv"
        with path.open(newline="") as file:
            assert [row[5] for row in csv.reader(file)] == ["ABCD"[answer] for _, _, answer in expected]
        questions = read_questions(path)
        assert [(question.question, list(question.choices), question.answer) for question in questions] == expected
    n_asked = len(source.asked)
    assert get_data(mmlu, tmp_path / "data").was_there
    assert len(source.asked) == n_asked


def test_nothing_of_the_users_is_written_over(mmlu: Any, tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(InputError, match="is there already, and nothing is written over"):
        get_data(mmlu, tmp_path)


def test_a_file_with_another_checksum_or_no_hub_leaves_nothing(mmlu: Any, source: Source, tmp_path: Path) -> None:
    key = next(iter(source.files))
    source.files[key] += b"x"
    with pytest.raises(InputError, match=r"SHA-256 is not [0-9a-f]{64}"):
        get_data(mmlu, tmp_path / "data")
    source.files.clear()
    with pytest.raises(InputError, match=r"the hub is switched off .* copy the hub's cache"):
        get_data(mmlu, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["sources"]


def test_instructions_become_rows_of_prompt_and_completion(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"instruction": "Say it.", "context": "", "response": "It.", "category": "x"},
        {"instruction": "Sum up.", "context": "A text.", "response": " Short. ", "category": "x"},
        {"instruction": "Empty.", "context": "", "response": "", "category": "x"},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    data = _on_hub(monkeypatch, source, "instructions", {"databricks-dolly-15k.jsonl": content})
    (path,) = get_data(data, tmp_path).paths
    assert [row for _, row in read_jsonl(path)] == [
        {"prompt": "Say it.\n\n", "completion": "It."}, {"prompt": "Sum up.\n\nA text.\n\n", "completion": "Short."},
    ]  # fmt: skip


def test_the_command_says_licence_size_and_revision_first(
    mmlu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "data", "get", "mmlu", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert not (tmp_path / "data").exists()
    assert "licence   MIT" in output
    assert f"revision {mmlu.revision}" in output
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    assert capsys.readouterr().out == f"{output}mmlu: 6 files written and recorded\n"
    assert main(["recipes", "data", "get", "mmlu"]) == 0
    assert "mmlu: 6 files were there, unchanged" in capsys.readouterr().out
    assert main(["recipes", "data", "get", "mmlo"]) == 2
    assert "found 'mmlo'. Did you mean mmlu?" in capsys.readouterr().err
    assert main(["recipes", "data"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in DATA_SETS)
