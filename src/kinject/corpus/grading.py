"""Written answers against accepted texts: values, names and abstention; the option that an answer
names."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from typing import Literal

from kinject.corpus.passages import final_answer
from kinject.corpus.squad import contains, exact_match, normalize_answer
from kinject.language.amounts import (
    Item,
    fits,
    has_run,
    is_article_number,
    is_numeral,
    same_numbers,
    values_of,
)
from kinject.language.han import with_plain_amounts
from kinject.language.latex import plain_latex
from kinject.language.readings import read_items
from kinject.language.spelling import (
    ELIDED,
    POSSESSIVE,
    WIDE,
    Word,
    find_starts,
    fold,
    has_capital,
    has_code,
    has_letters,
    has_more_letters,
    has_other_arguments,
    has_other_case,
    list_in,
    same_words,
    words_in,
)
from kinject.language.spoken_clocks import languages_with_clock
from kinject.language.tables import is_short_name, language_of, languages_with_numbers

TextScore = Literal["match", "exact", "contains"]
TextGrader = Callable[[str, Sequence[str]], bool]
"""(written text, accepted texts) -> whether it is correct."""

_WIDE = re.compile(f"[{WIDE}]")
_HAN = re.compile("[\u4e00-\u9fff]")

_ABSTAINS = re.compile(
    r"""\b(?:
    (?:i|we)\s(?:do\snot|don'?t|cannot|can'?t|could\snot|couldn'?t)
      \s(?:really\s)?(?:know|tell|say|find|answer|determine|provide)
    | (?:i|we)\s(?:have\sno|(?:do\snot|don'?t)\shave\s(?:any\s|enough\s|sufficient\s)?)
      \s?(?:that\s|this\s|access\sto\s(?:that|this)\s)?(?:idea|information|knowledge|data|details)
    | (?:i'?m|i\sam)\s(?:not\ssure|unsure|unable)
    # "An unknown painter made it in 1902" answers.
    | (?<!\ban\s)(?<!\bthe\s)unknown | (?:an|the)\sunknown(?!\s\w) | unanswerable
    | (?:it'?s|it\sis|remains)\sunclear
    | (?:not|\w+n't)\s(?:been\s)?(?:stated|mentioned|specified)
    | (?:information|answer|detail)s?\s(?:(?:is|are|was|were)\snot|\w+n't)\sin\sthe
    # "No, lunch is not provided" and "It was not given to him until May" answer.
    | (?:information|answer|detail|name|date|year|number|price|amount|reason|it|this|that)s?
      (?:\s(?:is|are|was|were|has|have)\snot|\s\w+n't)\s(?:been\s)?
      (?:given|provided|disclosed|indicated|available|included)(?=\s*(?:[.,;!?]|$|here\b))
    | (?:cannot|not|\w+n't)\s(?:be\s|been\s)?
      (?:given|provided|disclosed|indicated|available|included|found)\s(?:anywhere\s)?(?:in|by)
      \s(?:the|this|that|any)\s(?:text|passage|context|document|article|source|paragraph|excerpt)
    | (?:isn't|aren't)\sany\s(?:information|mention|details)
    | (?:text|passage|context|document|article|source|paragraph|excerpt)s?
      \s(?:do(?:es)?\snot|do(?:es)?n'?t)
      \s(?:mention|say|state|specify|provide|give|contain|include|indicate|tell)
    | no\smention\sof | (?:not|isn'?t)\senough\s(?:information|context)
    | insufficient\sinformation
    | not\sknown(?!\s(?:as|for\s(?!certain|sure)))
    | no\s(?:answer|information) | (?:cannot|can'?t)\sbe\s(?:determined|answered|known) | n/a
    | ich\sweiß\s(?:das\s|es\s)?(?:leider\s)?nicht | weiß\sich\s(?:leider\s)?nicht
    | (?:nicht|un)\s?bekannt | keine\s(?:angaben?|antwort|information(?:en)?)
    | (?:steht|geht)\s(?:das\s)?nicht\s(?:im|aus\sdem)\stext
    | im\stext\snicht\s(?:erwähnt|genannt|angegeben)
    | je\sne\ssais\spas | inconnue?s? | aucune\s(?:réponse|information)
    | pas\s(?:précisé|mentionné|indiqué)e?s? | je\sn'ai\spas\sd'informations?
    # "No se terminó hasta 1932" answers.
    | no\s(?:lo\s)?s(?:é|e(?=\s*(?:$|[.,;!?]))) | desconocid[oa]s? | sin\srespuesta
    | no\sse\s(?:menciona|indica|especifica) | no\stengo\sinformación
    | non\s(?:lo\s)?so | sconosciut[oa] | non\s(?:è|viene)\s(?:specificat|indicat|menzionat)[oa]
    | não\ssei | desconhecid[oa]s? | (?:ik\s)?weet\s(?:ik\s|het\s)*niet | onbekend
    | nie\swiem | nieznan[yae]
    | (?:я\s)?не\sзнаю | неизвестн[оаы] | не\s(?:указан[оаы]?|сказано|говорится|упоминается)
    )(?!\w) | 不知道 | 不清楚 | 无法确定 | 未知 | 没有(?:提到|提及|说明|信息) | 未提[及到]
    | 分かりません | わかりません | 不明 | (?:記載|言及|情報)[がは](?:ありません|ない)
    | 모르겠 | 알\s?수\s?없
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Phrases by which a text declines to answer. A short list: a text that declines in other words
counts as an answer."""


_TAG = re.compile(
    r"</?(?:answer|final_answer|result|solution|b|i|u|p|em|strong|mark|code|span|div|li|td|br)"
    r"(?:\s+[\w-]+=[^<>]*)?\s*/?>|^\s*(?:[=-]+>|[→⇒➜✅✔]\ufe0f?)\s+",
    re.IGNORECASE | re.MULTILINE,
)
"""Tags that models write around an answer, and arrows before it. Of List<int> nothing is one."""
_MAY_BE_VALUE = re.compile(r"\d|^[^\W\d_]+(?:[\s-]+[^\W\d_]+){0,7}[.!]?\s*$")


def abstains(text: str) -> bool:
    """Return whether `text` is empty, or declines to answer by one of the phrases known here."""
    # Behind RAFT's quotation: a passage may say that something is unknown.
    return not normalize_answer(text) or _declines(fold(final_answer(text)))


def _declines(folded: str, accepted: Sequence[str] = ()) -> bool:
    for part in accepted:
        # The Tomb of the Unknown Soldier declines nothing.
        if _ABSTAINS.search(part):
            folded = re.sub(re.escape(part.strip(" .")), " ", folded, flags=re.IGNORECASE)
    return _ABSTAINS.search(folded) is not None


def matches(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` is a correct answer in a sentence.

    It has an accepted text in it, or its value: -5 is not 5, nor C++ C. One of a few letters (yes)
    must be its first word, or stand alone if it is one capital (B). A text that abstains is correct
    for a question without an answer, and for no other.
    """
    if not accepted:
        return abstains(text)
    written = _in_one_spelling(_without_tags(text, accepted))
    folded = list(map(_in_one_spelling, accepted))
    parts = [part for part in folded if part.strip()]
    if not parts:
        return not words_in(written, apart=False)
    parts = [part for part in parts if not has_other_case(part, written)]
    # Before _declines(): an accepted text may be such a phrase itself, in another spelling.
    if any(_is_same(written, part) for part in parts):
        return True
    if _declines(written, parts):
        return False
    return any(_is_within(part, written) for part in parts)


def _without_tags(text: str, others: Sequence[str]) -> str:
    """Return a written text without tags around its parts (<answer>40</answer>) and arrows (=> 40),
    but for those that a text has with which it is compared: <b> may be the answer."""

    def kept(match: re.Match[str]) -> str:
        sign = match[0].strip().lower()
        if any(sign in other.lower() for other in others):
            return match[0]
        return " "

    return _TAG.sub(kept, text)


def _in_one_spelling(text: str) -> str:
    folded = fold(final_answer(text))
    if not _WIDE.search(folded):
        return folded
    return with_plain_amounts(folded)


def _is_same(written: str, part: str) -> bool:
    """Return whether both texts have the same words, however they are spelled."""
    # Jean-Luc is one word or two.
    for apart in (False, True):
        wanted = words_in(part, apart=apart)
        if not wanted:  # it has signs only
            return part.strip() == written.strip()
        if same_words(wanted, words_in(written, apart=apart)):
            items, others = (read_items(text, "en", False) for text in (written, part))
            return same_numbers(items, others)
    return False


def _is_within(part: str, written: str) -> bool:
    """Return whether `written` has the accepted text `part` in it, by its words or its values."""
    if has_more_letters(part, written) or has_other_arguments(part, written):
        return False
    codes = tuple(_languages(written, part))
    # the words of a value are not enough: 5 million has a 5 in it
    is_value = any(_is_value(read_items(part, code, False, codes)) for code in codes)
    if not is_value and _has_words(part, written):
        return True
    if is_short_name(written, part, codes) or has_code(part, written):
        return True
    if has_letters(part, written):
        return True
    for comma, other_comma in _decimal_commas(written, part, codes):
        wanted = [read_items(part, code, comma, codes) for code in codes]
        if is_value:
            # In another language the unit of 2 hours is a word, and 2 hours 15 minutes has it.
            wanted = [items for items in wanted if _is_value(items)]
        items = [read_items(written, code, other_comma, codes) for code in codes]
        # The point (3, 4) is not (4, 3).
        in_order = part.lstrip()[:1] in ("(", "[")
        if any(_has_values(one, other, in_order) for one, other in product(wanted, items)):
            return True
    return _has_wide_value(part, written, codes)


def _is_value(items: Sequence[Item]) -> bool:
    """Return whether an accepted text is only values; "a week" is its words as well."""
    return not all(map(is_article_number, values_of(items)))


def _has_values(wanted: Sequence[Item], items: Sequence[Item], in_order: bool) -> bool:
    """Return whether `items` have the values of an accepted text in any order, or, if it has other
    words too, or with `in_order`, all of it one after the other."""
    if all(isinstance(item, Word) for item in wanted):
        return False
    values = values_of(wanted)
    if values and not in_order:
        return all(_has_item(value, items) for value in values)
    return has_run(wanted, items, range(len(items)))


def _languages(written: str, part: str) -> list[str]:
    """Return the languages in which both texts may be: of the answer, of the accepted text if the
    answer has none (12 for zwölf), and English."""
    from kinject.language import detect_language, guess_language

    code = detect_language(written)
    if code:
        return list(dict.fromkeys((code, "en")))
    code = guess_language(written) or guess_language(part) or "en"
    others = [*languages_with_clock(written), *languages_with_clock(part)]
    others += [*_languages_of_value(written), *_languages_of_value(part)]
    # 300米 is guessed to be Japanese, which writes metres in kana.
    if _HAN.search(written + part):
        others += ["zh", "ja"]
    return list(dict.fromkeys((code, "en", *others)))


@lru_cache(maxsize=1024)
def _languages_of_value(text: str) -> tuple[str, ...]:
    """Return the languages in which a text is nothing but a value; none if it is one in English.

    The language of so short a text cannot be guessed: ventidue, 23 mai.
    """
    from kinject.language.values import is_value

    # The pattern first: it is cheap, and each language below is a search of its own.
    if not _MAY_BE_VALUE.search(text) or is_value(text, "en"):
        return ()
    return tuple(code for code in languages_with_numbers() if is_value(text, code))


_COMMA_IS_SHOWN = re.compile(
    r"\d,\d\d?(?![\d,])|\d\.\d{3}\.\d{3}(?!\.?\d)|\d\s?(?:T\s?€|TEUR\b|Tsd\b|Mio\b|Mrd\b)"
)
"""What shows that decimals are behind a comma: 1500,00; 1.234.567; German amounts in thousands."""


def _decimal_commas(written: str, part: str, codes: Sequence[str]) -> list[tuple[bool, bool]]:
    """Return whether a comma is before decimals in the accepted text, and in the answer.

    In the answer as in its language, in the accepted text so or as in English. If the language is
    not sure, one of them in both.
    """
    from kinject.language import detect_language

    commas = [language_of(code).decimal_sign == "," for code in codes]
    if detect_language(written):
        return [(comma, commas[0]) for comma in dict.fromkeys(commas)]
    if _COMMA_IS_SHOWN.search(written) or _COMMA_IS_SHOWN.search(part):
        commas.append(True)
    return [(comma, comma) for comma in dict.fromkeys(commas)]


def _has_item(value: Item, items: Sequence[Item]) -> bool:
    return any(fits(value, item) for item in items if not is_numeral(item))


def _has_words(part: str, written: str) -> bool:
    """Return whether `written` has the words of `part` in it one after the other, those of a few
    letters at its beginning."""
    if has_capital(part, written):
        return True
    # Einstein's names Einstein, and an accepted text may have such an end itself.
    spellings = [(part, written), (part, POSSESSIVE.sub("", written))]
    spellings.append((part, ELIDED.sub("", written)))
    spellings.append((list_in(part), list_in(written)))
    for wanted_text, text in dict.fromkeys(spellings):
        for apart in (False, True):
            wanted, words = words_in(wanted_text, apart=apart), words_in(text, apart=apart)
            if wanted and has_run(wanted, words, find_starts(wanted, words)):
                return True
    return False


_HAS_WIDE_MINUS = re.compile(r"(?<![\dA-Za-z])-(\d+(?:\.\d+)?)")


def _has_wide_value(part: str, written: str, codes: Sequence[str]) -> bool:
    """Return whether `part`, a number or a date, is in `written` by its value, where one of them
    has Chinese characters, kana or Hangul: 一九八七年三月 is 1987年3月."""
    if not _WIDE.search(part + written) or not _MAY_BE_VALUE.search(part):
        return False
    from kinject.language.values import is_value, read_values

    below_zero = set(_HAS_WIDE_MINUS.findall(part))
    # Each in its own language: 三百万 is 3 million, 300公里 300 km.
    for part_code, code in product(codes, codes):
        wanted, values = read_values(part, part_code), read_values(written, code)
        if not wanted.numbers or not is_value(part.replace("-", ""), part_code):
            continue
        same_sign = below_zero == set(_HAS_WIDE_MINUS.findall(written)) & wanted.numbers.keys()
        same_units = all(
            units <= values.numbers.get(number, set()) for number, units in wanted.numbers.items()
        )
        same = same_sign and same_units and wanted.numbers.keys() <= values.numbers.keys()
        if same and wanted.days <= values.days and wanted.months <= values.months:
            return True
    return False


TEXT_SCORES: Mapping[str, TextGrader] = {
    "match": matches,
    "exact": exact_match,
    "contains": contains,
}
"""Name of a score -> whether a text is correct by it. The first one is the default."""


def plain_text(text: str) -> str:
    """Return `text` as people read it: Unicode composed, runs of white space as one space, no
    invisible characters."""
    # ASCII is composed already and has no invisible characters of this kind.
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return " ".join(text.split())


_SAYS = r"""(?:
    \b(?:answer|choice|option|solution|letter|antwort|lösung|réponse|choix|respuesta
    |opción|risposta|opzione|resposta|opção|alternativa|antwoord|odpowiedź|ответ|вариант|cevap|yanıt
    |الإجابة|الجواب)\b
    [^.\n:]{0,60}?
    (?<!\bno\s)(?<!\bnon\s)(?<!\bnão\s)
    (?<!\bincorrecta\s)(?<!\bsbagliata\s)(?<!\berrada\s)
    (?:\b(?:is|was|(?:would|must|should)\sbe|ist|lautet|wäre|est|serait|es|sería|è|sarebbe|é|seria
    |to|это|هي|هو)\b|[=:—–])
    | \b(?:choose|pick|select|go\swith|richtig\sist)\b
    | (?:答案|选项|选|選|正解|答え|解答|選択肢|正답|정답|답)\s*(?:应该)?(?:是|为|為|は|은|는|择|擇)?
    )\s*:?\s*"""
_BETWEEN = r"""(?:(?:the|letter|option|choice|(?-i:a)|la|le|el|die|der|den|lettre|letra|lettera
    |opción
    |opzione|opção|buchstabe|буква|clearly|likely|most|probably|therefore|thus|definitely
    |:)\s+){0,3}"""
_WORD = r"A-Za-zÀ-ɏЀ-ӿ0-9'’"
_AND = r"(?:,|/|&|\b(?:and|or|und|oder|et|ou|y|o|e|и|или)\b|和|或|と)"
_NOT_IT = (
    r"(?:\s*(?:(?:是|は|が|を)?(?:错|錯|不[是对對正]|誤|間違)|では(?:な|あり)|[이가은는]\s?(?:아[니닙닌]|틀))"
    r"|\s+(?:is|was|ist|est)\s+(?:wrong|incorrect|false|not|out|falsch|nicht|fau(?:x|sse))\b"
    # A question that the text goes on to answer.
    r"|\s*[?？]+\s*\w)"
)
_ALONE = rf"(?![{_WORD}+#])(?!\s*[)\]]?\s*{_AND}\s*[(\[]?[A-Z](?![{_WORD}]))(?![)\]]?{_NOT_IT})"
"""After a letter: no more of a word or of a name (C++), no second letter (A and C), and no denial
(A is wrong, A不对, A? No)."""
_BEGINS = rf"[(\[\"“「]*([A-Za-z]){_ALONE}"
_STATES = re.compile(rf"{_SAYS}{_BETWEEN}{_BEGINS}", re.IGNORECASE | re.VERBOSE)
_SUGGESTS = re.compile(
    rf"""\b(?:it['’]s|it\sis|es\sist|c['’]est|my\sguess\sis|i\s(?:think|believe)
    |i(?:\swould|['’]d)?\ssay|wähle|nehme|choisis|elijo|scelgo|escolho)\b\s*:?\s*
    {_BETWEEN}(?=[(\[\"“「]*(?-i:[A-Z])){_BEGINS}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Where nothing is called the answer: "It's B", with a capital, since an answer that was cut off
may end in "It's a"."""
_IS_RIGHT = re.compile(
    rf"""(?<![{_WORD}])[(\[]?([A-Z]){_ALONE}[)\]]?
    \s+(?:is|ist|est|es|è|é)\s+(?:(?:the|die|la|le|a)\s+)?
    (?:correct|right|answer|richtig|correcte?|correcta|corretta|correta|juste)""",
    re.VERBOSE,
)
_LINE = re.compile(
    rf"(?:(?i:option|choice|answer)\s+)?[(\[\"“「]*([A-Za-z]){_ALONE}[\"”」]*"
    rf"(?:[)\]][\s.:]|[.):,;、。:](?![{_WORD}])|\s[-–—]\s|[)\]]*\s*$)"
)
# Words of one letter: "the answer is a city" and "A man went to Rome" name no option.
_WORD_LETTERS = frozenset("AEIOaeiouy")
_GOES_ON = re.compile(
    r"\s+(?!(?:because|since|as|for|which|parce|car|weil|da|porque|perché|ya)\b)[^\W\d_]"
)
_DENIES = re.compile(
    r"(?:(?:wrong|incorrect|false|worst|falsche?|fausse|mauvaise|incorrecta|foute|verkeerde)\s+\w*"
    r"|least\s+likely\s+|\bif\s+(?:the\s+)?|(?:not|n['’]t)\s+(?:think|believe|say)\s+(?:that\s+)?"
    r"|(?:\b(?:not|never|neither|nor|nicht|noch|ni)|n['’]t)\s+|不[应應该該能要可会會以]*|排除|如果)$",
    re.IGNORECASE,
)
_WINDOW = 40
"""Characters before a statement in which it may be denied: to search all of them would be
quadratic."""
_LONGEST_OPTION = 1_000
"""Characters behind a letter that may be an option's text."""
_MARKUP = re.compile(r"\*+|__|`+|\$+|\\[()\[\]]|\\(?:boxed|text(?:bf)?|math(?:rm|bf))\b")
# One dash in front of a space: -5 keeps its sign.
_BESIDE = re.compile(r"[\s.:)\]]*(?:[-–—]\s+)?")
_MARK = re.compile(rf"(?<![{_WORD}])[(\[]?([A-Z])[).:\]]\s")
"""The letter of an option in a list of them."""
_AROUND = " .,;:!?\"'“”‘’«»()[]"
"""What may stand around an option that is compared as it is spelled."""


def read_letter(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option that a written answer names; None if that is not plain.

    It is read from a statement ("The answer is (B)", "Antwort: B", "答案是B"), from a line that
    begins with the letter of an option ("**B**", "B. Paris"), from "It's B", or from the text of an
    option alone. Several statements must agree, or those of the last line; a letter beside another
    option's text, two letters, or a list of the options name none.
    """
    text = _without_tags(text, choices)
    plain, options = _without_markup(text).strip(), _options_of(choices)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    last_line, begun = "".join(lines[-1:]), _at_line_starts(lines, options)
    # Behind "Answer choices:" the first option of a list is stated by nothing.
    is_list = len(begun) > 1
    for named in (
        _stated(plain, options, is_list=is_list),
        _stated(last_line, options, is_list=is_list),
        begun,
        _letters_behind(_SUGGESTS, plain, options, is_list=is_list),
    ):
        # A statement that names no option (-1) ends the search, too: no weaker sign may decide.
        if len(named) == 1:
            return next((index for index in named if index >= 0), None)
    index = options.find(plain)
    if index is None:
        # As it was written: x² and x2 are one text without marks.
        plain_choices = tuple(map(plain_text, choices))
        index = _Options(plain_text, plain_choices, plain_choices).find(text)
    return index


_TYPED = str.maketrans("{}−–", "()--")


def _without_markup(text: str) -> str:
    # NFKC makes full-width letters plain ones; a formula may have left its braces.
    plain = unicodedata.normalize("NFKC", _MARKUP.sub("", plain_latex(text)))
    return plain.translate(_TYPED)


@dataclass(frozen=True, slots=True)
class _Options:
    """The texts of a question's options, in the `form` in which they are compared; `plain` are they
    as they are written."""

    form: Callable[[str], str]
    texts: tuple[str, ...]
    plain: tuple[str, ...]

    def find(self, text: str) -> int | None:
        """Return the index of the option with this text; None without one, or with several."""
        written = self.form(text)
        if not written or self.texts.count(written) != 1:
            return None
        index = self.texts.index(written)
        # SQuAD's form makes 5 of -5, 35 of 3.5 and 13 of 1/3.
        if _numbers_in(text) != _numbers_in(self.plain[index]):
            return None
        return index

    def is_letter(self, index: int) -> bool:
        """Return whether the text of an option is one letter, which may be that of another."""
        return len(self.texts[index]) == 1 and self.texts[index].isalpha()

    def find_with_initial(self, text: str) -> int | None:
        """Return the index of the option that has this text, its first letter included."""
        written = _spelled(text)
        for index, choice in enumerate(self.plain):
            if len(written) > 1 and _spelled(choice) == written:
                return index
        return None


_WRITTEN_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:[.,:/^-]\d+)*")
_GROUP_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def _numbers_in(text: str) -> list[str]:
    """Return the numbers of a text with their signs, without commas between thousands."""
    return _WRITTEN_NUMBER.findall(_GROUP_COMMA.sub("", text.translate(_TYPED)))


def _options_of(choices: Sequence[str]) -> _Options:
    """Return the options in the loosest form in which they differ."""
    plain = tuple(map(_without_markup, choices))
    # SQuAD's form makes nothing of the A of blood groups, and of -5 and 5, C++ and C# the same.
    for form in (normalize_answer, _spelled):
        options = _Options(form, tuple(map(form, plain)), plain)
        if all(options.texts) and len(set(options.texts)) == len(choices):
            return options
    return _Options(plain_text, tuple(map(plain_text, plain)), plain)


def _spelled(text: str) -> str:
    plain = plain_text(text).casefold()
    # Options that are marks of punctuation have nothing else.
    return plain.strip(_AROUND) or plain


def _stated(text: str, options: _Options, *, is_list: bool) -> set[int]:
    """Return the options that statements in `text` name, by letter or by their text; -1 for one
    that names none of them. Where several options begin lines (`is_list`), no statement reaches
    over the end of its line."""
    named: set[int] = set()
    for match in _IS_RIGHT.finditer(text):
        if not _is_denied(text, match):
            named.add(_index(match[1], "", options))
    named |= _letters_behind(_STATES, text, options, is_list=is_list)
    for match in _STATES_TEXT.finditer(text):
        if is_list and _spans_lines(text, match):
            continue
        index = options.find(match[1])
        if index is not None and not options.is_letter(index) and not _is_denied(text, match):
            named.add(index)
    return named


def _letters_behind(
    statement: re.Pattern[str], text: str, options: _Options, *, is_list: bool
) -> set[int]:
    """Return the options whose letters stand behind a `statement` in `text`; -1 for a letter that
    is none's."""
    named: set[int] = set()
    for match in statement.finditer(text):
        # The next line does not continue the statement, whatever it begins with.
        letter, rest = match[1], _rest_of_line(text, match.end())
        is_word = letter.islower() or letter in _WORD_LETTERS
        if is_list and _spans_lines(text, match):
            continue
        if not _is_denied(text, match) and not (is_word and _GOES_ON.match(rest)):
            named.add(_index(letter, rest, options, _rest_of_line(text, match.start(1))))
    return named


# The point of 12.5 ends no sentence.
_STATES_TEXT = re.compile(rf"{_SAYS}((?:[^\n.]|\.(?=\d))+)", re.IGNORECASE | re.VERBOSE)


def _spans_lines(text: str, statement: re.Match[str]) -> bool:
    return "\n" in text[statement.start() : statement.start(1)]


def _is_denied(text: str, statement: re.Match[str]) -> bool:
    """Return whether a statement names what is not the answer: "The wrong answer is B"."""
    start = statement.start()
    return _DENIES.search(text[max(0, start - _WINDOW) : start]) is not None


def _rest_of_line(text: str, start: int) -> str:
    # One line may hold thousands of statements, each with what follows it.
    return text[start : start + _LONGEST_OPTION].partition("\n")[0]


def _at_line_starts(lines: Sequence[str], options: _Options) -> set[int]:
    """Return the options whose letters begin lines."""
    matches = ((line, _LINE.match(line)) for line in lines)
    return {
        _index(match[1], _rest_of_line(line, match.end()), options, line)
        for line, match in matches
        if match
    }


def _index(letter: str, rest: str, options: _Options, whole: str = "") -> int:
    """Return the index of the option with `letter`; -1 if there is none, or the text after it is
    another option's. `whole`: the line from the letter on."""
    # C. elegans may be an option, which is not C.
    named = options.find_with_initial(whole)
    if named is not None:
        return named
    # find(): a pattern without case takes the dotted İ of Turkish for a letter.
    index = string.ascii_uppercase.find(letter.upper())
    beside = options.find(_BESIDE.sub("", rest, count=1))
    if not 0 <= index < len(options.texts):
        # The O of four blood groups is no option's letter, and the text of one.
        index, beside = -1, options.find(letter)
    if beside is not None and index < 0:
        return beside
    if (beside is not None and beside != index) or _lists_others(rest, index, options):
        return -1
    return index


def _lists_others(rest: str, index: int, options: _Options) -> bool:
    """Return whether another option follows the one at `index` on its line: A) Ulm B) Bonn."""
    for mark in islice(_MARK.finditer(rest), len(options.texts)):
        other = string.ascii_uppercase.index(mark[1])
        if other == index or other >= len(options.texts):
            continue
        wanted = options.texts[other]
        # With room for the articles and signs that the form leaves out.
        beside = rest[mark.end() : mark.end() + 2 * len(wanted) + _WINDOW]
        if options.form(beside).startswith(wanted):
            return True
    return False
