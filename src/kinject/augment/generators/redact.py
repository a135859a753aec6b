"""The key taken out of what an endpoint says: whole or in part, as it is, in base64, or as a URL writes it."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

SHOWN = "(key)"
_BLOCK = 12
"""Characters in a row that give a part of a key away; the first characters of many keys are the same."""
_LONG = 16
"""Characters from which a key stands in no honest answer by chance ("none", "EMPTY" and "dummy" are keys, too)."""
_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""A name and password in a URL, as a proxy's error tells it."""


class Redactor:
    """Takes one key out of texts."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._forms = tuple(_forms(key)) if len(key) >= _LONG else ()

    def message(self, text: str) -> str:
        """Return an error's text without the key, and without names and passwords in URLs."""
        text = _USER.sub(SHOWN, text)
        return self.answer(text.replace(self._key, SHOWN) if self._key else text)

    def answer(self, text: str) -> str:
        """Return an answer's text without the key, where that is long enough to be one."""
        for form in self._forms:
            for start in range(0, len(form) - _BLOCK + 1, _BLOCK):
                if form[start : start + _BLOCK] in text:
                    text = _without(text, form, start)
        return text


def _forms(key: str) -> list[str]:
    """Return how a key may be written: itself, quoted, and in base64 behind any text (three ways, by its length)."""
    found = [key, quote(key, safe="")]
    for before in range(3):
        whole = base64.b64encode(b"." * before + key.encode()).decode().rstrip("=")
        found.append(whole[(0, 2, 3)[before] : len(whole) - 1])
    return list(dict.fromkeys(found))


def _without(text: str, form: str, start: int) -> str:
    """Return `text` without the runs of `form` that hold its block at `start`."""
    block = form[start : start + _BLOCK]
    pieces = text.split(block)
    for index in range(len(pieces) - 1):
        before, after = form[:start], form[start + _BLOCK :]
        n_before = _shared(pieces[index][::-1], before[::-1])
        pieces[index] = pieces[index][: len(pieces[index]) - n_before]
        pieces[index + 1] = pieces[index + 1][_shared(pieces[index + 1], after) :]
    return SHOWN.join(pieces)


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    n = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        n += 1
    return n
