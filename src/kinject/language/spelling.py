"""Written answers in one spelling, and their words with the signs that tell names apart.

A curly quote is a straight one, a ligature its letters; C++ is not C, AT&T not ATT, 20.5 not 205.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from kinject.language.latex import plain_latex

WIDE = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
"""Kana, Chinese characters and Hangul: their words have no spaces between them."""
MARKS = (
    "\u0300-\u036f\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0900-\u0963\u0966-\u0dff\u0e01-\u0e4e\u0e81-\u0ece\u0f71-\u0f84\u1000-\u109f\u1780-\u17d3"
)
"""Marks that are parts of words: vowels of Indian scripts are no letters to `re`."""
_CHARACTER = rf"(?:(?![_{WIDE}])[\w{MARKS}])"
CURRENCY = "$€£¥₹₩₽₺₪₦₴₫₱฿₿¢"
MINUS = rf"(?<![^\W{WIDE}]|[)\]%°])-"
"""A hyphen that no word or number stands before."""

_QUOTES = dict.fromkeys("‘’‚‛′´`ʹʼˈ", "'") | dict.fromkeys("“”„‟″«»‹›〝〞", '"')
_HYPHENS = dict.fromkeys("‐‑‒–⁃−﹣－", "-") | dict.fromkeys("—―", "—")
_FOLDED = str.maketrans(
    _QUOTES | _HYPHENS | {"⁄": "/", "∕": "/", "∶": ":", "♯": "#", "♭": "b", "׳": "'"}
)
# Letters of their own in Unicode, which NFKC keeps.
_LIGATURES = str.maketrans({"œ": "oe", "æ": "ae"})
_NO_LETTERS = str.maketrans(dict.fromkeys("™®©℠", ""))
_FRACTION_SIGN = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞↉])")
_POWER = re.compile("(?<=[\\d₀-₉])(?=⁻?[⁰¹²³⁴-⁹])")
_DEGREE = re.compile(r"[º˚](?=\s?[CF]\b)")
_SPACED_MINUS = re.compile(r"(?<!\w)(?<!\w\s)−\s+(?=\d)")
_DASH_BETWEEN_NUMBERS = re.compile(r"(?<=\d)—(?=\d)")
_STRESS = re.compile("(?<=[\u0400-\u04ff])[\u0300\u0301]")
# Vowels of Hebrew and Arabic, which most texts leave out, and the stroke that lengthens a word.
_POINTS = re.compile("[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u0652\u0670]")
_MARKUP = re.compile(r"\*\*|__|`")
_TIMES = re.compile(r"(?<![a-z])(?<!\b0)(?<=\d)(?:x|\s?×\s?|\sx\s)(?=\d)")
"""The sign of 1920x1080; 0x10 is a number of programs."""
_OPERATOR = re.compile(
    # a - b, x - 2, x^2 - 4, 3 - x, 5 + 3; not "5 m - 10 m", nor "B - 5" and "3 - a city"
    r"(?<=(?<![^\W\d_])[a-z])\s[+-]\s(?=[a-z](?![^\W\d_]))"
    r"|(?:(?<=(?<![^\W\d_])[i-kn-rt-z])|(?<=[b-z^]\d))\s[+-]\s(?=[\d(])"
    r"|(?<=[\d)])\s[+-]\s(?=\(?\d*[b-fi-kn-rt-z](?![^\W\d_]))"
    r"|(?<=\d)\s\+\s(?=\d)"
)
"""A plus or a minus between numbers and variables, with spaces."""
_PRODUCT = re.compile(
    r"(?<=(?<![^\W\d_])[a-z])\s?[*·×⋅]\s?(?=[a-z](?![^\W\d_]))|(?<=\d)[*·⋅](?=[a-z](?![^\W\d_]))"
)
"""The sign of x*y and 3*x, which are xy and 3x."""
_CLOSE_LIST = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d{1,2}){2,}(?![\d,]|\.\d)")
"""1,2,3; with three digits in the end it is an Indian number."""


def fold(text: str) -> str:
    """Return `text` in one spelling, its case kept: Unicode's NFKC (Annex 15), straight quotes,
    one hyphen, ASCII digits, nothing invisible, no LaTeX, no marks of bold text or code."""
    text = plain_latex(text)
    if not text.isascii():
        text = _fold_unicode(text)
    text = _PRODUCT.sub("", _OPERATOR.sub(_without_spaces, text))
    text = _CLOSE_LIST.sub(_with_spaces, text)
    return _TIMES.sub(" × ", _MARKUP.sub("", text))


def _without_spaces(operator: re.Match[str]) -> str:
    return operator[0].strip()


def _with_spaces(numbers: re.Match[str]) -> str:
    return numbers[0].replace(",", ", ")


def _fold_unicode(text: str) -> str:
    # NFKC would make 11/2 of 1½ and 102 of 10²
    text = _FRACTION_SIGN.sub(" ", text)
    text = _POWER.sub("^", text)
    text = _DEGREE.sub("°", text)
    text = _SPACED_MINUS.sub("-", text)
    # NFKC makes a space and an accent of ´
    text = text.translate(_FOLDED).translate(_NO_LETTERS)
    text = unicodedata.normalize("NFKC", text).translate(_FOLDED)
    # Of a Cyrillic letter it is the stress, which dictionaries write: Москва́.
    text = _POINTS.sub("", _STRESS.sub("", text))
    text = _DASH_BETWEEN_NUMBERS.sub("-", text)
    return "".join(map(_fold_character, text))


def _fold_character(character: str) -> str:
    if character.isascii():
        return character
    category = unicodedata.category(character)
    # Nothing that is seen: soft hyphens, joiners, marks of direction.
    if category == "Cf":
        return ""
    # NFKC leaves the digits of other scripts as they are.
    if category == "Nd":
        return str(unicodedata.decimal(character))
    return character


def case_fold(text: str) -> str:
    """Return `text` without case: STRASSE is Straße."""
    # casefold() may leave a letter and its accent as two characters.
    return unicodedata.normalize("NFC", text.casefold()).translate(_LIGATURES)


_VARIABLE = r"(?=√|\\?(?:[a-zα-ω]|sin|cos|tan|ln|log|exp|sqrt|frac)(?![\w']))"
"""What a minus sign may be before, beside numbers: -x, -sin x. Two are an option: --v."""
_SEPARATOR = r"(?:\+{1,2}|['./&@_#^·√-]|(?<=\d)[,:](?=\d))"
_TOKEN = re.compile(
    rf"(?P<wide>[{WIDE}])"
    r"|(?P<and>(?<!\S)&(?!\S))"
    r"|(?P<operator>==|!=|<=|>=|&&|\|\||[≤≥≠]|(?<=[\w)\]])\s?<\s?(?=[\w(\[]))"
    rf"|(?:(?P<sign>{MINUS}(?=[{CURRENCY}]?[.,]?\d)|{MINUS}-?{_VARIABLE}"
    r"|(?<![\w!])[!¬~](?=[a-z]))\\?)?"
    rf"(?P<front>(?<!\w)[A-Za-z]{{0,2}}[{CURRENCY}](?=\d)"
    r"|(?<![\w.])\.(?=\w)|(?<!\S),(?=\d)|√)?"
    rf"(?P<core>{_CHARACTER}+(?:{_SEPARATOR}{_CHARACTER}+)*)"
    r"(?P<end>\+{1,2}(?!\w)|#(?!\w)|[%‰]|[-*](?![\w*-]))?"
)
_CAPITAL = "[A-ZÀ-ÖØ-ÞΑ-ΩЀ-Я]"
# The initials of J. R. R. Tolkien and of J R R Tolkien are those of J.R.R. Tolkien.
_SPACED_INITIAL = re.compile(
    rf"(?<![\w.])({_CAPITAL}\.)\s(?={_CAPITAL}\.)"
    rf"|(?<![\w'])({_CAPITAL})\s(?={_CAPITAL}\s(?:{_CAPITAL}\s)?{_CAPITAL}[a-zà-öø-ÿа-я]{{2}})"
)
_DELETED = re.compile(r"(?<!\d)['./@_·^-]|['./@_·-](?!\d)")
"""Signs in a word that its spelling may lack, AC/DC and ACDC; between digits they are kept."""
_QUOTIENT = re.compile(r"(?=.*[a-z])\d*[a-z]?(?:/\d*[a-z]?)+")
"""x/y and 3/x, which are no xy and 3x."""
_HYPHEN = re.compile(r"(?<!\d)[-/]|[-/](?!\d)|&")
ARTICLES = frozenset(("a", "an", "the"))
_LETTER_OF_A_LIST = re.compile(r"\s?(?:,|(?:and|or|&)\s)\s?[A-Z](?!\w)")
_OPERATORS = {"≤": "<=", "≥": ">=", "≠": "!="}
"""Sign of an operator of code -> how code has it. No >, which parts the steps of a path too."""
_GRADE = 2
"""Letters of a name that a minus sign may end: A-, AB-."""
_ION = re.compile(r"(?:[A-Z][a-z]?\d*)+(?:\^\d)?")
"""What a charge may end, if it has a digit: NO3-, SO4^2-."""


_LAST_COMMA = re.compile(r",?\s(?:and|&|und|et|y|e|и|en|och|og|i)\s")
_TWO_LETTERS = re.compile(r"(?<!\w)[A-Z], [A-Z](?!\w)")
_NUMBER_OF_LINE = re.compile(r"^\s*\d{1,2}[.)]\s", re.MULTILINE)


def list_in(folded: str) -> str:
    """Return a list of three or more, or of letters, as it is with commas only, "" for another
    text: red, green and blue; A and C; one red, one green and one blue line with their numbers."""
    text = _NUMBER_OF_LINE.sub(" ", folded).strip().replace("\n", ", ")
    text = _LAST_COMMA.sub(", ", text)
    # "Paris, Texas" is not "Paris and Texas".
    if text.count(", ") < 2 and not _TWO_LETTERS.search(text):
        return ""
    return text


_LETTERS = re.compile(
    r"(?<![\w,'-])[A-J](?:(?:,\s?|\s?&\s?|,?\s(?:and|und|et|y|e|и)\s)[A-J])+(?![\w'-]|,\s?\w)"
)
"""A, C and D, as letters of options."""
_BEFORE_LETTERS = r"(?:.*(?:\b(?:is|are)\s|:\s?|是\s?))?"
_LETTERS_IN_ONE = re.compile(rf"{_BEFORE_LETTERS}([A-J]{{2,}})")
_LETTERS_WITH_COMMAS = re.compile(rf"{_BEFORE_LETTERS}([A-J](?:,\s?[A-J])+)")
_MARKED_LETTER = re.compile(r"(?<!\w)\(?([A-J])\)")


def has_letters(part: str, folded: str) -> bool:
    """Return whether an accepted list of letters in their order (A, C) is in a text in another one:
    C and A; either may have nothing between those that it ends with, AC."""
    part, folded = _plain_letters(part), _plain_letters(folded)
    is_in_one = re.fullmatch("[A-J]{2,}", part) is not None
    if not is_in_one and not _LETTERS.fullmatch(part):
        return False
    wanted = re.findall("[A-J]", part)
    # In another order it may tell steps.
    if wanted != sorted(set(wanted)):
        return False
    # "A and B" is not the blood group AB.
    if is_in_one:
        lists = _LETTERS_WITH_COMMAS.fullmatch(folded)
        return lists is not None and sorted(re.findall("[A-J]", lists[1])) == wanted
    found = [match[0] for match in _LETTERS.finditer(folded)]
    in_one = _LETTERS_IN_ONE.fullmatch(folded)
    if in_one and "," in part:
        found.append(in_one[1])
    return len(found) == 1 and sorted(re.findall("[A-J]", found[0])) == wanted


def has_more_letters(part: str, folded: str) -> bool:
    """Return whether a text has an accepted list of letters only with more of them: A, C and D for
    A, C."""
    part = _plain_letters(part)
    if not _LETTERS.fullmatch(part):
        return False
    wanted = set(re.findall("[A-J]", part))
    lists = [set(re.findall("[A-J]", m[0])) for m in _LETTERS.finditer(_plain_letters(folded))]
    return wanted not in lists and any(wanted < letters for letters in lists)


def _plain_letters(folded: str) -> str:
    """Return a text whose letters of options have no brackets: (A) and (C); A、C."""
    return _MARKED_LETTER.sub(r"\1", folded.replace("、", ", ")).strip(" .。")


_CALL = re.compile(r"(?<!\w)([A-Za-z]\w*)\((?:[^()]|\([^()]*\))*\)")
_NO_ARGUMENT = re.compile(r"[\s'\"]")


def has_other_arguments(part: str, folded: str) -> bool:
    """Return whether an accepted call is in a text with other arguments only: O(n log n) for O(n),
    P(A|B) for P(A)."""
    wanted = _CALL.fullmatch(part.strip())
    if wanted is None:
        return False
    calls = [call for call in _CALL.finditer(folded) if call[1].lower() == wanted[1].lower()]
    return bool(calls) and _plain_call(wanted) not in map(_plain_call, calls)


def _plain_call(call: re.Match[str]) -> str:
    return _NO_ARGUMENT.sub("", call[0]).lower()


_CODE = re.compile(r"\+?(?=[A-Z\d(])[A-Z\d\s()./-]*\d(?:\s?[A-Z\d]+)*\)?")
_DECIMAL = re.compile(r"\d+\.\d+")
_TRUNK_ZERO = re.compile(r"\s?\(0\)")
_LETTERS_AND_DIGITS = re.compile(r"(?=\D*\d)(?=[A-Z])[A-Z\d]+(?:[\s-][A-Z\d]+)?")
"""A name in capitals and digits: NGC 224, B12, SW1A 2AA."""
_BORDER = re.compile(r"(?<=[A-Z])(?=\d)|(?<=\d)(?=[A-Z])|[\s-]")
_NAME_GAP = r"[\s-]?"
_DIGITS_OF_A_CODE = 7
_CODE_GAP = r"[\s()./-]*"


def has_code(part: str, folded: str) -> bool:
    """Return whether a text has the number of a telephone, an account or a book in it, however its
    digits are parted: (555) 123-4567, 555.123.4567; or a name such as NGC 224, spelled NGC224."""
    if _LETTERS_AND_DIGITS.fullmatch(part.strip()):
        name = _NAME_GAP.join(filter(None, _BORDER.split(part.strip())))
        # NO3- is another ion, and USD 1.50 no USD 1.
        if re.search(rf"(?<![\w.,-]){name}(?![\w+^*-]|[.,]\d)", folded):
            return True
    code = _TRUNK_ZERO.sub("", part.strip())
    signs = re.sub(r"[^A-Z\d]", "", code)
    if sum(map(str.isdigit, signs)) < _DIGITS_OF_A_CODE:
        return False
    if not _CODE.fullmatch(code) or _DECIMAL.fullmatch(code):
        return False
    # A hyphen may follow a digit, a minus sign does not.
    begin = r"(?<![\w,.])(?<!^-)(?<!\D-)"
    pattern = rf"{begin}{_CODE_GAP.join(signs)}(?!\w|[.,]\d)"
    found = re.findall(pattern, _TRUNK_ZERO.sub("", folded))
    return any(not _DECIMAL.fullmatch(written) for written in found)


@dataclass(frozen=True, slots=True)
class Word:
    """A word, or a number in digits, as it is compared.

    `is_glued`: a hyphen joins it to the word before. `is_acronym`: several capitals, no small
    letter. `is_letter`: the A of "A, C".
    """

    key: str
    is_glued: bool = False
    is_acronym: bool = False
    is_letter: bool = False

    @property
    def is_article(self) -> bool:
        """Whether it is an English article."""
        return self.key in ARTICLES and not self.is_letter


def words_in(folded: str, *, apart: bool) -> list[Word]:
    """Return the words of a text that `fold` returned, each letter of Chinese, Japanese and Korean
    as one.

    Jean-Luc is jeanluc, or two words if those joined by a hyphen are to be `apart`.
    """
    words: list[Word] = []
    for match in _TOKEN.finditer(_SPACED_INITIAL.sub(r"\1\2", folded)):
        if match["wide"]:
            words.append(Word(match["wide"]))
        elif match["and"]:
            words.append(Word("and"))
        elif match["operator"]:
            sign = match["operator"].strip()
            words.append(Word(_OPERATORS.get(sign, sign)))
        else:
            words += _spelled(match, apart)
    return words


def _spelled(match: re.Match[str], apart: bool) -> list[Word]:
    front = (match["sign"] or "") + case_fold(match["front"] or "")
    core, end = match["core"], _end_of(match)
    if _QUOTIENT.fullmatch(core):
        return [Word(front + core + end)]
    is_acronym = core.isupper() and sum(map(str.isalpha, core)) > 1
    if not apart or not _HYPHEN.search(core):
        key = front + _DELETED.sub("", case_fold(core)) + end
        is_letter = core == "A" and _LETTER_OF_A_LIST.match(match.string, match.end()) is not None
        return [Word(key, is_acronym=is_acronym, is_letter=is_letter)]
    parts = [part for part in re.split(rf"({_HYPHEN.pattern})", core) if part and part not in "-/"]
    keys = [_DELETED.sub("", case_fold(part)) for part in parts]
    keys[0] = front + keys[0]
    keys[-1] += end
    return [
        Word({"&": "and"}.get(key, key), is_glued=index > 0, is_acronym=is_acronym)
        for index, key in enumerate(keys)
    ]


def _end_of(match: re.Match[str]) -> str:
    """Return the signs behind a word that are a part of it: C++, C#, A-, A*, 5%."""
    core, end = match["core"], match["end"] or ""
    is_digit = core[-1].isdigit()
    if end in ("%", "‰") and not is_digit:
        return ""
    is_grade = len(core) <= _GRADE and core.isalpha()
    is_ion = is_digit and _ION.fullmatch(core) is not None
    if end == "-" and not is_grade and not is_ion:
        return ""
    is_name = len(core) == 1 and core.isalpha()
    before = match.string[match.start() - 1 : match.start()]
    # *a* is a word in italics
    if end == "*" and (not is_name or before == "*"):
        return ""
    return end


