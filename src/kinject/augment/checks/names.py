"""Proper names in text with capital letters: which words are names, and which of them are in another text.

English word lists come first: sentence starters, generic words in names, synonyms, endings.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache

from kinject.augment.checks.quantities import NUMBER_WORDS, UNIT_OF, roman_value

_STARTERS_TEXT = """
a about above according across additionally after afterwards again against alas albeit all almost along alongside
already also although altogether always amid amidst among amongst an and another any anyone are around as aside at
away back based because become before began behind being below beneath beside besides between beyond both but by can
certain clearly come consequently considered critics currently data de despite did do does down due during each
earlier early eight either elsewhere en enough especially even eventually ever every everyone everything evidently
except experts fans far few fewer finally first five following for former formerly fortunately founded four friday
from further furthermore given had has have he hence her here hers high his historically hosted how however i if in
indeed initially inside instead into is it its itself just known last late later latter least led less like likewise
little local located long made many may maybe meanwhile members men mere might modern monday more moreover most much
must my named near nearby nearly neither never nevertheless new next nine no nobody none nonetheless nor not notable
notably nothing now of off often old on once one only onto open or originally other others otherwise our out outside
over overall part particularly people perhaps plus post prior quite rather recent regardless researchers same saturday
scientists second seen set seven several shall she should similarly since six so some someone something sometimes soon
still students subsequently such sunday supposedly surely take taken ten than that the their theirs them themselves
then there thereafter thereby therefore these they third this those though three through throughout thursday thus to
today together too toward towards tuesday twenty two under unfortunately unless unlike until up upon us usually
various very via was we wednesday well were what whatever when whenever where whereas wherever whether which while who
whoever whole whom whose why will with within without women would yesterday yet you your
"""
_GENERIC_TEXT = """
academy administration agency airport army assembly association award bank battle bay board book building bureau
capital captain castle cathedral center central centre century chair chairman chamber championship chancellor chapter
chief church city club coast college colonel commander commission committee community company conference congress
constitution convention corporation council count county coup court cup day defence defense department development
director district division doctor dome duke dynasty east eastern eastside economy emperor empire era event executive
expo fair federal federation festival field final finals first force forces forest fort foundation fund galaxy games
general global gold government governor grand great group gulf hall head headquarters high hill hills hospital hotel
house hurricane inc independent institute international island islands judge justice king kingdom lake law league
level lieutenant lord lower magazine main major march marquis mayor medal media memorial meteorological minister
ministry minor miss mission monument mount mountain mountains movement mr mrs ms museum nation national new north
northeast northern northside northwest ocean office officer official old olympic opera operation order organisation
organization pact palace park parliament party peace peninsula people people's plan planet police pope port premier
president president's presidential press prime prince princess professor program project protocol province public
queen radio rail railway region regional republic research reserve revolution river road royal saint school science
sea secretary senate senator series service show showdown shrine sir sister society solar south southeast southern
southside southwest square st stadium star state states station storm street summer summit supreme system team
television temple territory theater theatre tournament tower town trade treaty tribunal tropical tsunami typhoon union
united university upper valley village war water west western westside winter world zone
"""
_FOLLOWERS_TEXT = """
and became began can could did died does founded had has held is joined led left lived made moved played received said
served took was will won worked works would wrote
"""
_COMMON_ENDINGS_TEXT = """
able ance ed ence er ers ful hood ible ic ical ies ing ings ism ist ists ities ity ive less ly man men ment ments ness
or ors ous ship sion sions tion tions ual ures wards wise
"""
_DERIVED_ENDINGS_TEXT = """
's ais an ans ch ean eans egian ene enes er ers es ese i ian ians ic ine ines inian ish ite ites n nian nians ns ois s
tic uese vian
"""
_SYNONYMS_TEXT = """
us usa america american americans united states
uk britain british united kingdom
mars martian martians
france french
spain spanish spaniards
netherlands dutch holland
wales welsh
denmark danish danes
turkey turkish turks
poland polish poles
greece greek greeks
finland finnish finns
switzerland swiss
england english
anglo british britain uk english england
ireland irish
scotland scottish scots
normandy norman normans
europe european europeans eu
earth earthly terrestrial extraterrestrial interplanetary interstellar intergalactic planet world globe
asia asian asians asiatic
germany german germans
china chinese
burma myanmar
catholicism catholic
christ christian christianity christmas
tv television
hq hqs headquarters headquartered headquarter
wwi ww1 world war one i first
wwii ww2 world war two ii second
un united nations
roman rome romans
"""

SENTENCE_STARTERS = frozenset(_STARTERS_TEXT.split())
"""Stop words and other words that begin sentences and are not names."""

_GENERIC_WORDS = frozenset(_GENERIC_TEXT.split())
"""Words in names that denote a kind of thing (museum, river, president): a rewriting may replace them."""

_NAME_FOLLOWERS = frozenset(_FOLLOWERS_TEXT.split())
"""Words that follow a name at the beginning of a sentence."""

_COMMON_ENDINGS = tuple(_COMMON_ENDINGS_TEXT.split())
"""Endings of words that begin sentences and are not names."""

_DERIVED_ENDINGS = frozenset(_DERIVED_ENDINGS_TEXT.split())
"""Endings of words derived from names: Haiti, Haitian."""

_BASE_ENDINGS = frozenset(("", "a", "ia", "e", "o", "y", "en", "land", "s", "us", "os", "ay", "al", "ium", "is", "ce"))
"""Endings of names that a derived ending replaces: Canada, Canadian."""


def _group_synonyms() -> dict[str, frozenset[str]]:
    synonyms: dict[str, frozenset[str]] = {}
    for line in _SYNONYMS_TEXT.strip().splitlines():
        words = frozenset(line.split())
        for word in words:
            synonyms[word] = synonyms.get(word, frozenset()) | words
    return synonyms


_SYNONYMS = _group_synonyms()
"""Word -> words with the same meaning."""

_TOKEN = re.compile(r"(?:[A-Z]\.){2,}|[^\W_]*\d[^\W_]*|[^\W\d_]+(?:['’][^\W\d_]+)*|[^\w\s]")
_SENTENCE_BREAKS = frozenset('.!?:;…。！？"“”«»([')
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
_MEASURE = re.compile(r"\d+([^\W\d_]+)")


@dataclass(slots=True)
class Names:
    """The words of a text in their normal forms, and which of them are names.

    `words` are all words, `lower` those without a capital. `certain` names have a capital inside a sentence, or begin a
    sentence before another capital; `possible` names begin a sentence and are followed by a verb. `spelling` maps each name
    to its spelling. `sequence` has all words in order, `joined` maps the parts of a hyphenated word to the whole
    (geo: geoscientists).
    """

    words: set[str] = field(default_factory=set)
    lower: set[str] = field(default_factory=set)
    certain: set[str] = field(default_factory=set)
    possible: set[str] = field(default_factory=set)
    spelling: dict[str, str] = field(default_factory=dict)
    sequence: list[str] = field(default_factory=list)
    joined: dict[str, str] = field(default_factory=dict)

    @property
    def initials(self) -> str:
        """The first letters of all words, in order."""
        return "".join(word[0] for word in self.sequence)


def extract_names(text: str) -> Names:
    """Return the names in `text`: words with a capital letter or with digits among letters, without common beginnings."""
    tokens = _TOKEN.findall(text)
    classified = list(map(_classify, tokens))
    sequence = [word for word, _ in classified if word]
    names = Names(words=set(sequence), lower={word for word, kind in classified if kind == _LOWER}, sequence=sequence)
    at_start = True
    for index, (word, kind) in enumerate(classified):
        if not word:
            at_start = kind == _BREAK or (at_start and kind != _JOINT)
            continue
        if kind == _CODE or (kind in _CAPITALS and not at_start):
            names.certain.add(word)
            names.spelling.setdefault(word, tokens[index])
        elif kind == _CAPITALIZED:
            following = tokens[index + 1] if index + 1 < len(tokens) else ""
            if following[:1].isupper():
                names.certain.add(word)
                names.spelling.setdefault(word, tokens[index])
            elif following in _NAME_FOLLOWERS or tokens[index].endswith(("'s", "’s")):
                names.possible.add(word)
                names.spelling.setdefault(word, tokens[index])
        at_start = False
    if "-" in text or "–" in text:
        for (before, _), hyphen, (after, _) in zip(classified, tokens[1:], classified[2:], strict=False):
            if hyphen in "-–" and before and after:
                names.joined.update(dict.fromkeys((before, after), before + after))
    names.possible -= names.certain
    return names


@lru_cache(maxsize=65536)
def _classify(token: str) -> tuple[str, str]:
    """Return the normal form of a token ("" for a mark) and its kind."""
    if not token[0].isalnum():
        return "", _BREAK if token in _SENTENCE_BREAKS else _JOINT if token in _JOINTS else _OTHER_MARK
    word = normal_word(token)
    may_be_name = len(word) > 1 and word.partition("'")[0] not in SENTENCE_STARTERS
    if not word.isalpha() and _is_code(word):
        return word, _CODE if may_be_name else _NEVER_NAME
    if not token[0].isupper():
        return word, _LOWER
    if not may_be_name:
        return word, _NEVER_NAME
    return word, _COMMON_ENDING if word.endswith(_COMMON_ENDINGS) else _CAPITALIZED


def _is_code(word: str) -> bool:
    """Return whether a word mixes letters and digits (A220, B52) and is not a number with a unit or an ending."""
    if word.isdigit() or not any(character.isdigit() for character in word):
        return False
    measure = _MEASURE.fullmatch(word)
    return measure is None or measure[1] not in (*UNIT_OF, "st", "nd", "rd", "th", "s", "bn", "k")


@lru_cache(maxsize=65536)
def normal_word(token: str) -> str:
    """Return `token` in lower case without accents, dots and possessive ending."""
    plain = token.casefold()
    if not plain.isascii():
        plain = "".join(c for c in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(c))
    return plain.replace("’", "'").replace(".", "").removesuffix("'s").removesuffix("'")


def _is_same_name(one: str, other: str) -> bool:
    """Return whether two words are one name: equal, plural, derived from one another, or known synonyms."""
    if one == other or one in _SYNONYMS.get(other, ()):
        return True
    n_shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n_shared += 1
    if n_shared < 3:
        return False
    tails = (one[n_shared:], other[n_shared:])
    # The last shared letters may belong to the endings: Itali|an, Ital|y.
    for back in range(min(3, n_shared - 2)):
        left, right = (one[n_shared - back :], other[n_shared - back :]) if back else tails
        if (left in _DERIVED_ENDINGS and right in _BASE_ENDINGS) or (
            right in _DERIVED_ENDINGS and left in _BASE_ENDINGS
        ):
            return True
    return False


def compare_names(
    source: Names, variant: Names, complete: bool, day_words: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """Return (reason, detail) of the first lost or new name, ("", "") without one.

    `day_words` are words of named days (Valentine's Day) for which the other text gives the date.
    """
    required = source.certain - day_words if complete else set()
    for name in sorted(required - variant.words - _GENERIC_WORDS - source.lower):
        if not _is_kept(name, source, variant) and not _is_misspelled(name, source, variant):
            return "name", f"{source.spelling[name]} is lost"
    for name in sorted(
        (variant.certain | (variant.possible - variant.lower)) - source.words - _GENERIC_WORDS - day_words
    ):
        if not _is_kept(name, variant, source) and not (name in variant.possible and _is_common(name, source)):
            return "name", f"{variant.spelling[name]} is not in the source"
    return "", ""


def _is_kept(name: str, names: Names, other: Names) -> bool:
    """Return whether the other text has a name too: derived (Haiti, Haitian), as a numeral, or as initials."""
    rank = roman_value(name)
    if rank and any(word.startswith(str(rank)) or NUMBER_WORDS.get(word) == rank for word in other.words):
        return True
    if 2 <= len(name) <= 6 and _is_acronym(names.spelling[name]) and name in other.initials:
        return True
    return names.joined.get(name) in other.words or any(_is_same_name(name, word) for word in other.words)


def _is_common(name: str, source: Names) -> bool:
    """Return whether the source has a common word of the same stem: Comfort begins a sentence, comfortable is there."""
    stem = name[: max(5, len(name) - 3)]
    return len(name) > 4 and any(word.startswith(stem) for word in source.lower)


def _is_acronym(spelling: str) -> bool:
    return spelling.removesuffix("'s").removesuffix("’s").removesuffix("s").replace(".", "").isupper()


def _is_misspelled(name: str, source: Names, variant: Names) -> bool:
    """Return whether the source has another name with nearly this spelling (Leptara, Leptaria), which the variant keeps."""
    kept = [other for other in source.certain & variant.words if other[:3] == name[:3]]
    return len(name) > 5 and bool(difflib.get_close_matches(name, kept, 1, 0.85))
