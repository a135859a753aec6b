"""Numbers, dates and units in English text, each in one form: 1,000 = one thousand, March 3 = 3 March, 5 km = 5 kilometres.

The vocabulary comes first: spellings of units, months, number words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal

_SPELLINGS: dict[str, str] = {
    "km": "km|kms|kilometre|kilometres|kilometer|kilometers",
    "m": "m|metre|metres|meter|meters",
    "cm": "cm|centimetre|centimetres|centimeter|centimeters",
    "mm": "mm|millimetre|millimetres|millimeter|millimeters",
    "mile": "mi|mile|miles",
    "foot": "ft|foot|feet",
    "inch": "inch|inches",
    "yard": "yd|yard|yards",
    "kg": "kg|kgs|kilogram|kilograms|kilogramme|kilogrammes|kilo|kilos",
    "g": "g|gram|grams|gramme|grammes",
    "mg": "mg|milligram|milligrams",
    "tonne": "tonne|tonnes",
    "ton": "ton|tons",
    "lb": "lb|lbs|pound|pounds",
    "oz": "oz|ounce|ounces",
    "litre": "l|litre|litres|liter|liters",
    "ml": "ml|millilitre|millilitres|milliliter|milliliters",
    "gallon": "gal|gallon|gallons",
    "hectare": "ha|hectare|hectares",
    "acre": "acre|acres",
    "km2": "km²|km2|sq km|square kilometre|square kilometres|square kilometer|square kilometers",
    "mile2": "sq mi|square mile|square miles",
    "m2": "m²|m2|sq m|square metre|square metres|square meter|square meters",
    "foot2": "sq ft|square foot|square feet",
    "celsius": "°c|° c|degrees celsius|degree celsius|celsius|degrees centigrade",
    "fahrenheit": "°f|° f|degrees fahrenheit|degree fahrenheit|fahrenheit",
    "degree": "°|degree|degrees",
    "km/h": "km/h|kph|kmh|kilometres per hour|kilometers per hour",
    "mph": "mph|miles per hour",
    "knot": "knot|knots",
    "millisecond": "ms|millisecond|milliseconds",
    "second": "second|seconds|sec|secs",
    "minute": "minute|minutes|min|mins",
    "hour": "hour|hours|hr|hrs",
    "day": "day|days",
    "week": "week|weeks",
    "month": "month|months",
    "year": "year|years|yr|yrs",
    "decade": "decade|decades",
    "century": "century|centuries",
    "hz": "hz|hertz",
    "khz": "khz|kilohertz",
    "mhz": "mhz|megahertz",
    "ghz": "ghz|gigahertz",
    "w": "w|watt|watts",
    "kw": "kw|kilowatt|kilowatts",
    "mw": "mw|megawatt|megawatts",
    "gw": "gw|gigawatt|gigawatts",
    "volt": "v|volt|volts",
    "byte": "byte|bytes",
    "kb": "kb|kilobyte|kilobytes",
    "mb": "mb|megabyte|megabytes",
    "gb": "gb|gigabyte|gigabytes",
    "tb": "tb|terabyte|terabytes",
    "%": "%|percent|per cent|percentage points|percentage point",
    "dollar": "dollar|dollars|usd",
    "euro": "euro|euros|eur",
    "sterling": "pounds sterling|gbp",
    "yen": "yen|jpy",
    "rupee": "rupee|rupees",
    "bc": "bc|bce|b.c.|b.c.e.",
}
UNIT_OF = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split("|")}
"""Spelling -> unit."""

_OPTIONAL_UNITS = {"day", "year"}
"""Units that may be omitted: aged 19 is 19 years old, 1 to 5 May are five days."""

_SYMBOLS = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
"""Sign before a number -> unit."""

_MONTHS_TEXT = "january february march april may june july august september october november december"
MONTHS = _MONTHS_TEXT.split()
"""Months from January."""

MONTH_OF = {name: number for number, name in enumerate(MONTHS, 1)}
MONTH_OF |= {name[:3]: number for name, number in MONTH_OF.items()} | {"sept": 9}
"""Name or abbreviation -> 1 to 12."""

_NAMED_DAYS = {
    "new year's day": (1, 1), "valentine's day": (2, 14), "halloween": (10, 31), "christmas eve": (12, 24),
    "christmas day": (12, 25), "new year's eve": (12, 31),
}  # fmt: skip
"""Name of a day -> (month, day)."""

_SMALL_TEXT = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_ORDINALS_TEXT = (
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth"
)
_TENS_TEXT = "twenty thirty forty fifty sixty seventy eighty ninety"
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Word -> factor."""

