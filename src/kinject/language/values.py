"""Numbers, dates and units of a text, each in one form: 1,000 = one thousand, March 3 = 3 March, 5
km = 5 kilometres."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache

from kinject.language.tables import Language, language_of

MAX_COUNT = 12
"""A writer may count the things of a passage up to this number."""
_SIGNS = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee", "￥": "yen"}
"""Sign before a number -> unit."""
_WORD = re.compile(r"[^\W\d_]+")
_DIGITS = re.compile(r"\d+")
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
_HAN_DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {
    "〇": 0,
    "两": 2,
    "兩": 2,
}
_HAN_SCALES = {
    "十": 10,
    "百": 100,
    "千": 1000,
    "万": 10**4,
    "萬": 10**4,
    "億": 10**8,
    "亿": 10**8,
    "兆": 10**12,
}
_HAN = "".join([*_HAN_DIGITS, *_HAN_SCALES])
_HAN_NUMBER = re.compile(
    rf"(?P<symbol>[$€£¥￥])?(?<![A-Za-z\d.])(?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?(?:[十百万萬億亿兆]|千(?![米克瓦卡伏赫]))*"
    rf"(?:\d+[千万萬億亿])*(?:(?<=[万萬億亿])\d{{1,4}}(?:,\d{{3}})?)?|[{_HAN}]+)"
)
_HAN_PARTS = re.compile(rf"\d+(?:,\d{{3}})*(?:\.\d+)?|[{_HAN}]")
_YEAR_AND_MONTH = re.compile(r"(?<![\d.])([12]\d{3})\.(1?\d)(?![\d.])")
_HAN_PERCENT = re.compile(rf"百分之([\d.{_HAN}]+)")
_TENTHS = {
    "ja": re.compile(
        rf"(?<![\d{_HAN}])([1-9一二三四五六七八九])割(?:([1-9一二三四五六七八九])分|(?![\u4e00-\u9fff\d]))"
    ),
    "zh": re.compile(rf"(?<![\d{_HAN}])([2-9二三四五六七八九两])成()(?![功为年员立熟果就本分])"),
}
"""6割 and 六成 are 60%."""
_COUNTERS = frozenset(
    "个個名艘人位座条條只隻次种種本张張家国國所间間层層台辆架匹头頭首部篇项項件场場届組组批代枚冊軒階回社着校つ棟尾羽丁幅支株棵块片"
)
"""The words between a number and its unit in Chinese and Japanese."""
_WIDE_LETTERS = "\u0590-\u06ff\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_WIDE_LETTER = re.compile(f"[{_WIDE_LETTERS}]")
_ENGLISH_AND = re.compile(r"(?<!hundred)(?<!thousand)(?<!million)(?<!billion)\s+and\s+")


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
        self.numbers.setdefault(number, set()).update([unit] if unit else [])
        self.certain.update([number] if certain else [])

    def add_day(self, month: int, day: int) -> None:
        """Add a date."""
        if 1 <= month <= 12 and 1 <= day <= 31:
            self.days.add((month, day))
            self.months.add(month)


class Grammar:
    """How a language writes numbers, dates and units: patterns made from its tables."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.units = language.unit_of
        spellings = "|".join(sorted(map(re.escape, self.units), key=len, reverse=True))
        gap = r"[\s\-\u00a0\u202f]{0,2}" if not language.is_unspaced else " ?"
        end = "" if language.is_unspaced else rf"(?![^\W{_WIDE_LETTERS}]|°)"
        self._unit = re.compile(f"{gap}(?P<unit>{spellings}){end}")
        comma = language.decimal_sign == ","
        group, mark = (r".\u00a0\u202f ٬'’", ",") if comma else (r",\u00a0\u202f'’٬", ".")
        never = r"\Z."
        scales = (
            "|".join(sorted(map(re.escape, language.digit_scales), key=len, reverse=True)) or never
        )
        english = language.code == "en"
        self.number = re.compile(
            rf"(?P<digits>\d{{1,3}}(?:[{group}]\d{{3}})+(?:[{mark}٫]\d+)?(?!\d)"
            rf"|\d+(?:[{'.,' if comma else '.'}٫]\d+)?)(?P<decade>{r's' + chr(92) + 'b' if english else never})?"
            rf"(?P<ordinal>{language.ordinal or never})?(?:\s?(?P<scale>{scales}|k)\b(?:\.(?=\s))?)?"
        )
        words = [*language.number_words, *language.scale_words]
        joins = "|".join(sorted(language.joins)) or never
        any_word = "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or never
        self._numbers = frozenset(words)
        self._word = re.compile(any_word)
        self._compound = re.compile(f"(?:{any_word}|{joins})+")
        number_word = f"(?:{any_word})" + (
            f"(?:(?:{joins})?(?:{any_word}))*" if language.compound else ""
        )
        between = rf"(?:\s+|-|\s+(?:{joins})\s+|-(?:{joins})-)"
        self.in_words = re.compile(rf"(?<!\w){number_word}(?:{between}{number_word})*\b")
        day = r"\d{1,2}(?:st|nd|rd|th|er|\.?[ºª°]|\.)?"
        days = (
            rf"(?P<days>{day}(?:\s*(?:,|and|or|to|&|[-–—]|und|bis|et|au|y|al|e|a)\s*{day}){{0,3}})"
        )
        self.day_before = re.compile(rf"\b{days}\s*(?:of\s+|de\s+|del\s+|d[’'])?\Z", re.IGNORECASE)
        # "March 3" is English order; "mars 3" is not French.
        after = rf"\.?\s+(?:the\s+)?{days}(?!\d|:\d|\.\d|,\d{{3}})"
        self.day_after = re.compile(after if english else never, re.IGNORECASE)

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
        language = self.language
        if (
            language.code == "en" and len(parts := _ENGLISH_AND.split(text)) > 1
        ):  # thirteen and seventeen
            return [number for clause in parts for number in self.parse_words(clause)]
        numbers: list[int] = []
        total = part = 0  # of the current number: whole thousands, and the rest so far
        room = 0  # a value below this can be added to `part`
        started = False
        for word in self._word.findall(text):
            scale, value = language.scale_words.get(word), language.number_words.get(word, 0)
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
            elif (
                value >= 20
                and value % 10 == 0
                and 0 < part % 100 < 10
                and language.compound
                and started
            ):
                part, room = part + value, 0  # drei-und-zwanzig
            elif (
                total == 0 and 10 <= part < 100 and value >= 10 and language.code == "en"
            ):  # nineteen ninety
                part, room = part * 100 + value, self._room(value)
            else:
                if started:
                    numbers.append(total + part)
                total, part, room, started = 0, value, self._room(value), True
        return [*numbers, total + part]

    def _room(self, value: int) -> int:
        return 100 if value >= 100 else 10 if value >= 20 else 0


