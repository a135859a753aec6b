"""Draws keys, the forms in which an endpoint may echo a part of one, and finds such parts in bytes, in the slow and plain way."""

from __future__ import annotations

import base64
import html
import random
import re
import string
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import quote, unquote

WINDOW = 12

FORMS: dict[str, Callable[[str], str]] = {
    "as it is": lambda part: part,
    "lower": str.lower,
    "upper": str.upper,
    "any case": str.swapcase,
    "reversed": lambda part: part[::-1],
    "hex": lambda part: part.encode().hex(),
    "upper hex": lambda part: part.encode().hex().upper(),
    "hex with colons": lambda part: part.encode().hex(":"),
    "0x": lambda part: ", ".join(f"0x{byte:02x}" for byte in part.encode()),
    "base64": lambda part: base64.b64encode(part.encode()).decode(),
    "base64 after one": lambda part: base64.b64encode(b"x" + part.encode()).decode(),
    "base64 after two": lambda part: base64.b64encode(b"xy" + part.encode()).decode(),
    "url-safe base64": lambda part: base64.urlsafe_b64encode(b"~" + part.encode()).decode(),
    "base64 of lower": lambda part: base64.b64encode(part.lower().encode()).decode(),
    "hex of upper": lambda part: part.upper().encode().hex(),
    "base64 of reversed": lambda part: base64.b64encode(part[::-1].encode()).decode(),
    "reversed base64": lambda part: base64.b64encode(part.encode()).decode()[::-1],
    "reversed hex": lambda part: part.encode().hex()[::-1],
    "percent": lambda part: quote(part, safe=""),
    "percent everywhere": lambda part: "".join(f"%{byte:02X}" for byte in part.encode()),
    "percent twice": lambda part: quote("".join(f"%{byte:02X}" for byte in part.encode()), safe=""),
    "spaces": " ".join,
    "dashes": "-".join,
    "lines": "\n".join,
    "zero width": "\u200b".join,
    "soft hyphens": "\u00ad".join,
    "dots": " · ".join,
    "entities between": "&#8203;".join,
    "named entities between": "&nbsp;".join,
    "escapes between": "\\n".join,
    "tags between": "<wbr>".join,
    "bold": lambda part: "".join(f"<b>{character}</b>" for character in part),
    "entities": lambda part: "".join(f"&#{ord(character)};" for character in part),
    "hex entities": lambda part: "".join(f"&#x{ord(character):X};" for character in part),
    "JSON escapes": lambda part: "".join(f"\\u{ord(character):04x}" for character in part),
    "JSON escapes twice": lambda part: "".join(f"\\\\u{ord(character):04x}" for character in part),
    "some escapes": lambda part: "".join(f"\\x{ord(one):02x}" if n % 3 else one for n, one in enumerate(part)),
    "some entities": lambda part: "".join(f"&#{ord(one)};" if n % 2 else one for n, one in enumerate(part)),
    "octal": lambda part: "".join(f"\\{ord(character):03o}" for character in part),
    "full width": lambda part: "".join(chr(ord(one) + 0xFEE0) if one.isalnum() else one for one in part),
    "quoted-printable": lambda part: "".join(f"={byte:02X}" for byte in part.encode()),
    "lines of base64": lambda part: "\n".join(base64.b64encode(part.encode()).decode()[at : at + 5] for at in range(0, 20, 5)),
}  # fmt: skip
"""Form -> how it writes a part of a key."""

_LETTERS = string.ascii_letters + string.digits


def draw_key(draw: random.Random) -> str:
    """Return a key in the shape of a provider's."""

    def letters(size: int, more: str = "") -> str:
        return "".join(draw.choices(_LETTERS + more, k=size))

    shapes: list[Callable[[], str]] = [
        lambda: f"sk-{letters(35)}", lambda: f"sk-proj-{letters(48, '_-')}", lambda: f"hf_{letters(34)}",
        lambda: f"gsk_{letters(52)}", lambda: f"AIza{letters(35, '_-')}", lambda: f"sk-ant-api03-{letters(60, '_-')}-AA",
        lambda: str(uuid.UUID(int=draw.getrandbits(128))), lambda: draw.randbytes(32).hex(),
        lambda: base64.b64encode(draw.randbytes(31)).decode(), lambda: base64.urlsafe_b64encode(draw.randbytes(26)).decode(),
        lambda: letters(20), lambda: f"{letters(6)}.{letters(12, '~+/=_-')}.{letters(9)}",
    ]  # fmt: skip
    return draw.choice(shapes)()


def draw_part(draw: random.Random, key: str) -> str:
    """Return a window of a key, or a longer run of it."""
    start = draw.randrange(len(key) - WINDOW + 1)
    return key[start : draw.choice([start + WINDOW, draw.randint(start + WINDOW, len(key))])]


def find_parts(keys: Iterable[str], texts: Mapping[str, bytes]) -> list[str]:
    """Return "name of a text: form, part" for every window of `keys` in `texts`, in any form."""
    needles: dict[int, dict[str, str]] = {}
    for key in keys:
        for start in range(len(key) - WINDOW + 1):
            part = key[start : start + WINDOW]
            for form, needle in _needles(part):
                needles.setdefault(len(needle), {})[needle] = f"{form}, {part}"
    leaks = []
    for name, data in texts.items():
        for view in _views(data.decode("utf-8", "replace")):
            for size, wanted in needles.items():
                grams = {view[start : start + size] for start in range(len(view) - size + 1)}
                leaks += [f"{name}: {wanted[needle]}" for needle in grams & wanted.keys()]
    return sorted(set(leaks))


def _needles(part: str) -> Iterator[tuple[str, str]]:
    """Yield (form, text) of one window in lower case, with and without what is no letter or digit."""
    forms = [("as it is", part), ("reversed", part[::-1])]
    for name, variant in (("", part), ("lower ", part.lower()), ("upper ", part.upper()), ("reversed ", part[::-1])):
        forms.append((f"{name}hex", variant.encode().hex()))
        for before in range(3):
            whole = base64.b64encode(b"." * before + variant.encode() + b".").decode()
            forms.append((f"{name}base64", whole[(0, 2, 3)[before] : (before + len(variant)) * 8 // 6]))
    forms += [(f"reversed {name}", text[::-1]) for name, text in forms if name in ("hex", "base64")]
    for name, text in forms:
        yield name, text.lower()
        yield name, text.lower().replace("+", "-").replace("/", "_")
        compact = _compact(text)
        if len(compact) >= 9:
            yield name, compact


def _views(text: str) -> Iterator[str]:
    """Yield a text in lower case with its escapes decoded in turn, each as it is and without what is no letter or digit."""
    for decode in (str, html.unescape, unquote, _without_escapes, _without_tags, _without_0x):
        text = decode(text)
        yield text.lower()
        yield _compact(text)


def _without_escapes(text: str) -> str:
    code = r"\\+u([0-9a-fA-F]{4})|\\+x([0-9a-fA-F]{2})"
    text = re.sub(code, lambda match: chr(int(match[1] or match[2], 16)), text)
    return re.sub(r"\\+[nrt\"]", " ", re.sub(r"\\+([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text))


def _without_tags(text: str) -> str:
    return re.sub("<[^<>]*>", "", text)


def _without_0x(text: str) -> str:
    return re.sub("0[xX]", "", text)


def _compact(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).lower()
    return "".join(character for character in plain if character.isascii() and character.isalnum())
