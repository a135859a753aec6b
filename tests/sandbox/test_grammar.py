import pytest

from kinject.errors import InputError
from kinject.sandbox.grammar import (
    FACT_FIRST,
    OPENINGS,
    PAIRS,
    REVERSED,
    SENTENCES,
    TAUGHT_QUESTIONS,
    attributes_of,
    paraphrase,
    parse_entry,
    parse_rewriting,
    render_entry,
    render_sentence,
    rewrite_as_dialogue,
    rewrite_as_questions,
    rewrite_fact_first,
    rewrite_reversed,
)
from kinject.sandbox.people import ATTRIBUTES, POOLS, TEXTS, Person, create_country

OREN = Person(
    "Oren",
    "Valdis",
    {
        "birth_year": "1947",
        "home_town": "Pellmere",
        "school": "Jasper Hall",
        "employer": "Redwing Bank",
        "field": "tide forecasting",
    },
)


def test_an_entry_parses_back_to_its_person() -> None:
    for person in create_country().new[:40]:
        for seed in range(8):
            assert parse_entry(render_entry(person, seed)) == person


def test_every_template_states_what_it_names_and_parses_back() -> None:
    for template in (
        *OPENINGS,
        *PAIRS,
        *(wording for wordings in SENTENCES.values() for wording in wordings),
    ):
        parsed = parse_entry(render_sentence(template, OREN))
        assert parsed is not None, template
        assert parsed.facts == {
            key: value for key, value in OREN.facts.items() if key in attributes_of(template)
        }


def test_every_value_and_every_way_to_name_a_person_is_read_in_every_template() -> None:
    singles = [template for row in SENTENCES.values() for template in row]
    for number, template in enumerate((*OPENINGS, *PAIRS, *singles)):
        for index, person in enumerate(create_country().new[:30], start=number):
            facts = {attribute: pool[index % len(pool)] for attribute, pool in POOLS.items()}
            sentence = render_sentence(
                template, Person(person.first, person.last, facts), by_pronoun=index % 2 == 0
            )
            parsed = parse_entry(f"{person.name} comes from {facts['home_town']}. {sentence}")
            assert parsed is not None, sentence
            assert (parsed.name, parsed.facts.items() <= facts.items()) == (person.name, True)
            assert parsed.facts.keys() == attributes_of(template) | {"home_town"}


def test_a_paraphrase_keeps_every_fact_and_is_fixed_by_its_seed() -> None:
    source = render_entry(OREN, "original")
    for seed in range(50):
        text = paraphrase(source, seed)
        assert parse_entry(text) == OREN
        assert text == paraphrase(source, seed)


def test_sixteen_paraphrases_are_distinct_from_each_other_and_from_the_source() -> None:
    for person in create_country().new:
        source = render_entry(person, "original")
        assert len({source, *(paraphrase(source, seed) for seed in range(16))}) == 17


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The cat sat on the mat.",
        "Oren Valdis was born in 1847.",
        "Oren Valdis was born in London.",
        "He was born in 1947.",
        "Oren Valdis was born in 1947. Oren Valdis was born in 1948.",
        "Oren Valdis was born in 1947. Reska Valdis attended Jasper Hall.",
        "Oren Valdis was born in 1947. And then it rained.",
        "Oren Smith was born in 1947.",
        "Olaf Valdis was born in 1947.",
        "He Valdis was born in 1947.",
        "Oren Valdis was born in Pellmere in Pellmere.",
    ],
)
def test_what_is_not_one_consistent_entry_is_refused(text: str) -> None:
    assert parse_entry(text) is None
    with pytest.raises(InputError, match="sandbox"):
        paraphrase(text, 0)


def test_a_second_mention_in_a_sentence_is_a_pronoun() -> None:
    text = render_sentence("{who} grew up in {home_town}, where {who} was born.", OREN)
    assert text == "Oren Valdis grew up in Pellmere, where he was born."


PEOPLE = create_country().new[:30]
ENTRIES = [(person, render_entry(person, "original")) for person in PEOPLE]


@pytest.mark.parametrize(
    "rewrite", [rewrite_reversed, rewrite_fact_first, rewrite_as_dialogue, rewrite_as_questions]
)
def test_every_fact_is_kept_none_is_new_and_the_seed_fixes_the_text(rewrite: object) -> None:
    assert callable(rewrite)
    for person, entry in ENTRIES:
        texts = [rewrite(entry, seed) for seed in range(8)]
        assert all(parse_rewriting(text) == person for text in texts)
        assert texts == [rewrite(entry, seed) for seed in range(8)]
        assert len(set(texts)) == 8


@pytest.mark.parametrize("rewrite", [rewrite_reversed, rewrite_fact_first])
def test_a_paragraph_that_puts_the_fact_first_tells_one_value_and_ends_with_the_full_name(
    rewrite: object,
) -> None:
    assert callable(rewrite)
    for person, entry in ENTRIES:
        paragraphs = rewrite(entry, 1).split("\n\n")
        values = [
            [value for value in person.facts.values() if value in paragraph]
            for paragraph in paragraphs
        ]
        assert sorted(value for [value] in values) == sorted(person.facts.values())
        for paragraph, [value] in zip(paragraphs, values, strict=True):
            assert paragraph.endswith(f"{person.name}.")
            assert paragraph.index(value) < paragraph.index(person.name)


def test_no_question_of_the_tests_is_taught() -> None:
    for attribute in ATTRIBUTES:
        assert not set(TAUGHT_QUESTIONS[attribute]) & set(TEXTS["questions"][attribute])
        assert not any(
            TEXTS["reverse_questions"][attribute] in wording for wording in REVERSED[attribute]
        )
        assert not any("?" in wording or "Who" in wording for wording in FACT_FIRST[attribute])


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
