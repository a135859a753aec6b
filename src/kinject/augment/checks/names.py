"""Proper names: which words of a text are names, and whether another text has them.

Names are found by capitals (Latin, Cyrillic, Greek), by capitals on words that are no German nouns,
by script (katakana, transliterating characters, titles in 《》) in Chinese and Japanese, and by Latin
letters in scripts without capitals.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from kinject.language.tables import Language, language_of, plain, read_yaml_table

_LISTS = read_yaml_table("word_lists")
SENTENCE_STARTERS = frozenset(_LISTS["sentence_starters"].split())
"""English stop words and other words that begin sentences and are not names."""
GENERIC_WORDS = frozenset(_LISTS["generic"].split())
"""English words in names that denote a kind of thing: museum, river, president."""
_NAME_FOLLOWERS = frozenset(_LISTS["name_followers"].split())
_TITLES = frozenset(_LISTS["titles"].split())
_SYNONYMS: dict[str, frozenset[str]] = {}
for _line in _LISTS["synonyms"].splitlines():
    for _word in _line.split():
        _SYNONYMS[_word] = _SYNONYMS.get(_word, frozenset()) | frozenset(_line.split())
_GERMAN_NOUN_ENDINGS = tuple(_LISTS["german_noun_endings"].split())
_GERMAN_ENDINGS, _GERMAN_LINKS = tuple(_LISTS["german_endings"]), tuple(_LISTS["german_links"])
_COMMON_ENDINGS = tuple(_LISTS["common_endings"].split())
_TRANSLITERATED = re.compile(f"[{''.join(_LISTS['transliterating'].split())}]{{3,}}")

_ITEM = re.compile(
    r"\A\s*(?:>\s*)*[*_]{0,2}(?:(?:[-*+•●○▪–—·](?=\s))"
    r"|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})[.)](?=\s)|[（(]?[\d一二三四五六七八九十]{1,3}[、．）)])\s*"
)
_LABEL = re.compile(
    r"[*_]{0,3}(?P<label>[^\n:：|!?。！？\"“”„«»]{1,60}?)[*_]{0,3}\s?[:：][*_]{0,3}(?=\s|\Z)"
    r"|\*\*(?P<bold>[^*\n]{1,80})\*\*"
)
_TOKEN = re.compile(r"(?:[A-Z]\.){2,}|\d*[^\W\d_][^\W_]*(?:['’][^\W\d_]+)*|\d+|[^\w\s]|\n")
_TOKEN_WITHOUT_ELISION = re.compile(r"(?:[A-Z]\.){2,}|\d*[^\W\d_][^\W_]*|\d+|[^\w\s]|\n")
"""L'apertura are two words; "Wu's" is English alone."""
_LATIN_TOKEN = re.compile(r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff0-9]+")
_BREAKS = frozenset('.!?:;…。！？"“”„«»([|•→\n')
_JOINTS, _IN_NAMES = frozenset(",-–/&"), frozenset("-–'’")
_KATAKANA = re.compile(r"[ァ-ヺー]{2,}")
_JOINED_HAN = re.compile(r"[\u4e00-\u9fff]{1,2}[·・‧][\u4e00-\u9fff]{1,2}")
_HAN_TITLE = re.compile(r"《([^《》\n]{1,40})》")
_HAN = re.compile(r"[\u4e00-\u9fff]+")
_DASH = re.compile(r"\s[–—-]{1,2}\s")
_LONG_NAME, _ALIKE = 9, 0.93
_ORDINAL = re.compile(
    r"\A\d{1,2}(?:\.\d{1,2})+(?=\.? +[A-ZÀ-Þ])"
    r"|(?<!\d[.,])\b\d{1,2}\b(?![.,%]\d|[ \u00a0\u202f]\d{3}(?!\d))"
)
"""The number of a heading or a label: 1.2 Overview, Step 1. A part of 1.2 million or 10 000 is no
such number: without it another one would be left."""
_MEASURE = re.compile(r"\d+[^\W\d_]{1,3}\d?")


@dataclass(frozen=True, slots=True)
class Reading:
    """The words of a text in their plain forms, and those that may be names, in order.

    `body` is the text without the marks of lists and headings; an unspaced one is searched as it
    is. `spelling` maps a candidate to its spelling. `sequence` are all words in order. `runs` are
    candidates side by side: the words of one name.
    """

    language: Language
    body: str
    words: frozenset[str]
    candidates: tuple[str, ...]
    spelling: dict[str, str] = field(default_factory=dict)
    sequence: tuple[str, ...] = ()
    runs: tuple[tuple[str, ...], ...] = ()

    @property
    def initials(self) -> str:
        """The first letters of all words, in order."""
        return "".join(word[0] for word in self.sequence)


