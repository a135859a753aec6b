"""Secrets stand in the environment alone: where one got into a recipe, it is refused before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LONGEST_VARIABLE = 100
_OF_SECRETS = re.compile(r"(?:API_?KEY|TOKEN|SECRET|PASSWORD)\Z", re.IGNORECASE)
_SHORTEST = 16
"""Characters of a value from which it is a secret that stands nowhere by chance."""
TRAINER_SECRETS = ("hub_token", "push_to_hub_token")
"""Fields of `trainer:` that would hold one."""


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


def known_secrets(more: Iterator[str] | tuple[str, ...] = ()) -> dict[str, str]:
    """Return variable -> value of every secret in the environment: by its name's ending, or named in `more`."""
    names = {name for name in os.environ if _OF_SECRETS.search(name)} | set(more)
    values = {name: os.environ.get(name, "").strip() for name in sorted(names)}
    return {name: value for name, value in values.items() if len(value) >= _SHORTEST}


def secrets_in(raw: Mapping[str, object]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (place, fault) for each secret that stands in the values of a recipe."""
    texts = list(_texts(raw, ()))
    named = (text for place, text in texts if place[-1:] == ("api_key_env",) and _VARIABLE.match(text))
    known = known_secrets(named)
    for place, text in texts:
        for name, value in known.items():
            if value in text:
                yield place, f"the value of the environment variable {name} stands here. Take it out of the recipe."


def _texts(value: object, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*place, index))