@lru_cache(maxsize=128)
def grammar_of(code: str) -> Grammar:
    """Return the grammar of a language."""
    return Grammar(language_of(code))


@lru_cache(maxsize=256)
def read_values(text: str, code: str = "en") -> Values:
    """Return the numbers, units and dates in a text of the language `code`. Nobody may change the
    result: it is kept."""
    grammar, values = grammar_of(code), Values()
    text = text.translate(_WIDE) if grammar.language.is_unspaced else text
    if is_composed := _COMPOSED.search(text) is not None:
        text = _CLOCK.sub(lambda match: f"{match[1]}:{match[2] or match[3]}", text)
        for match in _TIME.finditer(text):
            values.add(f"{int(match[1])}:{match[2]}")
        text = _TIME.sub(" ", text)
    if grammar.language.is_unspaced:
        _read_unspaced(_YEAR_AND_MONTH.sub(r"\1年\2月", text.lower()), grammar, values)
        return values
    text = _take_dates(_RANGE_END.sub(r"\1\2–\1\3", text), code, values) if is_composed else text
    lower = text.lower()
    words = set(_WORD.findall(lower))
    ends = _add_digits(lower, grammar, values)
    _add_words(lower, ends, grammar, values)
    for month in words & grammar.language.months.keys():
        _add_dates(text, lower, month, grammar, values)
    for word in grammar.language.implied.keys() & words:
        values.implied |= grammar.language.implied[word]
    return values


