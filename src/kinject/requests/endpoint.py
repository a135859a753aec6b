"""One request to an OpenAI-compatible endpoint: its answer, or its error by kind. Answers are untrusted."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.requests.chat import Parameters, read_usage, split_thinking, with_thinking
from kinject.requests.generator import Structure, Transient
from kinject.requests.wire import (
    NoReply,
    Post,
    Reply,
    aiohttp_poster,
    client_poster,
    has_aiohttp,
    has_proxy,
    open_client,
    request_headers,
)
from kinject.secrets import SHOWN, known_secrets, secret_filter
from kinject.types import Completion, Message, Usage
from kinject.web import is_loopback

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

DEFAULT_URL = "https://api.openai.com/v1"
_DEFAULT_VARIABLE = "OPENAI_API_KEY"
_OVERLOADED = (429, 503, 529)
_RETRIED = (408, 409, 425)
_BAD_REQUEST = (400, 422)
_GATEWAY = 502
"""From a gateway that cannot reach the endpoint: counts as no connection."""
_MOST_MODELS = 20
_FILE_TIMEOUTS = 20
"""Timeout of a call for files or batches, in timeouts of a request."""


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
        self._client: openai.AsyncOpenAI | None = None
        self._post: Post  # set by `__aenter__`
        self._parameters = Parameters(section, self.url, self.shown)
        self._models: set[str] = set()
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Endpoint:
        local, headers = is_loopback(self.url), request_headers(self._key)
        url = f"{self.url.rstrip('/')}/{self.route}"
        if has_aiohttp() and (local or not has_proxy(url)):
            poster = aiohttp_poster(url, headers, self.section.timeout, local=local)
            self._post = await self._open.enter_async_context(poster)
        else:
            await self._api()
            self._post = client_poster(self._http, url, headers)
        return self

    async def _api(self) -> openai.AsyncOpenAI:
        """Return the client of the openai package, opened at its first use: its import takes a second."""
        if self._client is None:
            import openai

            local = is_loopback(self.url)
            self._http = open_client(self.section.timeout, self.section.concurrency, local=local)
            # The sender retries: its retries keep the rate limits, are counted, and stop with the run.
            self._client = openai.AsyncOpenAI(
                api_key=self._key or "none", base_url=self.url, max_retries=0, http_client=self._http
            )
            await self._open.enter_async_context(self._client)
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def complete(self, messages: list[Message], seed: int, structure: Structure | None = None) -> Completion:
        """Return the endpoint's answer, unchecked.

        Raises `Transient` if a retry may help, `EndpointError` if it will not (fatal: nor for any other request).
        """
        bodies: list[dict[str, Any]] = []

        def make_body() -> dict[str, Any]:
            bodies.append(self._parameters.body(messages, seed, structure))
            return bodies[-1]

        completion = await self.exchange(make_body, self.parse)
        if structure and completion.finish_reason in ("stop", ""):
            self._parameters.check_structure(bodies[-1], completion.text)
        return completion

    async def exchange(
        self, make_body: Callable[[], dict[str, Any]], read: Callable[[bytes], Completion], *, learns: bool = True
    ) -> Completion:
        """Return the result of `read` on a reply; if it `learns`, a body with a refused parameter is made again.

        Raises as `ask`.
        """
        while True:
            body = make_body()
            reply = await self._post_body(json.dumps(body).encode())
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

    async def _post_body(self, body: bytes) -> Reply:
        """Return the whole reply to `body` within the timeout of a request. Raises as `ask`."""
        try:
            async with asyncio.timeout(self.section.timeout):
                return await self._post(body)
        except NoReply as error:
            raise self._connection_error(error) from error
        except TimeoutError as error:
            raise self._connection_error(NoReply("", "timeout")) from error

    def parse(self, body: bytes) -> Completion:
        """Return the completion in a body, without secrets (`clean`). Raises `Transient` as `parse_completion`."""
        answer = parse_completion(body, self.url, self.section.max_tokens, shown=self.shown, on_model=self.check_model)
        return self.clean(answer)

    def clean(self, answer: Completion) -> Completion:
        """Return an answer without secrets: one that held a part of one has finish_reason ``secret``."""
        text, thinking = self._secrets.redact(answer.text), self._secrets.redact(answer.thinking)
        if text is not answer.text:
            return replace(answer, text=text, thinking=thinking, finish_reason="secret")
        if thinking is not answer.thinking:
            answer = replace(answer, thinking=thinking)
        reason = self.shown(answer.finish_reason)
        return answer if reason == answer.finish_reason else replace(answer, finish_reason=reason)

    def check_model(self, name: str) -> None:
        """Log a warning, once, if another model answers than the recipe's. Longer names, such as with a date, are the same."""
        requested = (self.section.model or "").rpartition("/")[2].lower()
        if name in self._models or len(self._models) >= _MOST_MODELS:
            return
        self._models.add(name)
        if requested not in name.lower():
            log.warning(f"{self.url}: requested the model {self.section.model!r}, {self.shown(name)!r} answers.")

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return the body of a request."""
        return self._parameters.body(messages, seed)

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """Yield the client for one call that is no chat completion, without a retry. Errors are those of `ask`."""
        import openai

        try:
            async with asyncio.timeout(_FILE_TIMEOUTS * self.section.timeout):
                yield await self._api()
        except openai.APIStatusError as error:
            answer = error.response
            reply = Reply(answer.status_code, answer.headers, answer.content)
            raise await self.status_error(reply, model=False) from error
        except NoReply as error:
            raise self._connection_error(error) from error
        except openai.APIConnectionError as error:
            raise self._connection_error(NoReply.from_exception(error)) from error
        except TimeoutError as error:
            raise self._connection_error(NoReply("", "timeout")) from error
        except (openai.OpenAIError, ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{self.url}: the answer cannot be read ({type(error).__name__}: {self.shown(error)})."
            raise Transient(message, kind="malformed") from error

    def row_error(self, status: int | None, error: object, body: bytes) -> EndpointError:
        """Return the error for a row of a batch's results that is no answer."""
        reason = self.shown(error.get("message") or error if isinstance(error, dict) else error_of(body)[0])
        message = f"{self.url}: a request of a batch was answered {status} ({reason})."
        if status in _BAD_REQUEST and self._parameters.learn(self.body((), 0), body):
            return Transient(message, kind="server error")  # the next batch has other parameters
        if status is None or status in (*_OVERLOADED, *_RETRIED) or status >= 500:
            return Transient(message, kind="server error")
        return EndpointError(message)

    def _connection_error(self, error: NoReply) -> EndpointError:
        """Return the error of a request without a whole answer."""
        lost = Usage() if error.begun else None
        if error.kind == "timeout":
            message = f"{self.url}: no whole answer within {self.section.timeout:g} s."
            return Transient(message, kind="timeout", lost=Usage())
        reason = self.shown(error)
        if error.kind == "too long":
            return Transient(f"{self.url}: the answer is not read: {reason}.", kind="malformed", lost=lost)
        if error.kind == "tls":
            return EndpointError(
                f"{self.url}: no secure connection ({reason}). Check base_url (http or https?) and the endpoint's "
                "certificate; the environment variable SSL_CERT_FILE may name one more authority to trust.",
                fatal=True,
            )
        if error.begun:
            return Transient(
                f"{self.url}: the connection broke during the answer ({reason}).", kind="connection", lost=lost
            )
        return Transient(f"{self.url}: no connection ({reason}). Is the endpoint running?", kind="connection")

    async def status_error(self, reply: Reply, *, model: bool = True) -> EndpointError:
        """Return the error of a reply other than 200; `model`: the request named a model."""
        status, (text, code) = reply.status, error_of(reply.body)
        reason = self.shown(text)
        fatal = await self._fatal_message(reply, code, reason, model=model)
        if fatal is not None:
            return EndpointError(f"{self.url}: {fatal}", fatal=True)
        message, pause = f"{self.url}: answered {status} ({reason}).", retry_after(reply.headers)
        if status in _OVERLOADED:
            wait = f" It asks to wait {min(pause, 1e9):,.0f} s." if pause else ""
            return Transient(f"{message}{wait}", kind="overload", retry_after=pause)
        if status == _GATEWAY:
            return Transient(message, kind="connection", retry_after=pause)
        if status in _RETRIED or status >= 500:
            return Transient(message, kind="server error", retry_after=pause)
        return EndpointError(message)

    async def _fatal_message(self, reply: Reply, code: str, reason: str, *, model: bool) -> str | None:
        """Return the message about a reply after which every request would fail, None for another reply."""
        status = reply.status
        if status in (401, 403):
            variable = self.section.api_key_env
            if not self._key:
                return f"it wants a key ({status}: {reason}). Put one in the environment variable {variable}."
            return f"the key is refused ({status}: {reason}). Put a valid one in the environment variable {variable}."
        if status == 404:
            if model:
                return await self._missing_model_message(reason)
            return f"answered 404 ({reason}). If it has no batches: augment.generator.batch=false."
        if status == 402 or code == "insufficient_quota":
            return f"the account is out of credit ({status}: {reason}). Top it up, then run again: stored answers are kept."
        if 300 <= status < 400:
            target = self.shown(reply.headers.get("location", "nowhere"))
            return f"answered {status}: it redirects requests to {target}. If that is correct, set it as base_url."
        return None

    async def _missing_model_message(self, reason: str) -> str:
        """Return the message about a 404: the endpoint's models, or that the URL may be wrong where it lists none."""
        import openai

        try:
            async with asyncio.timeout(self.section.timeout):
                raw = await (await self._api()).models.with_raw_response.list()
            offered = [self.shown(model["id"]) for model in json.loads(raw.http_response.content)["data"]]
        except (NoReply, openai.OpenAIError, ValueError, KeyError, TypeError, RecursionError, TimeoutError):
            hint = "" if urlsplit(self.url).path.rstrip("/").endswith("/v1") else " Most base_urls end in /v1."
            return f"answered 404 ({reason}). Check base_url and model.{hint}"
        model = self.section.model or ""
        near = difflib.get_close_matches(model, offered, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        more = f" and {len(offered) - 10} more" if len(offered) > 10 else ""
        return f"no model {model!r} (404: {reason}). It offers {', '.join(offered[:10]) or 'none'}{more}.{hint}"

    def shown(self, text: object) -> str:
        """Return text of the endpoint made safe to print: one short line, no control characters, no secrets."""
        line = _USER.sub(SHOWN, str(text)[:_LONGEST_MESSAGE])
        return printable(self._secrets.redact(line.replace(self._key, SHOWN) if self._key else line))


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
    if is_loopback(url) or (
        url != DEFAULT_URL and variable == _DEFAULT_VARIABLE
    ):  # a server of one's own may want none
        return ""
    raise EndpointError(
        f"{url}: the environment variable {variable} is not set. Put the endpoint's key in it "
        "(or name another variable with api_key_env).",
        fatal=True,
    )


_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)")
"""A name and password in a URL, as in a proxy's error."""
_LONGEST_MESSAGE = 10_000
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\u2027\u202f-\ud7ff\ue000-\ufffd]+")
_CHARACTERS_OF_A_TOKEN = 128
"""Maximum length of a token: no vocabulary in use has longer ones."""
_LONGEST_REASON = 64


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
    value, used = None, Usage()
    try:
        value = json.loads(body)
        used = read_usage(value.get("usage"))
        choices = value.get("choices") if value.get("error") else value["choices"]
        first = choices[0] if choices else {}
        message, reason = first.get("message") or {}, first.get("finish_reason")
        thinking, text = split_thinking(_text(message.get("content")))
        apart = message.get("reasoning_content") or message.get("reasoning")  # of vLLM, DeepSeek, OpenRouter and others
        thinking = apart if isinstance(apart, str) else thinking
        if not text and (value.get("error") or first.get("error")):
            raise _ErrorBody("error")
        if not choices:
            return Completion("", "no choices", used)
        if not text and message.get("refusal"):
            reason = "content_filter"
        if isinstance(value.get("model"), str):
            on_model(value["model"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        is_error = isinstance(value, dict) and (bool(value.get("error")) or isinstance(error, _ErrorBody))
        begun = body.lstrip()[:1] == b"{" and not is_error  # a proxy's page costs nothing
        raise Transient(
            _error_message(url, body, shown) if is_error else _malformed_message(url, body, error, shown),
            kind="malformed", lost=used if begun else None,
        ) from error  # fmt: skip
    most = max_tokens * _CHARACTERS_OF_A_TOKEN
    if len(text) > most:
        text, reason = text[:most], "length"
    used = with_thinking(used, len(thinking), len(text))
    return Completion(_utf8(text), _finish_reason(reason), used, _utf8(thinking[:most]))


class _ErrorBody(ValueError):
    """A body with status 200 holds an error instead of an answer."""


def _error_message(url: str, body: bytes, shown: Callable[[str], str]) -> str:
    return f"{url}: answered 200 with an error ({shown(error_of(body)[0])})."


def _malformed_message(url: str, body: bytes, error: Exception, shown: Callable[[str], str]) -> str:
    """Return the message about a body that is no completion, with its first characters where it is not JSON."""
    if body.lstrip()[:1] in (b"{", b"["):
        start = ""
    else:
        start = f", it begins {shown(body[:10_000].decode('utf-8', 'replace'))[:60]!r}" if body else ", it is empty"
    return f"{url}: the answer is not a chat completion ({type(error).__name__}{start}). Is base_url correct?"


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
    """Return `text` with half surrogate pairs and NULs, which no file can hold, as U+FFFD."""
    return (
        text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
        if not text.isascii() or "\0" in text
        else text
    )


def printable(text: str) -> str:
    """Return untrusted text as one line of at most 200 characters without control characters."""
    line = _UNPRINTABLE.sub(" ", text).strip()
    return line if len(line) <= 200 else line[:197] + "..."


def error_of(body: bytes) -> tuple[str, str]:
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


_STATUS_FIELDS = ("code", "status", "status_code", "http_status", "type")
_STATUS_WORDS = (
    (re.compile(r"rate.?limit|too.?many|exhausted|throttl", re.IGNORECASE), 429),
    (re.compile(r"overload|unavailable", re.IGNORECASE), 503),
    (re.compile(r"insufficient.?quota", re.IGNORECASE), 402),
    (re.compile(r"invalid.?api.?key|authentication", re.IGNORECASE), 401),
)


def status_in_body(body: bytes) -> int | None:
    """Return the status inside an error body (gateways answer 200 with a 429 inside), None without one.

    It is a number from 400 to 599, or a word such as rate_limit_exceeded, in the body, its error or its first choice.
    """
    try:
        value = json.loads(body)
        choices = value.get("choices")
        candidates = [value.get("error"), choices[0].get("error") if choices else None, value]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    for candidate in candidates:
        values = [candidate] if isinstance(candidate, str) else []
        if isinstance(candidate, dict):
            values = [candidate[name] for name in _STATUS_FIELDS if isinstance(candidate.get(name), str | int)]
        for text in map(str, values):
            number = int(text) if re.fullmatch("[45][0-9][0-9]", text) else None
            number = number or next((status for words, status in _STATUS_WORDS if words.search(text[:1000])), None)
            if number is not None:
                return number
    return None


_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?\Z")


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
