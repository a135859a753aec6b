"""Secrets of the environment: what one looks like in a recipe, and `without_secrets`, which takes them out of every text.

Three gates use it: what comes from an endpoint, what is printed or logged, and manifests. docs/security.md lists the forms.
"""

from __future__ import annotations

import base64
import functools
import html
import os
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LONGEST_VARIABLE = 100
_SECRET_NAME = re.compile(r"(?:API_?KEY|ACCESS_?KEY|TOKEN|SECRET|PASSWORD)\Z", re.IGNORECASE)
TRAINER_SECRETS = ("hub_token", "push_to_hub_token")
"""Fields of `trainer:` that would hold a secret."""
SHOWN = "(key)"
"""Replaces a part of a secret."""
WINDOW = 12
"""Characters in a row that reveal a part of a secret. A shorter secret can be in a text by chance ("none", "EMPTY")."""
_named: set[str] = set()


def secret_in(value: str, kind: str) -> str:
    """Return the fault of a text that should be a "url" or the name of a "variable", without repeating it; else ""."""
    if kind == "variable":
        if _VARIABLE.match(value) and len(value) <= _LONGEST_VARIABLE:
            return ""
        return (
            "this is no name of an environment variable. Put the key into a variable, and the variable's name here, for "
            "example OPENAI_API_KEY. (The value found is not repeated: it may be the key.)"
        )
    try:
        parts = urlsplit(value)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address:
        return "this is no address of an endpoint: it begins with http:// or https://, as in http://127.0.0.1:8000/v1."
    if "@" in parts.netloc:
        return "the URL holds a name or password before its host. Take it out, and put the key into api_key_env's variable."
    if parts.query or parts.fragment:
        return (
            "the URL holds more than an address (behind ? or #). Take it out; a key goes into api_key_env's variable."
        )
    return ""


def known_secrets(more: Iterable[str] = ()) -> dict[str, str]:
    """Return variable -> value of every secret in the environment: by the ending of its name, or named in `more`.

    Variables that were named once stay known. A file's path and a value shorter than `WINDOW` are no secrets.
    """
    _named.update(name for name in more if _VARIABLE.match(name))
    names = {name for name in os.environ if _SECRET_NAME.search(name)} | _named
    values = {name: os.environ.get(name, "").strip() for name in sorted(names)}
    return {name: value for name, value in values.items() if len(value) >= WINDOW and not _is_path(value)}


def _is_path(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)


def without_secrets(text: str) -> str:
    """Return `text` with `SHOWN` in place of each part of a known secret; the same text if it has none."""
    return secret_filter(tuple(known_secrets().values())).redact(text) if len(text) >= WINDOW else text


@functools.lru_cache(maxsize=8)
def secret_filter(secrets: tuple[str, ...]) -> SecretFilter:
    """Return the filter of some secrets, made once."""
    return SecretFilter(secrets)


_OTHERS = bytes(byte for byte in range(256) if not chr(byte).isalnum() or byte > 127)
_LOWER = bytes(range(256)).lower()
_SIZE, _STEP = 4, 6
_FEWEST = _STEP + _SIZE - 1
"""Letters in a row that must hold a whole sample: of every `_STEP` letters of a text, the first `_SIZE` are one."""
_SHORT = 600
"""Letters up to which a text is searched without numpy, whose import takes longer."""
_TABLE_BITS = 18
_MULTIPLIER = 0x9E3779B1
_Span = tuple[int, int]
_Form = tuple[bytes, list[_Span]]
"""The letters and digits of a form of a secret, and the parts of them that must not be in a text, in order."""


