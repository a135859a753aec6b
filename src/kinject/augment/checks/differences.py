"""Differences between two texts, and what explains them: another notation, arithmetic, or a word such as "the rest"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise

from kinject.augment.checks.profiles import frequent_words, grammar_of, profile_of
from kinject.augment.checks.quantities import MAX_COUNT, MONTHS, Quantities, occurrences

_MOST_VALUES = 40
"""Numbers of a source that are calculated with."""
_FACTORS = tuple(Decimal(factor) for factor in (7, 10, 12, 24, 52, 60, 100, 365, 1000, 3600, 10**6, 10**9))
_WINDOW, _UNSPACED_WINDOW = 60, 20
"""Characters on each side of a place, in texts with and without spaces between words."""
_BESIDE, _UNSPACED_BESIDE = 6, 2
"""Characters between a vague word and its number."""
_MIN_ROUND, _MAX_ROUND = Decimal("0.8"), Decimal("1.25")
"""A round number of years, over the time that it stands for."""
_NEAR = 22
"""Characters between two months of one span of time."""
_NO_UNITS: set[str] = set()
_OPTIONAL_UNITS = {"day", "year"}
"""Units that may be omitted: aged 19 is 19 years old, 1 to 5 May are five days."""
_IMPLIED_UNIT = {"10": "year", "100": "year", "1000": "year", "14": "day", "7": "day", "24": "hour", "60": "minute"}
"""Implied number -> its unit: a decade is ten years."""
_WORD = re.compile(r"[^\W\d_]+")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
_WIDE_RUN = re.compile(r"[\u30a0-\u30ff\u4e00-\u9fff]{2,}")


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that one of two texts has: its `reason` in `REASONS`, the evidence, and how much it proves.

    `lost` facts are of the source, others are new. A `sure` difference is a fault. An `explained` one may be the other text
    in other words, so it is in doubt. Any other is in doubt, too, unless a lost and a new one of a kind stand side by side:
    then one was replaced by the other.
    """

    reason: str
    detail: str
    sure: bool = True
    lost: bool = False
    explained: bool = False


def _is_rewritten(number: str, units: set[str], others: Mapping[str, set[str]]) -> bool:
    """Return whether one of `others` is a number in another notation: 1.234, 1,234; 20:30, 8:30, 20 h 30; 1,200 m, 1.2 km."""
    if any(_is_decade(*pair) for one in others for pair in ((number, one), (one, number))):
        return True
    if ":" in number or (units == {"hour"} and number.isdigit()):
        hour, _, minute = number.partition(":")
        return any(
            (int(one.partition(":")[0]) - int(hour)) % 12 == 0
            and int(one.partition(":")[2][:2] or 0) == int(minute[:2] or 0)
            for one, kind in others.items()
            if one != number and (one.replace(":", "").isdigit() and (":" in one or kind == {"hour"}))
        ) or (":" in number and {part.lstrip("0") or "0" for part in number.split(":")} <= {*others, "0"})
    value = _value(number)
    if value is None:
        return False
    digits = number.replace(".", "")
    for other, kind in others.items():
        if digits == other.replace(".", "") and (len(digits) > 3 or "." in number or "." in other):
            return True
        one = _value(other)
        if value and one and (value > one or one > value):
            factor = max(value, one) / min(value, one)
            if factor in _FACTORS and ((kind and units and kind != units) or factor in (10**6, 10**9)):
                return True
    return False


def _is_decade(short: str, long: str) -> bool:
    """Return whether a number is the end of a decade's year: 60, 1960."""
    return len(short) == 2 and short[1] == "0" and len(long.rstrip("s")) == 4 and long.rstrip("s").endswith(short)


def _is_derived(number: str, units: set[str], source: Mapping[str, set[str]]) -> bool:
    """Return whether a number with these `units` follows from numbers of the source.

    It is a sum, a difference, a product, a ratio or a percentage of two, the sum of all that have one unit, or a round number
    of years about the time between two years.
    """
    if ":" in number:
        return _is_derived_time(number, source)
    value = _value(number)
    known = [(one, kind) for text, kind in source.items() if (one := _value(text)) is not None][:_MOST_VALUES]
    if value is None or not known:
        return False
    values = [one for one, _ in known]
    by_unit: dict[str, list[Decimal]] = {}
    for one, kind in known:
        for unit in kind or {""}:
            by_unit.setdefault(unit, []).append(one)
    if any(value == sum(ones) for ones in by_unit.values() if len(ones) > 2) or 100 - value in values:
        return True
    if units == {"%"} and any(value in (round(100 / one), round(100 / one, 1)) for one in values if 2 <= one <= 10):
        return True  # a fifth
    return any(_follows(value, units, a, b) for index, a in enumerate(values) for b in values[index + 1 :])


