"""Fonts of signs, which show other signs than the letters that are stored; raised digits.

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
_TERM = r"(?:\d+|\d?[a-zα-ω])"
_RAISED_SUM = re.compile(
    rf"[-+−–]?\(?{_TERM}(?:\s?[-+−–/]\s?{_TERM})+\)?|[-−–]\s?\d*[a-zα-ω]{{1,2}}|\d[a-zα-ω]"
)
"""An exponent with letters: n+1, -kt, 1/2, 2x. One letter may be the mark of a note."""


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


def symbol_of_font(number: int, font: str) -> str:
    """Return the sign that a font has at a number, "" unless others know which one it is."""
    signs = _FONTS.get(font.strip().lower())
    if signs is not None:
        if number >= _FIRST:
            number -= _FIRST
        return signs.get(number, "")
    # Webdings, and other fonts of pictures.
    if "dings" in font.lower() or number < 0x20:
        return ""
    if 0x80 <= number < 0xA0:
        return bytes([number]).decode("cp1252", "ignore")
    # Halves of surrogate pairs, and signs that each font gives another meaning.
    if 0xD800 <= number < 0xF900 or number > 0x10FFFF:
        return ""
    return chr(number)


_SYMBOL_FIELD = re.compile(r"\s*SYMBOL\s+(?:0x([\da-f]{1,5})|(\d{1,6}))\b", re.IGNORECASE)
_FIELD_FONT = re.compile(r"""\\f\s*(?:"([^"]*)"|([^\s"\\]+))""", re.IGNORECASE)


def symbol_of_field(instruction: str) -> str:
    """Return the sign that a field of Word shows: SYMBOL 109 \\f "Symbol"; "" for other fields."""
    field = _SYMBOL_FIELD.match(instruction)
    if field is None:
        return ""
    font = _FIELD_FONT.search(instruction)
    name = ""
    if font is not None:
        name = font[1] or font[2]
    if field[1]:
        return symbol_of_font(int(field[1], 16), name)
    return symbol_of_font(int(field[2]), name)


def raised(text: str) -> str:
    """Return the text of a raised run: 10 and a raised 6 are 10⁶, x and k+1 are x^(k+1), a raised
    "th" is itself."""
    stripped = text.strip()
    if _RAISED_NUMBER.fullmatch(stripped):
        return text.translate(_SUPERSCRIPTS)
    if _RAISED_SUM.fullmatch(stripped):
        return text.replace(stripped, f"^({stripped.strip('()')})")
    return text
