"""Reads the answers to the prompts of the styles: texts, lines, sections, pairs of question and answer.

The styles that need no model have their rewritings here, too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.corpus.passages import sentences

_FENCED = re.compile(r"\A```[\w-]*\n(.*?)\n?```\Z", re.DOTALL)
_BULLET = re.compile(r"\A\s*(?:[-*•]|\(?\d{1,2}[.)])\s+")
_MARK = re.compile(r"\**(?:(?P<Q>Q)(?:uestion)?|(?P<A>A)(?:nswer)?|(?P<QUOTE>Quote|QUOTE))\s{0,3}\d{0,3}\s{0,3}[:.]\**")


def plain_text(answer: str) -> str:
    """Return the text of `answer` without the code fence, JSON object or pair of quotation marks around all of it."""
    text = answer.strip()
    fence = _FENCED.match(text)
    if fence:
        text = fence[1].strip()
    if text.startswith("{"):
        text = _only_string(text)
    for opening, closing in ('""', "“”", "«»"):
        enclosed = text[1:-1]
        if len(text) > 1 and text[0] == opening and text[-1] == closing and not {opening, closing} & set(enclosed):
            text = enclosed.strip()
    return text


def _only_string(text: str) -> str:
    """Return the string in a JSON object with one key, or `text` itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    strings = list(value.values()) if isinstance(value, dict) else []
    return strings[0].strip() if len(strings) == 1 and isinstance(strings[0], str) else text


def lines_of(answer: str) -> list[str]:
    """Return the lines of `answer` that are not blank, without bullets and numbers."""
    lines = (_BULLET.sub("", line).strip() for line in plain_text(answer).splitlines())
    return [line for line in lines if line]


def items_of(answer: str) -> list[str]:
    """Return `lines_of` without a line that introduces the others and ends with a colon."""
    lines = lines_of(answer)
    return lines[1:] if len(lines) > 1 and lines[0].endswith((":", "：")) else lines


def line_text(answer: str) -> str:
    """Return `lines_of` as one text."""
    return "\n".join(lines_of(answer))


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs in `text`."""
    pairs = itertools.pairwise(_marked_lines(text))
    return [(question, reply) for (q, question), (a, reply) in pairs if (q, a) == ("Q", "A") and question and reply]


def _marked_lines(text: str) -> list[tuple[str, str]]:
    """Return (``Q``, ``A``, ``QUOTE`` or "", rest) of each line that is not blank."""
    lines: list[tuple[str, str]] = []
    for line in filter(None, (line.strip() for line in text.split("\n"))):
        mark = _MARK.match(line)
        if mark is None and lines and not lines[-1][1]:  # the mark was alone on its line
            lines[-1] = (lines[-1][0], line)
        else:
            lines.append((mark.lastgroup or "", line[mark.end() :].strip()) if mark else ("", line))
    return lines


def pair_text(answer: str) -> str:
    """Return `pairs_of` as one text, "" without pairs."""
    return "\n\n".join(f"Q: {question}\nA: {reply}" for question, reply in pairs_of(plain_text(answer)))


def quoted_of(text: str) -> list[tuple[str, str, str]]:
    """Return the (question, quotation, answer) triples in `text`; a quotation is without quotation marks around it."""
    lines = _marked_lines(text)
    triples = zip(lines, lines[1:], lines[2:], strict=False)
    return [
        (question[1], plain_text(quote[1]), answer[1])
        for question, quote, answer in triples
        if (question[0], quote[0], answer[0]) == ("Q", "QUOTE", "A") and question[1] and quote[1] and answer[1]
    ]


def quoted_text(answer: str) -> str:
    """Return `quoted_of` as one text, "" without triples."""
    triples = quoted_of(plain_text(answer))
    return "\n\n".join(f"Q: {question}\nQUOTE: {quotation}\nA: {reply}" for question, quotation, reply in triples)


def says_yes(answer: str) -> bool:
    """Return whether `answer` begins with yes."""
    return re.match(r"\W*yes\b", answer, re.IGNORECASE) is not None


def sections_of(answer: str) -> list[str]:
    """Return the sections of `answer` that begin with ``##``, each as one text; its lines if it has no such heading."""
    parts = re.split(r"^#{1,6}[ \t]+", plain_text(answer), flags=re.MULTILINE)
    sections = [" ".join(part.split()) for part in parts[1:]]
    return [section for section in sections if section] or lines_of(answer)


def says_none(answer: str) -> bool:
    """Return whether `answer` is NONE: there is nothing to write."""
    return re.fullmatch(r"\W*none\W*", answer, re.IGNORECASE) is not None


PARSERS: Mapping[str, Callable[[str], str]] = {
    "text": plain_text,
    "lines": line_text,
    "pairs": pair_text,
    "quoted": quoted_text,
    "sections": lambda answer: "\n\n".join(sections_of(answer)),
}
"""Name of a parser in a style file -> text of a variant in an answer, "" if it has another form."""

LISTS: Mapping[str, Callable[[str], list[str]]] = {
    "text": lambda answer: [text] if (text := plain_text(answer)) else [],
    "lines": items_of,
    "sections": sections_of,
}
"""Name of a parser in a preparation -> items in an answer."""


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
