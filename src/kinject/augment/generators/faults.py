"""What may go wrong with one request and pass when it is sent again."""

from __future__ import annotations

from kinject.errors import EndpointError
from kinject.types import Usage


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
