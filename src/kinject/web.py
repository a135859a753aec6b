"""Requests over HTTP: JSON sent or fetched, a file downloaded and resumed; what may pass is tried again."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from kinject.errors import DiskError, EndpointError

_Result = TypeVar("_Result")
_ATTEMPTS = 5
_LONGEST_PAUSE = 60.0
_PASSING = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which the same request may succeed."""
_SHOWN = 200
_BLOCK = 2**20
_LARGEST = 2**26
"""Bytes of one answer in JSON."""


class _NoRedirect(HTTPRedirectHandler):
    """A key, and what is posted, go to no other address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def download(url: str, path: Path, *, timeout: float = 60.0) -> None:
    """Download `url` to `path`, which is complete or not there. A part of an earlier attempt is continued.

    Raises `EndpointError`, and `DiskError` if the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.download")
    path.parent.mkdir(parents=True, exist_ok=True)

    def fetch() -> None:
        there = partial.stat().st_size if partial.exists() else 0
        request = Request(url, headers=_headers({"Range": f"bytes={there}-"} if there else {}))  # noqa: S310
        with build_opener().open(request, timeout=timeout) as answer:
            continues = there and answer.status == 206
            with partial.open("ab" if continues else "wb") as file:
                while block := answer.read(_BLOCK):
                    file.write(block)
                size = answer.headers.get("Content-Length")
                if size is not None and file.tell() != (there if continues else 0) + int(size):
                    raise HTTPException(f"ended after {file.tell():,} bytes")
        os.replace(partial, path)

    try:
        _retried(url, fetch)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror or error}.") from error


def _headers(more: Mapping[str, str]) -> dict[str, str]:
    return {"User-Agent": f"kinject/{version('kinject')}", "Accept": "*/*", **more}


def _read(opener: OpenerDirector, request: Request, timeout: float) -> bytes:
    with opener.open(request, timeout=timeout) as answer:
        data = bytes(answer.read(_LARGEST + 1))
    if len(data) > _LARGEST:
        raise EndpointError(f"{request.host}: the answer is longer than {_LARGEST:,} bytes. Ask for less.", fatal=True)
    return data


def _json(url: str, read: Callable[[], bytes]) -> Any:
    data = _retried(url, read)
    try:
        return json.loads(data)
    except ValueError as error:
        raise EndpointError(f"{url}: the answer is no JSON, but begins with {data[:_SHOWN]!r}.", fatal=True) from error


def _retried(url: str, attempt: Callable[[], _Result]) -> _Result:
    """Return the result of `attempt`, tried again after faults that may pass."""
    for n in range(1, _ATTEMPTS + 1):
        try:
            return attempt()
        except HTTPError as error:
            with error:
                text = " ".join(error.read(_SHOWN).decode("utf-8", "replace").split())
            if error.code == 416 and (partial := error.headers.get("Content-Range")):
                raise EndpointError(f"{url}: the part that is there does not fit ({partial}). Delete it.") from error
            if n == _ATTEMPTS or error.code not in _PASSING:
                raise EndpointError(_refusal(url, error.code, text), fatal=error.code not in _PASSING) from error
            pause = _pause(error.headers.get("Retry-After"), n)
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if n == _ATTEMPTS:
                reason = getattr(error, "reason", None) or str(error) or type(error).__name__
                raise EndpointError(f"{url}: no answer after {n} attempts ({reason}). Is the address right?") from error
            pause = _pause(None, n)
        time.sleep(pause)
    raise AssertionError("the loop returns or raises")


def _pause(retry_after: str | None, n: int) -> float:
    """Return the seconds to wait after attempt `n`: as many as the server wants, else a quarter, doubled each time."""
    try:
        return min(_LONGEST_PAUSE, max(0.0, float(retry_after or "")))
    except ValueError:
        return float(min(_LONGEST_PAUSE, 0.25 * 2**n))


def _refusal(url: str, status: int, text: str) -> str:
    if status in (401, 403):
        return (
            f"{url}: the key is missing or refused ({status}: {text}). Put a valid one into the environment variable."
        )
    if status == 404:
        return f"{url}: nothing is there (404: {text}). Check the address."
    return f"{url}: refused ({status}: {text})."


def is_loopback(url: str) -> bool:
    """Return whether `url` names this machine."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # an unclosed bracket
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
