"""One OpenAI-compatible endpoint, through the openai client: its answer to a request, or its error
by kind.

All that it says is untrusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinject.errors import EndpointError
from kinject.llm import JsonValue, Transient, read_usage
from kinject.llm.error_replies import ODD_BODY, ErrorReply, error_in, error_inside, read_error
from kinject.llm.thinking import split_thinking, with_thinking
from kinject.recipe import GeneratorSection
from kinject.recipe.sections import LIMIT_NAMES
from kinject.secrets import SHOWN, known_secrets, secret_filter
from kinject.types import Completion, Message

if TYPE_CHECKING:
    import httpx2
    import openai

log = logging.getLogger(__name__)

DEFAULT_URL = "https://api.openai.com/v1"
MOST_BYTES = 64 * 2**20
"""Longest body that is read, decompressed. A longer one is dropped and its connection closed."""
_DEFAULT_VARIABLE = "OPENAI_API_KEY"
_KINDS = {
    429: "overload",
    503: "overload",
    529: "overload",
    408: "server error",
    409: "server error",
    425: "server error",
    502: "connection",
}
"""Status -> kind of a fault that may pass, as every other from 500 on. 502: a gateway that does not
reach the endpoint."""
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
_REASONS = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "complete": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "safety": "content_filter",
    "recitation": "content_filter",
    "blocklist": "content_filter",
    "prohibited_content": "content_filter",
    "spii": "content_filter",
}
"""Reason of another server or gateway, in lower case -> OpenAI's word for it."""
_BROKEN_OFF = ("error", "abort", "insufficient_system_resource")
"""Reasons of OpenRouter and Mistral, of vLLM and SGLang, and of DeepSeek for an answer whose host
failed: its text is no answer."""
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def _finish_reason(value: JsonValue) -> str:
    """Return a finish_reason as a short text, in OpenAI's words if they have it; "" without one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        value = json.dumps(value)
    # Google adds its own word: "content_filter: RECITATION".
    reason = printable(value)[:_LONGEST_REASON].partition(": ")[0]
    return _REASONS.get(reason.lower(), reason)


def _utf8(text: str) -> str:
    """Return `text` with half surrogate pairs and NULs, which no file can hold, replaced."""
    # SQLite raises for half a pair: a finish_reason with one made a run wait for ever.
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def printable(text: str) -> str:
    """Return untrusted text as one line of at most 200 characters without control characters."""
    line = _UNPRINTABLE.sub(" ", text).strip()
    if len(line) > 200:
        return line[:197] + "..."
    return line


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a retry-after-ms or Retry-After header, None without a number."""
    # OpenAI and Azure send both, the second one rounded up to whole seconds.
    exact = headers.get("retry-after-ms", "").strip()
    if _NUMBER.fullmatch(exact):
        return float(exact) / 1000
    value = headers.get("retry-after", "").strip()
    # An HTTP date would be compared with this machine's clock, which may be wrong.
    if not _NUMBER.fullmatch(value):
        return None
    return float(value)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A message of an endpoint."""

    text: str
    thinking: str
    is_refused: bool


def _read_message(message: Mapping[str, Any]) -> _Answer:
    """Return the answer in a message. Raises one of `ODD_BODY` for another form."""
    content = message.get("content") or ""
    # Fields of vLLM and DeepSeek, and of OpenRouter.
    apart = message.get("reasoning_content") or message.get("reasoning")
    refusal = message.get("refusal")
    if isinstance(content, list):
        apart = apart or _join_parts(content, "thinking")  # Mistral
        refusal = refusal or _join_parts(content, "refusal")
        content = _join_parts(content, "text")
    thinking, text = split_thinking(content)
    if apart and isinstance(apart, str):
        thinking = apart
    return _Answer(text, thinking, bool(refusal))


def _join_parts(parts: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the texts of the parts of a `kind`; those of other kinds are skipped."""
    texts: list[str] = []
    for part in parts:
        if part.get("type") != kind:
            continue
        text = part.get(kind) or ""
        if isinstance(text, list):  # thinking may be a list of parts itself
            text = _join_parts(text, "text")
        texts.append(text)
    return "".join(texts)


