"""Language profiles: the data of the checks on each language. A new language is one entry in profiles.yaml.

Names of months, units, countries and cities, and the decimal sign, come from CLDR (through Babel), for every language. How
common a word is comes from wordfreq. An entry adds what they lack: number words, words that imply a number, and which
words are names.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import importlib.util
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import msgpack
import yaml

NameRule = Literal["capitals", "nouns", "han", "kana", "latin"]
"""How names are recognized: by a capital inside a sentence; as German does it, where every noun has a capital; in Chinese; in
Japanese; only where they are in Latin letters."""


@dataclass(frozen=True)
class Profile:
    """The data of the checks on one language. `code` is its ISO 639-1 code, "" for an unknown language. `names` is the rule
    for names. `numbers` has number words as ``value word word ...; ...``: a word that ends in ~ takes each of the
    `endings`. `scales` are factors, written alike. `joins` are the words between those of a number; with `compound`, number
    words are written as one word. `added_to` are tens to which French adds 10 to 19. `ambiguous` number words have another,
    common meaning. `implied` has words that imply a number, `vague` patterns of words for a quantity without one (half, the
    rest, the next year); `units` more spellings of units, ``unit: word|word``; `regions` places that CLDR lacks; `generic`
    words that are said to a person or before a name, without accents.
    """

    code: str
    names: NameRule = "capitals"
    numbers: str = ""
    endings: tuple[str, ...] = ()
    scales: str = ""
    joins: tuple[str, ...] = ()
    compound: bool = False
    added_to: tuple[int, ...] = ()
    ambiguous: tuple[str, ...] = ()
    ordinal: str = ""
    implied: str = ""
    vague: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    regions: str = ""
    generic: tuple[str, ...] = ()

    @property
    def checks_off(self) -> tuple[str, ...]:
        """The checks that are off in this language, for the manifest and the summary."""
        off = []
        if not self.code:
            off.append("names are only in doubt")
        elif self.names == "latin":
            off.append("names in letters other than Latin")
        elif self.names in ("han", "kana"):
            off.append("names of persons in Chinese characters")
        if not self.reads_number_words:
            off.append("numbers in words")
        return tuple(off)

    @property
    def reads_number_words(self) -> bool:
        """Whether numbers in words are read."""
        return bool(self.numbers) or self.names in ("han", "kana")

    @cached_property
    def number_words(self) -> dict[str, int]:
        """Word -> value."""
        return {word: int(value) for value, word in self._entries(self.numbers)}

    @cached_property
    def scale_words(self) -> dict[str, int]:
        """Word -> factor."""
        return {word: int(value) for value, word in self._entries(self.scales)}

    @cached_property
    def digit_scales(self) -> dict[str, int]:
        """Word or abbreviation after a number in digits -> factor: 3 Mio., 654 тысячи."""
        if self.code == "en" or self._locale is None:
            return self.scale_words
        scales = {}
        for forms in self._locale.compact_decimal_formats.values():
            for patterns in forms.values():
                for factor, pattern in patterns.items():
                    match = _SCALE.fullmatch(pattern.pattern.replace("'", ""))
                    if match:
                        scales[match["word"].lower()] = int(factor)
        return scales | self.scale_words

    @cached_property
    def unit_words(self) -> frozenset[str]:
        """Words of the spellings of units, and the abbreviations of a million and the like, in lower case."""
        spellings = [*self.unit_of, *self.digit_scales]
        return frozenset(word for spelling in spellings for word in spelling.split() if len(word) > 1)

    @cached_property
    def sorted_words(self) -> list[str]:
        """The common words, without accents, in order."""
        return sorted({without_accents(word) for word in self.common_words})

    def has_stem(self, word: str) -> bool:
        """Return whether `_MIN_FORMS` common words begin as a word without accents does, but for its last three letters."""
        stem = word[: max(5, len(word) - 3)]
        index = bisect.bisect_left(self.sorted_words, stem)
        last_needed = self.sorted_words[index + _MIN_FORMS - 1 : index + _MIN_FORMS]
        return len(stem) > 4 and last_needed != [] and last_needed[0].startswith(stem)

    @cached_property
    def implied_numbers(self) -> dict[str, set[str]]:
        """Word -> numbers that it may replace."""
        numbers: dict[str, set[str]] = {}
        for value, word in self._entries(self.implied):
            numbers.setdefault(word, set()).add(value)
        return numbers

    def _entries(self, text: str) -> Iterator[tuple[str, str]]:
        for entry in filter(None, (part.split() for part in text.split(";"))):
            for word in entry[1:]:
                for ending in self.endings if word.endswith("~") else ("",):
                    yield entry[0], word.removesuffix("~") + ending

    @cached_property
    def _locale(self) -> Any:
        """CLDR's data, None for an unknown language. Babel takes a quarter of a second to import, and English needs none."""
        from babel import Locale, UnknownLocaleError

        try:
            return Locale.parse(self.code)
        except (UnknownLocaleError, ValueError):
            return None

    @cached_property
    def month_names(self) -> dict[str, int]:
        """Name of a month in lower case -> 1 to 12."""
        if self.code == "en":
            return {name: number for number, name in enumerate(_ENGLISH_MONTHS.split(), 1)}
        names = self._locale.months["format"]["wide"] if self._locale else {}
        return {name.lower(): number for number, name in names.items() if not name[0].isdigit()}

    @cached_property
    def months(self) -> dict[str, int]:
        """Name or abbreviation of a month in lower case -> 1 to 12."""
        if self.code == "en":
            return self.month_names | {name[:3]: number for name, number in self.month_names.items()} | {"sept": 9}
        short = self._locale.months["format"]["abbreviated"] if self._locale else {}
        names = {name.lower().rstrip("."): number for number, name in short.items() if not name[0].isdigit()}
        return names | self.month_names

    @cached_property
    def decimal_sign(self) -> str:
        """The sign before the decimals."""
        if self.code == "en" or self._locale is None:
            return "."
        return str(self._locale.number_symbols["latn"]["decimal"])

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """Spelling of a unit in lower case -> unit."""
        spellings = dict(SHARED_UNITS)
        for unit, word in self._cldr_units():
            # "m." is a month in French, and a metre at the end of a sentence; "in" is a German inch, and a preposition.
            if len(word) == 2 and word not in SHARED_UNITS and word in self.frequent_words:
                continue
            if (len(word) > 1 and SHARED_UNITS.get(word.rstrip("."), unit) == unit) or self.names in ("han", "kana"):
                spellings.setdefault(word, unit)
                spellings.setdefault(word.replace("’", "'"), unit)
                if self.names == "nouns" and len(word) > 3:  # the dative plural: mit 5 Kilometern
                    spellings.setdefault(f"{word}n", unit)
        for unit, words in self.units.items():
            spellings.update(dict.fromkeys(words.split("|"), unit))
        spellings.update({word.replace("'", "’"): unit for word, unit in spellings.items() if "'" in word})
        spellings.pop("", None)
        return spellings

    def _cldr_units(self) -> Iterator[tuple[str, str]]:
        """Yield (unit, spelling in lower case) of this language."""
        if self.code == "en" or self._locale is None:
            return
        from babel.units import UnknownUnitError, format_unit

        for key, unit in _CLDR_UNITS.items():
            for number in (1, 2, 5):
                with contextlib.suppress(UnknownUnitError):
                    for text in (
                        format_unit(number, key, "long", locale=self._locale),
                        format_unit(number, key, "short", locale=self._locale),
                    ):
                        yield unit, _NUMBER.sub("", text).strip().lower()

    @cached_property
    def places(self) -> frozenset[str]:
        """Countries, languages and large cities, in this language and in lower case."""
        if self.code == "en" or self._locale is None:
            return frozenset()
        names = [name for code, name in self._locale.territories.items() if code not in ("001", "ZZ")]
        names += [name for code, name in self._locale.languages.items() if len(code) == 2]
        names += [zone["city"] for zone in self._locale.time_zones.values() if "city" in zone]
        names += self.regions.split()
        if self.names in ("capitals", "nouns"):  # CLDR names a city only where a language has a name of its own for it
            from babel.core import get_global

            names += [zone.rpartition("/")[2] for zone in get_global("zone_territories")]
        return frozenset(name.casefold() for name in names if len(name) > 1)

    @cached_property
    def demonyms(self) -> dict[str, set[str]]:
        """Country -> its languages, and language -> its countries, in lower case: Polonia, polaco."""
        if self._locale is None:
            return {}
        from babel.languages import get_official_languages

        related: dict[str, set[str]] = {}
        for territory, country in self._locale.territories.items():
            for code in get_official_languages(territory, de_facto=True):
                language = self._locale.languages.get(code)
                if language:
                    related.setdefault(country.lower(), set()).add(language.lower())
                    related.setdefault(language.lower(), set()).add(country.lower())
        return related

    @property
    def common_words(self) -> frozenset[str]:
        """Words of at least one occurrence in a million, in lower case; none for a language without a list."""
        return common_words(self.code)

    @cached_property
    def frequent_words(self) -> frozenset[str]:
        """The 200 most frequent words, which are no names; none in English, which has a list of such words."""
        return frozenset(() if self.code == "en" else frequent_words(self.code)[:200])


