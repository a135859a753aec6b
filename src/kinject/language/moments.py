"""Dates and times of day in a written answer, in the orders in which they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from kinject.language.amounts import HALF_A_DAY, Clock, Day, Group, Number, Value, Values
from kinject.language.han import han_value
from kinject.language.units import any_of
from kinject.language.values import Grammar, grammar_of

MOST_DIGITS = 200
"""Digits of a number that is read. A model that repeats itself writes thousands, and Python makes
no number of over 4,300."""
TAKEN = "\0"
"""Stands for the characters of a value that was read already."""
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)
"""Number words up to those of the hours."""


@dataclass(frozen=True, slots=True)
class Found:
    """A value and its place in a text."""

    start: int
    end: int
    values: Values


_TOO_LONG = re.compile(rf"\d(?:[,.'٬]?\d){{{MOST_DIGITS},}}")


def _blank(match: re.Match[str]) -> str:
    return TAKEN * len(match[0])


class Reader:
    """A text from which one reader after another takes the values it knows."""

    def __init__(self, folded: str, code: str, comma: bool, others: Sequence[str] = ()) -> None:
        self.folded = folded
        self.grammar: Grammar = grammar_of(code)
        self.others = others
        self.comma = comma
        lower = folded.lower()
        # İ is two characters in lower case: the places in both texts would not be the same
        self.rest = lower
        if len(lower) != len(folded):
            self.rest = folded
        self.rest = _TOO_LONG.sub(_blank, self.rest)
        self.found: list[Found] = []

    def take(self, start: int, end: int, *readings: Value, parts: Sequence[Value] = ()) -> None:
        """Add the readings of a value, and take it out of the rest of the text."""
        self.found.append(Found(start, end, Values(readings, tuple(parts))))
        self.rest = self.rest[:start] + TAKEN * (end - start) + self.rest[end:]

    def before(self, start: int) -> str:
        """Return some characters before a place."""
        return self.rest[max(0, start - 24) : start]


# --- Dates

_YEAR_FIRST = re.compile(r"(?<![\d.-])(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?!\d|\2\d)")
_YEAR_LAST = re.compile(r"(?<![\d./-])(\d{1,2})(\. |[./-])(\d{1,2})\2(\d{4}|(?<=/)\d\d)(?!\d|\2\d)")
_YEAR_FIRST_APART = re.compile(r"(?<![\d.-])(\d{4})(\. )(\d{1,2})\. (\d{1,2})\.?(?!\d|[.,]\d)")
_YEAR_IN_CHARACTERS = re.compile(r"(\d{4})(年|년)\s?(\d{1,2})[月월]\s?(\d{1,2})[日号일]")
_IN_ONE = re.compile(
    r"(?<![\w.,:/-])([12]\d{3})()(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(?![\w.,:/-]|\s?%)"
)
"""Dates that begin with the year: 1876. 2. 14., 1876年2月14日, 18760214."""
_OF = r"(?:of\s+|de\s+|del\s+|d')?"
_RANK = r"(?:st|nd|rd|th|er|o|\.)?"
_DAYS = (
    rf"(?P<days>\d{{1,2}}{_RANK}"
    rf"(?:\s*(?:,|-|&|\b(?:and|or|to|und|bis|et|au|y|al|e|a|и)\b)\s*\d{{1,2}}{_RANK})*)"
)
_YEAR = r"(?P<year>\d{4})(?!\d|[.,]\d)"
_RANKS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_TEENS = (
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
    *("seventeenth", "eighteenth", "nineteenth", "twentieth"),
)
_TWENTIES = [f"twenty-{rank}" for rank in _RANKS]
_UP_TO_THE_LAST = (*_RANKS, *_TEENS, *_TWENTIES, "thirtieth", "thirty-first")
_DAY_WORDS = {word: day for day, word in enumerate(_UP_TO_THE_LAST, 1)}


@lru_cache(maxsize=128)
def _day_patterns(code: str) -> list[re.Pattern[str]]:
    names = sorted(map(re.escape, grammar_of(code).language.months), key=len, reverse=True)
    if not names:
        return []
    month = rf"(?P<month>{'|'.join(names)})(?!\w)\.?"
    short_month = rf"(?P<month>{'|'.join(names)})"
    patterns = [
        # 14-Feb-1876, 14FEB1876
        rf"(?<![\w.,:/-])(?P<days>\d{{1,2}})(?P<mark>-?){short_month}(?P=mark){_YEAR}",
        rf"(?<![\w.,:/-]){_DAYS}\s*{_OF}{month}(?:,?\s+{_OF}{_YEAR})?",
    ]
    # "March 3" is English order; "mars 3" is not French
    if code == "en":
        after = r"(?!\w|[:.,-]\d)"
        patterns.append(rf"(?<!\w){month}\s+(?:the\s+)?{_DAYS}{after}(?:,?\s+(?:of\s+)?{_YEAR})?")
        word = rf"(?P<word>{'|'.join(reversed(_DAY_WORDS)).replace('-', '[- ]')})"
        patterns.append(rf"(?<!\w){word}\s+(?:of\s+)?{month}(?:,?\s+(?:of\s+)?{_YEAR})?")
        patterns.append(rf"(?<!\w){month}\s+(?:the\s+)?{word}\b(?:,?\s+{_YEAR})?")
    patterns.append(rf"(?<!\w){month},?\s+{_OF}{_YEAR}")
    return list(map(re.compile, patterns))


def take_days(reader: Reader) -> None:
    """Take the dates of a text, and the months with a year."""
    for pattern in (_YEAR_FIRST, _YEAR_FIRST_APART, _YEAR_IN_CHARACTERS, _IN_ONE):
        for match in pattern.finditer(reader.rest):
            _take_day_after_year(reader, match)
    for match in _YEAR_LAST.finditer(reader.rest):
        _take_day_in_digits(reader, match)
    for pattern in _day_patterns(reader.grammar.language.code):
        for match in pattern.finditer(reader.rest):
            _take_day_with_month(reader, match)


def _take_day_after_year(reader: Reader, match: re.Match[str]) -> None:
    day = day_in_digits(int(match[3]), int(match[4]), int(match[1]))
    if day and match[2]:
        reader.take(*match.span(), day, parts=_parts(day))
    elif day:
        # 18760214 may be a number
        number = Number(Fraction(match[0]), digits=match[0])
        reader.take(*match.span(), day, number)


def _take_day_with_month(reader: Reader, match: re.Match[str]) -> None:
    days = _days_in(match.groupdict())
    if _is_verb(reader, match) or not days <= _ALL_DAYS:
        return
    day = Day(reader.grammar.language.months[match["month"]], days)
    if match["year"]:
        day = replace(day, year=int(match["year"]))
    reader.take(*match.span(), day, parts=_parts(day))


def _days_in(groups: Mapping[str, str | None]) -> frozenset[int]:
    word = groups.get("word")
    if word:
        return frozenset((_DAY_WORDS[re.sub(r"\s", "-", word)],))
    return frozenset(map(int, re.findall(r"\d+", groups.get("days") or "")))


_ALL_DAYS = frozenset(range(1, 32))


def _is_verb(reader: Reader, match: re.Match[str]) -> bool:
    """Return whether "may" and "march" are no months: they have no capital, and are not alone with
    their day."""
    if reader.grammar.language.code != "en" or match["month"] not in ("march", "may"):
        return False
    is_alone = match[0].strip() == reader.rest.strip(" .!\"'")
    return reader.folded[match.start("month")].islower() and not is_alone


def _take_day_in_digits(reader: Reader, match: re.Match[str]) -> None:
    """Take 23.5.1990, 5/23/1990; of 3/4/1990 in English either number may be the month."""
    first, second, year = int(match[1]), int(match[3]), int(match[4])
    day_first = day_in_digits(second, first, year)
    month_first = day_in_digits(first, second, year)
    # With points, and where decimals follow a comma, the day is first.
    is_open = match[2][0] != "." and not reader.comma and first != second
    if day_first and month_first and is_open:
        order = (first, second)
        readings = [replace(month_first, order=order), replace(day_first, order=order)]
        reader.take(*match.span(), *readings, parts=[Number(Fraction(year), digits=match[4])])
        return
    day = day_first or month_first
    if day:
        reader.take(*match.span(), day, parts=_parts(day))


def day_in_digits(month: int, day: int, year: int | None) -> Day | None:
    """Return the date of these numbers, None if there is none."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return Day(month, frozenset((day,)), year)


