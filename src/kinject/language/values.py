"""Numbers, dates and units of a text, each in one form: 1,000 = one thousand, March 3 = 3 March, 5
km = 5 kilometres."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache

from kinject.language.han import (
    HAN,
    SCALED_AMOUNT,
    han_value,
    plain_decimal,
    with_plain_amounts,
)
from kinject.language.spelling import CURRENCY, MARKS
from kinject.language.tables import Language, language_of
from kinject.language.units import any_of, money_marks, money_unit

MAX_COUNT = 12
"""A writer may count the things of a passage up to this number."""
_MONEY = money_marks() | {"￥": "yen"}
_CODES = any_of(mark for mark in _MONEY if mark[0].isalpha())
_SIGNS = f"{CURRENCY}￥"
_MONEY_BEFORE = re.compile(rf"(?:(?<![^\W\d_])(?P<code>{_CODES})|(?P<sign>[{_SIGNS}]))\s?\Z")
"""Sign or code of a currency before a number, perhaps with a space between them."""
SCALES_OF_MONEY = {"k": 10**3, "m": 10**6, "b": 10**9, "tn": 10**12, "t": 10**12}
SCALES_OF_MONEY |= {"mm": 10**6, "mi": 10**6, "bi": 10**9}
_SCALE_OF_MONEY = re.compile(rf"\s?(?P<scale>{any_of(SCALES_OF_MONEY)})\b")
"""What follows $74 in $74m; without a currency an m is a metre."""
SCALES_BEFORE_MONEY = {"t": 10**3, "k": 10**3, "m": 10**6, "mm": 10**6, "md": 10**9}
SCALE_BEFORE_MONEY = re.compile(
    rf"\s?(?P<scale>{any_of(SCALES_BEFORE_MONEY)})"
    rf"(?=\s?[{_SIGNS}]|\s?(?:{_CODES})(?!\w)|\sde\s(?:euros|d[oó]lares|pesos)\b)"
)
"""The M of 74 M€, the Md of 5 MdEUR, the MM of 5 MM€; the T of 5 TEUR is German for a thousand."""
PREPOSITION = re.compile(r"\s(?:of\s|de\s|di\s|d['’])")
"""Between a million and its unit."""
_WORD = re.compile(rf"(?:(?![\d_])[\w{MARKS}])+")
WORD_END = rf"(?![\w{MARKS}])"
"""Behind a word: a vowel of an Indian script is no letter to `re`, and continues it."""
_DIGITS = re.compile(r"\d+")
# 1914–18 stands for 1914–1918.
_RANGE_END = re.compile(r"(?<!\d)(\d\d)(\d\d)[–-](\d\d)(?!\d|-)")
_TIME = re.compile(r"(?<!\d)(\d{1,2}):(\d\d)(?::\d\d)?(?!\d)")
_CLOCK = re.compile(
    r"(?<![\d.,:])(\d{1,2})(?:\s?(?:h|ч|[点點时時]|시)\s?([0-5]\d)(?!\d)(?:\s?[分분])?"
    r"|[.]([0-5]\d)(?=\s?(?:Uhr|uur|h|[ap]\.?\s?m)\b))"
)
"""A time of day that is not written with a colon: 9.15 Uhr, 8 h 30, 14時30分."""
_ISO = re.compile(r"(?<![\d-])(\d{4})-(\d\d)-(\d\d)\b")
_DAY_FIRST = re.compile(r"(?<![\d.])(\d{1,2})([./])(\d{1,2})\2(\d{4})(?!\d)")
_YEAR_AFTER = re.compile(r",? (?:of )?\d{4}\b")
_BEFORE_MONTH = re.compile(r"\b(?:in|early|late|since|until) \Z", re.IGNORECASE)
_COMPOSED = re.compile(r"\d(?:[:./–-]\d|\s?[hч点點時时시])")
"""What a time of day or a date in digits has inside: without it, all their patterns need not be
tried."""
_WIDE = str.maketrans("．，％：", ".,%:")
_HAN_NUMBER = re.compile(
    rf"(?P<symbol>[{_SIGNS}])?(?<![A-Za-z\d.])"
    r"(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:[十百万萬億亿兆]|千(?![米克瓦卡伏赫]))*"
    rf"(?:\d+[千万萬億亿]+)*(?:(?<=[万萬億亿])\d{{1,4}}(?:,\d{{3}})?)?|[{HAN}]+)"
)
# Chinese and Japanese write May 2019 as 2019.5, too.
_YEAR_AND_MONTH = re.compile(r"(?<![\d.])([12]\d{3})\.(1?\d)(?![\d.])")
_COUNTERS = frozenset(
    "个個名艘人位座条條只隻次种種本张張家国國所间間层層台辆架匹头頭首部篇项項件场場届組组批代枚冊軒階回社着校つ棟尾羽丁幅支株棵块片"
)
"""The words between a number and its unit in Chinese and Japanese."""
_WIDE_LETTERS = "\u0590-\u06ff\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_WIDE_LETTER = re.compile(f"[{_WIDE_LETTERS}]")
_ENGLISH_AND = re.compile(
    r"(?<!hundred)(?<!thousand)(?<!million)(?<!billion)(?<!lakh)(?<!crore)\s+and\s+"
)


@dataclass(slots=True)
class Values:
    """Numbers (as plain decimals) with their units, and dates as (month, day), in a text.

    `certain` numbers are meant as such beyond doubt. `counted` maps small numbers in words without
    a unit to the words that follow them: a writer may have counted. `implied` numbers (both, a
    dozen) are only possible ones, and so are `possible_months` (a March or May without a year).
    """

    numbers: dict[str, set[str]] = field(default_factory=dict)
    certain: set[str] = field(default_factory=set)
    counted: dict[str, set[str]] = field(default_factory=dict)
    implied: set[str] = field(default_factory=set)
    months: set[int] = field(default_factory=set)
    possible_months: set[int] = field(default_factory=set)
    days: set[tuple[int, int]] = field(default_factory=set)

    def add(self, number: str, unit: str = "", *, certain: bool = True) -> None:
        """Add `number` with its `unit`."""
        units = self.numbers.setdefault(number, set())
        if unit:
            units.add(unit)
        if certain:
            self.certain.add(number)

    def add_day(self, month: int, day: int) -> None:
        """Add a date."""
        if 1 <= month <= 12 and 1 <= day <= 31:
            self.days.add((month, day))
            self.months.add(month)


NEVER = r"\Z."
"""A pattern without a match."""


def _any_of(words: Iterable[str]) -> str:
    return any_of(words) or NEVER


def _unit_pattern(language: Language) -> re.Pattern[str]:
    spellings = "|".join(sorted(map(re.escape, language.unit_of), key=len, reverse=True))
    if language.is_unspaced:
        return re.compile(f" ?(?P<unit>{spellings})")
    gap, end = r"[\s\-\u00a0\u202f]{0,2}", rf"(?![^\W{_WIDE_LETTERS}]|°)"
    return re.compile(f"{gap}(?P<unit>{spellings}){end}")


def _digits_pattern(language: Language) -> re.Pattern[str]:
    """Return the pattern of a number in digits, with its groups, decimals, ending and scale."""
    group, mark, decimal = r",\u00a0\u202f'’٬", ".", "."
    if language.decimal_sign == ",":
        group, mark, decimal = r".\u00a0\u202f ٬'’", ",", ".,"
    decade = NEVER
    if language.code == "en":
        decade = r"s\b"
    # India parts its lakhs: 5,00,000.
    in_lakhs = NEVER
    if language.decimal_sign == ".":
        in_lakhs = r"\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?(?!\d)"
    scales, words = _any_of(language.digit_scales), _any_of(language.scale_words)
    return re.compile(
        rf"(?P<digits>\d{{1,3}}(?:[{group}]\d{{3}})+(?:[{mark}٫]\d+)?(?!\d)|{in_lakhs}"
        rf"|\d+(?:[{decimal}٫]\d+)?)(?P<decade>{decade})?"
        rf"(?P<ordinal>{language.ordinal or NEVER})?"
        # Of two, as in "3 lakh crore", both are factors.
        rf"(?:\s?(?P<scale>{scales}|k){WORD_END}"
        rf"(?:\s(?P<second_scale>{words}){WORD_END})?(?:\.(?=\s))?)?"
    )


class Grammar:
    """How a language writes numbers, dates and units: patterns made from its tables."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.units = language.unit_of
        self._unit = _unit_pattern(language)
        self.number = _digits_pattern(language)
        words = [*language.number_words, *language.scale_words]
        joins = "|".join(sorted(language.joins)) or NEVER
        any_word = _any_of(words)
        self._numbers = frozenset(words)
        self._word = re.compile(any_word)
        self._compound = re.compile(f"(?:{any_word}|{joins})+")
        number_word = f"(?:{any_word})"
        if language.compound:
            number_word += f"(?:(?:{joins})?(?:{any_word}))*"
        between = rf"(?:\s+|-|\s+(?:{joins})\s+|-(?:{joins})-)"
        self.in_words = re.compile(rf"(?<!\w){number_word}(?:{between}{number_word})*{WORD_END}")
        day = r"\d{1,2}(?:st|nd|rd|th|er|\.?[ºª°]|\.)?"
        days = (
            rf"(?P<days>{day}(?:\s*(?:,|and|or|to|&|[-–—]|und|bis|et|au|y|al|e|a)\s*{day}){{0,3}})"
        )
        self.day_before = re.compile(rf"\b{days}\s*(?:of\s+|de\s+|del\s+|d[’'])?\Z", re.IGNORECASE)
        # "March 3" is English order; "mars 3" is not French.
        after = NEVER
        if language.code == "en":
            after = rf"\.?\s+(?:the\s+)?{days}(?!\d|:\d|\.\d|,\d{{3}})"
        self.day_after = re.compile(after, re.IGNORECASE)

    def is_number(self, word: str) -> bool:
        """Return whether a word in lower case is a number, or several written as one."""
        is_written_together = self.language.compound and word not in self.language.joins
        return word in self._numbers or (
            is_written_together and self._compound.fullmatch(word) is not None
        )

    def unit_after(self, text: str, end: int, in_digits: bool) -> str:
        """Return the unit after a number that ends at index `end`, or ""."""
        spelling, _ = self.unit_spelled_after(text, end, in_digits)
        return self.units.get(spelling, "")

    def without_units(self, text: str) -> str:
        """Return `text` without the spellings of units."""
        return self._unit.sub("", text.lower())

    def unit_spelled_after(self, text: str, end: int, in_digits: bool) -> tuple[str, int]:
        """Return the spelling of the unit after a number that ends at index `end`, and where the
        unit ends; ("", `end`) without one."""
        match = self._unit.match(text, end)
        if match is None:
            return "", end
        unit = match["unit"]
        # A single letter is a unit after digits only ("five m" is not), and "1990 v" is a match
        # between teams.
        is_letter = len(unit) == 1 and "a" <= unit <= "z"
        if is_letter and not (in_digits and unit in "mglwvhs"):
            return "", end
        return unit, match.end()

    def parse_words(self, text: str) -> list[int]:
        """Return the numbers in words: five thousand and two; nineteen ninety-five; two, then
        three; dreiundzwanzig."""
        if self.language.code != "en":
            return self._parse_number_words(text)
        numbers: list[int] = []
        for clause in _ENGLISH_AND.split(text):  # thirteen and seventeen
            numbers += self._parse_number_words(clause)
        return numbers

    def _parse_number_words(self, text: str) -> list[int]:
        language = self.language
        numbers: list[int] = []
        total = part = 0  # of the current number: whole thousands, and the rest so far
        room = 0  # a value below this can be added to `part`
        started = False
        for word in self._word.findall(text):
            scale, value = language.scale_words.get(word), language.number_words.get(word, 0)
            is_ten = value >= 20 and value % 10 == 0
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
                room = self._room(value)
            elif is_ten and 0 < part % 100 < 10 and language.compound and started:
                part, room = part + value, 0  # drei-und-zwanzig
            elif total == 0 and 10 <= part < 100 and value >= 10 and language.code == "en":
                part, room = part * 100 + value, self._room(value)  # nineteen ninety
            else:
                if started:
                    numbers.append(total + part)
                total, part, room, started = 0, value, self._room(value), True
        return [*numbers, total + part]

    def _room(self, value: int) -> int:
        """Return the limit of what a word may add to `value`: twenty-one, but not eleven-one."""
        if value >= 100:
            return 100
        if value >= 20:
            return 10
        return 0


