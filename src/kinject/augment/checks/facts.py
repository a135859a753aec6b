"""Compare a rewriting with its source: language, numbers, dates, units, quotations and names, none lost and none new."""

from __future__ import annotations

import re
from collections import Counter
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


_SCRIPTS = (
    ("Latin", "a-zA-Z\u00c0-\u024f\u1e00-\u1eff"), ("Cyrillic", "\u0400-\u052f"),
    ("Greek", "\u0370-\u03ff\u1f00-\u1fff"), ("Arabic", "\u0600-\u06ff"), ("Hebrew", "\u0590-\u05ff"),
    ("Devanagari", "\u0900-\u097f"), ("Thai", "\u0e00-\u0e7f"), ("Japanese", "\u3040-\u30ff"),
    ("Chinese", "\u4e00-\u9fff"), ("Korean", "\uac00-\ud7af"),
)  # fmt: skip
_SCRIPT_PATTERNS = tuple((name, re.compile(f"[{letters}]")) for name, letters in _SCRIPTS)
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
_LANGUAGES_OF: dict[str, list[str]] = {}
for _language, _text in _COMMON_WORDS.items():
    for _word in _text.split():
        _LANGUAGES_OF.setdefault(_word, []).append(_language)
_ASCII_LETTER = re.compile("[a-zA-Z]")
_TOKEN = re.compile(r"[^\W\d_]+")


def find_script(text: str) -> str:
    """Return the script of most letters, "" without letters. Chinese characters with some kana are Japanese."""
    if text.isascii():
        return "Latin" if _ASCII_LETTER.search(text) else ""
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPT_PATTERNS}
    if counts["Japanese"] * 10 > counts["Chinese"]:
        counts["Japanese"] += counts["Chinese"]
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def find_language(text: str) -> str:
    """Return the language with the most common words in `text`, "" if that is not clear."""
    common = [word for word in _TOKEN.findall(text.lower()) if word in _LANGUAGES_OF]
    counts = Counter([language for word in common for language in _LANGUAGES_OF[word]])
    ranked = [*counts.most_common(2), ("", 0), ("", 0)]
    (best, hits), (_, others) = ranked[0], ranked[1]
    return best if hits >= 5 and hits > 1.5 * others else ""


@lru_cache(maxsize=256)
def _source_language(text: str) -> tuple[str, str]:
    """Return (script, language) of a source, cached for its other rewritings."""
    return find_script(text), find_language(text)


def compare_languages(source: str, variant: str) -> str:
    """Return the change of script or language ("French for English"), "" if there is none or it is unknown."""
    for old, new in zip(_source_language(source), (find_script(variant), find_language(variant)), strict=True):
        if old and new and old != new:
            return f"{new} for {old}"
    return ""