def _is_derived_time(number: str, source: Mapping[str, set[str]]) -> bool:
    """Return whether a time of day comes some minutes or hours of the source before or after one of its times."""
    minutes = _minutes(number)
    gaps = [60 * float(one) if "hour" in kind else float(one) for one, kind in source.items() if _value(one)]
    times = [_minutes(one) for one in source if ":" in one]
    return any(abs(minutes - time) in gaps for time in times)


def _minutes(time: str) -> int:
    hour, minute, *_ = time.split(":")
    return 60 * int(hour) + int(minute)


def _follows(value: Decimal, units: set[str], a: Decimal, b: Decimal) -> bool:
    """Return whether a value is calculated from two others."""
    low, high = sorted((a, b))
    gap = high - low
    if value in (a + b, gap) or (low > 2 and value == a * b):
        return True
    if low > 0 and (units == {"%"} or value % 1):
        factor = 100 if units == {"%"} else 1
        return value in {round(factor * part, n) for part in (high / low, low / high) for n in (0, 1)}
    are_years = low >= 1000 and high <= 2100 and low % 1 == high % 1 == 0
    return (
        are_years
        and units == {"year"}
        and (abs(value - gap) == 1 or (value % 5 == 0 and _MIN_ROUND <= value / (gap or 1) <= _MAX_ROUND))
    )


def _value(number: str) -> Decimal | None:
    return Decimal(number) if number.replace(".", "", 1).isdecimal() else None


def _is_mistyped(one: str, other: str) -> bool:
    """Return whether two numbers of two or more digits differ in one digit or in the order of digits."""
    if len(one) != len(other) or len(one) < 2:
        return False
    return sum(a != b for a, b in zip(one, other, strict=True)) == 1 or sorted(one) == sorted(other)


def _is_precise(number: str) -> bool:
    """Return whether a number has three or more digits besides zeros at its end, and is no year."""
    return len(number.rstrip("0")) > 2 and not (len(number) == 4 and number < "2100")