@lru_cache(maxsize=128)
def grammar_of(code: str) -> Grammar:
    """Return the grammar of a language."""
    return Grammar(language_of(code))


@lru_cache(maxsize=256)
def read_values(text: str, code: str = "en") -> Values:
    """Return the numbers, units and dates in a text of the language `code`. Nobody may change the
    result: it is kept."""
    grammar, values = grammar_of(code), Values()
    if grammar.language.is_unspaced:
        text = with_plain_amounts(text.translate(_WIDE), (code,))
    else:
        text = SCALED_AMOUNT.sub(_scaled_value, text)
    is_composed = _COMPOSED.search(text) is not None
    if is_composed:
        text = _CLOCK.sub(_with_colon, text)
        for match in _TIME.finditer(text):
            values.add(f"{int(match[1])}:{match[2]}")
        text = _TIME.sub(" ", text)
    if grammar.language.is_unspaced:
        _read_unspaced(_YEAR_AND_MONTH.sub(r"\1年\2月", text.lower()), grammar, values)
        return values
    if is_composed:
        text = _take_dates(_RANGE_END.sub(_whole_range, text), code, values)
    lower = text.lower()
    words = set(_WORD.findall(lower))
    ends = _add_digits(lower, grammar, values)
    _add_words(lower, ends, grammar, values)
    for month in words & grammar.language.months.keys():
        _add_dates(text, lower, month, grammar, values)
    for word in grammar.language.implied.keys() & words:
        values.implied |= grammar.language.implied[word]
    return values


