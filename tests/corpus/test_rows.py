"""Corpus rows: three shapes, each fault with its line, each line parsed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import load_dataset

from kinject.corpus.rows import CorpusFile
from kinject.disk import Row, write_jsonl
from kinject.errors import InputError

Write = Callable[[str, str], Path]

ROWS: list[Row] = [
    {"text": "Arden was born in Lowmere.", "document_id": "a", "origin": "paraphrase"},
    {"prompt": "Question: where?\nAnswer:", "completion": " Färrow ☃"},
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Bryn."}]},
]
SHAPES = ["text", "completion", "messages"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three rows of every shape with blank lines between, a byte-order mark before, no newline at the end."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "\ufeff" + "\n\n  \n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        encoding="utf-8",
    )
    return path


def test_the_three_shapes_are_read(write: Write) -> None:
    path = write(
        "c.jsonl",
        '{"text": "a", "id": "x", "document_id": "d"}\n{"prompt": "q", "completion": " a"}\n'
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n',
    )
    rows = list(CorpusFile(path))
    assert [row.shape for row in rows] == ["text", "completion", "messages"]
    assert (rows[0].id, rows[0].document_id, rows[0].origin) == ("x", "d", "original")
    assert len({row.id for row in rows}) == 3
    assert {row.origin for row in CorpusFile(path, origin="replay")} == {"replay"}


def test_a_label_is_text_or_a_whole_number_and_null_is_none(write: Write) -> None:
    rows = CorpusFile(
        write(
            "c.jsonl",
            '{"text": "a", "document_id": null, "origin": null}\n'
            '{"text": "b", "document_id": 31, "origin": "style"}\n'
            '{"text": "c", "document_id": 31.0}\n',
        )
    )
    labels = [(row.document_id, row.origin) for row in rows]
    assert labels == [("", "original"), ("31", "style"), ("31", "original")]
    for value in ("true", '["d"]', "{}", "1.5", "NaN"):
        path = write("c.jsonl", f'{{"text": "a", "document_id": {value}}}\n')
        with pytest.raises(InputError, match=r"c\.jsonl:1: document_id: found \w+, expected text"):
            list(CorpusFile(path))


def test_rows_are_those_of_the_file_in_any_order(path: Path) -> None:
    rows, all_rows = CorpusFile(path), list(CorpusFile(path))
    assert [row.shape for row in all_rows] == SHAPES
    assert [(row.text, row.prompt, row.completion, list(row.messages)) for row in all_rows] == [
        (
            row.get("text", ""),
            row.get("prompt", ""),
            row.get("completion", ""),
            row.get("messages", []),
        )
        for row in ROWS
    ]
    assert (all_rows[0].document_id, all_rows[0].origin) == ("a", "paraphrase")
    assert len(rows) == 3
    assert [rows[i] for i in (2, 0, -2)] == [all_rows[2], all_rows[0], all_rows[1]]
    assert rows[1:] == all_rows[1:]
    assert rows.pick([2, 2, 0]) == [all_rows[2], all_rows[2], all_rows[0]]
    assert {row.origin for row in CorpusFile(path, "replay")} == {"replay"}
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "x"}', '{"text": 3}', '{"text": " "}'])
def test_a_faulty_line_is_reported_by_iterating_and_picking(path: Path, line: str) -> None:
    path.write_text(path.read_text("utf-8") + f"\n{line}\n", encoding="utf-8")
    messages = []
    for read in (list, lambda rows: rows.pick([3])):
        with pytest.raises(InputError) as caught:
            read(CorpusFile(path))
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert "corpus.jsonl:8: " in messages[0]


def test_every_faulty_line_is_reported(write: Write) -> None:
    path = write(
        "c.jsonl",
        '{"text": "ok"}\n{"text": ""}\n{"txt": "a"}\n{"text": 3}\n{"prompt": "q", "completion": " "}\n'
        '{"messages": []}\n{"messages": [{"role": "user", "content": "q"}]}\n{"text": "a", "messages": []}\n',
    )
    with pytest.raises(InputError) as caught:
        list(CorpusFile(path))
    lines = [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]
    assert [line.split(":")[0] for line in lines] == ["2", "3", "4", "5", "6", "7", "8"]
    assert lines[0] == "2: text: is empty. Remove the row."
    assert "no assistant turn" in lines[5]


def test_a_corpus_is_what_datasets_reads(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "c.jsonl", [{"id": "1", "text": "é\n"}, {"id": "2", "text": "b"}])
    loaded = load_dataset(
        "json",
        data_files=str(tmp_path / "c.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert loaded["text"] == [row.text for row in CorpusFile(tmp_path / "c.jsonl")]


CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Bryn."}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "look_up", "arguments": {"place": "Farrow"}}}],
}


def test_a_conversation_keeps_its_tools_arguments_and_thinking(tmp_path: Path) -> None:
    messages = [
        *CHAT[:1],
        CALLS,
        {"role": "tool", "name": "look_up", "content": "Bryn"},
        CHAT[1] | {"thinking": "So."},
    ]
    kwargs = {"enable_thinking": False}
    meta = {"source": "s", "title": "t", "meta": {"any": 1}, "chat_template_kwargs": kwargs}
    write_jsonl(
        tmp_path / "c.jsonl",
        [
            {"messages": messages, "tools": [TOOL], **meta},
            {"messages": messages, "tools": json.dumps([TOOL])},
        ],
    )
    for row in CorpusFile(tmp_path / "c.jsonl"):
        assert (list(row.messages), row.tools) == (messages, (TOOL,))
    assert CorpusFile(tmp_path / "c.jsonl")[0].template_kwargs == kwargs


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": CHAT, "score": 3}, "unknown key 'score' beside messages"),
        (
            {"messages": [CHAT[0], CHAT[1] | {"reasoning_contents": "So."}]},
            "message 2: found the unknown key 'reasoning_c",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": 3}]},
            "message 2: content: found int",
        ),
        (
            {"messages": [CHAT[0] | {"tool_calls": CALLS["tool_calls"]}, CHAT[1]]},
            "only the assistant calls tools",
        ),
        (
            {"messages": [CHAT[0], CHAT[1] | {"tool_calls": [{"name": 3}]}]},
            "tool_calls: expected a list of",
        ),
        (
            {"messages": [CHAT[0] | {"content": [{"type": "image"}]}, CHAT[1]]},
            "kinject trains on text",
        ),
        ({"messages": [CHAT[0], CHAT[1] | {"thinking": ["So."]}]}, "thinking: found list"),
        ({"messages": CHAT, "tools": "[{"}, "no JSON"),
        ({"messages": CHAT, "tools": "[" * 90_000}, "nested too deeply"),
        ({"messages": CHAT, "tools": [{}]}, "tools: expected a list of"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs: found list"),
        ({"text": "Bryn.", "tools": [TOOL]}, "tools: belongs to messages"),
    ],
)
def test_what_a_conversation_cannot_hold_is_refused_by_line(
    row: dict[str, object], fault: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "c.jsonl", [{"messages": CHAT}, row])
    with pytest.raises(InputError) as caught:
        list(CorpusFile(tmp_path / "c.jsonl"))
    assert str(caught.value).startswith(f"{tmp_path / 'c.jsonl'}:2: ")
    assert fault in str(caught.value)
