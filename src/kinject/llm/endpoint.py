"""One OpenAI-compatible endpoint, through the openai client: its answer to a request, or its error
by kind.

All that it says is untrusted. Beside chats there is the completions route: texts that a model
continues, and log-probs of given choices. Such a request is a list of messages whose roles are
those of `PROMPT`, `CONTEXT` and `CHOICE`, so that the sender's cache, limits and retries hold for
it, too. Log-probs come from ``echo``: the endpoint repeats the prompt, each token with its
log-prob, as vLLM and SGLang do. Only ``token_logprobs`` and the numbers of tokens are read, from
the end.
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kinject.errors import EndpointError
from kinject.llm import JsonValue, Transient, read_usage, split_thinking, with_thinking
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
_ODD_BODY = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a body raises that is no answer: no JSON, other keys or types, brackets without end.
"""
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


PROMPT: Final = "prompt"
"""Role of a text that the model continues; its answer is the text that it writes."""
CONTEXT, CHOICE = "context", "choice"
"""Roles of two lists of token ids, as JSON: the answer is the log-prob of the second after the
first (`read_choice`)."""

TOKEN_IDS = re.compile(r"\[\d+(?:, \d+)*\]")
"""A text that is token ids."""
_MOST = 1e30
"""Size from which a log-prob is none."""
_ABOUT_LOG_PROBS = re.compile(r"echo|log_?prob", re.IGNORECASE)