def _take_dates(text: str, code: str, values: Values) -> str:
    """Add dates such as 12.6.1931 and 1931-06-12; return `text` without them."""
    text = _ISO.sub(lambda match: f" {int(match[3])}.{int(match[2])}.{match[1]} ", text)
    for match in _DAY_FIRST.finditer(text):
        day, month = int(match[1]), int(match[3])
        values.add(match[4])
        if code == "en" and match[2] == "/" and day <= 12 and month <= 12 and day != month:
            continue  # 3/4/1999 may be either
        day, month = (day, month) if month <= 12 else (month, day)
        values.add_day(month, day)
        values.add(str(day))
    return _DAY_FIRST.sub(" ", text)


def _add_digits(lower: str, grammar: Grammar, values: Values) -> set[int]:
    """Add the numbers in digits; return their ends. Digits in a word (A220) or behind a point are
    none."""
    ends, end = set[int](), 0
    for run in _DIGITS.finditer(lower):
        start = run.start()
        before = lower[start - 1] if start else " "
        if start < end or before in "._" or (before.isalnum() and not _WIDE_LETTER.match(before)):
            continue
        match = grammar.number.match(lower, start)
        if match is None:
            continue
        end = match.end()
        ends.add(match.end("scale") if match["scale"] else end)
        sign = before if before != " " else lower[max(0, start - 2) : start - 1]
        unit = _SIGNS.get(sign) or grammar.unit_after(lower, end, in_digits=True)
        values.add(_decimal(match, grammar), unit)
    return ends


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
        for value in (*earlier, last):
            unit = last_unit if value == last else ""
            # "one" is often a pronoun, "second" a unit or a rank, and "two" without a unit both or a pair.
            certain = (value > 2 and words not in language.ambiguous) or (value >= 2 and bool(unit))
            values.add(str(value), unit, certain=certain)
            if value <= MAX_COUNT and not unit:
                following = _WORD.search(lower, match.end())
                values.counted.setdefault(str(value), set()).add(following[0] if following else "")


def _add_dates(text: str, lower: str, month: str, grammar: Grammar, values: Values) -> None:
    """Add the dates with one name of a month. An abbreviation is a month beside a day only."""
    language = grammar.language
    number = language.months[month]
    is_verb = language.code == "en" and month in (
        "march",
        "may",
    )  # "the 14 may learn": a verb has no capital
    name = f"M(?i:{month[1:]})" if is_verb else re.escape(month)
    for found in re.finditer(rf"(?<!\w){name}(?!\w)", text if is_verb else lower):
        start, end = found.span()
        match = grammar.day_before.search(
            text[max(0, start - 40) : start]
        ) or grammar.day_after.match(text, end)
        if match:
            values.months.add(number)
            for day in re.findall(r"\d+", match["days"]):
                values.add_day(number, int(day))
        elif language.code == "en" and not text[start].isupper():
            continue
        elif month not in language.month_names or is_verb:
            sure = _YEAR_AFTER.match(text, end) or _BEFORE_MONTH.search(
                text[max(0, start - 8) : start]
            )
            (
                values.months if sure and month in language.month_names else values.possible_months
            ).add(number)
        else:
            values.months.add(number)


