"""Proper names in text with capital letters: which words are names, and which of them another text keeps."""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache

from kinject.augment.units import NUMBER_WORDS, UNIT_OF, roman_value
from kinject.augment.words import ACTS, BASE, COMMON_ENDINGS, DERIVED, GROUPS, STARTERS, TITLES

_TOKEN = re.compile(r"(?:[A-Z]\.){2,}|[^\W_]*\d[^\W_]*|[^\W\d_]+(?:['’][^\W\d_]+)*|[^\w\s]")
_SENTENCE_BREAKS = frozenset('.!?:;…。！？"“”«»([')
_JOINTS = frozenset(",-–/&")
# Kinds of tokens: words with a capital (those that may begin a sentence unnoticed by their ending apart), without, codes
# (A220); marks that end a sentence, that join; all others, words that are never names among them.
_NAME, _ENDING, _LOWER, _CODE, _BREAK, _JOINT, _PLAIN = "name", "ending", "lower", "code", "break", "joint", "plain"
_CAPITALS = (_NAME, _ENDING)
_MEASURE = re.compile(r"\d+([^\W\d_]+)")


@dataclass(slots=True)
class Names:
    """The words of a text in one form each (`words`; `lower` those without a capital), and which of them are names.

    `certain` ones have a capital inside a sentence, or begin one before another capital; `possible` ones begin a
    sentence and act. `shown` maps each to its spelling. `forms` holds all words in order, `joined` what a hyphen joins, by
    its parts (geo: geoscientists).
    """

    words: set[str] = field(default_factory=set)
    lower: set[str] = field(default_factory=set)
    certain: set[str] = field(default_factory=set)
    possible: set[str] = field(default_factory=set)
    shown: dict[str, str] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)
    joined: dict[str, str] = field(default_factory=dict)

    @property
    def letters(self) -> str:
        """The first letters of all words, in order."""
        return "".join(form[0] for form in self.forms)


def names_of(text: str) -> Names:
    """Return the names in `text`: words with a capital letter, or with digits among letters; common beginnings apart."""
    tokens = _TOKEN.findall(text)
    looked = list(map(_look, tokens))
    forms = [form for form, _ in looked if form]
    found = Names(words=set(forms), lower={form for form, kind in looked if kind == _LOWER}, forms=forms)
    at_start = True
    for index, (form, kind) in enumerate(looked):
        if not form:
            at_start = kind == _BREAK or (at_start and kind != _JOINT)
            continue
        if kind == _CODE or (kind in _CAPITALS and not at_start):
            found.certain.add(form)
            found.shown.setdefault(form, tokens[index])
        elif kind == _NAME:
            following = tokens[index + 1] if index + 1 < len(tokens) else ""
            if following[:1].isupper():
                found.certain.add(form)
                found.shown.setdefault(form, tokens[index])
            elif following in ACTS or tokens[index].endswith(("'s", "’s")):
                found.possible.add(form)
                found.shown.setdefault(form, tokens[index])
        at_start = False
    if "-" in text or "–" in text:
        for (before, _), hyphen, (after, _) in zip(looked, tokens[1:], looked[2:], strict=False):
            if hyphen in "-–" and before and after:
                found.joined.update(dict.fromkeys((before, after), before + after))
    found.possible -= found.certain
    return found


@lru_cache(maxsize=65536)
def _look(token: str) -> tuple[str, str]:
    """Return the form of a token ("" of a mark) and its kind."""
    if not token[0].isalnum():
        return "", _BREAK if token in _SENTENCE_BREAKS else _JOINT if token in _JOINTS else _PLAIN
    form = word_form(token)
    can_name = len(form) > 1 and form.partition("'")[0] not in STARTERS
    if not form.isalpha() and _is_code(form):
        return form, _CODE if can_name else _PLAIN
    if not token[0].isupper():
        return form, _LOWER
    if not can_name:
        return form, _PLAIN
    return form, _ENDING if form.endswith(COMMON_ENDINGS) else _NAME


def _is_code(form: str) -> bool:
    """Return whether a word mixes letters and digits (A220, B52) and is no number with a unit or ending."""
    if form.isdigit() or not any(character.isdigit() for character in form):
        return False
    measure = _MEASURE.fullmatch(form)
    return measure is None or measure[1] not in (*UNIT_OF, "st", "nd", "rd", "th", "s", "bn", "k")


@lru_cache(maxsize=65536)
def word_form(token: str) -> str:
    """Return `token` in small letters without accents, dots and possessive ending."""
    plain = token.casefold()
    if not plain.isascii():
        plain = "".join(c for c in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(c))
    return plain.replace("’", "'").replace(".", "").removesuffix("'s").removesuffix("'")


def alike(one: str, other: str) -> bool:
    """Return whether two word forms are one name: equal, plural, derived from one another, or known to be the same."""
    if one == other or one in GROUPS.get(other, ()):
        return True
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    if shared < 3:
        return False
    tails = (one[shared:], other[shared:])
    # The shared part may end in a letter that belongs to the ending: Itali|an, Ital|y.
    for back in range(min(3, shared - 2)):
        left, right = (one[shared - back :], other[shared - back :]) if back else tails
        if (left in DERIVED and right in BASE) or (right in DERIVED and left in BASE):
            return True
    return False


def compare_names(source: Names, variant: Names, complete: bool, days: frozenset[str] = frozenset()) -> tuple[str, str]:
    """Return (reason, detail) of the first name that is lost or new, ("", "") where there is none.

    `days` are words of days that the other text gives as dates.
    """
    required = source.certain - days if complete else set()
    for name in sorted(required - variant.words - TITLES - source.lower):
        if not _is_kept(name, source, variant) and not _is_slip(name, source, variant):
            return "name", f"{source.shown[name]} is lost"
    for name in sorted((variant.certain | (variant.possible - variant.lower)) - source.words - TITLES - days):
        if not _is_kept(name, variant, source) and not (name in variant.possible and _is_common(name, source)):
            return "name", f"{variant.shown[name]} is not in the source"
    return "", ""


def _is_kept(name: str, here: Names, there: Names) -> bool:
    """Return whether a name of one text stands in the other: derived (Haiti, Haitian), as a numeral, or as initials."""
    rank = roman_value(name)
    if rank and any(word.startswith(str(rank)) or NUMBER_WORDS.get(word) == rank for word in there.words):
        return True
    if 2 <= len(name) <= 6 and _is_acronym(here.shown[name]) and name in there.letters:
        return True
    return here.joined.get(name) in there.words or any(alike(name, word) for word in there.words)


def _is_common(name: str, source: Names) -> bool:
    """Return whether the source has a common word of the same stem: Comfort begins a sentence, comfortable is there."""
    stem = name[: max(5, len(name) - 3)]
    return len(name) > 4 and any(word.startswith(stem) for word in source.lower)


def _is_acronym(shown: str) -> bool:
    return shown.removesuffix("'s").removesuffix("’s").removesuffix("s").replace(".", "").isupper()


def _is_slip(name: str, source: Names, variant: Names) -> bool:
    """Return whether the source spells another of its names almost so (Leptara, Leptaria), which the variant keeps."""
    kept = [other for other in source.certain & variant.words if other[:3] == name[:3]]
    return len(name) > 5 and bool(difflib.get_close_matches(name, kept, 1, 0.85))