NUMBER_WORDS = (
    {word: value for value, word in enumerate(_SMALL_TEXT.split())}
    | {word: value for value, word in enumerate(_ORDINALS_TEXT.split())}
    | {word: 10 * value for value, word in enumerate(_TENS_TEXT.split(), 2)}
    | {word[:-1] + "ieth": 10 * value for value, word in enumerate(_TENS_TEXT.split(), 2)}
)
"""Word below a hundred, cardinal or ordinal -> value."""

_IMPLYING_WORDS: dict[str, tuple[str, ...]] = {
    "2": ("both", "pair", "couple", "twice", "double", "twin", "duo", "fold", "twofold", "half", "second", "fortnight"),
    "3": ("triple", "thrice", "trio", "threefold"), "4": ("quartet", "quarter"), "0.5": ("half",),
    "50": ("half", "equal", "equally", "even", "evenly"), "25": ("quarter",), "10": ("decade",), "12": ("dozen",),
    "14": ("fortnight",), "100": ("century", "centenary"), "1000": ("millennium",), "24": ("day",), "7": ("week",),
    "60": ("hour",), "1": ("single", "sole", "once", "first", "one", "only"), "0": ("no", "none", "zero", "nil"),
}  # fmt: skip
"""Number -> words that may replace it, or appear without it."""


def _numbers_by_word() -> dict[str, set[str]]:
    numbers: dict[str, set[str]] = {}
    for value, words in _IMPLYING_WORDS.items():
        for word in words:
            numbers.setdefault(word, set()).add(value)
    return {f"{word}s": values for word, values in numbers.items()} | numbers


_IMPLIED_NUMBERS = _numbers_by_word()
"""Word, singular or plural -> the numbers that it may replace."""

_IMPLIED_UNIT = {"10": "year", "100": "year", "1000": "year", "14": "day", "7": "day", "24": "hour", "60": "minute"}
"""Implied number -> its unit: a decade is ten years."""

_NUMERALS = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}


def roman_value(numeral: str) -> int:
    """Return the value of a Roman numeral of kings, popes, wars and centuries (2 to 89), 0 for other text."""
    numeral = numeral.lower()
    if not 2 <= len(numeral) <= 8 or not set(numeral) <= _NUMERALS.keys():
        return 0
    values = [_NUMERALS[letter] for letter in numeral]
    value = sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))
    return value if value < 90 else 0


_UNIT = "|".join(sorted((re.escape(spelling) for spelling in UNIT_OF), key=len, reverse=True))
_MONTH = "|".join(sorted(MONTH_OF, key=len, reverse=True))
_WORD = "|".join(sorted([*NUMBER_WORDS, *_SCALES, *(f"{scale}th" for scale in _SCALES)], key=len, reverse=True))
_DIGITS = r"\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?"
_IN_DIGITS = rf"""(?P<iso>\b\d{{4}}-\d\d-\d\d\b)
    | (?<![\w.]) (?P<symbol>[$€£¥₹])?\s? (?P<digits>{_DIGITS}) (?P<decade>s\b)? (?P<ordinal>st|nd|rd|th)?
      (?:\s?(?P<scale>hundred|thousand|million|billion|trillion|bn|k)\b)?"""
