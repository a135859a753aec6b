from __future__ import annotations

import pytest

from kinject.errors import InputError
from kinject.eval.retrieval import measure_recall, read_contexts, read_passages
from kinject.types import Passage, Question

PASSAGES = [Passage(f"p{i}", f"d{i}", 0, 1, "x") for i in range(2)]


def test_recall_counts_questions_that_name_a_document():
    def ask(document: str) -> Question:
        return Question("q", "?", ("a", "b"), 0, document_id=document)

    contexts = [PASSAGES[:2], PASSAGES[:2], PASSAGES[:2], PASSAGES[:2]]
    questions = [ask("d0"), ask("d1"), ask("d4"), ask("")]
    first, both = (measure_recall("set", questions, contexts, k) for k in (1, 2))
    assert (first.n_found, first.n) == (1, 3)
    assert (both.n_found, both.n) == (2, 3)


def test_a_document_in_two_files_is_searched_once(write_rows):
    rows = [{"id": "d", "text": "Bryn was born in Farrow. She lives in Kelm."}]
    paths = [write_rows("a.jsonl", rows), write_rows("b.jsonl", rows)]
    assert [passage.document_id for passage in read_passages(paths, 64)] == ["d"]


def test_an_empty_document_is_told_with_its_line(write_rows):
    with pytest.raises(InputError, match=r"a\.jsonl:1: "):
        read_passages([write_rows("a.jsonl", [{"text": " "}])], 64)


def test_prepared_contexts_follow_the_questions(write_rows):
    rows = [
        {"question_id": "b", "passages": ["one", {"id": "x", "document_id": "d", "text": "two"}]},
        {"question_id": "a", "passages": []},
    ]
    questions = [Question(name, "?", ("x", "y"), 0) for name in "ab"]
    first, second = read_contexts(write_rows("c.jsonl", rows), questions)
    assert first == ()
    assert [(p.text, p.document_id) for p in second] == [("one", ""), ("two", "d")]
    with pytest.raises(InputError, match="no passages for 1 of 1 questions, such as 'z'"):
        read_contexts(write_rows("c.jsonl", rows), [Question("z", "?", ("x", "y"), 0)])
