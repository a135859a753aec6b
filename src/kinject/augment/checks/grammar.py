"""How each language writes numbers, dates and units: patterns made from its profile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from kinject.augment.checks.profiles import Profile, profile_of

_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
"""Letters of languages that write no space around numbers."""
_AFTER = re.compile(r"[\s\-\u00a0\u202f]{0,2}(?P<unit>[^\W\d_]+[.²23]?|[°%％€$£¥℃][^\W\d_]?)")


class Grammar:
    """How a language writes numbers, dates and units: patterns made from its profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.unspaced = profile.names in ("han", "kana")
        self.values = profile.number_words
        self.scales = profile.scale_words
        self.units = profile.unit_of
        self._starts: dict[str, list[str]] = {}
        for spelling in sorted(self.units, key=len, reverse=True):
            start = _AFTER.match(spelling)
            self._starts.setdefault(start["unit"] if start else spelling, []).append(spelling)
        group, mark = (r",\u00a0\u202f'’٬", ".") if profile.decimal_sign == "." else (r".\u00a0\u202f ٬'’", ",")
        digits = rf"\d{{1,3}}(?:[{group}]\d{{3}})+(?:[{mark}٫]\d+)?(?!\d)|\d+(?:[.,٫]\d+)?" if mark == "," else (
            rf"\d{{1,3}}(?:[{group}]\d{{3}})+(?:\.\d+)?(?!\d)|\d+(?:[.٫]\d+)?"
        )  # fmt: skip
        scales = "|".join(sorted((re.escape(word) for word in self.scales), key=len, reverse=True)) or r"\Z."
        ordinal = f"(?P<ordinal>{profile.ordinal})?" if profile.ordinal else "(?P<ordinal>\\Z.)?"
        decade = r"(?P<decade>s\b)?" if profile.code == "en" else r"(?P<decade>\Z.)?"
        in_digits = (
            rf"(?P<iso>\b\d{{4}}-\d\d-\d\d\b)|(?<![^\W{_UNSPACED}])(?<!\.)(?P<symbol>[$€£¥₹])?\s?(?P<digits>{digits})"
            rf"{decade}{ordinal}(?:\s?(?P<scale>{scales}|k)\b)?"
        )
        words = [*self.values, *self.scales]
        self.pattern = self.digit_pattern = re.compile(in_digits)
        self._word = re.compile("|".join(sorted(map(re.escape, words), key=len, reverse=True)))
        self._compound = re.compile(rf"(?:{self._word.pattern}|{'|'.join(profile.joins) or 'und'})+")
        self._known: dict[str, bool] = dict.fromkeys(words, True)
        if words:
            # One word is a number word or, in languages that write them together, several.
            one = rf"(?:{self._word.pattern})" + (
                rf"(?:(?:{'|'.join(profile.joins)})?(?:{self._word.pattern}))*" if profile.compound else ""
            )
            join = rf"(?:\s+|-|\s+(?:{'|'.join(profile.joins)})\s+|-(?:{'|'.join(profile.joins)})-)"
            self.pattern = re.compile(rf"{in_digits}|\b(?P<words>{one}(?:{join}{one})*)\b")
        months = "|".join(sorted(map(re.escape, profile.months), key=len, reverse=True)) or r"\Z."
        day = r"\d{1,2}(?:st|nd|rd|th|er|\.?[ºª°]|\.)?"
        joint = r"\s*(?:,|and|or|to|&|[-–—]|und|bis|et|au|y|al|e|a)\s*"
        # "March 3" is English order; "mars 3" is not French.
        after = (
            rf"|\b(?P<month2>{months})\.?\s+(?:the\s+)?(?P<after>{day}(?:{joint}{day}){{0,3}})(?!\d|:\d|\.\d|,\d{{3}})"
        )
        self.date = re.compile(
            rf"\b(?P<before>{day}(?:{joint}{day}){{0,3}})\s*(?:of\s+|de\s+|del\s+|d[’'])?(?P<month>{months})\b(?!\w)"
            + (after if profile.code == "en" else r"|(?P<month2>\Z.)(?P<after>\Z.)"),
            re.IGNORECASE,
        )
        names = "|".join(map(re.escape, profile.month_names)) or r"\Z."
        self.month_alone = re.compile(rf"\b(?:{names})\b" if profile.code != "en" else rf"\b(?:{names.title()})\b")
        self.month_words = frozenset(word for month in profile.months for word in month.split())

    def has_number_word(self, words: Iterable[str]) -> bool:
        """Return whether one of `words` (in lower case) is a number."""
        known = self._known
        if not self.profile.compound:
            return not known.keys().isdisjoint(words)
        found = False
        for word in words:
            if word not in known:
                if len(known) > 100_000:
                    known.clear()
                known[word] = bool(self._compound.fullmatch(word))
            found = found or known[word]
        return found

    def unit_after(self, text: str, end: int, in_digits: bool) -> str:
        """Return the unit after a number that ends at index `end`, or ""."""
        if self.unspaced:
            start = end + (text[end : end + 1] == " ")
            return next(
                (self.units[text[start : start + n]] for n in range(6, 0, -1) if text[start : start + n] in self.units),
                "",
            )
        after = _AFTER.match(text, end)
        if after is None:
            return ""
        start = after.start("unit")
        for spelling in self._starts.get(after["unit"], ()) or self._starts.get(after["unit"].rstrip(".23"), ()):
            if text.startswith(spelling, start):
                following = text[start + len(spelling) : start + len(spelling) + 1]
                if following.isalnum() or following == "°":
                    continue
                # A single letter is a unit after digits only ("five m" is not), and "1990 v" is a match between teams.
                if (
                    len(spelling) == 1
                    and spelling.isalpha()
                    and spelling.isascii()
                    and not (in_digits and spelling in "mglwvhs")
                ):
                    continue
                return self.units[spelling]
        return ""

    def parse_words(self, text: str) -> list[int]:
        """Return the numbers in words: five thousand and two; nineteen ninety-five; two, then three; dreiundzwanzig."""
        numbers: list[int] = []
        total = part = 0  # of the current number: whole thousands, and the rest so far
        room = 0  # a value below this can be added to `part`
        started = False
        for word in self._morphemes(text):
            scale, value = self.scales.get(word), self.values.get(word, 0)
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
            elif value == 20 and part % 100 == 4 and self.profile.code == "fr":  # quatre-vingt
                part, room = part - 4 + 80, 20
            elif value >= 20 and value % 10 == 0 and 0 < part % 100 < 10 and self.profile.compound and started:
                part += value  # drei-und-zwanzig
                room = 0
            elif total == 0 and 10 <= part < 100 and value >= 10 and self.profile.code == "en":  # nineteen ninety
                part, room = part * 100 + value, self._room(value)
            else:
                if started:
                    numbers.append(total + part)
                total, part, room, started = 0, value, self._room(value), True
        return [*numbers, total + part]

    def _room(self, value: int) -> int:
        if value in self.profile.added_to:
            return 20
        return 100 if value >= 100 else 10 if value >= 20 else 0

    def _morphemes(self, text: str) -> Iterator[str]:
        for word in re.split(r"[\s-]+", text):
            if word in self.values or word in self.scales:
                yield word
            elif word not in self.profile.joins:
                yield from self._word.findall(word)


@lru_cache(maxsize=128)
def grammar_of(code: str) -> Grammar:
    """Return the grammar of a language."""
    return Grammar(profile_of(code))