def _whole_range(found: re.Match[str]) -> str:
    start, end = found[1] + found[2], found[1] + found[3]
    if end <= start:  # an order number: 4711-08 names no 4708
        return found[0]
    return f"{start}–{end}"


def _with_colon(clock: re.Match[str]) -> str:
    return f"{clock[1]}:{clock[2] or clock[3]}"


def _day_first(iso: re.Match[str]) -> str:
    return f" {int(iso[3])}.{int(iso[2])}.{iso[1]} "


def _take_dates(text: str, code: str, values: Values) -> str:
    """Add dates such as 12.6.1931 and 1931-06-12; return `text` without them."""
    text = _ISO.sub(_day_first, text)
    for match in _DAY_FIRST.finditer(text):
        day, month = int(match[1]), int(match[3])
        values.add(match[4])
        if code == "en" and match[2] == "/" and day <= 12 and month <= 12 and day != month:
            continue  # 3/4/1999 may be either
        if month > 12:
            day, month = month, day
        values.add_day(month, day)
        values.add(str(day))
    return _DAY_FIRST.sub(" ", text)


def _add_digits(lower: str, grammar: Grammar, values: Values) -> set[int]:
    """Add the numbers in digits; return their ends. Digits in a word (A220) or behind a point are
    none."""
    ends, end = set[int](), 0
    for run in _DIGITS.finditer(lower):
        start = run.start()
        before = lower[start - 1 : start] or " "
        currency = _currency_before(lower, start)
        is_behind_point = before in "._" and not currency  # Rs.500
        in_word = before.isalnum() and not _WIDE_LETTER.match(before)
        if start < end or is_behind_point or in_word:
            continue
        match = grammar.number.match(lower, start)
        if match is None:
            continue
        end = match.end()
        if match["scale"]:
            ends.add(max(match.end("scale"), match.end("second_scale")))
        else:
            ends.add(end)
        number = _decimal(match, grammar)
        if not match["scale"] and not match["decade"]:
            factor, end = _scale_of_money(lower, end, currency)
            number = plain_decimal(Decimal(number) * factor)
        unit = currency or grammar.unit_after(lower, end, in_digits=True)
        if match["scale"] and not unit:
            unit = _unit_of_scale(lower, end, grammar)
        values.add(number, unit)
    return ends


