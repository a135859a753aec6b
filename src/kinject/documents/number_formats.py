"""Numbers of workbooks and charts as people see them, by their formats: 12 %, 5 km, 00123, days."""

from __future__ import annotations

import datetime
import functools
import re
from itertools import chain
from pathlib import Path

from kinject.documents.text import import_extra

_TOKEN = re.compile(
    r'"(?P<quoted>[^"]*)"?|\\(?P<escaped>.)|\[\$(?P<currency>[^\]-]*)[^\]]*\]'
    r"|(?P<condition>\[[<>=][^\]]*\])|\[[^\]]*\]|[_*].|(?P<digit>General|E[+-]|[0#?@.,/])"
    r"|(?P<section>;)|(?P<percent>%)|(?P<sign>.)",
    re.IGNORECASE | re.DOTALL,
)
_LITERALS = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]')
"""The parts of a format of numbers that are no codes: texts, and locales such as [$-en-US]."""
_DIGITS = frozenset("0#?")
Token = tuple[str, str]
"""The kind of a part of a format, and its text: digit, percent, condition, or text."""


def number_text(value: int | float, number_format: str = "") -> str:
    """Return a number with its unit, currency or per cent; no float noise, all its digits."""
    if number_format in ("", "General"):
        return _plain(value)
    sections = _sections(number_format)
    tokens = _section_of(value, sections)
    kinds = [kind for kind, _ in tokens]
    # By a condition, [<1000], a section is chosen otherwise than by the sign.
    if any(kind == "condition" for kind, _ in chain.from_iterable(sections)):
        return _plain(value)
    if "digit" not in kinds:
        # A format may show words only: "Yes";;"No".
        words = "".join(text for _, text in tokens).strip()
        return words or _plain(value)
    first = kinds.index("digit")
    last = len(kinds) - kinds[::-1].index("digit")
    number = _digits(value, tokens[first:last], kinds.count("percent"))
    return (_text_of(tokens[:first]) + number + _text_of(tokens[last:])).strip()


def _plain(value: int | float) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value)


@functools.lru_cache(maxsize=1_000)
def _sections(number_format: str) -> tuple[tuple[Token, ...], ...]:
    """Return the tokens of the sections of a format: for positive numbers, negative ones, zero."""
    sections: list[list[Token]] = [[]]
    for match in _TOKEN.finditer(number_format):
        kind = match.lastgroup
        if kind == "section":
            sections.append([])
        elif kind in ("digit", "percent", "condition"):
            sections[-1].append((kind, match[0]))
        elif kind is not None:
            sections[-1].append(("text", match[kind]))
    return tuple(map(tuple, sections))


def _section_of(value: int | float, sections: tuple[tuple[Token, ...], ...]) -> tuple[Token, ...]:
    if value < 0 and len(sections) > 1 and sections[1]:
        return sections[1]
    if value == 0 and len(sections) > 2 and sections[2]:
        return sections[2]
    return sections[0]


def _text_of(tokens: tuple[Token, ...]) -> str:
    """Return what is written before or after the digits. Signs and brackets of negative numbers
    are not, as the number has its own sign."""
    return "".join(text for _, text in tokens if text not in ("-", "+", "(", ")"))


def _digits(value: int | float, tokens: tuple[Token, ...], n_percent: int) -> str:
    """Return the digits of a number, in the form of its format where that has leading zeros, or
    texts between its digits."""
    pattern = "".join(text for kind, text in tokens if kind == "digit")
    if n_percent:
        return f"{value * 100**n_percent:.10g}"
    is_whole = float(value).is_integer() and value >= 0
    if is_whole and set(pattern) <= _DIGITS:
        if any(kind == "text" for kind, _ in tokens):
            return _filled(str(int(value)), tokens)
        return str(int(value)).zfill(pattern.count("0"))
    # A comma behind the digits divides by a thousand.
    n_thousands = len(pattern) - len(pattern.rstrip(","))
    if n_thousands:
        return f"{value / 1000**n_thousands:.15g}"
    return _plain(value)


def _filled(digits: str, tokens: tuple[Token, ...]) -> str:
    """Return digits put into the places of a format from the right: 000-00-0000."""
    shown = ""
    for kind, text in reversed(tokens):
        if kind == "text":
            shown = text + shown
        elif digits or text == "0":
            shown = (digits[-1:] or "0") + shown
            digits = digits[:-1]
    return digits + shown


def shown_number(
    number: int | float, number_format: str, epoch: datetime.datetime | None, path: Path
) -> str:
    """Return a number as its format shows it, days and times in ISO 8601, counted from `epoch`
    (None: from 1900)."""
    numbers = import_extra("openpyxl.styles.numbers", path)
    dates = import_extra("openpyxl.utils.datetime", path)
    if not numbers.is_date_format(number_format):
        return number_text(number, number_format)
    is_span = numbers.is_timedelta_format(number_format)
    try:
        date = dates.from_excel(number, epoch or dates.WINDOWS_EPOCH, timedelta=is_span)
    except (ValueError, OverflowError):  # beyond the year 9999
        return number_text(number)
    if isinstance(date, datetime.datetime):
        return moment_text(date, number_format)
    if isinstance(date, datetime.timedelta):
        return _span_text(date, number_format)
    return str(date)


def _span_text(span: datetime.timedelta, number_format: str) -> str:
    """Return a span of time as people see it: 40:30 hours, and not 1 day, 16:30:00."""
    total = round(abs(span).total_seconds())
    minutes, seconds = divmod(total, 60)
    parts = [f"{minutes}", f"{seconds:02}"]
    if "[h" in number_format.lower():
        hours, minutes = divmod(minutes, 60)
        parts = [f"{hours}", f"{minutes:02}"]
        if seconds or "s" in number_format.lower():
            parts.append(f"{seconds:02}")
    elif "[s" in number_format.lower():
        parts = [f"{total}"]
    sign = ""
    if span < datetime.timedelta():
        sign = "-"
    return sign + ":".join(parts)


def moment_text(moment: datetime.datetime, number_format: str) -> str:
    """Return a day, with its time if people see one: 2026-03-05 00:00:00, and not the day; of a
    month or a year they see no day: 2026-03."""
    codes = set(_LITERALS.sub("", number_format).lower()) & set("ymdhs")
    # A text of the format's own, "Q1" yyyy, says more than the year.
    if '"' not in number_format and codes in ({"y", "m"}, {"y"}):
        return moment.date().isoformat()[: 3 * len(codes) + 1]
    if moment.time() == datetime.time() and not codes & {"h", "s"}:
        return moment.date().isoformat()
    return moment.isoformat(" ", "seconds")
