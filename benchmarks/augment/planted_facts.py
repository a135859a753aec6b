"""Errors of fact planted in correct texts: another number, date, unit or name, or a new sentence. The checks must find them.

The words of each language are in planted_facts.yaml, and the errors of relation in kinject.augment.checks.judge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kinject.augment.checks.judge import NUMBER, POSSESSIVE, RELATION_KINDS, Words, words_of
from kinject.augment.checks.judge import plant_error as plant_relation
from kinject.augment.checks.names import GENERIC_WORDS

FACT_KINDS = ("number", "date", "unit", "name")
ALL_KINDS = (*FACT_KINDS, *RELATION_KINDS, "invention")
"""All kinds; an invention is a new sentence with a name that is not in the text."""
LANGUAGES = ("en", "de", "fr", "es", "zh", "ja")


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text("utf-8")
    )
    return tables


class Facts:
    """The words of one language, and `patterns` of changeable ones by kind; of an unknown one digits alone."""

    def __init__(self, language: str) -> None:
        self.words: Words = words_of(language)
        table, edge = _tables().get(language, {}), self.words.edge
        self.months = self.words.table.get("months") or []
        self.numbers, self.inventions = (
            table.get("number_words") or [],
            table.get("inventions") or [],
        )
        self.units: dict[str, str] = table.get("units") or {}
        numbers, month = "|".join(self.numbers), f"(?P<month>{'|'.join(self.months)})"
        spelled = (
            f"|{table.get('number_before', edge)}(?:{numbers}){table.get('number_after', edge)}"
            if numbers
            else ""
        )
        before = (
            rf"(?:\d[ \u00a0-]?|{edge}(?:{numbers})[ -])"
            if self.words.spaces
            else r"[\d百千万亿億] ?"
        )
        units = "|".join(map(re.escape, sorted(self.units, key=len, reverse=True)))
        self.patterns = {
            "number": [NUMBER + spelled],
            "date": [
                edge + date.replace("{month}", month) + edge for date in table.get("dates") or ()
            ],
            "unit": [f"{before}(?P<unit>{units}){edge}"] if units else [],
        }


facts_of = lru_cache(maxsize=16)(Facts)


def find_names(text: str, language: str = "en") -> list[str]:
    """Return the words of names in `text` that may replace a name of another text."""
    words = words_of(language)
    parts = (part for match in words.find_names(text) for part in match[_word_of(match)].split(" "))
    bare = (POSSESSIVE.sub("", part) for part in parts)
    return list(dict.fromkeys(word for word in bare if is_name(word) or not words.spaces))


def plant_error(
    kind: str, text: str, rng: Random, names: Sequence[str] = (), language: str = "en"
) -> str | None:
    """Return `text` with one error of `kind`, None where it has no room for one. `names` are names of other texts."""
    if kind in RELATION_KINDS:
        return plant_relation(kind, text, rng, language)
    facts = facts_of(language)
    others = [name for name in (*names, *facts.words.table.get("places", ())) if name not in text]
    if kind == "invention":
        if not others or not facts.inventions:
            return None
        sentence = rng.choice(facts.inventions).replace("{name}", rng.choice(others))
        return f"{text.rstrip()}{' ' * facts.words.spaces}{sentence}"
    if kind == "name":
        matches = list(facts.words.find_names(text)) if others else []
    else:
        matches = [
            match for pattern in facts.patterns[kind] for match in re.finditer(pattern, text)
        ]
    if not matches:
        return None
    match = rng.choice(matches)
    group, new = (
        _other_name(match, rng, others) if kind == "name" else _other(kind, match, rng, facts)
    )
    changed = text[: match.start(group)] + new + text[match.end(group) :]
    return None if changed == text else changed


def is_name(word: str) -> bool:
    """Return whether a word of a name is itself one, unlike the museum of the British Museum."""
    return word[:1].lower() != word[:1] and word.lower() not in GENERIC_WORDS


def _word_of(match: re.Match[str]) -> str | int:
    return "word" if "word" in match.groupdict() else 0


def _other_name(match: re.Match[str], rng: Random, others: Sequence[str]) -> tuple[str | int, str]:
    parts = match[_word_of(match)].split(" ")
    index = rng.choice(
        [n for n, part in enumerate(parts) if is_name(POSSESSIVE.sub("", part))]
        or range(len(parts))
    )
    possessive = POSSESSIVE.search(parts[index])
    parts[index] = rng.choice(others) + (possessive[0] if possessive else "")
    return _word_of(match), " ".join(parts)


def _other(kind: str, match: re.Match[str], rng: Random, facts: Facts) -> tuple[str | int, str]:
    """Return the group of a match that is replaced, and another value for it."""
    if kind == "unit":
        return "unit", facts.units[match["unit"]]
    if kind == "date":
        group = rng.choice(
            [name for name in ("day", "month", "year") if match.groupdict().get(name)]
        )
        old = match[group]
        if old in facts.months:
            return group, rng.choice([month for month in facts.months if month != old])
        low, high = {"day": (1, 28), "month": (1, 12), "year": (int(old) - 30, int(old) + 30)}[
            group
        ]
        return group, str(
            rng.choice([value for value in range(low, high + 1) if value != int(old)])
        )
    for _ in range(50):  # a text may contain every number of one digit
        new = re.sub(r"\d", lambda digit: str(rng.randint(1, 9)), match[0])
        new = new if any(map(str.isdigit, match[0])) else rng.choice(facts.numbers)
        if not re.search(rf"(?<![\d.,]){re.escape(new)}(?!\d)", match.string):
            return 0, new
    return 0, match[0]
