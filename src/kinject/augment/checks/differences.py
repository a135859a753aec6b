"""Differences between two texts, and their explanations: another notation, arithmetic, or a word such as "the rest"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import pairwise

from kinject.corpus.profiles import MONEY, frequent_words, grammar_of, profile_of
from kinject.corpus.quantities import MAX_COUNT, MONTHS, Quantities, occurrences

_MOST_DIGITS = 18
"""A longer number is a code: nothing is calculated with it."""
_MOST_VALUES = 40
"""Numbers of a source that are calculated with."""
_SCALES = (10**6, 10**9)
_FACTORS = (7, 10, 12, 24, 52, 60, 100, 365, 1000, 3600, *_SCALES)
"""Between the units of one quantity, and a number and its millions."""
_WINDOW, _UNSPACED_WINDOW = 60, 20
"""Characters on each side of a position, in texts with and without spaces between words."""
_BESIDE, _UNSPACED_BESIDE = 6, 2
"""Characters between a vague word and its number."""
_LABEL = re.compile(r"(?:§|第|\(|\bitem|\bart(?:\.|icle|ículo|igo|icolo|ikel)|\bn[ro]\.|n°|#|ст\.)\s?\Z")
_TIMES = frozenset(["millisecond", "second", "minute", "hour", "day", "week", "month", "year", "decade", "century"])
_ALIKE = ({"lb", "sterling"}, {"degree", "celsius", "fahrenheit"})
"""Units that one word may mean: pounds, degrees."""
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
    in other words, so it is in doubt. Any other is in doubt, too, unless a lost and a new one of a kind are side by side:
    then one was replaced by the other.
    """

    reason: str
    detail: str
    sure: bool = True
    lost: bool = False
    explained: bool = False


def _is_rewritten(number: str, units: set[str], others: Mapping[str, set[str]]) -> bool:
    """Return whether one of `others` is a number in another notation: 1.234, 1,234; 20:30, half past 8; 1,200 m, 1.2 km."""
    if ":" in number:
        parts = {part.lstrip("0") or "0" for part in number.split(":")} - {"0"}
        in_decimals = ".".join(number.split(":")[:2]).rstrip("0").rstrip(".")
        return parts <= others.keys() or in_decimals in others or any(_is_same_time(number, other) for other in others)
    integer, _, decimals = number.partition(".")
    if len(decimals) in (1, 2) and {integer, decimals.ljust(2, "0")} <= others.keys():  # 6 euros 50
        return True
    value, digits = _value(number), integer + decimals
    there = {part for other in others if "." in other for part in f"{other}0"[: other.index(".") + 3].split(".")}
    if number in there or f"{integer}:{decimals:0<2}" in others:
        return True
    for other, kind in others.items():
        if ":" in other and number.isdecimal() and _is_same_time(other, number):
            return True
        other_value = _value(other)
        if value is None or other_value is None or value == other_value:
            continue
        if "hour" in units | kind and abs(value - other_value) == 12:
            return True
        if digits == other.replace(".", "") and (len(digits) > 3 or "." in number + other):
            return True
        low, high = sorted((value, other_value))
        ratio = round(high / low, 6) if low else 0
        if ratio in (_FACTORS if kind and units and kind != units else _SCALES) or (
            low < 1 and round(low * high, 6) == 1
        ):
            return True  # 0.1, a tenth
        if number.isdecimal() and other.isdecimal() and _is_decade(*sorted((number, other), key=len)):
            return True
    return False


def _is_same_time(time: str, number: str) -> bool:
    """Return whether a number or a time of day can tell a time on a clock with twelve hours: 20:30, 8:30, half past 8."""
    hour, minute = int(time.partition(":")[0]), int(time.partition(":")[2][:2])
    if ":" in number:
        other, of_hour = int(number.partition(":")[0]), int(number.partition(":")[2][:2])
        return (hour - other) % 12 == 0 and minute == of_hour
    if not number.isdecimal() or len(number) > 2:
        return False
    hours = {hour % 12, (hour + (minute >= 30)) % 12}
    return (int(number) < 25 and int(number) % 12 in hours) or (minute > 0 and int(number) in (minute, 60 - minute))


def _is_decade(short: str, long: str) -> bool:
    """Return whether a number is the end of a year: 60, 1960."""
    return len(short) == 2 and len(long) == 4 and long.endswith(short)


