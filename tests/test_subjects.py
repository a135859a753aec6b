"""The articles and questions on five subjects are what their READMEs say, and the choices give nothing away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kinject.corpus.choices import measure_shortcuts
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl

ROOT = Path(__file__).parents[1]
DATA, QUESTIONS = ROOT / "data" / "subjects", ROOT / "eval" / "subjects"
SUBJECTS = ("anatomy", "astronomy", "college_biology", "college_chemistry", "prehistory")


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_every_subject_has_its_articles_each_with_ten_paraphrases() -> None:
    articles = rows(DATA / "articles.jsonl")
    assert Counter(row["subject"] for row in articles) == dict.fromkeys(SUBJECTS, 24)
    assert all(175 <= len(row["text"].split()) <= 225 for row in articles)
    paraphrases = rows(DATA / "paraphrases.jsonl")
    ids = [row["id"] for row in articles]
    assert Counter(row["document_id"] for row in paraphrases) == dict.fromkeys(ids, 10)
    assert len({row["text"] for row in paraphrases}) == 1200
    assert rows(DATA / "anatomy.jsonl") == articles[:24]
    assert rows(DATA / "anatomy-paraphrases.jsonl") == paraphrases[:240]


def test_four_questions_share_four_choices_each_right_once() -> None:
    questions = read_questions(QUESTIONS / "questions.jsonl")
    assert Counter(question.subject for question in questions) == dict.fromkeys(SUBJECTS, 40)
    assert {question.document_id for question in questions} == {
        row["id"] for row in rows(DATA / "articles.jsonl")
    }
    right: dict[frozenset[str], list[str]] = {}
    for question in questions:
        group = right.setdefault(frozenset(question.choices), [])
        group.append(question.choices[question.answer])
    assert all(sorted(group) == sorted(choices) for choices, group in right.items())
    assert Counter(question.answer for question in questions) == dict.fromkeys(range(4), 50)


def test_choices_give_nothing_away() -> None:
    questions = read_questions(QUESTIONS / "questions.jsonl")
    texts = [f"{row['title']} {row['text']}" for row in rows(DATA / "articles.jsonl")]
    (found,) = measure_shortcuts({"subjects": questions}, texts)
    for accuracy in (found.picker, found.most_frequent, found.longest, found.shortest):
        assert accuracy == pytest.approx(0.25, abs=0.01)


def test_examples_are_other_questions_and_the_first_five_of_different_subjects() -> None:
    examples = rows(QUESTIONS / "examples.jsonl")
    assert {row["subject"] for row in examples[:5]} == set(SUBJECTS)
    asked = {row["question"].casefold() for row in rows(QUESTIONS / "questions.jsonl")}
    assert not asked & {row["question"].casefold() for row in examples}
