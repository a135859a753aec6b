"""How the body of a request gets to an endpoint and back: aiohttp where nothing is in between, else the openai client's own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx2

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
    def behind(cls, error: BaseException, *, begun: bool = False) -> NoReply:
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


def through_client(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> Post:
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
            raise NoReply.behind(error, begun=begun) from error

    return post


@asynccontextmanager
async def straight(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> AsyncIterator[Post]:
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
                raise NoReply.behind(error, begun=begun) from error

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
