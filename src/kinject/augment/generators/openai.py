"""Any OpenAI-compatible endpoint, one request at a time, with every fault named and sorted into its kind."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import ipaddress
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinject.augment.generators.faults import Transient
from kinject.augment.generators.redact import Redactor
from kinject.augment.generators.replies import error_of, parse_completion, printable, retry_after, status_inside
from kinject.augment.generators.wire import NoReply, Post, Reply, has_proxy, open_client, straight, through_client
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

DEFAULT_URL = "https://api.openai.com/v1"
_OVERLOADED = (429, 503, 529)
_RETRIED = (408, 409, 425)
_GATEWAY = 502
"""A gateway that reaches nothing behind it: as good as no connection."""
_MOST_MODELS = 20
_CALL = 20
"""Times the time for a request that a file may take."""


class Endpoint:
    """One endpoint and model, open inside ``async with``."""

    def __init__(self, section: GeneratorSection) -> None:
        """Look the key up. Raises `EndpointError` (fatal) naming the variable where it is missing."""
        self._section = section
        self.url = section.base_url or DEFAULT_URL
        self._key = _api_key(section.api_key_env, self.url)
        self._redact = Redactor(self._key)
        self._client: openai.AsyncOpenAI | None = None
        self._post: Post | None = None
        self._models: set[str] = set()
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Endpoint:
        import openai

        local = is_loopback(self.url)
        http, on_aiohttp = open_client(self._section.timeout, self._section.concurrency, local=local)
        # Retries are the sender's: they must hold the rate limits, be counted, and stop with the run.
        client = openai.AsyncOpenAI(api_key=self._key or "none", base_url=self.url, max_retries=0, http_client=http)
        self._client = await self._open.enter_async_context(client)
        headers = {**client.default_headers, **client.auth_headers}
        given = {name: value for name, value in headers.items() if isinstance(value, str)}
        url = f"{self.url.rstrip('/')}/chat/completions"
        # Not client.chat.completions.create: its walk through parameter types and options costs 2 ms a request, more than
        # all else together; the wire sees no difference.
        if on_aiohttp and (local or not has_proxy(url)):
            self._post = await self._open.enter_async_context(straight(http, url, given))
        else:
            self._post = through_client(http, url, given)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def ask(self, messages: list[Message], seed: int) -> Completion:
        """Return the endpoint's answer, whatever it is worth.

        Raises `Transient` where asking again may help, `EndpointError` where it will not (fatal: nor for any other).
        """
        reply = await self._reply(json.dumps(self.body(messages, seed)).encode())
        if not 200 <= reply.status < 300:
            if error_of(reply.body)[1] == "content_filter":  # some refuse the prompt, not the answer
                return Completion("", "content_filter")
            raise await self._status_error(reply)
        try:
            return self.parse(reply.body)
        except Transient:
            status = status_inside(reply.body)
            if status is None:
                raise
            raise await self._status_error(replace(reply, status=status)) from None

    async def _reply(self, body: bytes) -> Reply:
        """Return what the endpoint answers to `body` within the time for a request, all of it. Raises as `ask`."""
        assert self._post is not None, "Endpoint is used inside `async with`"
        try:
            async with asyncio.timeout(self._section.timeout):
                return await self._post(body)
        except NoReply as error:
            raise self._connection_error(error) from error
        except TimeoutError as error:
            raise self._connection_error(NoReply("", "timeout")) from error

    def parse(self, body: bytes) -> Completion:
        """Return the completion in a body, without the key. Raises `Transient` as `parse_completion`."""
        found = parse_completion(
            body, self.url, self._section.max_tokens, shown=self.shown, note_model=self._note_model
        )
        return replace(found, text=self._redact.answer(found.text), finish_reason=self.shown(found.finish_reason))

    def _note_model(self, name: str) -> None:
        """Say aloud, once, where another model answers than was asked for: dated and longer names are the same one."""
        asked = (self._section.model or "").rpartition("/")[2].lower()
        if name in self._models or len(self._models) >= _MOST_MODELS:
            return
        self._models.add(name)
        if asked not in name.lower():
            log.warning(f"{self.url}: asked for the model {self._section.model!r}, {self.shown(name)!r} answers.")

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return what a request says."""
        section = self._section
        return {
            "model": section.model, "messages": messages, "temperature": section.temperature,
            "max_tokens": section.max_tokens, "seed": seed,
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """Yield the client, for one call that is no chat completion; it is not sent again.

        What it raises is raised as `ask` raises it.
        """
        import openai

        assert self._client is not None, "Endpoint is used inside `async with`"
        try:
            async with asyncio.timeout(_CALL * self._section.timeout):
                yield self._client
        except openai.APIStatusError as error:
            answer = error.response
            reply = Reply(answer.status_code, answer.headers, answer.content)
            raise await self._status_error(reply, model=False) from error
        except openai.APIConnectionError as error:
            raise self._connection_error(NoReply.behind(error)) from error
        except TimeoutError as error:
            raise self._connection_error(NoReply("", "timeout")) from error
        except (openai.OpenAIError, ValueError, KeyError, TypeError, RecursionError) as error:
            told = f"{self.url}: the answer cannot be read ({type(error).__name__}: {self.shown(error)})."
            raise Transient(told, kind="malformed") from error

    def row_error(self, status: int | None, error: object, body: bytes) -> EndpointError:
        """Return what a row of a batch's result that is no answer means."""
        said = self.shown(error.get("message") or error if isinstance(error, dict) else error_of(body)[0])
        told = f"{self.url}: a request of a batch was answered {status} ({said})."
        if status is None or status in (*_OVERLOADED, *_RETRIED) or status >= 500:
            return Transient(told, kind="server error")
        return EndpointError(told)

    def _connection_error(self, error: NoReply) -> EndpointError:
        """Return what a request without an answer means."""
        lost = Usage() if error.begun else None
        if error.kind == "timeout":
            told = f"{self.url}: no whole answer within {self._section.timeout:g} s."
            return Transient(told, kind="timeout", lost=Usage())
        said = self.shown(error)
        if error.kind == "too long":
            return Transient(f"{self.url}: the answer is not read: {said}.", kind="malformed", lost=lost)
        if error.kind == "tls":
            return EndpointError(
                f"{self.url}: no secure connection ({said}). Check base_url (http or https?) and the endpoint's "
                "certificate; the environment variable SSL_CERT_FILE may name one more authority to trust.",
                fatal=True,
            )
        if error.begun:
            return Transient(f"{self.url}: the connection broke in the answer ({said}).", kind="connection", lost=lost)
        return Transient(f"{self.url}: no connection ({said}). Is the endpoint running?", kind="connection")

    async def _status_error(self, reply: Reply, *, model: bool = True) -> EndpointError:
        """Return what an answer other than 200 means; with `model`, to a request that named one."""
        status, (message, code) = reply.status, error_of(reply.body)
        said = self.shown(message)
        fatal = await self._fatal(reply, code, said, model=model)
        if fatal is not None:
            return EndpointError(f"{self.url}: {fatal}", fatal=True)
        told, pause = f"{self.url}: answered {status} ({said}).", retry_after(reply.headers)
        if status in _OVERLOADED:
            asked = f" It asks to wait {pause:,.0f} s." if pause else ""
            return Transient(f"{told}{asked}", kind="overload", retry_after=pause)
        if status == _GATEWAY:
            return Transient(told, kind="connection", retry_after=pause)
        if status in _RETRIED or status >= 500:
            return Transient(told, kind="server error", retry_after=pause)
        return EndpointError(told)

    async def _fatal(self, reply: Reply, code: str, said: str, *, model: bool) -> str | None:
        """Return what to say of an answer after which every request would fail, None of another."""
        status = reply.status
        if status in (401, 403):
            variable = self._section.api_key_env
            return f"the key is refused ({status}: {said}). Put a valid one in the environment variable {variable}."
        if status == 404:
            if model:
                return await self._missing_model(said)
            return f"answered 404 ({said}). If it has no batches: augment.generator.batch=false asks without."
        if status == 402 or code == "insufficient_quota":
            return (
                f"the account is out of credit ({status}: {said}). Top it up, then run again: what is stored is kept."
            )
        if 300 <= status < 400:
            place = self.shown(reply.headers.get("location", "nowhere"))
            return f"answered {status}: it sends requests on to {place}. If that is right, make it base_url."
        return None

    async def _missing_model(self, said: str) -> str:
        """Return what to say of a 404: the models on offer where /models tells, else that the URL may be wrong."""
        import openai

        assert self._client is not None
        try:
            async with asyncio.timeout(self._section.timeout):
                raw = await self._client.models.with_raw_response.list()
            offered = [self.shown(model["id"]) for model in json.loads(raw.http_response.content)["data"]]
        except (openai.OpenAIError, ValueError, KeyError, TypeError, RecursionError, TimeoutError):
            hint = "" if urlsplit(self.url).path.rstrip("/").endswith("/v1") else " Most base_urls end in /v1."
            return f"answered 404 ({said}). Check base_url and model.{hint}"
        model = self._section.model or ""
        near = difflib.get_close_matches(model, offered, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        more = f" and {len(offered) - 10} more" if len(offered) > 10 else ""
        return f"no model {model!r} (404: {said}). It offers {', '.join(offered[:10]) or 'none'}{more}.{hint}"

    def shown(self, text: object) -> str:
        """Return text of the endpoint fit to print: one line, short, no control characters, never the key."""
        return printable(self._redact.message(str(text)))


def _api_key(variable: str, url: str) -> str:
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise EndpointError(
            f"{url}: the environment variable {variable} holds a character that no key has (a line break, a quotation "
            "mark of a word processor?). Set it again.",
            fatal=True,
        )
    if key:
        if urlsplit(url).scheme == "http" and not is_loopback(url):
            log.warning(
                f"{url}: the key in {variable} travels unencrypted. Use https, unless the network is yours alone."
            )
        return key
    if is_loopback(url):
        return ""
    raise EndpointError(
        f"{url}: the environment variable {variable} is not set. Put the endpoint's key in it "
        "(or name another variable with augment.generator.api_key_env).",
        fatal=True,
    )


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
