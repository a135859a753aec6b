"""Whether a rewriting keeps the facts: numbers, dates, units, quotations and names, none lost and none new."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from kinject.augment.checks.names import STARTERS, Names, compare_names, names_of, word_form
from kinject.augment.checks.quantities import MONTH_OF, Quantities, compare_quantities, quantities_of

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


_SCRIPTS = (
    ("Latin", "a-zA-Z\u00c0-\u024f\u1e00-\u1eff"),
    ("Cyrillic", "\u0400-\u052f"),
    ("Greek", "\u0370-\u03ff\u1f00-\u1fff"),
    ("Arabic", "\u0600-\u06ff"),
    ("Hebrew", "\u0590-\u05ff"),
    ("Devanagari", "\u0900-\u097f"),
    ("Thai", "\u0e00-\u0e7f"),
    ("Japanese", "\u3040-\u30ff"),
    ("Chinese", "\u4e00-\u9fff"),
    ("Korean", "\uac00-\ud7af"),
)
_LETTERS = tuple((name, re.compile(f"[{letters}]")) for name, letters in _SCRIPTS)
_COMMON_WORDS = {
    "English": "the of and to in is was for with that on as by from at are were his her which this it",
    "German": "der die das und ist nicht von den mit ein eine zu im des dem auf für war als auch sich",
    "French": "le la les et des est une dans du pour que qui sur par avec était au il elle ce cette ses",
    "Spanish": "el la los las y que en del por con una para es fue su se como más pero sus al lo",
    "Italian": "il lo gli di che è per una con del della nel sono era dei alla più come si anche suo",
    "Portuguese": "o os as e que do da em para com uma dos das foi não por mais como no na seu sua ao",
    "Dutch": "de het een en van is in op te dat die voor met zijn was niet aan er ook door naar",
    "Swedish": "och att det som en är på för av med den till var ett har inte han hon om från",
    "Polish": "i w na z do się nie jest to że o jako przez był była od oraz po dla",
    "Turkish": "ve bir bu da de için ile olarak olan çok daha gibi kadar sonra en o",
}
_LANGUAGES_OF = {word: [] for words in _COMMON_WORDS.values() for word in words.split()}  # type: dict[str, list[str]]
for _language, _text in _COMMON_WORDS.items():
    for _word in _text.split():
        _LANGUAGES_OF[_word].append(_language)
_ASCII_LETTER = re.compile("[a-zA-Z]")
_TOKEN = re.compile(r"[^\W\d_]+")


def script_of(text: str) -> str:
    """Return the script of most letters, "" where there are none. Any kana among Chinese characters is Japanese."""
    if text.isascii():
        return "Latin" if _ASCII_LETTER.search(text) else ""
    counts = {name: len(pattern.findall(text)) for name, pattern in _LETTERS}
    if counts["Japanese"] * 10 > counts["Chinese"]:
        counts["Japanese"] += counts["Chinese"]
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def language_of(text: str) -> str:
    """Return the language whose common words make up more of `text` than any other's, "" where that is not clear."""
    common = [word for word in _TOKEN.findall(text.lower()) if word in _LANGUAGES_OF]
    counts = Counter([language for word in common for language in _LANGUAGES_OF[word]])
    ranked = [*counts.most_common(2), ("", 0), ("", 0)]
    (best, hits), (_, others) = ranked[0], ranked[1]
    return best if hits >= 5 and hits > 1.5 * others else ""


@lru_cache(maxsize=256)
def _of_source(text: str) -> tuple[str, str]:
    """Return script and language, remembered while the rewritings of a source are checked."""
    return script_of(text), language_of(text)


def compare_languages(source: str, variant: str) -> str:
    """Return what changed ("French for English"), "" where nothing did or it cannot be told."""
    for old, new in zip(_of_source(source), (script_of(variant), language_of(variant)), strict=True):
        if old and new and old != new:
            return f"{new} for {old}"
    return ""
