"""Rows that a run reads again: another shape than kinject writes is named with its file, place and field."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kinject.augment.drafts import Candidate, Draft
from kinject.augment.question_outcomes import OUTCOME_FIELDS, Outcome, outcome_row
from kinject.augment.store import Store, read_decisions
from kinject.augment.stored_rows import IndexedRows
from kinject.disk import write_jsonl
from kinject.errors import InputError
from kinject.types import Passage, Usage, Variant

IDS = {"passage_id": "p", "document_id": "d", "style": "wiki"}
DRAFT = Draft("Where is Kelm?", "by Farrow", ("in Arden", "at sea", "on a hill"), "Kelm is there.")


def _rows() -> dict[str, Any]:
    checks = {"facts": [["n:1"], []], "repairs": ["fence"], "language": "en"}
    text, more = "Kelm lies by Farrow.", ("By Farrow lies Kelm.",)
    variant = Variant("v", "p", "d", "wiki", 2, text, "m", "h", Usage(7, 5), checks, 0, more)
    return {
        "variants": asdict(variant),
        "rejected": {"id": "r", "variant_id": "v", **IDS, "reason": "copy", "text": "x",
                     "usage": asdict(Usage(3, 1))},
        "notes": {"id": "n", **IDS, "preparation": "list", "notes": ["a mill"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("variants", "id", 4),
        ("variants", "text", ["Kelm"]),
        ("variants", "sample", "2"),
        ("variants", "attempt", True),
        ("variants", "more", "By Farrow lies Kelm."),
        ("variants", "more", ["Kelm", None]),
        ("variants", "usage", {"tokens_out": 1.5}),
        ("variants", "usage", [7, 5]),
        ("variants", "checks", {"facts": {"n:1": 1}}),
        ("variants", "checks", {"facts": [3, []]}),
        ("variants", "checks", {"ids": "v"}),
        ("variants", "checks", {"language": ["en"]}),
        ("rejected", "reason", None),
        ("rejected", "id", {}),
        ("rejected", "usage", "none"),
        ("notes", "notes", "a mill"),
        ("notes", "notes", [["a mill"]]),
    ],
)
def test_a_field_of_another_shape_is_named_when_the_file_is_opened(
    file: str, field: str, value: object, tmp_path: Path
) -> None:
    row = _rows()[file]
    write_jsonl(tmp_path / f"{file}.jsonl", [row, row])
    Store(tmp_path, {}).__exit__()
    begins = (tmp_path / f"{file}.jsonl").stat().st_size // 2
    write_jsonl(tmp_path / f"{file}.jsonl", [row, {**row, field: value}])
    with pytest.raises(
        InputError, match=rf"{file}.jsonl: byte {begins}: {field}: found .*\. Move "
    ):
        Store(tmp_path, {})


def test_a_variant_with_facts_of_fewer_texts_is_refused(tmp_path: Path) -> None:
    row = _rows()["variants"]
    request: Any = SimpleNamespace(id="v")
    write_jsonl(tmp_path / "variants.jsonl", [row])
    with Store(tmp_path, {}) as store:
        assert len(store.variants([request])["v"].texts) == 2
    write_jsonl(tmp_path / "variants.jsonl", [row | {"more": []}])
    with (
        Store(tmp_path, {}) as store,
        pytest.raises(InputError, match=r"variants\.jsonl: a row is no variant"),
    ):
        store.variants([request])


def test_outcomes_of_another_shape_are_named(tmp_path: Path) -> None:
    passage = Passage("p", "d", 0, 4, "Kelm")
    outcome = Outcome([Candidate(DRAFT, 7)], [(DRAFT, "longest", ""), (None, "no answer", "")])
    row = outcome_row("o", passage, outcome, 1, "e")
    path = tmp_path / "outcomes.jsonl"
    write_jsonl(path, [row])
    with IndexedRows(path, "id", OUTCOME_FIELDS) as outcomes:
        assert outcomes.get("o") == [json.loads(json.dumps(row))]
    for field, value in (
        ("tries", "1"),
        ("candidates", {}),
        ("candidates", [row["candidates"][0] | {"specificity": "high"}]),
        ("candidates", [row["candidates"][0] | {"wrong": 5}]),
        ("refused", ["longest"]),
        ("refused", [{"question": 3, "reason": "longest"}]),
        ("refused", [{"reason": "no such reason"}]),
    ):
        write_jsonl(path, [{**row, field: value}])
        with pytest.raises(InputError, match=f"outcomes.jsonl: byte 0: {field}: found"):
            IndexedRows(path, "id", OUTCOME_FIELDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wrong": 3}, "wrong a list of texts"),
        ({"wrong": "ab"}, "wrong a list of texts"),
        ({"wrong": ["a", None]}, "wrong a list of texts"),
        ({"decision": "keep", "text": ["x"]}, "must be texts"),
        ({"decision": "drop", "answer": 0}, "must be texts"),
        ({"text": " "}, "an edit needs a text"),
        ({}, "an edit needs a text"),
    ],
)
def test_a_decision_whose_texts_are_none_is_refused_at_its_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    good = {"id": "a", "decision": "edit", "question": "Q?", "wrong": ["b", "c"]}
    write_jsonl(tmp_path / "decisions.jsonl", [good, {"id": "b", "decision": "edit", **change}])
    with pytest.raises(InputError, match=f"decisions.jsonl:2: .*{message}"):
        read_decisions(tmp_path)
