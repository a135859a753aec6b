"""Texts that a model wrote, against accepted ones: exact match and F1 as SQuAD defines them, containment, values."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal

from kinject.corpus.retrieved import final_answer

if TYPE_CHECKING:
    from kinject.corpus.profiles import Grammar

TextScore = Literal["match", "exact", "contains"]
TextGrader = Callable[[str, Sequence[str]], bool]
"""(written text, accepted texts) -> whether it is correct."""

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)
_WIDE = re.compile("[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_SHORT = 3
"""Letters of an accepted text (yes, no, B) that `matches` wants at the beginning of the answer: elsewhere it is a common word."""

_ABSTAINS = re.compile(
    r"""\b(?:
    (?:i|we)\s(?:do\snot|don'?t|cannot|can'?t|could\snot|couldn'?t)\s(?:really\s)?(?:know|tell|say|find|answer|determine)
    | (?:i'?m|i\sam)\s(?:not\ssure|unsure|unable) | unknown | unanswerable | not\s(?:stated|mentioned|given|known|specified)
    | no\s(?:answer|information) | (?:cannot|can'?t)\sbe\s(?:determined|answered|known) | n/a
    | ich\sweiß\s(?:es\s)?nicht | (?:nicht|un)\s?bekannt | keine\s(?:angabe|antwort|information)
    | je\sne\ssais\spas | inconnue?s? | aucune\s(?:réponse|information)
    | no\s(?:lo\s)?s[eé] | desconocid[oa]s? | sin\srespuesta | non\s(?:lo\s)?so | sconosciut[oa]
    | não\ssei | desconhecid[oa]s? | (?:ik\s)?weet\s(?:ik\s|het\s)*niet | onbekend | nie\swiem | nieznan[yae]
    | (?:я\s)?не\sзнаю | неизвестн[оаы]
    )(?!\w) | 不知道 | 不清楚 | 无法确定 | 未知 | 分かりません | わかりません | 不明 | 모르겠 | 알\s?수\s?없
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Phrases by which a text declines to answer. A short list: a text that declines in other words counts as an answer."""


_WORDS = re.compile(r"[^\W\d_]+")
_MAY_BE_VALUE = re.compile(r"\d|^[^\W\d_]+(?:[\s-]+[^\W\d_]+){0,7}$")
_NO_VALUE = re.compile(r"[^\d\s,.%年月日号號零〇一二三四五六七八九十百千万萬亿億兆两兩個个人名]")
_BESIDE_DATES = frozenset("of the st nd rd th de le el den der del du il den am au".split())  # noqa: SIM905 - a line of words


def normalize_answer(text: str) -> str:
    """Return `text` as SQuAD compares it: lower case, without ASCII punctuation and English articles, single spaces.

    What the text quotes in front of its answer, in RAFT's marks, is left out.
    """
    bare = "".join(character for character in final_answer(text).lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` equals one of the `accepted` texts, as SQuAD 1.1 and 2.0 define it; none accepted: the empty one."""
    return normalize_answer(text) in _golds(accepted)


def _golds(accepted: Sequence[str]) -> list[str]:
    """Return the accepted texts as they are compared, without those of which nothing is left; the empty one if none is."""
    return [gold for gold in map(normalize_answer, accepted) if gold] or [""]


def f1(text: str, accepted: Sequence[str]) -> float:
    """Return SQuAD's F1 of the words in common with an accepted text, the largest over `accepted`."""
    words = normalize_answer(text).split()
    return max(_f1(words, gold.split()) for gold in _golds(accepted))


def _f1(words: list[str], others: list[str]) -> float:
    if not words or not others:
        return float(words == others)
    n_same = sum((Counter(words) & Counter(others)).values())
    return 2 * n_same / (len(words) + len(others))


def contains(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` has one of the `accepted` texts in it, word by word; Chinese, Japanese and Korean by letters."""
    whole = normalize_answer(text)
    parts = [part for part in map(normalize_answer, accepted) if part]
    return any(part in whole if _WIDE.search(part) else f" {part} " in f" {whole} " for part in parts)


def abstains(text: str) -> bool:
    """Return whether `text` is empty, or declines to answer by one of the phrases known here."""
    return not normalize_answer(text) or _ABSTAINS.search(text) is not None


def matches(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` is a correct answer in a sentence.

    It has an accepted text in it, or its value; one of a few letters (yes, B) must be its first word. A text that abstains is
    correct for a question without an answer, and for no other.
    """
    if not accepted:
        return abstains(text)
    if exact_match(text, accepted):
        return True
    if abstains(text):
        return False
    first = normalize_answer(text).split(" ")[0]
    short = [part for part in accepted if len(normalize_answer(part)) <= _SHORT and not _WIDE.search(part)]
    if contains(text, [part for part in accepted if part not in short]) or (short and exact_match(first, short)):
        return True
    return same_value(text, accepted)


def same_value(text: str, accepted: Sequence[str]) -> bool:
    """Return whether an accepted text that is a number or a date is in `text` by its value, with its unit if it has one.

    12 March 1987 is March 12, 1987 and 1987-03-12; 1,200 is 1200 and twelve hundred. `text` is read in its language and as
    English, in the languages that the checks of an augmentation read.
    """
    if not any(map(_MAY_BE_VALUE.search, accepted)):
        return False
    from kinject.corpus.language import detect_language, guess_language
    from kinject.corpus.profiles import grammar_of
    from kinject.corpus.quantities import extract_quantities

    for code in dict.fromkeys((detect_language(text) or guess_language(text) or "en", "en")):
        grammar, written = grammar_of(code), extract_quantities(text, code)
        for other in accepted:
            value = extract_quantities(other, code)
            if not value.numbers or not _is_all_value(other, grammar):
                continue
            same_units = all(units <= written.numbers.get(number, set()) for number, units in value.numbers.items())
            same = value.numbers.keys() <= written.numbers.keys() and same_units
            if same and value.days <= written.days and value.months <= written.months:
                return True
    return False


def _is_all_value(text: str, grammar: Grammar) -> bool:
    """Return whether `text` has nothing but numbers, names of months and units in it."""
    if grammar.unspaced:
        return not _NO_VALUE.search(text)
    profile = grammar.profile
    known = (profile.months, profile.unit_words, profile.unit_of, _BESIDE_DATES, profile.joins)
    words = set(_WORDS.findall(text.lower()))
    return all(any(word in table for table in known) or grammar.number_words_in([word]) for word in words)


_SAYS = r"""(?:
    \b(?:answer|choice|option|solution|letter|antwort|lösung|réponse|choix|respuesta|opción|risposta|opzione|resposta|opção
    |alternativa|antwoord|odpowiedź|ответ|вариант|cevap|yanıt|الإجابة|الجواب)\b [^.\n:]{0,60}?
    (?:\b(?:is|was|(?:would|must|should)\sbe|ist|lautet|wäre|est|serait|es|sería|è|sarebbe|é|seria|to|это|هي|هو)\b|[=:—–])
    | \b(?:choose|pick|select|go\swith|richtig\sist)\b
    | (?:答案|选项|选|選|正解|答え|解答|選択肢|正답|정답|답)\s*(?:应该)?(?:是|为|為|は|은|는|择|擇)?
    )\s*:?\s*"""
_BETWEEN = r"""(?:(?:the|letter|option|choice|a|la|le|el|die|der|den|lettre|letra|lettera|opción|opzione|opção|buchstabe|буква
    |clearly|likely|most|probably|therefore|thus|definitely|:)\s+){0,3}"""
_WORD = r"A-Za-zÀ-ɏЀ-ӿ0-9'’"
_AND = r"(?:,|/|&|\b(?:and|or|und|oder|et|ou|y|o|e|и|или)\b|和|或|と)"
_ALONE = rf"(?![{_WORD}])(?!\s*[)\]]?\s*{_AND}\s*[(\[]?[A-Z](?![{_WORD}]))"
"""After a letter: no more of a word, and no second letter (A and C)."""
_BEGINS = rf"[(\[\"“「]*([A-Za-z]){_ALONE}"
_STATES = re.compile(rf"{_SAYS}{_BETWEEN}{_BEGINS}", re.IGNORECASE | re.VERBOSE)
_IS_RIGHT = re.compile(
    rf"""(?<![{_WORD}])[(\[]?([A-Z]){_ALONE}[)\]]?\s+(?:is|ist|est|es|è|é)\s+(?:(?:the|die|la|le|a)\s+)?
    (?:correct|right|answer|richtig|correcte?|correcta|corretta|correta|juste)""", re.VERBOSE,
)  # fmt: skip
_LINE = re.compile(
    rf"[(\[\"“「]*([A-Za-z]){_ALONE}[\"”」]*(?:[)\]][\s.:]|[.):,;、。:](?![{_WORD}])|\s[-–—]\s|[)\]]?\s*$)"
)
_WORD_LETTERS = frozenset("AEIOaeiouy")
_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|for|which|parce|car|weil|da|porque|perché|ya)\b)[^\W\d_]")
_WRONG = re.compile(r"(?:wrong|incorrect|false|falsche?|fausse|incorrecta)\s+\w*$", re.IGNORECASE)
_MARKUP = re.compile(r"\*+|__|`+|\$+|\\[()\[\]]|\\(?:boxed|text(?:bf)?|math(?:rm|bf))\b")


def read_letter(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option that a written answer names; None if that is not plain.

    It is read from a statement ("The answer is (B)", "Antwort: B", "答案是B"), from a line that begins with the letter of an
    option ("**B**", "B. Paris"), or from the text of an option alone. Several statements must agree, or those of the last
    line; a letter beside another option's text, two letters, or a list of the options name none.
    """
    plain = unicodedata.normalize("NFKC", _MARKUP.sub("", text)).replace("{", "(").replace("}", ")").strip()
    texts = [normalize_answer(choice) for choice in choices]
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    for found in (_stated(plain, texts), _stated(lines[-1] if lines else "", texts), _at_line_starts(lines, texts)):
        if len(found) == 1:
            return next((index for index in found if index >= 0), None)
    whole = normalize_answer(plain)
    return texts.index(whole) if texts.count(whole) == 1 else None


def _stated(text: str, choices: list[str]) -> set[int]:
    """Return the options that statements in `text` name, by letter or by their text; -1 for one that names none of them."""
    found = {_index(match[1], "", choices) for match in _IS_RIGHT.finditer(text)}
    for match in _STATES.finditer(text):
        letter, rest = match[1], text[match.end() :]
        is_word = letter.islower() or letter in _WORD_LETTERS
        if not _WRONG.search(text[: match.start()]) and not (is_word and _GOES_ON.match(rest)):
            found.add(_index(letter, rest, choices))
    for match in _STATES_TEXT.finditer(text):
        value = normalize_answer(match[1])
        found |= {choices.index(value)} if choices.count(value) == 1 and len(value) > 1 else set()
    return found


_STATES_TEXT = re.compile(rf"{_SAYS}([^\n.]+)", re.IGNORECASE | re.VERBOSE)


def _at_line_starts(lines: Sequence[str], choices: list[str]) -> set[int]:
    """Return the options whose letters stand at the beginnings of lines."""
    matches = ((line, _LINE.match(line)) for line in lines)
    return {_index(match[1], line[match.end() :], choices) for line, match in matches if match}


def _index(letter: str, rest: str, choices: list[str]) -> int:
    """Return the index of the option with `letter`; -1 if there is none, or the text after it is another option's."""
    index = string.ascii_uppercase.index(letter.upper())
    beside = normalize_answer(rest.split("\n")[0].lstrip(" .:)]-–—"))
    if index >= len(choices) or (beside in choices and choices[index] != beside):
        return -1
    return index


TEXT_SCORES: Mapping[str, TextGrader] = {
    "match": matches, "exact": exact_match, "contains": contains,
}  # fmt: skip
"""Name of a score -> whether a text is correct by it. The first one is the default."""


def _first_match(text: str, *, regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0,
                 fallback: str = "[invalid]") -> str:  # fmt: skip
    """Return match number `group_select` of a pattern, of several groups the first that is not empty; else `fallback`."""
    found = re.findall(regex_pattern, text)
    if not found:
        return fallback
    match = found[group_select]
    groups = [group for group in match if group] if isinstance(match, tuple) else [match]
    return (groups[0] if groups else fallback).strip()


FILTERS: Mapping[str, Callable[..., str]] = {
    "regex": _first_match, "remove_whitespace": str.strip, "lowercase": str.lower, "uppercase": str.upper,
    "take_first": str,
}  # fmt: skip
"""Filters of lm-evaluation-harness's tasks; a question has one answer here, which is the first."""


def task_grader(
    filters: Sequence[Mapping[str, Any]],
    regexes_to_ignore: Sequence[str] = (),
    *,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_numbers: bool = False,
) -> TextGrader:
    """Return lm-evaluation-harness's exact_match of a text after `filters` (``{function, ...}``), with its options.

    Raises `re.error` or `TypeError` if a filter cannot be used.
    """
    steps = []
    for step in filters:
        options = {key: value for key, value in step.items() if key != "function"}
        steps.append(partial(FILTERS[step["function"]], **options))
        steps[-1]("")
    patterns = [re.compile(pattern) for pattern in regexes_to_ignore or ()]
    ignored = (string.punctuation if ignore_punctuation else "") + (string.digits if ignore_numbers else "")

    def plain(text: str) -> str:
        text = reduce(lambda whole, pattern: pattern.sub("", whole), patterns, text)
        return (text.lower() if ignore_case else text).translate(str.maketrans("", "", ignored))

    def grade(text: str, accepted: Sequence[str]) -> bool:
        written = plain(reduce(lambda whole, step: step(whole), steps, text))
        return any(plain(other) == written for other in accepted)

    return grade