def _parts(day: Day) -> list[Number]:
    """Return the numbers that a sentence with a date has in it: its days and its year."""
    numbers = sorted(day.days)
    if day.year is not None:
        numbers.append(day.year)
    return [Number(Fraction(number), digits=str(number)) for number in numbers]


# --- Times of day

PART_OF_DAY = (
    r"\s(?P<part>in the (?:morning|afternoon|evening)|at night"
    r"|am (?:morgen|vormittag|mittag|nachmittag|abend)|nachts|in der nacht"
    # "morgen" without its s is tomorrow
    r"|(?:morgen|vormittag|mittag|nachmittag|abend)s"
    r"|'s (?:ochtends|morgens|middags|avonds|nachts))\b"
)
"""In English, German and Dutch."""
# The part first: "8 am Abend" is in the evening.
HALF = rf"(?:{PART_OF_DAY}|\s?(?P<half>[ap])(?:m\b|\.\s?m\b\.?))"
_AFTER_NOON = ("afternoon", "nachmittag", "evening", "abend", "avond")
_AROUND_NOON = ("mittag", "middag")
_AT_NIGHT = ("night", "nacht")
_HOUR = rf"(?P<hour>\d{{1,2}}|{'|'.join(SMALL[1:])})"
_DIGITS = r"(?<![\w.,:/])(?P<hour>\d{1,2})"
_NO_MINUS = r"(?:(?<!-)|(?<=[\dm]-))"
_ZONE = (
    r"(?:\s?(?P<zone>(?:utc|gmt|z(?!\w))(?:\s?[+-]\d{1,2}(?::?[0-5]\d)?)?"
    r"|\+\d\d(?::?[0-5]\d))(?!\w))?"
)
"""After a time: UTC, GMT+1, Z, +02:00. Without UTC a hyphen would begin a range."""
_MINUTE = r"(?P<minute>[0-5]\d)"
_SECOND = r"(?::(?P<second>[0-5]\d))?"
_IN_FOUR_DIGITS = re.compile(rf"(?<![\w.,:])(?P<hour>[01]\d|2[0-3]){_MINUTE}\s?(?:hours|hrs)\b")
"""1405 hours, which may be a time of day, or a duration."""
# "2 h 30 min" is a duration
_WITH_HOUR = re.compile(rf"{_DIGITS}\s?(?:uhr|uur|[hч])\s?{_MINUTE}\b(?!\s?min){HALF}?")
_CLOCKS = (
    re.compile(rf"{_NO_MINUS}{_DIGITS}(?:[:.]{_MINUTE}{_SECOND})?{HALF}{_ZONE}"),
    re.compile(rf"(?<![\w.,:]){_HOUR}\s?o'\s?clock\b{HALF}?"),
    re.compile(rf"(?<![\w.,:-])(?P<hour>{'|'.join(SMALL[1:])}){HALF}"),
    re.compile(rf"{_DIGITS}(?:[:.]{_MINUTE})?\s?(?:uhr|uur)\b(?!\s\d){HALF}?"),
    _WITH_HOUR,
    re.compile(rf"{_DIGITS}:{_MINUTE}{_SECOND}(?![\d:]|[.,]\d){_ZONE}"),
    _IN_FOUR_DIGITS,
)
_PARTS_OF_HOUR = {"half": 30, "quarter": 15, "five": 5, "ten": 10, "twenty": 20, "twenty five": 25}
_PAST = re.compile(
    rf"\b(?P<part_of_hour>twenty[ -]five|{'|'.join(_PARTS_OF_HOUR)}|\d{{1,2}}(?= min))"
    r"(?:\sminutes)?"
    rf"(?:\s|-)(?P<side>past|to|(?<=quarter\s)after)\s{_HOUR}\b(?![:.]\d){HALF}?"
)
# British: half seven is half past seven.
_HALF_AN_HOUR = re.compile(rf"(?<![\w-])half\s{_HOUR}(?!\w|[-.,:/%]\w|\s?[%°]){HALF}?")
_EAST_ASIAN_PARTS = {
    **dict.fromkeys(("上午", "午前", "凌晨", "早上", "清晨", "오전"), "morning"),
    **dict.fromkeys(("下午", "午後", "오후"), "afternoon"),
    # At night 12 is midnight.
    **dict.fromkeys(("晚上", "傍晚", "夜"), "night"),
}
_EAST_ASIAN = re.compile(
    rf"(?<![\d:.])(?:(?P<part>{any_of(_EAST_ASIAN_PARTS)})\s?)?"
    r"(?P<hour>[01]?\d|2[0-3]|十?[一二三四五六七八九]|十|两)\s?[点點时時시]"
    r"(?:\s?(?:(?P<minute>[0-5]?\d)\s?[分분]|(?P<half>半|반)|(?P<quarters>[一三])刻))?(?![\d間间])"
)
_NAMED = re.compile(
    r"\b(?:12 )?(?:noon|midday|midi|mediodía|mezzogiorno"
    r"|(?P<night>midnight|mitternacht|middernacht|minuit|medianoche|mezzanotte))\b"
)


