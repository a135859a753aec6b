"""Any OpenAI-compatible endpoint, one request at a time, with every fault named and sorted into its kind."""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinject.augment.generators.faults import Transient
from kinject.augment.generators.redact import Redactor
from kinject.augment.generators.wire import NoReply, Post, Reply, has_proxy, open_client, straight, through_client
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    import openai

DEFAULT_URL = "https://api.openai.com/v1"
_OVERLOADED = (429, 503, 529)
_RETRIED = (408, 409, 425, 500, 502, 504)
_N_RETRIES = 6
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\u2027\u202f-\ud7ff\ue000-\ufffd]+")


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
        assert self._post is not None, "Endpoint is used inside `async with`"
        try:
            reply = await self._post(json.dumps(self.body(messages, seed)).encode())
        except NoReply as error:
            raise self._connection_error(error) from error
        if 200 <= reply.status < 300:
            return self.completion(reply.body)
        raise await self._status_error(reply)

    def completion(self, body: bytes) -> Completion:
        """Return the completion in a response body, without the key. Raises `Transient` as `parse_completion`."""
        found = parse_completion(body, self.url)
        return replace(found, text=self._redact.answer(found.text), finish_reason=self.shown(found.finish_reason))

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return what a request says."""
        section = self._section
        return {
            "model": section.model, "messages": messages, "temperature": section.temperature,
            "max_tokens": section.max_tokens, "seed": seed,
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """Yield the client, with retries of its own, for a few calls that are no chat completions.

        What they raise is raised as `ask` raises it.
        """
        import openai

        assert self._client is not None, "Endpoint is used inside `async with`"
        try:
            yield self._client.with_options(max_retries=_N_RETRIES)
        except openai.APIStatusError as error:
            answer = error.response
            reply = Reply(answer.status_code, answer.headers, answer.content)
            raise await self._status_error(reply) from error
        except openai.APIConnectionError as error:
            raise self._connection_error(NoReply.behind(error)) from error

    def row_error(self, status: int | None, error: object, body: bytes) -> EndpointError:
        """Return what a row of a batch's result that is no answer means."""
        said = self.shown(str(error.get("message") or error) if isinstance(error, dict) else _error_of(body)[0])
        told = f"{self.url}: a request of a batch was answered {status} ({said})."
        if status is None or status in (*_OVERLOADED, *_RETRIED) or status >= 500:
            return Transient(told, kind="server error")
        return EndpointError(told)

    def _connection_error(self, error: NoReply) -> Transient:
        """Return what a request without an answer means."""
        if error.timeout:
            return Transient(f"{self.url}: no answer within {self._section.timeout:g} s.", kind="timeout")
        said = self.shown(str(error))
        return Transient(f"{self.url}: no connection ({said}). Is the endpoint running?", kind="connection")

    async def _status_error(self, reply: Reply) -> EndpointError:
        """Return what an answer other than 200 means."""
        status, (message, code) = reply.status, _error_of(reply.body)
        said = self.shown(message)
        if status in (401, 403):
            return EndpointError(
                f"{self.url}: the key is refused ({status}: {said}). "
                f"Put a valid one in the environment variable {self._section.api_key_env}.",
                fatal=True,
            )
        if status == 404:
            return EndpointError(await self._missing_model(said), fatal=True)
        if status == 402 or code == "insufficient_quota":
            return EndpointError(
                f"{self.url}: the account is out of credit ({status}: {said}). "
                "Top it up, then run again: what is stored is kept.",
                fatal=True,
            )
        told = f"{self.url}: answered {status} ({said})."
        if status in _OVERLOADED:
            return Transient(told, kind="overload", retry_after=_retry_after(reply.headers))
        if status in _RETRIED or status >= 500:
            return Transient(told, kind="server error", retry_after=_retry_after(reply.headers))
        return EndpointError(told)

    async def _missing_model(self, said: str) -> str:
        """Return the message for a 404: the models on offer where /models tells, else that the URL may be wrong."""
        import openai

        assert self._client is not None
        try:
            raw = await self._client.models.with_raw_response.list()
            offered = [self.shown(str(model["id"])) for model in json.loads(raw.http_response.content)["data"]]
        except (openai.OpenAIError, ValueError, KeyError, TypeError):
            hint = "" if urlsplit(self.url).path.rstrip("/").endswith("/v1") else " Most base_urls end in /v1."
            return f"{self.url}: answered 404 ({said}). Check base_url and model.{hint}"
        model = self._section.model or ""
        near = difflib.get_close_matches(model, offered, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        more = f" and {len(offered) - 10} more" if len(offered) > 10 else ""
        return (
            f"{self.url}: no model {model!r} (404: {said}). It offers {', '.join(offered[:10]) or 'none'}{more}.{hint}"
        )

    def shown(self, text: str) -> str:
        """Return text of the endpoint's fit to print: one line, short, no control characters, never the key."""
        line = _UNPRINTABLE.sub(" ", self._redact.message(text)).strip()
        return line if len(line) <= 200 else line[:197] + "..."


def parse_completion(body: bytes, url: str) -> Completion:
    """Return the completion in a response body. Raises `Transient` where the body is not a chat completion."""
    try:
        value = json.loads(body)
        choices = value["choices"]
        usage = value.get("usage") or {}
        used = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        if not choices:
            return Completion("", "no choices", used)
        message, reason = choices[0].get("message") or {}, choices[0].get("finish_reason") or ""
        text = message.get("content")
        if text is None and message.get("refusal"):
            reason = "content_filter"
        if not isinstance(text, str | None) or not isinstance(reason, str):
            raise TypeError(f"content is {type(text).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Transient(
            f"{url}: the answer is not a chat completion ({type(error).__name__}).", kind="malformed"
        ) from error
    return Completion(_utf8(text or ""), reason, used)


def _utf8(text: str) -> str:
    """Return `text` with half surrogate pairs and NULs, which no file can hold, as U+FFFD."""
    return (
        text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
        if not text.isascii() or "\0" in text
        else text
    )


def _api_key(variable: str, url: str) -> str:
    key = os.environ.get(variable, "").strip()
    if key:
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


def _retry_after(headers: Any) -> float | None:
    """Return the seconds that a Retry-After header asks for (number or date), or None."""
    from email.utils import parsedate_to_datetime
    from time import time

    given = headers.get("retry-after-ms")
    try:
        if given is not None:
            return max(float(given) / 1000, 0.0)
        given = headers.get("retry-after", "")
        return max(float(given), 0.0)
    except ValueError:
        try:
            return max(parsedate_to_datetime(given).timestamp() - time(), 0.0)
        except (ValueError, TypeError):
            return None


def _error_of(body: bytes) -> tuple[str, str]:
    """Return (message, code) of an error body in OpenAI's form, or (the body, "")."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        return (
            (error, "")
            if isinstance(error, str)
            else (str(error.get("message") or value), str(error.get("code") or ""))
        )
    except (ValueError, AttributeError, RecursionError):
        return body[:10_000].decode("utf-8", "replace") or "no body", ""
