"""One OpenAI-compatible endpoint, through the openai client: its answer to a request, or its error by kind.

All that it says is untrusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinject.errors import EndpointError
from kinject.llm.chat import Parameters, read_usage, split_thinking, with_thinking
from kinject.llm.generator import Transient
from kinject.recipe import GeneratorSection
from kinject.secrets import SHOWN, known_secrets, secret_filter
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    import httpx2
    import openai

log = logging.getLogger(__name__)

DEFAULT_URL = "https://api.openai.com/v1"
MOST_BYTES = 64 * 2**20
"""Longest body that is read, decompressed. A longer one is dropped and its connection closed."""
_DEFAULT_VARIABLE = "OPENAI_API_KEY"
_KINDS = {
    429: "overload", 503: "overload", 529: "overload", 408: "server error", 409: "server error", 425: "server error",
    502: "connection",
}  # fmt: skip
"""Status -> kind of a fault that may pass, as every other from 500 on. 502: a gateway that does not reach the endpoint."""
_BAD_REQUEST = (400, 422)
_CONNECT = 10.0
"""Maximum seconds until a connection is open."""
_SPARE = 8
"""Connections beyond the requests in flight, for those that are closing."""
_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""A name and password in a URL, as in a proxy's error."""
_LONGEST_MESSAGE = 10_000
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\u2027\u202f-\ud7ff\ue000-\ufffd]+")
_CHARACTERS_OF_A_TOKEN = 128
"""Maximum length of a token: no vocabulary in use has longer ones."""
_LONGEST_REASON = 64
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?\Z")
_RATE_LIMIT = re.compile(r"rate.?limit|too.?many|overload|exhausted", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of an endpoint to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def parse_completion(
    body: bytes,
    url: str,
    max_tokens: int,
    shown: Callable[[str], str] = str,
    on_model: Callable[[str], None] = lambda name: None,
) -> Completion:
    """Return the completion in a response body. Raises `Transient` if the body is not a chat completion.

    A text longer than `max_tokens` tokens can be is cut, with finish_reason ``length``. Usage that is missing or cannot
    be is 0. `shown` makes text of the body safe to print; `on_model` is called with the name of the model that answered.
    """
    try:
        value = json.loads(body)
        used = read_usage(value.get("usage"))
        choices = value.get("choices") if value.get("error") else value["choices"]
        first = choices[0] if choices else {}
        message, reason = first.get("message") or {}, first.get("finish_reason")
        thinking, text = split_thinking(_text(message.get("content")))
        apart = message.get("reasoning_content") or message.get("reasoning")  # of vLLM, DeepSeek, OpenRouter and others
        model = value.get("model")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        # A proxy's page costs nothing; JSON that is cut or has no choices may be an answer that was paid.
        begun = body.lstrip()[:1] == b"{"
        start = (
            ""
            if begun
            else f", it begins {shown(body[:1000].decode('utf-8', 'replace'))[:60]!r}"
            if body
            else ", empty"
        )
        message = f"{url}: the answer is not a chat completion ({type(error).__name__}{start}). Is base_url correct?"
        raise Transient(message, kind="malformed", lost=Usage() if begun else None) from error
    if not text and (value.get("error") or first.get("error")):
        raise Transient(f"{url}: answered 200 with an error ({shown(error_of(body)[0])}).", kind="malformed")
    if not choices:
        return Completion("", "no choices", used)
    thinking = apart if isinstance(apart, str) else thinking
    if not text and message.get("refusal"):
        reason = "content_filter"
    if isinstance(model, str):
        on_model(model)
    most = max_tokens * _CHARACTERS_OF_A_TOKEN
    if len(text) > most:
        text, reason = text[:most], "length"
    used = with_thinking(used, len(thinking), len(text))
    return Completion(_utf8(text), _finish_reason(reason), used, _utf8(thinking[:most]))


def _text(content: object) -> str:
    """Return the text in a message's content: a string, or a list of parts of which some are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"content is {type(content).__name__}")
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _finish_reason(value: object) -> str:
    """Return a finish_reason as a short text, "" without one."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return printable(text)[:_LONGEST_REASON]


def _utf8(text: str) -> str:
    """Return `text` with half surrogate pairs and NULs, which no file can hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def printable(text: str) -> str:
    """Return untrusted text as one line of at most 200 characters without control characters."""
    line = _UNPRINTABLE.sub(" ", text).strip()
    return line if len(line) <= 200 else line[:197] + "..."


def error_of(body: bytes) -> tuple[str, str]:
    """Return (message, code) of an error body in OpenAI's form, or (the body, "")."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        if isinstance(error, str):
            return error, ""
        return str(error.get("message") or value), str(error.get("code") or "")
    except (ValueError, AttributeError, RecursionError):
        return body[:10_000].decode("utf-8", "replace") or "no body", ""


def status_in_body(body: bytes) -> int | None:
    """Return the status of an error that a gateway sends with status 200, in the body or its first choice; else None."""
    try:
        value = json.loads(body)
        choices = value.get("choices")
        error = value.get("error") or (choices[0].get("error") if choices else None)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    code = str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else str(error or "")
    if re.fullmatch("[45][0-9][0-9]", code):
        return int(code)
    return 429 if _RATE_LIMIT.search(code[:1000]) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header (number or date), None without a possible value.

    A date counts from the reply's own Date, so that this machine's clock does not matter.
    """
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if _NUMBER.match(value):
            seconds = float(value) * factor
            break
    else:
        try:
            sent = headers.get("date")
            seconds = _seconds(value) - (_seconds(sent) if sent else time())
        except (ValueError, TypeError, IndexError, OverflowError, OSError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _seconds(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()


class Endpoint:
    """One endpoint and model, open inside ``async with``."""

    route = "chat/completions"

    def __init__(self, section: GeneratorSection) -> None:
        """Read the key. Raises `EndpointError` (fatal), which names the environment variable, where it is missing."""
        self.section = section
        self.url = section.address or DEFAULT_URL
        self._key = _api_key(section.api_key_env, self.url)
        others = known_secrets([section.api_key_env]).values()
        self._secrets = secret_filter(tuple(dict.fromkeys([self._key, *others])))
        self._client: openai.AsyncOpenAI  # set by `__aenter__`
        self._parameters = Parameters(section, self.url, self.shown)
        self._models: set[str] = set()

    async def __aenter__(self) -> Endpoint:
        import openai

        # The sender retries: its retries keep the budget, are counted, and stop with the run.
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none", base_url=self.url, max_retries=0, http_client=self._open_http()
        )
        return self

    def _open_http(self) -> httpx2.AsyncClient:
        import httpx2
        import openai

        section = self.section
        return openai.DefaultAioHttpClient(
            # None would be aiohttp's default of 100, not "no limit".
            limits=httpx2.Limits(
                max_connections=section.concurrency + _SPARE, max_keepalive_connections=section.concurrency
            ),
            timeout=httpx2.Timeout(section.timeout, connect=min(section.timeout, _CONNECT)),
            trust_env=not is_loopback(self.url),
            follow_redirects=False,  # documents and key go only to the endpoint of the recipe
            event_hooks={"response": [_read_bounded]},
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the endpoint's answer, unchecked.

        Raises `Transient` if a retry may help, `EndpointError` if it will not (fatal: nor for any other request).
        """
        return await self.exchange(lambda: self._parameters.body(messages, seed), self.parse)

    async def exchange(
        self, make_body: Callable[[], dict[str, Any]], read: Callable[[bytes], Completion], *, learns: bool = True
    ) -> Completion:
        """Return the result of `read` on a reply; if it `learns`, a body with a refused parameter is made again.

        Raises as `complete`.
        """
        while True:
            body = make_body()
            reply = await self._post(body)
            if not learns or reply.status not in _BAD_REQUEST or not self._parameters.learn(body, reply.body):
                break
        if not 200 <= reply.status < 300:
            if error_of(reply.body)[1] == "content_filter":  # some endpoints refuse the prompt, not the answer
                return Completion("", "content_filter")
            raise await self.status_error(reply)
        try:
            return read(reply.body)
        except Transient:
            status = status_in_body(reply.body)
            if status is None:
                raise
            raise await self.status_error(replace(reply, status=status)) from None

    async def _post(self, body: dict[str, Any]) -> Reply:
        """Return the whole reply to `body`, whatever its status. Raises as `complete`."""
        import httpx2
        import openai

        content = json.dumps(body).encode()
        async with self._limited():
            try:
                # Not `chat.completions.create`: it reads no body that differs from OpenAI's, and knows no other parameters.
                response = await self._client.post(
                    f"/{self.route}", content=content, cast_to=httpx2.Response,
                    options={"headers": {"Content-Type": "application/json"}},
                )  # fmt: skip
            except openai.APIStatusError as error:
                response = error.response
            return Reply(response.status_code, response.headers, response.content)

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Limit the block to the timeout of a request, and raise errors of the connection by their kind."""
        import aiohttp
        import openai

        try:
            async with asyncio.timeout(self.section.timeout):
                yield
        # The client passes on what its transport does not know, as an answer that is no HTTP.
        except (openai.APIConnectionError, aiohttp.ClientError, _Interrupted, TimeoutError) as error:
            raise self._connection_error(error) from error

    def parse(self, body: bytes) -> Completion:
        """Return the completion in a body, without secrets (`clean`). Raises `Transient` as `parse_completion`."""
        answer = parse_completion(body, self.url, self.section.max_tokens, shown=self.shown, on_model=self.check_model)
        return self.clean(answer)

    def clean(self, answer: Completion) -> Completion:
        """Return an answer without secrets: one that held a part of one has finish_reason ``secret``."""
        text, reason = self._secrets.redact(answer.text), self.shown(answer.finish_reason)
        thinking = self._secrets.redact(answer.thinking)
        return replace(answer, text=text, thinking=thinking, finish_reason="secret" if text != answer.text else reason)

    def check_model(self, name: str) -> None:
        """Log a warning, once, if another model answers than the recipe's. Longer names, such as with a date, are the same."""
        requested = (self.section.model or "").rpartition("/")[2].lower()
        if requested not in name.lower() and not self._models:
            self._models.add(name)
            log.warning(f"{self.url}: requested the model {self.section.model!r}, {self.shown(name)!r} answers.")

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return the body of a request."""
        return self._parameters.body(messages, seed)

    def _connection_error(self, error: BaseException) -> EndpointError:
        """Return the error of a request without a whole answer; the openai client reports most as its cause."""
        begun, cause = isinstance(error, _Interrupted), error
        while cause.__cause__ is not None and not isinstance(cause.__cause__, asyncio.CancelledError):
            cause = cause.__cause__
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            message = f"{self.url}: no whole answer within {self.section.timeout:g} s."
            return Transient(message, kind="timeout", lost=Usage())
        reason = self.shown(str(cause) or type(cause).__name__)
        if isinstance(cause, _Interrupted):
            return Transient(f"{self.url}: the answer is not read: {reason}.", kind="malformed", lost=Usage())
        if begun:
            message = f"{self.url}: the connection broke during the answer ({reason})."
            return Transient(message, kind="connection", lost=Usage())
        # A connection that ends during the handshake may succeed next time; a wrong certificate will not change.
        fault = next((nested for nested in (cause, *cause.args) if isinstance(nested, ssl.SSLError)), None)
        if fault is not None and not isinstance(fault, ssl.SSLEOFError):
            return EndpointError(
                f"{self.url}: no secure connection ({reason}). Check base_url (http or https?) and the endpoint's "
                "certificate; the environment variable SSL_CERT_FILE may name one more authority to trust.",
                fatal=True,
            )
        return Transient(f"{self.url}: no connection ({reason}). Is the endpoint running?", kind="connection")

    async def status_error(self, reply: Reply) -> EndpointError:
        """Return the error of a reply other than 200."""
        status, (text, code) = reply.status, error_of(reply.body)
        reason = self.shown(text)
        fatal = await self._fatal_message(reply, code, reason)
        if fatal:
            return EndpointError(f"{self.url}: {fatal}", fatal=True)
        message, pause = f"{self.url}: answered {status} ({reason}).", retry_after(reply.headers)
        kind = _KINDS.get(status, "server error" if status >= 500 else "")
        if not kind:
            return EndpointError(message)
        return Transient(message, kind=kind, retry_after=pause)

    async def _fatal_message(self, reply: Reply, code: str, reason: str) -> str:
        """Return the message about a reply after which every request would fail, "" for another reply."""
        status, variable = reply.status, self.section.api_key_env
        if status in (401, 403):
            fault = "the key is refused" if self._key else "it wants a key"
            return f"{fault} ({status}: {reason}). Put a valid one in the environment variable {variable}."
        if status == 404:
            return await self._missing_model_message(reason)
        if status == 402 or code == "insufficient_quota":
            return f"the account is out of credit ({status}: {reason}). Top it up, then run again: stored answers are kept."
        if 300 <= status < 400:
            target = self.shown(reply.headers.get("location", "nowhere"))
            return f"answered {status}: it redirects requests to {target}. If that is correct, set it as base_url."
        return ""

    async def _missing_model_message(self, reason: str) -> str:
        """Return the message about a 404: the endpoint's models, or that the URL may be wrong where it lists none."""
        import openai

        try:
            async with self._limited():
                raw = await self._client.models.with_raw_response.list()
            offered = [self.shown(model["id"]) for model in json.loads(raw.http_response.content)["data"]]
        except (
            EndpointError,
            openai.OpenAIError,
            ValueError,
            KeyError,
            TypeError,
        ):  # the 404 is what the user must know
            return f"answered 404 ({reason}). Check base_url and model. Most base_urls end in /v1."
        more = f" and {len(offered) - 10} more" if len(offered) > 10 else ""
        return f"no model {self.section.model!r} (404: {reason}). It offers {', '.join(offered[:10]) or 'none'}{more}."

    def shown(self, text: object) -> str:
        """Return text of the endpoint made safe to print: one short line, no control characters, no secrets."""
        line = _USER.sub(SHOWN, str(text)[:_LONGEST_MESSAGE])
        return printable(self._secrets.redact(line.replace(self._key, SHOWN) if self._key else line))


class _Interrupted(Exception):
    """An answer that began and was not read to its end: its cause, or none where it is too long."""


async def _read_bounded(response: httpx2.Response) -> None:
    """Read a response before the client does, which would read it without a limit. Raises `_Interrupted`."""
    import httpx2

    parts: list[bytes] = []
    n_bytes = 0
    try:
        async for chunk in response.aiter_bytes():
            n_bytes += len(chunk)
            if n_bytes > MOST_BYTES:
                raise _Interrupted(f"it is longer than {MOST_BYTES:,} bytes")
            parts.append(chunk)
    except httpx2.HTTPError as error:
        raise _Interrupted(str(error)) from error
    response._content = b"".join(parts)


def _api_key(variable: str, url: str) -> str:
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise EndpointError(
            f"{url}: the environment variable {variable} holds a character that no key has. Set it again.", fatal=True
        )
    if key and urlsplit(url).scheme == "http" and not is_loopback(url):
        log.warning(f"{url}: the key in {variable} travels unencrypted. Use https, unless the network is yours alone.")
    own_server = is_loopback(url) or (url != DEFAULT_URL and variable == _DEFAULT_VARIABLE)  # it may want none
    if key or own_server:
        return key
    raise EndpointError(
        f"{url}: the environment variable {variable} is not set. Put the endpoint's key in it "
        "(or name another variable with api_key_env).",
        fatal=True,
    )


def is_loopback(url: str) -> bool:
    """Return whether `url` names this machine."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # an unclosed bracket, or a name
        return False