_IN_WORDS = rf"\b(?=[zotfsenhmb])(?P<words>(?:{_WORD})(?:(?:\s+|-|\s+and\s+)(?:{_WORD}))*)\b"
_NUMBER = re.compile(f"{_IN_DIGITS} | {_IN_WORDS}", re.VERBOSE)
_NUMBER_IN_DIGITS = re.compile(_IN_DIGITS, re.VERBOSE)
_NUMBER_WORD_SET = frozenset(_WORD.split("|"))
_UNIT_AFTER = re.compile(rf"[\s\-\u00a0]{{0,2}}(?P<unit>{_UNIT})(?![\w°])")
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_JOIN = r"\s*(?:,|and|or|to|&|[-–—])\s*"
_DATE = re.compile(
    rf"\b(?P<before>{_DAY}(?:{_JOIN}{_DAY}){{0,3}})\s+(?:of\s+)?(?P<month>{_MONTH})\b(?!\w)"
    rf"|\b(?P<month2>{_MONTH})\.?\s+(?:the\s+)?(?P<after>{_DAY}(?:{_JOIN}{_DAY}){{0,3}})(?!\d|:\d|\.\d|,\d{{3}})",
    re.IGNORECASE,
)
_MONTH_ALONE = re.compile(rf"\b(?:{'|'.join(name.title() for name in MONTHS)})\b")
# March and May are also other words. They are months before a year, or after a word such as "in" or "since".
_YEAR_AFTER = re.compile(r",? (?:of )?\d{4}\b")
_BEFORE_MONTH = re.compile(r"\b(?:in|early|late|since|until) \Z", re.IGNORECASE)
_AMBIGUOUS_MONTHS = ("March", "May")
_NAMED_DAY_WORDS = ("valentine", "christmas", "halloween", "eve", "new")
_LETTERS = re.compile(r"[a-z]+")
_ROMAN = re.compile(r"\b[IVXL]{2,8}\b")
_RANGE_END = re.compile(r"(?<!\d)(\d\d)(\d\d)[–-](\d\d)(?!\d|-)")
_COUNTED_DECADES = re.compile(rf"\b(?P<words>{_WORD}|\d+) [a-z]+ (?P<unit>decades|centuries)\b")
_NEXT_YEAR = re.compile(r"\b(?:(?:next|following|subsequent) year|year (?:later|after|afterwards))\b")
_PREVIOUS_YEAR = re.compile(r"\b(?:(?:previous|preceding|prior) year|year (?:earlier|before))\b")
_TIME = re.compile(r"(?<!\d)\d{1,2}:\d\d(?::\d\d)?(?!\d)")


@dataclass(slots=True)
class Quantities:
    """Numbers (as plain decimals) with their units, and dates as (month, day), in a text.

    The other text must have the `stated` numbers; `counted` ones (small numbers in words without a unit: a writer may have
    counted) may be new. `implied` numbers (both, a decade) and `named_days` (Valentine's Day, with the words of the name)
    may replace a number or a date of the other text. `possible_months` are a March or May that may not be a month.
    """

    numbers: dict[str, set[str]] = field(default_factory=dict)
    stated: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    implied: set[str] = field(default_factory=set)
    named_days: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    months: set[int] = field(default_factory=set)
    possible_months: set[int] = field(default_factory=set)
    days: set[tuple[int, int]] = field(default_factory=set)

    @property
    def units(self) -> set[str]:
        """All units of the numbers."""
        return set().union(*self.numbers.values())

    def add(self, number: str, unit: str = "", *, stated: bool = True) -> None:
        """Add `number` with its `unit`."""
        units = self.numbers.setdefault(number, set())
        if unit:
            units.add(unit)
        if stated:
            self.stated.add(number)

    @property
    def uncertain_months(self) -> set[int]:
        """Months that the text may mean: a possible month, or the month of a named day."""
        return self.possible_months | {month for month, _ in self.named_days}

    def words_for_dates_of(self, other: Quantities) -> frozenset[str]:
        """Return the words of the days that this text names and `other` gives as dates."""
        return frozenset().union(*(words for day, words in self.named_days.items() if day in other.days))


