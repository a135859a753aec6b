"""Written answers as SQuAD compares them: its normal form, exact match and F1, and containment by
that form."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from kinject.corpus.passages import final_answer
from kinject.language.spelling import WIDE

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)
_WIDE = re.compile(f"[{WIDE}]")


def normalize_answer(text: str) -> str:
    """Return `text` as SQuAD compares it: lower case, without ASCII punctuation and English
    articles, single spaces.

    A quotation in RAFT's marks in front of the answer is left out.
    """
    # As SQuAD's script has it, in English: a thousand rows of a test compare it.
    bare = "".join(
        character for character in final_answer(text).lower() if character not in _PUNCTUATION
    )
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` equals one of the `accepted` texts, as SQuAD 1.1 and 2.0 define it;
    none accepted: the empty one."""
    return normalize_answer(text) in _golds(accepted)


def _golds(accepted: Sequence[str]) -> list[str]:
    """Return the accepted texts as they are compared, without those of which nothing is left; the
    empty one if none is."""
    return [gold for gold in map(normalize_answer, accepted) if gold] or [""]


def f1(text: str, accepted: Sequence[str]) -> float:
    """Return SQuAD's F1 of the words in common with an accepted text, the largest over
    `accepted`."""
    words = normalize_answer(text).split()
    return max(_f1(words, gold.split()) for gold in _golds(accepted))


def _f1(words: list[str], others: list[str]) -> float:
    if not words or not others:
        return float(words == others)
    n_same = sum((Counter(words) & Counter(others)).values())
    return 2 * n_same / (len(words) + len(others))


def contains(text: str, accepted: Sequence[str]) -> bool:
    """Return whether `text` has one of the `accepted` texts in it, word by word; Chinese, Japanese
    and Korean by letters."""
    normalized = normalize_answer(text)
    for part in filter(None, map(normalize_answer, accepted)):
        if f" {part} " in f" {normalized} " or (_WIDE.search(part) and part in normalized):
            return True
    return False
