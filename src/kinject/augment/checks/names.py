"""Proper names: which words of a text are names, and which of them are in another text.

English has word lists: sentence starters, generic words in names, synonyms, endings. In other languages CLDR's names of
countries and cities and wordfreq's lists of common words replace them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from kinject.augment.checks.differences import Difference, is_inflected, resembles
from kinject.corpus.profiles import (
    Profile,
    common_words,
    frequent_words,
    grammar_of,
    profile_of,
    read_words,
    roman_value,
)

_LISTS = read_words("word_lists")
SENTENCE_STARTERS = frozenset(_LISTS["sentence_starters"].split())
"""English stop words and other words that begin sentences and are not names."""
GENERIC_WORDS, TITLES, NAME_FOLLOWERS, DERIVED_ENDINGS, BEFORE_PLACES, GERMAN_ARTICLES = (
    frozenset(_LISTS[key].split())
    for key in ("generic", "titles", "name_followers", "derived_endings", "before_places", "german_articles")
)
COMMON_ENDINGS, GERMAN_NAME_ENDINGS, GERMAN_NOUN_ENDINGS = (
    tuple(_LISTS[key].split()) for key in ("common_endings", "german_name_endings", "german_noun_endings")
)
BASE_ENDINGS, GERMAN_ENDINGS, GERMAN_LINKS = (
    tuple(_LISTS[key]) for key in ("base_endings", "german_endings", "german_links")
)
TRANSLITERATED = re.compile(f"[{''.join(_LISTS['transliterating'].split())}]{{3,}}")
SYNONYMS: dict[str, frozenset[str]] = {}
"""English word -> words with the same meaning."""
for _line in _LISTS["synonyms"].splitlines():
    for _word in _line.split():
        SYNONYMS[_word] = SYNONYMS.get(_word, frozenset()) | frozenset(_line.split())

_TOKEN = re.compile(r"(?:[A-Z]\.){2,}|[^\W\d_]++(?:\d[^\W_]*+|(?:['’][^\W\d_]++)*+)|\d[^\W_]*+|[^\w\s]|\n")
_ASCII_TOKEN = re.compile(r"(?:[A-Z]\.){2,}|[A-Za-z]++(?:\d[A-Za-z\d]*+|(?:'[A-Za-z]++)*+)|\d[A-Za-z\d]*+|[^\w\s]|\n")
"""`_TOKEN` for a text of ASCII characters, where it finds the same faster."""
_TOKEN_WITHOUT_ELISION = re.compile(r"(?:[A-Z]\.){2,}|[^\W\d_]++(?:\d[^\W_]*+)?|\d[^\W_]*+|[^\w\s]|\n")
"""L'apertura are two words; "Wu's" is English alone."""
_LATIN_TOKEN = re.compile(r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff0-9]+|[^\w\s]")
"""In a text without spaces between words."""
_SENTENCE_BREAKS = frozenset('.!?:;…。！？"“”„«»([|¿¡•→⇒✓✔✗✘\n')
_JOINTS = frozenset(",-–/&")
# Kinds of tokens. Words: capitalized; capitalized with a common ending; lower case; a code such as A220; a word that is
# never a name. Marks: one that ends a sentence; one that joins words; any other.
_CAPITALIZED, _COMMON_ENDING, _LOWER, _CODE, _NEVER_NAME = (
    "capitalized",
    "common ending",
    "lower",
    "code",
    "never a name",
)
_BREAK, _JOINT, _OTHER_MARK = "break", "joint", "other mark"
_CAPITALS = (_CAPITALIZED, _COMMON_ENDING)
_MEASURE = re.compile(r"\d+([^\W\d_\uac00-\ud7af]+)[\uac00-\ud7af]*")
_ENDINGS_AFTER_DIGITS = frozenset(
    ("st", "nd", "rd", "th", "s", "bn", "k", "er", "ers", "e", "ème", "eme", "o", "a", "os", "as", "ste", "de")
)
_GERMAN_ADJECTIVE = re.compile(r"(\w{4,})isch(?:e[mnrs]?)?")
_KATAKANA = re.compile(r"[ァ-ヺー]{2,}")
_WITH_UNIT = re.compile(r"\d+[kMGTmµ]?[A-Z]?[a-zµ]{1,4}\d{0,2}")
"""150kcal, 12h00."""
_JOINED = re.compile(r"\w+(?:·\w+)+")
_JOINED_HAN = re.compile(r"[\u4e00-\u9fff]{1,2}[·・‧][\u4e00-\u9fff]{1,2}")
_HAN_TITLE = re.compile(r"《([^《》\n]{1,40})》")
_HAN = re.compile(r"[\u4e00-\u9fff]+")


