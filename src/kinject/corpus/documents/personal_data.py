"""Personal data and keys in texts: mail addresses, phone numbers, keys, bank accounts (IBAN), payment cards.

Patterns and checksums, not a model: names and postal addresses are not found. Phone numbers are checked by the phonenumbers
library (Google's libphonenumber), IBANs by ISO 7064 mod 97, cards by Luhn's digit and the first digits of an issuer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from kinject.corpus.documents.copies import Edit
from kinject.errors import InputError
from kinject.recipe.check import suggestion

_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w@])")
_KEYS = re.compile(
    r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|\b(?:sk|pk|rk)[-_](?:[a-z]+[-_]){0,3}[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{40,}|\bglpat-[\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}"
    r"|\bxox[abposr]-[\w-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bnpm_[A-Za-z0-9]{36}|\bSG\.[\w-]{22}\.[\w-]{43}"
    r"|\beyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}"
)
_IBAN = re.compile(r"(?<![A-Z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Z0-9])")
_CARD = re.compile(r"(?<![\d.,-])(?:\d[ -]?){12,18}\d(?![\d-])")
_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|3[068]|6(?:011|4[4-9]|5)|35")
_PHONE = re.compile(r"(?<![\w.,/+])(?:\+|\(|0)[\d(][\d ()/.-]{5,22}\d(?!\w)")
_PHONE_HERE = re.compile(r"(?<![\w.,/+])[+(\d][\d ()/.-]{5,22}\d(?!\w)")
MASKS = {
    "key": "[key]", "mail address": "[mail address]", "bank account": "[bank account]", "card": "[card number]",
    "phone number": "[phone number]",
}  # fmt: skip
"""Kind -> its replacement in a masked text. Of two finds that overlap, the kind that is named first counts."""


def find_personal_data(text: str, region: str | None = None) -> list[tuple[int, int, str]]:
    """Return (start, end, kind) of everything found, in order; without a `region` (DE, US), only phone numbers with +."""
    matches: list[tuple[int, int, str]] = []
    covered = bytearray(len(text))
    for kind, spans in (
        ("key", (match.span() for match in _KEYS.finditer(text))),
        ("mail address", (match.span() for match in _MAIL.finditer(text)) if "@" in text else ()),
        ("bank account", (match.span() for match in _IBAN.finditer(text) if _is_iban(match[0]))),
        ("card", (match.span() for match in _CARD.finditer(text) if _is_card(match[0]))),
        ("phone number", _phone_numbers(text, region)),
    ):
        for start, end in spans:
            if not any(covered[start:end]):
                matches.append((start, end, kind))
                covered[start:end] = b"\1" * (end - start)
    return sorted(matches)


def check_region(region: str | None) -> None:
    """Raise `InputError` unless `region` is None or a country that phonenumbers knows."""
    if region is None:
        return
    import phonenumbers

    if region not in phonenumbers.SUPPORTED_REGIONS:
        known = suggestion(region, phonenumbers.SUPPORTED_REGIONS)
        raise InputError(
            f"documents.phone_region: found {region!r:.40}, expected a country code of two capitals.{known}"
        )


def count_personal_data(text: str, region: str | None = None) -> dict[str, int]:
    """Return kind -> number of finds."""
    return dict(sorted(Counter(kind for _, _, kind in find_personal_data(text, region)).items()))


def mask_edits(text: str, region: str | None = None) -> list[Edit]:
    """Return the edits that put the mask of its kind in place of each find."""
    return [(start, end, MASKS[kind]) for start, end, kind in find_personal_data(text, region)]


def _is_iban(text: str) -> bool:
    plain = text.replace(" ", "")
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(letter, 36)) for letter in plain[4:] + plain[:4])) % 97 == 1


def _is_card(text: str) -> bool:
    digits = [int(letter) for letter in text if letter.isdigit()]
    plain = "".join(map(str, digits))
    if not 13 <= len(digits) <= 19 or len(set(digits)) < 2 or not _ISSUERS.match(plain):
        return False
    doubled = [sum(divmod(2 * digit, 10)) if odd % 2 else digit for odd, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _phone_numbers(text: str, region: str | None) -> Iterator[tuple[int, int]]:
    for match in (_PHONE_HERE if region else _PHONE).finditer(text):
        if region is None and "+" not in match[0][:2]:
            continue
        import phonenumbers

        try:
            number = phonenumbers.parse(match[0], region)
        except phonenumbers.NumberParseException:
            continue
        if phonenumbers.is_valid_number(number):
            yield match.span()
