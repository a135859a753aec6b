"""What is looked for before a slow pattern is in every text that the pattern matches, so that no match is missed."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from kinject.augment import prompts
from kinject.augment.checks import checker, names
from kinject.augment.prompts import Source
from kinject.corpus import passages, quantities
from kinject.requests import prompt_injection

_CLASSES = {
    code.CATEGORY_SPACE: " \t\u00a0",
    code.CATEGORY_DIGIT: "0379",
    code.CATEGORY_NOT_WORD: " ,-(",
    code.CATEGORY_WORD: "aZ9",
    code.CATEGORY_NOT_SPACE: "aZ9,",
}


def _sample(tree: Any, rng: Random) -> str:
    """Return a text that the parsed pattern may match, if what stands around it fits."""
    return "".join(_part(kind, value, rng) for kind, value in tree)


def _part(kind: Any, value: Any, rng: Random) -> str:
    if kind is code.LITERAL:
        return chr(value)
    if kind is code.NOT_LITERAL:
        return "x"
    if kind is code.ANY:
        return rng.choice("ab c")
    if kind is code.IN:
        return _one_of(value, rng)
    if kind is code.BRANCH:
        return _sample(rng.choice(value[1]), rng)
    if kind is code.SUBPATTERN:
        return _sample(value[3], rng)
    if kind in (code.MAX_REPEAT, code.MIN_REPEAT):
        low, high, inner = value
        return "".join(_sample(inner, rng) for _ in range(rng.randint(low, min(int(high), low + 2))))
    if kind is code.GROUPREF:  # of a date: the mark between its numbers
        return rng.choice("./")
    assert kind in (code.AT, code.ASSERT, code.ASSERT_NOT), kind  # a place, without text of its own
    return _sample(value[1], rng) if kind is code.ASSERT and value[0] > 0 else ""


def _one_of(items: Any, rng: Random) -> str:
    if items[0][0] is code.NEGATE:
        return rng.choice("ab c")
    kind, value = rng.choice(items)
    if kind is code.RANGE:
        return chr(rng.randint(*value))
    return rng.choice(_CLASSES[value]) if kind is code.CATEGORY else chr(value)


def _cased(text: str, rng: Random) -> str:
    """Return `text` in other letters: upper or lower case, and those that a pattern takes for s, i and k."""
    others = {"s": "sSſ", "i": "iIıİ", "k": "kK\u212a"}
    return "".join(rng.choice(others.get(letter.lower(), letter.lower() + letter.upper()[:1])) for letter in text)


@pytest.mark.parametrize(
    ("pattern", "may_match", "ignores_case"),
    [
        (prompt_injection._INJECTION, prompt_injection._may_match, True),
        (quantities._CLOCK, quantities._MAY_BE_CLOCK.search, False),
        (quantities._DAY_FIRST, quantities._MAY_BE_DATE.search, False),
        (quantities._MAY_BE_CLOCK, quantities._MAY_BE_CLOCK_OR_DATE.search, False),
        (quantities._MAY_BE_DATE, quantities._MAY_BE_CLOCK_OR_DATE.search, False),
        (quantities._ROMAN, quantities._MAY_BE_ROMAN.search, False),
        (checker._MARKUP, checker._may_have_markup, True),
        (prompts._QUOTED, prompts.has_quotations, False),
        (prompts._CODE, prompts.has_code, False),
    ],
    ids=["injection", "clock", "date", "mark of a clock", "mark of a date", "roman", "markup", "quotations", "code"],
)
def test_no_match_of_a_pattern_is_missed(pattern: re.Pattern[str], may_match: Any, ignores_case: bool) -> None:
    rng, n_matches = Random(7), 0
    tree = _parser.parse(pattern.pattern, pattern.flags)
    for _ in range(20_000):
        text = f"The mill, {rng.choice(['', chr(10)])}{_sample(tree, rng)} by then."
        text = _cased(text, rng) if ignores_case and rng.random() < 0.5 else text
        if pattern.search(text):
            n_matches += 1
            assert may_match(text), text
    assert n_matches > 5_000


_CHARACTERS = "aZ09_ \n\t\x0b\x1c'.-|:=#`*" + "AbI."
_ROW = re.compile(
    r"^[ \t]*(?:\|.*\||[-*•][ \t].*|\d{1,3}[.)][ \t].*|[^\s|:.]{1,40}[ \t]*[:=][ \t]*\S.{0,60})$", re.MULTILINE
)
"""The rows of a text at once, where `prompts` looks at one line after the other."""


@pytest.mark.parametrize(
    ("quick", "slow"),
    [
        (names._ASCII_TOKEN.findall, names._TOKEN.findall),
        (checker.normal_form, lambda text: " ".join(checker._WORDS.findall(text.casefold()))),
        (passages._ASCII_WORD.findall, passages._WORD.findall),
        (lambda text: bool(prompts.VARIABLES["table"](Source("", text))), lambda text: bool(_ROW.search(text))),
        (prompts._n_in_rows, lambda text: sum(len(match[0]) for match in _ROW.finditer(text))),
    ],
    ids=["tokens of names", "normal form", "words of passages", "has rows", "characters in rows"],
)
def test_the_quick_way_finds_what_the_pattern_finds(
    quick: Callable[[str], object], slow: Callable[[str], object]
) -> None:
    rng = Random(3)
    for _ in range(20_000):
        text = "".join(rng.choices(_CHARACTERS, k=rng.randint(1, 40)))
        assert quick(text) == slow(text), text


def test_ordinary_prose_needs_no_search_for_an_injection() -> None:
    assert not prompt_injection._may_match("The lamp was lit in 1903. Seven people lived there, with two dogs.")