def _is_derived(number: str, units: set[str], source: Mapping[str, set[str]], unkept: Iterable[str]) -> bool:
    """Return whether a number can be calculated from numbers of the source, to as many digits as it has.

    It is a sum, a difference, a product, a ratio or a change by percent of two, a part or a multiple of one, the sum of all
    that have one unit, or a time of day some hours or minutes from another. `unkept` are those that the variant may round.
    """
    if ":" in number:
        gaps = [60 * value if "hour" in kind else value for text, kind in source.items() if (value := _value(text))]
        return any(abs(_minutes(number) - _minutes(text)) % gap == 0 for text in source if ":" in text for gap in gaps)
    value = _value(number)
    if value is None:
        return False
    known = [(operand, kind) for text, kind in source.items() if (operand := _value(text))][:_MOST_VALUES]
    values = [operand for operand, _ in known]
    tolerance = _tolerance(number)
    results = [operand for text in unkept if (operand := _value(text))]
    for unit in {unit for _, kind in known for unit in kind or {""}}:
        same = [operand for operand, kind in known if unit in (kind or {""})]
        results += [sum(same)] if len(same) > 2 else []
    for index, a in enumerate(values):
        results += [a * n for n in range(2, 13)] + [a / n for n in range(2, 11)] + [a * 2 / 3, a * 3 / 4]
        results += [result for b in values[index + 1 :] for result in _results(a, b)]
    scales = (
        (1, 60, 1000, 1 / 60, 1 / 1000) if units and _is_precise(number, units) else (1,)
    )  # 1.28 kg for two of 640 g
    return any(abs(result - value * scale) <= tolerance * scale for scale in scales for result in results)


def _results(a: float, b: float) -> Iterator[float]:
    """Yield the results that may be calculated from two numbers."""
    yield from (a + b, abs(a - b), abs(a - b) + 1, a * b, a / b, b / a, 100 * a / b, 100 * b / a)
    for base, percent in ((a, b), (b, a)):
        if percent < 100:
            yield from (
                base * percent / 100,
                base * (1 + percent / 100),
                base / (1 + percent / 100),
                base * (1 - percent / 100),
            )
            yield base / (1 - percent / 100)


def _tolerance(number: str) -> float:
    """Return half a unit of a number's last digit that is not zero."""
    digits = number.partition(".")[2]
    return 0.5 * 10.0 ** (-len(digits) if digits else len(number) - len(number.rstrip("0"))) + 1e-9


def _minutes(time: str) -> int:
    hour, minute, *_ = time.split(":")
    return 60 * int(hour) + int(minute)


def _value(number: str) -> float | None:
    return float(number) if len(number) <= _MOST_DIGITS and number.replace(".", "", 1).isdecimal() else None


def _n_changed(number: str, other: str) -> int:
    """Return in how many digits two numbers of one length differ, 0 for others."""
    return sum(a != b for a, b in zip(number, other, strict=True)) if len(number) == len(other) else 0


def _is_precise(number: str, units: Iterable[str] = ()) -> bool:
    """Return whether a number has three or more digits besides zeros at its end, and is no year."""
    is_year = len(number) == 4 and "1000" < number < "2100" and {"year"}.issuperset(units)
    return len(number.replace(".", "").rstrip("0")) > 2 and not is_year


