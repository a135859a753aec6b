"""Numbers in Chinese characters, and amounts as Chinese and Japanese write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

_HAN_DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {
    "〇": 0,
    "两": 2,
    "兩": 2,
}
_HAN_SCALES = {
    "十": 10,
    "百": 100,
    "千": 1000,
    "万": 10**4,
    "萬": 10**4,
    "億": 10**8,
    "亿": 10**8,
    "兆": 10**12,
}
HAN = "".join([*_HAN_DIGITS, *_HAN_SCALES])
_HANGUL_SCALES = str.maketrans("십백천만억조", "十百千万億兆")
_SCALE_SIGNS = f"{''.join(_HAN_SCALES)}십백천만억조"
SCALED_AMOUNT = re.compile(
    rf"(?<![\d.,제])\d+(?:,\d{{3}})*(?:\.\d+)?[{_SCALE_SIGNS}]+(?:\s?\d+[{_SCALE_SIGNS}]+)*"
    r"(?:(?<=[万萬億亿만억])\s?\d{1,4}(?![\d.,]))?(?<!千(?=[米克瓦卡伏赫]))"
)
"""Digits with Chinese or Korean factors: 3億5千万, 3억 5천만. 제2조 is an article of a law."""
_HAN_PARTS = re.compile(rf"\d+(?:,\d{{3}})*(?:\.\d+)?|[{HAN}]")


def han_value(run: str) -> str:
    """Return the value of digits and Chinese numerals or Korean factors as a plain decimal: 3.5万,
    3억 5천만, 二千零五, 一九九八, 零点五."""
    run, point, decimals = run.replace("點", "点").partition("点")
    if point:
        digits = "".join(str(_HAN_DIGITS[digit]) for digit in decimals)
        return f"{han_value(run)}.{digits}"
    parts = _HAN_PARTS.findall(run.translate(_HANGUL_SCALES))
    if len(parts) > 1 and all(part in _HAN_DIGITS for part in parts):
        # not by int(): Python makes no number of over 4,300 digits
        return "".join(str(_HAN_DIGITS[part]) for part in parts).lstrip("0") or "0"
    total = section = current = Decimal(0)
    for part in parts:
        if part in _HAN_DIGITS:
            current = Decimal(_HAN_DIGITS[part])
        elif part in _HAN_SCALES:
            scale = _HAN_SCALES[part]
            if scale < 10**4:
                section += (current or 1) * scale
            else:
                total += (section + current or 1) * scale
                section = Decimal(0)
            current = Decimal(0)
        else:
            current = Decimal(part.replace(",", ""))
    return plain_decimal(total + section + current)


def plain_decimal(value: Decimal) -> str:
    """Return `value` without exponent or trailing zeros."""
    text = f"{value:f}"
    if "." in text:
        return text.rstrip("0").rstrip(".")
    return text.lstrip("0") or "0"


# --- Amounts that other languages write otherwise

_NUMBER = rf"(?:\d+(?:\.\d+)?|[{HAN}]+(?:[点點][{''.join(_HAN_DIGITS)}]+)?)"
_DIGIT = "[1-9一二三四五六七八九两兩]"
_TENTHS = {
    "ja": re.compile(
        rf"(?<![\d.{HAN}])(?P<tenths>{_DIGIT})割(?:(?P<hundredths>{_DIGIT})分)?(?![れ合当\d])"
    ),
    "zh": re.compile(
        rf"(?<![\d.{HAN}])(?P<tenths>{_DIGIT})成(?P<hundredths>{_DIGIT})?"
        # 三成功 has another word in it
        r"(?![功为為年員员立熟果就本分\d]|不[变變])"
    ),
}
"""Language -> its tenths: 6割 and 六成 are 60%."""
_PERCENT = re.compile(rf"百分之(?P<number>{_NUMBER})")
_FRACTION = re.compile(rf"(?P<parts>{_NUMBER})分[之の](?P<count>{_NUMBER})")
_BELOW_ZERO = re.compile(rf"(?:零下|负|負|氷点下|マイナス)\s?(?P<number>{_NUMBER})")
_TEMPERATURE = re.compile(rf"(?P<scale>[摄攝华華])氏\s?(?P<sign>-?)(?P<number>{_NUMBER})\s?度")


def with_plain_amounts(text: str, codes: Iterable[str] = ("ja", "zh")) -> str:
    """Return a text with amounts of Chinese and Japanese as other languages have them: 三成 and
    百分之三十 are 30%, 三分之一 is 1/3, 零下五度 -5度, 摄氏5度 5°C; `codes`: the languages that it
    may be in."""
    for code in codes:
        if code in _TENTHS:
            text = _TENTHS[code].sub(_tenths_as_percent, text)
    text = _PERCENT.sub(_as_percent, text)
    text = _FRACTION.sub(_as_fraction, text)
    # Its scale may stand before the sign of a temperature.
    return _TEMPERATURE.sub(_as_degrees, _BELOW_ZERO.sub(_as_negative, text))


def _tenths_as_percent(amount: re.Match[str]) -> str:
    return f"{han_value(amount['tenths'])}{han_value(amount['hundredths'] or '零')}%"


def _as_percent(amount: re.Match[str]) -> str:
    return f"{han_value(amount['number'])}%"


def _as_fraction(amount: re.Match[str]) -> str:
    return f" {han_value(amount['count'])}/{han_value(amount['parts'])} "


def _as_negative(amount: re.Match[str]) -> str:
    return f"-{han_value(amount['number'])}"


def _as_degrees(amount: re.Match[str]) -> str:
    scale = "F" if amount["scale"] in "华華" else "C"
    return f"{amount['sign']}{han_value(amount['number'])}°{scale}"