@lru_cache(maxsize=256)
def read(text: str, code: str) -> Reading:
    """Return the reading of a text of the language `code`."""
    language = language_of(code)
    if language.is_unspaced:
        return _read_unspaced(text, language)
    lines = list(_lines(text, language))
    words: list[str] = []
    found: dict[str, str] = {}
    runs: list[tuple[str, ...]] = []
    for line, titled in lines:
        runs += _read_line(line, titled, language, words, found)
    body = "\n".join(line for line, _ in lines)
    return Reading(language, body, frozenset(words), tuple(found), found, tuple(words), tuple(runs))


def _lines(text: str, language: Language) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is titled) of each line without list marks: headings and labels have
    capitals of their own."""
    for line in text.split("\n"):
        heading = line.lstrip().startswith("#")
        line = _ITEM.sub("", line, count=1)
        # Titles have capitals of their own: "Great Sales of Silicon" has no name in it.
        if heading or _is_title(line):
            yield _ORDINAL.sub("", line.strip("#*_ \t")), True
            continue
        label = None
        if ":" in line or "：" in line or "**" in line:
            label = _LABEL.match(line)
        if label:
            title = label["bold"] or label["label"]
            if title.count(" ") < 8:
                yield _ORDINAL.sub("", title.strip("*_ ")), True
                line = line[label.end() :]
        # A word behind a dash may begin a sentence, as behind a colon.
        yield _DASH.sub(": ", line.replace("**", "").replace("__", " ")), False


def _is_title(line: str) -> bool:
    """Return whether a line is a title: short, without a mark at its end, or most of its words with
    a capital."""
    if len(line) > 120 or not (line.rstrip("*_ ")[-1:].isalnum() or line[-1:] in (":", "：")):
        return False
    words = [word for word in line.split() if word[0].isalpha() and len(word) > 3]
    return 2 * sum(word[0].isupper() for word in words) > len(words)


def _read_line(
    line: str, titled: bool, language: Language, words: list[str], found: dict[str, str]
) -> Iterator[tuple[str, ...]]:
    """Add the words of a line to `words` and its names to `found`; yield the names side by side."""
    pattern = _TOKEN_WITHOUT_ELISION
    if language.code == "en":
        pattern = _TOKEN
    tokens = pattern.findall(line)
    classified = [_classify(token, language.code) for token in tokens]
    words += [word for word, _, _ in classified if word]
    at_start, run = True, list[str]()
    for index, (word, is_name, start) in enumerate(classified):
        token = tokens[index]
        if at_start:
            # A sentence begins with a capital, whatever its first word is.
            is_name = start == _NAME
            if start == _BEFORE_CAPITAL:
                is_name = _is_before(tokens, index, language)
        if is_name and (not titled or _is_name_in_title(word, token, language)):
            found.setdefault(word, token)
            run.append(word)
            at_start = False
            continue
        if word:
            at_start, ends = False, not token[0].isupper()
        else:
            at_start = token in _BREAKS or (at_start and token not in _JOINTS)
            ends = token not in _IN_NAMES
        if ends and run:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)


def _is_name_in_title(word: str, token: str, language: Language) -> bool:
    """Return whether a name is one for sure where every word has a capital: a place, a code or an
    abbreviation."""
    if word in language.places or not token.isalpha():
        return True
    return token.isupper() and len(token) > 1


# The class of a word, kept: with patterns tried only where their marks are, a check of 34 words
# fell from 281 to 162 us.
@lru_cache(maxsize=65536)
def _classify(token: str, code: str) -> tuple[str, bool, str]:
    """Return the plain form of a token ("" of a mark), whether it is a name inside a sentence, and
    at the start of one."""
    if not token[0].isalnum():
        return "", False, ""
    word, language = plain(token), language_of(code)
    if re.search(r"\d", token):
        if any(map(str.isalpha, token)) and _is_code(word):
            return word, True, _NAME
        return word, False, ""
    if not token[0].isupper() or len(word) < 2 or _is_common_kind(word, language):
        return word, False, ""
    return (word, *_classify_capital(word, token, language))


def _classify_capital(word: str, token: str, language: Language) -> tuple[bool, str]:
    """Return the last two of `_classify` for a word with a capital."""
    lower = token.casefold()
    is_place = word in language.places
    is_common = not is_place and not language.common.isdisjoint((lower, word))
    if len(token) > 3 and token.isupper() and is_common:
        return False, ""  # shouted
    if language.family == "nouns":
        if _is_german_word(lower, language):
            return False, ""
        return True, _NAME
    is_name = lower not in language.frequent
    if is_common or (language.code == "en" and not is_place and word.endswith(_COMMON_ENDINGS)):
        return is_name, ""
    if is_place or token.isupper():
        return is_name, _NAME
    return is_name, _BEFORE_CAPITAL


_NAME, _BEFORE_CAPITAL = "name", "name before a capital or a verb"


def _is_before(tokens: list[str], index: int, language: Language) -> bool:
    """Return whether a word at the start of a sentence stands before another name or, in English,
    before a verb."""
    following = "".join(tokens[index + 1 : index + 2])
    if following[:1].isupper():
        return True
    if language.code != "en":
        return False
    # Each first word with a capital as a name refused dozens of faithful texts.
    is_verb = following in _NAME_FOLLOWERS or following.endswith("ed")
    return is_verb or tokens[index].endswith(("'s", "’s"))


def _is_common_kind(word: str, language: Language) -> bool:
    """Return whether a word with a capital is of a kind that is no name of its own: a title, a
    month, a unit, a weekday."""
    if word in _TITLES or word in language.unit_words or word in language.months:
        return True
    if language.code != "en":
        return False
    forms = {word, word.partition("'")[0]}
    if len(word) > 4:
        forms.add(word.removesuffix("s"))
    return not (forms.isdisjoint(SENTENCE_STARTERS) and forms.isdisjoint(GENERIC_WORDS))


def _is_code(word: str) -> bool:
    """Return whether a word mixes letters and digits (A220, B52) and is not a number with a unit or
    an ending."""
    return word.lower() != word.upper() and not _MEASURE.fullmatch(word)


def _is_german_word(lower: str, language: Language) -> bool:
    """Return whether a German word with a capital is a noun: a common one, with the ending of a
    noun, or made of common words."""
    # Places first: cities such as Paris are among the common words of German texts.
    if lower in language.places or (lower.endswith("s") and lower[:-1] in language.places):
        return False
    if lower in language.common or lower.endswith(_GERMAN_NOUN_ENDINGS) or _is_compound(lower):
        return True
    bases = {lower.removesuffix(ending) for ending in _GERMAN_ENDINGS if lower.endswith(ending)}
    return any(_is_german_base(base, language) for base in bases if len(base) > 3)


def _is_german_base(base: str, language: Language) -> bool:
    if base.endswith(_GERMAN_NOUN_ENDINGS):
        return True
    return not language.common.isdisjoint((base, base + "e", base + "en"))


@lru_cache(maxsize=8192)
def _is_compound(word: str, depth: int = 3) -> bool:
    """Return whether a word in lower case is made of two to four common German words."""
    parts = language_of("de").compound_parts
    for cut in range(len(word) - 3, 2, -1):
        head, tail = word[:cut], word[cut:]
        if not _is_part(head, _GERMAN_LINKS, parts):
            continue
        if _is_part(tail, _GERMAN_ENDINGS, parts):
            return True
        if depth > 1 and _is_compound(tail, depth - 1):
            return True
        if len(tail) > 5 and tail.endswith(_GERMAN_NOUN_ENDINGS):
            return True
    return False


def _is_part(word: str, endings: Iterable[str], parts: Collection[str]) -> bool:
    """Return whether a word without one of its `endings` is one of the `parts`."""
    return any(word.endswith(ending) and word.removesuffix(ending) in parts for ending in endings)


def _read_unspaced(text: str, language: Language) -> Reading:
    """Return the reading of a text without spaces: names in Latin letters, transliterated, in
    katakana, in 《》, and places."""
    words: list[str] = []
    found: dict[str, str] = {}
    for token in _LATIN_TOKEN.findall(text):
        word = plain(token)
        words.append(word)
        is_mixed = not token.isdigit() and not token.isalpha()
        if len(word) > 1 and (token[0].isupper() or (is_mixed and _is_code(word))):
            found.setdefault(word, token)
    names = [*_names_by_script(text, language), *_places_in(text, language)]
    found |= dict(zip(names, names, strict=True))
    runs = tuple((name,) for name in found)
    return Reading(language, text, frozenset(words), tuple(found), found, (), runs)


def _names_by_script(text: str, language: Language) -> Iterator[str]:
    """Yield the names that their script shows: katakana in Japanese; in Chinese titles in 《》, and
    characters that transliterate."""
    if language.code == "ja":
        for name in _KATAKANA.findall(text):
            if name in language.places or name not in language.common:
                yield name
        return
    yield from _JOINED_HAN.findall(text)
    yield from _HAN_TITLE.findall(text)
    for run in _TRANSLITERATED.finditer(text):
        # The last character of a run may begin a common word, which is then no part of a name.
        if text[run.end() - 1 : run.end() + 1] not in language.common:
            yield run[0]


def _places_in(text: str, language: Language) -> Iterator[str]:
    """Yield the places in a text: all parts of its runs of Chinese characters that are one."""
    for run in _HAN.findall(text):
        for n in range(2, min(7, len(run) + 1)):
            for start in range(len(run) - n + 1):
                if run[start : start + n] in language.places:
                    yield run[start : start + n]


def is_known(name: str, reading: Reading, source: Reading) -> bool:
    """Return whether a source has a name of another text: as it is, inflected or derived, as a
    numeral, or as initials."""
    spelling = reading.spelling[name]
    if reading.language.is_unspaced:
        if spelling in source.body or name in source.words:
            return True
        return _is_transliterated(spelling, source.body)
    if name in source.words:
        return True
    if any(_is_derived(name, word) or _is_synonym(name, word) for word in source.words):
        return True
    if not name.isalpha():  # FP16, FP 16
        return _code_pattern(name).search(plain(source.body)) is not None
    singular = name.removesuffix("s")
    # WHO for the World Health Organization, or a word that the text itself wrote out.
    if spelling.removesuffix("s").isupper() and 2 <= len(name) <= 6:
        return singular in source.initials or singular in reading.initials
    if len(name) >= _LONG_NAME and difflib.get_close_matches(name, source.words, 1, _ALIKE):
        return True  # a typing error corrected
    return _is_demonym(name, reading.language, source.words)


@lru_cache(maxsize=1024)
def _code_pattern(code: str) -> re.Pattern[str]:
    """Return the pattern of a code whose letters and digits may be parted."""
    parts = re.findall(r"\d+|\D+", code.removesuffix("s"))
    gap = r"[\W_]*"
    if not SENTENCE_STARTERS.isdisjoint(parts):
        gap = r"[-_./]?"  # "a 320" is no A320
    # Whole words: A22 is no part of A220.
    return re.compile(rf"(?<![^\W_]){gap.join(map(re.escape, parts))}s?(?![^\W_])")


def _is_demonym(name: str, language: Language, words: Collection[str]) -> bool:
    """Return whether one of the `words` is a place and `name` its people or its adjective, or the
    other way round: Poland, Polish."""
    for place, others in language.demonyms.items():
        if _is_derived(place, name):
            for other in others:
                if any(_is_derived(other, word) for word in words):
                    return True
    return False


def _is_derived(word: str, other: str) -> bool:
    """Return whether two words begin alike, by at least four letters and most of the shorter:
    Mongols, Mongolian."""
    if word[:3] != other[:3] or other in SENTENCE_STARTERS:
        return False
    # The digits of a code are no ending: RX4500 is not RX4501.
    if not (word.isalpha() and other.isalpha()) and _digits(word) != _digits(other):
        return False
    shorter = min(len(word), len(other))
    if shorter < 4:
        return {word, other} == {word[:shorter], word[:shorter] + "s"}
    # The last shared letter may belong to the ending: Itali|an, Ital|y.
    need = max(4, shorter - 1)
    if not word.isascii():  # endings of other languages: Нина, Ниной
        need = max(3, shorter - 2)
    return word[:need] == other[:need]


def _digits(word: str) -> list[str]:
    return re.findall(r"\d+", word)


def _is_synonym(word: str, other: str) -> bool:
    return word in _SYNONYMS.get(other, ())


def _is_transliterated(name: str, text: str) -> bool:
    """Return whether two thirds of a name are in `text`: a run of transliterating characters may
    take its neighbours in."""
    parts = re.split("[·・‧]", name)
    if len(parts) > 1:
        return any(part in text for part in parts)
    if len(name) < 3:
        return False
    size = -(-2 * len(name) // 3)  # two thirds, rounded up
    return any(name[start : start + size] in text for start in range(len(name) - size + 1))
