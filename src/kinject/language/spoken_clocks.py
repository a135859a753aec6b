"""Times of day in words, in the orders in which languages have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from kinject.language.amounts import HALF_A_DAY, Clock, Number, Value
from kinject.language.moments import (
    HALF,
    PART_OF_DAY,
    SMALL,
    Reader,
    clock_of,
    hour_of,
    on_dial,
)
from kinject.language.units import any_of

# --- English: seven thirty, nine oh five

_ONES = "|".join(SMALL[1:10])
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_HOUR_AND_MINUTE = re.compile(
    rf"(?<![\w.,:-])(?P<hour>{'|'.join(SMALL[1:])})\s(?:oh[ -](?P<late>{_ONES})"
    rf"|(?P<minute>{_TEENS}|(?:twenty|thirty|forty|fifty)(?:[ -](?:{_ONES}))?))"
    rf"(?![\w'-]|[.,:/]\w|\s(?:hundred|[a-z]+illion|thousand)){HALF}?"
)
_WORD_BEFORE = re.compile(r"([^\W\d_]+)[\s-]\Z")


def _take_hour_and_minute(reader: Reader, match: re.Match[str]) -> None:
    """Take seven thirty; twelve fifteen may be a year too."""
    grammar = reader.grammar
    before = _WORD_BEFORE.search(reader.before(match.start()))
    # "two hundred seven thirty" is no time of day, nor "seven thirty kilo bags"
    is_longer = before is not None and grammar.is_number(before[1])
    if is_longer or grammar.unit_spelled_after(reader.rest, match.end(), False)[0]:
        return
    minute = int(grammar.parse_words(match["late"] or match["minute"])[-1])
    clock = clock_of(match, 60 * hour_of(match) + minute)
    if clock is None:
        return
    numbers = []
    if match["minute"] and not clock.has_half:
        words = reader.rest[match.start() : match.end("minute")]
        numbers = [Number(Fraction(value)) for value in grammar.parse_words(words)]
    if len(numbers) == 1:
        reader.take(*match.span(), clock, *numbers)
    else:
        reader.take(*match.span(), clock, parts=numbers)


# --- Times of day in words: halb drei is half past two, kwart voor tien a quarter to ten


@dataclass(frozen=True)
class _ClockWords:
    """The words of a language: `before` have the minutes by which a time precedes the hour that it
    names, `sides` the sign of minutes."""

    hours: tuple[str, ...]
    minutes: Mapping[str, int]
    before: Mapping[str, int]
    sides: Mapping[str, int]
    hour_unit: str


_OF_LANGUAGE = {
    "de": _ClockWords(
        (
            *("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
            *("zehn", "elf", "zwölf"),
        ),
        {"viertel": 15, "fünf": 5, "zehn": 10, "zwanzig": 20},
        {"viertel": 45, "halb": 30, "dreiviertel": 15, "drei viertel": 15},
        {"vor": -1, "nach": 1},
        "uhr",
    ),
    "nl": _ClockWords(
        (
            *("een", "twee", "drie", "vier", "vijf", "zes", "zeven", "acht", "negen"),
            *("tien", "elf", "twaalf"),
        ),
        {"kwart": 15, "vijf": 5, "tien": 10, "twintig": 20},
        {"half": 30},
        {"voor": -1, "over": 1},
        "uur",
    ),
}


@lru_cache(maxsize=2)
def _beside_hour(code: str) -> re.Pattern[str]:
    """Return the pattern of Viertel vor acht, fünf nach halb drei, halb neun, 3 Minuten vor 12."""
    words = _OF_LANGUAGE[code]
    minutes = rf"(?P<minutes>{any_of(words.minutes)}|\d{{1,2}}(?=\smin))(?:\sminut(?:en?)?)?"
    shift = rf"{minutes}\s(?P<side>{any_of(words.sides)})\s"
    before = any_of(words.before)
    hour = rf"(?P<hour>{any_of(words.hours)}|\d{{1,2}})(?!\w|[.,:/-]\w)"
    end = rf"(?P<unit>\s{words.hour_unit}\b)?(?:{PART_OF_DAY})?"
    return re.compile(
        rf"(?<![\w.,:])(?:{shift}(?:(?P<before>{before})\s)?|(?P<alone>{before})\s){hour}{end}"
    )


@lru_cache(maxsize=2)
def _whole_hour(code: str) -> re.Pattern[str]:
    """Return the pattern of acht Uhr, acht Uhr fünfzehn, acht Uhr abends."""
    word = r"[^\W\d_]+"
    return re.compile(
        rf"(?<!\w)(?P<hour>{word})\s{_OF_LANGUAGE[code].hour_unit}\b"
        rf"(?:{PART_OF_DAY}|\s(?P<minute>{word}))?"
    )


# --- Times of day beside the hour: las siete y media, huit heures moins le quart

_WORD = r"\d{1,2}|[^\W\d_]+(?:-[^\W\d_]+)*"
_PARTS_OF_DAY = (
    r"(?:\s(?P<part>(?:du|de|de la|del|di|da|della)\s"
    r"(?:matin|soir|l'après-midi|mañana|tarde|noche|mattino|mattina|sera|pomeriggio|manhã|noite)))?"
)
_LATER = ("soir", "après-midi", "tarde", "noche", "sera", "pomeriggio", "noite")
_BESIDE_HOUR = {
    "fr": rf"(?P<hour>midi|minuit|(?:{_WORD})(?=\sheures?))(?:\sheures?)?"
    rf"(?:\set\s(?P<more>demie?|quart)|\smoins\s(?:le\s)?(?P<less>{_WORD})|\s(?P<minute>{_WORD}))",
    "es": rf"las?\s(?P<hour>{_WORD})(?:\sy\s(?P<more>(?:{_WORD})(?:\sy\s\w+)?)"
    rf"|\smenos\s(?P<less>{_WORD}))",
    "it": rf"(?:(?:al)?le\s|(?:al)?l')(?P<hour>{_WORD})"
    rf"(?:\se\s(?:un\s)?(?P<more>{_WORD})|\smeno\s(?:un\s)?(?P<less>{_WORD}))",
    "pt": rf"(?:[aà]s?\s)(?P<hour>{_WORD})\se\s(?P<more>{_WORD})",
}
"""In Spanish, Italian and Portuguese the article tells hours from numbers: siete y media is 7.5."""
_NAMED_HOURS = {"midi": 12, "minuit": 0}
_NAMED_PARTS = {
    **dict.fromkeys(("demi", "demie", "media", "mezza", "mezzo", "meia"), 30),
    **dict.fromkeys(("quart", "cuarto", "quarto"), 15),
}


@lru_cache(maxsize=4)
def _minutes_beside(code: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.,:'-]){_BESIDE_HOUR[code]}(?![\w:]|[.,]\d){_PARTS_OF_DAY}")


def _take_minutes_beside(reader: Reader, match: re.Match[str]) -> None:
    parts = match.groupdict()
    written = parts["more"] or parts.get("less") or parts.get("minute") or ""
    hour, minutes = _small_number(reader, match["hour"]), _small_number(reader, written)
    hour = _NAMED_HOURS.get(match["hour"], hour)
    minutes = _NAMED_PARTS.get(written, minutes)
    if not 0 <= hour < 24 or not 0 < minutes < 60:
        return
    # "las dos y tres islas" are no time of day
    if minutes < 20 and minutes % 5:
        return
    if parts.get("less"):
        minutes = -minutes
    part = parts["part"] or ""
    clock = Clock((60 * hour + minutes) % (2 * HALF_A_DAY))
    if part:
        name = "morning"
        if part.endswith(_LATER):
            name = "evening"
        clock = on_dial(clock.minutes, name)
    # "sept heures et demie" is as long a time too.
    readings: list[Value] = [clock]
    if reader.grammar.language.code == "fr" and minutes == 30 and not part:
        readings.append(Number(hour + Fraction(1, 2), "hour", digits=written))
    reader.take(*match.span(), *readings)


def _small_number(reader: Reader, written: str) -> int:
    """Return a number in words or digits, -1 if it is none."""
    if written.isdecimal():
        return int(written)
    if reader.grammar.in_words.fullmatch(written) is None:
        return -1
    numbers = reader.grammar.parse_words(written)
    if len(numbers) != 1:
        return -1
    return int(numbers[0])


def languages_with_clock(text: str) -> list[str]:
    """Return the languages in which a text has a time of day such as las siete y media: of so short
    a text the language cannot be guessed."""
    lower = text.lower()
    return [code for code in _BESIDE_HOUR if _minutes_beside(code).search(lower)]


def take_spoken_clocks(reader: Reader) -> None:
    """Take the times of day that are written in words."""
    code = reader.grammar.language.code
    if code == "en":
        for match in _HOUR_AND_MINUTE.finditer(reader.rest):
            _take_hour_and_minute(reader, match)
    if code in _BESIDE_HOUR:
        for match in _minutes_beside(code).finditer(reader.rest):
            _take_minutes_beside(reader, match)
    if code not in _OF_LANGUAGE:
        return
    for match in _beside_hour(code).finditer(reader.rest):
        _take_beside_hour(reader, match, _OF_LANGUAGE[code])
    # In Dutch "acht uur" is eight hours as well.
    if code == "de":
        for match in _whole_hour(code).finditer(reader.rest):
            _take_whole_hour(reader, match)


_NOUN_AFTER = re.compile(r"\s[A-ZÄÖÜ]")


def _take_beside_hour(reader: Reader, match: re.Match[str], words: _ClockWords) -> None:
    # "fünf nach zwei Versuchen" is no time of day
    is_clear = match["unit"] or match["part"]
    if not is_clear and _NOUN_AFTER.match(reader.folded, match.end()):
        return
    hour = match["hour"]
    if hour in words.hours:
        number = words.hours.index(hour) + 1
    else:
        number = int(hour)
    if not 1 <= number <= 12:
        return
    minutes = 60 * number - words.before.get(match["before"] or match["alone"], 0)
    if match["side"]:
        part = words.minutes.get(match["minutes"])
        if part is None:
            part = int(match["minutes"])
        minutes += words.sides[match["side"]] * part
    reader.take(*match.span(), on_dial(minutes, match["part"]))


def _take_whole_hour(reader: Reader, match: re.Match[str]) -> None:
    grammar = reader.grammar
    if not grammar.is_number(match["hour"]):
        return
    hour, minute, end = grammar.parse_words(match["hour"])[-1], 0, match.end()
    if match["minute"] and grammar.is_number(match["minute"]):
        minute = grammar.parse_words(match["minute"])[-1]
    elif match["minute"]:
        end = match.start("minute") - 1
    if hour > 24 or minute > 59:
        return
    clock = Clock(60 * hour % (2 * HALF_A_DAY) + minute)
    if match["part"]:
        clock = on_dial(60 * hour, match["part"])
    # "acht Uhr" has an 8 in it, as "8 Uhr" has
    parts = []
    if not minute:
        parts = [Number(Fraction(hour))]
    reader.take(match.start(), end, clock, parts=parts)