@lru_cache(maxsize=16)
def common_words(code: str) -> frozenset[str]:
    """Return the words of a language that occur at least once in a million, in lower case, () without a list of them."""
    return frozenset(frequent_words(code))


def frequent_words(code: str) -> list[str]:
    """Return wordfreq's small list, most frequent words first. It is read without importing wordfreq, which takes 0.4 s."""
    spec = importlib.util.find_spec("wordfreq")
    if spec is None or spec.origin is None:
        raise ImportError("wordfreq is not installed. Install kinject again: pip install kinject")
    code = {"hr": "sh", "sr": "sh", "bs": "sh", "no": "nb", "nn": "nb"}.get(code, code)
    path = Path(spec.origin).parent / "data" / f"small_{code}.msgpack.gz"
    if not path.is_file():
        return []
    with gzip.open(path) as file:
        _, *buckets = msgpack.load(file, raw=False)
    return [word for bucket in buckets for word in bucket]


def without_accents(word: str) -> str:
    """Return a word without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", word) if not unicodedata.combining(c))


_ENGLISH_MONTHS = "january february march april may june july august september october november december"
_MIN_FORMS = 3
"""A verb or a noun has so many common forms; a name has fewer."""
_SCALE = re.compile(r"0[\s\u00a0](?P<word>[^\W\d_]{2,})\.?")
_NUMBER = re.compile(r"[\d\u200e\u200f\u061c\u00a0\u202f]+")
_CLDR_UNITS = {
    "length-kilometer": "km", "length-meter": "m", "length-centimeter": "cm", "length-millimeter": "mm",
    "length-mile": "mile", "length-foot": "foot", "length-inch": "inch", "length-yard": "yard", "mass-kilogram": "kg",
    "mass-gram": "g", "mass-milligram": "mg", "mass-tonne": "tonne", "mass-metric-ton": "tonne", "mass-pound": "lb",
    "mass-ounce": "oz", "volume-liter": "litre", "volume-milliliter": "ml", "area-hectare": "hectare", "area-acre": "acre",
    "area-square-kilometer": "km2", "area-square-mile": "mile2", "area-square-meter": "m2", "area-square-foot": "foot2",
    "temperature-celsius": "celsius", "temperature-fahrenheit": "fahrenheit", "speed-kilometer-per-hour": "km/h",
    "speed-mile-per-hour": "mph", "duration-millisecond": "millisecond", "duration-second": "second",
    "duration-minute": "minute", "duration-hour": "hour", "duration-day": "day", "duration-week": "week",
    "duration-month": "month", "duration-year": "year", "duration-decade": "decade", "duration-century": "century",
    "frequency-hertz": "hz", "frequency-kilohertz": "khz", "frequency-megahertz": "mhz", "frequency-gigahertz": "ghz",
    "power-watt": "w", "power-kilowatt": "kw", "power-megawatt": "mw", "power-gigawatt": "gw",
    "electric-volt": "volt", "digital-byte": "byte", "digital-kilobyte": "kb", "digital-megabyte": "mb",
    "digital-gigabyte": "gb", "digital-terabyte": "tb", "concentr-percent": "%",
    "volume-cubic-meter": "m3", "volume-centiliter": "cl", "volume-deciliter": "dl",
    "energy-kilowatt-hour": "kwh", "energy-kilocalorie": "kcal", "energy-kilojoule": "kj",
}  # fmt: skip
"""CLDR's name of a unit -> ours."""

