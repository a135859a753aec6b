"""The data of each language: its family of scripts, numbers, months, units, common words and
places.

Months, units, places, languages and the decimal sign come from CLDR (through Babel), common words
from wordfreq. languages.yaml adds what both lack: number words, and more spellings of units.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgpack
import yaml

from kinject.language.spelling import MARKS
from kinject.language.units import money_marks, money_unit

Family = Literal["capitals", "nouns", "unspaced", "caseless"]
"""How a language marks names: by capitals; not at all, since every noun has one (German); it has no
spaces between words (Chinese, Japanese, Thai); it has spaces and no capitals (Arabic, Hindi,
Korean)."""

_UNSPACED = frozenset(("zh", "ja", "th", "km", "lo", "my"))
_CASELESS = frozenset(("ar", "he", "fa", "ur", "hi", "bn", "ta", "te", "ka", "am")).union(
    ("ko", "mr", "pa", "gu", "kn", "ml", "si", "ne", "yi")
)
_SCALE = re.compile(rf"0[\s\u00a0](?P<word>[^\W\d_](?:[^\W\d_]|[{MARKS}])+)\.?")
_NUMBER = re.compile(r"[\d\u200e\u200f\u061c\u00a0\u202f]+")
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_table(name: str) -> dict[str, Any]:
    """Return the tables of a YAML file beside this one."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=_SafeLoader)  # noqa: S506 (it is safe)
    return loaded


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    return read_yaml_table("languages")


@lru_cache(maxsize=1)
def shared_units() -> dict[str, str]:
    """Return spelling -> unit, in every language."""
    units: dict[str, str] = {}
    for unit, spellings in _entries()["symbols"].items():
        units |= dict.fromkeys(spellings.split("|"), unit)
    return units


def _family_of(code: str) -> Family:
    if code in ("de", "lb"):
        return "nouns"
    if code in _UNSPACED:
        return "unspaced"
    if code in _CASELESS:
        return "caseless"
    return "capitals"


