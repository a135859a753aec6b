"""From what a model wrote to the text in it."""

from __future__ import annotations

import itertools
import json
import re

_FENCED = re.compile(r"\A```[\w-]*\n(.*?)\n?```\Z", re.DOTALL)
_BULLET = re.compile(r"\A\s*(?:[-*•]|\(?\d{1,2}[.)])\s+")
_MARK = re.compile(r"\**(?:(Q)(?:uestion)?|(A)(?:nswer)?)\s{0,3}\d{0,3}\s{0,3}[:.]\**")


def plain_text(answer: str) -> str:
    """Return the text of `answer` without the code fence, JSON object or pair of quotation marks around all of it."""
    text = answer.strip()
    fenced = _FENCED.match(text)
    if fenced:
        text = fenced[1].strip()
    if text.startswith("{"):
        text = _only_string(text)
    for opening, closing in ('""', "“”", "«»"):
        inside = text[1:-1]
        if len(text) > 1 and text[0] == opening and text[-1] == closing and not {opening, closing} & set(inside):
            text = inside.strip()
    return text


def _only_string(text: str) -> str:
    """Return the one string in a JSON object with one key; any other text as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    strings = list(value.values()) if isinstance(value, dict) else []
    return strings[0].strip() if len(strings) == 1 and isinstance(strings[0], str) else text


def lines_of(answer: str) -> list[str]:
    """Return the lines of `answer` without bullets, numbers and blank ones."""
    lines = (_BULLET.sub("", line).strip() for line in plain_text(answer).splitlines())
    return [line for line in lines if line]


def line_text(answer: str) -> str:
    """Return the lines of `answer`, one below the other."""
    return "\n".join(lines_of(answer))


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs in `text`."""
    lines: list[tuple[str, str]] = []
    for line in filter(None, (line.strip() for line in text.split("\n"))):
        mark = _MARK.match(line)
        if mark is None and lines and not lines[-1][1]:  # the mark stood alone
            lines[-1] = (lines[-1][0], line)
        else:
            lines.append((mark[1] or mark[2], line[mark.end() :].strip()) if mark else ("", line))
    pairs = itertools.pairwise(lines)
    return [(asked, reply) for (q, asked), (a, reply) in pairs if (q, a) == ("Q", "A") and asked and reply]


def pair_text(answer: str) -> str:
    """Return the pairs in `answer` in one form, "" where there are none."""
    return "\n\n".join(f"Q: {question}\nA: {reply}" for question, reply in pairs_of(plain_text(answer)))


def says_yes(answer: str) -> bool:
    """Return whether `answer` begins with yes."""
    return re.match(r"\W*yes\b", answer, re.IGNORECASE) is not None
