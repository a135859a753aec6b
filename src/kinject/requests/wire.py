"""Posts request bodies: directly on aiohttp, or through the openai client behind a proxy."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 64 * 2**20
"""Longest body that is read, decompressed. A longer one is dropped and its connection closed."""
MOST_FILE_BYTES = 2**30
"""The same for the results of a batch."""
_CONNECT = 10.0
"""Maximum seconds until a connection is open."""
_SPARE = 8
"""Connections beyond the requests in flight, for those that are closing."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of an endpoint to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class NoReply(Exception):
    """No whole answer came. `kind` is timeout, connection, too long, or tls (no secure connection can be made).

    `begun` means that part of an answer came.
    """

    def __init__(self, text: str, kind: str = "connection", *, begun: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.begun = begun

    @classmethod
    def from_exception(cls, error: BaseException, *, begun: bool = False) -> NoReply:
        """Return the cause of an exception of the transport (which reports a refused connection as a timeout)."""
        cause = error
        while cause.__cause__ is not None and not isinstance(cause.__cause__, asyncio.CancelledError):
            cause = cause.__cause__
        kind = "timeout" if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ else "connection"
        connecting = any(name in type(error).__name__ for name in ("Connector", "ConnectError"))
        # A connection that ends during the handshake may succeed next time; a wrong certificate will not change.
        fault = next((nested for nested in (cause, *cause.args) if isinstance(nested, ssl.SSLError)), None)
        if connecting and fault is not None and not isinstance(fault, ssl.SSLEOFError):
            kind = "tls"
        return cls(str(cause) or type(cause).__name__, kind, begun=begun)


Post = Callable[[bytes], Awaitable[Reply]]
"""(body) -> reply. Raises `NoReply`. Follows no redirect: documents and key go only to the endpoint of the recipe."""


def has_aiohttp() -> bool:
    """Return whether aiohttp is installed. Without it requests are slower beyond some 50 in flight, otherwise the same."""
    return importlib.util.find_spec("aiohttp") is not None


def open_client(timeout: float, concurrency: int, *, local: bool) -> httpx2.AsyncClient:
    """Return the HTTP client of the openai package. A `local` one ignores proxies."""
    import httpx2
    import openai

    settings: dict[str, Any] = {
        # None would be aiohttp's default of 100, not "no limit".
        "limits": httpx2.Limits(max_connections=concurrency + _SPARE, max_keepalive_connections=concurrency),
        "timeout": httpx2.Timeout(timeout, connect=min(timeout, _CONNECT)),
        "trust_env": not local,
        "follow_redirects": False,
        "event_hooks": {"response": [_read_bounded]},  # every call of the client, not just the posts
    }
    return openai.DefaultAioHttpClient(**settings) if has_aiohttp() else openai.DefaultAsyncHttpxClient(**settings)


def request_headers(key: str) -> dict[str, str]:
    """Return the headers of a request with an API key, which may be "". The environment may name an organization of OpenAI."""
    of_openai = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
    return {
        "accept": "application/json", "content-type": "application/json", "authorization": f"Bearer {key or 'none'}",
        "user-agent": f"kinject/{version('kinject')}",
        **{name: os.environ[variable] for name, variable in of_openai.items() if os.environ.get(variable)},
    }  # fmt: skip


def client_poster(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> Post:
    """Return a function that posts JSON to `url` through `client`. The constant parts of a request are made once."""
    import httpx2

    pattern = client.build_request("POST", url, headers=headers)
    raw = [pair for pair in pattern.headers.raw if pair[0].lower() != b"content-length"]

    async def post(body: bytes) -> Reply:
        request = httpx2.Request("POST", pattern.url, headers=raw, content=body, extensions=dict(pattern.extensions))
        try:
            response = await client.send(request)
        except httpx2.HTTPError as error:
            raise NoReply.from_exception(error) from error
        return Reply(response.status_code, response.headers, response.content)

    return post


@asynccontextmanager
async def aiohttp_poster(url: str, headers: Mapping[str, str], timeout: float, *, local: bool) -> AsyncIterator[Post]:
    """Yield a function that posts JSON to `url` on aiohttp, with the certificates that the openai package would trust.

    `timeout` limits the seconds until a connection is open; the function's caller limits those of a request.

    The openai package takes some 5 times the processor time a request, and more for its import than 1,000 requests.
    """
    import aiohttp

    secure: ssl.SSLContext | bool = True
    if urlsplit(url).scheme == "https":
        import httpx2

        secure = httpx2.create_ssl_context(trust_env=not local)
    limits = aiohttp.ClientTimeout(sock_connect=min(timeout, _CONNECT))  # the caller limits the whole request
    connector = aiohttp.TCPConnector(limit=0, ssl=secure)  # 0: the sender counts what is in flight
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=limits, headers=headers
    ) as session:

        async def post(body: bytes) -> Reply:
            begun = False
            try:
                async with session.post(url, data=body, allow_redirects=False) as response:
                    begun = True
                    return Reply(
                        response.status, response.headers, await _read_all(response.content.iter_any(), MOST_BYTES)
                    )
            except (aiohttp.ClientError, OSError) as error:
                raise NoReply.from_exception(error, begun=begun) from error

        yield post


async def _read_bounded(response: httpx2.Response) -> None:
    """Read a response of the client before the client does, which would read it without a limit. Raises `NoReply`."""
    import httpx2

    most = MOST_FILE_BYTES if response.request.url.path.endswith("/content") else MOST_BYTES
    try:
        response._content = await _read_all(response.aiter_bytes(), most)
    except httpx2.HTTPError as error:
        raise NoReply.from_exception(error, begun=True) from error


async def _read_all(chunks: AsyncIterator[bytes], most: int) -> bytes:
    """Return the whole body. Raises `NoReply` (too long) beyond `most` bytes."""
    parts: list[bytes] = []
    n_bytes = 0
    async for chunk in chunks:
        n_bytes += len(chunk)
        if n_bytes > most:
            raise NoReply(f"it is longer than {most:,} bytes", "too long", begun=True)
        parts.append(chunk)
    return b"".join(parts)


def has_proxy(url: str) -> bool:
    """Return whether the environment names a proxy on the way to `url`."""
    parts = urlsplit(url)
    proxies = getproxies()
    return (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or "")
