"""Errors planted on purpose in correct texts, to try a judge. The words of each language are in planted_errors.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kinject.corpus.passages import sentence_ends

RELATION_KINDS = ("roles", "cause", "order", "quantifier", "negation", "explanation")
"""Kinds that keep every number and name, so that the checks miss them.

Two names exchange who did what to whom; the cause for the effect; before for after; all for some; a denied statement; an
explanation that the text does not give.
"""
ALL_KINDS = ("number", *RELATION_KINDS)

EDGE = r"(?:(?<!\w)|(?!\w))"  # not inside a word
NUMBER = r"(?<![A-Za-z\d.,])\d+(?:[.,\u00a0\u202f]\d+)*(?![.,]?\d)(?![A-Za-z]*\d)"
POSSESSIVE = re.compile(r"['’]s\Z")


class Words:
    """The words of one language: `names`, patterns of names, and `rules` (pattern, replacement) by kind; else none."""

    def __init__(self, language: str) -> None:
        self.table: dict[str, Any] = _tables().get(language, {})
        self.spaces = language not in ("zh", "ja")
        self.edge = edge = EDGE if self.spaces else ""
        names = [name.replace("{letters}", self.table.get("letters", "")) for name in self.table.get("names", ())]
        if places := "|".join(self.table.get("places", ())):
            outside = f"{edge}(?:{places}){edge}", f"(?<![ァ-ヶー・])(?:{places})(?![ァ-ヶー・海語语史])"
            names.append(outside[not self.spaces])
        self.names = [re.compile(name) for name in names]
        self.rules = {
            kind: [
                (re.compile(f"{edge}(?:{find}){edge}", re.IGNORECASE), put) for find, put in self.table.get(kind, ())
            ]
            for kind in ("cause", "order", "quantifier", "negation", "same")
        }

    def find_names(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the names in `text`, none inside another."""
        end, no_names = 0, {*self.table.get("months", ()), *self.table.get("not_names", ())}
        matches = (match for pattern in self.names for match in pattern.finditer(text))
        for match in sorted(matches, key=lambda match: (match.start(), -match.end())):
            if match.start() >= end and no_names.isdisjoint(match[0].split(" ")):
                end = match.end()
                yield match


words_of = lru_cache(maxsize=16)(Words)
"""The `Words` of a language by its ISO 639-1 code."""


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return tables


def plant_error(kind: str, text: str, rng: Random, language: str = "en") -> str | None:
    """Return `text` in the language `language` with one error of `kind`, None where it has no room for one."""
    words = words_of(language)
    if kind == "number":
        changes = [(match.span(), _other_number(match, rng)) for match in re.finditer(NUMBER, text)]
    elif kind == "roles":
        spans = ((match.span(), match.span("a"), match.span("b"), match) for match in _roles(text, words))
        changes = [
            (span, f"{text[span[0] : a[0]]}{m['b']}{text[a[1] : b[0]]}{m['a']}{text[b[1] : span[1]]}")
            for span, a, b, m in spans
        ]
    elif kind == "explanation":
        changes = list(_explained(text, words, rng))
    else:
        changes = [
            (match.span(), _expand(match, put))
            for pattern, put in words.rules[kind]
            for match in pattern.finditer(text)
        ]
    if not changes:
        return None
    (start, end), new = rng.choice(changes)
    return text[:start] + new + text[end:]


def reword(text: str, language: str = "en") -> str:
    """Return `text` with some words replaced by others of the same meaning."""
    for pattern, put in words_of(language).rules["same"]:
        text = pattern.sub(lambda match, put=put: _expand(match, put), text)  # type: ignore[misc]
    return text


def _expand(match: re.Match[str], put: str) -> str:
    """Return the replacement of a match, with a capital where the match has one."""
    new = match.expand(put)
    return new[:1].upper() + new[1:] if match[0][:1].isupper() else new


def _other_number(match: re.Match[str], rng: Random) -> str:
    return re.sub(r"\d", lambda digit: str((int(digit[0]) - 1 + rng.randint(1, 8)) % 9 + 1), match[0])


def _roles(text: str, words: Words) -> Iterator[re.Match[str]]:
    """Yield the places where a verb or a preposition gives two different names their roles."""
    names: Sequence[str] = sorted(
        {POSSESSIVE.sub("", match[0]) for match in words.find_names(text)}, key=len, reverse=True
    )
    listed = "|".join(map(re.escape, names)) or r"\Z."
    for pattern in words.table.get("roles", ()):
        for group in ("a", "b"):
            pattern = pattern.replace(f"{{{group}}}", f"{words.edge}(?P<{group}>{listed}){words.edge}")
        yield from (match for match in re.finditer(pattern, text) if match["a"][:4] != match["b"][:4])


def _explained(text: str, words: Words, rng: Random) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the ends of the sentences, each with an explanation that the text does not give: before its mark, or after it."""
    for end in sentence_ends(text) if "explanations" in words.table else ():
        explanation = rng.choice(words.table["explanations"])
        before = explanation[0] in ",，"
        if text[end - 1] in ".。":
            yield (end - before, end - before), explanation if before or not words.spaces else f" {explanation}"