def extract_quantities(text: str) -> Quantities:
    """Return the numbers, units and dates in `text`."""
    quantities = Quantities()
    # Most texts have no range and no time of day, and a search for one character is cheaper than for a pattern.
    if "-" in text or "–" in text:
        text = _RANGE_END.sub(r"\1\2–\1\3", text)
    lower = text.lower()
    if ":" in text:
        for match in _TIME.finditer(text):
            quantities.add(match[0].removeprefix("0"))
        lower = _TIME.sub(lambda match: " " * len(match[0]), text).lower()
    words = set(_LETTERS.findall(lower))
    for match in (_NUMBER_IN_DIGITS if words.isdisjoint(_NUMBER_WORD_SET) else _NUMBER).finditer(lower):
        if match["iso"]:
            year, month, day = (int(part) for part in match["iso"].split("-"))
            quantities.add(str(year))
            quantities.add(str(day))
            quantities.days.add((month, day))
            quantities.months.add(month)
        elif match["digits"]:
            unit = _SYMBOLS.get(match["symbol"] or "") or _unit_after(lower, match.end(), in_digits=True)
            quantities.add(*_in_years(_decimal(match), unit, match["ordinal"] is not None))
        else:
            _add_number_words(match, lower, quantities)
    if not words.isdisjoint(_NAMED_DAY_WORDS):
        straight = lower.replace("’", "'")
        for name in [name for name in _NAMED_DAYS if name in straight]:
            month, day = _NAMED_DAYS[name]
            quantities.named_days[month, day] = frozenset([*name.replace("'s", "").split(), MONTHS[month - 1]])
            quantities.implied.add(str(day))
    if not words.isdisjoint(MONTH_OF):
        _add_dates(text, quantities)
    quantities.implied.update(str(roman_value(match[0])) for match in _ROMAN.finditer(text))
    for word in _IMPLIED_NUMBERS.keys() & words:
        quantities.implied |= _IMPLIED_NUMBERS[word]
    quantities.implied |= _implied_years(lower, quantities.numbers)
    return quantities


def _add_number_words(match: re.Match[str], lower: str, quantities: Quantities) -> None:
    *earlier, last = _parse_number_words(re.split(r"[\s-]+", match["words"]))
    unit_of_last = _unit_after(lower, match.end(), in_digits=False)
    ordinal = match["words"].endswith(("th", "rd", "st"))
    for value in (*earlier, last):
        unit = unit_of_last if value == last else ""
        # "one" is often a pronoun, "second" a unit or a rank, and "two" without a unit both or a pair.
        quantities.add(*_in_years(value, unit, ordinal), stated=value > 2 or (value == 2 and bool(unit)))
        if value < 6 and not unit and not ordinal:
            quantities.counted.add(str(value))


def _implied_years(text: str, numbers: Iterable[str]) -> set[str]:
    """Return numbers that words about years imply: 90s for the 1990s, "the next year" after 2017 for 2018."""
    implied: set[str] = set()
    for number in numbers:
        if number.endswith("0s"):
            implied.update(
                {number[-3:]} if len(number) == 5 else {f"{century}{number}" for century in (17, 18, 19, 20)}
            )
    years = [int(number) for number in numbers if len(number) == 4 and number.isdigit()]
    if years and "year" in text:
        if _NEXT_YEAR.search(text):
            implied.update(str(year + 1) for year in years)
        if _PREVIOUS_YEAR.search(text):
            implied.update(str(year - 1) for year in years)
    for match in (
        _COUNTED_DECADES.finditer(text) if "decades" in text or "centuries" in text else ()
    ):  # three long decades
        count = int(match["words"]) if match["words"].isdigit() else _parse_number_words([match["words"]])[0]
        implied.add(str(count * (10 if match["unit"] == "decades" else 100)))
    return implied


def _add_dates(text: str, quantities: Quantities) -> None:
    for match in _DATE.finditer(text):
        month = MONTH_OF[(match["month"] or match["month2"]).lower()]
        quantities.months.add(month)
        quantities.days.update((month, int(day)) for day in re.findall(r"\d+", match["before"] or match["after"]))
    for match in _MONTH_ALONE.finditer(text):
        month = MONTH_OF[match[0].lower()]
        if match[0] not in _AMBIGUOUS_MONTHS or _is_month(text, match):
            quantities.months.add(month)
        else:
            quantities.possible_months.add(month)


def _is_month(text: str, match: re.Match[str]) -> bool:
    """Return whether a match of March or May is a month."""
    before = text[max(0, match.start() - 8) : match.start()]
    return bool(_YEAR_AFTER.match(text, match.end()) or _BEFORE_MONTH.search(before))


