"""Fonts of signs, which show other signs than the letters that are stored; raised digits; items.

Without them 5 µm is 5 mm, or 5 m.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST = 0xF000
"""Office programs store the signs of such fonts from here on, or as letters."""
_GREEK = "≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
_SIGNS = "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…|―↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊⟨®©™∑"
_SYMBOL = {
    **dict(enumerate(" !∀#∃%&∋()∗+,−./0123456789:;<=>?", start=0x20)),
    **dict(enumerate(_GREEK, start=0x40)),
    **dict(enumerate(_SIGNS, start=0xA0)),
    0xF1: "⟩",
    0xF2: "∫",
}
_WINGDINGS = {
    **dict(enumerate("⓪①②③④⑤⑥⑦⑧⑨⑩⓿❶❷❸❹❺❻❼❽❾❿", start=0x80)),
    **dict(enumerate("●❍■□", start=0x6C)),
    **dict(enumerate("←→↑↓↖↗↙↘⬅➔⬆⬇", start=0xDF)),
    **dict(enumerate("⇦⇨⇧⇩⬄", start=0xEF)),
    **dict(enumerate("✗✔☒☑", start=0xFB)),
    **{0x28: "☎", 0x2A: "✉", 0x46: "☞", 0x4A: "☺", 0x4B: "😐", 0x4C: "☹", 0x71: "❑", 0x72: "❒"},
    **{0x75: "◆", 0x76: "❖", 0x9E: "·", 0x9F: "•", 0xA7: "▪", 0xA8: "☐", 0xAB: "★", 0xD8: "➢"},
}
_WINGDINGS_2 = {**dict(enumerate("✗✓☒☑☒☒", start=0x4F)), 0xA3: "☐"}
_FONTS: Mapping[str, Mapping[int, str]] = {
    "symbol": _SYMBOL,
    "wingdings": _WINGDINGS,
    "wingdings 2": _WINGDINGS_2,
}
_SUPERSCRIPTS = str.maketrans("0123456789+-−–=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻⁼⁽⁾ⁿ")
_RAISED_NUMBER = re.compile(r"[-+−–]?\(?\d[\d+\-−–=()]*|[-+−–n]")


def is_symbol_font(font: str) -> bool:
    """Return whether a font shows other signs than the letters that are stored."""
    return font.strip().lower() in _FONTS


def symbol_text(text: str, font: str, *, are_letters: bool = True) -> str:
    """Return `text` as a font shows it; without `are_letters` its letters of ASCII are those of
    another font. Signs that are not known stay as they are."""
    signs = _FONTS.get(font.strip().lower())
    if signs is None:
        return text
    shown = []
    for letter in text:
        code = ord(letter)
        if _FIRST <= code < _FIRST + 0x100:
            code -= _FIRST
        elif code < 0x80 and not are_letters:
            code = 0
        shown.append(signs.get(code, letter))
    return "".join(shown)


def raised(text: str) -> str:
    """Return the text of a raised run: 10 and a raised 6 are 10⁶, a raised "th" is itself."""
    if _RAISED_NUMBER.fullmatch(text.strip()):
        return text.translate(_SUPERSCRIPTS)
    return text


_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l")),
    *((40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


def item_number(n: int, kind: str) -> str:
    """Return the number of an item as its reader sees it, of the kind 1, a, A, i or I: texts refer
    to (b) and to IV."""
    number = str(n)
    if kind in ("a", "A") and 0 < n <= 780:
        number = chr(ord("a") + (n - 1) % 26) * ((n - 1) // 26 + 1)
    elif kind in ("i", "I") and 0 < n < 4000:
        number = ""
        for value, letters in _ROMAN:
            number += letters * (n // value)
            n %= value
    if kind.isupper():
        return number.upper()
    return number