class Endpoint:
    """One endpoint and model, open inside ``async with``."""

    route = "chat/completions"

    def __init__(self, section: GeneratorSection) -> None:
        """Read the key. Raises `EndpointError` (fatal), which names the environment variable, where
        it is missing."""
        self.section = section
        self.url = section.address or DEFAULT_URL
        self._key = _api_key(section.api_key_env, self.url)
        others = known_secrets([section.api_key_env]).values()
        self._secrets = secret_filter(tuple(dict.fromkeys([self._key, *others])))
        self._client: openai.AsyncOpenAI  # set by `__aenter__`
        self._warned = False
        # The name of the limit that the server takes, "" until an answer shows it.
        self._settled_limit = ""
        extra = section.extra_body or {}
        named = [extra[name] for name in LIMIT_NAMES if name in extra]
        self._recipe_names_limit = bool(named)
        # Of an answer: what the limit that is sent allows; without one, all that is read.
        self._most_characters = MOST_BYTES
        limits = [limit for limit in named or [section.max_tokens] if isinstance(limit, int)]
        if limits:
            self._most_characters = max(limits) * _CHARACTERS_OF_A_TOKEN

    async def __aenter__(self) -> Endpoint:
        import openai

        # The sender retries: its retries keep the budget, are counted, and stop with the run.
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.url,
            max_retries=0,
            http_client=self._open_http(),
        )
        return self

    def _open_http(self) -> httpx2.AsyncClient:
        import httpx2
        import openai

        section = self.section
        return openai.DefaultAioHttpClient(
            # None would be aiohttp's default of 100, not "no limit".
            limits=httpx2.Limits(
                max_connections=section.concurrency + _SPARE,
                max_keepalive_connections=section.concurrency,
            ),
            timeout=httpx2.Timeout(section.timeout, connect=min(section.timeout, _CONNECT)),
            # A proxy of the environment cannot reach this machine's own servers.
            trust_env=not is_loopback(self.url),
            follow_redirects=False,  # documents and key go only to the endpoint of the recipe
            event_hooks={"response": [_read_bounded]},
        )

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the endpoint's answer, unchecked.

        Raises `Transient` if a retry may help, `EndpointError` if it will not (fatal: nor for any
        other request).
        """
        return await self.exchange(self.body(messages, seed), self.parse)

    async def models(self) -> list[str]:
        """Return the names of the models that the endpoint lists. Raises as `complete`."""
        import openai

        async with self._limited():
            try:
                raw = await self._client.models.with_raw_response.list()
                return [str(row["id"]) for row in json.loads(raw.http_response.content)["data"]]
            except openai.APIStatusError as error:
                reason = f"answered {error.status_code}"
            except ODD_BODY:
                reason = "its answer is no list of them"
        raise EndpointError(f"{self.url}: lists no models ({reason}).", fatal=True)

    async def exchange(
        self, body: Mapping[str, Any], read: Callable[[bytes], Completion]
    ) -> Completion:
        """Return the result of `read` on the reply to a `body`. Raises as `complete`."""
        reply = await self._post_bounded(body)
        if 200 <= reply.status_code < 300:
            try:
                return read(reply.content)
            except Transient:
                inside = error_inside(reply.content)
                if inside is None:
                    raise
            error = inside
        else:
            error = read_error(reply.status_code, reply.content)
        # Some endpoints refuse the prompt, not the answer.
        if error.is_filtered:
            return Completion("", "content_filter")
        raise await self.reported_error(error, reply.headers)

    @property
    def limit(self) -> str:
        """The name under which the limit of an answer is sent."""
        return self._settled_limit or LIMIT_NAMES[0]

    async def _post_bounded(self, body: Mapping[str, Any]) -> httpx2.Response:
        """Return the reply to `body`, with its limit under the other name if the server refuses the
        first; the server's answer to one decides for all later requests."""
        reply = await self._post(body)
        if self._recipe_names_limit:
            return reply
        first, other = LIMIT_NAMES
        if other in body:
            first, other = other, first
        if 200 <= reply.status_code < 300:
            self._settled_limit = self._settled_limit or first
            return reply
        error = read_error(reply.status_code, reply.content)
        # A request that was in flight when another one decided is sent again, too.
        if self._settled_limit == first or first not in body or not error.refuses(first):
            return reply
        renamed = dict(body)
        renamed[other] = renamed.pop(first)
        second = await self._post(renamed)
        if read_error(second.status_code, second.content).refuses(other):
            self._settled_limit = first  # it refuses both names: its first message is the true one
            return reply
        if second.status_code < 300 or second.status_code in (400, 422):
            self._settled_limit = other
        return second

    async def _post(self, body: Mapping[str, Any]) -> httpx2.Response:
        """Return the whole reply to `body`, whatever its status. Raises as `complete`."""
        import httpx2
        import openai

        content = json.dumps(body).encode()
        async with self._limited():
            try:
                # Not `chat.completions.create`: it reads no body that differs from OpenAI's, and
                # knows no other parameters.
                return await self._client.post(
                    f"/{self.route}",
                    content=content,
                    cast_to=httpx2.Response,
                    options={"headers": {"Content-Type": "application/json"}},
                )
            except openai.APIStatusError as error:
                return error.response

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Limit the block to the timeout of a request, and raise errors of the connection by their
        kind."""
        import aiohttp
        import openai

        try:
            # A limit of the whole request: one for each read lets a body of one byte a second run
            # for ever.
            async with asyncio.timeout(self.section.timeout):
                yield
        # The client passes on what its transport does not know, as an answer that is no HTTP.
        except (
            openai.APIConnectionError,
            aiohttp.ClientError,
            _Interrupted,
            TimeoutError,
        ) as error:
            raise self._connection_error(error) from error

    def parse(self, body: bytes) -> Completion:
        """Return the completion in a response body, without secrets (`clean`). Raises `Transient`
        for another body.

        A text longer than the limit that is sent allows is cut, with finish_reason ``length``.
        Usage that is missing or cannot be is 0.
        """
        try:
            value = json.loads(body)
            used = read_usage(value.get("usage"))
            choices = value.get("choices") if value.get("error") else value["choices"]
            first: dict[str, Any] = {}
            if choices:
                first = choices[0]
            answer = _read_message(first.get("message") or {})
            is_error = value.get("error") or first.get("error")
            if not choices:
                is_error = is_error or error_in(200, value).is_out_of_credit
        except ODD_BODY as error:
            # A proxy's page costs nothing; JSON that is cut or has no choices may be an answer that
            # was paid.
            begun = body.lstrip()[:1] == b"{"
            raise self.malformed(body, "chat completion", error, lost=begun) from error
        if not answer.text and is_error:
            # `exchange` reads which one.
            raise Transient(f"{self.url}: answered 200 with an error.", kind="malformed")
        if not choices:
            return Completion("", "no choices", used)
        self.check_model(value.get("model"))
        text, reason = answer.text, self.finish_reason(first)
        most = self._most_characters
        if not text and answer.is_refused:
            reason = "content_filter"
        elif len(text) > most:
            text, reason = text[:most], "length"
        used = with_thinking(used, len(answer.thinking), len(text))
        thinking = answer.thinking[:most]
        return self.clean(Completion(text, reason, used, thinking))

    def finish_reason(self, choice: Mapping[str, Any]) -> str:
        """Return the finish_reason of a choice. Raises `Transient` for an answer that broke off."""
        reason = _finish_reason(choice.get("finish_reason"))
        if reason in _BROKEN_OFF:
            message = f"{self.url}: broke off its answer (finish_reason is {reason})."
            raise Transient(message, kind="server error", lost=True)
        return reason

    def malformed(self, body: bytes, kind: str, error: Exception, *, lost: bool) -> Transient:
        """Return the error of a body that is no completion of this `kind`."""
        start = self.shown(body[:1000].decode("utf-8", "replace"))[:60]
        found = f"{type(error).__name__}, it begins {start!r}"
        message = f"{self.url}: the answer is not a {kind} ({found}). Is base_url correct?"
        return Transient(message, kind="malformed", lost=lost)

    def clean(self, answer: Completion) -> Completion:
        """Return an answer that a file can hold, without secrets: one that held a part of one has
        finish_reason ``secret``."""
        written, reason = _utf8(answer.text), self.shown(answer.finish_reason)
        text = self._secrets.redact(written)
        if text != written:
            reason = "secret"
        thinking = self._secrets.redact(_utf8(answer.thinking))
        return replace(answer, text=text, thinking=thinking, finish_reason=reason)

    def check_model(self, name: JsonValue) -> None:
        """Log a warning, once, if another model answers than the recipe's. Longer names, such as
        with a date, are the same."""
        requested = (self.section.model or "").rpartition("/")[2].lower()
        if isinstance(name, str) and requested not in name.lower() and not self._warned:
            self._warned = True
            answers = f"{self.shown(name)!r} answers."
            log.warning(f"{self.url}: requested the model {self.section.model!r}, {answers}")

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return the body of a request. A parameter that `extra_body` has as null is left out."""
        section = self.section
        body: dict[str, Any] = {
            "model": section.model,
            "messages": messages,
            "temperature": section.sampling_temperature,
            "seed": seed,
            "stop": section.stop or None,
            "chat_template_kwargs": section.chat_template_kwargs or None,
        }
        if not self._recipe_names_limit:
            body[self.limit] = section.max_tokens
        body.update(section.extra_body or {})
        return {key: value for key, value in body.items() if value is not None}

    def _connection_error(self, error: BaseException) -> EndpointError:
        """Return the error of a request without a whole answer; the openai client reports most as
        its cause."""
        begun, cause = isinstance(error, _Interrupted), error
        # The client reports a refused connection as a time-out: the chain of causes has the truth.
        while not isinstance(cause.__cause__, asyncio.CancelledError | None):
            cause = cause.__cause__
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            message = f"{self.url}: no whole answer within {self.section.timeout:g} s."
            return Transient(message, kind="timeout", lost=True)
        reason = self.shown(str(cause) or type(cause).__name__)
        if isinstance(cause, _Interrupted):
            return Transient(
                f"{self.url}: the answer is not read: {reason}.", kind="malformed", lost=True
            )
        if begun:
            message = f"{self.url}: the connection broke during the answer ({reason})."
            return Transient(message, kind="connection", lost=True)
        return Transient(
            f"{self.url}: no connection ({reason}). Is the endpoint running?", kind="connection"
        )

    async def reported_error(self, error: ErrorReply, headers: Mapping[str, str]) -> EndpointError:
        """Return the error that an endpoint reports: what to do about it, and whether it may
        pass."""
        status, reason = error.status, self.shown(error.message)
        fatal = await self._fatal_message(error, headers, reason)
        if fatal:
            return EndpointError(f"{self.url}: {fatal}", fatal=True)
        if status == 200:
            message = f"{self.url}: answered 200 with an error ({reason})."
            return Transient(message, kind="malformed")
        message, pause = f"{self.url}: answered {status} ({reason}).", retry_after(headers)
        if pause is None:
            pause = error.retry_delay
        if status in _KINDS and not error.is_too_large:
            return Transient(message, kind=_KINDS[status], retry_after=pause)
        if status >= 500:
            return Transient(message, kind="server error", retry_after=pause)
        if status in (400, 422):
            message += " If it refuses a parameter, set it to null in extra_body."
        return EndpointError(message)

    async def _fatal_message(
        self, error: ErrorReply, headers: Mapping[str, str], reason: str
    ) -> str:
        """Return the message about an error after which every request would fail, "" for another
        one."""
        status, variable = error.status, self.section.api_key_env
        if error.is_out_of_credit:
            fix = "Top it up, then run again: stored answers are kept."
            return f"the account is out of credit ({status}: {reason}). {fix}"
        if error.is_refused_key or (status == 403 and not self._key):
            fault = "the key is refused" if self._key else "it wants a key"
            fix = f"Put a valid one in the environment variable {variable}."
            return f"{fault} ({status}: {reason}). {fix}"
        if status == 403:
            fix = "Where it does not say why, look at your country, your account's access to the "
            fix += f"model, and the key in the environment variable {variable}."
            return f"the request is refused ({status}: {reason}). {fix}"
        if status == 404:
            return await self._missing_model_message(reason)
        if 300 <= status < 400:
            target = self.shown(headers.get("location", "nowhere"))
            fix = "If that is correct, set it as base_url."
            return f"answered {status}: it redirects requests to {target}. {fix}"
        return ""

    async def _missing_model_message(self, reason: str) -> str:
        """Return the message about a 404: the endpoint's models, that the route is missing where
        ours is one of them, or that the URL may be wrong where it lists none."""
        import openai

        try:
            async with self._limited():
                raw = await self._client.models.with_raw_response.list()
            names = [model["id"] for model in json.loads(raw.http_response.content)["data"]]
        # Any fault of the list: the 404 is what counts.
        except (EndpointError, openai.OpenAIError, ValueError, LookupError, TypeError):
            return f"answered 404 ({reason}). Check base_url and model. Most base_urls end in /v1."
        if self.section.model in names:
            fault = f"answered 404 ({reason}), but lists the model {self.section.model!r}"
            return f"{fault}. It may not serve it by the route /{self.route}."
        offers = ", ".join(map(self.shown, names[:10])) or "none"
        if len(names) > 10:
            offers += f" and {len(names) - 10} more"
        return f"no model {self.section.model!r} (404: {reason}). It offers {offers}."

    def shown(self, text: JsonValue) -> str:
        """Return text of the endpoint made safe to print: one short line, no control characters, no
        secrets."""
        line = _USER.sub(SHOWN, str(text)[:_LONGEST_MESSAGE])
        if self._key:
            line = line.replace(self._key, SHOWN)
        return printable(self._secrets.redact(line))


class _Interrupted(Exception):
    """An answer that began and was not read to its end: its cause, or none where it is too long."""


async def _read_bounded(response: httpx2.Response) -> None:
    """Read a response before the client does, which would read it without a limit. Raises
    `_Interrupted`."""
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
    # The attribute that httpx2's own aread() sets and its callers then find.
    response._content = b"".join(parts)


def _api_key(variable: str, url: str) -> str:
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        fault = f"the environment variable {variable} holds a character that no key has"
        raise EndpointError(f"{url}: {fault}. Set it again.", fatal=True)
    if key and urlsplit(url).scheme == "http" and not is_loopback(url):
        log.warning(
            f"{url}: the key in {variable} travels unencrypted. "
            "Use https, unless the network is yours alone."
        )
    # A server of one's own may want none: one on this machine, or for which no variable is named.
    is_own = is_loopback(url) or (url != DEFAULT_URL and variable == _DEFAULT_VARIABLE)
    if key or is_own:
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
