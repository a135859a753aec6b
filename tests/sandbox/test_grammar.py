import pytest

from kinject.errors import InputError
from kinject.sandbox.facts import Person, create_country
from kinject.sandbox.grammar import Style, attributes_of, paraphrase, parse_entry, render_entry, render_sentence
from kinject.sandbox.pools import ATTRIBUTES
from kinject.sandbox.wordings import OPENINGS, PAIRS, SENTENCES

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


@pytest.mark.parametrize(
    "style", [Style(), Style(opening=1.0, pair=0.6, last_name=0.4, pronoun=0.4), Style(opening=0.0, pair=0.0)]
)
def test_an_entry_parses_back_to_its_person(style: Style) -> None:
    for person in create_country().new[:40]:
        for seed in range(4):
            assert parse_entry(render_entry(person, seed, style)) == person


def test_every_template_states_what_it_names_and_parses_back() -> None:
    for template in (*OPENINGS, *PAIRS, *(wording for wordings in SENTENCES.values() for wording in wordings)):
        found = parse_entry(render_sentence(template, OREN))
        assert found is not None, template
        assert found.facts == {key: value for key, value in OREN.facts.items() if key in attributes_of(template)}


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_each_attribute_has_at_least_twelve_wordings(attribute: str) -> None:
    assert len(set(SENTENCES[attribute])) >= 12
    assert all(attributes_of(template) == {attribute} for template in SENTENCES[attribute])


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


def test_part_of_an_entry_keeps_the_facts_that_it_has() -> None:
    text = "Oren Valdis was born in 1947. Oren Valdis attended Jasper Hall."
    found = parse_entry(paraphrase(text, 3))
    assert found is not None
    assert found.facts == {"birth_year": "1947", "school": "Jasper Hall"}


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
    ],
)
def test_what_is_not_one_consistent_entry_is_refused(text: str) -> None:
    assert parse_entry(text) is None
    with pytest.raises(InputError, match="sandbox"):
        paraphrase(text, 0)


def test_a_second_mention_in_a_sentence_is_a_pronoun() -> None:
    text = render_sentence("{who} grew up in {home_town}, where {who} was born.", OREN)
    assert text == "Oren Valdis grew up in Pellmere, where he was born."