_SYMBOLS_OF_UNITS = {
    "km": "km", "m": "m", "cm": "cm", "mm": "mm", "kg": "kg", "g": "g", "mg": "mg", "litre": "l", "ml": "ml", "cl": "cl",
    "dl": "dl", "kwh": "kwh", "kcal": "kcal", "kj": "kj",
    "hectare": "ha", "km2": "km²|km2", "m2": "m²|m2", "m3": "m³|m3", "celsius": "°c|° c", "fahrenheit": "°f|° f", "degree": "°",
    "km/h": "km/h|kmh", "mph": "mph", "millisecond": "ms", "second": "s|sec", "minute": "min",
    "hour": "h", "hz": "hz", "khz": "khz", "mhz": "mhz", "ghz": "ghz", "w": "w",
    "kw": "kw", "mw": "mw", "gw": "gw", "volt": "v", "kb": "kb", "mb": "mb", "gb": "gb", "tb": "tb", "%": "%|％",
    "dollar": "dollar|dollars|usd|$|dólar|dólares|dollari|us-dollar|美元|ドル", "sterling": "gbp|£",
    "euro": "euro|euros|eur|€|欧元|ユーロ", "yen": "yen|jpy|日元|円|yens", "yuan": "yuan|cny|元|人民币|元人民币",
}  # fmt: skip
SHARED_UNITS = {spelling: unit for unit, text in _SYMBOLS_OF_UNITS.items() for spelling in text.split("|")}
"""Spelling -> unit, in every language."""
MONEY = frozenset(("dollar", "sterling", "euro", "yen", "yuan", "franc", "livre", "rupee"))
"""Units of money."""


