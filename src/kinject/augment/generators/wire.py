"""How the body of a request gets to an endpoint and back: aiohttp where nothing is in between, else the openai client's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx2

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
    """No answer came; `timeout` where that is the reason, else the text says what is known."""

    def __init__(self, text: str, *, timeout: bool) -> None:
        super().__init__(text)
        self.timeout = timeout

    @classmethod
    def behind(cls, error: BaseException) -> NoReply:
        """Return what is behind an exception of the transport (which calls a refused connection a timeout)."""
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        timeout = isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__
        return cls(str(cause) or type(cause).__name__, timeout=timeout)


Post = Callable[[bytes], Awaitable[Reply]]
"""(body) -> reply. Raises `NoReply`."""


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
        try:
            response = await client.send(request)
        except httpx2.HTTPError as error:
            raise NoReply.behind(error) from error
        return Reply(response.status_code, response.headers, response.content)

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
            try:
                async with session.post(url, data=body) as response:
                    return Reply(response.status, response.headers, await response.read())
            except (aiohttp.ClientError, OSError) as error:
                raise NoReply.behind(error) from error

        yield post


def _given(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _TRANSPORTS}


def has_proxy(url: str) -> bool:
    """Return whether the environment names a proxy on the way to `url`."""
    parts = urlsplit(url)
    proxies = getproxies()
    return (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or "")
