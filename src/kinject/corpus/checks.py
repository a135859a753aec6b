"""Instructions whose following is verified from the text alone, as in IFEval (2311.07911).

The `checks` of a question name them: ``{"max_words": 20, "contains": ["Farrow"]}``; an answer is
correct if it passes all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kinject.corpus.grading import abstains
from kinject.corpus.passages import final_answer
from kinject.corpus.squad import exact_match
from kinject.errors import InputError
from kinject.language.sentences import sentences
from kinject.language.spelling import WIDE, case_fold, fold

_BULLET = re.compile(r"^[^\S\n]*+(?:[-*•]|\d++[.)])[^\S\n]++\S", re.MULTILINE)
_NO_SPACES = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
"""Kana and Chinese characters: no spaces are between their words."""
_PIECE = re.compile(rf"{_NO_SPACES.pattern}|[^\s\u3040-\u30ff\u4e00-\u9fff]+")
_LETTER = rf"[^\W_{WIDE}]"
# 5 is in no 3.5 and in no -5, C in no C++, and can in no can't, but Farrow in Farrow's.
_BEFORE = rf"(?<!{_LETTER})(?<!\d[.,])(?!(?<=-)(?<!\w-)\d)"
_AFTER = rf"(?!{_LETTER}|[.,]\d|\+\+|#|'(?!s\b){_LETTER})"
_PARAGRAPH = re.compile(r"\S(?:.|\n(?!\s*\n))*")
_QUOTED = re.compile(r'\s*["“].+["”]\s*', re.DOTALL)
_FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Check:
    """Whether `holds(text, argument)`. `takes` is the argument's type: bool (only true), int (from
    0), str, list (of texts)."""

    takes: type
    holds: Callable[[str, Any], bool]


def _json(text: str, keys: list[str]) -> bool:
    """Return whether `text` is a JSON object with `keys`, alone or in a block of code; without keys
    any JSON will do."""
    fenced = _FENCE.match(text.strip())
    if fenced:
        text = fenced[1]
    try:
        value = json.loads(text)
    # Deep nesting raises RecursionError, and an integer of over 4,300 digits ValueError.
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


@lru_cache(maxsize=1024)
def _whole(part: str) -> re.Pattern[str]:
    """Return the pattern of a text as whole words, with its signs."""
    pattern = re.escape(part)
    if re.match(_LETTER, part[0]):
        pattern = _BEFORE + pattern
    if re.match(_LETTER, part[-1]):
        pattern += _AFTER
    return re.compile(pattern)


def _one_case(text: str) -> str:
    return " ".join(case_fold(fold(text)).split())


def _has(text: str, part: str) -> bool:
    # Not SQuAD's form: it has no articles and no signs, so that none could be forbidden.
    wanted = _one_case(part)
    if not wanted:  # marks of bold text or code
        return part in text
    return _whole(wanted).search(_one_case(final_answer(text))) is not None


def _has_all(text: str, parts: Sequence[str]) -> bool:
    return all(_has(text, part) for part in parts)


def _has_any(text: str, parts: Sequence[str]) -> bool:
    return any(_has(text, part) for part in parts)


def _has_none(text: str, parts: Sequence[str]) -> bool:
    return not _has_any(text, parts)


def _has_no_characters(text: str, characters: str) -> bool:
    return set(text).isdisjoint(characters)


def _n_words(text: str) -> int:
    """Return the number of words; each kana and Chinese character is one."""
    if not _NO_SPACES.search(text):
        return len(text.split())
    return sum(any(map(str.isalnum, piece)) for piece in _PIECE.findall(text))


def _has_enough_words(text: str, least: int) -> bool:
    return _n_words(text) >= least


def _is_short(text: str, most: int) -> bool:
    return 0 < _n_words(text) <= most


def _has_sentences(text: str, n: int) -> bool:
    n_sentences = 0
    for line in text.splitlines():
        for sentence in sentences(line):
            n_sentences += any(map(str.isalnum, sentence))
    return n_sentences == n


def _has_paragraphs(text: str, n: int) -> bool:
    return len(_PARAGRAPH.findall(text)) == n


def _has_bullets(text: str, n: int) -> bool:
    return len(_BULLET.findall(text)) == n


def _starts_with(text: str, start: str) -> bool:
    return text.lstrip().startswith(start)


def _ends_with(text: str, end: str) -> bool:
    return text.rstrip().endswith(end)


def _is_upper(text: str, _: bool) -> bool:
    return text.upper() == text


def _is_lower(text: str, _: bool) -> bool:
    return text.lower() == text


def _is_quoted(text: str, _: bool) -> bool:
    return _QUOTED.fullmatch(text) is not None


def _language(text: str, code: str) -> bool:
    from kinject.language import detect_language, guess_language

    return code in (detect_language(text), guess_language(text))


def _is_code(code: str) -> bool:
    from kinject.language import language_name

    return bool(language_name(code))


def _refuses(text: str, _: bool) -> bool:
    return abstains(text)


CHECKS: Mapping[str, Check] = {
    "contains": Check(list, _has_all),
    "contains_any": Check(list, _has_any),
    "forbids": Check(list, _has_none),
    "forbids_characters": Check(str, _has_no_characters),
    "equals": Check(list, exact_match),
    "min_words": Check(int, _has_enough_words),
    "max_words": Check(int, _is_short),
    "sentences": Check(int, _has_sentences),
    "paragraphs": Check(int, _has_paragraphs),
    "bullets": Check(int, _has_bullets),
    "starts_with": Check(str, _starts_with),
    "ends_with": Check(str, _ends_with),
    "upper": Check(bool, _is_upper),
    "lower": Check(bool, _is_lower),
    "quoted": Check(bool, _is_quoted),
    "json": Check(list, _json),
    "language": Check(str, _language),
    "refuses": Check(bool, _refuses),
}
"""Name of a check -> the type of its argument, and what it verifies. Texts are found whatever their
case, as whole words."""


def check_names(checks: Mapping[str, Any]) -> None:
    """Raise `InputError` for `checks` that cannot be verified: an unknown name, an argument of
    another type."""
    for name, argument in checks.items():
        if name not in CHECKS:
            raise InputError(f"checks: found {name!r:.60}, allowed: {', '.join(CHECKS)}.")
        takes = CHECKS[name].takes
        # By type, since a bool is an int to isinstance; false would check nothing.
        fits = type(argument) is takes and argument is not False
        if takes is list:
            fits = isinstance(argument, list | tuple) and all(
                isinstance(item, str) and item.strip() for item in argument
            )
        if not fits or (takes is int and argument < 0):
            kind = {bool: "true", int: "a number from 0", str: "a text", list: "a list of texts"}[
                takes
            ]
            raise InputError(f"checks: {name}: found {argument!r:.60}, expected {kind}.")
        if name == "language" and not _is_code(argument):
            raise InputError(
                f"checks: language: found {argument!r:.60}, expected the code of a language in "
                "small letters (ISO 639-1): de, en, fr, zh, ..."
            )


def passes(text: str, checks: Mapping[str, Any]) -> bool:
    """Return whether `text` passes all `checks`; an empty one follows none, but may decline.

    Raises `InputError` for checks that cannot be verified.
    """
    check_names(checks)
    # IFEval's rule: else a model that writes nothing has no capitals and no forbidden word.
    if not text.strip() and checks.keys() != {"refuses"}:
        return False
    return all(CHECKS[name].holds(text, argument) for name, argument in checks.items())
