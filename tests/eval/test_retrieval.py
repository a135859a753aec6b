from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from kinject.errors import InputError
from kinject.eval.retrieval import measure_recall, read_passages
from kinject.eval.retrieval.retrievers import Retriever
from kinject.types import Passage, Question

TEXTS = [
    "Bryn Arden was born in Farrow.",
    "Kelm is a town with a mill. The mill at Kelm is old.",
    "Farrow lies near Kelm.",
    "Farrow lies near Kelm.",
    "Year 7 was dry.",
]
PASSAGES = [Passage(f"p{i}", f"d{i}", 0, len(text), text) for i, text in enumerate(TEXTS)]


def by_the_formula(query: str) -> np.ndarray:
    """BM25 with Lucene's idf, k1 = 1.5, b = 0.75 (Kamphuis et al. 2020, table 1)."""
    words = [re.findall(r"\w+", text.lower()) for text in TEXTS]
    mean = sum(map(len, words)) / len(words)
    scores = np.zeros(len(TEXTS))
    for word in re.findall(r"\w+", query.lower()):
        df = sum(word in document for document in words)
        idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
        for index, document in enumerate(words):
            tf = Counter(document)[word]
            scores[index] += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean)) if tf else 0.0
    return scores


@pytest.mark.parametrize("query", ["Where was Bryn Arden born?", "Which mill is old, at Kelm?", "7", "Farrow? FARROW!"])
def test_order_is_that_of_the_formula(query):
    expected = [f"p{i}" for i in np.argsort(-by_the_formula(query), kind="stable")]
    assert [passage.id for passage in Retriever(PASSAGES).best(query, 5)] == expected


def test_equal_scores_keep_the_order_of_the_passages():
    assert [passage.id for passage in Retriever(PASSAGES).best("lies near", 2)] == ["p2", "p3"]
    assert [passage.id for passage in Retriever(PASSAGES).best("nothing known here", 3)] == ["p0", "p1", "p2"]


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
