"""The interface of a generator, and its errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.types import Completion, Message, Usage

Complete = Callable[[list[Message], int], Awaitable[Completion]]
"""(messages, seed) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass)."""


@dataclass(frozen=True, slots=True)
class Generator:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer. It is part of ids and cache keys, so it
    holds no API key and no timeout. `remote` answers cost money or time: they are cached and limited. `endpoint` is its
    key in the recipe where a run has several.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    complete: Complete
    endpoint: str = ""


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