def _read_unspaced(text: str, grammar: Grammar, values: Values) -> None:
    """Add the numbers and dates of a Chinese or Japanese text, in digits and in Chinese numerals."""
    text = _HAN_PERCENT.sub(r"\1%", text)
    if tenths := _TENTHS.get(grammar.language.code):
        text = tenths.sub(
            lambda match: f"{han_value(match[1])}{han_value(match[2]) if match[2] else 0}%", text
        )
    month = 0
    for match in _HAN_NUMBER.finditer(text):
        run = match["number"]
        in_digits = run[0].isdigit()
        number = han_value(run)
        unit = _SIGNS.get(match["symbol"] or "") or grammar.unit_after(
            text, match.end(), in_digits=True
        )
        counted = unit or text[match.end() : match.end() + 1] in _COUNTERS
        in_date = number == "10" and unit in ("month", "day")
        part_of_words = number in ("0", "1", "10", "100", "1000", "10000") and not in_date
        if not in_digits and len(run) == 1 and (part_of_words or not counted):
            # 一 and 十 are parts of many words; a single numeral is a number before a unit only.
            values.implied.add(number)
            continue
        certain = in_digits or len(run) > 1 or (bool(counted) and number not in ("1", "2"))
        values.add(number, unit, certain=certain)
        if not in_digits and not unit and len(number) < 3 and int(number) <= MAX_COUNT:
            values.counted.setdefault(number, set()).add(text[match.end() : match.end() + 1])
        following = text[match.end() : match.end() + 1]
        if following == "月" and number.isdecimal() and 1 <= int(number) <= 12:
            month = int(number)
            values.months.add(month)
        elif (
            following in ("日", "号")
            and month
            and number.isdecimal()
            and text[match.start() - 1] == "月"
        ):
            values.add_day(month, int(number))
    for word, numbers in grammar.language.implied.items():
        if word in text:
            values.implied |= numbers


def han_value(run: str) -> str:
    """Return the value of digits and Chinese numerals as a plain decimal: 3.5万, 二千零五, 一九九八."""
    parts = _HAN_PARTS.findall(run)
    if len(parts) > 1 and all(part in _HAN_DIGITS for part in parts):
        return str(int("".join(str(_HAN_DIGITS[part]) for part in parts)))
    total = section = current = Decimal(0)
    for part in parts:
        if part in _HAN_DIGITS:
            current = Decimal(_HAN_DIGITS[part])
        elif part in _HAN_SCALES:
            scale = _HAN_SCALES[part]
            if scale < 10**4:
                section += (current or 1) * scale
            else:
                total += (section + current or 1) * scale
                section = Decimal(0)
            current = Decimal(0)
        else:
            current = Decimal(part.replace(",", ""))
    return _format(total + section + current)


def _decimal(match: re.Match[str], grammar: Grammar) -> str:
    """Return a number in digits as a plain decimal; "1990s" keeps its s."""
    digits = match["digits"]
    if grammar.language.decimal_sign == ".":
        digits = re.sub(r"[,\u00a0\u202f'’٬]", "", digits.replace("٫", "."))
    elif re.fullmatch(
        r"\d{1,3}(?:[.\u00a0\u202f ٬'’]\d{3})+(?:,\d+)?", digits
    ) and not digits.startswith("0"):
        digits = re.sub(r"[.\u00a0\u202f ٬'’]", "", digits).replace(",", ".")
    else:
        digits = re.sub(r"[\u00a0\u202f ٬'’]", "", digits).replace("٫", ".").replace(",", ".")
        digits = digits.replace(".", "", digits.count(".") - 1)
    value = Decimal(digits)
    scale = match["scale"] or ""
    if scale:
        value *= 1000 if scale == "k" else grammar.language.digit_scales[scale]
    return _format(value) + ("s" if match["decade"] else "")


def _format(value: Decimal) -> str:
    """Return `value` without exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text.lstrip("0") or "0"


def is_value(text: str, code: str) -> bool:
    """Return whether `text` has nothing but numbers, names of months and units in it."""
    grammar = grammar_of(code)
    language = grammar.language
    if language.is_unspaced:
        return not _NO_VALUE.search(text)
    known: tuple[Iterable[str], ...] = (
        language.months,
        language.unit_words,
        language.joins,
        _BESIDE_DATES,
    )
    return all(
        grammar.is_number(word) or any(word in table for table in known)
        for word in _WORD.findall(text.lower())
    )


_NO_VALUE = re.compile(r"[^\d\s,.%年月日号號零〇一二三四五六七八九十百千万萬亿億兆两兩個个人名]")
_BESIDE_DATES = frozenset("of the st nd rd th de le el den der del du il am au".split())  # noqa: SIM905 - a line of words