@dataclass(frozen=True, slots=True)
class _Scene:
    """A text in lower case, and where its numbers stand.

    `vague` finds words that say a quantity without a number, `about` those after which a number is a bound or a round one.
    """

    text: str
    places: Mapping[str, list[tuple[int, int]]]
    vague: re.Pattern[str]
    about: re.Pattern[str]
    code: str
    unspaced: bool

    def is_reworded(self, number: str, other: _Scene) -> bool:
        """Return whether a number is part of a vague quantity, or stands where another text has one that this text lacks."""
        places = self.places.get(number, ())
        found = [match.span() for match in self.vague.finditer(self.text)]
        beside = _UNSPACED_BESIDE if self.unspaced else _BESIDE
        if any(max(start - end, first - last) <= beside for first, end in found for start, last in places):
            return True  # half a million, a quarter to eight
        own = {self.text[slice(*span)] for span in found}
        theirs = [match.span() for match in self.vague.finditer(other.text) if match[0] not in own]
        if not theirs:
            return False
        here = [self._stems(place) for place in places]
        return any(not stems.isdisjoint(other._stems(place)) for place in theirs for stems in here)

    def is_bound(self, number: str) -> bool:
        """Return whether a round number is a bound everywhere: more than 30."""
        places = self.places.get(number, ())
        return (
            bool(places)
            and number[-1] in "05"
            and len(number.rstrip("0")) < 3
            and all(self.about.search(self.text[max(0, start - 24) : start]) for start, _ in places)
        )

    def is_in_place_of(self, number: str, other: _Scene, explained: bool) -> bool:
        """Return whether another text has a different number between the same words, where this text has that number nowhere.

        Or it has one that this text lacks and that has nearly the same digits. Two short numbers, or two years, must also have
        the same word after them, and no explanation.
        """
        contexts = self._contexts_of(number)
        for one in other.places.keys() - {number}:
            if not (contexts & other._contexts_of(one)).issubset(self._contexts_of(one)):
                return True
            same_noun = not explained and not self._nouns(number).isdisjoint(other._nouns(one))
            if one not in self.places and _is_mistyped(number, one) and (_is_precise(number) or same_noun):
                return True
        return False

    def _contexts_of(self, number: str) -> set[tuple[str, ...]]:
        return {context for place in self.places.get(number, ()) for context in self._contexts(place)}

    def _nouns(self, number: str) -> set[str]:
        return {self._noun(place) for place in self.places.get(number, ())}

    def _noun(self, place: tuple[int, int]) -> str:
        """Return what follows a number: what it counts, or its unit."""
        if self.unspaced:
            return self.text[place[1] : place[1] + 1]
        return next(iter(_TOKEN.findall(self.text[place[1] : place[1] + _WINDOW])), "")

    def _contexts(self, place: tuple[int, int]) -> Iterator[tuple[str, ...]]:
        start, end = place
        if self.unspaced:
            if len(around := self.text[max(0, start - 1) : start] + self.text[end : end + 2]) == 3:
                yield (around,)
            return
        before = _TOKEN.findall(self.text[max(0, start - _WINDOW) : start])[-1:]
        after = _TOKEN.findall(self.text[end : end + _WINDOW])[:2]
        for words in ((*before, *after[:1]), (*after, "")):
            if (
                len(words) >= 2
                and all(word[:1].isalpha() or word == "%" for word in words[:2])
                and any(len(word) > 3 for word in words)
            ):
                yield words

    def _stems(self, place: tuple[int, int]) -> set[str]:
        """Return the beginnings of the rarer words around a place; in a text without spaces, pairs of characters."""
        width = _UNSPACED_WINDOW if self.unspaced else _WINDOW
        around = self.text[max(0, place[0] - width) : place[0]] + " " + self.text[place[1] : place[1] + width]
        if self.unspaced:
            return {run[i : i + 2] for run in _WIDE_RUN.findall(around) for i in range(len(run) - 1)}
        return {word[:5] for word in _LONG_WORD.findall(around) if word not in _frequent(self.code)}


@lru_cache(maxsize=64)
def _frequent(code: str) -> frozenset[str]:
    return frozenset(frequent_words(code)[:300])


def resembles(name: str, words: Iterable[str]) -> bool:
    """Return whether a word begins like one of `words`, by at least four letters and most of the shorter of the two."""
    return any(
        word[:4] == name[:4] and len(name) > 3 and word[: _stem_size(name, word)] == name[: _stem_size(name, word)]
        for word in words
    )