_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The quick one, where PyYAML has it."""


def read_words(name: str) -> dict[str, Any]:
    """Return the tables of a YAML file beside this one."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=_SafeLoader)  # noqa: S506 (it is safe)
    return loaded


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    return read_words("profiles")


@lru_cache(maxsize=256)
def profile_of(code: str) -> Profile:
    """Return the profile of a language. A language without an entry has names by capitals, and digits."""
    entry: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in _entries().get(code, {}).items()
    }
    return Profile(code, **entry)


_NUMERALS = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}


def roman_value(numeral: str) -> int:
    """Return the value of a Roman numeral of kings, popes, wars and centuries (2 to 89), 0 for other text."""
    numeral = numeral.lower()
    if not 2 <= len(numeral) <= 8 or not set(numeral) <= _NUMERALS.keys():
        return 0
    values = [_NUMERALS[letter] for letter in numeral]
    value = sum(-digit if digit < after else digit for digit, after in zip(values, [*values[1:], 0], strict=True))
    return value if value < 90 else 0


WIDE_LETTER = re.compile("[\u0590-\u06ff\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_AFTER = re.compile(
    r"[\s\-\u00a0\u202f]{0,2}(?P<unit>[A-Za-z]+(?=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af])|[^\W\d_]+[.²23]?"
    r"|[°%％€$£¥℃][^\W\d_]?)"
)


