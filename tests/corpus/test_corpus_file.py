"""A corpus read row by row holds what a corpus read whole holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kinject.corpus.rows import CorpusFile, read_corpus
from kinject.errors import InputError

ROWS = [
    {"text": "Arden was born in Lowmere.", "document_id": "a", "origin": "paraphrase"},
    {"prompt": "Question: where?\nAnswer:", "completion": " Färrow ☃"},
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Bryn."}]},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three rows of every shape with blank lines between, a byte-order mark before, no newline at the end."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("\ufeff" + "\n\n  \n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    return path


def test_rows_are_those_of_the_whole_file_in_any_order(path: Path) -> None:
    whole, rows = read_corpus(path), CorpusFile(path)
    assert list(rows) == whole
    assert [rows[i] for i in (2, 0, -2)] == [whole[2], whole[0], whole[1]]
    assert rows[1:] == whole[1:]
    assert rows.pick([2, 2, 0]) == [whole[2], whole[2], whole[0]]
    assert rows.shapes == {"text": whole[0].id, "completion": whole[1].id, "messages": whole[2].id}
    assert {row.origin for row in CorpusFile(path, "replay")} == {"replay"}
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "x"}', '{"text": 3}', '{"text": " "}'])
def test_faults_are_those_of_the_whole_file(path: Path, line: str) -> None:
    path.write_text(path.read_text("utf-8") + f"\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as whole:
        read_corpus(path)
    with pytest.raises(InputError) as lazy:
        CorpusFile(path)
    assert str(lazy.value) == str(whole.value)
    assert "corpus.jsonl:8: " in str(lazy.value)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="no rows"):
        CorpusFile(tmp_path / "empty.jsonl")
