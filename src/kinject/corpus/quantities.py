"""Numbers, dates and units of a text, each in one form: 1,000 = one thousand, March 3 = 3 March, 5 km = 5 kilometres."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from kinject.corpus.profiles import WIDE_LETTER, Grammar, grammar_of, profile_of, roman_value

_ENGLISH = profile_of("en")
MONTHS = list(dict.fromkeys(_ENGLISH.month_names))
"""English months from January, in lower case."""

_SIGNS = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee", "￥": "yen"}
"""Sign before a number -> unit."""
_NAMED_DAYS = {
    "new year's day": (1, 1), "valentine's day": (2, 14), "halloween": (10, 31), "christmas eve": (12, 24),
    "christmas day": (12, 25), "new year's eve": (12, 31),
}  # fmt: skip
"""English name of a day -> (month, day)."""
_NAMED_DAY_WORDS = ("valentine", "christmas", "halloween", "eve", "new")
_YEARS_OF = {"decade": 10, "century": 100}
MAX_COUNT = 12
"""A writer may count the things of a passage up to this number."""

_WORDS, _ASCII_WORDS = re.compile(r"[^\W\d_]+"), re.compile("[a-zA-Z]+")
_DIGITS = re.compile(r"\d+")
_ROMAN = re.compile(r"\b[IVXL]{2,8}\b")
_MAY_BE_ROMAN = re.compile("[IVXL]{2}")
_RANGE_END = re.compile(r"(?<!\d)(\d\d)(\d\d)[–-](\d\d)(?!\d|-)")
_TIME = re.compile(r"(?<!\d)\d{1,2}:\d\d(?::\d\d)?(?!\d)")
_CLOCK = re.compile(
    r"(?<![\d.,:])(\d{1,2})(?:\s?(?:h|ч|[点點时時]|시)\s?([0-5]\d)(?!\d)(?:\s?[分분])?"
    r"|[.]([0-5]\d)(?=\s?(?:Uhr|uur|h|[ap]\.?\s?m)\b))|\b(um|ore|alle|dalle|kl\.)\s(\d{1,2})[.]([0-5]\d)\b(?![.%]\w)"
)
"""A time of day that is not written with a colon: 9.15 Uhr, 8 h 30, 14時30分, alle 9.30."""
_MAY_BE_CLOCK = re.compile(r"\d(?:\s?[hч点點时時시]|\.\d)")
"""Each match of `_CLOCK` contains a match of this, which is much faster to search."""
_MAY_BE_CLOCK_OR_DATE = re.compile(r"\d(?:\s?[hч点點時时시]|[./]\d)")
"""Each match of `_MAY_BE_CLOCK` or `_MAY_BE_DATE` contains a match of this: most texts are searched once, for both."""
_LEADING_ZERO = re.compile(r"\A0(?=\d)")
_DAY_FIRST = re.compile(r"(?<![\d.])(\d{1,2})([./])(\d{1,2})\2(\d{4})(?!\d)")
_MAY_BE_DATE = re.compile(r"\d[./]\d")
_ITALIAN_CENTURY = re.compile(r"\b(?:Due|Tre|Quattro|Cinque|Sei|Sette|Otto|Nove)cento\b")
"""The Quattrocento is the 15th century."""
_NUMBER_ADJECTIVE = re.compile(
    r"(zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn|elf|zwölf|zig|ßig|hundert"
    r"|twee|drie|vijf|zes|zeven|negen|tien|twaalf|tig|honderd)"
    r"(?=jähr|tägig|stündig|wöchig|monatig|prozentig|köpfig|stöckig|stellig|jarig|daags|koppig)",
    re.IGNORECASE,
)
"""siebenjährig: the number word before what it counts."""
_COUNTED_DECADES = re.compile(r"\b(?P<words>[a-z]+|\d+) [a-z]+ (?P<unit>decades|centuries)\b")
# March and May are also other words. They are months before a year, or after a word such as "in" or "since".
_YEAR_AFTER = re.compile(r",? (?:of )?\d{4}\b")
_BEFORE_MONTH = re.compile(r"\b(?:in|early|late|since|until) \Z", re.IGNORECASE)
_AMBIGUOUS_MONTHS = ("march", "may")
_WIDE = str.maketrans("．，％：", ".,%:")
_HAN_DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_HAN_SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "萬": 10**4, "億": 10**8, "亿": 10**8, "兆": 10**12}
_HAN = "".join([*_HAN_DIGITS, *_HAN_SCALES])
_HAN_NUMBER = re.compile(
    rf"(?P<symbol>[$€£¥￥])?(?<![A-Za-z\d.])(?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?(?:[十百万萬億亿兆]|千(?![米克瓦卡伏赫]))*(?:\d+[千万萬億亿])*(?:(?<=[万萬億亿])\d{{1,4}}(?:,\d{{3}})?)?|[{_HAN}]+)"
)
_YEAR_AND_MONTH = re.compile(r"(?<![\d.])([12]\d{3})\.(1?\d)(?![\d.])")
_HAN_PERCENT = re.compile(rf"百分之([\d.{_HAN}]+)")
_TENTHS = {
    "ja": re.compile(
        rf"(?<![\d{_HAN}])([1-9一二三四五六七八九])割(?:([1-9一二三四五六七八九])分|(?![\u4e00-\u9fff\d]))"
    ),
    "zh": re.compile(rf"(?<![\d{_HAN}])([2-9二三四五六七八九两])成()(?![功为年员立熟果就本分])"),
}
"""6割 and 六成 are 60%."""
_HAN_MORE = re.compile("(?<=[十百千])[多余餘](?=[万亿萬億])")
"""一千多万 is some ten millions."""
_HAN_PARTS = re.compile(rf"\d+(?:,\d{{3}})*(?:\.\d+)?|[{_HAN}]")
_COUNTERS = frozenset(
    "个個名艘人位座条條只隻次种種本张張家国國所间間层層台辆架匹头頭首部篇项項件场場届組组批代枚冊軒階階回社着校つ棟尾羽丁幅支株棵块片"
)
"""The words between a number and its unit in Chinese and Japanese."""
_DATE_UNITS = ("month", "day")
_NO_NUMBERS = frozenset(("千万", "万一", "万千", "十百", "百千", "千百", "百万千"))


@dataclass(slots=True)
class Quantities:
    """Numbers (as plain decimals) with their units, and dates as (month, day), in a text.

    The other text must have the `stated` numbers; `counted` ones (small numbers in words without a unit: a writer may have
    counted) may be new. `implied` numbers (both, a decade) and `named_days` (Valentine's Day, with the words of the name)
    may replace a number or a date of the other text. `possible_months` are a March or May that may not be a month. `text` is
    the text that was read, in lower case; `spans` maps each number to its offsets in it.
    """

    numbers: dict[str, set[str]] = field(default_factory=dict)
    stated: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    implied: set[str] = field(default_factory=set)
    named_days: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    months: set[int] = field(default_factory=set)
    possible_months: set[int] = field(default_factory=set)
    days: set[tuple[int, int]] = field(default_factory=set)
    text: str = ""
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def units(self) -> set[str]:
        """All units of the numbers."""
        return set().union(*self.numbers.values())

    def add(self, number: str, unit: str = "", *, stated: bool = True, span: tuple[int, int] | None = None) -> None:
        """Add `number` with its `unit`; `span` is its position in the text."""
        units = self.numbers.setdefault(number, set())
        if span:
            self.spans.setdefault(number, []).append(span)
        if unit:
            units.add(unit)
        if stated:
            self.stated.add(number)

    def add_day(self, month: int, day: int) -> None:
        """Add a date."""
        if 1 <= month <= 12:
            self.days.add((month, day))
            self.months.add(month)

    @property
    def uncertain_months(self) -> set[int]:
        """Months that the text may mean: a possible month, or the month of a named day."""
        return self.possible_months | {month for month, _ in self.named_days}

    def words_for_dates_of(self, other: Quantities) -> frozenset[str]:
        """Return the words of the days that this text names and `other` gives as dates."""
        return frozenset().union(*(words for day, words in self.named_days.items() if day in other.days))


def extract_quantities(text: str, code: str = "en") -> Quantities:
    """Return the numbers, units and dates in a text of the language `code`."""
    grammar = grammar_of(code)
    quantities = Quantities()
    has_mark = _MAY_BE_CLOCK_OR_DATE.search(text) is not None
    if has_mark and _MAY_BE_CLOCK.search(text):
        text = _CLOCK.sub(
            lambda match: f"{match[4] or ''} {match[1] or match[5]}:{match[2] or match[3] or match[6]}", text
        )
    if grammar.unspaced:
        quantities.text = _YEAR_AND_MONTH.sub(r"\1年\2月", text.translate(_WIDE).lower())
        _add_han_numbers(quantities.text, grammar, quantities)
        return quantities
    if code == "it":
        text = _ITALIAN_CENTURY.sub("secolo", text)
    if code in ("de", "nl"):
        text = _NUMBER_ADJECTIVE.sub(r"\1 ", text)
    has_digits = _DIGITS.search(text) is not None
    if has_digits:
        text = _take_dates_and_times(text, code, quantities, has_mark)
    lower = quantities.text = text.lower()
    words = set((_ASCII_WORDS if lower.isascii() else _WORDS).findall(lower))
    digit_ends = _add_digits(lower, grammar, quantities) if has_digits else []
    number_words = grammar.number_words_in(words)
    if number_words:
        _add_words(lower, number_words, digit_ends, grammar, quantities)
    months = grammar.profile.months
    for month in [word for word in words if word in months]:
        _add_dates(text, lower, month, grammar, quantities)
    if _MAY_BE_ROMAN.search(text):
        quantities.implied.update(str(roman_value(match[0])) for match in _ROMAN.finditer(text))
    implied = grammar.profile.implied_numbers
    for word in implied.keys() & words:
        quantities.implied |= implied[word]
    if code == "en":
        _add_english(lower, words, grammar, quantities)
    return quantities


def _take_dates_and_times(text: str, code: str, quantities: Quantities, may_be_date: bool) -> str:
    """Add dates such as 12.6.1931, if there may be one, and times such as 14:30; return `text` without them."""
    # Most texts have no range and no time of day, and a search for one character is cheaper than for a pattern.
    if "-" in text or "–" in text:
        text = _RANGE_END.sub(r"\1\2–\1\3", text)
    if ":" in text:
        for match in _TIME.finditer(text):
            quantities.add(_LEADING_ZERO.sub("", match[0]), span=match.span())
        text = _TIME.sub(lambda match: " " * len(match[0]), text)
    if may_be_date and _MAY_BE_DATE.search(text):
        for match in _DAY_FIRST.finditer(text):
            day, month = int(match[1]), int(match[3])
            quantities.add(match[4])
            if code == "en" and match[2] == "/" and day <= 12 and month <= 12 and day != month:
                continue  # 3/4/1999 may be either
            quantities.add_day(*((month, day) if month <= 12 else (day, month)))
            quantities.add(str(day if month <= 12 else month))
        text = _DAY_FIRST.sub(lambda match: " " * len(match[0]), text)
    return text


def _add_digits(lower: str, grammar: Grammar, quantities: Quantities) -> list[int]:
    """Add the numbers in digits; return their ends. Digits in a word (A220) or behind a point are none."""
    ends = [0]
    end = 0
    for run in _DIGITS.finditer(lower):
        start = run.start()
        before = lower[start - 1] if start else " "
        if start < end or before in "._" or (before.isalnum() and not WIDE_LETTER.match(before)):
            continue
        match = grammar.number.match(lower, start)
        if match is None:
            continue
        end = match.end()
        ends.append(match.end("scale") if match["scale"] else end)
        if match["iso"]:
            year, month, day = (int(part) for part in match["iso"].split("-"))
            quantities.add(str(year))
            quantities.add(str(day))
            quantities.add_day(month, day)
        else:
            sign = before if before != " " else lower[start - 2 : start - 1]
            unit = _SIGNS.get(sign) or grammar.unit_after(lower, end, in_digits=True)
            number = _in_years(_decimal(match, grammar), unit, match["ordinal"] is not None)
            quantities.add(*number, span=(start, end))
    return ends


def _add_words(
    lower: str, words: Iterable[str], digit_ends: Sequence[int], grammar: Grammar, quantities: Quantities
) -> None:
    """Add the numbers in words. A search for the few number words of a text is cheaper than for all of a language.

    Words that end where a number in digits ends belong to it: 5 million.
    """
    starts = sorted(
        start for word in words for start in occurrences(word, lower) if start + len(word) not in digit_ends
    )
    for spelling in grammar.units_with_numbers:  # 90 por ciento are not a hundred
        if spelling in lower:
            units = [(start, start + len(spelling)) for start in occurrences(spelling, lower)]
            starts = [start for start in starts if not any(first < start < end for first, end in units)]
    end = 0
    for start in starts:
        match = grammar.number_in_words.match(lower, start) if start >= end else None
        if match is not None:
            end = match.end()
            _add_number_words(match[0], (start, end), lower, grammar, quantities)


def occurrences(word: str, text: str) -> Iterator[int]:
    """Yield where `word` begins in `text`, as a whole word or as the first part of one with a hyphen."""
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        if not (start and text[start - 1].isalnum()) and not text[end : end + 1].isalnum():
            yield start
        start = text.find(word, end)


def _add_number_words(words: str, span: tuple[int, int], lower: str, grammar: Grammar, quantities: Quantities) -> None:
    *earlier, last = grammar.parse_words(words)
    unit_of_last = grammar.unit_after(lower, span[1], in_digits=False)
    ordinal = grammar.profile.code == "en" and words.endswith(("th", "rd", "st"))
    ambiguous = words in grammar.profile.ambiguous
    for value in (*earlier, last):
        unit = unit_of_last if value == last else ""
        # "one" is often a pronoun, "second" a unit or a rank, and "two" without a unit both or a pair.
        stated = (value > 2 and not ambiguous) or (value >= 2 and bool(unit))
        quantities.add(*_in_years(value, unit, ordinal), stated=stated, span=span)
        if value <= MAX_COUNT and not unit and not ordinal:
            quantities.counted.add(str(value))


def _add_english(lower: str, words: set[str], grammar: Grammar, quantities: Quantities) -> None:
    """Add named days and numbers that words about years imply: 90s for the 1990s, 30 for three long decades."""
    if not words.isdisjoint(_NAMED_DAY_WORDS):
        plain = lower.replace("’", "'")
        for name in [name for name in _NAMED_DAYS if name in plain]:
            month, day = _NAMED_DAYS[name]
            quantities.named_days[month, day] = frozenset([*name.replace("'s", "").split(), MONTHS[month - 1]])
            quantities.implied.add(str(day))
    implied = quantities.implied
    for number in quantities.numbers:
        if number.endswith("0s"):
            implied.update(
                {number[-3:]} if len(number) == 5 else {f"{century}{number}" for century in (17, 18, 19, 20)}
            )
    if "decades" in words or "centuries" in words:  # three long decades
        for match in _COUNTED_DECADES.finditer(lower):
            count = int(match["words"]) if match["words"].isdigit() else grammar.parse_words(match["words"])[0]
            implied.add(str(count * (10 if match["unit"] == "decades" else 100)))


def _add_dates(text: str, lower: str, month: str, grammar: Grammar, quantities: Quantities) -> None:
    """Add the dates with one name of a month. An abbreviation is a month beside a day only."""
    number = grammar.profile.months[month]
    english = grammar.profile.code == "en"
    for start in occurrences(month, lower):
        end = start + len(month)
        match = grammar.day_before.search(text[max(0, start - 40) : start]) or grammar.day_after.match(text, end)
        if match:
            quantities.months.add(number)
            quantities.days.update((number, int(day)) for day in re.findall(r"\d+", match["days"]))
        elif month not in grammar.profile.month_names:
            if text[start].isupper() and len(month) > 2:
                quantities.possible_months.add(number)  # Apr–Oct
        elif not english or text[start].isupper():
            if english and month in _AMBIGUOUS_MONTHS and not _is_month(text, start, end):
                quantities.possible_months.add(number)
            else:
                quantities.months.add(number)


def _is_month(text: str, start: int, end: int) -> bool:
    """Return whether March or May, from `start` to `end`, is a month."""
    return bool(_YEAR_AFTER.match(text, end) or _BEFORE_MONTH.search(text[max(0, start - 8) : start]))


def _add_han_numbers(text: str, grammar: Grammar, quantities: Quantities) -> None:
    """Add the numbers of a Chinese or Japanese text, in digits and in Chinese numerals."""
    text = _HAN_MORE.sub("", _HAN_PERCENT.sub(r"\1%", text))
    if "割" in text or "成" in text:
        text = _TENTHS[grammar.profile.code].sub(
            lambda match: f"{_han_value(match[1])}{_han_value(match[2]) if match[2] else 0}%", text
        )
    quantities.text = text
    if ":" in text:
        for match in _TIME.finditer(text):
            quantities.add(_LEADING_ZERO.sub("", match[0]), span=match.span())
        text = _TIME.sub(lambda match: " " * len(match[0]), text)
    for match in _HAN_NUMBER.finditer(text):
        run = match["number"]
        in_digits = run[0].isdigit()
        if run in _NO_NUMBERS:
            continue
        number = _han_value(run)
        unit = _SIGNS.get(match["symbol"] or "") or grammar.unit_after(text, match.end(), in_digits=True)
        counted = unit or text[match.end() : match.end() + 1] in _COUNTERS
        in_date = number == "10" and unit in _DATE_UNITS  # 十月十日
        part_of_words = number in ("0", "1", "10", "100", "1000", "10000") and not in_date
        if not in_digits and len(run) == 1 and (part_of_words or not counted):
            # 一 and 十 are parts of many words; a single numeral is a number before a unit only.
            quantities.implied.add(number)
            if text[match.start() - 1 : match.start()] != "第":
                continue
        stated = in_digits or len(run) > 1 or (bool(counted) and number not in ("1", "2"))
        quantities.add(*_in_years(number, unit, False), stated=stated, span=match.span("number"))
        if not in_digits and not unit and len(number) < 3 and int(number) <= MAX_COUNT:
            quantities.counted.add(number)
    for word, numbers in grammar.profile.implied_numbers.items():
        if word in text:
            quantities.implied |= numbers


def _han_value(run: str) -> str:
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
    return _format_decimal(total + section + current)


def _in_years(value: int | str, unit: str, ordinal: bool) -> tuple[str, str]:
    """Return (number, unit) with decades and centuries as years: eight decades are 80 years, the 8th century is not."""
    years = _YEARS_OF.get(unit)
    if years is None or ordinal or not str(value).isdigit():
        return str(value), unit
    return str(int(value) * years), "year"


def _decimal(match: re.Match[str], grammar: Grammar) -> str:
    """Return a number in digits as a plain decimal; "1990s" keeps its s."""
    digits = match["digits"]
    if digits.isdecimal() and digits.isascii() and not match["scale"]:
        return (digits.lstrip("0") or "0") + ("s" if match["decade"] else "")
    digits = digits.replace("٫", "." if grammar.profile.decimal_sign == "." else ",")
    if grammar.profile.decimal_sign == ".":
        digits = re.sub(r"[,\u00a0\u202f'’٬]", "", digits)
    elif re.fullmatch(r"\d{1,3}(?:[.\u00a0\u202f ٬'’]\d{3})+(?:,\d+)?", digits) and not digits.startswith("0"):
        digits = re.sub(r"[.\u00a0\u202f ٬'’]", "", digits).replace(",", ".")
    else:
        digits = re.sub(r"[\u00a0\u202f ٬'’]", "", digits).replace(",", ".")  # 0 800 22 is no number of thousands
        digits = digits.replace(".", "", digits.count(".") - 1)
    value = Decimal(digits)
    scale = match["scale"] or ""
    if scale:
        value *= 1000 if scale == "k" else grammar.digit_scales[scale]
    return _format_decimal(value) + ("s" if match["decade"] else "")


def _format_decimal(value: Decimal) -> str:
    """Return `value` without exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text.lstrip("0") or "0"