class SecretFilter:
    """Finds each run of `WINDOW` characters of some secrets in a text.

    As it is, in any case, reversed, in hex and base64, with escapes and with anything but letters and digits in between.

    A text is reduced to its letters and digits, in lower case, and every sixth run of four of them is looked up among
    the runs of four of the secrets' forms: some 10 microseconds for 2,000 characters, however many forms there are.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._forms: list[_Form] = []
        self._verbatim: list[str] = []
        for secret in dict.fromkeys(secrets):
            if len(secret) >= WINDOW:
                self._add(secret)
        self._samples: dict[bytes, list[tuple[int, int]]] = {}
        for number, (letters, windows) in enumerate(self._forms):
            for offset in _stabbing(windows):
                self._samples.setdefault(letters[offset : offset + _SIZE], []).append((number, offset))

    def _add(self, secret: str) -> None:
        # Plain words, such as the "not-needed-here" of a local endpoint, are in honest texts, too.
        words = _PLAIN_WORDS.match(secret) is not None
        size = len(secret) if words else WINDOW
        for form in islice(_forms_of(secret), 2 if words else 0, None):
            letters, windows = _letters_of(*form, len(secret.encode("utf-8", "surrogatepass")), size)
            enough = [
                (start, end) for start, end in windows if end - start >= _FEWEST and _says_much(letters[start:end])
            ]
            self._forms.append((letters, enough))
        raw = secret.lower()
        size = len(raw) if words and " " in raw else WINDOW
        for start in range(len(raw) - size + 1):
            part = raw[start : start + size]
            n_letters = sum(character.isascii() and character.isalnum() for character in part)
            if (n_letters < _FEWEST or words) and _says_much(part):
                self._verbatim += [part, part[::-1]]

    def redact(self, text: str) -> str:
        """Return `text` with `SHOWN` in place of each part of a secret; the same text if it has none."""
        spans = sorted(self._spans(text)) if self._forms else []
        if not spans:
            return text
        parts, end = [], -1
        for start, stop in spans:
            if start > end:
                parts += [text[max(end, 0) : start], SHOWN]
            end = max(end, stop)
        return "".join((*parts, text[end:]))

    def _spans(self, text: str) -> list[_Span]:
        """Return (start, end) of each part of a secret in `text`: as it is, and with escapes decoded, up to three times."""
        spans = self._spans_of_view(text)
        views = [text]
        while len(views) <= _DEEPEST and ("%" in text or "&" in text or "\\" in text or "<" in text):
            text = _ESCAPE.sub(_decoded, text)
            if text == views[-1]:
                break
            views.append(text)
            new_spans = self._spans_of_view(text)
            for view in reversed(views[:-1]) if new_spans else ():
                positions = _positions(view)
                new_spans = [(positions[start][0], positions[end - 1][1]) for start, end in new_spans]
            spans += new_spans
        return spans

    def _spans_of_view(self, view: str) -> list[_Span]:
        # Full-width and accented letters have their letter in them.
        plain = view if view.isascii() else unicodedata.normalize("NFKD", view)
        spans = self._runs(plain.encode("ascii", "ignore").translate(_LOWER, _OTHERS))
        if spans:
            indices = _indices_of_letters(view)
            spans = [(indices[start], indices[end - 1] + 1) for start, end in spans]
        if self._verbatim:
            raw = view.replace("\u0130", "i").lower()  # the one letter that is two in lower case
            spans += [match.span() for part in self._verbatim for match in re.finditer(re.escape(part), raw)]
        return spans

    def _runs(self, letters: bytes) -> list[_Span]:
        """Return (start, end) of each part of a form in a text's letters."""
        n_samples = (len(letters) - _SIZE) // _STEP + 1
        starts: Iterable[int] = range(0, _STEP * n_samples, _STEP)
        if len(letters) > _SHORT:
            import numpy as np

            samples = np.ndarray((n_samples,), "<u4", letters, 0, (_STEP,))
            starts = (self._table.take(_hashes(samples)).nonzero()[0] * _STEP).tolist()
        runs: list[_Span] = []
        for start in starts:
            matches = self._samples.get(letters[start : start + _SIZE])
            if matches:
                runs += self._runs_at(letters, start, matches)
        return runs

    @functools.cached_property
    def _table(self) -> Any:
        """The hashes of the forms' samples."""
        import numpy as np

        table = np.zeros(1 << _TABLE_BITS, np.bool_)
        table[_hashes(np.frombuffer(b"".join(self._samples), "<u4"))] = True
        return table

    def _runs_at(self, letters: bytes, index: int, samples: list[tuple[int, int]]) -> Iterator[_Span]:
        """Yield (start, end) of the parts of forms around a sample."""
        for number, offset in samples:
            form, windows = self._forms[number]
            before = after = 0
            while before < min(index, offset) and letters[index - before - 1] == form[offset - before - 1]:
                before += 1
            here, there = index + _SIZE, offset + _SIZE
            most = min(len(letters) - here, len(form) - there)
            while after < most and letters[here + after] == form[there + after]:
                after += 1
            first = bisect_left(windows, (offset - before, 0))
            if first < len(windows) and windows[first][1] <= there + after:
                yield index - before, here + after


def _says_much(part: str | bytes) -> bool:
    """Return whether a part of a form is more than the 000000000000 and xxxxxxxxxxxx of tables and made-up keys."""
    return len(set(part)) > 2


def _hashes(samples: Any) -> Any:
    """Return the indices in `SecretFilter._table` of an array of samples [n]."""
    import numpy as np

    return (samples * np.uint32(_MULTIPLIER)) >> np.uint32(32 - _TABLE_BITS)


