"""The values of written answers, and whether one says what another one does.

-5 is not 5, 3:30 not 330, 1-2 not 12; 10:30 pm is 22:30, ½ is 0.5, May 23 is 23 May. `values` reads
what a text must keep when it is written anew; here two texts are compared that should say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from kinject.language.spelling import Word

HALF_A_DAY = 12 * 60
"""In minutes."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number with its unit, "" without one.

    `digits`: as it is written, "" for words. `is_ordinal`: third, 3rd; None where a language has
    one word for both. `is_version`: it follows a name, so 3.10 is not 3.1. `bound`: <, >, ≤, ≥ or
    ±, of a number that is no single value. `is_article`: the one of "a mile". `scale`: the million
    that is written behind digits and is in the value.
    """

    value: Fraction
    unit: str = ""
    digits: str = ""
    is_ordinal: bool | None = False
    is_version: bool = False
    bound: str = ""
    is_article: bool = False
    scale: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """A range, a score or a ratio: numbers with a `sign` (-, :, "to") between them."""

    sign: str
    numbers: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A number of three parts or more: 1.2.3."""

    digits: str


@dataclass(frozen=True, slots=True)
class Numeral:
    """A Roman numeral behind a name, World War II; `word` is its key as a word."""

    value: int
    word: str


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day; `seconds` are None if it has none. `has_half`: am or pm is written. `zone`: in
    minutes before Greenwich, None without one."""

    minutes: int
    seconds: int | None = None
    has_half: bool = False
    zone: int | None = None


@dataclass(frozen=True, slots=True)
class Day:
    """A date, or a month of a year if it has no `days`. `order`: day and month as they are written,
    if either may be the day."""

    month: int
    days: frozenset[int] = frozenset()
    year: int | None = None
    order: tuple[int, int] | None = None


Value = Number | Group | Version | Numeral | Clock | Day


@dataclass(frozen=True, slots=True)
class Values:
    """A value in each way it can be read, and the `parts` that a text says with it: the year of a
    date."""

    readings: tuple[Value, ...]
    parts: tuple[Value, ...] = ()


Item = Word | Values
"""A word or a value of a text."""

# --- Whether a value says what an accepted one says


def fits(wanted: Item, item: Item) -> bool:
    """Return whether an item of a text says what an accepted item says; it may say more (a unit, a
    year)."""
    if isinstance(wanted, Word):
        return wanted.key == _word_of(item)
    if isinstance(item, Word):
        return item.key == _word_of(wanted)
    pairs = product(wanted.readings, item.readings + item.parts)
    return any(_value_fits(one, other) for one, other in pairs)


def _word_of(item: Item) -> str:
    """Return the key of a word, and of a Roman numeral, which is one too: the I of "Then I left";
    "" for other values."""
    if isinstance(item, Word):
        return item.key
    first = item.readings[0]
    if isinstance(first, Numeral):
        return first.word
    return ""


def is_numeral(item: Item) -> bool:
    """Return whether an item is a Roman numeral: the number alone is not written with it."""
    return isinstance(item, Values) and isinstance(item.readings[0], Numeral)


def has_run(wanted: Sequence[Item], items: Sequence[Item], starts: Iterable[int]) -> bool:
    """Return whether the items of an accepted text follow each other in `items`, from one of the
    `starts` on. Articles before other words may be missing in either."""
    return any(_runs_from(wanted, items, start) for start in starts)


def _runs_from(wanted: Sequence[Item], items: Sequence[Item], at: int) -> bool:
    if _is_glued(items, at):
        return False
    last = len(wanted) - 1
    for index, item in enumerate(wanted):
        while _is_article(items, at) and not fits(item, items[at]):
            at += 1
        if at < len(items) and fits(item, items[at]):
            at += 1
        # the A of "vitamin A" is no article
        elif index == last or not _is_article(wanted, index):
            return False
    return not _is_glued(items, at)


def _is_glued(items: Sequence[Item], at: int) -> bool:
    """Return whether a hyphen joins an item to the one before: profit in non-profit."""
    if at == len(items):
        return False
    item = items[at]
    return isinstance(item, Word) and item.is_glued


def _is_article(items: Sequence[Item], at: int) -> bool:
    if at == len(items):
        return False
    item = items[at]
    return isinstance(item, Word) and item.is_article


def _value_fits(wanted: Value, value: Value) -> bool:
    match wanted, value:
        case Number(), Number():
            return _number_fits(wanted, value)
        case Group(), Group():
            return _group_fits(wanted, value)
        case Version(), Version():
            return wanted == value
        case Version(), Number():
            return wanted.digits == short_version(value.digits)
        case Number(), Version():
            return value.digits == short_version(wanted.digits)
        case Numeral(), Numeral():
            return wanted.value == value.value
        case Numeral(), Number():
            return _is_plain(value, wanted.value)
        case Number(), Numeral():
            return _is_plain(wanted, value.value)
        case Clock(), Clock():
            return _clock_fits(wanted, value)
        case (Clock() as clock, Number() as number) | (Number() as number, Clock() as clock):
            return _is_clock_in_words(number, clock)
        case Day(), Day():
            return _day_fits(wanted, value)
    return False


def _is_plain(number: Number, value: int) -> bool:
    return number.value == value and not number.unit


_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)*")
_NEVER_MORE = ("bc", "s")
"""Units that change a number rather than explain it: 44 BC is not 44, nor the 1990s 1990."""
_DEGREES = ("celsius", "degree or celsius", "degree n", "degree s", "degree e", "degree w")
_ALSO = {
    "lb": ("pound",),
    "sterling": ("pound",),
    "pound": ("lb", "sterling"),
    "degree": (*_DEGREES, "fahrenheit"),
    # 5 Grad and 5度 are never of Fahrenheit.
    "degree or celsius": (*_DEGREES, "degree"),
    "celsius": ("degree or celsius",),
    "ad": ("",),
}
"""Unit of an accepted text -> others that say the same, or more."""


_RATES = ("day", "night", "week", "month", "year")
"""Units of time that a question asks for by itself: "how many hours a day?"."""


def _number_fits(wanted: Number, number: Number) -> bool:
    if wanted.bound != number.bound:
        return False
    # "It took a week" has no 1 in it.
    if number.is_article and not wanted.unit:
        return False
    if not _unit_fits(wanted.unit, number.unit) or not _rank_fits(wanted, number):
        return False
    # The 80s are those of any century.
    if wanted.unit == number.unit == "s" and min(wanted.value, number.value) < 100:
        return wanted.value % 100 == number.value % 100
    versions = [short_version(wanted.digits), short_version(number.digits)]
    if all(versions) and (wanted.is_version or number.is_version):
        return versions[0] == versions[1]
    return wanted.value == number.value


def _unit_fits(wanted: str, unit: str) -> bool:
    if wanted == unit or unit in _ALSO.get(wanted, ()):
        return True
    measure, _, per = unit.partition("/")
    if wanted == measure and per in _RATES:
        return True
    return not wanted and unit not in _NEVER_MORE


def _rank_fits(wanted: Number, number: Number) -> bool:
    """Return whether both are ranks, or both are none; digits may stand for either: 3rd and 3."""
    if wanted.is_ordinal == number.is_ordinal or None in (wanted.is_ordinal, number.is_ordinal):
        return True
    if wanted.is_ordinal and wanted.unit != number.unit:
        return False
    return bool(number.digits)


def short_version(digits: str) -> str:
    """Return the digits of a version, "" for another number: 2.0.0 is 2, 3.10 is not 3.1."""
    if not _PLAIN_NUMBER.fullmatch(digits):
        return ""
    while digits.endswith(".0"):
        digits = digits.removesuffix(".0")
    return digits


def _group_fits(wanted: Group, group: Group) -> bool:
    # "3 to 1" is a range as well as a ratio
    if wanted.sign != group.sign and "to" not in (wanted.sign, group.sign):
        return False
    if len(wanted.numbers) != len(group.numbers):
        return False
    pairs = zip(wanted.numbers, group.numbers, strict=True)
    return all(_number_fits(one, other) for one, other in pairs)


def _clock_fits(wanted: Clock, clock: Clock) -> bool:
    if wanted.seconds is not None and wanted.seconds != (clock.seconds or 0):
        return False
    if wanted.zone is not None and wanted.zone != clock.zone:
        return False
    if wanted.minutes == clock.minutes:
        return True
    # an accepted 10:30 may be that of the morning or of the evening
    is_open = not wanted.has_half and clock.has_half
    # 0:30 is of the clock of 24 hours: never 12:30 pm.
    return is_open and wanted.minutes >= 60 and wanted.minutes + HALF_A_DAY == clock.minutes


def _is_clock_in_words(number: Number, clock: Clock) -> bool:
    """Return whether a number in words is a time after noon: nineteen thirty, not 1930."""
    hour, minute = divmod(clock.minutes, 60)
    is_spoken = hour > 12 and minute > 9 and not clock.seconds
    return is_spoken and not number.digits and _is_plain(number, 100 * hour + minute)


def _day_fits(wanted: Day, day: Day) -> bool:
    if wanted.year is not None and not _same_year(wanted.year, day.year):
        return False
    # 3/4/1999 and 4/3/1999 have a reading in common
    if wanted.order and day.order:
        return wanted.order == day.order
    return wanted.month == day.month and wanted.days <= day.days


def _same_year(wanted: int, year: int | None) -> bool:
    if year is None:
        return False
    # one of two digits stands for any century
    if min(wanted, year) < 100:
        return wanted % 100 == year % 100
    return wanted == year


_FILLERS = frozenset(
    (
        *("a", "an", "the", "st", "nd", "rd", "th", "year"),
        *("of", "de", "le", "el", "den", "der", "del", "du", "il", "am", "au"),
        *("and", "und", "et", "y", "e", "from", "between", "to", "von", "zwischen", "entre"),
        *("in", "on", "at", "about", "approximately", "around", "circa", "roughly"),
        *("im", "jahr", "jahre", "en", "em", "nel", "année", "lannée", "año", "ano", "anno"),
    )
)
"""Words beside a value that an answer may lack."""


def values_of(items: Sequence[Item]) -> list[Item]:
    """Return the values of an accepted text that has nothing else in it, [] for another."""
    values: list[Item] = []
    for item in items:
        if not isinstance(item, Word):
            values.append(item)
        elif item.key not in _FILLERS:
            return []
    return values


def is_article_number(item: Item) -> bool:
    """Return whether an item is a measure whose number is an article: a mile."""
    if isinstance(item, Word):
        return False
    first = item.readings[0]
    return isinstance(first, Number) and first.is_article


def same_numbers(items: Sequence[Item], others: Sequence[Item]) -> bool:
    """Return whether the numbers of two texts of the same words are the same: what words leave out
    is a bound (>5), the sign of a unit (5 €, 5 $, 5 %), and its capitals (mW, MW)."""
    pairs = zip(_numbers_of(items), _numbers_of(others), strict=False)
    return all(number.bound == other.bound and number.unit == other.unit for number, other in pairs)


def _numbers_of(items: Sequence[Item]) -> Iterator[Number]:
    for item in items:
        if isinstance(item, Word):
            continue
        match item.readings[0]:
            case Number() as number:
                yield number
            case Group(numbers=numbers):
                yield from numbers
