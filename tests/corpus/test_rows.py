"""Corpus rows: three shapes, each fault with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import load_dataset

from kinject.corpus.rows import read_corpus
from kinject.disk import write_jsonl
from kinject.errors import InputError

Write = Callable[[str, str], Path]


def test_the_three_shapes_are_read(write: Write) -> None:
    path = write(
        "c.jsonl",
        '{"text": "a", "id": "x", "document_id": "d"}\n{"prompt": "q", "completion": " a"}\n'
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n',
    )
    rows = read_corpus(path)
    assert [row.shape for row in rows] == ["text", "completion", "messages"]
    assert (rows[0].id, rows[0].document_id, rows[0].origin) == ("x", "d", "original")
    assert len({row.id for row in rows}) == 3
    assert read_corpus(path, origin="replay")[0].origin == "replay"


def test_every_faulty_line_is_told(write: Write) -> None:
    path = write(
        "c.jsonl",
        '{"text": "ok"}\n{"text": ""}\n{"txt": "a"}\n{"text": 3}\n{"prompt": "q", "completion": " "}\n'
        '{"messages": []}\n{"messages": [{"role": "user", "content": "q"}]}\n{"text": "a", "messages": []}\n',
    )
    with pytest.raises(InputError) as caught:
        read_corpus(path)
    lines = [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]
    assert [line.split(":")[0] for line in lines] == ["2", "3", "4", "5", "6", "7", "8"]
    assert lines[0] == "2: text: is empty. Remove the row."
    assert "no assistant turn" in lines[5]


def test_an_empty_corpus_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match="no rows"):
        read_corpus(write("c.jsonl", "\n"))


def test_a_corpus_is_what_datasets_reads(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "é\n"}, {"id": "2", "text": "b"}])
    loaded = load_dataset(
        "json", data_files=str(tmp_path / "c.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["text"] == [row.text for row in read_corpus(tmp_path / "c.jsonl")]
