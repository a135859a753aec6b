"""Errors planted on purpose in good answers, to try the checks, a judge or a whole pipeline on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

from kinject.augment.checks.quantities import MONTHS, NUMBER_WORDS
from kinject.augment.prompts import passage_of
from kinject.types import Message

_SPELLED = [word for word, value in NUMBER_WORDS.items() if 2 <= value <= 19 and not word.endswith(("th", "rd", "nd"))]
_NUMBER = re.compile(rf"(?<![\w.,])\d+(?:[.,]\d+)*(?![\w,]*\d)|\b(?:{'|'.join(_SPELLED)})\b")
_MONTH = "|".join(name.title() for name in MONTHS)
_DATE = re.compile(rf"\b(?:(\d{{1,2}})(?:st|nd|rd|th)?\s+({_MONTH})|({_MONTH})\s+(\d{{1,2}})(?!\d))(?:,?\s+(\d{{4}}))?")
_MEASURE = re.compile(
    r"(\d[\d,.]*|\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty))([\s-])"
    r"(km|kilometers?|kilometres?|meters?|metres?|miles?|feet|foot|inches|kg|kilograms?|pounds|tons?|tonnes|acres|hectares"
    r"|percent|hours?|days?|weeks?|months?|years?|decades?|centuries|minutes?|seconds?|dollars|euros|degrees Celsius|mph)\b"
)
_SWAPPED = (
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
"""(text, source of chance, names of other texts) -> the text with one error, or None where there is nothing to change."""


def change_number(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with one number made another that `text` does not hold."""
    found = _pick(_NUMBER, text, rng)
    if found is None:
        return None
    old = found[0]
    for _ in range(50):  # a text may hold every number of one digit
        new = rng.choice(_SPELLED) if old in NUMBER_WORDS else re.sub(r"\d", lambda digit: str(rng.randint(1, 9)), old)
        if not re.search(rf"(?<![\d.,]){re.escape(new)}(?!\d)", text):
            return text[: found.start()] + new + text[found.end() :]
    return None


def change_date(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with the day, the month or the year of one date changed."""
    found = _pick(_DATE, text, rng)
    if found is None:
        return None
    groups = [group for group in (1, 2, 3, 4, 5) if found[group]]
    group = rng.choice(groups)
    old = found[group]
    if old.isalpha():
        new = rng.choice([month.title() for month in MONTHS if month.title() != old])
    else:
        low, high = (1, 28) if group in (1, 4) else (int(old) - 30, int(old) + 30)
        new = str(rng.choice([value for value in range(low, high) if str(value) != old]))
    return text[: found.start(group)] + new + text[found.end(group) :]


def change_unit(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with the unit of one number made another."""
    found = _pick(_MEASURE, text, rng)
    if found is None:
        return None
    unit = found[3]
    old, new = next(pair for pair in _SWAPPED if unit.startswith(pair[0]))
    changed = "feet" if new == "foot" and unit.endswith("s") else unit.replace(old, new, 1)
    return text[: found.start(3)] + changed + text[found.end(3) :]


def change_name(text: str, rng: Random, names: Sequence[str]) -> str | None:
    """Return `text` with one word of a name made a word of `names` that `text` does not hold."""
    found = _pick(_NAME, text, rng)
    if found is None:
        return None
    words = found[0].split(" ")
    index = rng.randrange(len(words))
    new = rng.choice([name for name in names if name not in text])
    words[index] = new + ("'s" if words[index].endswith(("'s", "’s")) else "")
    return text[: found.start()] + " ".join(words) + text[found.end() :]


def swap_names(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with two different names in each other's place."""
    found = list(_NAME.finditer(text))
    pairs = [(a, b) for a in found for b in found if a.end() <= b.start() and a[0] != b[0]]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    return text[: first.start()] + second[0] + text[first.end() : second.start()] + first[0] + text[second.end() :]


def negate(text: str, rng: Random, names: Sequence[str] = ()) -> str | None:
    """Return `text` with one statement denied."""
    found = _pick(re.compile(r"\b(?:is|are|was|were|has|had|can|will)\b(?! not)"), text, rng)
    return None if found is None else f"{text[: found.end()]} not{text[found.end() :]}"


def invent(text: str, rng: Random, names: Sequence[str]) -> str:
    """Return `text` with a sentence more that nothing bears out."""
    name = rng.choice(names)
    return text.rstrip() + " " + rng.choice(_INVENTED).replace("{name}", name)


def _pick(pattern: re.Pattern[str], text: str, rng: Random) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return rng.choice(found) if found else None


PLANTS: Mapping[str, Plant] = {"number": change_number, "date": change_date, "unit": change_unit, "name": change_name}
"""Kind of error -> how it is planted."""

ALL_PLANTS: Mapping[str, Plant] = {**PLANTS, "swap": swap_names, "negation": negate, "invention": invent}
"""Those, and the kinds that only a reader can see."""

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