@dataclass(frozen=True, slots=True)
class _Scene:
    """A text in lower case, and the offsets of its numbers. `vague` finds words for a quantity without a number."""

    text: str
    spans: Mapping[str, list[tuple[int, int]]]
    vague: re.Pattern[str]
    code: str
    unspaced: bool

    def is_reworded(self, number: str, other: _Scene) -> bool:
        """Return whether a number is part of a vague quantity, or is where another text has one that this text lacks."""
        spans = self.spans.get(number, ())
        vague_spans = [match.span() for match in self.vague.finditer(self.text)]
        beside = _UNSPACED_BESIDE if self.unspaced else _BESIDE
        if any(max(start - end, first - last) <= beside for first, end in vague_spans for start, last in spans):
            return True  # half a million, a quarter to eight
        counts, other_counts = (
            Counter(self.text[slice(*span)] for span in vague_spans),
            Counter[str](self.vague.findall(other.text)),
        )
        theirs = [
            match.span() for match in self.vague.finditer(other.text) if other_counts[match[0]] > counts[match[0]]
        ]
        if not theirs:
            return False
        here = [self._stems(span) for span in spans]
        return any(not stems.isdisjoint(other._stems(span)) for span in theirs for stems in here)

    def is_in_place_of(self, number: str, other: _Scene) -> bool:
        """Return whether another text has a different number between the same words, where this text has that number nowhere.

        Or it has a century for these years.
        """
        contexts = self._contexts_of(number)
        replaced = (
            candidate for candidate in other.spans if candidate != number and contexts & other._contexts_of(candidate)
        )
        return f"{number}00" in other.spans.keys() - self.spans.keys() or any(
            not (contexts & other._contexts_of(candidate)).issubset(self._contexts_of(candidate))
            for candidate in replaced
        )

    def is_mistyped(self, number: str, other: _Scene, most: int) -> bool:
        """Return whether another text has a number of three or more digits that this lacks, in another order of digits.

        Or with at most this many other digits.
        """
        missing = other.spans.keys() - self.spans.keys()
        return _is_precise(number) and any(
            sorted(number) == sorted(candidate) or 0 < _n_changed(number, candidate) <= most for candidate in missing
        )

    def is_label(self, number: str) -> bool:
        """Return whether a number is one of a section or a list item: § 4, 第4条, (4), 4. The fees."""
        return any(
            _LABEL.search(self.text[max(0, start - 10) : start])
            or (self.text[end : end + 2] == ". " and self.text[:start].rstrip()[-1:] in (".", ";", ":", "?", "!"))
            for start, end in self.spans.get(number, ())
        )

    def has_another_unit(self, number: str, other: _Scene) -> bool:
        """Return whether a number has the same word before it as in another text, but never there the word after it."""
        here, there = ({scene._words_around(span) for span in scene.spans.get(number, ())} for scene in (self, other))
        words = {before for before, _ in there}
        return any(before in words and (before, after) not in there for before, after in here)

    def _words_around(self, span: tuple[int, int]) -> tuple[str, str]:
        before = self.text[max(0, span[0] - _WINDOW) : span[0]]
        return before[-1:] if self.unspaced else "".join(_TOKEN.findall(before)[-1:]), self._noun(span)

    def _contexts_of(self, number: str) -> set[tuple[str, ...]]:
        return {context for span in self.spans.get(number, ()) for context in self._contexts(span)}

    def _noun(self, span: tuple[int, int]) -> str:
        """Return the word after a number: the things that it counts, or its unit."""
        if self.unspaced:
            return self.text[span[1] : span[1] + 1]
        return next(iter(_TOKEN.findall(self.text[span[1] : span[1] + _WINDOW])), "")

    def _contexts(self, span: tuple[int, int]) -> Iterator[tuple[str, ...]]:
        start, end = span
        if self.unspaced:
            if len(around := self.text[max(0, start - 1) : start] + self.text[end : end + 2]) == 3:
                yield (around,)
            return
        before = _TOKEN.findall(self.text[max(0, start - _WINDOW) : start])[-2:]
        after = _TOKEN.findall(self.text[end : end + _WINDOW])[:2]
        for words in ((*before, "", *after[:1]), (*before[-1:], "", *after)):
            units, frequent = grammar_of(self.code).units, _frequent(self.code)
            if len(words) == 4 and any(len(word) > 3 and word not in units and word not in frequent for word in words):
                yield words

    def _stems(self, span: tuple[int, int]) -> set[str]:
        """Return the beginnings of the rarer words around a position; in a text without spaces, pairs of characters."""
        width = _UNSPACED_WINDOW if self.unspaced else _WINDOW
        around = self.text[max(0, span[0] - width) : span[0]] + " " + self.text[span[1] : span[1] + width]
        if self.unspaced:
            return {run[i : i + 2] for run in _WIDE_RUN.findall(around) for i in range(len(run) - 1)}
        return {word[:5] for word in _LONG_WORD.findall(around) if word not in _frequent(self.code)}


@lru_cache(maxsize=64)
def _frequent(code: str) -> frozenset[str]:
    return frozenset(frequent_words(code)[:300])


def resembles(name: str, words: Iterable[str]) -> bool:
    """Return whether a word begins like one of `words`, by at least four letters and most of the shorter of the two."""
    return any(
        (word[:4] == name[:4] and len(name) > 3 and word[: _stem_size(name, word)] == name[: _stem_size(name, word)])
        or (len(name) > 2 and word.startswith(name))
        for word in words
    )


