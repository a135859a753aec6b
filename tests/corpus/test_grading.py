"""The grade `match` of a written answer, by pairs whose verdict was decided by hand before the code."""

from __future__ import annotations

import json
from pathlib import Path

from kinject.corpus.grading import matches

PAIRS = Path(__file__).with_name("graded_pairs.jsonl")
"""One pair a line: the kind of difference, the written `text`, the texts `accepted`, and whether
the text is a `correct` answer."""


def test_each_pair_has_the_verdict_that_was_decided_by_hand() -> None:
    pairs = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    assert len(pairs) >= 170
    wrong = [pair for pair in pairs if matches(pair["text"], pair["accepted"]) != pair["correct"]]
    assert wrong == []