@dataclass(slots=True)
class Names:
    """The words of a text in their normal forms, and which of them are names.

    `words` are all words, `lower` those without a capital. `certain` names have a capital inside a sentence, or begin a
    sentence before another capital; `possible` names begin a sentence and are followed by a verb. `spelling` maps each name
    to its spelling. `sequence` has all words in order, `joined` maps the parts of a hyphenated word to the whole
    (geo: geoscientists). `text` is that of a language without spaces between words, "" for others.
    """

    words: set[str] = field(default_factory=set)
    lower: set[str] = field(default_factory=set)
    certain: set[str] = field(default_factory=set)
    possible: set[str] = field(default_factory=set)
    spelling: dict[str, str] = field(default_factory=dict)
    sequence: list[str] = field(default_factory=list)
    joined: dict[str, str] = field(default_factory=dict)
    text: str = ""

    @property
    def initials(self) -> str:
        """The first letters of all words, in order."""
        return "".join(word[0] for word in self.sequence)


class _Kinds(dict[str, tuple[str, str]]):
    """Token -> its normal form and kind, computed once."""

    def __init__(self, classify: Callable[[str], tuple[str, str]]) -> None:
        super().__init__()
        self._classify = classify

    def __missing__(self, token: str) -> tuple[str, str]:
        if len(self) > 65_536:
            self.clear()
        kind = self[token] = self._classify(token)
        return kind


