"""Units of measure and currencies behind a number, as written answers have them.

Capitals tell units apart (5 mW is not 5 MW), prefixes and powers are read (nm, cm³, kilohms), and
units may be joined (m/s, metres per second). A unit gets the name that `kinject.language.tables`
gives it, if it has one there, so that both ways of reading agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

_PREFIXES = {
    "pico": "p",
    "nano": "n",
    "micro": "μ",
    "milli": "m",
    "centi": "c",
    "deci": "d",
    "hecto": "h",
    "kilo": "k",
    "mega": "M",
    "giga": "G",
    "tera": "T",
    "peta": "P",
}
_BASES: Mapping[str, tuple[str, str]] = {
    # symbol: its words, the prefixes that it is used with
    "m": ("metre metres meter meters", "nμmcdkM"),
    "g": ("gram grams gramme grammes", "nμmkM"),
    "l": ("litre litres liter liters", "μmcdh"),
    "L": ("", "μmcdh"),
    "t": ("", ""),
    "s": ("second seconds", "pnμm"),
    "A": ("ampere amperes amp amps", "nμmk"),
    "K": ("kelvin kelvins", "μmk"),
    "mol": ("mole moles", "nμmk"),
    "Hz": ("hertz", "mkMGT"),
    "N": ("newton newtons", "μmkM"),
    "Nm": ("", "k"),
    "Pa": ("pascal pascals", "μmhkMG"),
    "J": ("joule joules", "μmkMGT"),
    "W": ("watt watts", "nμmkMGT"),
    "V": ("volt volts", "nμmkM"),
    "F": ("farad farads", "pnμm"),
    "Ω": ("ohm ohms", "mkMG"),
    "T": ("tesla teslas", "nμm"),
    "lx": ("lux", ""),
    "lm": ("lumen lumens", ""),
    "Bq": ("becquerel becquerels", "kMGT"),
    "Sv": ("sievert sieverts", "nμm"),
    "Gy": ("gray grays", "μm"),
    "B": ("byte bytes", "kMGTP"),
    "b": ("bit bits", "MGTP"),
    "bit": ("", "kMGTP"),
    "eV": ("electronvolt electronvolts", "mkMGT"),
    "Wh": ("watt-hour watt-hours", "μmkMGT"),
    "cal": ("calorie calories", "k"),
    "bar": ("bars", "mk"),
    "bp": ("", "kMG"),
    "dB": ("decibel decibels", ""),
}
_NAMES = {
    "l": "litre",
    "L": "litre",
    "t": "tonne",
    "s": "second",
    "ms": "millisecond",
    "Hz": "hz",
    "kHz": "khz",
    "MHz": "mhz",
    "GHz": "ghz",
    "W": "w",
    "kW": "kw",
    "MW": "mw",
    "GW": "gw",
    "V": "volt",
    "B": "byte",
    "kB": "kb",
    "MB": "mb",
    "GB": "gb",
    "TB": "tb",
    "kWh": "kwh",
    "kJ": "kj",
}
"""Symbol -> the name of the unit in languages.yaml, where it is another."""
_OTHERS = {
    "pct": "%",
    "bpm": "beat/minute",
    "beats": "beat",
    "rpm": "revolution/minute",
    "revolutions": "revolution",
    "rotations": "revolution",
    "ly": "light-year",
    **dict.fromkeys(("lightyear", "lightyears", "light-year", "light-years"), "light-year"),
    **dict.fromkeys(("nmi", "nautical-mile", "nautical-miles"), "nautical mile"),
    **dict.fromkeys(("astronomical-unit", "astronomical-units"), "AU"),
    **dict.fromkeys(("angstrom", "angstroms", "ångström", "ångströms"), "Å"),
    **dict.fromkeys(("mmhg", "mm-hg"), "mmHg"),
    "mcg": "μg",
    "stone": "stone",
    "hp": "horsepower",
    "horsepower": "horsepower",
    "ppm": "ppm",
    "psi": "psi",
    # Money or a weight: `amounts` lets it say either.
    "pound": "pound",
    "pounds": "pound",
}
_JOINED = {"km/hour": "km/h", "mile/hour": "mph"}
"""Units of two that languages.yaml has as one."""
_LONE = frozenset("AKNJTBL")
"""Symbols of one letter that are a name where no space is before them: 4A, 5G."""
_MONEY: Mapping[str, tuple[str, str]] = {
    # unit: signs and codes, before or behind a number; names behind it
    "dollar": ("$ us$ usd", "bucks"),
    "euro": ("€ eur", ""),
    "sterling": ("£ gbp", "quid"),
    "penny": ("", "p,pence,penny"),
    "cent": ("¢", "cent,cents"),
    "yen": ("¥ jpy", ""),
    "yuan": ("cny rmb", "renminbi"),
    "rupee": ("₹ inr rs rs.", ""),
    "won": ("₩ krw", "won"),
    "rouble": ("₽ rub", ""),
    "lira": ("₺", "lira,liras,lire"),
    "shekel": ("₪ ils", "shekel,shekels"),
    "naira": ("₦ ngn", "naira"),
    "hryvnia": ("₴ uah", "hryvnia,hryvnias"),
    "dong": ("₫ vnd", "dong"),
    "peso": ("₱ mxn", "peso,pesos"),
    "baht": ("฿ thb", "baht"),
    "bitcoin": ("₿ btc", "bitcoin,bitcoins"),
    "zloty": ("zł pln", "zloty,zlotys,złoty,złote,złotych"),
    "krona": ("sek", "krona,kronor,swedish kronor"),
    "norwegian krone": ("nok", "norwegian kroner"),
    "danish krone": ("dkk", "danish kroner"),
    "koruna": ("kč czk", "koruna,korun,koruny"),
    "forint": ("huf", "forint,forints"),
    "real": ("r$ brl", "real,reais"),
    "rand": ("zar", "rand"),
    "franc": ("chf", "swiss franc,swiss francs"),
    "a$": ("a$ aud", "australian dollar,australian dollars"),
    "c$": ("c$ ca$ cad", "canadian dollar,canadian dollars"),
    "nz$": ("nz$ nzd", "new zealand dollar,new zealand dollars"),
    "hk$": ("hk$ hkd", "hong kong dollar,hong kong dollars"),
    "s$": ("s$ sgd", "singapore dollar,singapore dollars"),
}
_LETTERS = re.compile(
    r"[^\W\d_]*watt[ -]hours?\b|light[ -]years?\b|nautical[ -]miles?\b|astronomical units?\b"
    r"|mm Hg\b|[^\W\d_]+"
)
_LONGEST_NAME = 40
"""Characters; New Zealand dollars has 19."""
_GAP = re.compile(r"[\s-]{0,2}")
_POWER_BEFORE = re.compile(r"(?:(?P<square>square|sq\.?)|cubic|cu\.?)\s", re.IGNORECASE)
_POWER_AFTER = re.compile(r"\^?(?P<digit>[23])(?![\d.])|\s(?:(?P<square>squared)|cubed)\b")
_WORD_GOES_ON = re.compile(r"['-]\w")
_PER = re.compile(r"\s?/\s?(?=[^\W\d_])|\sper\s")


@lru_cache(maxsize=1)
def _symbols() -> dict[str, str]:
    """Return symbol, with its capitals -> unit."""
    units = {}
    for base, (_, prefixes) in _BASES.items():
        for prefix in ("", *prefixes):
            symbol = prefix + base
            # 98 F is a temperature
            if symbol == "F":
                continue
            units[symbol] = _NAMES.get(symbol, symbol)
            if prefix == "μ":
                units[f"u{base}"] = symbol
    # These differ from the symbol of the same unit by one letter.
    for prefix in "mcdhμ":
        units[f"{prefix}L"] = units[f"{prefix}l"]
    for prefix in "MGTP":
        units[f"{prefix}bit"] = f"{prefix}b"
        units[f"{prefix}bps"] = f"{prefix}b/second"
    units |= {"kbps": "kbit/second", "bit": "b"}
    # Not kN, a force.
    units["kn"] = "knot"
    units |= {"AU": "AU", "Å": "Å"}
    return units


@lru_cache(maxsize=1)
def _words() -> dict[str, str]:
    """Return word, or a symbol that only one unit has whatever its capitals -> unit."""
    symbols, units = _symbols(), dict(_OTHERS)
    lower: dict[str, set[str]] = {}
    for symbol, unit in symbols.items():
        lower.setdefault(symbol.lower(), set()).add(unit)
    for spelling, found in lower.items():
        if len(spelling) > 1 and len(found) == 1:
            units[spelling] = next(iter(found))
    for base, (words, _) in _BASES.items():
        for word in words.split():
            units[word] = symbols.get(base, base)
            for name, prefix in _PREFIXES.items():
                symbol = prefix + base
                # The kb is a kilobyte.
                if symbol == "kb":
                    symbol = "kbit"
                units[name + word] = symbols.get(symbol, symbol)
                # kilohms
                if name[-1] in "ao" and word[0] == "o":
                    units[name[:-1] + word] = symbols.get(symbol, symbol)
    return units


@lru_cache(maxsize=1)
def money_marks() -> dict[str, str]:
    """Return sign or code of a currency, in lower case -> unit."""
    units: dict[str, str] = {}
    for unit, (marks, _) in _MONEY.items():
        units.update(dict.fromkeys(marks.split(), unit))
    return units


def money_unit(unit: str) -> str:
    """Return the unit of a currency as a text may have it in other words: A$5 is $5, too."""
    if unit.endswith("$"):
        return "dollar"
    return unit


@lru_cache(maxsize=1)
def _money() -> dict[str, str]:
    """Return sign, code or name of a currency, in lower case -> unit."""
    spellings = dict(money_marks())
    for unit, (_, names) in _MONEY.items():
        spellings.update(dict.fromkeys(filter(None, names.split(",")), unit))
    return spellings


@lru_cache(maxsize=1)
def _money_behind() -> re.Pattern[str]:
    return re.compile(rf"\s?(?P<money>{any_of(_money())})(?!\w)")


def any_of(spellings: Iterable[str]) -> str:
    """Return the pattern of any of `spellings`, a long one before one that it begins with."""
    return "|".join(sorted(map(re.escape, spellings), key=len, reverse=True))


def unit_at(folded: str, start: int, others: Mapping[str, str]) -> tuple[str, int]:
    """Return the unit behind a number that ends at `start`, and where the unit ends; ("", `start`)
    without one.

    `others`: more units of the text's language, by their spellings in lower case.
    """
    # A slice: the whole of a long text would be lowered once a number.
    behind = folded[start : start + _LONGEST_NAME]
    money = _money_behind().match(behind.lower())
    # German seconds are no Swedish kronor.
    if money and behind[slice(*money.span("money"))] != "Sek":
        return _money()[money["money"]], start + money.end()
    at = start
    gap = _GAP.match(folded, start)
    if gap:
        at = gap.end()
    unit, end = _power_of_unit(folded, at, others, is_apart=at > start)
    if not unit:
        return "", start
    return with_divisor(unit, folded, end, others)


def with_divisor(unit: str, folded: str, end: int, others: Mapping[str, str]) -> tuple[str, int]:
    """Return a unit that ends at `end` with that by which it is divided (m/s, metres per second),
    and where that ends."""
    per = _PER.match(folded, end)
    if per is None or "/" in unit:
        return unit, end
    divisor, divisor_end = _power_of_unit(folded, per.end(), others, is_apart=True)
    if not divisor:
        return unit, end
    name = f"{unit}/{divisor}"
    return _JOINED.get(name, name), divisor_end


def _power_of_unit(
    folded: str, at: int, others: Mapping[str, str], *, is_apart: bool
) -> tuple[str, int]:
    """Return a unit with its power (cm3, square metre), and where it ends; ("", `at`) without
    one."""
    before = _POWER_BEFORE.match(folded, at)
    start = at
    if before:
        start = before.end()
    word = _LETTERS.match(folded, start)
    unit = ""
    if word:
        unit = _named(word[0], others, is_apart=is_apart)
    if word is None or not unit:
        return "", at
    end = word.end()
    if before:
        return unit + _power(before), end
    after = _POWER_AFTER.match(folded, end)
    if after:
        return unit + (after["digit"] or _power(after)), after.end()
    # a symbol of one letter may be the beginning of a word: 5 t-shirts
    if _WORD_GOES_ON.match(folded, end) and len(word[0]) == 1:
        return "", at
    if re.match(r"\w", folded[end : end + 1]):
        return "", at
    return unit, end


def _power(match: re.Match[str]) -> str:
    if match["square"]:
        return "2"
    return "3"


def _named(word: str, others: Mapping[str, str], *, is_apart: bool) -> str:
    """Return the unit of a symbol or a word, "" for another word."""
    if word in _LONE and not is_apart:
        return ""
    unit = _symbols().get(word) or _words().get(word.lower().replace(" ", "-"))
    if unit is None and len(word) > 1:
        unit = others.get(word.lower())
    return unit or ""
