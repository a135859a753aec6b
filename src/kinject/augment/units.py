"""English words for numbers, months and units."""

from __future__ import annotations

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

_HINTS: dict[str, tuple[str, ...]] = {
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
    for value, words in _HINTS.items():
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
