"""Proper names in text with capital letters: which words are names, and which of them another text keeps."""

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
_TITLES_TEXT = """
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
_ACTS_TEXT = """
and became began can could did died does founded had has held is joined led left lived made moved played received said
served took was will won worked works would wrote
"""
_ENDINGS_TEXT = """
able ance ed ence er ers ful hood ible ic ical ies ing ings ism ist ists ities ity ive less ly man men ment ments ness
or ors ous ship sion sions tion tions ual ures wards wise
"""
_DERIVED_TEXT = """
's ais an ans ch ean eans egian ene enes er ers es ese i ian ians ic ine ines inian ish ite ites n nian nians ns ois s
tic uese vian
"""
_ALIKE_TEXT = """
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

STARTERS = frozenset(_STARTERS_TEXT.split())
"""Words that begin sentences and are no names."""

TITLES = frozenset(_TITLES_TEXT.split())
"""Words that names are made with and that stand for a kind of thing: they may be worded otherwise."""

ACTS = frozenset(_ACTS_TEXT.split())
"""Words that follow a name at the beginning of a sentence."""

COMMON_ENDINGS = tuple(_ENDINGS_TEXT.split())
"""Endings of words that begin sentences and are no names."""

DERIVED = frozenset(_DERIVED_TEXT.split())
"""Endings of words derived from names: Haiti, Haitian."""

BASE = frozenset(("", "a", "ia", "e", "o", "y", "en", "land", "s", "us", "os", "ay", "al", "ium", "is", "ce"))
"""Endings of names that such words replace: Canada, Canadian."""


def _groups() -> dict[str, frozenset[str]]:
    groups: dict[str, frozenset[str]] = {}
    for line in _ALIKE_TEXT.strip().splitlines():
        words = frozenset(line.split())
        for word in words:
            groups[word] = groups.get(word, frozenset()) | words
    return groups


GROUPS = _groups()
"""Word -> words that say the same thing."""

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
