"""Keeps secrets out of recipes: a recipe that holds one is refused before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LONGEST_VARIABLE = 100
_SECRET_NAME = re.compile(r"(?:API_?KEY|TOKEN|SECRET|PASSWORD)\Z", re.IGNORECASE)
_SHORTEST = 16
"""Characters from which a value is taken for a secret: shorter ones could occur in a recipe by chance."""
TRAINER_SECRETS = ("hub_token", "push_to_hub_token")
"""Fields of `trainer:` that would hold a secret."""


def secret_in(value: str, kind: str) -> str:
    """Return what is wrong with a text that should be a "url" or the name of a "variable", without repeating it; else ""."""
    if kind == "variable":
        if _VARIABLE.match(value) and len(value) <= _LONGEST_VARIABLE:
            return ""
        return (
            "this is no name of an environment variable. Put the key into a variable, and the variable's name here, for "
            "example OPENAI_API_KEY. (What was found is not repeated: it may be the key.)"
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
    """Return variable -> value of every secret in the environment: by the ending of its name, or named in `more`."""
    names = {name for name in os.environ if _SECRET_NAME.search(name)} | {
        name for name in more if _VARIABLE.match(name)
    }
    values = {name: os.environ.get(name, "").strip() for name in sorted(names)}
    return {name: value for name, value in values.items() if len(value) >= _SHORTEST}
