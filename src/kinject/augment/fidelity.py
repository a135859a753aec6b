"""Whether a rewriting keeps the facts: numbers, dates, units, quotations and names, none lost and none new."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from kinject.augment.names import Names, compare_names, names_of, word_form
from kinject.augment.quantities import Quantities, compare_quantities, quantities_of
from kinject.augment.units import MONTH_OF
from kinject.augment.words import STARTERS

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|(?:(?<=[\s(\[])|\A)[‘'](?!s\b)([^‘’'\n]{2,80})[’'](?!\w)"
)
_QUOTES = "“\"«‘'"
_LABELS = (
    re.compile(r"\b(?P<word>[A-Z][^\W\d_]+)[ -](?P<number>\d[\d,]*)\b"),
    re.compile(r"\b(?P<number>\d[\d,]*) (?P<word>[A-Z][^\W\d_]+)"),
)
_WORDS = re.compile(r"\w+(?:['’]\w+)*")


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be checked of a text without understanding it.

    `labels` maps a word with a capital to the numbers beside it (Voyager 3, 12 Tharsis).
    """

    quantities: Quantities
    names: Names
    quotations: dict[str, str]
    labels: dict[str, set[str]]
    text: str

    def holds(self, quotation: str) -> bool:
        """Return whether the words of a quotation, in one form each, stand in the text."""
        return quotation in _word_forms(self.text)


def facts_of(text: str) -> Facts:
    """Return the checkable facts of `text`."""
    quotations = {}
    for match in _QUOTED.finditer(text) if any(mark in text for mark in _QUOTES) else ():
        inside = next(group for group in match.groups() if group)
        quotations[_word_forms(inside)] = inside
    labels: dict[str, set[str]] = {}
    for pattern in _LABELS:
        for match in pattern.finditer(text):
            form = word_form(match["word"])
            if form not in STARTERS and form not in MONTH_OF:
                number = match["number"].replace(",", "")
                if len(number) != 4:  # a year stands beside any name
                    labels.setdefault(form, set()).add(number)
    return Facts(quantities_of(text), names_of(text), quotations, labels, text)


def _word_forms(text: str) -> str:
    """Return the words of `text` in one form each, a space before and after each."""
    return f" {' '.join(word_form(word) for word in _WORDS.findall(text))} "


@lru_cache(maxsize=256)
def source_facts(source: str) -> Facts:
    """Return `facts_of` a source, remembered while its paraphrases are checked."""
    return facts_of(source)


def compare_facts(source: str, variant: str, *, complete: bool = True) -> tuple[str, str]:
    """Return (reason, detail) of the first fact that is lost or new; ("", "") where none was found.

    Reasons are number, date, unit, quotation and name. Without `complete`, facts may be lost but none may be new.
    A name that only moved ("A beat B" for "B beat A"), a negation or a detail in common words is beyond these checks.
    """
    return compare_with(source_facts(source), variant, complete=complete)


def compare_with(old: Facts, variant: str, *, complete: bool = True) -> tuple[str, str]:
    """Return `compare_facts` for a source whose facts are at hand."""
    new = facts_of(variant)
    reason, detail = compare_quantities(old.quantities, new.quantities, complete)
    if reason:
        return reason, detail
    for label, numbers in new.labels.items():
        known = old.labels.get(label, numbers)
        if not numbers & known:
            return "number", f"{label.title()} is with {min(numbers)}, in the source with {min(known)}"
    for form, quotation in old.quotations.items():
        if complete and not new.holds(form):
            return "quotation", f"{quotation[:60]!r} is lost"
    for form, quotation in new.quotations.items():
        if not old.holds(form):
            return "quotation", f"{quotation[:60]!r} is not in the source"
    days = old.quantities.words_for_days_of(new.quantities) | new.quantities.words_for_days_of(old.quantities)
    return compare_names(old.names, new.names, complete, days)