def _stem_size(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return max(4, -(-2 * shorter // 3))


def _scene(quantities: Quantities, code: str) -> _Scene:
    """Return the text with the places of its numbers."""
    grammar = grammar_of(code)
    return _Scene(quantities.text, quantities.places, grammar.vague, grammar.about, code, grammar.unspaced)


def compare_quantities(
    source: Quantities,
    variant: Quantities,
    complete: bool,
    known: Quantities,
    kept: Quantities,
    code: str,
) -> Iterator[Difference]:
    """Yield the differences. `known` quantities of the source's frame may appear, `kept` are those of the variant's frame."""
    yield from _compare_numbers(source, variant, complete, known, kept, code)
    yield from _compare_dates(source, variant, complete, known, kept, code)
    for number, units in variant.numbers.items():
        # An implied number (a decade, a dozen) has the unit of its word, or any.
        known_units = source.numbers.get(number, {_IMPLIED_UNIT[number]} if number in _IMPLIED_UNIT else units)
        new_units = units - known_units - known.numbers.get(number, set())
        new_units -= {"lb"} if "sterling" in known_units else set()  # both are pounds
        if new_units and (known_units or not new_units <= source.units | known.units | _OPTIONAL_UNITS):
            listed = f"with {', '.join(sorted(known_units))}" if known_units else "without a unit"
            yield Difference("unit", f"{number} {min(new_units)}: the source has {number} {listed}", bool(known_units))


def _compare_numbers(
    source: Quantities, variant: Quantities, complete: bool, known: Quantities, kept: Quantities, code: str
) -> Iterator[Difference]:
    words_known = profile_of(code).reads_number_words
    present = {**variant.numbers, **kept.numbers, **dict.fromkeys(variant.implied | kept.implied, _NO_UNITS)}
    allowed = {**source.numbers, **known.numbers, **dict.fromkeys(source.implied | known.implied, _NO_UNITS)}
    lost = source.stated - present.keys() if complete else set()
    unmatched = {number: units for number, units in present.items() if number not in allowed}
    unkept = {number: units for number, units in allowed.items() if number not in present}
    here, there = _scene(source, code), _scene(variant, code)
    for number in sorted(lost, key=_by_size):
        counted = number in source.counted and int(number) <= MAX_COUNT
        # The words for a number are not known in every language; then a new number beside the lost one decides.
        unread = not words_known and number.isdigit() and (len(number) < 3 or int(number) % 100 == 0)
        explained = _is_rewritten(number, source.numbers[number], unmatched) or here.is_reworded(number, there)
        yield Difference("number", f"{number} is lost", not (counted or unread or explained), True, explained)
    if lost:  # five became two: a word that need not be a number replaces one
        for number in sorted(variant.numbers.keys() - variant.stated - allowed.keys() - {"0", "1"}, key=_by_size):
            yield Difference("number", f"{number} is not in the source", sure=False)
    new = (variant.stated | {number for number in kept.stated if len(number) > 2}) - allowed.keys()
    replaced = complete and any(
        len(places) > len(variant.places.get(number, ()))
        for number, places in source.places.items() if number not in ("0", "1") and number not in variant.implied | kept.implied
    )  # fmt: skip
    if not complete:
        new -= _enumeration(variant)
    for number in sorted(new, key=_by_size):
        units = variant.numbers.get(number, set())
        rewritten = _is_rewritten(number, units, unkept)
        explained = rewritten or there.is_reworded(number, here)
        in_place = not rewritten and there.is_in_place_of(number, here, explained)
        if number in variant.counted and not replaced and not in_place:
            if int(number) > 5:
                yield Difference("number", f"{number} is not in the source", sure=False)
            continue
        small = not complete and number.isdigit() and int(number) <= MAX_COUNT
        asked = not complete and any(number == str(day) for _, day in variant.days) and _has_span(source, code)
        possible = (
            small
            or explained
            or asked
            or there.is_bound(number)
            or (not replaced and _is_derived(number, units, allowed))
        )
        yield Difference("number", f"{number} is not in the source", in_place or not possible, explained=explained)


def _compare_dates(
    source: Quantities, variant: Quantities, complete: bool, known: Quantities, kept: Quantities, code: str
) -> Iterator[Difference]:
    lost = source.months - variant.months - variant.uncertain_months - kept.months if complete else set()
    new = variant.months - source.months - source.uncertain_months - known.months
    asked = not complete and _has_span(source, code)  # which hut is open in May?
    for month in sorted(lost or new):
        detail = f"{MONTHS[month - 1].title()} is {'lost' if lost else 'not in the source'}"
        yield Difference("date", detail, not asked, explained=asked)
    known_days = source.days | known.days | source.named_days.keys()
    gaps = [int(number) for number in source.numbers if number.isdecimal() and len(number) < 4]
    for month, day in sorted(variant.days - known_days):
        if any(month == other[0] or day == other[1] for other in known_days):
            near = {abs(_day_of_year(month, day) - _day_of_year(*other)) for other in known_days}
            explained = asked or (
                not complete and any(gap in near or 7 * gap in near for gap in gaps)
            )  # nine days later
            detail = f"{day} {MONTHS[month - 1].title()} is not in the source"
            yield Difference("date", detail, not explained, explained=explained)


def _day_of_year(month: int, day: int) -> int:
    return date(2001, month, 1).toordinal() + day


def _has_span(quantities: Quantities, code: str) -> bool:
    """Return whether a text has a span of time such as 1 May to 31 October: two months side by side."""
    months = profile_of(code).months
    words = {word for word in _WORD.findall(quantities.text) if word in months}
    found = sorted((start, months[word]) for word in words for start in occurrences(word, quantities.text))
    return any(a != b and end - start <= _NEAR for (start, a), (end, b) in pairwise(found))


def _enumeration(quantities: Quantities) -> set[str]:
    """Return the numbers from 1 on, three or more without a gap and without units: they number cards, steps or answers."""
    last = 0
    while quantities.numbers.get(str(last + 1), {""}) == set():
        last += 1
    return {str(number) for number in range(1, last + 1)} if last > 2 else set()


def _by_size(number: str) -> tuple[int, str]:
    return -len(number), number
