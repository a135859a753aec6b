"""Rows of Alpaca's and ShareGPT's layouts are conversations; TRL reads the latter, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import maybe_convert_to_chatml

from kinject.corpus.other_layouts import as_messages
from kinject.corpus.rows import CorpusFile
from kinject.disk import Row, write_jsonl
from kinject.errors import InputError

Write = Callable[[str, str], Path]


def _turns(*pairs: tuple[str, str]) -> list[Row]:
    return [{"role": role, "content": content} for role, content in pairs]


ASKED = (("user", "Name a river."), ("assistant", "The Inn."))


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Name a river.", "output": "The Inn."}, _turns(*ASKED)),
        ({"instruction": "Name a river.", "input": "", "output": "The Inn."}, _turns(*ASKED)),
        ({"instruction": "Name a river.", "input": None, "output": "The Inn.", "history": None}, _turns(*ASKED)),
        (
            {"instruction": "Name a river.", "input": "Of Tyrol.", "output": "The Inn.", "system": "Be brief.",
             "history": [["Hello", "Good day"], ["Well?", "Ask."]]},
            _turns(("system", "Be brief."), ("user", "Hello"), ("assistant", "Good day"), ("user", "Well?"),
                   ("assistant", "Ask."), ("user", "Name a river.\nOf Tyrol."), ("assistant", "The Inn.")),
        ),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Name a river."},
                               {"from": "gpt", "value": "The Inn."}]},
            _turns(("system", "Be brief."), *ASKED),
        ),
        (
            {"system": "Be brief.",
             "conversations": [{"from": "human", "value": "Name a river."}, {"from": "gpt", "value": "The Inn."}]},
            _turns(("system", "Be brief."), *ASKED),
        ),
        ({"conversations": _turns(*ASKED)}, _turns(*ASKED)),
        (
            {"messages": [{"from": "human", "value": "Name a river."}, {"from": "gpt", "value": "The Inn."}]},
            _turns(*ASKED),
        ),
    ],
)  # fmt: skip
def test_rows_of_other_trainers_are_conversations(
    tmp_path: Path, row: Row, messages: list[Row]
) -> None:
    path = tmp_path / "corpus.jsonl"
    write_jsonl(path, [{"id": "a", "document_id": "d", **row}])
    (read,) = CorpusFile(path)
    assert (read.id, read.document_id, read.shape) == ("a", "d", "messages")
    assert read.messages == tuple(messages)


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_turns_are_those_of_trl(key: str) -> None:
    """Which keeps the names of roles: so with those that both know."""
    row = {key: [{"from": role, "value": text} for role, text in ASKED]}
    expected = maybe_convert_to_chatml(copy.deepcopy(row))
    assert as_messages(row) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"text": "Below is an instruction.", "instruction": "Name a river.", "output": "The Inn."},
        {"prompt": "Name a river.", "completion": " The Inn.", "conversations": []},
        {"instruction": "Name a river."},
        {"document_id": "d"},
    ],
)
def test_other_rows_stay_as_they_are(row: Row) -> None:
    assert as_messages(row) is row


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"instruction": "a", "output": 5}', r"output: found int, expected text"),
        ('{"instruction": "a", "output": "b", "topic": "c"}', r"unknown key 'topic' beside messages"),
        ('{"instruction": "a", "output": "b", "history": ["c"]}', r"history: pair 1: expected \[instruction, answer\]"),
        ('{"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}]}',
         r"turn 2: found from: 'observation', allowed: human"),
        ('{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}',
         r"message 2: found the unknown key 'weight'"),
        ('{"messages": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}]}',
         r"messages: turn 2: found from: 'observation', allowed: human"),
        ('{"messages": [{"from": "human", "value": "a"}, "b"]}', r'messages: turn 2: expected {"from"'),
        ('{"conversations": ["a"]}', r'turn 1: expected {"from": "human" or "gpt"'),
        ('{"conversations": {"a": 1}}', r"conversations: found dict, expected a list"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', r"no assistant turn"),
        ('{"instruction": "a"}', r"Alpaca's instruction and output"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_line(write: Write, line: str, fault: str) -> None:
    with pytest.raises(InputError, match=rf"c\.jsonl:1: .*{fault}"):
        list(CorpusFile(write("c.jsonl", f"{line}\n")))


@pytest.mark.parametrize(
    "text", ['[\n {"text": "a"}\n]\n', '[{"text": "a"}]', '\ufeff [\n{"text": "a"}]']
)
def test_a_json_array_is_refused_once_with_how_to_write_it(write: Write, text: str) -> None:
    path = write("c.json", text)
    reads: tuple[Callable[[CorpusFile], Any], ...] = (list, len)
    for read in reads:
        with pytest.raises(
            InputError, match=r"^[^\n]*holds a JSON array[^\n]*jq -c '\.\[\]' [^\n]*$"
        ):
            read(CorpusFile(path))
