"""Rewritings that need no model: (title, passage, seed) -> text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.corpus.passages import sentences

Mechanical = Callable[[str, str, int], str]
"""(title, passage, seed) -> text."""
_FULL_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: (?:(?:de|van|von|der|la|al|bin|of) )?[A-Z][\w’'-]+)+")
_SUBJECT = re.compile(r"\A(?:He|She)\b(?!['’])")
_POSSESSIVE = re.compile(r"\A(?:His|Her)\b(?= [a-z])")


def permute_sentences(title: str, passage: str, seed: int) -> str:
    """Return the sentences of `passage` in another order (Physics of Language Models 3.1, arXiv 2309.14316)."""
    shuffled = sentences(passage)
    Random(seed).shuffle(shuffled)
    return " ".join(shuffled)


def name_fully(title: str, passage: str, seed: int) -> str:
    """Return `passage` with the full name for He, She, His and Her at the beginning of sentences (arXiv 2309.14316).

    The name is that of the last sentence that begins with one; a later surname gets its full form. Sentences before any
    full name stay as they are.
    """
    named = Counter(match[0] for match in _FULL_NAME.finditer(passage))
    current = ""
    rewritten = []
    for sentence in sentences(passage):
        first = _FULL_NAME.match(sentence)
        if first and first[0].split()[0].lower() not in SENTENCE_STARTERS:
            current = first[0]
        if current:
            sentence = _SUBJECT.sub(current, sentence)
            sentence = _POSSESSIVE.sub(f"{current}'s", sentence)
            last = current.split()[-1]
            if named[current] and sentence.startswith(f"{last} "):
                sentence = current + sentence[len(last) :]
        rewritten.append(sentence)
    return " ".join(rewritten)


def tag_source(title: str, passage: str, seed: int) -> str:
    """Return `passage` behind a line that names its source."""
    return f"From {title}:\n{passage}" if title else passage


MECHANICAL: Mapping[str, tuple[str, Mechanical]] = {
    "permuted": ("sentences in another order, no model", permute_sentences),
    "full_names": ("names for pronouns, no model", name_fully),
    "tagged": ("behind its title, no model", tag_source),
}
"""Name of a style -> (one line for lists, function)."""
