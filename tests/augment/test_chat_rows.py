"""Rows for chat models: conversations of the styles, and RAFT's questions among passages (arXiv 2403.10131)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.checks.checker import Checker
from kinject.augment.prompts import Source
from kinject.augment.styles import STYLES
from kinject.corpus.passages import BEGIN_QUOTE, END_QUOTE, final_answer
from kinject.corpus.rows import CorpusFile
from kinject.corpus.squad import exact_match
from kinject.disk import Row, read_jsonl
from kinject.eval.prompts import PromptRequest, render_prompt
from kinject.eval.retrieval import Bm25Retriever
from kinject.heap import read_documents
from kinject.recipe import Recipe
from kinject.types import Passage, Question

Make = Callable[..., Recipe]
CHAT = {"questions": 1, "dialogue": 1, "atomic_facts": 1, "knowledge_instruct": 1}
ANSWER = (
    "Q: Who built it?\nQUOTE: She built the Falk Bridge\nA: Mara Lind\n\n"
    "Q: Where was she born?\nQUOTE: in  Arvika.\nA: Arvika"
)
PASSAGE = "Mara Lind was born in Arvika.\nShe built the Falk Bridge in 1931."


def test_each_style_writes_its_facts_as_conversations(make_recipe: Make, documents: Path) -> None:
    result = augment(
        make_recipe(
            styles=CHAT | {"paraphrase": 1}, messages=True, include_originals=False, max_attempts=20
        )
    )
    assert result.sft_path is not None
    rows = list(CorpusFile(result.sft_path))  # as training reads them
    assert {row.shape for row in rows} == {"messages"}
    assert len({row.id for row in rows}) == len(rows) == 12 * (5 + 1 + 5 + 5)
    assert all([turn["role"] for turn in row.messages[:2]] == ["user", "assistant"] for row in rows)
    dialogues = [row for row in rows if len(row.messages) > 2]
    assert len(dialogues) == 12
    assert all(row.messages[0]["content"].endswith("?") for row in dialogues)
    names = {document.id: document.title for document in read_documents(documents)}
    rows_of_facts = [
        row for row in rows if row.messages[0]["content"].startswith("What do you know about")
    ]
    assert (
        sum(names[row.document_id] in row.messages[0]["content"] for row in rows_of_facts)
        == len(rows_of_facts)
        == 12 * 10
    )
    assert {row.shape for row in CorpusFile(result.corpus_path)} == {"text"}


def test_facts_of_a_text_without_a_title_stay_text() -> None:
    style = STYLES["atomic_facts"]
    assert style.corpus_rows("She was born in Arvika.", {"fact": "f"}, 0, Source("", PASSAGE)) == [
        {"text": "She was born in Arvika."}
    ]


@pytest.fixture
def passages(documents: Path) -> list[Passage]:
    documents_read = read_documents(documents)
    return [
        Passage(document.id, document.id, 0, len(document.text), document.text)
        for document in documents_read
    ]


def _raft(make_recipe: Make, **overrides: Any) -> list[Row]:
    recipe = make_recipe(
        styles={"raft": 2}, include_originals=False, one_corpus=True, max_attempts=20, **overrides
    )
    return [row for _, row in read_jsonl(augment(recipe).corpus_path)]


def test_a_question_stands_among_what_a_search_would_return(
    make_recipe: Make, passages: list[Passage]
) -> None:
    rows = _raft(make_recipe, raft={"distractors": 3, "without_gold": 0.3})
    retriever, texts = Bm25Retriever(passages), {passage.text for passage in passages}
    n_without = 0
    for row in rows:
        *shown, last = row["prompt"].split("\n\n")
        question = last.removeprefix("Question: ").removesuffix("\nAnswer:")
        (gold,) = (passage for passage in passages if passage.document_id == row["document_id"])
        has_gold = gold.text in shown
        n_without += not has_gold
        ranked = (passages[index] for index in retriever.rank([question], len(passages))[0])
        nearest = [passage.text for passage in ranked if passage.document_id != gold.document_id]
        assert set(shown) == {*nearest[: 3 + (not has_gold)], *([gold.text] if has_gold else [])}
        assert len(shown) == 4
        assert set(shown) <= texts
        request = PromptRequest(
            Question("1", question, ("a", "b"), 0), "generate", passages=tuple(shown)
        )
        assert (
            row["prompt"] == render_prompt(request).context
        )  # what the model meets when it is asked
        quotation = (
            row["completion"].removeprefix(f" {BEGIN_QUOTE} ").rpartition(f" {END_QUOTE} ")[0]
        )
        assert (
            (quotation in gold.text and quotation != "")
            if has_gold
            else BEGIN_QUOTE not in row["completion"]
        )
        assert final_answer(row["completion"]).strip() in gold.text
    assert len(rows) == 12 * 2 * 5
    assert (
        abs(n_without / len(rows) - 0.3) < 3 * (0.3 * 0.7 / len(rows)) ** 0.5
    )  # three standard errors
    positions = {
        row["prompt"].split("\n\n").index(passages[0].text)
        for row in rows
        if passages[0].text in row["prompt"]
    }
    assert len(positions) > 1


def test_a_quotation_must_stand_in_the_passage_word_for_word() -> None:
    style = STYLES["raft"]
    checker = Checker(PASSAGE, style.rules, style.literals)
    assert checker.check(style.read(ANSWER, "", PASSAGE).texts[0]).accepted
    refused = checker.check(
        style.read(ANSWER.replace("She built the", "She designed the"), "", PASSAGE).texts[0]
    )
    assert (refused.reason, refused.detail) == (
        "quotation", "'She designed the Falk Bridge' is not in the passage word for word",
    )  # fmt: skip


def test_the_answer_behind_a_quotation_is_the_answer() -> None:
    text = f" {BEGIN_QUOTE} She built the Falk Bridge in 1931. {END_QUOTE} 1931"
    assert exact_match(text, ["1931"])
    assert not exact_match(text, ["Falk Bridge"])