def _currency_before(lower: str, start: int) -> str:
    """Return the currency before a number, "" without one; it may stand apart: € 5, EUR 5."""
    before = lower[max(0, start - 5) : start]
    mark = _MONEY_BEFORE.search(before)
    if mark is None:
        return ""
    return money_unit(_MONEY[mark["code"] or mark["sign"]])


def _scale_of_money(lower: str, end: int, currency: str) -> tuple[int, int]:
    """Return the factor of a letter behind a number of a currency, which may follow it, and where
    that letter ends; (1, `end`) without one."""
    scale = SCALE_BEFORE_MONEY.match(lower, end)
    if scale:
        return SCALES_BEFORE_MONEY[scale["scale"]], scale.end()
    scale = _SCALE_OF_MONEY.match(lower, end)
    if scale and currency:
        return SCALES_OF_MONEY[scale["scale"]], scale.end()
    return 1, end


def _unit_of_scale(lower: str, end: int, grammar: Grammar) -> str:
    """Return the unit that a preposition joins to a million: 5 millions d'euros."""
    preposition = PREPOSITION.match(lower, end)
    if preposition is None:
        return ""
    return grammar.unit_after(lower, preposition.end(), in_digits=False)


def _add_words(lower: str, digit_ends: set[int], grammar: Grammar, values: Values) -> None:
    """Add the numbers in words. Words that end where a number in digits ends belong to it: 5
    million."""
    language = grammar.language
    for match in grammar.in_words.finditer(lower):
        if match.end() in digit_ends:
            continue
        words = match[0]
        *earlier, last = grammar.parse_words(words)
        last_unit = grammar.unit_after(lower, match.end(), in_digits=False)
        if not last_unit and words.split()[-1] in language.scale_words:
            last_unit = _unit_of_scale(lower, match.end(), grammar)
        for value in (*earlier, last):
            unit = last_unit if value == last else ""
            certain = _is_certain(value, unit, is_ambiguous=words in language.ambiguous)
            values.add(str(value), unit, certain=certain)
            if value <= MAX_COUNT and not unit:
                following = _WORD.search(lower, match.end())
                words_after = values.counted.setdefault(str(value), set())
                words_after.add(following[0] if following else "")


