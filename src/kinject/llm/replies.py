"""What an endpoint says: the completion in a body, an error's text and status, a requested pause. All of it is untrusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time

from kinject.llm.chat import read_usage, split_thinking, with_thinking
from kinject.llm.generator import Transient
from kinject.types import Completion, Usage

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