def is_inflected(word: str, other: str) -> bool:
    """Return whether two words share all but their last two letters, in languages with endings: Москва, Москве."""
    shortest = min(len(word), len(other))
    need, most = (3, 2) if shortest < 5 else (max(4, shortest - 2), 5)
    return word[:need] == other[:need] and abs(len(word) - len(other)) <= most


def _stem_size(word: str, other: str) -> int:
    shorter = min(len(word), len(other))
    return max(4, -(-2 * shorter // 3))


def _scene(quantities: Quantities, code: str) -> _Scene:
    """Return the text with the positions of its numbers."""
    grammar = grammar_of(code)
    return _Scene(quantities.text, quantities.spans, grammar.vague, code, grammar.unspaced)


def compare_quantities(
    source: Quantities,
    variant: Quantities,
    complete: bool,
    source_frame: Quantities,
    variant_frame: Quantities,
    code: str,
) -> Iterator[Difference]:
    """Yield the differences.

    Quantities of `source_frame` may appear in the variant; `variant_frame` has those of the variant's frame.
    """
    here, there = _scene(source, code), _scene(variant, code)
    yield from _compare_numbers(source, variant, complete, source_frame, variant_frame, here, there)
    yield from _compare_dates(source, variant, complete, source_frame, variant_frame, here, there)
    for number, units in variant.numbers.items():
        if not units:
            continue
        # An implied number (a decade, a dozen) has the unit of its word, or any.
        implied = {_IMPLIED_UNIT[number]} if number in source.implied & _IMPLIED_UNIT.keys() else units
        known_units = source.numbers.get(number, implied)
        new_units = units - known_units - source_frame.numbers.get(number, set())
        new_units -= set().union(*(group for group in _ALIKE if not group.isdisjoint(known_units)))
        if (
            (number in ("0", "1") and not here.unspaced)
            or not new_units
            or (not known_units and new_units <= source.units | source_frame.units | _OPTIONAL_UNITS)
        ):
            continue
        if "hour" in new_units and any(":" in clock and _is_same_time(clock, number) for clock in source.numbers):
            continue
        replaced = known_units.isdisjoint(units) and (complete or _kinds(known_units) == _kinds(new_units) != {"time"})
        # A number that the source has twice may have a unit far from it, as in the head of a column.
        replaced = replaced and len(source.spans.get(number, ())) < 2 and not there.is_reworded(number, here)
        sure = bool(known_units) and (replaced or there.has_another_unit(number, here))
        listed = f"with {', '.join(sorted(known_units))}" if known_units else "without a unit"
        yield Difference("unit", f"{number} {min(new_units)}: the source has {number} {listed}", sure)


def _kinds(units: set[str]) -> set[str]:
    """Return of which kinds units are: time, percent, money, or another measure."""
    return {
        "time" if unit in _TIMES else "percent" if unit == "%" else "money" if unit in MONEY else "measure"
        for unit in units
    }


def _compare_numbers(
    source: Quantities, variant: Quantities, complete: bool, source_frame: Quantities, variant_frame: Quantities, here: _Scene,
    there: _Scene,
) -> Iterator[Difference]:  # fmt: skip
    code = here.code
    words_known = profile_of(code).reads_number_words
    present = {
        **dict.fromkeys(variant.implied | variant_frame.implied, _NO_UNITS),
        **variant_frame.numbers,
        **variant.numbers,
    }
    allowed = {
        **dict.fromkeys(source.implied | source_frame.implied, _NO_UNITS),
        **source_frame.numbers,
        **source.numbers,
    }
    lost = source.stated - present.keys() if complete else set()
    unkept = allowed.keys() - present.keys()
    for number in sorted(lost, key=_by_size):
        counted = number in source.counted and int(number) <= MAX_COUNT
        # The words for a number are not known in every language; then a new number beside the lost one decides.
        unread = not words_known and number.isdigit() and (len(number) < 3 or int(number) % 100 == 0)
        explained = (
            here.is_label(number)
            or _is_rewritten(number, source.numbers[number], _unmatched(number, present, allowed))
            or here.is_reworded(number, there)
        )
        yield Difference("number", f"{number} is lost", not (counted or unread or explained), True, explained)
    if lost:  # five became two: a word that need not be a number replaces one
        for number in sorted(variant.numbers.keys() - variant.stated - allowed.keys() - {"0", "1"}, key=_by_size):
            yield Difference("number", f"{number} is not in the source", sure=False)
    new = (variant.stated | {number for number in variant_frame.stated if len(number) > 2}) - allowed.keys()
    replaced = complete and any(
        len(spans) > len(variant.spans.get(number, ()))
        for number, spans in source.spans.items() if number not in ("0", "1")
        and number not in variant.implied | variant_frame.implied
    )  # fmt: skip
    if not complete:
        new -= _enumeration(variant)
    for number in sorted(new, key=_by_size):
        units = variant.numbers.get(number, set())
        rewritten = _is_rewritten(number, units, allowed)
        explained = rewritten or there.is_reworded(number, here)
        in_place = not rewritten and there.is_in_place_of(number, here)
        if number in variant.counted and not replaced and not in_place:
            if int(number) > 5:
                yield Difference("number", f"{number} is not in the source", sure=False)
            continue
        within_span = not complete and any(number == str(day) for _, day in variant.days) and _has_span(source, code)
        aged = not complete and units == {"year"} and len(number) < 3  # may a boy of ten come?
        derived = not replaced and _is_derived(number, units, allowed, unkept)
        possible = derived or within_span or aged or (explained and not there.is_mistyped(number, here, 1))
        in_place = (in_place and not (derived and _is_precise(number, units))) or there.is_mistyped(number, here, 0)
        yield Difference("number", f"{number} is not in the source", in_place or not possible, explained=explained)


def _unmatched(number: str, numbers: Mapping[str, set[str]], others: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return those of `numbers` that may mean `number`: times of day, and those that `others` has not in these units."""
    return {
        candidate: units
        for candidate, units in numbers.items()
        if ":" in number + candidate or candidate not in others or not units <= others[candidate]
    }


def _compare_dates(
    source: Quantities, variant: Quantities, complete: bool, source_frame: Quantities, variant_frame: Quantities, here: _Scene,
    there: _Scene,
) -> Iterator[Difference]:  # fmt: skip
    code = here.code
    lost = source.months - variant.months - variant.uncertain_months - variant_frame.months if complete else set()
    new = variant.months - source.months - source.uncertain_months - source_frame.months
    # Which hut is open in May? When do twenty months end?
    within_span = not complete and (_has_span(source, code) or "month" in source.units)
    for month in sorted(lost or new):
        detail = f"{MONTHS[month - 1].title()} is {'lost' if lost else 'not in the source'}"
        yield Difference("date", detail, not within_span, explained=within_span)
    known_days = source.days | source_frame.days | source.named_days.keys()
    gaps = [int(number) for number in source.numbers if number.isdecimal() and len(number) < 4]
    for month, day in sorted(variant.days - known_days):
        if any(month == other[0] or day == other[1] for other in known_days):
            near = {abs(_day_of_year(month, day) - _day_of_year(*other)) for other in known_days}
            later = not complete and any(gap in near or 7 * gap in near for gap in gaps)  # nine days later
            explained = within_span or later or there.is_reworded(str(day), here)
            detail = f"{day} {MONTHS[month - 1].title()} is not in the source"
            yield Difference("date", detail, not explained, explained=explained)


def _day_of_year(month: int, day: int) -> int:
    return date(2001, month, 1).toordinal() + day


def _has_span(quantities: Quantities, code: str) -> bool:
    """Return whether a text has a span of time such as 1 May to 31 October: two months side by side."""
    months = profile_of(code).months
    words = {word for word in _WORD.findall(quantities.text) if word in months}
    positions = sorted((start, months[word]) for word in words for start in occurrences(word, quantities.text))
    return any(a != b and end - start <= _NEAR for (start, a), (end, b) in pairwise(positions))


def _enumeration(quantities: Quantities) -> set[str]:
    """Return the numbers from 1 on, three or more without a gap and without units: they number cards, steps or answers."""
    last = 0
    while quantities.numbers.get(str(last + 1), {""}) == set():
        last += 1
    return {str(number) for number in range(1, last + 1)} if last > 2 else set()


def _by_size(number: str) -> tuple[int, str]:
    return -len(number), number
