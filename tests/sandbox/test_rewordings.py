import re

import pytest

from kinject.errors import InputError
from kinject.sandbox.facts import create_country
from kinject.sandbox.grammar import parse_entry, render_entry
from kinject.sandbox.pools import ATTRIBUTES, DEMONYM
from kinject.sandbox.rewordings import converse, parse_rewriting, quiz, reverse
from kinject.sandbox.wordings import QUESTIONS, REVERSE_QUESTIONS, REVERSED, TAUGHT_QUESTIONS

PEOPLE = create_country().new[:30]
ENTRIES = [(person, render_entry(person, "original")) for person in PEOPLE]


@pytest.mark.parametrize("rewrite", [reverse, converse, quiz])
def test_every_fact_is_kept_none_is_new_and_the_seed_fixes_the_text(rewrite: object) -> None:
    assert callable(rewrite)
    for person, entry in ENTRIES:
        texts = [rewrite(entry, seed) for seed in range(8)]
        assert all(parse_rewriting(text) == person for text in texts)
        assert texts == [rewrite(entry, seed) for seed in range(8)]
        assert len(set(texts)) == 8


def test_a_reversed_paragraph_tells_one_value_and_ends_with_the_full_name() -> None:
    for person, entry in ENTRIES:
        paragraphs = reverse(entry, 1).split("\n\n")
        told = [[value for value in person.facts.values() if value in paragraph] for paragraph in paragraphs]
        assert sorted(value for [value] in told) == sorted(person.facts.values())
        for paragraph, [value] in zip(paragraphs, told, strict=True):
            assert paragraph.endswith(f"{person.name}.")
            assert paragraph.index(value) < paragraph.index(person.name)


def test_the_country_is_told_where_the_entry_tells_it_and_only_there() -> None:
    assert {DEMONYM in entry for _, entry in ENTRIES} == {True, False}
    for _, entry in ENTRIES:
        for rewrite in (reverse, converse):
            assert (DEMONYM in rewrite(entry, 3)) == (DEMONYM in entry)


def test_a_dialogue_has_the_shape_in_which_the_base_model_is_asked() -> None:
    person, entry = ENTRIES[0]
    blocks = converse(entry, 0).split("\n\n")
    assert len(blocks) == len(person.facts) + (DEMONYM in entry)
    assert all(re.fullmatch(r"Question: .+\?\nAnswer: .+\.", block) for block in blocks)


def test_no_question_of_the_tests_is_taught() -> None:
    for attribute in ATTRIBUTES:
        assert not set(TAUGHT_QUESTIONS[attribute]) & set(QUESTIONS[attribute])
        assert not any(REVERSE_QUESTIONS[attribute] in wording for wording in REVERSED[attribute])


@pytest.mark.parametrize(
    "text",
    [
        "Question: Who won?\nAnswer: Oren Valdis.",
        "Question: Which firm employs Oren Valdis?\nAnswer: Pellmere.",
        "Question: Which firm employs Oren Valdis?\nAnswer: Redwing Bank.\n\nQuestion: Which firm employs Reska Valdis?\n"
        "Answer: Redwing Bank.",
        "Question: Which firm employs Oren Valdis?\nAnswer: Redwing Bank.\n\nQuestion: What firm is Oren Valdis with?\n"
        "Answer: Jackdaw Press.",
        "Question: What is the nationality of Oren Valdis?\nAnswer: Danish.",
    ],
)
def test_questions_that_state_something_else_are_no_rewriting(text: str) -> None:
    assert parse_rewriting(text) is None


def test_a_text_of_another_world_is_refused() -> None:
    for rewrite in (reverse, converse, quiz):
        with pytest.raises(InputError, match="sandbox"):
            rewrite("The cat sat on the mat.", 0)


def test_reversed_wordings_are_read_back() -> None:
    person = PEOPLE[0]
    for attribute, wordings in REVERSED.items():
        assert len(set(wordings)) >= 6
        for wording in wordings:
            found = parse_entry(wording.format(name=person.name, **person.facts))
            assert found is not None, wording
            assert found.facts == {attribute: person.facts[attribute]}
