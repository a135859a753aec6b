"""Verifiers of written answers: each decides from the text alone whether an instruction was followed (as IFEval, 2311.07911).

The `checks` of a question name them: ``{"max_words": 20, "contains": ["Farrow"]}``. An answer is correct if it passes all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kinject.corpus.grading import abstains, contains, exact_match
from kinject.errors import InputError

_SENTENCE = re.compile(r"[^.!?。！？\n]*\w[^.!?。！？\n]*(?:[.!?。！？]+(?=\s|$|[\"'”’)])|\n|$)")
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE)
_FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Check:
    """Whether `holds(text, argument)`. `takes` is the argument's type: bool (only true), int (from 0), str, list (of texts)."""

    takes: type
    holds: Callable[[str, Any], bool]


def _words(text: str) -> int:
    return len(text.split())


def _json(text: str, keys: list[str]) -> bool:
    """Return whether `text` is a JSON object with `keys`, alone or in a block of code; without keys any JSON will do."""
    fenced = _FENCE.match(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


def _has(text: str, part: str) -> bool:
    return contains(text, [part])


def _language(text: str, code: str) -> bool:
    from kinject.corpus.language import detect_language, guess_language

    return code in (detect_language(text), guess_language(text))


CHECKS: Mapping[str, Check] = {
    "contains": Check(list, lambda text, parts: all(_has(text, part) for part in parts)),
    "contains_any": Check(list, lambda text, parts: any(_has(text, part) for part in parts)),
    "forbids": Check(list, lambda text, parts: not any(_has(text, part) for part in parts)),
    "forbids_characters": Check(str, lambda text, characters: not set(text) & set(characters)),
    "equals": Check(list, exact_match),
    "min_words": Check(int, lambda text, n: _words(text) >= n),
    "max_words": Check(int, lambda text, n: 0 < _words(text) <= n),
    "sentences": Check(int, lambda text, n: len(_SENTENCE.findall(text.strip())) == n),
    "paragraphs": Check(int, lambda text, n: len(re.findall(r"\S(?:.|\n(?!\s*\n))*", text)) == n),
    "bullets": Check(int, lambda text, n: len(_BULLET.findall(text)) == n),
    "starts_with": Check(str, lambda text, start: text.lstrip().startswith(start)),
    "ends_with": Check(str, lambda text, end: text.rstrip().endswith(end)),
    "upper": Check(bool, lambda text, _: text.upper() == text),
    "lower": Check(bool, lambda text, _: text.lower() == text),
    "quoted": Check(bool, lambda text, _: re.fullmatch(r'\s*["“].+["”]\s*', text, re.DOTALL) is not None),
    "json": Check(list, _json),
    "language": Check(str, _language),
    "refuses": Check(bool, lambda text, _: abstains(text)),
}
"""Name of a check -> the type of its argument, and what it verifies. Texts are found whatever their case, as whole words."""


def check_names(checks: Mapping[str, Any]) -> str:
    """Return why `checks` cannot be verified (an unknown name, an argument of another type); "" if they can."""
    for name, argument in checks.items():
        if name not in CHECKS:
            return f"checks: found {name!r:.60}, allowed: {', '.join(CHECKS)}."
        takes = CHECKS[name].takes
        fits = type(argument) is takes and argument is not False
        if takes is list:
            fits = isinstance(argument, list | tuple) and all(isinstance(item, str) and item for item in argument)
        if not fits or (takes is int and argument < 0):
            kind = {bool: "true", int: "a number from 0", str: "a text", list: "a list of texts"}[takes]
            return f"checks: {name}: found {argument!r:.60}, expected {kind}."
    return ""


def passes(text: str, checks: Mapping[str, Any]) -> bool:
    """Return whether `text` passes all `checks`. Raises `InputError` for checks that cannot be verified."""
    fault = check_names(checks)
    if fault:
        raise InputError(fault)
    return all(CHECKS[name].holds(text, argument) for name, argument in checks.items())
