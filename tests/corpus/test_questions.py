from __future__ import annotations

import pytest

from kinject.corpus.questions import read_questions
from kinject.errors import InputError

GOOD = {"question": "Where was Bryn born?", "choices": ["Farrow", "Kelm"], "answer": 1}


def test_fields_are_read_and_unknown_keys_are_left(write_rows):
    row = {
        **GOOD,
        "id": "q1",
        "subject": "born",
        "document_id": "d1",
        "fact_id": "f1",
        "source_line": 3,
    }
    (question,) = read_questions(write_rows("q.jsonl", [row]))
    assert (question.id, question.choices, question.answer) == ("q1", ("Farrow", "Kelm"), 1)
    assert (question.subject, question.document_id, question.fact_id) == ("born", "d1", "f1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 2}, ":1: answer: found 2, but with 2 choices it can be 0 to 1."),
        ({"answer": -1}, ":1: answer: found -1, but with 2 choices it can be 0 to 1."),
        (
            {"answer": True},
            ":1: answer: found True, expected the index of the correct choice (0 to 1).",
        ),
        (
            {"answer": "Z"},
            ":1: answer: found 'Z', expected the index of the correct choice (0 to 1).",
        ),
        ({"answer": None}, ":1: answer: missing. It is the index of the correct choice (0 to 1)."),
        ({"choices": ["Farrow"]}, ":1: choices: found 1, expected at least two"),
        ({"choices": ["Farrow", "Farrow"]}, ":1: choices: 'Farrow' occurs twice."),
        ({"choices": ["Farrow", " "]}, ":1: choices: choice 1 is empty."),
        (
            {"choices": "Farrow"},
            ":1: choices: found 'Farrow', expected a list of at least two texts.",
        ),
        (
            {"choices": ["Farrow", 3]},
            ":1: choices: found ['Farrow', 3], expected a list of at least two texts.",
        ),
        ({"choices": None}, ":1: choices: missing."),
        ({"question": ""}, ":1: question: is empty."),
        ({"question": 5}, ":1: question: found 5, expected a text."),
        (
            {"question": None},
            ":1: question: missing. Found 'question', 'choices', 'answer'; needed are",
        ),
        ({"subject": 5}, ":1: subject: found 5, expected a text."),
        ({"id": ""}, ":1: id: is empty."),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(write_rows, change, message):
    path = write_rows("q.jsonl", [{**GOOD, **change}])
    with pytest.raises(InputError) as error:
        read_questions(path)
    assert f"{path}{message}" in str(error.value)


def test_two_questions_with_one_id_name_both_lines(write_rows):
    path = write_rows("q.jsonl", [{**GOOD, "id": "x"}, {**GOOD, "id": "y"}, {**GOOD, "id": "x"}])
    with pytest.raises(
        InputError, match=r":3: two questions have the id 'x', the first on line 1\."
    ):
        read_questions(path)


def test_a_question_under_other_ids_and_with_other_spaces_counts_once(write_rows, capsys):
    row = {"question": "Who wrote it?", "choices": ["Ann", "Bo"], "answer": 0}
    rows = [
        {**row, "id": f"q{i}", "question": f"Who  wrote it?{' ' * i}", "document_id": f"d{i}"}
        for i in range(12)
    ]
    rows.append({**row, "id": "other", "choices": ["Ann", "Cy"]})
    assert [question.id for question in read_questions(write_rows("q.jsonl", rows))] == [
        "q0",
        "other",
    ]
    assert (
        "q.jsonl: questions that repeat another one under another id: 11; each counts once"
        in capsys.readouterr().err
    )


def test_all_faults_come_at_once_and_no_more_than_twenty(write_rows):
    path = write_rows("q.jsonl", [{**GOOD, "id": str(i), "answer": 9} for i in range(25)])
    with pytest.raises(InputError) as error:
        read_questions(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{path}:1: ")
    assert lines[19].startswith(f"{path}:20: ")
    assert lines[20:] == ["... and 5 more faulty lines."]


@pytest.mark.parametrize(
    ("row", "accepted"),
    [
        ({"answers": ["Kelm", "the town of Kelm"]}, ("Kelm", "the town of Kelm")),
        (
            {"answers": {"text": ["Kelm", "Kelm"], "answer_start": [3, 3]}, "title": "Bryn"},
            ("Kelm",),
        ),
        ({"answers": []}, ()),
        ({"answer": "Kelm"}, ("Kelm",)),
        ({"answer": ["Kelm", "Farrow"]}, ("Kelm", "Farrow")),
        ({"answer": {"value": "Kelm", "aliases": ["Kelmscott"]}}, ("Kelm", "Kelmscott")),
        ({"choices": ["Kelm", "Farrow"], "answer": 0}, ("Kelm",)),
        ({"choices": ["Kelm", "Farrow"], "answer": 0, "answers": ["kelm"]}, ("kelm",)),
    ],
)
def test_open_questions_in_every_layout(write_rows, row, accepted):
    (question,) = read_questions(write_rows("q.jsonl", [{"question": "Where?", **row}]), "open")
    assert question.accepted == accepted
    assert question.choices == tuple(row.get("choices", ()))


@pytest.mark.parametrize("aliases", ["Kelmscott", 7, {"Kelmscott": 1}])
def test_other_answers_that_are_no_list_are_refused(write_rows, aliases):
    row = {"question": "Where?", "answer": {"value": "Kelm", "aliases": aliases}}
    with pytest.raises(InputError, match=r"q\.jsonl:1: answer: aliases: found .* a list of texts"):
        read_questions(write_rows("q.jsonl", [row]), "open")


def test_squads_own_file_is_read(write_rows):
    qas = [{"id": "a", "question": "Where?", "answers": [{"text": "Kelm", "answer_start": 0}]},
           {"id": "b", "question": "Why?", "answers": [], "is_impossible": True}]  # fmt: skip
    path = write_rows(
        "dev.json", [{"version": "v2.0", "data": [{"title": "Bryn", "paragraphs": [{"qas": qas}]}]}]
    )
    questions = read_questions(path, "open")
    assert [(q.id, q.accepted, q.document_id) for q in questions] == [
        ("a", ("Kelm",), "Bryn#0"),
        ("b", (), "Bryn#0"),
    ]


def test_an_open_question_has_one_gold(write_rows):
    rows = [
        {"question": "Where?", "answers": ["Kelm"], "id": "a"},
        {"question": "Where?", "answers": ["Farrow"], "id": "b"},
    ]
    with pytest.raises(InputError, match=r"'Farrow', but 'Kelm' at .*:1"):
        read_questions(write_rows("q.jsonl", rows), "open")