def take_clocks(reader: Reader) -> None:
    """Take the times of day of a text."""
    # What is taken is gone from the rest, so that a shorter form finds no part of a longer one.
    for match in _PAST.finditer(reader.rest):
        _take_past(reader, match)
    if reader.grammar.language.code == "en":
        for match in _HALF_AN_HOUR.finditer(reader.rest):
            _take_half_an_hour(reader, match)
    for pattern in _CLOCKS:
        for match in pattern.finditer(reader.rest):
            _take_clock(reader, match)
    for match in _EAST_ASIAN.finditer(reader.rest):
        _take_east_asian(reader, match)
    for match in _NAMED.finditer(reader.rest):
        minutes = HALF_A_DAY
        if match["night"]:
            minutes = 0
        reader.take(*match.span(), Clock(minutes, has_half=True))


def _take_east_asian(reader: Reader, match: re.Match[str]) -> None:
    """Take 下午2点30分, 午後2時半; 3点 alone may be three points."""
    part, minute = match["part"], int(match["minute"] or 0)
    if match["half"]:
        minute = 30
    if match["quarters"]:
        minute = 15 * int(han_value(match["quarters"]))
    if not (part or match["minute"] or minute):
        return
    if match["hour"].isdecimal():
        hour = int(match["hour"])
    else:
        hour = int(han_value(match["hour"]))
    clock = Clock((60 * hour + minute) % (2 * HALF_A_DAY))
    if part and hour <= 12:
        clock = on_dial(clock.minutes, _EAST_ASIAN_PARTS[part])
    reader.take(*match.span(), clock)


