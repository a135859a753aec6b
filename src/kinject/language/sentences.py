"""Where sentences end: one table of marks and abbreviations, and the rules that read it.

Rules, not a model, and no guess of the language: a sentence end follows from the text around it
alone, so that a change of a document does not move the ends before it.
"""

from __future__ import annotations

import re

STOPS = ".!?…؟‼⁇⁈⁉"
"""Marks that end a sentence in front of white space: 3.5 and a.txt hold some that do not."""
FULL_STOPS = "。！？｡।॥۔։።፧။។៕"
"""Marks that end one wherever they stand: of Chinese and Japanese, Hindi and its neighbours, Urdu,
Armenian, Amharic, Burmese, Khmer."""
_CLOSERS = "\"'”’»)\\]」』）\u200e\u200f\u202c\u2069"
"""What belongs to the sentence behind its mark: quotation marks, brackets, marks of direction."""
_OPEN_OR_CLOSE = "“‘«"
"""Quotation marks that close in German and Urdu, in front of a space, and open elsewhere."""

# The tables, a line a language: English, German, French, Spanish, Italian, Portuguese, Dutch,
# Russian, Hindi. Words are written as in the middle of a sentence.

_BEFORE_A_NAME = """
Mr Mrs Ms Messrs Dr Drs Prof St Gen Col Lt Sgt Capt Cmdr Rev Hon Gov Sen Rep Pres Mt Ft Fr Sr Jr
Hr Fr Frl Dipl Ing Mag Hl Bgm Univ med jur rer
MM Mme Mmes Mlle Mgr Ste
Sra Srta Sres Dra Dña Lic Gral Avda Excmo
Sig Sigg Dott Avv Geom Rag Spett
Profa Exmo Exma Eng
dhr mevr drs ir mr
ул просп пер им акад проф доц
डॉ प्रो
"""
"""Titles, parts of names and addresses: a name follows."""
_BEFORE_AN_EXPLANATION = """
vs cf viz e.g i.e approx
bzw vgl sog ggf evtl inkl exkl zzgl bspw insb ehem geb gest od
c.-à-d env
p.ej p.ex
cfr
bijv zgn resp incl excl
т.е т.к см ср напр
"""
"""A sentence continues after these, whatever word follows."""
_OFTEN_LAST = """
etc al Inc Ltd Corp Co Bros Ave Blvd Dept
usw usf ff Mio Mrd Tsd Jh Jhd Chr Std Str u.a u.ä o.ä
J.-C
EE.UU
ecc
enz
т.д т.п др тыс млн млрд руб
"""
"""These end a sentence if the next word begins one (`_BEGINNING`)."""
_BEFORE_A_NUMBER = """
No Nos Bldg Apt Rm Fig Figs Eq Eqs Sec Sect Ch Vol Vols p pp est ca
Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec
Nr Nrn Art Abs Abb Tab Kap Bd Bde Ziff Rn Rz Rdnr Anm Pos Bl Tel Okt Dez
chap vol éd tél
núm pág págs cap aprox
pag sez fasc
pág fig
blz afb
рис табл гл стр
सं रु
"""
"""These end a sentence unless a number follows: "No. 5", and "No. That is wrong."."""
_LETTERED = "Fig Figs fig figs Eq Eqs Tab Abb"
"""Of these, what a letter may number: Fig. A."""
_BEGINNING = """
The It He She They We You This These There In On At For But However
Der Die Er Sie Es Wir Ein Eine Im Dies Diese
Il Elle Ils Elles Les Ce Cette Nous
Los Las Una Este Esta
Het Een Hij Zij
Он Она Они Это Мы
"""
"""Words that begin sentences and are no names: no De, La, Le, Das, as in J. De Vries."""
_BEFORE_ORDINALS = "am vom zum beim im den der dem des die das"
"""German words in front of an ordinal: im 19. Jahrhundert."""
_MONTH_NAMES = """
Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember
Jan Feb Mrz Apr Jun Jul Aug Sep Sept Okt Nov Dez
"""
"""Names of months behind a day, in the language that writes them with a capital and the day with a
full stop: German."""
_UNIT_LETTERS = "m g l h s t W V K C F г м л ч"
"""Single letters that are units behind a number, not initials."""


def _words(*tables: str) -> frozenset[str]:
    return frozenset(" ".join(tables).split())


def _abbreviations(*tables: str) -> frozenset[str]:
    """Return the words of tables, also as they are at the beginning of a sentence."""
    words = _words(*tables)
    return words | frozenset(word[0].upper() + word[1:] for word in words)


_NEVER_LAST = _abbreviations(_BEFORE_A_NAME, _BEFORE_AN_EXPLANATION)
_MAY_BE_LAST = _abbreviations(_OFTEN_LAST)
_LAST_WITHOUT_NUMBER = _abbreviations(_BEFORE_A_NUMBER, _BEFORE_A_NUMBER.lower())
_NUMBERED_BY_LETTERS = _words(_LETTERED)
_STARTERS = _words(_BEGINNING)
_BEFORE_AN_ORDINAL = _words(_BEFORE_ORDINALS)
_MONTHS = _words(_MONTH_NAMES)
_UNITS = _words(_UNIT_LETTERS)

