"""Compare a rewriting with its source: numbers, dates, units, quotations and names, none lost and none new."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from kinject.augment.checks.names import SENTENCE_STARTERS, Names, compare_names, extract_names, normal_word
from kinject.augment.checks.quantities import MONTH_OF, Quantities, compare_quantities, extract_quantities

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|(?:(?<=[\s(\[])|\A)[‘'](?!s\b)([^‘’'\n]{2,80})[’'](?!\w)"
)
_QUOTES = "“\"«‘'"
_NUMBERED_NAMES = (
    re.compile(r"\b(?P<word>[A-Z][^\W\d_]+)[ -](?P<number>\d[\d,]*)\b"),
    re.compile(r"\b(?P<number>\d[\d,]*) (?P<word>[A-Z][^\W\d_]+)"),
)
_WORDS = re.compile(r"\w+(?:['’]\w+)*")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a text that can be checked without understanding it.

    `numbered` maps a capitalized word to the numbers next to it (Voyager 3, 12 Tharsis). `quotations` maps the normal
    form of a quotation to its text.
    """

    quantities: Quantities
    names: Names
    quotations: dict[str, str]
    numbered: dict[str, set[str]]
    text: str

    def contains(self, quotation: str) -> bool:
        """Return whether the text contains a quotation in its normal form."""
        return quotation in _normal_words(self.text)


def extract_facts(text: str) -> Facts:
    """Return the checkable facts of `text`."""
    quotations = {}
    for match in _QUOTED.finditer(text) if any(mark in text for mark in _QUOTES) else ():
        quotation = next(group for group in match.groups() if group)
        quotations[_normal_words(quotation)] = quotation
    numbered: dict[str, set[str]] = {}
    for pattern in _NUMBERED_NAMES:
        for match in pattern.finditer(text):
            word = normal_word(match["word"])
            if word not in SENTENCE_STARTERS and word not in MONTH_OF:
                number = match["number"].replace(",", "")
                if len(number) != 4:  # a year may follow any name
                    numbered.setdefault(word, set()).add(number)
    return Facts(extract_quantities(text), extract_names(text), quotations, numbered, text)


def _normal_words(text: str) -> str:
    """Return the normal forms of the words of `text`, with a space before and after each."""
    return f" {' '.join(normal_word(word) for word in _WORDS.findall(text))} "


@lru_cache(maxsize=256)
def source_facts(source: str) -> Facts:
    """Return `extract_facts` of a source, cached for its other rewritings."""
    return extract_facts(source)


def compare_facts(source: str, variant: str, *, complete: bool = True) -> tuple[str, str]:
    """Return (reason, detail) of the first lost or new fact, ("", "") without one.

    Reasons are number, date, unit, quotation and name. Without `complete`, facts may be lost but none may be new.
    These checks cannot detect a name in another role ("A beat B" for "B beat A"), a negation or a changed common word.
    """
    return compare_with(source_facts(source), variant, complete=complete)


def compare_with(source: Facts, variant: str, *, complete: bool = True) -> tuple[str, str]:
    """Return `compare_facts` for the facts of a source."""
    new = extract_facts(variant)
    reason, detail = compare_quantities(source.quantities, new.quantities, complete)
    if reason:
        return reason, detail
    for name, numbers in new.numbered.items():
        known = source.numbered.get(name, numbers)
        if not numbers & known:
            return "number", f"{name.title()} is with {min(numbers)}, in the source with {min(known)}"
    for form, quotation in source.quotations.items():
        if complete and not new.contains(form):
            return "quotation", f"{quotation[:60]!r} is lost"
    for form, quotation in new.quotations.items():
        if not source.contains(form):
            return "quotation", f"{quotation[:60]!r} is not in the source"
    day_words = source.quantities.words_for_dates_of(new.quantities) | new.quantities.words_for_dates_of(
        source.quantities
    )
    return compare_names(source.names, new.names, complete, day_words)
