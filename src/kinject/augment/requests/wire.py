"""How the body of a request gets to an endpoint and back: aiohttp where nothing is in between, else the openai client's own."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx2


import base64
import re
from urllib.parse import quote

MOST_BYTES = 64 * 2**20
"""Longest body that is read, unpacked; of a longer one nothing is kept and the connection is closed."""
_CONNECT = 10.0
"""Most seconds to a connection."""
_SPARE = 8
"""Connections beyond the requests in flight, for those that are closing."""
_TRANSPORTS = ("accept-encoding", "connection", "content-length", "host")
"""Headers that the transport writes itself."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an endpoint answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class NoReply(Exception):
    """No whole answer came. `kind` is timeout, connection, too long, or tls (no secure connection can be made).

    `begun` means that an answer was on its way.
    """

    def __init__(self, text: str, kind: str = "connection", *, begun: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.begun = begun

    @classmethod
    def from_exception(cls, error: BaseException, *, begun: bool = False) -> NoReply:
        """Return what is behind an exception of the transport (which calls a refused connection a timeout)."""
        cause = error
        while cause.__cause__ is not None and not isinstance(cause.__cause__, asyncio.CancelledError):
            cause = cause.__cause__
        kind = "timeout" if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ else "connection"
        connecting = any(name in type(error).__name__ for name in ("Connector", "ConnectError"))
        # A connection that ends while keys are exchanged may be made the next time; a wrong certificate will not change.
        fault = next((one for one in (cause, *cause.args) if isinstance(one, ssl.SSLError)), None)
        if connecting and fault is not None and not isinstance(fault, ssl.SSLEOFError):
            kind = "tls"
        return cls(str(cause) or type(cause).__name__, kind, begun=begun)


Post = Callable[[bytes], Awaitable[Reply]]
"""(body) -> reply. Raises `NoReply`. Follows no redirect: documents and key go to the named endpoint alone."""


def open_client(timeout: float, concurrency: int, *, local: bool) -> tuple[httpx2.AsyncClient, bool]:
    """Return the client that the openai package sends through, and whether it is on aiohttp.

    `local` ones heed no proxy of the environment.
    """
    import httpx2
    import openai

    settings: dict[str, Any] = {
        # None would be aiohttp's default of 100, not "no limit".
        "limits": httpx2.Limits(max_connections=concurrency + _SPARE, max_keepalive_connections=concurrency),
        "timeout": httpx2.Timeout(timeout, connect=min(timeout, _CONNECT)),
        "trust_env": not local,
        "follow_redirects": False,
    }
    try:
        return openai.DefaultAioHttpClient(**settings), True
    except RuntimeError:  # the extra is absent: slower beyond some 50 requests in flight, otherwise the same
        return openai.DefaultAsyncHttpxClient(**settings), False


def client_poster(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> Post:
    """Return what posts JSON to `url` through `client`; what is the same each time is made once."""
    import httpx2

    pattern = client.build_request("POST", url, headers=_given(headers))
    raw = [pair for pair in pattern.headers.raw if pair[0].lower() != b"content-length"]

    async def post(body: bytes) -> Reply:
        request = httpx2.Request("POST", pattern.url, headers=raw, content=body, extensions=dict(pattern.extensions))
        begun = False
        try:
            response = await client.send(request, stream=True)
            begun = True
            try:
                return Reply(response.status_code, response.headers, await _whole(response.aiter_bytes()))
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            raise NoReply.from_exception(error, begun=begun) from error

    return post


@asynccontextmanager
async def aiohttp_poster(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> AsyncIterator[Post]:
    """Yield what posts JSON to `url` on aiohttp, past `client`, with its time limits and certificates.

    The openai package spends 2 ms on a request, httpx2 0.2, aiohttp below them as much. What is sent is the same.
    """
    import aiohttp
    import httpx2

    limits = aiohttp.ClientTimeout(sock_connect=client.timeout.connect, sock_read=client.timeout.read)
    secure = httpx2.create_ssl_context(trust_env=client.trust_env) if urlsplit(url).scheme == "https" else True
    connector = aiohttp.TCPConnector(limit=0, ssl=secure)  # 0: the sender counts what is in flight
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=limits, headers=_given(headers)
    ) as session:

        async def post(body: bytes) -> Reply:
            begun = False
            try:
                async with session.post(url, data=body, allow_redirects=False) as response:
                    begun = True
                    return Reply(response.status, response.headers, await _whole(response.content.iter_any()))
            except (aiohttp.ClientError, OSError) as error:
                raise NoReply.from_exception(error, begun=begun) from error

        yield post


async def _whole(chunks: AsyncIterator[bytes]) -> bytes:
    """Return a body as one piece. Raises `NoReply` (too long) beyond `MOST_BYTES`."""
    parts: list[bytes] = []
    n_bytes = 0
    async for chunk in chunks:
        n_bytes += len(chunk)
        if n_bytes > MOST_BYTES:
            raise NoReply(f"it is longer than {MOST_BYTES:,} bytes", "too long", begun=True)
        parts.append(chunk)
    return b"".join(parts)


def _given(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _TRANSPORTS}


def has_proxy(url: str) -> bool:
    """Return whether the environment names a proxy on the way to `url`."""
    parts = urlsplit(url)
    proxies = getproxies()
    return (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or "")


SHOWN = "(key)"
_BLOCK = 12
"""Characters in a row that give a part of a key away; the first characters of many keys are the same."""
_LONG = 16
"""Characters from which a key stands in no honest answer by chance ("none", "EMPTY" and "dummy" are keys, too)."""
_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""A name and password in a URL, as a proxy's error tells it."""


class Redactor:
    """Takes one key out of texts."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._forms = tuple(_forms(key)) if len(key) >= _LONG else ()

    def message(self, text: str) -> str:
        """Return an error's text without the key, and without names and passwords in URLs."""
        text = _USER.sub(SHOWN, text)
        return self.answer(text.replace(self._key, SHOWN) if self._key else text)

    def answer(self, text: str) -> str:
        """Return an answer's text without the key, where that is long enough to be one."""
        for form in self._forms:
            for start in range(0, len(form) - _BLOCK + 1, _BLOCK):
                if form[start : start + _BLOCK] in text:
                    text = _without(text, form, start)
        return text


def _forms(key: str) -> list[str]:
    """Return how a key may be written: itself, quoted, and in base64 behind any text (three ways, by its length)."""
    found = [key, quote(key, safe="")]
    for before in range(3):
        whole = base64.b64encode(b"." * before + key.encode()).decode().rstrip("=")
        found.append(whole[(0, 2, 3)[before] : len(whole) - 1])
    return list(dict.fromkeys(found))


def _without(text: str, form: str, start: int) -> str:
    """Return `text` without the runs of `form` that hold its block at `start`."""
    block = form[start : start + _BLOCK]
    pieces = text.split(block)
    for index in range(len(pieces) - 1):
        before, after = form[:start], form[start + _BLOCK :]
        n_before = _shared(pieces[index][::-1], before[::-1])
        pieces[index] = pieces[index][: len(pieces[index]) - n_before]
        pieces[index + 1] = pieces[index + 1][_shared(pieces[index + 1], after) :]
    return SHOWN.join(pieces)


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    n = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        n += 1
    return n


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