def same_words(wanted: Sequence[Word], words: Sequence[Word]) -> bool:
    """Return whether both texts have the same words, but for articles before other words."""
    return _without_articles(wanted) == _without_articles(words)


def _without_articles(words: Sequence[Word]) -> list[str]:
    # the A of "vitamin A" is no article, nor are those of a name that has nothing else
    if all(word.is_article for word in words):
        return [word.key for word in words]
    keys = [word.key for word in words[:-1] if not word.is_article]
    return [*keys, *(word.key for word in words[-1:])]


# Of a short word it is most often a verb: it's, he's.
POSSESSIVE = re.compile(r"(?<=[^\W\d_]{4})'s(?!\w)")
ELIDED = re.compile(r"(?<![\w'])(?:[lL]'|d'|(?:[dnsa]e?ll|sull|dall|un)')(?=[^\W\d_]{3})")
"""French and Italian words before a vowel: l'Italie, dell'Arno; not the D' of D'Artagnan."""
_LETTER = re.compile(r"\s*(?P<name>[^\W\d_I])\s*\.?\s*")
"""Not I, which most often is who answers."""
_SHORT_NAME = re.compile(r"\s*(?P<name>[^\W\d_]{2,3})\.?\s*")
_INSIDE = r"(?:(?<=[^\s.!?]\s)|(?<=[(\"]))"
"""Before a word that does not begin a sentence: there every word has a capital."""


