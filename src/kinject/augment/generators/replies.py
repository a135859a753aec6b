"""What the bodies and headers of an endpoint's replies say. They are untrusted: any of it may be missing, wrong or huge."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from time import time

from kinject.augment.generators.faults import Transient
from kinject.types import Completion, Usage

_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\u2027\u202f-\ud7ff\ue000-\ufffd]+")
_CHARACTERS_OF_A_TOKEN = 128
"""Most that one token stands for: no vocabulary in use has longer ones."""
_MOST_TOKENS = 10_000_000
"""No window of a model is as long; a usage beyond it is believed no more than a negative one."""
_LONGEST_REASON = 64


def parse_completion(
    body: bytes,
    url: str,
    max_tokens: int,
    shown: Callable[[str], str] = str,
    note_model: Callable[[str], None] = lambda name: None,
) -> Completion:
    """Return the completion in a response body. Raises `Transient` where the body is not a chat completion.

    A text longer than `max_tokens` tokens can be is cut, with finish_reason ``length``. Usage that is missing or cannot
    be is 0. `shown` makes text of the body fit to print; `note_model` is called with the name of the model that answered.
    """
    value, used = None, Usage()
    try:
        value = json.loads(body)
        used = _usage(value.get("usage"))
        choices = value["choices"]
        if not choices:
            return Completion("", "no choices", used)
        message, reason = choices[0].get("message") or {}, choices[0].get("finish_reason")
        text = _text(message.get("content"))
        if not text and message.get("refusal"):
            reason = "content_filter"
        if isinstance(value.get("model"), str):
            note_model(value["model"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        is_error = isinstance(value, dict) and "error" in value
        begun = body.lstrip()[:1] == b"{" and not is_error  # a page of something in between costs nothing
        raise Transient(_told(url, body, error, shown), kind="malformed", lost=used if begun else None) from error
    most = max_tokens * _CHARACTERS_OF_A_TOKEN
    if len(text) > most:
        text, reason = text[:most], "length"
    return Completion(_utf8(text), _reason(reason), used)


def _told(url: str, body: bytes, error: Exception, shown: Callable[[str], str]) -> str:
    """Return the message about a body that is no completion, with its first characters where it is not even JSON."""
    if body.lstrip()[:1] in (b"{", b"["):
        start = ""
    else:
        start = f", it begins {shown(body[:10_000].decode('utf-8', 'replace'))[:60]!r}" if body else ", it is empty"
    return f"{url}: the answer is not a chat completion ({type(error).__name__}{start}). Is base_url right?"


def _text(content: object) -> str:
    """Return the text in a message's content: a string, or a list of parts of which some are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"content is {type(content).__name__}")
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _reason(given: object) -> str:
    """Return a finish_reason as a short text, "" where none is given."""
    text = given if isinstance(given, str) else "" if given is None else json.dumps(given)
    return printable(text)[:_LONGEST_REASON]


def _usage(given: object) -> Usage:
    if not isinstance(given, Mapping):
        return Usage()
    return Usage(_count(given.get("prompt_tokens")), _count(given.get("completion_tokens")))


def _count(given: object) -> int:
    """Return a number of tokens, 0 where it is none that can be."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= _MOST_TOKENS:
        return 0
    return int(given)


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


def status_inside(body: bytes) -> int | None:
    """Return the status that an error body names as its code (gateways answer 200 and say 429 inside), None without."""
    try:
        value = json.loads(body)
        code = int(value["error"]["code"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    return code if 400 <= code <= 599 else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a Retry-After header asks for (number or date), None where it asks for none that can be.

    A date counts from the reply's own Date, so that this machine's clock may be wrong.
    """
    in_ms, given = headers.get("retry-after-ms"), headers.get("retry-after", "")
    try:
        seconds = float(given) if in_ms is None else float(in_ms) / 1000
    except ValueError:
        try:
            sent = headers.get("date")
            seconds = _seconds(given) - (_seconds(sent) if sent else time())
        except (ValueError, TypeError, OverflowError, OSError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _seconds(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()
