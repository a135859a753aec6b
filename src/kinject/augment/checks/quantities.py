"""Numbers, dates and units in English text, each in one form: 1,000 = one thousand, March 3 = 3 March, 5 km = 5 kilometres."""

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

SPANS = {"day", "year"}
"""Units that a bare number may be given: aged 19 is 19 years old, 1 to 5 May are five days."""

SYMBOLS = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
"""Sign before a number -> unit."""

_MONTHS_TEXT = "january february march april may june july august september october november december"
MONTHS = _MONTHS_TEXT.split()
"""Months from January."""

MONTH_OF = {name: number for number, name in enumerate(MONTHS, 1)}
MONTH_OF |= {name[:3]: number for name, number in MONTH_OF.items()} | {"sept": 9}
"""Name or abbreviation -> 1 to 12."""

NAMED_DAYS = {
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
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Word -> factor."""

NUMBER_WORDS = (
    {word: value for value, word in enumerate(_SMALL_TEXT.split())}
    | {word: value for value, word in enumerate(_ORDINALS_TEXT.split())}
    | {word: 10 * value for value, word in enumerate(_TENS_TEXT.split(), 2)}
    | {word[:-1] + "ieth": 10 * value for value, word in enumerate(_TENS_TEXT.split(), 2)}
)
"""Word below a hundred, cardinal or ordinal -> value."""

_HINTING_WORDS: dict[str, tuple[str, ...]] = {
    "2": ("both", "pair", "couple", "twice", "double", "twin", "duo", "fold", "twofold", "half", "second", "fortnight"),
    "3": ("triple", "thrice", "trio", "threefold"),
    "4": ("quartet", "quarter"),
    "0.5": ("half",),
    "50": ("half", "equal", "equally", "even", "evenly"),
    "25": ("quarter",),
    "10": ("decade",),
    "12": ("dozen",),
    "14": ("fortnight",),
    "100": ("century", "centenary"),
    "1000": ("millennium",),
    "24": ("day",),
    "7": ("week",),
    "60": ("hour",),
    "1": ("single", "sole", "once", "first", "one", "only"),
    "0": ("no", "none", "zero", "nil"),
}
"""Words that stand for a number where the other text gives one, but may appear without."""


def _hinted() -> dict[str, set[str]]:
    hinted: dict[str, set[str]] = {}
    for value, words in _HINTING_WORDS.items():
        for word in words:
            hinted.setdefault(word, set()).add(value)
    return hinted


HINTED = _hinted()
"""Word -> the numbers that it can stand for where the other text gives one of them."""

HINTED_UNIT = {"10": "year", "100": "year", "1000": "year", "14": "day", "7": "day", "24": "hour", "60": "minute"}
"""Hinted number -> the unit that it bears: a decade is ten years."""

_NUMERALS = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}


def roman_value(numeral: str) -> int:
    """Return the value of a Roman numeral of kings, popes, wars and centuries (2 to 89), 0 where `numeral` is none."""
    numeral = numeral.lower()
    if not 2 <= len(numeral) <= 8 or not set(numeral) <= _NUMERALS.keys():
        return 0
    values = [_NUMERALS[letter] for letter in numeral]
    value = sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))
    return value if value < 90 else 0


_UNIT = "|".join(sorted((re.escape(spelling) for spelling in UNIT_OF), key=len, reverse=True))
_MONTH = "|".join(sorted(MONTH_OF, key=len, reverse=True))
_WORD = "|".join(sorted([*NUMBER_WORDS, *SCALES, *(f"{scale}th" for scale in SCALES)], key=len, reverse=True))
_DIGITS = r"\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?"
_IN_DIGITS = rf"""(?P<iso>\b\d{{4}}-\d\d-\d\d\b)
    | (?<![\w.]) (?P<symbol>[$€£¥₹])?\s? (?P<digits>{_DIGITS}) (?P<decade>s\b)? (?P<ordinal>st|nd|rd|th)?
      (?:\s?(?P<scale>hundred|thousand|million|billion|trillion|bn|k)\b)?"""
_IN_WORDS = rf"\b(?=[zotfsenhmb])(?P<words>(?:{_WORD})(?:(?:\s+|-|\s+and\s+)(?:{_WORD}))*)\b"
_NUMBER = re.compile(f"{_IN_DIGITS} | {_IN_WORDS}", re.VERBOSE)
_NUMBER_IN_DIGITS = re.compile(_IN_DIGITS, re.VERBOSE)
_SPELLED = frozenset(_WORD.split("|"))
_AFTER = re.compile(rf"[\s\-\u00a0]{{0,2}}(?P<unit>{_UNIT})(?![\w°])")
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_JOIN = r"\s*(?:,|and|or|to|&|[-–—])\s*"
_DATE = re.compile(
    rf"\b(?P<before>{_DAY}(?:{_JOIN}{_DAY}){{0,3}})\s+(?:of\s+)?(?P<month>{_MONTH})\b(?!\w)"
    rf"|\b(?P<month2>{_MONTH})\.?\s+(?:the\s+)?(?P<after>{_DAY}(?:{_JOIN}{_DAY}){{0,3}})(?!\d|:\d|\.\d|,\d{{3}})",
    re.IGNORECASE,
)
_MONTH_ALONE = re.compile(rf"\b(?:{'|'.join(name.title() for name in MONTHS)})\b")
# March and May are other words too: months where a year follows, or a word that stands before months.
_YEAR_AFTER = re.compile(r",? (?:of )?\d{4}\b")
_BEFORE_MONTH = re.compile(r"\b(?:in|early|late|since|until) \Z", re.IGNORECASE)
_MAYBE_MONTHS = ("March", "May")
_IN_NAMED_DAYS = ("valentine", "christmas", "halloween", "eve", "new")
_LETTERS = re.compile(r"[a-z]+")
_ROMAN = re.compile(r"\b[IVXL]{2,8}\b")
_HINTS = {f"{word}s": values for word, values in HINTED.items()} | HINTED
_RANGE_END = re.compile(r"(?<!\d)(\d\d)(\d\d)[–-](\d\d)(?!\d|-)")
_SOME_DECADES = re.compile(rf"\b(?P<words>{_WORD}|\d+) [a-z]+ (?P<unit>decades|centuries)\b")
_YEAR_ON = re.compile(r"\b(?:(?:next|following|subsequent) year|year (?:later|after|afterwards))\b")
_YEAR_BACK = re.compile(r"\b(?:(?:previous|preceding|prior) year|year (?:earlier|before))\b")
_TIME = re.compile(r"(?<!\d)\d{1,2}:\d\d(?::\d\d)?(?!\d)")


@dataclass(slots=True)
class Quantities:
    """What a text states: numbers (as plain decimals) with the units they bear, and dates as (month, day).

    The other text must hold the `stated` ones; `counted` ones (bare small numbers in words, which a reader may have
    counted for himself) may be new. `hinted` ones (both, a decade) stand in for a number that the other text gives; so do
    `named` days (Valentine's Day), each with the words of its name, and `maybe_months` (a March that may be no month).
    """

    numbers: dict[str, set[str]] = field(default_factory=dict)
    stated: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    hinted: set[str] = field(default_factory=set)
    named: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    months: set[int] = field(default_factory=set)
    maybe_months: set[int] = field(default_factory=set)
    days: set[tuple[int, int]] = field(default_factory=set)

    @property
    def units(self) -> set[str]:
        """Every unit that a number bears."""
        return set().union(*self.numbers.values())

    def add(self, number: str, unit: str = "", *, stated: bool = True) -> None:
        """Note `number`, bearing `unit`; not `stated`: loosely."""
        units = self.numbers.setdefault(number, set())
        if unit:
            units.add(unit)
        if stated:
            self.stated.add(number)

    @property
    def hinted_months(self) -> set[int]:
        """Months that the text may be about without saying so for certain."""
        return self.maybe_months | {month for month, _ in self.named}

    def words_for_days_of(self, other: Quantities) -> frozenset[str]:
        """Return the words with which this text names days of which `other` gives the date."""
        return frozenset().union(*(words for day, words in self.named.items() if day in other.days))


def quantities_of(text: str) -> Quantities:
    """Return the numbers, units and dates in `text`."""
    found = Quantities()
    # Most texts have no range and no time of day: a search for one character is cheaper than a pattern's.
    if "-" in text or "–" in text:
        text = _RANGE_END.sub(r"\1\2–\1\3", text)
    small = text.lower()
    if ":" in text:
        for match in _TIME.finditer(text):
            found.add(match[0].removeprefix("0"))
        small = _TIME.sub(lambda match: " " * len(match[0]), text).lower()
    words = set(_LETTERS.findall(small))
    for match in (_NUMBER_IN_DIGITS if words.isdisjoint(_SPELLED) else _NUMBER).finditer(small):
        if match["iso"]:
            year, month, day = (int(part) for part in match["iso"].split("-"))
            found.add(str(year))
            found.add(str(day))
            found.days.add((month, day))
            found.months.add(month)
        elif match["digits"]:
            unit = SYMBOLS.get(match["symbol"] or "") or _unit_after(small, match.end(), in_digits=True)
            found.add(*_in_years(_decimal(match), unit, match["ordinal"] is not None))
        else:
            *earlier, last = _spelled(re.split(r"[\s-]+", match["words"]))
            unit = _unit_after(small, match.end(), in_digits=False)
            ordinal = match["words"].endswith(("th", "rd", "st"))
            for value in (*earlier, last):
                bears = unit if value == last else ""
                # "one" is as often a pronoun, "second" a unit or a rank, a bare "two" both of them or a pair.
                found.add(*_in_years(value, bears, ordinal), stated=value > 2 or (value == 2 and bool(bears)))
                if value < 6 and not bears and not ordinal:
                    found.counted.add(str(value))
    if not words.isdisjoint(_IN_NAMED_DAYS):
        spelled = small.replace("’", "'")
        for name in [name for name in NAMED_DAYS if name in spelled]:
            month, day = NAMED_DAYS[name]
            found.named[month, day] = frozenset([*name.replace("'s", "").split(), MONTHS[month - 1]])
            found.hinted.add(str(day))
    if not words.isdisjoint(MONTH_OF):
        _find_dates(text, found)
    found.hinted.update(str(roman_value(match[0])) for match in _ROMAN.finditer(text))
    for word in _HINTS.keys() & words:
        found.hinted |= _HINTS[word]
    found.hinted |= _hinted_years(small, found.numbers)
    return found


def _hinted_years(text: str, numbers: Iterable[str]) -> set[str]:
    """Return numbers that words about years stand for: 90s for the 1990s, "the next year" after 2017 for 2018."""
    hinted: set[str] = set()
    for number in numbers:
        if number.endswith("0s"):
            hinted.update({number[-3:]} if len(number) == 5 else {f"{century}{number}" for century in (17, 18, 19, 20)})
    years = [int(number) for number in numbers if len(number) == 4 and number.isdigit()]
    if years and "year" in text:
        if _YEAR_ON.search(text):
            hinted.update(str(year + 1) for year in years)
        if _YEAR_BACK.search(text):
            hinted.update(str(year - 1) for year in years)
    for match in _SOME_DECADES.finditer(text) if "decades" in text or "centuries" in text else ():  # three long decades
        count = int(match["words"]) if match["words"].isdigit() else _spelled([match["words"]])[0]
        hinted.add(str(count * (10 if match["unit"] == "decades" else 100)))
    return hinted


def _find_dates(text: str, found: Quantities) -> None:
    for match in _DATE.finditer(text):
        month = MONTH_OF[(match["month"] or match["month2"]).lower()]
        found.months.add(month)
        found.days.update((month, int(day)) for day in re.findall(r"\d+", match["before"] or match["after"]))
    for match in _MONTH_ALONE.finditer(text):
        month = MONTH_OF[match[0].lower()]
        if match[0] not in _MAYBE_MONTHS or _is_month(text, match):
            found.months.add(month)
        else:
            found.maybe_months.add(month)


def _is_month(text: str, match: re.Match[str]) -> bool:
    """Return whether March or May is a month where it stands."""
    before = text[max(0, match.start() - 8) : match.start()]
    return bool(_YEAR_AFTER.match(text, match.end()) or _BEFORE_MONTH.search(before))


def _unit_after(text: str, end: int, in_digits: bool) -> str:
    """Return the unit that follows a number ending at `end`, or ""."""
    after = _AFTER.match(text, end)
    if after is None:
        return ""
    spelling = after["unit"]
    # A lone letter is a unit behind digits only: "five m" is none, and "1990 v" is a match between teams.
    if len(spelling) == 1 and spelling.isalpha() and not (in_digits and spelling in "mglwv"):
        return ""
    return UNIT_OF[spelling]


def _in_years(value: int | str, unit: str, ordinal: bool) -> tuple[str, str]:
    """Return (number, unit) with decades and centuries as years: eight decades are 80 years, the 8th century is none."""
    years = {"decade": 10, "century": 100}.get(unit)
    if years is None or ordinal or not str(value).isdigit():
        return str(value), unit
    return str(int(value) * years), "year"


def _decimal(match: re.Match[str]) -> str:
    """Return a number in digits as a plain decimal; "1990s" keeps its s."""
    value = Decimal(re.sub(r"[,\u00a0\u202f]", "", match["digits"]))
    scale = match["scale"] or ""
    if scale:
        value *= {"bn": 10**9, "k": 1000}.get(scale) or SCALES[scale]
    return plain(value) + ("s" if match["decade"] else "")


def _spelled(words: list[str]) -> list[int]:
    """Return the numbers that `words` spell: five thousand and two; nineteen ninety-five; two, then three."""
    numbers: list[int] = []
    total = part = 0  # of the number being read: whole thousands, and the rest so far
    room = 0  # a value below this can still be added to `part`
    for word in words:
        scale = SCALES.get(word) or SCALES.get(word.removesuffix("th"))
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


def plain(value: Decimal) -> str:
    """Return `value` without exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text.lstrip("0") or "0"


def compare_quantities(source: Quantities, variant: Quantities, complete: bool) -> tuple[str, str]:
    """Return (reason, detail) of the first disagreement, ("", "") where the two state the same."""
    lost_numbers = source.stated - variant.numbers.keys() - variant.hinted
    if complete and lost_numbers:
        return "number", f"{min(lost_numbers)} is lost"
    new_numbers = variant.stated - source.numbers.keys() - source.hinted
    replaced = source.numbers.keys() - variant.numbers.keys() - variant.hinted
    if new_numbers - variant.counted or (new_numbers and replaced):
        return "number", f"{min(new_numbers)} is not in the source"
    lost = source.months - variant.months - variant.hinted_months if complete else set()
    new = variant.months - source.months - source.hinted_months
    if lost or new:
        month = min(lost or new)
        return "date", f"{MONTHS[month - 1].title()} is {'lost' if lost else 'not in the source'}"
    for month, day in sorted(variant.days - source.days):
        known_days = source.days | source.named.keys()
        if (month, day) not in known_days and any(month == one[0] or day == one[1] for one in known_days):
            return "date", f"{day} {MONTHS[month - 1].title()} is not in the source"
    for number, units in variant.numbers.items():
        # A number that is only hinted at (a decade, a dozen) bears the unit that its word implies, or any.
        known = source.numbers.get(number, {HINTED_UNIT[number]} if number in HINTED_UNIT else units)
        strange = units - known
        if strange and (known or not strange <= source.units | SPANS):
            told = f"with {', '.join(sorted(known))}" if known else "without a unit"
            return "unit", f"{number} {min(strange)}: the source has {number} {told}"
    return "", ""