def has_capital(part: str, folded: str) -> bool:
    """Return whether an accepted text of one to three letters is in a text with its capital, inside
    or at the end of a sentence: vitamin C, "The answer is No."

    C++ is another word than C, the K. of J. K. Rowling a name's, and a B in maths not the answer B.
    """
    letter, name = _LETTER.fullmatch(part), _SHORT_NAME.fullmatch(part)
    if letter and letter["name"].isupper():
        # The K. of a name is followed by more of it.
        capital, follows = letter["name"], r"(?!\.\s*\w)"
        # A is an article, unless nothing follows it.
        if capital == "A":
            follows += r"(?=\s*(?:$|[.,;:!?)\"]))"
        before = rf"{_INSIDE}(?<!\ba\s)(?<!\ban\s)"
    elif name and name["name"].istitle():
        capital, before, follows = name["name"], _INSIDE, ""
    else:
        return False
    return re.search(rf"{before}{capital}(?![\w+#*'-]){follows}", folded) is not None


_CASED = re.compile(r"CO|Co|CS|Cs|HF|Hf|SN|Sn|(?:([ABD-HJ-LN-WYZabd-hj-ln-wyz])(?i:\1))+")


def has_other_case(part: str, folded: str) -> bool:
    """Return whether an accepted text is a symbol that other capitals make another one, and is not
    in a text with its own: cobalt (Co) and carbon monoxide, the genotypes AA and Aa."""
    symbol = part.strip(" .")
    if not _CASED.fullmatch(symbol):
        return False
    return re.search(rf"(?<![^\W\d]){symbol}(?!\w)", folded) is None