def _finish_reason(value: JsonValue) -> str:
    """Return a finish_reason as a short text, "" without one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        value = json.dumps(value)
    return printable(value)[:_LONGEST_REASON]


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


def error_of(body: bytes) -> tuple[str, str]:
    """Return (message, code) of an error body in the form of OpenAI or FastAPI, or (the body,
    "")."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        if isinstance(error, str):
            return error, ""
        message = error.get("message") or error.get("detail") or value
        return str(message), str(error.get("code") or "")
    except (ValueError, AttributeError, RecursionError):
        return body[:10_000].decode("utf-8", "replace") or "no body", ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, None without a number."""
    value = headers.get("retry-after", "").strip()
    # An HTTP date would be compared with this machine's clock, which may be wrong.
    if not _NUMBER.fullmatch(value):
        return None
    return float(value)


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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                return [model.id for model in (await self._client.models.list()).data]
            except openai.APIStatusError as error:
                raise EndpointError(
                    f"{self.url}: lists no models (answered {error.status_code}).", fatal=True
                ) from error

    async def exchange(
        self, body: Mapping[str, Any], read: Callable[[bytes], Completion]
    ) -> Completion:
        """Return the result of `read` on the reply to a `body`. Raises as `complete`."""
        reply = await self._post(body)
        if 200 <= reply.status_code < 300:
            return read(reply.content)
        if error_of(reply.content)[1] == "content_filter":
            # Some endpoints refuse the prompt, not the answer.
            return Completion("", "content_filter")
        raise await self.status_error(reply)

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

        A text longer than `max_tokens` tokens can be is cut, with finish_reason ``length``. Usage
        that is missing or cannot be is 0.
        """
        try:
            value = json.loads(body)
            used = read_usage(value.get("usage"))
            choices = value.get("choices") if value.get("error") else value["choices"]
            first: dict[str, Any] = {}
            if choices:
                first = choices[0]
            message, reason = first.get("message") or {}, first.get("finish_reason")
            thinking, text = split_thinking(message.get("content") or "")
            # Fields of vLLM and DeepSeek, and of OpenRouter.
            apart = message.get("reasoning_content") or message.get("reasoning")
        except _ODD_BODY as error:
            # A proxy's page costs nothing; JSON that is cut or has no choices may be an answer that
            # was paid.
            begun = body.lstrip()[:1] == b"{"
            raise self.malformed(body, "chat completion", error, lost=begun) from error
        if not text and (value.get("error") or first.get("error")):
            error_text = self.shown(error_of(body)[0])
            raise Transient(
                f"{self.url}: answered 200 with an error ({error_text}).", kind="malformed"
            )
        if not choices:
            return Completion("", "no choices", used)
        if isinstance(apart, str):
            thinking = apart
        self.check_model(value.get("model"))
        most = self.section.max_tokens * _CHARACTERS_OF_A_TOKEN
        if not text and message.get("refusal"):
            reason = "content_filter"
        elif len(text) > most:
            text, reason = text[:most], "length"
        used = with_thinking(used, len(thinking), len(text))
        return self.clean(
            Completion(_utf8(text), _finish_reason(reason), used, _utf8(thinking[:most]))
        )

    def malformed(self, body: bytes, kind: str, error: Exception, *, lost: bool) -> Transient:
        """Return the error of a body that is no completion of this `kind`."""
        start = self.shown(body[:1000].decode("utf-8", "replace"))[:60]
        found = f"{type(error).__name__}, it begins {start!r}"
        message = f"{self.url}: the answer is not a {kind} ({found}). Is base_url correct?"
        return Transient(message, kind="malformed", lost=lost)

    def clean(self, answer: Completion) -> Completion:
        """Return an answer without secrets: one that held a part of one has finish_reason
        ``secret``."""
        text, reason = self._secrets.redact(answer.text), self.shown(answer.finish_reason)
        if text != answer.text:
            reason = "secret"
        thinking = self._secrets.redact(answer.thinking)
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
        limit = "max_tokens"
        # OpenAI's reasoning models refuse max_tokens; most other servers know no other name.
        if (urlsplit(self.url).hostname or "").endswith(".openai.com"):
            limit = "max_completion_tokens"
        body: dict[str, Any] = {
            "model": section.model,
            "messages": messages,
            "temperature": section.sampling_temperature,
            limit: section.max_tokens,
            "seed": seed,
            "stop": section.stop or None,
            "chat_template_kwargs": section.chat_template_kwargs,
            **(section.extra_body or {}),
        }
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

    async def status_error(self, reply: httpx2.Response) -> EndpointError:
        """Return the error of a reply other than 200."""
        status, (text, code) = reply.status_code, error_of(reply.content)
        reason = self.shown(text)
        fatal = await self._fatal_message(reply, code, reason)
        if fatal:
            return EndpointError(f"{self.url}: {fatal}", fatal=True)
        message, pause = f"{self.url}: answered {status} ({reason}).", retry_after(reply.headers)
        if status in _KINDS:
            return Transient(message, kind=_KINDS[status], retry_after=pause)
        if status >= 500:
            return Transient(message, kind="server error", retry_after=pause)
        if status in (400, 422):
            message += " If it refuses a parameter, set it to null in extra_body."
        return EndpointError(message)

    async def _fatal_message(self, reply: httpx2.Response, code: str, reason: str) -> str:
        """Return the message about a reply after which every request would fail, "" for another
        reply."""
        status, variable = reply.status_code, self.section.api_key_env
        if status in (401, 403):
            fault = "the key is refused" if self._key else "it wants a key"
            fix = f"Put a valid one in the environment variable {variable}."
            return f"{fault} ({status}: {reason}). {fix}"
        if status == 404:
            return await self._missing_model_message(reason)
        # OpenAI reports an empty account as 429, which waiting would not mend.
        if status == 402 or code == "insufficient_quota":
            fix = "Top it up, then run again: stored answers are kept."
            return f"the account is out of credit ({status}: {reason}). {fix}"
        if 300 <= status < 400:
            target = self.shown(reply.headers.get("location", "nowhere"))
            fix = "If that is correct, set it as base_url."
            return f"answered {status}: it redirects requests to {target}. {fix}"
        return ""

    async def _missing_model_message(self, reason: str) -> str:
        """Return the message about a 404: the endpoint's models, or that the URL may be wrong where
        it lists none."""
        import openai

        try:
            async with self._limited():
                raw = await self._client.models.with_raw_response.list()
            models = json.loads(raw.http_response.content)["data"]
            offered = [self.shown(model["id"]) for model in models]
        # Any fault of the list: the 404 is what counts.
        except (EndpointError, openai.OpenAIError, ValueError, LookupError, TypeError):
            return f"answered 404 ({reason}). Check base_url and model. Most base_urls end in /v1."
        offers = ", ".join(offered[:10]) or "none"
        if len(offered) > 10:
            offers += f" and {len(offered) - 10} more"
        return f"no model {self.section.model!r} (404: {reason}). It offers {offers}."

    def shown(self, text: JsonValue) -> str:
        """Return text of the endpoint made safe to print: one short line, no control characters, no
        secrets."""
        line = _USER.sub(SHOWN, str(text)[:_LONGEST_MESSAGE])
        if self._key:
            line = line.replace(self._key, SHOWN)
        return printable(self._secrets.redact(line))