def _is_certain(value: int, unit: str, *, is_ambiguous: bool) -> bool:
    """Return whether a number in words says how much, whatever else its words may mean."""
    # "one" is often a pronoun, and "two" without a unit both or a pair.
    if value < 2 or (value == 2 and not unit):
        return False
    # "neuf" before a unit is nine, and not new; but of "a second meter" the meter is a device.
    return not is_ambiguous or (value > 2 and bool(unit))


def _add_dates(text: str, lower: str, month: str, grammar: Grammar, values: Values) -> None:
    """Add the dates with one name of a month. An abbreviation is a month beside a day only."""
    language = grammar.language
    number = language.months[month]
    name, searched = re.escape(month), lower
    # "the 14 may learn": a verb has no capital.
    is_verb = language.code == "en" and month in ("march", "may")
    if is_verb:
        name, searched = f"M(?i:{month[1:]})", text
    for found in re.finditer(rf"(?<!\w){name}(?!\w)", searched):
        start, end = found.span()
        match = grammar.day_before.search(text[max(0, start - 40) : start])
        match = match or grammar.day_after.match(text, end)
        if match:
            values.months.add(number)
            for day in re.findall(r"\d+", match["days"]):
                values.add_day(number, int(day))
        elif language.code == "en" and not text[start].isupper():
            continue
        elif month in language.month_names and not is_verb:
            values.months.add(number)
        else:
            before = text[max(0, start - 8) : start]
            is_dated = _YEAR_AFTER.match(text, end) or _BEFORE_MONTH.search(before)
            if is_dated and month in language.month_names:
                values.months.add(number)
            else:
                values.possible_months.add(number)


def _read_unspaced(text: str, grammar: Grammar, values: Values) -> None:
    """Add the numbers and dates of a Chinese or Japanese text, in digits and in Chinese
    numerals."""
    month = 0
    for match in _HAN_NUMBER.finditer(text):
        if _add_han_number(match, grammar, values):
            month = _add_han_date(match, month, values)
    for word, numbers in grammar.language.implied.items():
        if word in text:
            values.implied |= numbers


