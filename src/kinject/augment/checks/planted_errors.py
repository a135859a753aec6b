"""Errors planted on purpose in correct texts, to test the checks, a judge or a whole pipeline.

The words of each language are in planted_errors.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kinject.augment.checks.names import GENERIC_WORDS
from kinject.augment.prompts import passage_of
from kinject.corpus.passages import sentence_ends
from kinject.types import Message

FACT_KINDS = ("number", "date", "unit", "name")
"""Kinds of errors that the checks detect."""

RELATION_KINDS = ("roles", "swap", "owner", "cause", "order", "quantifier", "negation", "explanation")
"""Kinds that keep every number and name: only a reader detects them.

Two names exchange who did what to whom (roles), or their sentences (swap); another owner; the cause for the effect; before
for after; all for some; a denied statement; an explanation that the text does not give.
"""

ALL_KINDS = (*FACT_KINDS, *RELATION_KINDS, "invention")
"""All kinds; an invention is a new sentence with a name that is not in the text."""

LANGUAGES = ("en", "de", "fr", "es", "zh", "ja")
"""Languages (ISO 639-1) with words for these errors."""

_NO_SPACES = ("zh", "ja")
_EDGE = r"(?:(?<!\w)|(?!\w))"  # not inside a word
_NUMBER = r"(?<![A-Za-z\d.,])\d+(?:[.,\u00a0\u202f]\d+)*(?![.,]?\d)(?![A-Za-z]*\d)"
_MOST_NAMES = 16
_NOT_WHOLE = re.compile(r" (?:of|on|for|and|the|in|de|von) [A-ZÀ-Ý]")
_POSSESSIVE = re.compile(r"['’]s\Z")

_Rules = list[tuple[re.Pattern[str], str]]


@dataclass(frozen=True)
class _Words:
    """The words of one language: patterns of changeable words, and their replacements."""

    numbers: tuple[str, ...]
    number: re.Pattern[str]
    months: tuple[str, ...]
    dates: tuple[re.Pattern[str], ...]
    units: Mapping[str, str]
    unit: re.Pattern[str] | None
    names: tuple[re.Pattern[str], ...]
    not_names: frozenset[str]
    places: tuple[str, ...]
    rules: Mapping[str, _Rules]
    around_names: Mapping[str, tuple[str, ...]]
    explanations: tuple[str, ...]
    inventions: tuple[str, ...]
    spaces: bool


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return tables


@lru_cache(maxsize=16)
def _words(language: str) -> _Words:
    """Return the words of a language; of an unknown one none, so that only digits can be changed."""
    table = _tables().get(language, {})
    spaces = language not in _NO_SPACES
    edge = _EDGE if spaces else ""
    months, numbers, units, places = (table.get(key) or () for key in ("months", "number_words", "units", "places"))
    spelled = f"{table.get('number_before', edge)}(?:{'|'.join(numbers)}){table.get('number_after', edge)}"
    month = f"(?P<month>{'|'.join(months)})"
    before_unit = rf"(?:\d[ \u00a0-]?|{edge}(?:{'|'.join(numbers)})[ -])" if spaces else r"[\d百千万亿億] ?"
    longest_first = "|".join(map(re.escape, sorted(units, key=len, reverse=True)))
    names = [name.replace("{letters}", table.get("letters", "")) for name in table.get("names") or ()]
    if places:
        listed = "|".join(places)
        names.append(f"{edge}(?:{listed}){edge}" if spaces else f"(?<![ァ-ヶー・])(?:{listed})(?![ァ-ヶー・海語语史])")
    return _Words(
        numbers=tuple(numbers), number=re.compile(f"{_NUMBER}|{spelled}" if numbers else _NUMBER),
        months=tuple(months),
        dates=tuple(re.compile(edge + date.replace("{month}", month) + edge) for date in table.get("dates") or ()),
        units=units or {}, unit=re.compile(f"{before_unit}(?P<unit>{longest_first}){edge}") if units else None,
        names=tuple(map(re.compile, names)), not_names=frozenset([*months, *(table.get("not_names") or ())]),
        places=tuple(places),
        rules={
            kind: [(re.compile(f"{edge}(?:{find}){edge}", re.IGNORECASE), put) for find, put in table.get(kind) or ()]
            for kind in ("cause", "order", "quantifier", "negation", "same")
        },
        around_names={kind: tuple(table.get(kind) or ()) for kind in ("roles", "owner")},
        explanations=tuple(table.get("explanations") or ()), inventions=tuple(table.get("inventions") or ()),
        spaces=spaces,
    )  # fmt: skip


def plant_error(kind: str, text: str, rng: Random, names: Sequence[str] = (), language: str = "en") -> str | None:
    """Return `text` with one error of `kind`, None where it has no room for one.

    `names` are names of other texts, `language` is that of the text.
    """
    words = _words(language)
    rules = words.rules.get(kind)
    changed = _PLANTS[kind](text, rng, names, words) if rules is None else _reverse(rules, text, rng)
    return None if changed == text else changed


def find_names(text: str, language: str = "en") -> list[str]:
    """Return the words of names in `text` that may replace a name of another text."""
    words = _words(language)
    name_words = (
        _POSSESSIVE.sub("", word)
        for match in _name_matches(text, words)
        for word in (match["word"] if "word" in match.groupdict() else match[0]).split(" ")
    )
    return list(dict.fromkeys(word for word in name_words if _is_name(word) or not words.spaces))


def _is_name(word: str) -> bool:
    """Return whether a word of a name is itself one, unlike the museum of the British Museum."""
    return word[:1].lower() != word[:1] and word.lower() not in GENERIC_WORDS


def reword(text: str, language: str = "en") -> str:
    """Return `text` with some words replaced by others of the same meaning."""
    for pattern, put in _words(language).rules["same"]:
        text = pattern.sub(lambda match, put=put: _filled(match, put), text)  # type: ignore[misc]
    return text


def _filled(match: re.Match[str], put: str) -> str:
    """Return the replacement of a match, with a capital where the match has one."""
    new = match.expand(put)
    return new[:1].upper() + new[1:] if match[0][:1].isupper() else new


def _reverse(rules: _Rules, text: str, rng: Random) -> str | None:
    matches = [(match, put) for pattern, put in rules for match in pattern.finditer(text)]
    if not matches:
        return None
    match, put = rng.choice(matches)
    return text[: match.start()] + _filled(match, put) + text[match.end() :]


def _change_number(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Replace one number by a number that is not in the text."""
    match = _pick([words.number], text, rng)
    if match is None:
        return None
    old = match[0]
    for _ in range(50):  # a text may contain every number of one digit
        digits = re.search(r"\d", old)
        new = re.sub(r"\d", lambda digit: str(rng.randint(1, 9)), old) if digits else rng.choice(words.numbers)
        if not re.search(rf"(?<![\d.,]){re.escape(new)}(?!\d)", text):
            return text[: match.start()] + new + text[match.end() :]
    return None