class Language:
    """The data of one language, each table made at its first use. `code` is its ISO 639-1 code, ""
    for an unknown one."""

    def __init__(self, code: str) -> None:
        self.code = code
        entry = _entries().get(code, {})
        self._entry = entry
        self.joins = frozenset(entry.get("joins", ()))
        self.compound = bool(entry.get("compound"))
        """Whether number words are written as one word."""
        self.ambiguous = frozenset(entry.get("ambiguous", ()))
        """Number words with another, common meaning."""
        self.ordinal = str(entry.get("ordinal", ""))
        self.family = _family_of(code)

    @property
    def is_unspaced(self) -> bool:
        """Whether no spaces part its words."""
        return self.family == "unspaced"

    @property
    def not_checked(self) -> tuple[str, ...]:
        """The checks that are off in this language, for the manifest and the summary."""
        han = self.code in ("zh", "ja")
        checks: tuple[str, ...] = ()
        if han:
            checks = ("names of persons in Chinese characters",)
        elif self.family == "caseless":
            checks = ("names in letters other than Latin",)
        if not self.number_words and not han:
            checks += ("numbers in words",)
        return checks

    @cached_property
    def number_words(self) -> dict[str, int]:
        """Word -> value."""
        return {word: int(value) for value, word in self._pairs("numbers")}

    @cached_property
    def scale_words(self) -> dict[str, int]:
        """Word -> factor: hundred, thousand."""
        return {word: int(value) for value, word in self._pairs("scales")}

    @cached_property
    def fraction_words(self) -> dict[str, int]:
        """Word for a part -> denominator: Drittel, tiers."""
        return {word: int(value) for value, word in self._pairs("fractions")}

    @cached_property
    def one_and_a_half(self) -> frozenset[str]:
        """Words for one and a half: anderthalb."""
        return frozenset(self._entry.get("one_and_a_half", ()))

    @cached_property
    def clock_words(self) -> frozenset[str]:
        """Words of a time of day beside numbers: nach, abends."""
        return frozenset(str(self._entry.get("clock", "")).split())

    @cached_property
    def implied(self) -> dict[str, set[str]]:
        """Word -> numbers that it may stand for: both, a dozen."""
        numbers: dict[str, set[str]] = {}
        for value, word in self._pairs("implied"):
            numbers.setdefault(word, set()).add(value)
        return numbers

    @cached_property
    def vague(self) -> re.Pattern[str]:
        """Words for a quantity without a number: half, the rest, the next year. They may stand for
        a number of another text."""
        words = "|".join(str(self._entry.get("vague", "")).split()) or r"\Z."
        if not self.is_unspaced:
            words = rf"\b(?:{words})\b"
        return re.compile(words, re.IGNORECASE)

    def _pairs(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield (value, word) of a table ``value word word ...; ...``; ~ takes each of the endings,
        _ is a space."""
        for entry in str(self._entry.get(key, "")).split(";"):
            value, *words = entry.split() or [""]
            for word in words:
                endings: Sequence[str] = ("",)
                if word.endswith("~"):
                    endings = self._entry.get("endings", ())
                for ending in endings:
                    yield value, word.removesuffix("~").replace("_", " ") + ending

    @cached_property
    def _locale(self) -> Any:
        """CLDR's data, None for an unknown language."""
        # Babel takes a quarter of a second to import.
        from babel import Locale, UnknownLocaleError

        try:
            return Locale.parse(self.code)
        except (UnknownLocaleError, ValueError):
            return None

    @cached_property
    def digit_scales(self) -> dict[str, int]:
        """Word or abbreviation after a number in digits -> factor: 3 Mio., 654 тысячи."""
        scales = {}
        if self._locale and self.code != "en":
            for forms in self._locale.compact_decimal_formats.values():
                for patterns in forms.values():
                    for factor, pattern in patterns.items():
                        match = _SCALE.fullmatch(pattern.pattern.replace("'", ""))
                        if match:
                            scales[match["word"].lower()] = int(factor)
        # Alone these are no numbers, as TN is a state.
        own = {word: int(value) for value, word in self._pairs("digit_scales")}
        return scales | own | self.scale_words

    @cached_property
    def month_names(self) -> dict[str, int]:
        """Name of a month in lower case -> 1 to 12."""
        return self._months("wide")

    @cached_property
    def months(self) -> dict[str, int]:
        """Name or abbreviation of a month in lower case -> 1 to 12."""
        months = self._months("abbreviated") | self.month_names
        if self.code == "en":
            months["sept"] = 9
        return months

    def _months(self, width: str) -> dict[str, int]:
        if not self._locale:
            return {}
        months = {}
        for number, name in self._locale.months["format"][width].items():
            # 1月 is read as a number before a unit.
            if not name[0].isdigit():
                months[name.lower().rstrip(".")] = number
        return months

    @cached_property
    def decimal_sign(self) -> str:
        """The sign before the decimals."""
        if not self._locale:
            return "."
        return str(self._locale.number_symbols["latn"]["decimal"])

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """Spelling of a unit in lower case -> unit."""
        spellings = dict(shared_units())
        if self.code != "en":
            for unit, word in self._cldr_units():
                if not self._is_spelling(word, unit):
                    continue
                spellings.setdefault(word, unit)
                if self.family == "nouns" and len(word) > 3:  # the dative plural: mit 5 Kilometern
                    spellings.setdefault(f"{word}n", unit)
        for unit, words in self._entry.get("units", {}).items():
            spellings.update(dict.fromkeys(words.split("|"), unit))
        for mark, unit in money_marks().items():
            # "5 Sek." are seconds where they are written so.
            if f"{mark}." not in spellings:
                spellings.setdefault(mark, money_unit(unit))
        for word, unit in list(spellings.items()):
            if "’" in word:
                spellings[word.replace("’", "'")] = unit
        spellings.pop("", None)
        return spellings

    def _is_spelling(self, word: str, unit: str) -> bool:
        """Return whether CLDR's spelling of a unit is taken for it in a text."""
        units = shared_units()
        # "m." is a month in French, and a metre at the end of a sentence; "in" is a German inch,
        # and a preposition.
        if len(word) == 2 and word not in units and word in self.frequent:
            return False
        if self.is_unspaced:
            return True
        return len(word) > 1 and units.get(word.rstrip("."), unit) == unit

    def _cldr_units(self) -> Iterator[tuple[str, str]]:
        """Yield (unit, spelling in lower case)."""
        if self._locale is None:
            return
        from babel.units import UnknownUnitError, format_unit

        for key, unit in _entries()["cldr_units"].items():
            # Slavic languages have other forms after 1, after 2 and after 5.
            for number in (1, 2, 5):
                # CLDR lacks some units in some languages.
                with contextlib.suppress(UnknownUnitError):
                    for length in ("long", "short"):
                        text = format_unit(number, key, length, locale=self._locale)
                        yield unit, _NUMBER.sub("", text).strip().lower()

    @cached_property
    def unit_words(self) -> frozenset[str]:
        """Words of the spellings of units, and of a million and the like."""
        return frozenset(" ".join((*self.unit_of, *self.digit_scales)).split())

    @cached_property
    def places(self) -> frozenset[str]:
        """Countries, languages and large cities, in this language and in lower case."""
        if self._locale is None:
            return frozenset()
        names = [
            name for code, name in self._locale.territories.items() if code not in ("001", "ZZ")
        ]
        names += [name for code, name in self._locale.languages.items() if len(code) == 2]
        names += [zone["city"] for zone in self._locale.time_zones.values() if "city" in zone]
        names += str(self._entry.get("regions", "")).split()
        if self.family in ("capitals", "nouns"):
            # CLDR names a city only where a language has a name of its own for it.
            from babel.core import get_global

            names += [zone.rpartition("/")[2] for zone in get_global("zone_territories")]
        return frozenset(name.casefold() for name in names if len(name) > 1)

    @cached_property
    def demonyms(self) -> dict[str, set[str]]:
        """Country -> its languages, and language -> its countries, as `plain` words: Polonia,
        polaco."""
        if self._locale is None:
            return {}
        from babel.languages import get_official_languages

        related: dict[str, set[str]] = {}
        for territory, country in self._locale.territories.items():
            for code in get_official_languages(territory, de_facto=True):
                language = self._locale.languages.get(code)
                if language:
                    related.setdefault(plain(country), set()).add(plain(language))
                    related.setdefault(plain(language), set()).add(plain(country))
        return related

    @cached_property
    def common(self) -> frozenset[str]:
        """Words of at least one occurrence in a million, in lower case; none for a language without
        a list."""
        return frozenset(_word_list(self.code))

    @cached_property
    def frequent(self) -> frozenset[str]:
        """The 200 most frequent words, which are no names."""
        return frozenset(_word_list(self.code)[:200])

    @cached_property
    def compound_parts(self) -> frozenset[str]:
        """Words of which compounds are made: common ones, of three letters only frequent ones."""
        words = _word_list(self.code)
        return frozenset(
            [word for word in words if len(word) > 3]
            + [word for word in words[:4000] if len(word) == 3]
        )


@lru_cache(maxsize=128)
def language_of(code: str) -> Language:
    """Return the data of a language. One without an entry has names by capitals or by script, and
    numbers in digits."""
    return Language(code)


@lru_cache(maxsize=1)
def languages_with_numbers() -> tuple[str, ...]:
    """Return the codes of the languages whose number words are known."""
    return tuple(code for code, entry in _entries().items() if "numbers" in entry)


@lru_cache(maxsize=16)
def _word_list(code: str) -> list[str]:
    """Return wordfreq's small list, most frequent words first. It is read without importing
    wordfreq, which takes 0.4 s."""
    spec = importlib.util.find_spec("wordfreq")
    if spec is None or spec.origin is None:
        raise ImportError("wordfreq is not installed. Install it: pip install wordfreq")
    # wordfreq has one list for Serbo-Croatian, and Norwegian under Bokmål.
    code = {"hr": "sh", "sr": "sh", "bs": "sh", "no": "nb", "nn": "nb"}.get(code, code)
    path = Path(spec.origin).parent / "data" / f"small_{code}.msgpack.gz"
    if not path.is_file():
        return []
    with gzip.open(path) as file:
        _, *buckets = msgpack.load(file, raw=False)
    return list(chain.from_iterable(buckets))


@lru_cache(maxsize=65536)
def plain(word: str) -> str:
    """Return `word` in lower case without accents, dots and possessive ending."""
    text = word.casefold()
    if not text.isascii():
        text = "".join(
            c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)
        )
    return text.replace("’", "'").replace(".", "").removesuffix("'s").removesuffix("'")


