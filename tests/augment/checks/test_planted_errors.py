"""Errors planted in texts of six languages: each is one change, and a fault."""

import difflib
import json
import re
from pathlib import Path
from random import Random

import pytest

from kinject.augment.checks.judge import ALL_KINDS, RELATION_KINDS, plant_error, reword

LANGUAGES = ("en", "de", "fr", "es", "zh", "ja")
ROWS = [
    json.loads(line)
    for line in Path(__file__)
    .parents[3]
    .joinpath("benchmarks/augment/passages.jsonl")
    .read_text("utf-8")
    .splitlines()
]
TEXTS = {
    language: [row["text"] for row in ROWS if row["language"] == language] for language in LANGUAGES
}


def planted(kind: str, language: str) -> list[tuple[str, str]]:
    """Return (text, text with an error), 4 of each passage that has room."""
    drawn = [
        (text, plant_error(kind, text, Random(seed), language))
        for text in TEXTS[language]
        for seed in range(4)
    ]
    return [(text, wrong) for text, wrong in drawn if wrong is not None]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_is_planted_in_every_language_as_one_change(kind: str, language: str) -> None:
    pairs = planted(kind, language)
    assert len(pairs) >= 4
    for text, wrong in pairs:
        assert wrong != text
        changes = [
            code
            for code in difflib.SequenceMatcher(None, text, wrong, False).get_opcodes()
            if code[0] != "equal"
        ]
        spread = changes[-1][2] - changes[0][1]
        assert spread <= len(text) if kind == "roles" else spread <= 40, wrong
        same_numbers = sorted(re.findall(r"\d+", text)) == sorted(re.findall(r"\d+", wrong))
        assert same_numbers is (kind in RELATION_KINDS)
        assert kind != "roles" or sorted(text) == sorted(wrong)


@pytest.mark.parametrize(
    ("kind", "language", "text", "wrong"),
    [
        (
            "roles",
            "en",
            "In 1805 the Romans defeated the Goths.",
            "In 1805 the Goths defeated the Romans.",
        ),
        (
            "roles",
            "en",
            "So the Rhine was crossed by Caesar.",
            "So the Caesar was crossed by Rhine.",
        ),
        (
            "cause",
            "en",
            "It closed because the river froze.",
            "It closed, and as a result the river froze.",
        ),
        ("cause", "de", "Sie blieb, weil es regnete.", "Sie blieb, sodass es regnete."),
        ("cause", "zh", "下雨，因此他留下。", "下雨，这是因为他留下。"),
        ("order", "en", "He left before the war.", "He left after the war."),
        ("order", "fr", "Il partit après la guerre.", "Il partit avant la guerre."),
        ("quantifier", "en", "Most people stayed.", "All people stayed."),
        (
            "quantifier",
            "es",
            "La mayoría de los campesinos volvió.",
            "Todos los campesinos volvió.",
        ),
        ("quantifier", "ja", "多くの人が来た。", "すべての人が来た。"),
        ("negation", "fr", "Le pont est vieux.", "Le pont n'est pas vieux."),
        ("negation", "ja", "橋は古いものである。", "橋は古いものではない。"),
    ],
)
def test_a_planted_error_says_the_opposite(kind: str, language: str, text: str, wrong: str) -> None:
    assert plant_error(kind, text, Random(0), language) == wrong


@pytest.mark.parametrize(
    ("kind", "language", "text"),
    [
        ("roles", "en", "He saw Paris and London."),  # a list has no roles
        ("roles", "en", "So Anna was accompanied by Bruno."),
        ("order", "en", "It was named after the king."),
        ("order", "en", "He stood before the court."),
        ("quantifier", "en", "It is the most famous of them."),
        ("quantifier", "en", "The town softened the rules."),  # "often" inside a word
        ("cause", "en", "It is known not just because it is old."),
        ("negation", "zh", "但是他来了。"),
        *((kind, "en", "nothing to see here") for kind in ALL_KINDS),
        *(
            (kind, "it", "Il mulino fu fondato a Roma il 3 maggio.")
            for kind in ALL_KINDS
            if kind != "number"
        ),
    ],
)
def test_a_text_without_room_for_an_error_gets_none(kind: str, language: str, text: str) -> None:
    assert plant_error(kind, text, Random(0), language) is None


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_words_of_the_same_meaning_change_no_number(language: str) -> None:
    for text in TEXTS[language]:
        changed = reword(text, language)
        assert changed != text
        assert re.findall(r"\d+", text) == re.findall(r"\d+", changed)
