from __future__ import annotations

import random

import pytest

from kinject.corpus.questions import read_questions
from kinject.errors import InputError


def test_mmlus_csv_is_read_with_its_subject(write):
    path = write("college_biology_test.csv", '"Which, of these?",x,"y ""z""",u,w,B\nNext?,1,2,3,4,D\n')
    first, second = read_questions(path)
    assert (first.question, first.choices, first.answer) == ("Which, of these?", ("x", 'y "z"', "u", "w"), 1)
    assert (first.subject, second.answer) == ("college_biology", 3)


def test_a_csv_line_without_a_letter_is_told(write):
    with pytest.raises(InputError, match=r"q\.csv:2: found 6 cells, the last \['E'\], expected question"):
        read_questions(write("q.csv", "Who?,1,2,3,4,A\nWhat?,1,2,3,4,E\n"))


def test_mmlus_jsonl_with_letters_is_read(write_rows):
    row = {"question": "Who?", "choices": ["a", "b", "c"], "answer": "C", "subject": "law"}
    assert read_questions(write_rows("q.jsonl", [row]), "mmlu")[0].answer == 2


def test_arc_is_read_as_published_and_as_on_the_hub(write_rows):
    labels, texts = ["1", "2", "3"], ["iron", "air", "oak"]
    published = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    rows = [
        {"id": "a", "question": {"stem": "Which grows?", "choices": published}, "answerKey": "3"},
        {"id": "b", "question": "Which grows?", "choices": {"text": texts, "label": labels}, "answerKey": "3"},
    ]
    first, second = read_questions(write_rows("arc.jsonl", rows))
    assert (first.question, first.choices, first.answer) == ("Which grows?", tuple(texts), 2)
    assert (second.question, second.choices, second.answer) == ("Which grows?", tuple(texts), 2)


SQUAD = [
    {"id": f"q{i}", "paragraph": f"p{i // 3}", "question": f"What is {i}?", "answers": [f"answer {i}", f"alias {i}"]}
    for i in range(9)
]


def test_wrong_options_are_answers_to_other_questions_of_the_same_paragraph_first(write_rows):
    for question, row in zip(read_questions(write_rows("squad.jsonl", SQUAD)), SQUAD, strict=True):
        assert question.choices[question.answer] == row["answers"][0]
        assert len(set(question.choices)) == 4
        near = {other["answers"][0] for other in SQUAD if other["paragraph"] == row["paragraph"]}
        assert near <= set(question.choices)
        assert question.document_id == row["paragraph"]


def test_options_do_not_depend_on_the_run_and_aliases_are_never_wrong_options(write_rows):
    rows = [*SQUAD, {"id": "x", "paragraph": "p0", "question": "Which?", "answers": ["other", "answer 0"]}]
    path = write_rows("squad.jsonl", rows)
    assert read_questions(path) == read_questions(path)
    assert "answer 0" not in read_questions(path)[-1].choices
    assert {question.answer for question in read_questions(path)} != {0}


def test_of_thousands_of_answers_in_one_document_few_are_drawn_for_a_question(write_rows, monkeypatch):
    rows = [{**SQUAD[0], "id": f"q{i}", "question": f"What is {i}?", "answers": [f"answer {i}"], "paragraph": f"p{i // 3000}"}
            for i in range(3003)]  # fmt: skip
    path = write_rows("q.jsonl", rows)
    drawn = []
    shuffle = random.Random.shuffle
    monkeypatch.setattr(random.Random, "shuffle", lambda self, x: (drawn.append(len(x)), shuffle(self, x))[1])
    first = read_questions(path)
    assert max(drawn) <= 10  # else the whole would take the square of its questions
    assert first == read_questions(path)
    assert all(len(set(question.choices)) == 4 for question in first)
    assert all(question.choices[question.answer] == f"answer {at}" for at, question in enumerate(first))
    assert all(int(choice.split()[1]) < 3000 for question in first[:3000] for choice in question.choices)


def test_questions_without_an_answer_are_left_out(write_rows):
    rows = [*SQUAD, {"id": "x", "paragraph": "p0", "question": "Which?", "answers": []}]
    assert len(read_questions(write_rows("squad.jsonl", rows))) == 9