class NameReader:
    """Reads the names of texts in one language."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.english = profile.code == "en"
        self.unspaced = profile.names in ("han", "kana") or profile.code in ("th", "km", "lo", "my")
        self._kinds = _Kinds(self._classify)

    def read(self, text: str) -> Names:
        """Return the names in `text`: words with a capital letter or with digits among letters, without common beginnings."""
        if self.unspaced:
            return self._read_unspaced(text)
        pattern = _TOKEN_WITHOUT_ELISION if not self.english else _ASCII_TOKEN if text.isascii() else _TOKEN
        tokens = pattern.findall(text)
        classified = list(map(self._kinds.__getitem__, tokens))
        sequence = [word for word, _ in classified if word]
        names = Names(
            words=set(sequence), lower={word for word, kind in classified if kind == _LOWER}, sequence=sequence
        )
        certain, possible, spelling = names.certain, names.possible, names.spelling
        at_start = True
        for index, (word, kind) in enumerate(classified):
            if kind is _LOWER:
                at_start = False
                continue
            if not word:
                item = index > 1 and tokens[index] == ")" and len(tokens[index - 1]) == 1 and tokens[index - 2] in "(\n"
                at_start = kind == _BREAK or (at_start and kind != _JOINT) or item  # (a) The house
                continue
            if kind == _CODE or (kind in _CAPITALS and not at_start):
                certain.add(word)
                spelling.setdefault(word, tokens[index])
            elif kind == _CAPITALIZED:
                following = tokens[index + 1] if index + 1 < len(tokens) else ""
                self._add_first_word(names, word, tokens[index], following)
            at_start = False
        if "-" in text or "–" in text:
            for (before, _), hyphen, (after, _) in zip(classified, tokens[1:], classified[2:], strict=False):
                if hyphen in "-–" and before and after:
                    names.joined.update(dict.fromkeys((before, after), before + after))
        possible -= certain
        return names

    def _add_first_word(self, names: Names, word: str, token: str, following: str) -> None:
        """Add the first word of a sentence, if it is a name: no common word, or one before a rare word with a capital."""
        common = token.lower() in self.profile.common_words and word not in self.profile.places
        if following[:1].isupper() and not (
            common and (self.profile.names == "nouns" or following.lower() in self.profile.common_words)
        ):
            (names.possible if common else names.certain).add(word)  # "Raises OSError", "Anna Petrov"
            names.spelling.setdefault(word, token)
        elif not common and (
            not self.english
            or following in NAME_FOLLOWERS
            or following.endswith("ed")
            or token.endswith(("'s", "’s"))
            or token[1:].isupper()
        ):
            names.possible.add(word)
            names.spelling.setdefault(word, token)

    def _classify(self, token: str) -> tuple[str, str]:
        """Return the normal form of a token ("" for a mark) and its kind."""
        if not token[0].isalnum():
            return "", _BREAK if token in _SENTENCE_BREAKS else _JOINT if token in _JOINTS else _OTHER_MARK
        word = normal_word(token)
        starters = SENTENCE_STARTERS if self.english else _NO_WORDS
        may_be_name = len(word) > 1 and starters.isdisjoint((word.partition("'")[0], word.removesuffix("s")))
        if not word.isalpha() and self._is_code(word) and not _WITH_UNIT.fullmatch(token):
            return word, _CODE if may_be_name else _NEVER_NAME
        if not token[0].isupper():
            return word, _LOWER
        if not may_be_name or (len(token) > 4 and token.isupper() and token.lower() in self.profile.common_words):
            return word, _NEVER_NAME
        common = self.english and word.endswith(COMMON_ENDINGS)
        return word, _COMMON_ENDING if common else _CAPITALIZED

    def _is_code(self, word: str) -> bool:
        """Return whether a word mixes letters and digits (A220, B52) and is not a number with a unit or an ending."""
        if word.isdigit() or not any(character.isdigit() for character in word):
            return False
        if word in self.profile.unit_of:  # km²
            return False
        if word.lower() == word.upper():  # a year with an Arabic letter
            return False
        measure = _MEASURE.fullmatch(word)
        return measure is None or (measure[1] not in self.profile.unit_of and measure[1] not in _ENDINGS_AFTER_DIGITS)

    def _read_unspaced(self, text: str) -> Names:
        """Return the names in a text without spaces: in Latin letters, transliterated, in katakana, places, unknown words."""
        names = Names(text=text)
        for token in _LATIN_TOKEN.findall(text):
            if token[0].isalpha() or (token[0].isdigit() and not token.isdigit()):
                word = normal_word(token)
                names.words.add(word)
                names.sequence.append(word)
                if len(word) > 1 and (token[0].isupper() or self._is_code(word)) and not _WITH_UNIT.fullmatch(token):
                    names.certain.add(word)
                    names.spelling[word] = token
        if self.profile.names == "kana":
            matches = _KATAKANA.findall(text)
        else:
            matches = [*_JOINED_HAN.findall(text), *_HAN_TITLE.findall(text), *TRANSLITERATED.findall(text)]
        places = self.profile.places
        matches += [
            run[start : start + n]
            for run in _HAN.findall(text) for n in range(2, min(7, len(run) + 1)) for start in range(len(run) - n + 1)
            if run[start : start + n] in places
        ]  # fmt: skip
        names.certain.update(matches)
        names.spelling.update({name: name for name in matches})
        return names

    def weight(self, name: str, names: Names) -> int:
        """Return how sure it is that a word with a capital is a name: 0 (it is none), 1 or 2."""
        spelling = names.spelling.get(name, name)
        raw = spelling.casefold().replace("’", "'").removesuffix("'s")
        profile = self.profile
        if raw in profile.unit_words or self._is_number(raw):
            return 0
        if self.unspaced:
            return self._unspaced_weight(name, names)
        if raw in profile.places or not raw.isalpha():
            return 2
        if raw in profile.frequent_words:
            return 0
        if not profile.code:
            return 1
        if profile.names == "nouns":
            return self._german_weight(raw, name, names)
        if not self.english and name in names.possible:  # the first word of a sentence
            return 0 if profile.has_stem(name) else 1
        if self.english or raw not in profile.common_words or raw in common_words("en"):
            return 2
        return 1

    def _is_number(self, word: str) -> bool:
        """Return whether a word in lower case is a number of several words: millecentoventisei."""
        return self.profile.compound and len(word) > 7 and bool(grammar_of(self.profile.code).number_words_in([word]))

    def _unspaced_weight(self, name: str, names: Names) -> int:
        if "·" not in name and TRANSLITERATED.fullmatch(name) and self._crosses_a_word(name, names.text):
            return 0
        if _KATAKANA.fullmatch(name) and name in self.profile.common_words and name not in self.profile.places:
            return 0
        return 2

    def _crosses_a_word(self, name: str, text: str) -> bool:
        """Return whether the last character of a name belongs to a common word with the next: 日内提 in 工作日内提交."""
        ends = (text.find(name, start) + len(name) for start in range(text.count(name)))
        return any(text[end - 1 : end + 1] in self.profile.common_words for end in ends)

    def _is_after_a_name(self, name: str, names: Names) -> bool:
        """Return whether a word comes after a name: surnames may be compounds, too."""
        pairs = zip(names.sequence, names.sequence[1:], strict=False)
        before = {word for word, after in pairs if after == name and word in names.certain}
        return any(not is_german_compound(word) and not word.endswith(GERMAN_NOUN_ENDINGS) for word in before)

    def _german_weight(self, raw: str, name: str, names: Names) -> int:
        """Return `weight` of a German noun or name: a noun is common, is made of common words, or has the ending of a noun."""
        spelling = names.spelling.get(name, name)
        if spelling.isupper() and len(spelling) > 1:
            return 2
        common = self.profile.common_words
        if raw.endswith("s") and raw[:-1] in self.profile.places:
            return 2
        if spelling.lower() in common:
            # Paris is as common in other languages as in German; so are Hotel and Film, but an article may precede them.
            if sum(spelling.lower() in common_words(code) for code in ("en", "fr", "es", "it", "pt")) < 2:
                return 0
            pairs = zip(names.sequence, names.sequence[1:], strict=False)
            return int(
                not any(word == name and before in GERMAN_ARTICLES for before, word in pairs)
                and raw not in GERMAN_ARTICLES
            )
        if raw.endswith(GERMAN_NOUN_ENDINGS):
            return 0
        if is_german_compound(raw):
            return int(raw.endswith(GERMAN_NAME_ENDINGS) or self._is_after_a_name(name, names))
        bases = {raw.removesuffix(ending) for ending in GERMAN_ENDINGS if raw.endswith(ending)}
        if any(
            base in common or base + "e" in common or base + "en" in common or base.endswith(GERMAN_NOUN_ENDINGS)
            for base in bases
            if len(base) > 3
        ):
            return 0
        return 1 if name in names.possible else 2


_NO_WORDS: frozenset[str] = frozenset()


@lru_cache(maxsize=128)
def reader_of(code: str) -> NameReader:
    """Return the reader for a language."""
    return NameReader(profile_of(code))


def extract_names(text: str, code: str = "en") -> Names:
    """Return the names in a text of the language `code`."""
    return reader_of(code).read(text)


@lru_cache(maxsize=1)
def _german_parts() -> frozenset[str]:
    """Return the words of which German compounds are made: common ones, of three letters only frequent ones."""
    words = frequent_words("de")
    return frozenset([word for word in words if len(word) > 3] + [word for word in words[:4000] if len(word) == 3])


@lru_cache(maxsize=8192)
def is_german_compound(word: str, depth: int = 3) -> bool:
    """Return whether a word in lower case is made of two to four common German words."""
    parts = _german_parts()
    for cut in range(len(word) - 3, 2, -1):
        head, tail = word[:cut], word[cut:]
        if not any(head.endswith(link) and head.removesuffix(link) in parts for link in GERMAN_LINKS):
            continue
        if any(tail.endswith(ending) and tail.removesuffix(ending) in parts for ending in GERMAN_ENDINGS):
            return True
        if (depth > 1 and is_german_compound(tail, depth - 1)) or (
            len(tail) > 5 and tail.endswith(GERMAN_NOUN_ENDINGS)
        ):
            return True
    return False


@lru_cache(maxsize=65536)
def normal_word(token: str) -> str:
    """Return `token` in lower case without accents, dots and possessive ending."""
    plain = token.casefold()
    if not plain.isascii():
        plain = "".join(c for c in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(c))
    return plain.replace("’", "'").replace(".", "").removesuffix("'s").removesuffix("'")


def _is_same_name(word: str, other: str) -> bool:
    """Return whether two words are one name: equal, plural, derived from one another, or known synonyms."""
    if word == other or word in SYNONYMS.get(other, ()):
        return True
    n_shared = 0
    for a, b in zip(word, other, strict=False):
        if a != b:
            break
        n_shared += 1
    if n_shared < 3:
        return False
    tails = (word[n_shared:], other[n_shared:])
    # The last shared letters may belong to the endings: Itali|an, Ital|y.
    for back in range(min(3, n_shared - 2)):
        a, b = (word[n_shared - back :], other[n_shared - back :]) if back else tails
        if (a in DERIVED_ENDINGS and b in BASE_ENDINGS) or (b in DERIVED_ENDINGS and a in BASE_ENDINGS):
            return True
    return False


def compare_names(
    source: Names, variant: Names, complete: bool, day_words: frozenset[str], source_frame: Names, variant_frame: Names,
    quoted: str = "", code: str = "en",
) -> Iterator[Difference]:  # fmt: skip
    """Yield the lost and new names.

    `day_words` are words of named days (Valentine's Day) for which the other text gives the date. `source_frame` has
    the words of the source's frame and title, `variant_frame` those of the variant's frame. `quoted` are the variant's
    quotations that are not in the source: their words do not count.
    """
    reader = reader_of(code)
    if complete:
        candidates = sorted(source.certain - day_words - variant.words - variant_frame.words - source.lower)
        for name in candidates:
            weight = 0 if _is_generic(name, reader) else reader.weight(name, source)
            if weight and not any(_is_kept(name, source, other, reader) for other in (variant, variant_frame)):
                explained = resembles(name, variant.words) or _is_symbol(name, source)
                sure = (weight > 1 and not explained and not _is_part_of_a_name(name, source, variant)) or (
                    _is_in_place_of(name, source, variant)
                )
                yield Difference("name", f"{source.spelling[name]} is lost", sure, True, explained)
    new = variant.certain | (variant.possible - variant.lower)
    new -= source.words | source_frame.words | variant_frame.words | day_words
    for name in sorted(new):
        weight = 0 if _is_generic(name, reader) and not _stands_alone(name, variant) else reader.weight(name, variant)
        kept_there = any(_is_kept(name, variant, other, reader) for other in (source, source_frame))
        if not weight or kept_there or name in quoted:
            continue
        shouted = not complete and _is_acronym(variant.spelling[name])
        alike = resembles(name, source.words | source_frame.words)
        explained = alike or _is_spelled_out(name, variant, source) or _is_symbol(name, variant)
        sure = (weight > 1 and not shouted and not explained) or _is_in_place_of(name, variant, source)
        yield Difference("name", f"{variant.spelling[name]} is not in the source", sure, explained=explained)


def _is_generic(name: str, reader: NameReader) -> bool:
    return name in TITLES or name in (GENERIC_WORDS if reader.english else reader.profile.generic)


def _stands_alone(name: str, names: Names) -> bool:
    """Return whether a generic word is a whole name: "in Gold" is one, "the Gold" and "Gold Coast" are not."""
    around = zip(names.sequence, names.sequence[1:], [*names.sequence[2:], ""], strict=False)
    return any(
        word == name and before in BEFORE_PLACES and after not in names.certain for before, word, after in around
    )


def _is_part_of_a_name(name: str, names: Names, other: Names) -> bool:
    """Return whether another word of a name is in the other text: Robert of Robert Lyle, where Lyle is."""
    if names.text:
        runs = (run for run in _JOINED.findall(names.text) if name in run)
        return any(part in other.text for run in runs for part in run.split("·") if part not in name)
    beside = {a if b == name else b for a, b in pairwise(names.sequence) if name in (a, b)}
    return not beside.isdisjoint(names.certain & other.words)


def _is_in_place_of(name: str, names: Names, other: Names) -> bool:
    """Return whether the other text has another name, which this text lacks, between the same two words."""
    here, there = (zip(side.sequence, side.sequence[1:], side.sequence[2:], strict=False) for side in (names, other))
    frames = {(before, after) for before, word, after in here if word == name}
    return any(
        (before, after) in frames and word in other.certain and word not in names.words for before, word, after in there
    )


def _is_symbol(name: str, names: Names) -> bool:
    """Return whether a word follows a number as the symbol of a unit does: 8 GWh."""
    is_short = len(name) < 5 and not names.spelling[name].istitle()
    return is_short and any(before.isdigit() and word == name for before, word in pairwise(names.sequence))


def _is_spelled_out(name: str, names: Names, other: Names) -> bool:
    """Return whether a word is one of those whose initials the other text has: World, in World Health Organization, of WHO."""
    initials = names.initials
    for acronym in (word for word in other.certain if _is_acronym(other.spelling[word]) and 1 < len(word) < 7):
        start = initials.find(acronym)
        while start >= 0:
            if name in names.sequence[start : start + len(acronym)]:
                return True
            start = initials.find(acronym, start + 1)
    return False


def _is_kept(name: str, names: Names, other: Names, reader: NameReader) -> bool:
    """Return whether the other text has a name too: derived (Haiti, Haitian), as a numeral, or as initials."""
    if reader.unspaced:
        return name in other.words or name in other.text or _is_transliterated(name, other.text)
    rank, values = roman_value(name), reader.profile.number_words
    if rank and any(word.startswith(str(rank)) or values.get(word) == rank for word in other.words):
        return True
    is_initials = 2 <= len(name) <= 6 and _is_acronym(names.spelling[name]) and name in other.initials
    is_spaced = not name.isalpha() and name in "".join(other.sequence)  # FP16, FP 16
    if is_initials or is_spaced or names.joined.get(name) in other.words:
        return True
    same = any(_is_same_name(name, word) for word in other.words)
    if same or reader.english:
        return same
    if any(is_inflected(name, word) for word in other.words) or _is_german_adjective(name, other.words):
        return True
    related = {
        normal_word(word)
        for country, words in reader.profile.demonyms.items()
        if is_inflected(normal_word(country), name)
        for word in words
    }
    return any(is_inflected(demonym, word) for demonym in related for word in other.words)


def _is_german_adjective(name: str, words: Iterable[str]) -> bool:
    """Return whether an adjective of a name is there: Sowjetunion, sowjetischen."""
    return any(match[1] == name[: len(match[1])] for match in map(_GERMAN_ADJECTIVE.fullmatch, words) if match)


def _is_transliterated(name: str, text: str) -> bool:
    """Return whether two thirds of a name are in `text`: a run of transliterating characters may take its neighbours in."""
    size = max(2, -(-2 * len(name) // 3))
    if len(name) < 3 or not set(name).isdisjoint("·・‧"):
        return False
    return any(name[start : start + size] in text for start in range(len(name) - size + 1))


def _is_acronym(spelling: str) -> bool:
    return spelling.removesuffix("'s").removesuffix("’s").removesuffix("s").replace(".", "").isupper()
