"""The grade `match` of a written answer, by pairs whose verdict was decided by hand before the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kinject.corpus.grading import matches

ENDLESS = (
    "7" * 5000,
    "3-1-" * 2500,
    "$" + "1" * 6000,
    "5/" + "3" * 4500,
    "九" * 5000,
    "8" * 4400 + "月",
)
"""What a model writes that repeats itself; Python makes no number of over 4,300 digits."""
PAIRS = Path(__file__).with_name("graded_pairs.jsonl")
"""One pair a line: the kind of difference, the written `text`, the texts `accepted`, and whether
the text is a `correct` answer."""


def test_each_pair_has_the_verdict_that_was_decided_by_hand() -> None:
    pairs = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    assert len(pairs) >= 170
    wrong = [pair for pair in pairs if matches(pair["text"], pair["accepted"]) != pair["correct"]]
    assert wrong == []


@pytest.mark.parametrize("text", ENDLESS)
def test_an_answer_without_end_is_wrong_and_no_fault(text: str) -> None:
    for accepted in ("7", "5 km", "3-1", "1987年3月"):
        assert not matches(text, [accepted])
    assert matches(text, [text])