_SHORT = 3
_COMMON = frozenset(
    (
        *("yes", "no", "yep", "nay", "not", "ja", "nee", "jo", "nej", "nei", "oui", "non", "si"),
        *("sí", "sì", "sim", "não", "tak", "nie", "ano", "ne", "да", "нет", "так", "ні", "hai"),
        *("he", "she", "it", "we", "you", "me", "him", "her", "us", "my", "his", "its", "our"),
        *("am", "is", "are", "was", "be", "has", "had", "do", "did", "can", "may", "get", "got"),
        *("go", "say", "see", "use", "and", "or", "but", "if", "so", "as", "an", "of", "in"),
        *("on", "at", "to", "by", "for", "off", "out", "up", "any", "all", "how", "why", "who"),
        *("mr", "ms", "dr", "too", "now", "yet", "own", "new", "old", "one", "two", "day", "man"),
        *("way", "end"),
    )
)
"""Words of at most three letters that a sentence has for many reasons; not red, tea, Ulm."""


_WIDE_NOT = frozenset("不没沒無无非未")
"""What makes the opposite of the word behind it."""


def find_starts(wanted: Sequence[Word], words: Sequence[Word]) -> list[int]:
    """Return where the words of an accepted text may begin in an answer: a common word of a few
    letters (yes, us) only at its beginning, 可能 (possible) not behind the 不 of 不可能."""
    if len(wanted) == 1 and wanted[0].is_article:
        return []
    names = [word for word in wanted if not word.is_article]
    key = " ".join(word.key for word in names)
    if re.match(f"[{WIDE}]", key):
        return _starts_of_wide(words)
    is_acronym = all(word.is_acronym for word in names)
    is_common = len(key) == 1 or key in _COMMON
    if not key.isalpha() or len(key) > _SHORT or not (is_acronym or is_common):
        return list(range(len(words)))
    is_shouted = all(word.is_acronym for word in words)
    if is_acronym and not is_shouted:
        # US is no common word, us is
        return [index for index, word in enumerate(words) if index == 0 or word.is_acronym]
    return [0]


def _starts_of_wide(words: Sequence[Word]) -> list[int]:
    return [at for at in range(len(words)) if at == 0 or words[at - 1].key not in _WIDE_NOT]
