from __future__ import annotations

import pytest

from kinject.corpus.gold_answers import GoldIndex
from kinject.corpus.questions import read_questions
from kinject.corpus.squad import normalize_answer
from kinject.errors import InputError
from kinject.types import Question


def test_mmlus_csv_is_read_with_its_subject(write):
    path = write(
        "college_biology_test.csv", '"Which, of these?",x,"y ""z""",u,w,B\nNext?,1,2,3,4,D\n'
    )
    first, second = read_questions(path)
    assert (first.question, first.choices, first.answer) == (
        "Which, of these?",
        ("x", 'y "z"', "u", "w"),
        1,
    )
    assert (first.subject, second.answer) == ("college_biology", 3)


def test_mmlus_jsonl_with_letters_is_read(write_rows):
    row = {"question": "Who?", "choices": ["a", "b", "c"], "answer": "C", "subject": "law"}
    assert read_questions(write_rows("q.jsonl", [row]))[0].answer == 2


def test_arc_is_read_as_published_and_as_on_the_hub(write_rows):
    labels, texts = ["1", "2", "3"], ["iron", "air", "oak"]
    published = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    rows = [
        {"id": "a", "question": {"stem": "Which grows?", "choices": published}, "answerKey": "3"},
        {
            "id": "b",
            "question": "What grows?",
            "choices": {"text": texts, "label": labels},
            "answerKey": "3",
        },
    ]
    first, second = read_questions(write_rows("arc.jsonl", rows))
    assert (first.question, first.choices, first.answer) == ("Which grows?", tuple(texts), 2)
    assert (second.question, second.choices, second.answer) == ("What grows?", tuple(texts), 2)


SQUAD = [
    {
        "id": f"q{i}",
        "paragraph": f"p{i // 3}",
        "question": f"What is {i}?",
        "answers": [f"answer {i}", f"alias {i}"],
    }
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
    rows = [
        *SQUAD,
        {"id": "x", "paragraph": "p0", "question": "Which?", "answers": ["other", "answer 0"]},
    ]
    path = write_rows("squad.jsonl", rows)
    assert read_questions(path) == read_questions(path)
    assert "answer 0" not in read_questions(path)[-1].choices
    assert {question.answer for question in read_questions(path)} != {0}


def test_an_answer_with_an_article_or_a_stop_is_no_wrong_option_beside_it(write_rows):
    texts = ("The Oder", "Oder", "Ulm.", "Ulm", "a", "1,200", "1200")
    rows = [
        {"id": str(n), "paragraph": "p", "question": f"What is {n}?", "answers": [text]}
        for n, text in enumerate(texts)
    ]
    for question in read_questions(write_rows("squad.jsonl", rows)):
        forms = [normalize_answer(choice) for choice in question.choices]
        assert len(set(forms)) == len(forms) == 4


def test_questions_without_an_answer_are_left_out_and_counted(write_rows, capsys):
    none = {"paragraph": "p0", "question": "Which?", "answers": []}
    path = write_rows("squad.jsonl", [*SQUAD, {**none, "id": "x"}, {**none, "id": "y"}])
    assert len(read_questions(path)) == len(read_questions(path)) == 9
    warning = "squad.jsonl: questions without an answer are left out: 2; no choice would be right"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"Who?,1,2,3,4,A\nWhat?,1,2,3,4,B\n', ":1: not CSV: a quote opened here is never closed"),
        ('Who?,1,2,3,4,A\n"What"x,1,2,3,4,B\n', ":2: not CSV: ',' expected after '\"'"),
        ("Who?,1,2,3,4,A\nWhat?,1,2,3,B\n", ":2: found 5 cells, the first row has 6"),
        (
            "Who?;1;2;3;4;A\n",
            ":1: found 1 cell, the last ['Who?;1;2;3;4;A'], expected question, options",
        ),
        (
            "Who?,1,2,3,4,A\nWho?,4,3,2,1,A\n",
            ":2: answer: '4', but '1' at {path}:1, where the question is the same",
        ),
    ],
)
def test_a_csv_is_read_as_strictly_as_documents_are(write, text, message):
    path = write("q.csv", text)
    with pytest.raises(InputError) as error:
        read_questions(path)
    assert f"{path}{message.format(path=path)}" in str(error.value)


def arc_row(labels, key="B", **more):
    return {
        "question": "Which?",
        "choices": {"text": ["w", "x", "y", "z"], "label": labels},
        "answerKey": key,
        **more,
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (arc_row(["A", "B", "C"]), "choices: not ARC's layout (ValueError"),
        (arc_row(list("ABCD"), "E"), "choices: not ARC's layout (KeyError: 'E')"),
        (arc_row(list("ACCD"), "C"), "choices: not ARC's layout (ValueError: a label occurs twice"),
        (
            {"question": "Which?", "choices": ["x", "y"], "answerKey": 1},
            "choices: not ARC's layout (TypeError",
        ),
        (
            {"question": "Which?", "answers": ["x", "y"], "answer": 1},
            "answer: found 1, which is not in answers",
        ),
        (
            {"question": "Which?", "answers": {"text": "x"}},
            "answers: found {'text': 'x'}, expected a list of texts",
        ),
    ],
)
def test_a_row_whose_gold_is_not_clear_is_refused(write_rows, row, message):
    path = write_rows("q.jsonl", [row])
    with pytest.raises(InputError) as error:
        read_questions(path)
    assert f"{path}:1: {message}" in str(error.value)