def _take_past(reader: Reader, match: re.Match[str]) -> None:
    """Take half past two, ten to six; "five to ten" may be a range too."""
    part = match["part_of_hour"].replace("-", " ")
    # "ten to twelve days" is no time of day
    if reader.grammar.unit_spelled_after(reader.rest, match.end(), False)[0]:
        return
    minutes = _PARTS_OF_HOUR.get(part)
    if minutes is None:
        minutes = int(part)
    if match["side"] == "to":
        minutes = -minutes
    clock = clock_of(match, 60 * hour_of(match) + minutes)
    if clock is None:
        return
    if 0 <= clock.minutes < 60 and not clock.has_half:
        clock = on_dial(clock.minutes, None)
    if minutes < 0 and part in SMALL and not match["half"]:
        numbers = [Number(Fraction(number)) for number in (SMALL.index(part), hour_of(match))]
        reader.take(*match.span(), clock, Group("to", tuple(numbers)), parts=numbers)
    else:
        reader.take(*match.span(), clock)


def _take_half_an_hour(reader: Reader, match: re.Match[str]) -> None:
    # "the half ten men had" is no time of day
    is_count = reader.grammar.unit_spelled_after(reader.rest, match.end(), False)[0]
    if is_count or not 1 <= hour_of(match) <= 12:
        return
    clock = clock_of(match, 60 * hour_of(match) + 30)
    if clock is not None:
        reader.take(*match.span(), clock)