def _unit_after(text: str, end: int, in_digits: bool) -> str:
    """Return the unit after a number that ends at index `end`, or ""."""
    after = _UNIT_AFTER.match(text, end)
    if after is None:
        return ""
    spelling = after["unit"]
    # A single letter is a unit after digits only ("five m" is not), and "1990 v" is a match between teams.
    if len(spelling) == 1 and spelling.isalpha() and not (in_digits and spelling in "mglwv"):
        return ""
    return UNIT_OF[spelling]


def _in_years(value: int | str, unit: str, ordinal: bool) -> tuple[str, str]:
    """Return (number, unit) with decades and centuries as years: eight decades are 80 years, the 8th century is not."""
    years = {"decade": 10, "century": 100}.get(unit)
    if years is None or ordinal or not str(value).isdigit():
        return str(value), unit
    return str(int(value) * years), "year"


def _decimal(match: re.Match[str]) -> str:
    """Return a number in digits as a plain decimal; "1990s" keeps its s."""
    value = Decimal(re.sub(r"[,\u00a0\u202f]", "", match["digits"]))
    scale = match["scale"] or ""
    if scale:
        value *= {"bn": 10**9, "k": 1000}.get(scale) or _SCALES[scale]
    return _format_decimal(value) + ("s" if match["decade"] else "")


def _parse_number_words(words: list[str]) -> list[int]:
    """Return the numbers in `words`: five thousand and two; nineteen ninety-five; two, then three."""
    numbers: list[int] = []
    total = part = 0  # of the current number: whole thousands, and the rest so far
    room = 0  # a value below this can be added to `part`
    for word in words:
        scale = _SCALES.get(word) or _SCALES.get(word.removesuffix("th"))
        value = NUMBER_WORDS.get(word, 0)
        if scale == 100:
            part, room = (part or 1) * 100, 100
        elif scale:
            total, part, room = total + (part or 1) * scale, 0, scale
        elif word == "and":
            continue
        elif 0 < value < room:
            part += value
            room = 10 if value >= 20 else 0
        elif total == 0 and 10 <= part < 100 and value >= 10:  # nineteen ninety
            part, room = part * 100 + value, 10 if value >= 20 else 0
        else:
            if total or part:
                numbers.append(total + part)
            total, part, room = 0, value, 10 if value >= 20 else 0
    return [*numbers, total + part]


def _format_decimal(value: Decimal) -> str:
    """Return `value` without exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text.lstrip("0") or "0"


def compare_quantities(source: Quantities, variant: Quantities, complete: bool) -> tuple[str, str]:
    """Return (reason, detail) of the first disagreement, ("", "") without one."""
    lost_numbers = source.stated - variant.numbers.keys() - variant.implied
    if complete and lost_numbers:
        return "number", f"{min(lost_numbers)} is lost"
    new_numbers = variant.stated - source.numbers.keys() - source.implied
    replaced = source.numbers.keys() - variant.numbers.keys() - variant.implied
    if new_numbers - variant.counted or (new_numbers and replaced):
        return "number", f"{min(new_numbers)} is not in the source"
    lost_months = source.months - variant.months - variant.uncertain_months if complete else set()
    new_months = variant.months - source.months - source.uncertain_months
    if lost_months or new_months:
        month = min(lost_months or new_months)
        return "date", f"{MONTHS[month - 1].title()} is {'lost' if lost_months else 'not in the source'}"
    for month, day in sorted(variant.days - source.days):
        known_days = source.days | source.named_days.keys()
        if (month, day) not in known_days and any(month == known[0] or day == known[1] for known in known_days):
            return "date", f"{day} {MONTHS[month - 1].title()} is not in the source"
    for number, units in variant.numbers.items():
        # An implied number (a decade, a dozen) has the unit of its word, or any.
        known_units = source.numbers.get(number, {_IMPLIED_UNIT[number]} if number in _IMPLIED_UNIT else units)
        new_units = units - known_units
        if new_units and (known_units or not new_units <= source.units | _OPTIONAL_UNITS):
            listed = f"with {', '.join(sorted(known_units))}" if known_units else "without a unit"
            return "unit", f"{number} {min(new_units)}: the source has {number} {listed}"
    return "", ""
