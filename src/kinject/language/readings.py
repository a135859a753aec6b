"""The words and values of a written answer, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter

from kinject.language.amounts import (
    Day,
    Group,
    Item,
    Number,
    Value,
    Values,
    Version,
    short_version,
)
from kinject.language.han import SCALED_AMOUNT, han_value
from kinject.language.moments import (
    MOST_DIGITS,
    SMALL,
    TAKEN,
    Found,
    Reader,
    day_in_digits,
    take_clocks,
    take_days,
)
from kinject.language.numbers import (
    LETTER,
    PRE_RELEASE,
    VERSION_BEFORE,
    end_of_words,
    is_scale_at,
    join_measures,
    take_coordinates,
    take_feet,
    take_number,
    unit_after,
    year_of_numeral,
)
from kinject.language.roman import take_numerals
from kinject.language.spelling import words_in
from kinject.language.spoken_clocks import take_spoken_clocks
from kinject.language.units import any_of
from kinject.language.values import grammar_of


@lru_cache(maxsize=512)
def read_items(
    folded: str, code: str, comma: bool, others: tuple[str, ...] = ()
) -> tuple[Item, ...]:
    """Return the words and values of a text that `fold` returned, in order.

    `code`: the language of its number words, months and units; `comma`: whether decimals are
    behind a comma where a number can be read in two ways (1,000); `others`: languages that it may
    be in as well.
    """
    reader = Reader(folded, code, comma, others)
    # The longest forms first: each takes its characters, and the digits of a date or a version are
    # no numbers of their own.
    take_days(reader)
    take_spoken_clocks(reader)
    take_clocks(reader)
    _take_versions(reader)
    _take_powers(reader)
    take_feet(reader)
    take_coordinates(reader)
    _take_measures_and_parts(reader)
    _take_fractions(reader)
    _take_numbers(reader)
    _take_number_words(reader)
    _take_articles(reader)
    take_numerals(reader)
    reader.found.sort(key=attrgetter("start", "end"))
    join_measures(reader)
    _join_groups(reader)
    items: list[Item] = []
    last = 0
    for found in reader.found:
        items += words_in(folded[last : found.start], apart=True)
        items.append(found.values)
        last = found.end
    return (*items, *words_in(folded[last:], apart=True))


_VERSION = re.compile(rf"(?<![\w.])(?:v\.?\s?)?(\d+(?:\.\d+){{2,}})(?!{LETTER}|\.\d)")
_SHORT_DAY = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d\d)")
# 1.234.567 is a number, not a version.
_THOUSANDS = re.compile(r"\d{1,3}(?:\.\d{3})+")


def _take_versions(reader: Reader) -> None:
    for match in _VERSION.finditer(reader.rest):
        if _THOUSANDS.fullmatch(match[1]):
            continue
        begin, end = match.span()
        marker = VERSION_BEFORE.search(reader.before(begin))
        if marker:
            begin -= len(marker[0])
        digits = short_version(match[1])
        # 1.0.0-beta is another version than 1.0.0
        early = PRE_RELEASE.match(reader.rest, end)
        if early:
            end, digits = early.end(), match[1] + early[0].lstrip("-")
        readings: list[Value] = [Version(digits)]
        day = _SHORT_DAY.fullmatch(match[1])
        # 12.3.19 is a date, unless it is called a version: v12.3.19.
        is_called = marker or early or match[0] != match[1]
        if day and not is_called:
            date = day_in_digits(int(day[2]), int(day[1]), int(day[3]))
            readings += filter(None, [date])
        reader.take(begin, end, *readings)


_POWER = re.compile(
    r"(?<![\w.,])(?:(?P<factor>\d+(?:[.,]\d+)?)\s?[×x*·]\s?)?"
    r"(?P<base>\d{1,4})\^(?P<power>-?\d{1,2})(?![\d^.])"
)
_SCIENTIFIC = re.compile(r"(?<![\w.,])(?P<factor>\d+(?:\.\d+)?)e(?P<power>[+-]?\d{1,3})(?![\w.])")


def _take_powers(reader: Reader) -> None:
    """Take 3 × 10^8, 2^10, 6.02e23."""
    for pattern in (_POWER, _SCIENTIFIC):
        for match in pattern.finditer(reader.rest):
            parts = match.groupdict()
            value = Fraction(int(parts.get("base") or 10)) ** int(parts["power"])
            if parts["factor"]:
                value *= Fraction(parts["factor"].replace(",", "."))
            # Its digits are none of a version.
            take_number(reader, *match.span(), Number(value, digits=match[0]))


_DENOMINATORS = {
    "half": 2,
    "halves": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "hundredth": 100,
    "thousandth": 1000,
}
_FRACTION = re.compile(r"(?<![\w.,/])(?:(\d+)[\s-])?(\d+)\s?/\s?(\d+)(?!\w|/|[.,]\d)")
_SMALL_WORDS = "|".join(SMALL[1:])
_PART_IN_WORDS = re.compile(
    rf"\b(?:(?P<count>an?|\d|{_SMALL_WORDS})[\s-])?"
    rf"(?P<part>{'|'.join(_DENOMINATORS)})(?P<plural>s?)\b"
)
_WHOLE_BEFORE = re.compile(rf"\b(?P<whole>\d+|{_SMALL_WORDS})\sand\s\Z")


_OUT_OF = re.compile(
    rf"(?<![\w.,/])(\d+|{_SMALL_WORDS})\s(?:out\sof|(?:(?<=\b1\s)|(?<=one\s))in(?:\severy)?)"
    # "1 in 1990" is no part
    rf"\s((?!(?<=in\s)\d{{4}})\d+(?:,\d{{3}})*|{_SMALL_WORDS})"
    r"(?![\w/]|[.,]\d|\s(?:hundred|thousand|million)\b)"
)


def _take_fractions(reader: Reader) -> None:
    for match in _OUT_OF.finditer(reader.rest):
        part, whole = _count(match[1]), _count(match[2].replace(",", ""))
        # "one in four days" has 4 days
        is_measure = reader.grammar.unit_spelled_after(reader.rest, match.end(), False)[0]
        if whole and not is_measure:
            numbers = [Number(Fraction(value), digits=str(value)) for value in (part, whole)]
            fraction = Number(Fraction(part, whole), digits=f"{part}/{whole}")
            reader.take(*match.span(), fraction, parts=numbers)
    for match in _FRACTION.finditer(reader.rest):
        if int(match[3]):
            value = Fraction(int(match[2]), int(match[3])) + int(match[1] or 0)
            fraction = Number(value, digits=match[0])
            end = match.end() + _length_of_article(reader, match.end())
            take_number(reader, match.start(), end, fraction, *_other_readings(match))
    if reader.grammar.language.code == "en":
        for match in _PART_IN_WORDS.finditer(reader.rest):
            _take_part_in_words(reader, match)
    elif reader.grammar.language.fraction_words:
        _take_halves_more(reader)
        _take_parts_of_language(reader)


def _other_readings(match: re.Match[str]) -> list[Group | Day]:
    """Return what a fraction may be besides: 1998/99 two years, 02/1876 a month."""
    whole, first, second = match[1], match[2], match[3]
    if whole:
        return []
    if len(first) == 4 and len(second) in (2, 4):
        years = [Number(Fraction(digits), digits=digits) for digits in (first, second)]
        return [Group("-", tuple(_with_one_unit(years)))]
    if len(second) == 4 and 1 <= int(first) <= 12:
        return [Day(int(first), year=int(second))]
    return []


def _take_part_in_words(reader: Reader, match: re.Match[str]) -> None:
    """Take a half, three quarters, two and a half; a third alone is a rank."""
    count = _count(match["count"] or "")
    is_plural = bool(match["plural"]) or match["part"] == "halves"
    is_half = match["part"] == "half"
    n_article = _length_of_article(reader, match.end())
    # "quarter of a mile" needs no article of its own
    is_one = (count == 1 or n_article > 0) and not is_plural
    if not (is_half or (count > 1 and is_plural) or is_one):
        return
    value = Fraction(count or 1, _DENOMINATORS[match["part"]])
    start = match.start()
    whole = _WHOLE_BEFORE.search(reader.before(start))
    if whole:
        value += _count(whole["whole"])
        start -= len(whole[0])
    # only what has digits is multiplied by a million behind it
    take_number(reader, start, match.end() + n_article, Number(value, digits=str(value)))


_OF_AN = re.compile(r"\s(?:of\s)?an?\s")


def _length_of_article(reader: Reader, end: int) -> int:
    """Return the characters of " an ", " of a " between a part and its unit, or its million; 0
    without them."""
    article = _OF_AN.match(reader.rest, end)
    if article is None or reader.grammar.language.code != "en":
        return 0
    if _is_measure_at(reader, article.end()) or is_scale_at(reader, article.end()):
        return len(article[0])
    return 0


_MEASURES = frozenset(
    (
        *("second", "minute", "hour", "day", "week", "month", "year", "decade", "century"),
        *("mm", "cm", "m", "km", "inch", "foot", "yard", "mile", "mm2", "m2", "km2", "mile2"),
        *("g", "mg", "kg", "ton", "tonne", "oz", "lb", "pound", "ml", "litre", "gallon", "m3"),
        *("acre", "hectare", "dollar", "euro", "sterling", "cent", "penny", "percent", "%"),
    )
)
"""Units of which an article counts one. Others are common words too: a real, a bar, a mole."""
_SHORTEST_MEASURE = 3
"""Letters of a unit behind an article: the m of "a m" is a name."""


def _is_measure_at(reader: Reader, start: int) -> bool:
    """Return whether a unit is written out at a place."""
    number = Number(Fraction(1))
    unit, end = unit_after(reader, start, number)
    # "a second thought", "a minute amount"
    is_adjective = unit in ("second", "minute") and re.match(r"\s[^\W\d_]", reader.rest[end:])
    return unit in _MEASURES and not is_adjective and end - start >= _SHORTEST_MEASURE


_BEFORE_AN_AMOUNT = (
    *("about", "almost", "nearly", "roughly", "approximately", "around", "only", "just", "exactly"),
    *("over", "under", "than", "within", "for", "in", "after", "is", "was", "were", "takes"),
    *("took", "take", "lasts", "lasted", "last", "weighs", "weighed", "weigh", "costs", "cost"),
    *("measures", "measured", "covers", "covered", "every", "till", "until", "answer"),
)
_ARTICLE = re.compile(
    rf"(?:\A[\s\"'(]*|[.:;!?(]\s|\b(?:{'|'.join(_BEFORE_AN_AMOUNT)})\s)(?P<one>an?)\s"
)
"""An article that may count one. Behind other words it parts a rate: 3 meals a day."""


def _take_articles(reader: Reader) -> None:
    """Take a mile, about an hour."""
    if reader.grammar.language.code != "en":
        return
    for match in _ARTICLE.finditer(reader.rest):
        if _is_measure_at(reader, match.end()):
            number = Number(Fraction(1), is_article=True)
            take_number(reader, match.start("one"), match.end(), number)


_AND_A_HALF = {
    "en": r"\sand\s(?:an?|one)\s(?P<part>half|quarter)",
    "fr": r"\set\sdemie?",
    "es": r"\sy\smedi[ao]",
    "it": r"\se\smezz[ao]",
    "pt": r"\se\smei[ao]",
    "nl": r"\sen\seen\s(?:half|halve)",
}


_ONE_IS_UNSAID = {"es": "[ao]", "pt": "[ao]", "it": "[ao]"}
"""The end of a unit of which one and a half are told without the one."""


@lru_cache(maxsize=8)
def _measure_and_part(code: str) -> re.Pattern[str]:
    counts = any_of(grammar_of(code).language.number_words)
    if code == "en":
        counts += "|an?"
    unit = r"(?P<unit>[^\W\d_]+)"
    count = rf"(?P<count>\d+|{counts})\s"
    # "hora y media" is one of them: no hours have an s in the end, nor ore an a.
    if code in _ONE_IS_UNSAID:
        count = rf"(?:{count}|(?=\w+{_ONE_IS_UNSAID[code]}\s))"
    if code == "it":
        count = rf"(?:{count}|un')"
    return re.compile(rf"(?<![\w.,'-]){count}{unit}{_AND_A_HALF[code]}\b(?!\s(?:of|de)\b)")


def _take_measures_and_parts(reader: Reader) -> None:
    """Take an hour and a half, deux heures et demie."""
    language = reader.grammar.language
    if language.code not in _AND_A_HALF:
        return
    for match in _measure_and_part(language.code).finditer(reader.rest):
        written = match["count"] or "1"
        start = match.end("count")
        if match["count"] is None:
            start = match.start("unit")
        unit, end = unit_after(reader, start, Number(Fraction(1), digits=written))
        if unit and end == match.end("unit"):
            count = language.number_words.get(written) or _count(written)
            part = Fraction(1, _DENOMINATORS.get(match.groupdict().get("part") or "half", 2))
            take_number(reader, *match.span(), Number(count + part, unit, digits=written))


@lru_cache(maxsize=8)
def _half_more(code: str) -> re.Pattern[str]:
    language = grammar_of(code).language
    words = any_of(language.one_and_a_half) or r"\Z."
    counts = any_of(language.number_words)
    return re.compile(rf"(?<!\w)(?:{words}|(?P<count>{counts})(?:und)?einhalb)(?!\w)")


_QUARTERS_OF_HOUR = re.compile(r"(?<!\w)(?:einer?\s)?(?P<three>drei)?viertelstunde(?!\w)")


def _take_halves_more(reader: Reader) -> None:
    """Take anderthalb, zweieinhalb."""
    language = reader.grammar.language
    for match in _half_more(language.code).finditer(reader.rest):
        value = language.number_words.get(match["count"] or "", 1) + Fraction(1, 2)
        take_number(reader, *match.span(), Number(value, digits=str(value)))
    if language.code == "de":
        for match in _QUARTERS_OF_HOUR.finditer(reader.rest):
            value = Fraction(1, 4)
            if match["three"]:
                value = Fraction(3, 4)
            take_number(reader, *match.span(), Number(value, "hour", digits=str(value)))


@lru_cache(maxsize=32)
def _part_pattern(code: str) -> re.Pattern[str]:
    language = grammar_of(code).language
    counts = any_of([*language.number_words, "la", "die", "der", "le", "de"])
    parts = any_of(language.fraction_words)
    return re.compile(rf"(?<!\w)(?:(?P<count>\d|{counts})\s)?(?P<part>{parts})(?!\w)")


def _take_parts_of_language(reader: Reader) -> None:
    """Take zwei Drittel, un tiers; of the words alone only those for a half."""
    language = reader.grammar.language
    for match in _part_pattern(language.code).finditer(reader.rest):
        denominator, count = language.fraction_words[match["part"]], match["count"] or ""
        part = language.number_words.get(count, 0)
        if count.isdigit():
            part = int(count)
        # "le tiers" is a name, "cuarto" a room
        if not part and denominator > 2:
            continue
        value = Fraction(part or 1, denominator)
        take_number(reader, *match.span(), Number(value, digits=str(value)))


def _count(word: str) -> int:
    if word in ("a", "an"):
        return 1
    if word in SMALL:
        return SMALL.index(word)
    return int(word or 0)


_NUMERAL = re.compile(
    r"(?<!\d)(?:\d{1,3}(?P<group>[,.'٬ ])\d{3}(?:(?P=group)\d{3})*(?!\d)(?:(?!(?P=group))[.,٫]\d+)?"
    r"|\d{1,2}(?:,\d\d)+,\d{3}(?!\d)(?:\.\d+)?"
    r"|\d+(?:[.,٫]\d+)?)"
    r"|(?<![\w.,])[.,]\d+"
)
_MARK = re.compile(r"[^\d]")


def _take_numbers(reader: Reader) -> None:
    for match in SCALED_AMOUNT.finditer(reader.rest):
        number = Number(Fraction(han_value(match[0])), digits=match[0])
        take_number(reader, *match.span(), number)
    for match in _NUMERAL.finditer(reader.rest):
        # another number may have been taken with this one: 5 to 10 million
        if TAKEN in reader.rest[match.start() : match.end()] or len(match[0]) > MOST_DIGITS:
            continue
        value = _decimal_value(match[0], reader.comma)
        number = Number(value, digits=match[0])
        days = _days_of_numeral(reader, match)
        take_number(reader, *match.span(), number, *days, *year_of_numeral(reader, match, number))


_DAY_AND_MONTH = re.compile(r"(?<![\d.])(\d{1,2})\.(\d{1,2})(?=\.(?!\d))")


def _days_of_numeral(reader: Reader, numeral: re.Match[str]) -> list[Day]:
    """Return the date that 12.3. is, beside a number at the end of a sentence."""
    match = _DAY_AND_MONTH.match(reader.rest, numeral.start())
    if match is None or match.end() != numeral.end():
        return []
    day = day_in_digits(int(match[2]), int(match[1]), None)
    if day is None:
        return []
    return [day]


def _decimal_value(written: str, comma: bool) -> Fraction:
    """Return the value of digits with marks between them."""
    marks = _MARK.findall(written)
    if not marks:
        return Fraction(written)
    whole, _, decimals = written.rpartition(marks[-1])
    if _has_decimals(whole, decimals, marks, comma):
        return Fraction(f"{_MARK.sub('', whole) or '0'}.{decimals}")
    return Fraction(_MARK.sub("", written))


def _has_decimals(whole: str, decimals: str, marks: list[str], comma: bool) -> bool:
    """Return whether the last of the marks of a number stands before decimals."""
    last = marks[-1]
    # These part thousands in every language.
    if last in "' ٬":
        return False
    if len(marks) > 1:
        # 1,234,567 has one kind of mark, 1,234.5 two.
        return last != marks[0]
    # 0.125 has no thousands.
    may_be_group = len(decimals) == 3 and 1 <= len(whole) <= 3 and not whole.startswith("0")
    if not may_be_group or last == "٫":
        return True
    return (last == ",") == comma


_ORDINAL_WORD = re.compile(r"\b(?:first|second|third|\w+th)s?\Z")
_POINT = re.compile(
    # "at this point five men" has a 5
    rf"(?:(?<!\w)(?P<whole>{_SMALL_WORDS}|zero)\s|(?<!\w\s)(?<!\w)|(?<=\bis\s)|(?<=\babout\s))"
    rf"point(?P<digits>(?:\s(?:{_SMALL_WORDS}|zero|oh)\b)+)"
)
_TEENS = "thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty"
_YEAR_WITH_OH = re.compile(rf"(?<!\w)(?P<century>{_TEENS})[\s-]oh?[\s-](?P<year>{_SMALL_WORDS})\b")
_TENS = (
    *("twenties", "thirties", "forties", "fifties"),
    *("sixties", "seventies", "eighties", "nineties"),
)
_DECADE = re.compile(rf"(?<!\w)(?:(?P<century>{_TEENS})[\s-])?(?P<tens>{'|'.join(_TENS)})(?!\w)")
_DOZEN = re.compile(r"\b(?:a\s)?dozen\b")
_PRONOUN_BEFORE = re.compile(r"\b(?:no|any|every|some|each|the|this|that|which)\s\Z")
_PRONOUN_AFTER = re.compile(r"\s(?:of|another|who|that|can|day)\b")


def _take_number_words(reader: Reader) -> None:
    grammar = reader.grammar
    if grammar.language.code == "en":
        _take_english_words(reader)
    for match in grammar.in_words.finditer(reader.rest):
        words = match[0]
        if TAKEN in reader.rest[match.start() : match.end()] or _is_pronoun(reader, match):
            continue
        *earlier, last = grammar.parse_words(words)
        for value in earlier:
            # Without width, so that it stands before the last of the words and takes nothing from
            # it.
            reader.take(match.start(), match.start(), Number(Fraction(value)))
        is_ordinal = None
        if grammar.language.code == "en":
            is_ordinal = bool(_ORDINAL_WORD.search(words))
        number = Number(Fraction(last), is_ordinal=is_ordinal)
        take_number(reader, match.start(), end_of_words(reader, match.end(), last), number)
    if grammar.language.code == "en":
        for match in _DOZEN.finditer(reader.rest):
            reader.take(*match.span(), Number(Fraction(12)))


def _take_english_words(reader: Reader) -> None:
    """Take two point five, nineteen oh five, the eighties."""
    for match in _POINT.finditer(reader.rest):
        digits = [_count(word.replace("oh", "zero")) for word in match["digits"].split()]
        written = f"{_count(match['whole'] or 'zero')}.{''.join(map(str, digits))}"
        take_number(reader, *match.span(), Number(Fraction(written), digits=written))
    for match in _YEAR_WITH_OH.finditer(reader.rest):
        year = f"{_century(reader, match)}{_count(match['year']):02}"
        take_number(reader, *match.span(), Number(Fraction(year), digits=year))
    for match in _DECADE.finditer(reader.rest):
        decade = f"{_century(reader, match)}{_TENS.index(match['tens']) + 2}0"
        take_number(reader, *match.span(), Number(Fraction(decade), "s", digits=decade))


def _century(reader: Reader, match: re.Match[str]) -> str:
    """Return the digits of the century in words before a year, "" without one."""
    if match["century"] is None:
        return ""
    return str(reader.grammar.language.number_words[match["century"]])


def _is_pronoun(reader: Reader, match: re.Match[str]) -> bool:
    """Return whether "one" is none of the numbers: no one, one of them."""
    if match[0] not in ("one", "ones") or reader.grammar.language.code != "en":
        return False
    before = _PRONOUN_BEFORE.search(reader.before(match.start()))
    return bool(before or _PRONOUN_AFTER.match(reader.rest, match.end()))


# --- Numbers that belong together

_JOINS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("-", re.compile(r"-|\s-\s|\.\.\.?")),
    (":", re.compile(r":|\s:\s")),
    ("×", re.compile(r"\s×\s")),
    ("to", re.compile(r"\s(?:to|bis|à|a|until|till|through|hasta|al|до|do|tot|til)\s")),
)
_AND = re.compile(r"\s(?:and|und|et|y|e|en|и|i)\s")
_BETWEEN_BEFORE = re.compile(r"\b(?:between|zwischen|entre|tra|fra|tussen|между|między)\s\Z")
_YEAR_DIGITS = re.compile(r"\d{4}")
_DIGITS_OF_A_CODE = 7
"""Digits of which three groups joined by hyphens are one number: of a telephone, of a book."""


def _join_groups(reader: Reader) -> None:
    """Make one value of numbers with a hyphen, a colon or "to" between them."""
    chains: list[list[Found]] = []
    signs: list[str] = []
    for found in reader.found:
        sign = ""
        if chains and _is_number(found) and _is_number(chains[-1][-1]):
            sign = _sign_between(reader, chains[-1][-1], found)
        if sign and signs[-1] in ("", sign):
            chains[-1].append(found)
            signs[-1] = sign
        else:
            chains.append([found])
            signs.append("")
    pairs = zip(chains, signs, strict=True)
    reader.found = [_joined(chain, sign) for chain, sign in pairs]


def _is_number(found: Found) -> bool:
    readings = found.values.readings
    return len(readings) == 1 and isinstance(readings[0], Number)


def _sign_between(reader: Reader, first: Found, second: Found) -> str:
    """Return what joins a number to the one before it, "" if nothing does."""
    text = reader.folded[first.end : second.start].lower()
    for sign, pattern in _JOINS:
        if pattern.fullmatch(text):
            return sign
    # nothing is between words that were read together: four and six
    if not text or _AND.fullmatch(text):
        before = reader.folded[max(0, first.start - 24) : first.start].lower()
        if _BETWEEN_BEFORE.search(before):
            return "-"
    return ""


def _joined(chain: list[Found], sign: str) -> Found:
    """Return the numbers of a chain as one value; a single one as it is."""
    if len(chain) == 1:
        return chain[0]
    first = [found.values.readings[0] for found in chain]
    numbers = _with_one_unit([number for number in first if isinstance(number, Number)])
    parts: tuple[Value, ...] = ()
    are_years = all(_YEAR_DIGITS.fullmatch(number.digits) for number in numbers)
    # "from 5 to 10" and "5 × 10" tell of both; of "5-10" neither is the answer, unless a sentence
    # has its years
    if sign in ("to", "×") or are_years:
        parts = tuple(numbers)
    value: Number | Group = Group(sign, tuple(numbers))
    digits = "".join(number.digits for number in numbers)
    is_code = sign == "-" and len(numbers) > 2 and digits.isdecimal()
    if is_code and _DIGITS_OF_A_CODE <= len(digits) <= MOST_DIGITS:
        value = Number(Fraction(digits), digits=digits)
    readings = [value, *_as_month(numbers, sign)]
    return Found(chain[0].start, chain[-1].end, Values(tuple(readings), parts))


def _as_month(numbers: Sequence[Number], sign: str) -> list[Day]:
    """Return the month that 2001-02 is, beside two years."""
    first, last = numbers[0], numbers[-1]
    is_form = len(numbers) == 2 and sign == "-" and _YEAR_DIGITS.fullmatch(first.digits)
    if (
        is_form
        and re.fullmatch(r"0[1-9]|1[0-2]", last.digits[-2:])
        and last.value < first.value + 12
    ):
        return [Day(int(last.digits[-2:]), year=int(first.digits))]
    return []


def _with_one_unit(numbers: list[Number]) -> list[Number]:
    """Return numbers with the unit that one of them has, and the million of the last: 5-10 km,
    $5-10, 5-10 million; 1939-45 is 1939-1945."""
    unit = numbers[0].unit or numbers[-1].unit
    numbers = [replace(number, unit=number.unit or unit) for number in numbers]
    first, second = numbers[0], numbers[-1]
    # "500 to 2 million" has no 500 million.
    if first.scale == 1 and first.digits and first.value * second.scale < second.value:
        numbers[0] = replace(first, value=first.value * second.scale)
    is_year = _YEAR_DIGITS.fullmatch(first.digits) and len(second.digits) == 2
    if len(numbers) == 2 and is_year and second.value > first.value % 100:
        year = first.digits[:2] + second.digits
        numbers[1] = replace(second, value=Fraction(year), digits=year)
    return numbers
