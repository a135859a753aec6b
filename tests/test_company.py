"""The company's documents and questions are what their READMEs say, and their choices give nothing away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.corpus.choices import measure_shortcuts
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl
from kinject.recipe import read_recipe
from small import quick

ROOT = Path(__file__).parents[1]
DATA, QUESTIONS = ROOT / "data" / "company", ROOT / "eval" / "company"
LEVELS = {"words": 4, "reworded": 4, "inferred": 2, "combined": 2}


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def documents() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows(DATA / "documents.jsonl")}


def test_every_document_has_ten_paraphrases_and_some_an_older_edition() -> None:
    found = documents()
    assert len(found) == 128
    assert all(100 <= len(row["text"].split()) <= 170 for row in found.values())
    paraphrases = Counter(row["document_id"] for row in rows(DATA / "paraphrases.jsonl"))
    assert paraphrases == dict.fromkeys(found, 10)
    older = {row["id"]: row for row in rows(DATA / "older.jsonl")}
    assert len(older) == 32
    assert all(found[name]["text"] != row["text"] for name, row in older.items())


@pytest.mark.parametrize("level", LEVELS)
def test_each_document_has_its_questions_with_answers_in_writing(level: str) -> None:
    asked = rows(QUESTIONS / f"{level}.jsonl")
    assert Counter(row["document_id"] for row in asked) == dict.fromkeys(documents(), LEVELS[level])
    assert all(row["choices"][row["answer"]] == row["answers"][0] for row in asked)
    if level == "combined":
        assert all(len(set(row["document_ids"])) == 2 for row in asked)


@pytest.mark.parametrize("level", LEVELS)
def test_choices_give_nothing_away(level: str) -> None:
    questions = read_questions(QUESTIONS / f"{level}.jsonl")
    assert all(len(question.choices) == 4 for question in questions)
    texts = [f"{row['title']} {row['text']}" for row in documents().values()]
    (found,) = measure_shortcuts({level: questions}, texts)
    for accuracy in (found.picker, found.most_frequent, found.longest, found.shortest):
        assert accuracy == pytest.approx(0.25, abs=0.03)
    places = Counter(question.answer for question in questions)
    assert max(places.values()) - min(places.values()) <= 4


@pytest.mark.parametrize(
    ("name", "n"), quick([("company", 1280), ("subjects", 1200)], ("company", 1280))
)
def test_every_paraphrase_passes_the_checks(
    name: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study ends an arm whose corpus is short by one text."""
    monkeypatch.chdir(ROOT)
    recipe = read_recipe(ROOT / f"recipes/{name}/augment.yaml", [f"run_dir={tmp_path / 'run'}"])
    result = augment(recipe)
    assert (result.got, result.asked) == (n, n), result.refused


def test_no_question_is_trained_on() -> None:
    taught = {row["messages"][0]["content"].casefold() for row in rows(DATA / "turns.jsonl")}
    for level in LEVELS:
        assert not taught & {
            row["question"].casefold() for row in rows(QUESTIONS / f"{level}.jsonl")
        }


def test_questions_without_an_answer_have_none() -> None:
    questions = read_questions(QUESTIONS / "unanswerable.jsonl", "open")
    assert len(questions) == 64
    assert not any(question.is_answerable for question in questions)