# Possessive, so that a long run of full stops is tried once.
_END = re.compile(
    rf"(?<![{STOPS}])[{STOPS}]++[{_CLOSERS}{_OPEN_OR_CLOSE}]*+(?=\s)"
    rf"|[{FULL_STOPS}]++(?!\d)[{_CLOSERS}]*+(?:[{_OPEN_OR_CLOSE}](?=\s))?|\n\s*\n"
)
_WINDOW = 40
"""Characters around a full stop that are read: to read more at each would be quadratic."""
_OPENERS = "\"'“‘„‚«‹([{¿¡*_"
_LINE_MARKS = " \t#>*-•_|"
_NUMBERING = re.compile(r"\d{1,3}(?:\.\d{1,3})*")
_ORDINAL = re.compile(r"\d{1,3}")
_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
_INITIAL = re.compile(r"[^\W\d_]\.")
_LETTER = re.compile(r"[A-Z]\b")
_NUMBER = re.compile(r"[A-Z]?\d|[IVXLC]{2,}\b|[B-HJ-Z]\b|[a-h]\)|[§№]")
"""A number, or what numbers a figure or a paragraph: S2, IV, B. No A and no I, which begin
sentences."""


def sentence_ends(text: str) -> list[int]:
    """Return, in ascending order, the positions just after each sentence or paragraph of `text`
    (space not included).

    A full stop ends a sentence unless it belongs to an abbreviation, an initial, an ordinal or the
    number of a list item, or a small letter follows it.
    """
    ends: list[int] = []
    for match in _END.finditer(text):
        end = match.end()
        if match[0].isspace():
            end = match.start()
            while end and text[end - 1].isspace():
                end -= 1
        elif _continues(text, match[0], end):
            continue
        if end and (not ends or end > ends[-1]):
            ends.append(end)
    text_end = len(text.rstrip())
    if text_end and (not ends or ends[-1] < text_end):
        ends.append(text_end)
    return ends


def sentences(text: str) -> list[str]:
    """Return the sentences of `text`, without the space around them."""
    ends = sentence_ends(text)
    texts = (text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False))
    return [sentence for sentence in texts if sentence]


def _continues(text: str, mark: str, end: int) -> bool:
    """Return whether a sentence continues after its `mark`, which is before `end`."""
    after = text[end : end + _WINDOW]
    following = after.lstrip()
    if mark[0] in STOPS and following[:1].islower():
        return True
    if mark not in (".", "۔") or not following:
        return False
    before = text[max(0, end - 1 - _WINDOW) : end - 1]
    words = before.split()
    if not words or before[-1].isspace():
        return False
    word = words[-1].lstrip(_OPENERS)
    if _numbers_item(before, word, after):
        return True
    if mark != ".":
        return False
    if _ORDINAL.fullmatch(word):
        return _is_ordinal(words[:-1], following)
    if word in _UNITS and words[-2:-1] and words[-2][-1].isdigit():
        return False
    return _is_abbreviation(_joined(words), word, following)


def _numbers_item(before: str, word: str, after: str) -> bool:
    """Return whether `word`, the end of `before`, is a number that begins a line and numbers what
    follows in it."""
    line = before.rpartition("\n")[2]
    if len(line) == _WINDOW or not _NUMBERING.fullmatch(word):
        return False
    if line.removesuffix(word).strip(_LINE_MARKS):
        return False
    return bool(after.partition("\n")[0].strip())


def _joined(words: list[str]) -> str:
    """Return the last word with the single letters in front of it: z. B. is z.B., not the initial
    of a name."""
    joined = words[-1].lstrip(_OPENERS)
    for earlier in reversed(words[:-1]):
        letter = earlier.lstrip(_OPENERS)
        if not _INITIAL.fullmatch(letter):
            break
        joined = letter + joined
    return joined


def _is_ordinal(before: list[str], following: str) -> bool:
    """Return whether a number with a full stop is an ordinal: 3. Mai, das 2. Kapitel."""
    name = _first_word(following)
    if name in _MONTHS:
        return True
    if not before or before[-1].lower() not in _BEFORE_AN_ORDINAL or before[-2:] == ["I", "am"]:
        return False
    return name[:1].isupper() and name not in _STARTERS


def _is_abbreviation(joined: str, word: str, following: str) -> bool:
    """Return whether the full stop after `word` belongs to it and ends no sentence. `joined` is the
    word with the single letters in front of it."""
    begins = _first_word(following) in _STARTERS
    for one in (joined, word):
        if one in _NEVER_LAST:
            return True
        if one in _MAY_BE_LAST:
            return not begins
    if word in _LAST_WITHOUT_NUMBER:
        number = following.lstrip(_OPENERS)
        if word in _NUMBERED_BY_LETTERS and _LETTER.match(number):
            return True
        return _NUMBER.match(number) is not None
    if joined in ("a.m", "p.m") or not _LETTERS.fullmatch(joined):
        return False
    # Small letters explain (z.B., o.a.); capitals are names, which may be last (U.S., S.A.).
    return joined[0].islower() or not begins


def _first_word(text: str) -> str:
    """Return the word at the beginning of `text`, without the marks around it."""
    words = text.split(maxsplit=1)
    if not words:
        return ""
    return words[0].strip(_OPENERS).rstrip(f"{STOPS},;:)")
