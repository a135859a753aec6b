from collections import Counter

import pytest

from kinject.sandbox.people import ATTRIBUTES, POOLS, create_country
from kinject.sandbox.questions import create_questions, create_reverse_questions, document_id_of, sample_questions

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
        matching = [name for name in question.choices if by_name[name].facts[question.subject] == value]
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
            counts = Counter(question.answer for question in questions if question.subject == attribute)
            assert counts == dict.fromkeys(range(4), 30)


def test_ids_are_unique_and_forward_and_reverse_share_the_fact() -> None:
    forward, reverse = create_questions(COUNTRY.new, 0), create_reverse_questions(COUNTRY.new, 0)
    assert len({question.id for question in (*forward, *reverse)}) == len(forward) + len(reverse)
    assert {question.fact_id for question in forward} == {question.fact_id for question in reverse}


def test_a_sample_holds_as_many_of_every_subject() -> None:
    sample = sample_questions(create_questions(COUNTRY.known, 0), 20, 0)
    assert Counter(question.subject for question in sample) == dict.fromkeys(ATTRIBUTES, 20)