class Grammar:
    """How a language writes numbers, dates and units: patterns made from its profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.unspaced = profile.names in ("han", "kana")
        self.values = profile.number_words
        self.scales = profile.scale_words
        self.units = profile.unit_of
        self._starts: dict[str, list[str]] = {}
        for spelling in sorted(self.units, key=len, reverse=True):
            start = _AFTER.match(spelling)
            self._starts.setdefault(start["unit"] if start else spelling, []).append(spelling)
        comma = profile.decimal_sign == ","
        group, mark = (r".\u00a0\u202f ٬'’", ",") if comma else (r",\u00a0\u202f'’٬", ".")
        self.digit_scales = profile.digit_scales
        scales = "|".join(sorted(map(re.escape, self.digit_scales), key=len, reverse=True)) or r"\Z."
        decade = r"s\b" if profile.code == "en" else r"\Z."
        self.number = re.compile(
            rf"(?P<iso>\d{{4}}-\d\d-\d\d\b)|(?P<digits>\d{{1,3}}(?:[{group}]\d{{3}})+(?:[{mark}٫]\d+)?(?!\d)"
            rf"|\d+(?:[{'.,' if comma else '.'}٫]\d+)?)(?P<decade>{decade})?"
            rf"(?P<ordinal>{profile.ordinal or chr(92) + 'Z.'})?(?:\s?(?P<scale>{scales}|k)\b(?:\.(?=\s))?)?"
        )
        words = [*self.values, *self.scales]
        joins = "|".join(profile.joins) or r"\Z."
        any_word = "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or r"\Z."
        self._numbers = frozenset(words)
        self._compound = re.compile(f"(?:{any_word}|{joins})+")
        # One word is a number word or, in languages that write them together, several.
        number_word = f"(?:{any_word})" + (f"(?:(?:{joins})?(?:{any_word}))*" if profile.compound else "")
        between = rf"(?:\s+|-|\s+(?:{joins})\s+|-(?:{joins})-)"
        self.number_in_words = re.compile(rf"{number_word}(?:{between}{number_word})*\b")
        self.units_with_numbers = [s for s in self.units if " " in s and not set(s.split()).isdisjoint(words)]
        vague = "|".join(profile.vague.split()) or r"\Z."
        self.vague = re.compile(vague if self.unspaced else rf"\b(?:{vague})\b")
        self._known: dict[str, bool] = dict.fromkeys(words, True)
        day = r"\d{1,2}(?:st|nd|rd|th|er|\.?[ºª°]|\.)?"
        days = rf"(?P<days>{day}(?:\s*(?:,|and|or|to|&|[-–—]|und|bis|et|au|y|al|e|a)\s*{day}){{0,3}})"
        self.day_before = re.compile(rf"\b{days}\s*(?:of\s+|de\s+|del\s+|d[’'])?\Z", re.IGNORECASE)
        # "March 3" is English order; "mars 3" is not French.
        after = rf"\.?\s+(?:the\s+)?{days}(?!\d|:\d|\.\d|,\d{{3}})"
        self.day_after = re.compile(after if profile.code == "en" else r"\Z.", re.IGNORECASE)

    def number_words_in(self, words: Iterable[str]) -> list[str]:
        """Return those of `words` (in lower case) that are numbers."""
        known = self._known
        if not self.profile.compound:
            return [word for word in words if word in known]
        numbers = []
        for word in words:
            if word not in known:
                if len(known) > 100_000:
                    known.clear()
                known[word] = bool(self._compound.fullmatch(word)) and word not in self.profile.joins
            if known[word]:
                numbers.append(word)
        return numbers

    def unit_after(self, text: str, end: int, in_digits: bool) -> str:
        """Return the unit after a number that ends at index `end`, or ""."""
        if self.unspaced:
            start = end + (text[end : end + 1] == " ")
            return next(
                (self.units[text[start : start + n]] for n in range(6, 0, -1) if text[start : start + n] in self.units),
                "",
            )
        after = _AFTER.match(text, end)
        if after is None:
            return ""
        start = after.start("unit")
        for spelling in self._starts.get(after["unit"], ()) or self._starts.get(after["unit"].rstrip(".23"), ()):
            if text.startswith(spelling, start):
                following = text[start + len(spelling) : start + len(spelling) + 1]
                if (following.isalnum() and not WIDE_LETTER.match(following)) or following == "°":
                    continue
                # A single letter is a unit after digits only ("five m" is not), and "1990 v" is a match between teams.
                if (
                    len(spelling) == 1
                    and spelling.isalpha()
                    and spelling.isascii()
                    and not (in_digits and spelling in "mglwvhs")
                ):
                    continue
                return self.units[spelling]
        return ""

    def parse_words(self, text: str) -> list[int]:
        """Return the numbers in words: five thousand and two; nineteen ninety-five; two, then three; dreiundzwanzig."""
        numbers: list[int] = []
        if self.profile.code == "en" and len(parts := _ENGLISH_AND.split(text)) > 1:  # thirteen and seventeen
            return [number for clause in parts for number in self.parse_words(clause)]
        total = part = 0  # of the current number: whole thousands, and the rest so far
        room = 0  # a value below this can be added to `part`
        started = False
        for word in self._morphemes(text):
            scale, value = self.scales.get(word), self.values.get(word, 0)
            if scale == 100:
                part, room, started = (part or 1) * 100, 100, True
            elif scale:
                if part == 0 and total and scale > total:  # mil millones
                    total *= scale
                else:
                    total += (part or 1) * scale
                part, room, started = 0, scale, True
            elif 0 < value < room:
                part += value
                room = 10 if value == 10 and self.profile.added_to else self._room(value)  # quatre-vingt-dix-huit
            elif value == 20 and part % 100 == 4 and self.profile.code == "fr":  # quatre-vingt
                part, room = part - 4 + 80, 20
            elif value >= 20 and value % 10 == 0 and 0 < part % 100 < 10 and self.profile.compound and started:
                part += value  # drei-und-zwanzig
                room = 0
            elif total == 0 and 10 <= part < 100 and value >= 10 and self.profile.code == "en":  # nineteen ninety
                part, room = part * 100 + value, self._room(value)
            else:
                if started:
                    numbers.append(total + part)
                total, part, room, started = 0, value, self._room(value), True
        return [*numbers, total + part]

    def _room(self, value: int) -> int:
        if value in self.profile.added_to:
            return 20
        return 100 if value >= 100 else 10 if value >= 20 else 0

    def _morphemes(self, text: str) -> Iterator[str]:
        for word in re.split(r"[\s-]+", text):
            if word in self.values or word in self.scales:
                yield word
            elif word not in self.profile.joins:
                yield from self._parts(word)

    def _parts(self, word: str) -> list[str]:
        """Return the number words of which a word is made, [] if it is not: cent-ottanta-tré."""
        for head in (word[:size] for size in range(len(word) - 1, 1, -1)):
            if (head in self._numbers or head in self.profile.joins) and (rest := self._parts(word[len(head) :])):
                return [head, *rest] if head in self._numbers else rest
        return [word] if word in self._numbers else []


_ENGLISH_AND = re.compile(r"(?<!hundred)(?<!thousand)(?<!million)(?<!billion)\s+and\s+")


@lru_cache(maxsize=128)
def grammar_of(code: str) -> Grammar:
    """Return the grammar of a language."""
    return Grammar(profile_of(code))