@pytest.mark.parametrize("layout", ["auto", "open"])
def test_a_document_of_null_leaves_the_title_as_the_document(write_rows, layout):
    rows = [
        {"question": f"Which {i}?", "answers": [f"a{i}"], "title": f"t{i}", "document_id": None, "subject": None}
        for i in range(5)
    ]  # fmt: skip
    found = read_questions(write_rows("q.jsonl", rows), layout)
    assert [(question.document_id, question.subject) for question in found] == [
        (f"t{i}", "") for i in range(5)
    ]


@pytest.mark.parametrize(("answer", "gold"), [("B", None), ("C", 2)])
def test_a_letter_that_is_also_another_choice_is_refused(write_rows, answer, gold):
    row = {"question": "Which?", "choices": ["B", "A", "x"], "answer": answer}
    if gold is None:
        with pytest.raises(InputError, match="answer: found 'B', expected the index"):
            read_questions(write_rows("q.jsonl", [row]))
    else:
        assert read_questions(write_rows("q.jsonl", [row]))[0].answer == gold


@pytest.mark.parametrize(
    ("change", "is_conflict"),
    [
        ({}, True), ({"question": " Where  was Bryn born?"}, True), ({"choices": ["Kelm", "Farrow", "Arden"]}, True),
        ({"answer": 0}, False), ({"choices": ["Arden", "Kelm"]}, False), ({"document_id": "other"}, False),
        ({"question": "Where was Mara born?"}, False),
    ],
)  # fmt: skip
def test_one_question_with_two_golds_is_refused_in_a_file_and_across_files(
    write_rows, change, is_conflict
):
    row = {
        "id": "a",
        "question": "Where was Bryn born?",
        "choices": ["Farrow", "Kelm"],
        "answer": 0,
        "document_id": "d",
    }
    other = {**row, "id": "b", "answer": 1, **change}
    if change.get("choices") == ["Kelm", "Farrow", "Arden"]:
        other["answer"] = 0
    both, first, second = (
        write_rows(f"{len(rows)}{rows[0]['id']}.jsonl", rows)
        for rows in ([row, other], [row], [other])
    )
    golds = GoldIndex()
    read_questions(first, golds=golds)
    for place, read in (
        (f"{both}:1", lambda: read_questions(both)),
        (f"{first}:1", lambda: read_questions(second, golds=golds)),
    ):
        if not is_conflict:
            # Both stay, unless the other is the same under another id.
            n_kept = 2 if place.startswith(str(both)) and change != {"answer": 0} else 1
            assert len(read()) == n_kept
            continue
        with pytest.raises(InputError) as error:
            read()
        assert f"answer: 'Kelm', but 'Farrow' at {place}, where the question is the same" in str(
            error.value
        )


def test_two_answers_to_one_question_of_a_paragraph_are_refused_unless_one_is_an_alias(write_rows):
    again = {**SQUAD[0], "id": "again", "answers": ["alias 0", "more"]}
    assert len(read_questions(write_rows("q.jsonl", [*SQUAD, again]))) == 10
    with pytest.raises(
        InputError,
        match=r":10: answers: 'more' is not among those on line 1, where the question is",
    ):
        read_questions(write_rows("q.jsonl", [*SQUAD, {**again, "answers": ["more"]}]))


def test_a_question_on_each_of_many_documents_is_compared_with_that_of_its_own(write_rows):
    # Each was compared with all before it: the time grew with the square of the documents.
    golds = GoldIndex()
    for number in range(30_000):
        golds.add(
            Question(f"{number}", "Total?", (), 0, document_id=f"d{number}", answers=("5",)), ""
        )
    for document in ("d77", ""):
        with pytest.raises(InputError, match="'6', but '5' at"):
            golds.add(Question("q", "Total?", (), 0, document_id=document, answers=("6",)), "")


@pytest.mark.parametrize("layout", ["open", "auto"])
def test_a_row_with_answers_keeps_its_turns_and_its_kind(write_rows, layout):
    turns = [{"role": "system", "content": "Answer in a word."}]
    rows = [
        {"id": name, "question": f"Where is {name}?", "answers": [f"{name}ia"], "about": "places", "messages": turns}
        for name in ("Ulm", "Arden")
    ]  # fmt: skip
    questions = read_questions(write_rows("q.jsonl", rows), layout)
    assert [(question.about, list(question.messages)) for question in questions] == [
        ("places", turns)
    ] * 2


@pytest.mark.parametrize(
    "gold", [{"choices": ["Kelm", "Arden"], "answer": 1}, {"answers": ["Arden"]}]
)
def test_the_same_words_behind_other_turns_are_another_question(write_rows, gold):
    turns = [
        [{"role": "user", "content": f"It is {name}."}, {"role": "assistant", "content": "Yes."}]
        for name in ("spring", "autumn")
    ]
    rows = [{"question": "Where is it?", "messages": before, **gold} for before in turns]
    questions = read_questions(write_rows("q.jsonl", rows), "open")
    assert [list(question.messages) for question in questions] == turns
    with pytest.raises(
        InputError, match=r":2: the same question occurs twice, the first on line 1"
    ):
        read_questions(write_rows("q.jsonl", [rows[0], rows[0]]), "open")


def test_answers_behind_other_turns_are_no_two_golds(write_rows):
    rows = [
        {"question": "Where?", "answers": [gold], "messages": [{"role": "system", "content": gold}]}
        for gold in ("Kelm", "Arden")
    ]
    golds = [question.answers for question in read_questions(write_rows("q.jsonl", rows))]
    assert golds == [("Kelm",), ("Arden",)]