def _change_date(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Change the day, the month or the year of one date."""
    match = _pick(words.dates, text, rng)
    if match is None:
        return None
    group = rng.choice([name for name in ("day", "month", "year") if match.groupdict().get(name)])
    old = match[group]
    if old in words.months:
        new = rng.choice([month for month in words.months if month != old])
    else:
        low, high = {"day": (1, 28), "month": (1, 12), "year": (int(old) - 30, int(old) + 30)}[group]
        new = str(rng.choice([value for value in range(low, high + 1) if value != int(old)]))
    return text[: match.start(group)] + new + text[match.end(group) :]


def _change_unit(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Replace the unit of one number."""
    match = _pick([words.unit] if words.unit else [], text, rng)
    if match is None:
        return None
    return text[: match.start("unit")] + words.units[match["unit"]] + text[match.end("unit") :]


def _change_name(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Replace one word of a name by a name that is not in the text."""
    matches = list(_name_matches(text, words))
    others = [name for name in (*names, *words.places) if name not in text]
    if not matches or not others:
        return None
    match = rng.choice(matches)
    group = "word" if "word" in match.groupdict() else 0
    parts = match[group].split(" ")
    name_parts = [index for index, part in enumerate(parts) if _is_name(_POSSESSIVE.sub("", part))]
    index = rng.choice(name_parts or range(len(parts)))
    possessive = _POSSESSIVE.search(parts[index])
    parts[index] = rng.choice(others) + (possessive[0] if possessive else "")
    return text[: match.start(group)] + " ".join(parts) + text[match.end(group) :]


def _name_matches(text: str, words: _Words) -> Iterator[re.Match[str]]:
    """Yield the names in `text`, none inside another."""
    end = 0
    matches = (match for pattern in words.names for match in pattern.finditer(text))
    for match in sorted(matches, key=lambda match: (match.start(), -match.end())):
        if match.start() >= end and words.not_names.isdisjoint(match[0].split(" ")):
            end = match.end()
            yield match


def _whole_names(text: str, words: _Words) -> list[str]:
    return list(dict.fromkeys(_POSSESSIVE.sub("", match[0]) for match in _name_matches(text, words)))


def _are_different(first: str, second: str) -> bool:
    """Return whether two names surely denote different things: no word begins like one of the other."""
    size = 2 if not first.isascii() and " " not in first + second else 4
    beginnings = [{word[:size] for word in re.split(r"[\s·・-]", name)} for name in (first, second)]
    return beginnings[0].isdisjoint(beginnings[1]) and first not in second and second not in first


def _around_names(kind: str, text: str, words: _Words) -> Iterator[re.Match[str]]:
    """Yield the matches of the patterns of a kind, with the names of `text` filled in."""
    names = sorted(_whole_names(text, words), key=len, reverse=True)
    if not names:
        return
    edge = _EDGE if words.spaces else ""
    listed = "|".join(map(re.escape, names))
    for pattern in words.around_names[kind]:
        for group in ("a", "b", "name"):
            pattern = pattern.replace(f"{{{group}}}", f"{edge}(?P<{group}>{listed}){edge}")
        yield from re.finditer(pattern, text)


def _exchange_roles(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Exchange two names around a verb or a preposition that gives each its role."""
    matches = [match for match in _around_names("roles", text, words) if _are_different(match["a"], match["b"])]
    if not matches:
        return None
    match = rng.choice(matches)
    return _exchanged(text, match.span("a"), match.span("b"))


def _swap_names(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Exchange two names of different sentences."""
    ends = sentence_ends(text)
    complete_names = (match for match in _name_matches(text, words) if not _NOT_WHOLE.match(text, match.end()))
    candidates = [(match, sum(end <= match.start() for end in ends)) for match in complete_names]
    candidates = sorted(
        rng.sample(candidates, min(len(candidates), _MOST_NAMES)), key=lambda candidate: candidate[0].start()
    )
    pairs = [
        (a.span(), b.span())
        for a, first in candidates
        for b, second in candidates
        if first < second and _are_different(_POSSESSIVE.sub("", a[0]), _POSSESSIVE.sub("", b[0]))
        and bool(_POSSESSIVE.search(a[0])) == bool(_POSSESSIVE.search(b[0]))
    ]  # fmt: skip
    return _exchanged(text, *rng.choice(pairs)) if pairs else None


def _exchanged(text: str, span: tuple[int, int], other_span: tuple[int, int]) -> str:
    first, second = sorted((span, other_span))
    parts = text[: first[0]], text[slice(*second)], text[first[1] : second[0]], text[slice(*first)], text[second[1] :]
    return "".join(parts)


def _change_owner(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Give the property of one thing to another thing of the text."""
    known = _whole_names(text, words)
    candidates = [
        (match, other)
        for match in _around_names("owner", text, words)
        for other in known
        if _are_different(match["name"], other)
    ]
    if not candidates:
        return None
    match, other = rng.choice(candidates)
    return text[: match.start("name")] + other + text[match.end("name") :]


def _explain(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Add an explanation that the text does not give, at the end of a sentence or after it."""
    ends = [end for end in sentence_ends(text) if text[end - 1] in ".。"]
    if not ends or not words.explanations:
        return None
    end, explanation = rng.choice(ends), rng.choice(words.explanations)
    if explanation[0] in ",，":
        return text[: end - 1] + explanation + text[end - 1 :]
    return text[:end] + (" " if words.spaces else "") + explanation + text[end:]


def _invent(text: str, rng: Random, names: Sequence[str], words: _Words) -> str | None:
    """Add a sentence with a name that is not in the text."""
    others = [name for name in (*names, *words.places) if name not in text]
    if not others or not words.inventions:
        return None
    sentence = rng.choice(words.inventions).replace("{name}", rng.choice(others))
    return text.rstrip() + (" " if words.spaces else "") + sentence


def _pick(patterns: Iterable[re.Pattern[str]], text: str, rng: Random) -> re.Match[str] | None:
    matches = [match for pattern in patterns for match in pattern.finditer(text)]
    return rng.choice(matches) if matches else None


_Plant = Callable[[str, Random, Sequence[str], _Words], str | None]
_PLANTS: Mapping[str, _Plant] = {
    "number": _change_number, "date": _change_date, "unit": _change_unit, "name": _change_name,
    "roles": _exchange_roles, "swap": _swap_names, "owner": _change_owner, "explanation": _explain,
    "invention": _invent,
}  # fmt: skip

FAULTY_ANSWERS: Mapping[str, Callable[[str, Sequence[Message]], tuple[str | None, str]]] = {
    "truncated": lambda text, messages: (text[: len(text) // 2], "length"),
    "null": lambda text, messages: (None, "stop"),
    "empty": lambda text, messages: ("  \n", "stop"),
    "filtered": lambda text, messages: ("", "content_filter"),
    "refusal": lambda text, messages: ("I'm sorry, but I can't help with rewriting this text.", "stop"),
    "wrapped": lambda text, messages: (f"Sure, here is a paraphrase of the passage:\n\n{text}", "stop"),
    "trailing": lambda text, messages: (f"{text}\n\nLet me know if you would like another version!", "stop"),
    "echo": lambda text, messages: (passage_of(messages), "stop"),
    "changed": lambda text, messages: (plant_error("number", text, Random(len(text))) or text, "stop"),
}
"""Name -> (good answer, messages) to (faulty answer, finish_reason)."""