class CompletionsEndpoint(Endpoint):
    """The completions route of one endpoint, open inside ``async with``."""

    route = "completions"

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the text that the model writes, or a choice's log-prob as JSON, by the roles.

        Raises as `Endpoint.complete`; an endpoint that returns no log-probs of the prompt is a
        fatal error.
        """
        parts = {message["role"]: message["content"] for message in messages}
        if PROMPT in parts:
            return await self.exchange(self._writing_body(parts[PROMPT], seed), self._read_written)
        context, choice = json.loads(parts[CONTEXT]), json.loads(parts[CHOICE])
        read = partial(self._read_scored, n_context=len(context), n_choice=len(choice))
        return await self.exchange(self._scoring_body([*context, *choice]), read)

    def _writing_body(self, prompt: str, seed: int) -> dict[str, Any]:
        """Return the body of a request for a text; prompts that are JSON lists are token ids."""
        body = self.body([], seed)
        del body["messages"]
        body["prompt"] = prompt
        if TOKEN_IDS.fullmatch(prompt):
            body["prompt"] = json.loads(prompt)
        return body

    def _scoring_body(self, prompt: list[int]) -> dict[str, Any]:
        extra = dict(self.section.extra_body or {})
        options = {"max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        return {"model": self.section.model, "prompt": prompt, **options, **extra}

    async def status_error(self, reply: httpx2.Response) -> EndpointError:
        """Return the error of a reply other than 200. One about log-probs is fatal: no request
        would get any."""
        text = error_of(reply.content)[0]
        if "prompt must be a string" in text:  # of transformers serve
            fix = "leave out the tokenizer of its table and set eval.formats: [generate]"
            return EndpointError(f"{self.url}: it takes no token ids: {fix}.", fatal=True)
        if _ABOUT_LOG_PROBS.search(text) and reply.status_code not in (401, 403, 404, 429):
            return self._no_log_probs(f"answered {reply.status_code} ({self.shown(text)})")
        return await super().status_error(reply)

    def _no_log_probs(self, reason: str) -> EndpointError:
        return EndpointError(
            f"{self.url}: it returns no log-probs of the prompt (echo with logprobs): {reason}. "
            "Set eval.formats: [generate], or serve the model with one that does (vLLM, SGLang).",
            fatal=True,
        )

    def _read(self, body: bytes) -> tuple[dict[str, Any], Usage]:
        """Return the first choice of a body, and the tokens used. Raises `Transient` for another
        body."""
        try:
            value = json.loads(body)
            choice, usage = value["choices"][0], read_usage(value.get("usage"))
            if not isinstance(choice, dict) or not isinstance(choice["text"], str):
                raise TypeError(type(choice).__name__)
        except _ODD_BODY as error:
            raise self.malformed(body, "completion", error, lost=False) from error
        self.check_model(value.get("model"))
        return choice, usage

    def _read_written(self, body: bytes) -> Completion:
        choice, usage = self._read(body)
        return self.clean(Completion(choice["text"], str(choice.get("finish_reason") or ""), usage))

    def _read_scored(self, body: bytes, n_context: int, n_choice: int) -> Completion:
        """Return the sum of the log-probs of the tokens of the choice."""
        choice, usage = self._read(body)
        log_probs = choice.get("logprobs")
        if not isinstance(log_probs, Mapping):
            log_probs = {}
        values, tops = log_probs.get("token_logprobs"), log_probs.get("top_logprobs")
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise self._no_log_probs("the answer has no token_logprobs")
        # A server that adds a BOS of its own shifts the positions of the choice.
        if usage.tokens_in != n_context + n_choice:
            raise EndpointError(
                f"{self.url}: it counts {usage.tokens_in} tokens in a prompt of "
                f"{n_context + n_choice} token ids, so the tokens of the choice cannot be found.",
                fatal=True,
            )
        # Counted from the end: some leave out the BOS of a prompt, some the written token if it
        # ends the text.
        end = len(values) - usage.tokens_out
        if not usage.tokens_in - 1 <= end <= usage.tokens_in:
            raise self._no_log_probs(f"{len(values)} log-probs came for {usage.tokens_in} tokens")
        part = slice(end - (usage.tokens_in - n_context), end)
        choice_log_probs = values[part]
        if not all(map(_is_log_prob, choice_log_probs)):
            raise self._no_log_probs("tokens of the choice have none")
        if not isinstance(tops, list):
            tops = []
        score = {
            "log_prob": math.fsum(choice_log_probs),
            "n_tokens": len(choice_log_probs),
            "greedy": _is_greedy(choice_log_probs, tops[part]),
        }
        return Completion(json.dumps(score), usage=usage)


def _is_log_prob(value: JsonValue) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _MOST


def read_choice(completion: Completion) -> tuple[float, int, bool]:
    """Return the log-prob of a choice, its number of tokens, and whether each was the likeliest."""
    score = json.loads(completion.text)
    return float(score["log_prob"]), int(score["n_tokens"]), bool(score["greedy"])


def _is_greedy(log_probs: Sequence[float], tops: Sequence[JsonValue]) -> bool:
    """Return whether every token was the likeliest, as lm-evaluation-harness finds it; False if the
    answer does not show it."""
    if len(tops) < len(log_probs) or not log_probs:
        return False
    return all(
        isinstance(top, Mapping) and bool(top) and value >= max(top.values())
        for value, top in zip(log_probs, tops, strict=True)
    )


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