# --- Weekdays and months in short

_SHORT_NAME = re.compile(
    r"\W*(?:(?:in|on|by|since|until|im|am|en|em|le|el)\s)?(?P<name>[^\W\d_]{3,5})[.\s]*",
    re.IGNORECASE,
)
_SHORT_DAYS = {
    "monday": ("mon",),
    "tuesday": ("tue", "tues"),
    "thursday": ("thu", "thur", "thurs"),
    "friday": ("fri",),
}
_OTHER_WORDS = frozenset(("mar", "may", "set", "mag", "gen", "out"))
"""Abbreviations of months that mean something else too, as sat, sun and wed do."""


def is_short_name(written: str, part: str, codes: Sequence[str]) -> bool:
    """Return whether an answer is a weekday or a month of which nothing but the abbreviation is
    written: Tues., in Oct."""
    match = _SHORT_NAME.fullmatch(written)
    # "mon" is French; French months have no capital
    if match is None or (part[:1].isupper() and match["name"].islower()):
        return False
    name, wanted = match["name"].lower(), part.strip(" .").lower()
    if name in _SHORT_DAYS.get(wanted, ()):
        return True
    if name in _OTHER_WORDS:
        return False
    languages = map(language_of, codes)
    return any(
        wanted in language.month_names and language.months.get(name) == language.months[wanted]
        for language in languages
    )
