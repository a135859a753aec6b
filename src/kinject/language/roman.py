"""Roman numerals in a written answer: World War II, the XVIII century, MCMXCIV."""

from __future__ import annotations

import re
from fractions import Fraction

from kinject.language.amounts import Number, Numeral
from kinject.language.moments import TAKEN, Reader
from kinject.language.numbers import century_with_era
from kinject.language.spelling import case_fold

_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_BEHIND_NAME = re.compile(
    r"(?<![\w'.])(?P<name>[^\W\d_][\w'.]*) "
    r"(?P<numeral>(?=[IVXL])(?:XL|L?X{0,3})(?:IX|IV|V?I{0,3}))(?![\w'])"
)
"""Up to 89, behind a word: CD, DC and MD are mostly no numbers."""
_PARTS = frozenset(("chapter", "part", "volume", "book", "act", "scene", "phase", "stage", "type"))
"""Words of small letters before a numeral."""
_OF_CENTURY = re.compile(
    r"(?<!\w)(?P<numeral>(?=[IVX])X{0,2}(?:IX|IV|V?I{0,3}))(?:th|st|nd|rd|e|ème)?"
    r"(?:\scentur(?:y|ies)\b|\ssiècles?\b)"
)
_CENTURY_BEFORE = re.compile(
    r"(?<!\w)(?:siglos?|secolo|século)\s(?P<numeral>(?=[IVX])X{0,2}(?:IX|IV|V?I{0,3}))(?!\w)"
)
_YEAR = re.compile(
    r"(?<!\w)(?P<numeral>(?=\w{4})M{1,2}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})"
    r"(?:IX|IV|V?I{0,3}))(?!\w)"
)


def take_numerals(reader: Reader) -> None:
    """Take the Roman numerals of a text that are clearly meant as such."""
    for pattern in (_OF_CENTURY, _CENTURY_BEFORE):
        for match in pattern.finditer(reader.folded):
            century = Number(Fraction(roman_value(match["numeral"])), "century", is_ordinal=True)
            end, century = century_with_era(reader, match.end(), century)
            reader.take(match.start(), end, century)
    for match in _YEAR.finditer(reader.folded):
        if TAKEN not in reader.rest[match.start() : match.end()]:
            value = roman_value(match["numeral"])
            reader.take(*match.span(), Number(Fraction(value), digits=str(value)))
    for match in _BEHIND_NAME.finditer(reader.folded):
        start, end = match.span("numeral")
        is_name = match["name"][0].isupper() or match["name"] in _PARTS
        if is_name and start < end and TAKEN not in reader.rest[start:end]:
            numeral = match["numeral"]
            reader.take(start, end, Numeral(roman_value(numeral), case_fold(numeral)))


def roman_value(numeral: str) -> int:
    """Return the value of a Roman numeral."""
    values = [_VALUES[letter] for letter in numeral]
    total = 0
    for value, following in zip(values, [*values[1:], 0], strict=True):
        # IV: a smaller one before a larger one is taken off it
        if value < following:
            value = -value
        total += value
    return total
