"""Errors planted on purpose in correct answers, to test the checks, a judge or a whole pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

from kinject.augment.checks.quantities import MONTHS, NUMBER_WORDS
from kinject.augment.prompts import passage_of
from kinject.types import Message

_SPELLED_NUMBERS = [
    word for word, value in NUMBER_WORDS.items() if 2 <= value <= 19 and not word.endswith(("th", "rd", "nd"))
]
_NUMBER = re.compile(rf"(?<![\w.,])\d+(?:[.,]\d+)*(?![\w,]*\d)|\b(?:{'|'.join(_SPELLED_NUMBERS)})\b")
_MONTH = "|".join(name.title() for name in MONTHS)
_DATE = re.compile(rf"\b(?:(\d{{1,2}})(?:st|nd|rd|th)?\s+({_MONTH})|({_MONTH})\s+(\d{{1,2}})(?!\d))(?:,?\s+(\d{{4}}))?")
_MEASURE = re.compile(
    r"(\d[\d,.]*|\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty))([\s-])"
    r"(km|kilometers?|kilometres?|meters?|metres?|miles?|feet|foot|inches|kg|kilograms?|pounds|tons?|tonnes|acres|hectares"
    r"|percent|hours?|days?|weeks?|months?|years?|decades?|centuries|minutes?|seconds?|dollars|euros|degrees Celsius|mph)\b"
)
_UNIT_SWAPS = (
    ("km", "miles"), ("kilometer", "mile"), ("kilometre", "mile"), ("meter", "foot"), ("metre", "foot"),
    ("mile", "kilometer"), ("feet", "metres"), ("foot", "metre"), ("inches", "centimetres"), ("kg", "pounds"),
    ("kilogram", "pound"), ("pounds", "kilograms"), ("tonnes", "pounds"), ("ton", "pound"),
    ("acres", "hectares"), ("hectares", "acres"), ("percent", "degrees"), ("hour", "day"), ("day", "week"),
    ("week", "month"), ("month", "year"), ("year", "month"), ("decade", "year"), ("centuries", "decades"),
    ("minute", "hour"), ("second", "minute"), ("dollars", "euros"), ("euros", "dollars"),
    ("degrees Celsius", "degrees Fahrenheit"), ("mph", "km/h"),
)  # fmt: skip
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?:['’]s)?(?: [A-Z][a-z]{2,})*")

_INVENTED = (
    "It was later moved to {name}.",
    "Many people from {name} came to see it.",
    "The news caused protests in {name}.",
    "This had been foretold by {name}.",
)

Plant = Callable[[str, Random, Sequence[str]], str | None]
"""(text, random generator, names of other texts) -> the text with one error, or None if there is nothing to change."""


def change_number(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with one number replaced by a number that is not in it."""
    match = _pick(_NUMBER, text, rng)
    if match is None:
        return None
    old = match[0]
    for _ in range(50):  # a text may contain every number of one digit
        new = (
            rng.choice(_SPELLED_NUMBERS)
            if old in NUMBER_WORDS
            else re.sub(r"\d", lambda digit: str(rng.randint(1, 9)), old)
        )
        if not re.search(rf"(?<![\d.,]){re.escape(new)}(?!\d)", text):
            return text[: match.start()] + new + text[match.end() :]
    return None


def change_date(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with the day, the month or the year of one date changed."""
    match = _pick(_DATE, text, rng)
    if match is None:
        return None
    groups = [group for group in (1, 2, 3, 4, 5) if match[group]]
    group = rng.choice(groups)
    old = match[group]
    if old.isalpha():
        new = rng.choice([month.title() for month in MONTHS if month.title() != old])
    else:
        low, high = (1, 28) if group in (1, 4) else (int(old) - 30, int(old) + 30)
        new = str(rng.choice([value for value in range(low, high) if str(value) != old]))
    return text[: match.start(group)] + new + text[match.end(group) :]


def change_unit(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with the unit of one number replaced."""
    match = _pick(_MEASURE, text, rng)
    if match is None:
        return None
    unit = match[3]
    old, new = next(pair for pair in _UNIT_SWAPS if unit.startswith(pair[0]))
    changed = "feet" if new == "foot" and unit.endswith("s") else unit.replace(old, new, 1)
    return text[: match.start(3)] + changed + text[match.end(3) :]


def change_name(text: str, rng: Random, names: Sequence[str]) -> str | None:
    """Return `text` with one word of a name replaced by a word of `names` that is not in it."""
    match = _pick(_NAME, text, rng)
    if match is None:
        return None
    words = match[0].split(" ")
    index = rng.randrange(len(words))
    new = rng.choice([name for name in names if name not in text])
    words[index] = new + ("'s" if words[index].endswith(("'s", "’s")) else "")
    return text[: match.start()] + " ".join(words) + text[match.end() :]


def swap_names(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with two different names swapped."""
    names_found = list(_NAME.finditer(text))
    pairs = [(a, b) for a in names_found for b in names_found if a.end() <= b.start() and a[0] != b[0]]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    return text[: first.start()] + second[0] + text[first.end() : second.start()] + first[0] + text[second.end() :]


def negate(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with one statement negated."""
    match = _pick(re.compile(r"\b(?:is|are|was|were|has|had|can|will)\b(?! not)"), text, rng)
    return None if match is None else f"{text[: match.end()]} not{text[match.end() :]}"


def invent(text: str, rng: Random, names: Sequence[str]) -> str:
    """Return `text` with one more sentence, which nothing supports."""
    name = rng.choice(names)
    return text.rstrip() + " " + rng.choice(_INVENTED).replace("{name}", name)


def _pick(pattern: re.Pattern[str], text: str, rng: Random) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return rng.choice(matches) if matches else None


PLANTS: Mapping[str, Plant] = {"number": change_number, "date": change_date, "unit": change_unit, "name": change_name}
"""Kind of error that the checks detect -> function that plants it."""

ALL_PLANTS: Mapping[str, Plant] = {**PLANTS, "swap": swap_names, "negation": negate, "invention": invent}
"""Those kinds, and the kinds that only a reader can detect."""

FAULTY_ANSWERS: Mapping[str, Callable[[str, Sequence[Message]], tuple[str | None, str]]] = {
    "truncated": lambda text, messages: (text[: len(text) // 2], "length"),
    "null": lambda text, messages: (None, "stop"),
    "empty": lambda text, messages: ("  \n", "stop"),
    "filtered": lambda text, messages: ("", "content_filter"),
    "refusal": lambda text, messages: ("I'm sorry, but I can't help with rewriting this text.", "stop"),
    "wrapped": lambda text, messages: (f"Sure, here is a paraphrase of the passage:\n\n{text}", "stop"),
    "trailing": lambda text, messages: (f"{text}\n\nLet me know if you would like another version!", "stop"),
    "echo": lambda text, messages: (passage_of(messages), "stop"),
    "changed": lambda text, messages: (change_number(text, Random(len(text))) or text, "stop"),
}
"""Name -> (good answer, messages) to (faulty answer, finish_reason)."""
