"""Cloze questions: facts out of sentences, wrong choices of the same kind from other documents, the same every time."""

from __future__ import annotations

import re
from pathlib import Path

from kinject.augment.pilot import GAP, cloze_questions
from kinject.documents import read_documents
from kinject.types import Document

COMPANY = Path(__file__).parents[2] / "data" / "company" / "documents.jsonl"


def test_each_question_is_a_sentence_without_one_fact_and_its_choices_look_alike() -> None:
    documents = list(read_documents(COMPANY))
    passages, questions = cloze_questions(documents, 64)
    assert len(passages) == len({row["document_id"] for row in questions}) == 16
    assert len(questions) >= 30
    texts = {document.id: document for document in documents}
    for row in questions:
        document, answer = texts[row["document_id"]], row["choices"][row["answer"]]
        assert row["question"].replace(GAP, answer) == f"{document.title}: {row['sentence']}"
        assert row["sentence"] in " ".join(document.text.split())
        assert len(set(row["choices"])) == 4
        assert len({re.sub(r"\d", "0", choice) for choice in row["choices"] if choice[0].isdigit()}) <= 1
        wrong = [choice for choice in row["choices"] if choice != answer]
        assert not any(re.search(rf"\b{re.escape(choice)}\b", document.text) for choice in wrong)
    assert cloze_questions(documents[::-1], 64)[1][0] == cloze_questions(documents, 64)[1][0]
    assert len(cloze_questions(documents, 5)[0]) == 5


def test_text_that_is_no_prose_gives_none() -> None:
    table = "| a | 12 |\n| --- | --- |\n| b | 13 |\n\n- 14 of them\n\n# The year 2019"
    documents = [Document(f"{n}", "T", table.replace("1", str(n)), "t", {}) for n in range(9)]
    assert cloze_questions(documents, 64) == ([], [])
