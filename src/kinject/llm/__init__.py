"""Requests to generators: what endpoints and local models share; their errors, the tokens that they
report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.recipe.sections import LIMIT_NAMES
from kinject.types import Completion, Message, Usage

Complete = Callable[[list[Message], int], Awaitable[Completion]]
"""(messages, seed) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass).
"""


@dataclass(frozen=True, slots=True)
class Generator:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer. It is part of ids
    and cache keys, so it holds no API key and no timeout. `remote` answers cost money or time: they
    are cached and limited.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    complete: Complete

    @property
    def longest_answer(self) -> int:
        """The most tokens of an answer: by extra_body, where that names the limit."""
        parameters = self.identity.get("extra_body") or {}
        for name in LIMIT_NAMES:
            if isinstance(parameters.get(name), int):
                return int(parameters[name])
        return int(self.identity.get("max_tokens") or 0)


class Stopped(Exception):
    """The run is ending: this request was not sent, or nothing waits for its answer."""


class Transient(EndpointError):
    """A request failed in a way that may pass: `kind` is overload, server error, timeout,
    connection or malformed.

    `retry_after` is the pause in seconds that the endpoint asked for, or None. `lost`: an answer
    was interrupted and may have been charged.
    """

    def __init__(
        self, message: str, *, kind: str, retry_after: float | None = None, lost: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.lost = lost


def request_seed(*parts: object) -> int:
    """Return a seed of 31 bits for a request that depends on `parts` alone."""
    return int(content_id(*parts)[:8], 16) & 0x7FFFFFFF


JsonValue = Mapping[str, Any] | Sequence[Any] | str | float | bool | None
"""What an endpoint may put anywhere in its answer."""
_MOST_TOKENS = 10_000_000
"""Beyond any model's window: a higher token count is as impossible as a negative one."""


def read_usage(value: JsonValue) -> Usage:
    """Return the tokens of an answer's `usage`; 0 for each that is missing or impossible."""
    if not isinstance(value, Mapping):
        return Usage()
    thinking, details = 0, value.get("completion_tokens_details")
    if isinstance(details, Mapping):
        thinking = _n_tokens(details.get("reasoning_tokens"))
    n_in, n_out = _n_tokens(value.get("prompt_tokens")), _n_tokens(value.get("completion_tokens"))
    # xAI and Gemini leave thinking out of completion_tokens, and charge it: the total has it.
    if n_in:
        n_out = max(n_out, _n_tokens(value.get("total_tokens")) - n_in)
    return Usage(n_in, n_out, min(thinking, n_out))


def _n_tokens(value: JsonValue) -> int:
    """Return a number of tokens, 0 for an impossible one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not 0 <= value <= _MOST_TOKENS:  # NaN, too
        return 0
    return int(value)