def _add_han_number(match: re.Match[str], grammar: Grammar, values: Values) -> bool:
    """Add a number with its unit; return False for a numeral that may be a part of a word."""
    text, run = match.string, match["number"]
    in_digits = run[0].isdigit()
    number = han_value(run)
    unit = money_unit(_MONEY.get(match["symbol"] or "", ""))
    # In Chinese ¥ is the sign of the yuan.
    if unit == "yen" and match["symbol"] and grammar.language.code == "zh":
        unit = "yuan"
    unit = unit or grammar.unit_after(text, match.end(), in_digits=True)
    following = text[match.end() : match.end() + 1]
    is_counted = bool(unit) or following in _COUNTERS
    in_date = number == "10" and unit in ("month", "day")
    part_of_words = number in ("0", "1", "10", "100", "1000", "10000") and not in_date
    if not in_digits and len(run) == 1 and (part_of_words or not is_counted):
        # 一 and 十 are parts of many words; a single numeral is a number before a unit only.
        values.implied.add(number)
        return False
    certain = in_digits or len(run) > 1 or (is_counted and number not in ("1", "2"))
    values.add(number, unit, certain=certain)
    if not in_digits and not unit and len(number) < 3 and int(number) <= MAX_COUNT:
        values.counted.setdefault(number, set()).add(following)
    return True


def _add_han_date(match: re.Match[str], month: int, values: Values) -> int:
    """Add the month or the day that a number names, a day after its `month`; return the month of
    the next day."""
    number, text = han_value(match["number"]), match.string
    following = text[match.end() : match.end() + 1]
    # no month and no day has three digits
    if not number.isdecimal() or len(number) > 2:
        return month
    if following == "月" and 1 <= int(number) <= 12:
        values.months.add(int(number))
        return int(number)
    if following in ("日", "号") and month and text[match.start() - 1] == "月":
        values.add_day(month, int(number))
    return month


def _scaled_value(amount: re.Match[str]) -> str:
    return han_value(amount[0])


_COMMA_NUMBER = re.compile(r"\d{1,3}(?:[.\u00a0\u202f ٬'’]\d{3})+(?:,\d+)?")
"""A number in a language whose decimals follow a comma, with its thousands parted."""


def _decimal(match: re.Match[str], grammar: Grammar) -> str:
    """Return a number in digits as a plain decimal; "1990s" keeps its s."""
    digits = match["digits"]
    if grammar.language.decimal_sign == ".":
        digits = re.sub(r"[,\u00a0\u202f'’٬]", "", digits.replace("٫", "."))
    # 0 800 22 is a telephone number, no thousands.
    elif _COMMA_NUMBER.fullmatch(digits) and not digits.startswith("0"):
        digits = re.sub(r"[.\u00a0\u202f ٬'’]", "", digits).replace(",", ".")
    else:
        digits = re.sub(r"[\u00a0\u202f ٬'’]", "", digits).replace("٫", ".").replace(",", ".")
        digits = digits.replace(".", "", digits.count(".") - 1)
    value = Decimal(digits)
    for scale in filter(None, match.group("scale", "second_scale")):
        value *= grammar.language.digit_scales.get(scale, 1000)  # a k
    text = plain_decimal(value)
    if match["decade"]:
        text += "s"
    return text


def is_value(text: str, code: str) -> bool:
    """Return whether `text` has nothing but numbers, names of months and units in it."""
    grammar = grammar_of(code)
    language = grammar.language
    if language.is_unspaced:
        return not _NO_VALUE.search(grammar.without_units(text))
    known: tuple[Container[str], ...] = (
        language.months,
        language.unit_words,
        language.joins,
        language.fraction_words,
        language.clock_words,
        language.one_and_a_half,
        _BESIDE_DATES,
    )
    words = _WORD.findall(_DOLLAR_OF_COUNTRY.sub(" ", text.lower()))
    others = [word for word in words if not grammar.is_number(word)]
    return all(_is_in(word, known) for word in others)


def _is_in(word: str, tables: Iterable[Container[str]]) -> bool:
    return any(word in table for table in tables)


_DOLLAR_OF_COUNTRY = re.compile(r"\b[a-z]{1,2}\$")
_NO_VALUE = re.compile(r"[^\d\s,.%年月日号號零〇一二三四五六七八九十百千万萬亿億兆两兩個个人名]")
_BESIDE_DATES = frozenset(
    ("of", "the", "st", "nd", "rd", "th", "de", "le", "el", "den", "der", "del", "du", "il")
).union(("am", "au", "d", "di"))
