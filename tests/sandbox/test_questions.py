from collections import Counter
from collections.abc import Sequence

import pytest

from kinject.sandbox.people import ATTRIBUTES, POOLS, Person, create_country
from kinject.sandbox.questions import (
    create_inferred_questions,
    create_questions,
    create_reverse_questions,
    document_id_of,
)

COUNTRY = create_country()
PEOPLE = {document_id_of(person): person for person in (*COUNTRY.new, *COUNTRY.known)}


@pytest.mark.parametrize("group", ["new", "known"])
def test_the_answer_is_the_persons_own_value_and_the_only_right_one(group: str) -> None:
    people = getattr(COUNTRY, group)
    questions = create_questions(people, 0)
    assert len(questions) == len(people) * len(ATTRIBUTES)
    for question in questions:
        person = PEOPLE[question.document_id]
        assert person.name in question.question
        assert len(set(question.choices)) == 4
        assert set(question.choices) <= set(POOLS[question.subject])
        assert question.choices[question.answer] == person.facts[question.subject]


def test_exactly_one_choice_of_a_reverse_question_matches() -> None:
    by_name = {person.name: person for person in COUNTRY.new}
    for question in create_reverse_questions(COUNTRY.new, 0):
        value = PEOPLE[question.document_id].facts[question.subject]
        assert value in question.question
        matching = [
            name for name in question.choices if by_name[name].facts[question.subject] == value
        ]
        assert matching == [question.choices[question.answer]]


def test_a_reader_who_always_prefers_the_same_values_scores_chance() -> None:
    questions = create_questions(COUNTRY.new, 0)
    for attribute in ATTRIBUTES:
        asked = [question for question in questions if question.subject == attribute]
        golds = Counter(question.choices[question.answer] for question in asked)
        seen = Counter(choice for question in asked for choice in question.choices)
        assert all(seen[value] == 4 * golds[value] for value in POOLS[attribute])


def test_each_position_holds_the_answer_equally_often() -> None:
    for questions in (create_questions(COUNTRY.new, 0), create_reverse_questions(COUNTRY.new, 0)):
        for attribute in ATTRIBUTES:
            counts = Counter(
                question.answer for question in questions if question.subject == attribute
            )
            assert counts == dict.fromkeys(range(4), 30)


INFERRED = [
    (COUNTRY.new, 120, {"birth_year": 36, "school": 15, "employer": 10}),
    (COUNTRY.known, 120, {"birth_year": 40, "school": 20, "employer": 12}),
]


@pytest.mark.parametrize(("people", "n", "n_each"), INFERRED)
def test_a_reader_who_always_infers_the_same_scores_chance(
    people: Sequence[Person], n: int, n_each: dict[str, int]
) -> None:
    questions = create_inferred_questions(people, 0, n)
    for attribute, expected in n_each.items():
        asked = [question for question in questions if question.subject == attribute]
        golds = Counter(question.choices[question.answer] for question in asked)
        assert set(golds.values()) == {expected}
        seen = Counter(choice for question in asked for choice in question.choices)
        assert set(seen.values()) == {expected * len(asked[0].choices)}
        assert set(seen) == set(golds)
        positions = Counter(question.answer for question in asked)
        assert max(positions.values()) - min(positions.values()) <= 1
