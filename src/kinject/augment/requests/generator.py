"""What every generator has in common: how it is asked, and how it fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kinject.errors import EndpointError
from kinject.types import Completion, Message, Usage

AsyncGenerator = Callable[[list[Message], int], Awaitable[Completion]]
"""(messages, seed) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass)."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Generator:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer; it goes into ids and cache keys, so it
    holds no key and no timeout. `remote` answers cost money or time: they are cached and limited. `abandon` ends all
    waiting for answers that would take hours; seconds are waited for.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    ask: AsyncGenerator
    abandon: Callable[[], None] = _nothing


class Stopped(Exception):
    """The run is ending: this request was not sent, or its answer is not waited for."""


class Transient(EndpointError):
    """A request failed in a way that may pass: `kind` is overload, server error, timeout, connection or malformed.

    `retry_after` is the pause in seconds that the endpoint asked for, None where it asked for none. `lost` is there where
    an answer was on its way and may have been charged: the tokens that it named, 0 where it named none.
    """

    def __init__(self, message: str, *, kind: str, retry_after: float | None = None, lost: Usage | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.lost = lost
