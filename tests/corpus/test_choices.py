"""Choices that give nothing away, and the measure of what a set's choices give away."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kinject.corpus.choices import (
    Answer,
    count_mentions,
    measure_shortcuts,
    shape_of,
    shared_choices,
)
from kinject.types import Question

NAMES = [
    "Ada Kelm",
    "Bo Arden",
    "Cy Farrow",
    "Di Bryn",
    "Ed Lowmere",
    "Flo Tarn",
    "Gus Heath",
    "Hal Moor",
    "Ivy Beck",
]


OPEN = Question("1", "Who?", (), 0, answers=("Ada",))


def made(answers: list[Answer], seed: int = 0) -> list[Question]:
    choices = shared_choices(answers, seed)
    return [
        Question(f"q{i}", f"Which is it, {i}?", of, of.index(answer.text))
        for i, (answer, of) in enumerate(zip(answers, choices, strict=True)) if of is not None
    ]  # fmt: skip


def test_each_answer_is_right_once_and_wrong_three_times_at_each_position_alike():
    for n in (4, 5, 7, 8, 9, 16, 23):
        answers = [Answer(f"{3 * i + 7} euros", "euros") for i in range(n)]
        questions = made(answers)
        assert len(questions) == n
        shown = Counter(choice for question in questions for choice in question.choices)
        assert set(shown.values()) == {4}
        places = Counter(question.answer for question in questions)
        assert max(places.values()) - min(places.get(place, 0) for place in range(4)) <= 1


def test_no_preference_among_choices_beats_guessing_where_groups_are_full():
    answers = [Answer(name, "person") for name in NAMES[:8]] + [
        Answer(f"{i} May", "date") for i in range(8, 20)
    ]
    questions = made(answers)
    rng = random.Random(1)
    for _ in range(20):
        liking = {answer.text: rng.random() for answer in answers}
        picked = [
            max(range(4), key=lambda i, q=question: liking[q.choices[i]]) for question in questions
        ]
        right = sum(
            pick == question.answer for pick, question in zip(picked, questions, strict=True)
        )
        assert right == len(questions) / 4


def test_numbers_get_their_neighbours_as_wrong_choices():
    answers = [Answer(f"{value} metres", "metres") for value in (2, 900, 3, 1000, 4, 1100, 5, 1200)]
    for question in made(answers):
        numbers = [int(choice.split()[0]) for choice in question.choices]
        assert max(numbers) < 10 or min(numbers) > 100


def test_a_wrong_choice_answers_its_question_in_no_wording():
    same_day = [Answer("Monday", "weekday", ("Monday", "on Monday")) for _ in range(6)]
    others = [
        Answer(day, "weekday")
        for day in ("Tuesday", "Wednesday", "Thursday", "Friday", "Monday") * 6
    ]
    for question in made(same_day + others):
        assert len(set(question.choices)) == 4
    doubtful = [Answer("the mill", "place", context="Where, beside the barn, was he born?")]
    doubtful += [Answer(text, "place") for text in ("the barn", "the inn", "the forge", "the weir")]
    for seed in range(10):
        for question in made(doubtful, seed):
            assert not {"the mill", "the barn"} <= set(question.choices)


def test_too_few_of_a_kind_get_no_choices():
    answers = [
        Answer("cedar", "material"),
        Answer("oak", "material"),
        *(Answer(name, "person") for name in NAMES),
    ]
    choices = shared_choices(answers, 0)
    assert choices[:2] == [None, None]
    assert None not in choices[2:]


def test_the_form_of_an_answer_is_its_kind():
    assert [shape_of(text) for text in ("43 euros", "21.50 euros", "23 May", "Rufus Hestett", "a goose", "17:25")] == [
        "# euros", "# euros", "# may", "Aa Aa", "2 words", "#",
    ]  # fmt: skip


def test_mentions_are_whole_words_as_a_naive_count_finds_them():
    texts = [
        "The mill of Ada Kelm. Ada Kelm owns 12 mills, the 12 euros and the mill.",
        "ADA KELM; 112 euros",
    ]
    found = count_mentions(["Ada Kelm", "the mill", "12 euros", "112 euros", "Bo"], texts)
    assert {phrase: found[phrase] for phrase in ("Ada Kelm", "the mill", "12 euros", "112 euros", "Bo")} == {
        "Ada Kelm": 3, "the mill": 2, "12 euros": 1, "112 euros": 1, "Bo": 0,
    }  # fmt: skip


def test_the_shortcuts_of_a_set_by_pencil_and_paper():
    text = "Ada Kelm was born in Lowmere, Ada Kelm died in Tarn."
    questions = [
        Question(
            "1", "Who?", ("Ada Kelm", "Bo", "Cy", "Di"), 0
        ),  # the only one that stands there, and the longest
        Question("2", "Where?", ("Lowmere", "Tarn", "Brynford", "Heathwick"), 0),  # one of two
        Question(
            "3", "Where else?", ("Moor", "Tarn", "Lowmere", "Beck"), 0
        ),  # not there; the shortest, with two others
    ]
    (found,) = measure_shortcuts({"new": questions, "open": [OPEN]}, [text])
    assert (found.right_known, found.wrong_known) == (2 / 3, 3 / 9)
    assert found.picker == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found.most_frequent == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found.longest == pytest.approx(1 / 3)
    assert found.shortest == pytest.approx((0 + 0 + 1 / 3) / 3)
    assert found.warning().startswith(
        "new: 67% of the right and 33% of the wrong choices stand in the documents; who reads "
    )
    assert (
        "picks among the choices that stand in the documents has 50% of 3 right, guessing 25%."
        in found.warning()
    )
    assert measure_shortcuts({"open": [OPEN]}, [text]) == []


def test_an_answer_is_found_where_words_are_not_parted() -> None:
    texts = [
        "王安石在杭州当官。",
        "山田は長崎に住む。",
        "서울은 수도이다.",
        "Cafe\u0301 Lind in Ulm",
    ]
    phrases = ["杭州", "长沙", "長崎", "서울", "Café Lind"]
    assert count_mentions(phrases, texts) == {"杭州": 1, "長崎": 1, "서울": 1, "Café Lind": 1}


def test_a_capital_is_one_of_any_script_and_a_letter_without_case_is_none() -> None:
    shapes = ["Река", "река", "été froid", "Émile Été", "杭州"]
    assert list(map(shape_of, shapes)) == ["Aa", "1 word", "2 words", "Aa Aa", "1 word"]
