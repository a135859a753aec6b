"""A number in a written answer with all that belongs to it: sign, bound, currency, rank, scale,
unit, era; and what makes it a part of a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from kinject.language.amounts import Day, Group, Number, Values
from kinject.language.moments import TAKEN, Found, Reader
from kinject.language.spelling import CURRENCY, MINUS, WIDE
from kinject.language.tables import Language, language_of
from kinject.language.units import any_of, money_marks, unit_at, with_divisor
from kinject.language.values import (
    NEVER,
    PREPOSITION,
    SCALE_BEFORE_MONEY,
    SCALES_BEFORE_MONEY,
    SCALES_OF_MONEY,
    WORD_END,
    grammar_of,
)

LETTER = rf"[^\W{WIDE}]"
_MINUS_WORD = rf"(?<!{LETTER})(?P<minus_word>minus|negative|moins|menos|meno|минус)\s+"
# the hyphen behind a number joins two numbers
_SIGN = rf"(?<!{TAKEN})(?P<sign>{MINUS})|(?<!{LETTER})\+"
_CODE = rf"(?<!{LETTER})(?:[a-z]{{1,2}}\$|{any_of(money_marks())})|[{CURRENCY}]"
_BEFORE = re.compile(rf"(?:{_MINUS_WORD}|{_SIGN})?(?:(?P<currency>{_CODE})\s?(?P<late_sign>-)?)?\Z")
"""Sign and currency before a number."""
VERSION_BEFORE = re.compile(r"(?<!\w)(?:v\.?|ver\.|version|release)\s?\Z")
_PARTED_BEFORE = re.compile(
    r"(?:(?<!\w)(?:kernel|build|firmware|section|sect?\.|chapter|chap\.|figure|fig\.|table"
    r"|article|clause|verse|lemma|theorem|equation)|§)\s?\Z"
)
"""Words before a number whose point parts two numbers, as in a version."""
PRE_RELEASE = re.compile(r"-?(?:rc|alpha|beta|dev|pre|snapshot)\.?\d*\b")
"""What makes 1.0.0-beta another version."""
_CIRCA_BEFORE = re.compile(r"(?<!\w)ca?\.\s?\Z")
_RANK_BEFORE = re.compile(r"(?:(?<!\w)(?:no\.|nr\.|number|nummer|numéro|número)\s?|#)\Z")
_NAME_BEFORE = re.compile(r"(?P<name>[^\W\d_][\w']*) \Z")
_IN_A_NAME = re.compile(
    rf"(?:(?<!\bmid)(?<!\blate)(?<!\bearly)(?<={LETTER})-|{LETTER}|[\w{TAKEN}][._^/]|[_√])\Z"
)
"""What makes the number behind it a part of a name or of a root: A220, Covid-19, √2."""
_AD_BEFORE = re.compile(r"(?<!\w)a\.?d\.?\s\Z")
_ERA_AFTER = re.compile(
    r"\s?(?:(?P<bc>b\.?c\.?(?:e\b\.?)?|v\.\s?chr\b\.?|av\.\s?j\.?-?c\b\.?|a\.\s?c\.)|"
    r"(?:a\.?d\b\.?|c\.?e\b\.?|n\.\s?chr\b\.?|apr?\.\s?j\.?-?c\b\.?|d\.\s?c\.))(?!\w)"
)
_BELOW_ZERO = re.compile(
    r"\s(?:degrees\s)?(?:below zero|below freezing|unter null|sous zéro|bajo cero|sotto zero)\b"
)
_FRENCH_RANK = re.compile(r"(?:er|ère|i?ème)(?!\w)")
"""1er, 5ème: too short to show their language."""
_DECADE_AFTER = re.compile(r"'?s\b")
_SCALES = {"k": 10**3, "mn": 10**6, "lakh": 10**5, "crore": 10**7, "dozen": 12}


@lru_cache(maxsize=128)
def _scale_pattern(code: str) -> re.Pattern[str]:
    scales = {*grammar_of(code).language.digit_scales, *_SCALES, *SCALES_OF_MONEY}
    spellings = "|".join(sorted(map(re.escape, scales), key=len, reverse=True))
    return re.compile(rf"(?:\s?|\s+an?\s+)(?P<scale>{spellings}){WORD_END}(?:\.(?=\s))?")


@lru_cache(maxsize=128)
def _second_scale_pattern(code: str) -> re.Pattern[str]:
    words = grammar_of(code).language.scale_words
    return re.compile(rf"\s(?P<scale>{any_of(words) or NEVER}){WORD_END}")


@lru_cache(maxsize=128)
def _ordinal_pattern(code: str) -> re.Pattern[str]:
    return re.compile(grammar_of(code).language.ordinal or r"\Z.")


_BOUND_BEFORE = re.compile(r"(?P<sign>[<>]=?|[≤≥±]|\+/-)\s?\Z")
_BOUND_SIGNS = {"<=": "≤", ">=": "≥", "+/-": "±"}
_BOUND_WORDS = {
    "at least": "≥",
    "no less than": "≥",
    "at most": "≤",
    "no more than": "≤",
    "up to": "≤",
    "more than": ">",
    "over": ">",
    "less than": "<",
    "fewer than": "<",
    "under": "<",
    "plus or minus": "±",
}
_BOUND_WORD_BEFORE = re.compile(rf"(?<!\w)(?P<words>{any_of(_BOUND_WORDS)})\s\Z")
_KELVIN = re.compile(r"\sK(?![\w'-])")


def take_number(
    reader: Reader, start: int, end: int, number: Number, *others: Number | Group | Day
) -> None:
    """Take the number at a place with all that belongs to it, unless it is a part of a name.

    `others`: more values that it may be.
    """
    begin, number = _read_before(reader, start, number)
    if _IN_A_NAME.search(reader.before(begin)):
        return
    # 50 K are kelvins or thousands
    if _KELVIN.match(reader.folded, end) and not number.unit:
        others = (*others, replace(number, unit="K"))
    end, number = _read_after(reader, end, number)
    follows = reader.rest[end : end + 1]
    # 5G, 3D, 10^2; 5.0-rc1
    if number.digits and re.match(rf"{LETTER}|[\^√]", follows):
        return
    if PRE_RELEASE.match(reader.rest, end):
        return
    sign = _BOUND_BEFORE.search(reader.before(begin))
    words = _BOUND_WORD_BEFORE.search(reader.before(begin))
    if sign:
        bound = _BOUND_SIGNS.get(sign["sign"], sign["sign"])
        reader.take(begin - len(sign[0]), end, replace(number, bound=bound))
    elif words:
        # who says "over 5" also says 5
        bounded = replace(number, bound=_BOUND_WORDS[words["words"]])
        reader.take(begin - len(words[0]), end, bounded, parts=(number, *others))
    else:
        reader.take(begin, end, number, *others)


def _read_before(reader: Reader, start: int, number: Number) -> tuple[int, Number]:
    """Return where a number begins with its sign and currency, and the number with them."""
    match = _BEFORE.search(reader.before(start))
    assert match is not None  # it may be empty
    begin = start - len(match[0])
    currency = match["currency"] or ""
    if currency:
        number = replace(number, unit=money_marks().get(currency, currency))
    if match["minus_word"] or match["sign"] or match["late_sign"]:
        number = replace(number, value=-number.value)
    before = reader.before(begin)
    name = _NAME_BEFORE.search(reader.folded[max(0, begin - 24) : begin])
    version = VERSION_BEFORE.search(before)
    if version:
        # the engine V8 is no version
        is_engine = reader.folded[begin - 1] == "V" and "." not in number.digits
        if not is_engine:
            return begin - len(version[0]), replace(number, is_version=True)
        return begin, number
    if _PARTED_BEFORE.search(before):
        return begin, replace(number, is_version=True)
    circa = _CIRCA_BEFORE.search(before)
    if circa:
        return begin - len(circa[0]), number
    rank = _RANK_BEFORE.search(before)
    if rank:
        return begin - len(rank[0]), number
    era = _AD_BEFORE.search(before)
    if era:
        return begin - len(era[0]), replace(number, unit="ad")
    if name and name["name"][0].isupper():
        is_common = name["name"].lower() in reader.grammar.language.frequent
        return begin, replace(number, is_version=not is_common)
    return begin, number


def _read_after(reader: Reader, end: int, number: Number) -> tuple[int, Number]:
    """Return where a number ends with its rank, scale and unit, and the number with them."""
    text, code = reader.rest, reader.grammar.language.code
    if number.digits:
        ordinal = _ordinal_pattern(code).match(text, end) or _FRENCH_RANK.match(text, end)
        decade = _DECADE_AFTER.match(text, end)
        if ordinal:
            end, number = ordinal.end(), replace(number, is_ordinal=True)
        elif decade:
            return decade.end(), replace(number, unit="s")
    era = _ERA_AFTER.match(text, end)
    # "5 ce soir" is French
    if era and not reader.folded[end : era.end()].islower():
        unit = "ad"
        if era["bc"]:
            unit = "bc"
        return era.end(), replace(number, unit=unit)
    end, number = _read_scale(reader, end, number)
    unit, unit_end = unit_after(reader, end, number)
    if unit == "degree" and code != "en":
        unit = "degree or celsius"
    if unit:
        end, number = century_with_era(reader, unit_end, replace(number, unit=number.unit or unit))
    below = _BELOW_ZERO.match(text, end)
    if below:
        return below.end(), replace(number, value=-number.value)
    return end, number


def century_with_era(reader: Reader, end: int, number: Number) -> tuple[int, Number]:
    """Return a century with the BC behind it, and where that ends; any other number as it is."""
    era = _ERA_AFTER.match(reader.rest, end)
    if number.unit != "century" or era is None or reader.folded[end : era.end()].islower():
        return end, number
    if era["bc"]:
        number = replace(number, unit="century bc")
    return era.end(), number


_DIRECTION = re.compile(
    r"\s?(?:°|degrees?\s)\s?(?P<side>[nsew])(?:orth|outh|ast|est)?\b", re.IGNORECASE
)
"""The degrees of a latitude or a longitude."""


def unit_after(reader: Reader, end: int, number: Number) -> tuple[str, int]:
    """Return the unit behind a number and where it ends, ("", `end`) without one."""
    grammar, folded = reader.grammar, reader.folded
    direction = _DIRECTION.match(folded, end)
    if direction:
        return f"degree {direction['side'].lower()}", direction.end()
    own, own_end = unit_at(folded, end, grammar.units)
    if TAKEN in reader.rest[end:own_end]:
        own, own_end = "", end
    spelling, unit_end = grammar.unit_spelled_after(reader.rest, end, bool(number.digits))
    # "degrees Celsius" begins with a degree
    if own and own_end >= unit_end:
        return own, own_end
    unit = grammar.units.get(spelling, "")
    # 5G is no weight
    if len(spelling) == 1 and spelling in "ghms" and folded[unit_end - 1].isupper():
        return "", end
    if not unit:
        return "", end
    return with_divisor(unit, folded, unit_end, grammar.units)


def is_scale_at(reader: Reader, start: int) -> bool:
    """Return whether a million, a dozen or the like is written out at a place."""
    match = _scale_pattern(reader.grammar.language.code).match(reader.rest, start)
    # "a m" is no million
    return match is not None and len(match["scale"]) > 2


def _scale_at(reader: Reader, end: int) -> tuple[re.Match[str] | None, Language]:
    """Return the match of a million or the like behind a number, and the language that it is of."""
    language = reader.grammar.language
    match = _scale_pattern(language.code).match(reader.rest, end)
    if match:
        return match, language
    # In any language 5 Millionen are no 5.
    for other in map(language_of, reader.others):
        match = _scale_pattern(other.code).match(reader.rest, end)
        # One of two letters is most often another word: the Portuguese "mi" is a mile.
        if match is None or len(match["scale"]) <= 2:
            continue
        # Nor are 75 cents French hundreds.
        if other.digit_scales.get(match["scale"], 0) >= 1000:
            return match, other
    return None, language


def _read_scale(reader: Reader, end: int, number: Number) -> tuple[int, Number]:
    """Return a number times the million or the dozen behind it, and where that ends."""
    before_money = SCALE_BEFORE_MONEY.match(reader.rest, end)
    match, language = _scale_at(reader, end)
    match = before_money or match
    if match is None or not (number.digits or match["scale"] == "dozen"):
        return end, number
    scale = match["scale"]
    factor = language.digit_scales.get(scale) or _SCALES.get(scale)
    if before_money:
        factor = SCALES_BEFORE_MONEY[scale]
    if factor is None:
        # 5 m is a length, 5M and $5m are millions
        is_capital = match[0][0] == scale and reader.folded[match.start("scale")].isupper()
        if not number.unit and not (is_capital and scale == "m"):
            return end, number
        factor = SCALES_OF_MONEY[scale]
    number = replace(number, value=number.value * factor)
    if number.digits:
        # With its scale it is no version: 1.0 million is a million.
        number = replace(number, digits=f"{number.digits} {scale}", scale=factor)
    end = match.end()
    # Of "3 lakh crore" both are factors.
    second = _second_scale_pattern(language.code).match(reader.rest, end)
    if second:
        end = second.end()
        number = replace(number, value=number.value * language.scale_words[second["scale"]])
    return _end_with_preposition(reader, end), number


def end_of_words(reader: Reader, end: int, value: float) -> int:
    """Return where a number in words ends: of millions behind the preposition of their unit."""
    # "trois de mètres" is no measure.
    if value and value % 1_000_000 == 0:
        return _end_with_preposition(reader, end)
    return end


def _end_with_preposition(reader: Reader, end: int) -> int:
    """Return where the unit of millions begins behind its preposition (d'euros), `end` without
    one."""
    preposition = PREPOSITION.match(reader.rest, end)
    if preposition and reader.grammar.unit_spelled_after(reader.rest, preposition.end(), True)[0]:
        return preposition.end()
    return end


_YEAR_SIGN = re.compile(r"\s?(?:[年년](?![代间間前来])|год[ау]?(?!\w)|г\.)")
"""Behind four digits it names the year itself: 1987年, 1987 год; not 2000年前, 1980年代."""


def year_of_numeral(reader: Reader, numeral: re.Match[str], number: Number) -> list[Number]:
    """Return the year that 1987年 is, which 1987 alone says as well."""
    if not re.fullmatch(r"[12]\d{3}", numeral[0]):
        return []
    if not _YEAR_SIGN.match(reader.rest, numeral.end()):
        return []
    return [replace(number, unit="ad")]


_FEET = re.compile(
    r"(?<![\w.,])(?P<feet>\d)(?:(?P<prime>')\s?|\s?(?:ft|feet|foot)\.?,?\s)(?P<inches>1[01]|\d)"
    r"(?:\"|''|\s?(?:in\b\.?|inch(?:es)?\b)"
    # "5 feet 2 men" are no 5 feet and 2 inches
    r"|(?![\w']|[.,:/]\d)(?(prime)|(?=\s?(?:\Z|[.,;:!?()]|tall\b|high\b))))"
)


def take_feet(reader: Reader) -> None:
    """Take 6'2", 6 ft 2 in, 6 foot 2."""
    for match in _FEET.finditer(reader.rest):
        feet = int(match["feet"]) + Fraction(int(match["inches"]), 12)
        reader.take(*match.span(), Number(feet, "foot", digits=match[0]))


_COORDINATE = re.compile(
    r"(?<![\w.,])(?P<degrees>\d{1,3})\s?(?:°|degrees?\b)\s?"
    r"(?P<minutes>[0-5]?\d(?:\.\d+)?)\s?(?:'|min(?:utes)?\b)\s?"
    r"(?:(?P<seconds>[0-5]?\d(?:\.\d+)?)\s?(?:\"|''|sec(?:onds)?\b)\s?)?"
    r"(?P<side>[nsew])(?:orth|outh|ast|est)?\b"
)


def take_coordinates(reader: Reader) -> None:
    """Take 40°42′N, which is 40.7° N, and 40 degrees 42 minutes north."""
    for match in _COORDINATE.finditer(reader.rest):
        degrees = int(match["degrees"]) + Fraction(match["minutes"]) / 60
        degrees += Fraction(match["seconds"] or 0) / 3600
        reader.take(*match.span(), Number(degrees, f"degree {match['side']}", digits=match[0]))


_PARTS_OF: tuple[Mapping[str, int], ...] = (
    # A month as long as the calendar's on average, so that no months are as long as some days.
    {"year": 31556952, "month": 2629746, "week": 604800, "day": 86400}
    | {"hour": 3600, "minute": 60, "second": 1},
    {"yard": 36, "foot": 12, "inch": 1},
    {"km": 100000, "m": 100, "cm": 1},
    {"stone": 224, "lb": 16, "pound": 16, "oz": 1},
    {"kg": 1000, "g": 1},
    {"dollar": 100, "cent": 1},
    {"euro": 100, "cent": 1},
    {"sterling": 100, "pound": 100, "penny": 1},
)
"""Units of one measure -> how many of the smallest they are."""
_BETWEEN_PARTS = re.compile(r"\s?,?\s?(?:(?:and|und|et|y|e|en|и)\s)?")


def join_measures(reader: Reader) -> None:
    """Make one value of the parts of a measure: 1 hour 30 minutes, which is 90 minutes and not an
    hour; 6 pounds and 4 ounces; of days of one month: May 5 to May 7."""
    joined: list[Found] = []
    for found in reader.found:
        whole = None
        if joined:
            whole = _whole_of(reader, joined[-1], found)
        if whole:
            joined[-1] = whole
        else:
            joined.append(found)
    reader.found = joined


def _whole_of(reader: Reader, first: Found, second: Found) -> Found | None:
    """Return two values that follow each other as one measure, None if they are none."""
    between = reader.folded[first.end : second.start].lower()
    large, small = first.values.readings[-1], second.values.readings[0]
    if isinstance(large, Day) and isinstance(small, Day) and _DAY_TO_DAY.fullmatch(between):
        return _days_of_one_month(first, large, second, small)
    if not isinstance(large, Number) or not isinstance(small, Number) or small.bound:
        return None
    if not _BETWEEN_PARTS.fullmatch(between):
        return None
    for sizes in _PARTS_OF:
        size, size_of_part = sizes.get(large.unit, 0), sizes.get(small.unit, 0)
        part = small.value * size_of_part
        if large.value > 0 and 0 < part < size:
            whole = replace(large, digits=between, is_article=False)
            total = large.value * size + part
            units = [unit for unit, one in sizes.items() if one > size_of_part]
            # The last one is in the unit of this part, behind which a smaller one may follow.
            readings = [
                replace(whole, value=total / sizes[unit], unit=unit)
                for unit in (*units, small.unit)
            ]
            parts: tuple[Number, ...] = ()
            # "over 2 hours 30 minutes" also says 2 hours 30 minutes
            if large.bound:
                parts = tuple(replace(reading, bound="") for reading in readings)
            return Found(first.start, second.end, Values(tuple(readings), parts))
    return None


_DAY_TO_DAY = re.compile(
    r"\s?(?:-|,|&|(?<=\s)(?:to|until|through|and|bis|und|au|et|al|y|tot|en|по|и))\s?"
)


def _days_of_one_month(first: Found, day: Day, second: Found, other: Day) -> Found | None:
    """Return two dates as the days of one month, None if they are of two."""
    # 3/4/1999 may be of either.
    if day.order or other.order:
        return None
    same_year = day.year in (None, other.year)
    if day.month != other.month or not same_year or not (day.days and other.days):
        return None
    days = replace(other, days=day.days | other.days)
    parts = (*first.values.parts, *second.values.parts)
    return Found(first.start, second.end, Values((days,), parts))