_PLAIN_WORDS = re.compile(r"(?:(?:\A|[-_ .])(?:[a-z]{1,12}|[A-Z]{1,12}|[A-Z][a-z]{1,11})){2,}\Z")
"""Words of one case each, up to 12 letters long, with something between them."""


def _forms_of(secret: str) -> Iterator[tuple[bytes, list[int], list[int]]]:
    """Yield (form, first, last), the secret itself and its mirror before its encodings.

    Character i of a form is made of the bytes first[i] to last[i] of the secret, or of its mirror.
    """
    raw = secret.encode("utf-8", "surrogatepass")
    for mirrored in (raw, raw[::-1]):
        identity = list(range(len(raw)))
        yield mirrored, identity, identity
    for variant in (raw, raw.lower(), raw.upper(), raw[::-1]):
        for form, first, last in _encodings(variant):
            yield form, first, last
            if variant is raw:
                top = len(raw) - 1
                yield form[::-1], [top - index for index in reversed(last)], [top - index for index in reversed(first)]


def _encodings(raw: bytes) -> Iterator[tuple[bytes, list[int], list[int]]]:
    """Yield hex, hex as in 0x73 0x6b, and base64 after 0, 1 and 2 other bytes, as `_forms_of`."""
    for digits in ("%02x", "0x%02x"):
        form = "".join(digits % byte for byte in raw).encode()
        positions = [index * len(raw) // len(form) for index in range(len(form))]
        yield form, positions, positions
    for shift in range(3):
        encoded = base64.b64encode(b"." * shift + raw).rstrip(b"=")
        first = [6 * index // 8 - shift for index in range(len(encoded))]
        last = [(6 * index + 5) // 8 - shift for index in range(len(encoded))]
        yield encoded, first, last


def _letters_of(form: bytes, first: list[int], last: list[int], n_bytes: int, size: int) -> _Form:
    """Return the letters of a form, and the parts of them that are made of `size` of the secret's `n_bytes` in a row."""
    letter_indices = [index for index, byte in enumerate(form) if byte not in _OTHERS]
    first, last = [first[index] for index in letter_indices], [last[index] for index in letter_indices]
    windows: list[_Span] = []
    for start in range(n_bytes - size + 1):
        window = bisect_left(first, start), bisect_right(last, start + size - 1)
        if not windows or window != windows[-1]:
            windows.append(window)
    return form.translate(_LOWER, _OTHERS), windows


def _stabbing(windows: list[_Span]) -> set[int]:
    """Return the fewest offsets so that every window, wherever a text's samples begin, has a whole sample at one of them."""
    chosen: set[int] = set()
    for residue in range(_STEP):
        newest = -1
        for start, end in windows:
            if newest < start:
                most = end - _SIZE
                newest = most - (most - residue) % _STEP
                chosen.add(newest)
    return chosen


_DEEPEST = 3
_ESCAPE = re.compile(
    r"%[0-9a-fA-F]{2}|&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});?"
    r"|\\(?<!\\\\)\\*(?:u\{?[0-9a-fA-F]{4}\}?|x[0-9a-fA-F]{2}|[0-3][0-7]{2}|[nrtbfv0\"'/])|</?[A-Za-z][^<>]{0,200}>"
)


def _decoded(match: re.Match[str]) -> str:
    """Return the character of an escape; nothing for a tag, a space for a character between others."""
    escape = match[0]
    match escape[0]:
        case "%":
            return chr(int(escape[1:], 16))
        case "&":
            return html.unescape(escape)
        case "<":
            return ""
    code = escape.lstrip("\\")
    if code[0] in "ux":
        return chr(int(code.strip("ux{}"), 16))
    return chr(int(code, 8)) if len(code) == 3 else " "


def _positions(text: str) -> list[_Span]:
    """Return (start, end) in `text` of each character of `text` with its escapes decoded."""
    positions: list[_Span] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        positions += [(index, index + 1) for index in range(end, match.start())]
        positions += [match.span()] * len(_decoded(match))
        end = match.end()
    return positions + [(index, index + 1) for index in range(end, len(text))]


def _indices_of_letters(view: str) -> list[int]:
    """Return the index in `view` of each of its letters and digits, as the filter reduces it."""
    indices: list[int] = []
    for index, character in enumerate(view):
        plain = character if character.isascii() else unicodedata.normalize("NFKD", character)
        indices += [index] * sum(letter.isascii() and letter.isalnum() for letter in plain)
    return indices
