"""Secrets of the environment: what one looks like in a recipe, and `without_secrets`, which takes
them out of every text.

Three gates use it: what comes from an endpoint, what is printed or logged, and manifests.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from urllib.parse import quote, urlsplit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LONGEST_VARIABLE = 100
_SECRET_NAME = re.compile(r"(?:API_?KEY|ACCESS_?KEY|TOKEN|SECRET|PASSWORD)\Z", re.IGNORECASE)
TRAINER_SECRETS = ("hub_token", "push_to_hub_token")
"""Fields of `trainer:` that would hold a secret."""
SHOWN = "(key)"
"""Replaces a part of a secret."""
WINDOW = 12
"""A shorter value can be in a text by chance ("none", "EMPTY"), and is no secret."""
_named: set[str] = set()


def secret_in(value: str, kind: str) -> str:
    """Return the fault of a text that should be a "url" or the name of a "variable", without
    repeating it; else ""."""
    if kind == "variable":
        if _VARIABLE.match(value) and len(value) <= _LONGEST_VARIABLE:
            return ""
        return (
            "this is no name of an environment variable. Put the key into a variable, and the "
            "variable's name here, for "
            "example OPENAI_API_KEY. (The value found is not repeated: it may be the key.)"
        )
    try:
        parts = urlsplit(value)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address:
        return (
            "this is no address of an endpoint: it begins with http:// or https://, as in "
            "http://127.0.0.1:8000/v1."
        )
    if "@" in parts.netloc:
        return (
            "the URL holds a name or password before its host. Take it out, and put the key into "
            "api_key_env's variable."
        )
    if parts.query or parts.fragment:
        return (
            "the URL holds more than an address (behind ? or #). Take it out; a key goes into "
            "api_key_env's variable."
        )
    return ""


def known_secrets(more: Iterable[str] = ()) -> dict[str, str]:
    """Return variable -> value of every secret in the environment: by the ending of its name, or
    named in `more`.

    Variables that were named once stay known. A file's path and a value shorter than `WINDOW` are
    no secrets.
    """
    _named.update(name for name in more if _VARIABLE.match(name))
    names = {name for name in os.environ if _SECRET_NAME.search(name)} | _named
    values = {name: os.environ.get(name, "").strip() for name in sorted(names)}
    return {
        name: value
        for name, value in values.items()
        if len(value) >= WINDOW and not _is_path(value)
    }


def _is_path(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)


def without_secrets(text: str) -> str:
    """Return `text` with `SHOWN` in place of each part of a known secret; the same text if it has
    none."""
    if len(text) < WINDOW:  # too short for a part of a secret
        return text
    return secret_filter(tuple(known_secrets().values())).redact(text)


@functools.lru_cache(maxsize=8)
def secret_filter(secrets: tuple[str, ...]) -> SecretFilter:
    """Return the filter of some secrets, made once."""
    return SecretFilter(secrets)


class SecretFilter:
    """Finds secrets in a text: the value as it is or URL-encoded, in any case, whole or from its
    beginning on."""

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {
            form
            for secret in secrets
            if len(secret) >= WINDOW
            # The forms in which errors repeat a key: a filter of every encoding took 327 lines.
            for form in (secret, quote(secret), quote(secret, safe=""))
        }
        # Longest first: an alternation takes the first that fits.
        forms = sorted(values, key=len, reverse=True)
        parts = (
            f"{re.escape(form[:WINDOW])}(?:{re.escape(form[WINDOW:])}|[\\w+/=.~%-]*)"
            for form in forms
        )
        self._pattern = re.compile("|".join(parts), re.IGNORECASE) if forms else None

    def redact(self, text: str) -> str:
        """Return `text` with `SHOWN` in place of each secret; the same text if it has none."""
        if self._pattern is None or self._pattern.search(text) is None:
            return text
        return self._pattern.sub(SHOWN, text)
