"""The interface of a generator, and its errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.types import Completion, Message, Usage


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer, for an endpoint that writes JSON by a schema; other generators get the plain messages.

    `schema` is a JSON schema (an object; every property required, no others). `messages` are those of the request, but with
    the form asked for as JSON instead of lines. `name` is a word for the endpoint's log.
    """

    name: str
    schema: Mapping[str, Any]
    messages: list[Message]


def json_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is, with or without a fence around it; None for another text."""
    text = text.strip()
    if len(text) > 6 and text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").removeprefix("JSON")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_ITEMS = "items"
_LIST = {
    "type": "object", "properties": {_ITEMS: {"type": "array", "items": {"type": "string"}}}, "required": [_ITEMS],
    "additionalProperties": False,
}  # fmt: skip
_AS_LIST = """

Do not write lines. Write one JSON object and nothing else: {"items": ["...", "..."]}, one string for each line; an empty list \
instead of NONE."""


def list_structure(messages: list[Message]) -> Structure:
    """Return the structure for a prompt that asks for one item a line; `items_in` reads the answer."""
    *others, last = messages
    return Structure(_ITEMS, _LIST, [*others, {**last, "content": last["content"] + _AS_LIST}])


def items_in(text: str) -> list[str] | None:
    """Return the items of an answer in the form of `list_structure`, each as one line; None for another form."""
    items = (json_in(text) or {}).get(_ITEMS)
    if not isinstance(items, list):
        return None
    lines = (" ".join(item.split()) for item in items if isinstance(item, str))
    return [line for line in lines if line]


Complete = Callable[..., Awaitable[Completion]]
"""(messages, seed[, structure]) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass).

A `Structure` is given to a generator with `structured` only.
"""


@dataclass(frozen=True, slots=True)
class Generator:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer. It is part of ids and cache keys, so it
    holds no API key and no timeout. `remote` answers cost money or time: they are cached and limited. `endpoint` is its
    key in the recipe where a run has several. `structured`: it takes a `Structure`.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    complete: Complete
    endpoint: str = ""
    structured: bool = False


class Stopped(Exception):
    """The run is ending: this request was not sent, or nothing waits for its answer."""


class Transient(EndpointError):
    """A request failed in a way that may pass: `kind` is overload, server error, timeout, connection or malformed.

    `retry_after` is the pause in seconds that the endpoint asked for, or None. `lost` is set where an answer was
    interrupted and may have been charged: the tokens that it reported, 0 without a report.
    """

    def __init__(self, message: str, *, kind: str, retry_after: float | None = None, lost: Usage | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.lost = lost


def request_seed(*parts: object) -> int:
    """Return a seed of 31 bits for a request that depends on `parts` alone."""
    return int(content_id(*parts)[:8], 16) & 0x7FFFFFFF
