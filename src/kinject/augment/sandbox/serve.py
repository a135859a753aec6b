"""A local OpenAI-compatible endpoint with the sandbox's generator and faults on demand."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kinject.augment.checks.planted_errors import plant_error
from kinject.augment.prompts import passage_of
from kinject.augment.sandbox import generate_answer
from kinject.errors import DiskError, InputError
from kinject.llm.endpoint import is_loopback
from kinject.types import Message

MODEL = "sandbox"
_MOST_BYTES = 2**28
"""Longest body of a request, which is a file of a batch."""
FAULTY_ANSWERS: Mapping[str, Callable[[str, Sequence[Message]], tuple[str | None, str]]] = {
    "truncated": lambda text, messages: (text[: len(text) // 2], "length"),
    "null": lambda text, messages: (None, "stop"),
    "empty": lambda text, messages: ("  \n", "stop"),
    "filtered": lambda text, messages: ("", "content_filter"),
    "refusal": lambda text, messages: ("I'm sorry, but I can't help with rewriting this text.", "stop"),
    "wrapped": lambda text, messages: (f"Sure, here is a paraphrase of the passage:\n\n{text}", "stop"),
    "trailing": lambda text, messages: (f"{text}\n\nLet me know if you would like another version!", "stop"),
    "echo": lambda text, messages: (passage_of(messages), "stop"),
    "changed": lambda text, messages: (plant_error("number", text, random.Random(len(text))) or text, "stop"),
}
"""Name -> (good answer, messages) to (faulty answer, finish_reason)."""
_STATUS_FAULTS = {"429": 429, "500": 500, "503": 503, "529": 529}
FAULTS = (*_STATUS_FAULTS, "reset", "hang", "malformed", "no_choices", *FAULTY_ANSWERS)
"""Faults that `ServeOptions` can set, each for a fraction of the requests."""
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    429: "Too Many Requests",
}


@dataclass(frozen=True)
class ServeOptions:
    """Settings of the endpoint. `latency` is in seconds; `faults` maps names of `FAULTS` to fractions of the requests.

    Above `capacity` requests at once it answers 429. It requires `key`, if set, and refuses every key after `revoke_after`
    answers. Faults are drawn by `seed` and the number of the request; with `by_request` by the request itself, so that the
    order of requests does not matter, and a passing fault does not occur when the request is repeated.
    """

    latency: float = 0.0
    faults: Mapping[str, float] = field(default_factory=dict)
    capacity: int | None = None
    key: str | None = field(default=None, repr=False)
    revoke_after: int | None = None
    retry_after: float | None = None
    seed: int = 0
    by_request: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.faults if name not in FAULTS]
        if unknown or sum(self.faults.values()) > 1 or min(self.faults.values(), default=0) < 0:
            raise InputError(
                f"faults: found {dict(self.faults)}, allowed are fractions that sum to at most 1, of {', '.join(FAULTS)}."
            )


class SandboxServer:
    """The endpoint's state: `answered` counts good answers by request body, `met` the faults sent.

    An answer to a closed connection does not count.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.n_requests = 0
        self.in_flight = self.most_in_flight = 0
        self.answered: Counter[bytes] = Counter()
        self.met: Counter[str] = Counter()
        self._rng = random.Random(options.seed)
        self._came: Counter[bytes] = Counter()
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
        """Return the listening server. Raises `InputError` for a host beyond this machine, `DiskError` for a taken address."""
        if not is_loopback(f"http://{host}"):
            raise InputError(f"{host}: the endpoint listens on this machine alone. Allowed: 127.0.0.1 or ::1.")
        try:
            return await asyncio.start_server(self._accept, host, port, backlog=2048)
        except OSError as error:
            raise DiskError(f"{host}:{port}: cannot listen: {error.strerror}. Choose another port.") from error

    async def close(self) -> None:
        """Close every open connection."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            writer.close()  # the client closed, or does not use HTTP
        except asyncio.CancelledError:
            writer.close()
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in lines)}
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= _MOST_BYTES:
            raise ValueError(f"a body of {length} bytes")
        body = await reader.readexactly(length)
        try:
            answer = await self._answer(method, path, headers, body)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            answer = _error(400, f"{type(error).__name__}: {error}", "invalid_request_error")
        if answer is None:
            writer.transport.abort()
            return False
        if reader.at_eof():  # the client closed the connection
            self.answered -= Counter({_key(body): 1})
            return False
        status, value, extra = answer
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        phrase = _PHRASES.get(status, "Error")
        names = {"content-type": "application/json", "content-length": str(len(content)), **extra}
        rendered = "".join(f"{name}: {text}\r\n" for name, text in names.items())
        writer.write(f"HTTP/1.1 {status} {phrase}\r\n{rendered}\r\n".encode() + content)
        await writer.drain()
        return True

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        """Return (status, body, headers), or None to reset the connection."""
        options = self.options
        if not _is_from_here(headers):
            return _error(403, "This endpoint answers programs on its own machine.", "foreign_origin")
        if method == "GET" and path.rstrip("/") == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "kinject"}]}, {}
        if method != "POST" or path != "/v1/chat/completions":
            return _error(404, f"no such path: {path}", "not_found")
        self.n_requests += 1
        revoked = options.revoke_after is not None and self.answered.total() >= options.revoke_after
        if revoked or (options.key and headers.get("authorization") != f"Bearer {options.key}"):
            return _error(401, "Incorrect API key provided.", "invalid_api_key")
        if options.capacity is not None and self.in_flight >= options.capacity:
            self.met["capacity"] += 1
            return _error(429, "Too many requests at once.", "rate_limit_exceeded", self._retry_after())
        fault = self._draw(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(3600 if fault == "hang" else options.latency)
        finally:
            self.in_flight -= 1
        return self._reply(body, fault)

    def _reply(self, body: bytes, fault: str) -> Reply | None:
        if fault in _STATUS_FAULTS:
            return _error(_STATUS_FAULTS[fault], "Requested fault.", "requested", self._retry_after())
        if fault == "reset":
            return None
        if fault == "malformed":
            return 200, b'{"id": "x", "choices": [{"message": {"con', {}
        return self._complete(body, fault)

    def _draw(self, body: bytes) -> str:
        key = _key(body)
        self._came[key] += 1
        rng = random.Random(key) if self.options.by_request else self._rng
        mark, fault = rng.random(), ""
        for name, fraction in self.options.faults.items():
            mark -= fraction
            if mark < 0:
                fault = name
                break
        if self.options.by_request and self._came[key] > 1 and fault not in FAULTY_ANSWERS:
            return ""
        if fault:
            self.met[fault] += 1
        return fault

    def _retry_after(self) -> dict[str, str]:
        return {} if self.options.retry_after is None else {"retry-after": f"{self.options.retry_after:g}"}

    def _complete(self, body: bytes, fault: str) -> Reply:
        try:
            request = json.loads(body)
            messages: list[Message] = request["messages"]
            seed = int(request.get("seed") or 0)
            if request.get("model") != MODEL:
                return _error(404, f"The model {request.get('model')!r} does not exist.", "model_not_found")
            completion = generate_answer(messages, seed)
        except (ValueError, KeyError, TypeError, InputError) as error:
            return _error(400, f"{type(error).__name__}: {error}", "invalid_request_error")
        text: str | None = completion.text
        reason = completion.finish_reason
        if fault in FAULTY_ANSWERS:
            text, reason = FAULTY_ANSWERS[fault](completion.text, messages)
        self.answered[_key(body)] += 1
        n_in, n_out = sum(len(message["content"]) for message in messages) // 4, len(text or "") // 4
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        usage = {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}
        choices = [] if fault == "no_choices" else [choice]
        return (
            200,
            {"id": "chatcmpl-0", "object": "chat.completion", "model": MODEL, "choices": choices, "usage": usage},
            {},
        )


def _is_from_here(headers: Mapping[str, str]) -> bool:
    """Return whether a request is for this machine and from no other machine's page.

    Any page can direct a browser of this machine here, under the page's own name for this address (DNS rebinding).
    """
    urls = [f"http://{headers['host']}"] if "host" in headers else []
    urls += [headers["origin"]] if "origin" in headers else []
    return all(is_loopback(url) and "@" not in url for url in urls)


def _key(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Reply:
    return status, {"error": {"message": message, "code": code, "type": code}}, headers or {}


def serve(host: str, port: int, options: ServeOptions, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve /v1/chat/completions, and models until interrupted; call `ready` with the base_url first.

    Raises `DiskError` if the address is taken and `KeyboardInterrupt` on Ctrl-C.
    """

    async def run() -> None:
        state = SandboxServer(options)
        server = await state.start(host, port)
        async with server:
            ready(f"http://{host}:{server.sockets[0].getsockname()[1]}/v1")
            try:
                await server.serve_forever()
            finally:
                await state.close()

    asyncio.run(run())


Reply = tuple[int, Any, dict[str, str]]
