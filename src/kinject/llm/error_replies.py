"""The errors that endpoints report, by status or inside an answer of status 200, in their many
forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kinject.llm import JsonValue

ODD_BODY = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a body raises that is no answer: no JSON, other keys or types, endless brackets."""
_NO_CREDIT = re.compile(
    r"insufficient[ _-]*(?:(?:account|user|remaining)[ _-]+)?(?:quota|balance|credits?|funds)"
    r"|exceeded_current_quota|credit balance is too low|out of credits?\b|arrearage"
    r"|used all available credits|have any credits|billing_hard_limit|billing_not_active",
    re.IGNORECASE,
)
"""Of an empty account, in the codes and messages of OpenAI, DeepSeek, Moonshot, Alibaba, xAI,
Anthropic and One API. Not "exceeded your current quota": Google says so of a limit for a minute,
too."""
_BAD_KEY = re.compile(
    r"(?:incorrect|invalid) api[ _]key|api[ _]key (?:is )?(?:not (?:valid|found)|invalid|expired)",
    re.IGNORECASE,
)
_FILTERED = frozenset({"content_filter", "content_policy_violation", "flagged_input"})
_UNKNOWN = re.compile(r"un(?:supported|known|recognized)|extra_forbidden", re.IGNORECASE)
_ABOUT_VALUE = re.compile(
    r"too (?:large|long|big|high)|at most|exceed|(?:less|smaller|greater|more) than"
    r"|context length|maximum (?:context|value|allowed|of|is)\b|\brange\b|between|within",
    re.IGNORECASE,
)
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s")
_ERROR_STATUS = re.compile(r"[45]\d\d")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that an endpoint reports, by its status or inside an answer of status 200.

    `codes` are its code and its type, `parameter` the parameter that it names. `is_named`: the body
    has it under ``error``. `retry_delay`: the seconds that Google asks for in the body.
    """

    status: int
    message: str
    codes: tuple[str, ...] = ()
    parameter: str = ""
    is_named: bool = True
    retry_delay: float | None = None

    @property
    def is_out_of_credit(self) -> bool:
        """Whether the account is empty, which no waiting changes."""
        # OpenAI reports it as 429, gateways inside a 200, others as 400 or 403.
        return self.status == 402 or bool(_NO_CREDIT.search(" ".join((*self.codes, self.message))))

    @property
    def is_refused_key(self) -> bool:
        """Whether the endpoint does not know the key."""
        # Google and xAI report it as 400.
        return self.status == 401 or (self.status == 400 and bool(_BAD_KEY.search(self.message)))

    @property
    def is_filtered(self) -> bool:
        """Whether a filter refused the text of this request, which is no fault of the others."""
        return bool(_FILTERED & set(self.codes))

    @property
    def is_too_large(self) -> bool:
        """Whether this one request exceeds a limit by itself, which no waiting changes."""
        # OpenAI's words for one with more tokens than the account has in a minute, with a 429.
        return self.message.lower().startswith("request too large")

    def refuses(self, parameter: str) -> bool:
        """Return whether it refuses a parameter by its name, not for its value."""
        if self.status not in (400, 422):
            return False
        text = f"{self.message} {self.parameter}"
        if not re.search(rf"(?<!\w){parameter}(?!\w)", text):
            return False
        # A server that finds the value too high might ignore the other name, and answer unbounded.
        return bool(_UNKNOWN.search(" ".join(self.codes))) or not _ABOUT_VALUE.search(text)


def read_error(status: int, body: bytes) -> ErrorReply:
    """Return the error in a body, in the forms of OpenAI, FastAPI and Google; another body is its
    message."""
    try:
        return error_in(status, json.loads(body))
    except (ValueError, TypeError, RecursionError):
        return ErrorReply(status, body[:10_000].decode("utf-8", "replace") or "no body")


def error_in(status: int, value: JsonValue) -> ErrorReply:
    """Return the error in the value of a body. Raises `TypeError` for a value that is none."""
    if isinstance(value, list) and len(value) == 1:  # Google wraps it in a list
        value = value[0]
    if not isinstance(value, Mapping):
        raise TypeError(type(value).__name__)
    is_named = bool(value.get("error"))
    error: JsonValue = value
    if is_named:
        error = value["error"]
    if isinstance(error, str):
        return ErrorReply(status, error)
    if not isinstance(error, Mapping):
        raise TypeError(type(error).__name__)
    message = error.get("message") or error.get("detail") or value
    codes = tuple(str(error[key]) for key in ("code", "type") if error.get(key))
    metadata = error.get("metadata")
    # OpenRouter's mark of a text that was moderated; its status is that of a refused key.
    if isinstance(metadata, Mapping) and "flagged_input" in metadata:
        codes += ("flagged_input",)
    parameter = str(error.get("param") or "")
    return ErrorReply(
        status, str(message), codes, parameter, is_named, _retry_delay(error.get("details"))
    )


def _retry_delay(details: JsonValue) -> float | None:
    """Return the seconds in the RetryInfo among Google's details, as ``34.5s``; None without it."""
    if not isinstance(details, list):
        return None
    for detail in details:
        if isinstance(detail, Mapping) and "retryDelay" in detail:
            seconds = _SECONDS.fullmatch(str(detail["retryDelay"]))
            if seconds is not None:
                return float(seconds[1])
    return None


def error_inside(body: bytes) -> ErrorReply | None:
    """Return the error in an answer of status 200, with the status that its code names; None if it
    holds none."""
    try:
        value = json.loads(body)
        if isinstance(value, Mapping) and value.get("choices") and not value.get("error"):
            value = value["choices"][0]
        error = error_in(200, value)
    except ODD_BODY:
        return None
    for code in error.codes:
        if _ERROR_STATUS.fullmatch(code):  # OpenRouter passes on the status of the model's host
            return replace(error, status=int(code))
    if error.is_named or error.is_out_of_credit:
        return error
    return None