def _take_clock(reader: Reader, match: re.Match[str]) -> None:
    parts = match.groupdict()
    minute, second = parts.get("minute"), parts.get("second")
    clock = clock_of(match, 60 * hour_of(match) + int(minute or 0))
    if clock is None:
        return
    zone = parts.get("zone")
    if zone:
        clock = replace(clock, zone=_zone(zone))
    hour = Number(Fraction(hour_of(match)), digits=match["hour"])
    if match.re is _IN_FOUR_DIGITS:
        digits = match["hour"] + match["minute"]
        reader.take(*match.span(), clock, Number(Fraction(digits), "hour", digits=digits))
        return
    if second:
        reader.take(*match.span(), replace(clock, seconds=int(second)))
    elif not minute:
        # "3 pm" has a 3 in it
        reader.take(*match.span(), clock, parts=[hour])
    elif clock.has_half or zone:
        reader.take(*match.span(), clock)
    elif match.re is _WITH_HOUR:
        # 1h30 is as long a time too
        length = hour.value + Fraction(int(minute), 60)
        reader.take(*match.span(), clock, Number(length, "hour", digits=match[0]))
    else:
        # 4:30 may be a ratio
        ratio = Group(":", (hour, Number(Fraction(minute), digits=minute)))
        reader.take(*match.span(), clock, ratio)


def _zone(written: str) -> int:
    """Return the minutes by which a zone is before Greenwich."""
    match = re.search(r"([+-])(\d{1,2}):?(\d\d)?\Z", written)
    if match is None:
        return 0
    minutes = 60 * int(match[2]) + int(match[3] or 0)
    if match[1] == "-":
        return -minutes
    return minutes


def hour_of(match: re.Match[str]) -> int:
    if match["hour"] in SMALL:
        return SMALL.index(match["hour"])
    return int(match["hour"])


def clock_of(match: re.Match[str], minutes: int) -> Clock | None:
    """Return the time of `minutes` on the dial; None if there is none."""
    parts = match.groupdict()
    half, part = parts.get("half"), parts.get("part")
    if not half and not part:
        # 24:00 is a midnight.
        if minutes > 2 * HALF_A_DAY:
            return None
        return Clock(minutes % (2 * HALF_A_DAY))
    if hour_of(match) > 12 and half:
        return None
    if part:
        return on_dial(minutes, part)
    minutes %= HALF_A_DAY
    if half == "p":
        minutes += HALF_A_DAY
    return Clock(minutes, has_half=True)


def on_dial(minutes: int, part: str | None) -> Clock:
    """Return the time of `minutes` on a dial of twelve hours in a part of the day, None for any."""
    minutes %= HALF_A_DAY
    if part is None:
        # a quarter to one is 12:45
        if minutes < 60:
            minutes += HALF_A_DAY
        return Clock(minutes)
    is_later = any(word in part for word in _AFTER_NOON)
    # "10 at night" is in the evening, "2 at night" is not; "11 Uhr mittags" is before noon
    if not is_later and any(word in part for word in _AROUND_NOON):
        is_later = minutes < 6 * 60
    if any(word in part for word in _AT_NIGHT):
        is_later = minutes >= 6 * 60
    if is_later:
        minutes += HALF_A_DAY
    return Clock(minutes, has_half=True)
