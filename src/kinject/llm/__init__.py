"""Requests to generators: what endpoints and local models share; their errors, their thinking, the
tokens that they report."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.types import Completion, Message, Usage

Complete = Callable[[list[Message], int], Awaitable[Completion]]
"""(messages, seed) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass).
"""


@dataclass(frozen=True, slots=True)
class Generator:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer. It is part of ids
    and cache keys, so it holds no API key and no timeout. `remote` answers cost money or time: they
    are cached and limited.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    complete: Complete


class Stopped(Exception):
    """The run is ending: this request was not sent, or nothing waits for its answer."""


class Transient(EndpointError):
    """A request failed in a way that may pass: `kind` is overload, server error, timeout,
    connection or malformed.

    `retry_after` is the pause in seconds that the endpoint asked for, or None. `lost`: an answer
    was interrupted and may have been charged.
    """

    def __init__(
        self, message: str, *, kind: str, retry_after: float | None = None, lost: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.lost = lost


def request_seed(*parts: object) -> int:
    """Return a seed of 31 bits for a request that depends on `parts` alone."""
    return int(content_id(*parts)[:8], 16) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts with which a model's thinking begins and ends."""

    opens: str
    closes: str

    def are_open(self, prompt: str) -> bool:
        """Return whether `prompt` ends where thinking has begun."""
        return prompt.rstrip().endswith(self.opens)


_MARKS = (
    ThinkingMarks(
        "<|channel|>", "<|channel|>final<|message|>"
    ),  # gpt-oss: every channel but the final one
    ThinkingMarks("<|channel>", "<channel|>"),  # Gemma 4
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
)


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks of thinking that a chat template writes or takes off; None if it knows
    none."""
    for marks in _MARKS:
        if marks.opens in template or marks.closes in template:
            return marks
    return None


_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w+).{0,200}?<\|message\|>(.*?)"
    r"(?=<\|(?:start|end|return|call|channel)\|>|\Z)",
    re.DOTALL,
)


def split_thinking(text: str) -> tuple[str, str]:
    """Return (thinking, answer) of a model's text.

    Thinking is between marks at the beginning, before a closing mark whose opening one the chat
    template wrote, or in every channel of gpt-oss but the final one. A text that never stops
    thinking has no answer.
    """
    if "<|channel|>" in text:
        thinking = answer = ""
        for name, content in _CHANNEL.findall(text):
            if name == "final":
                answer += content
            else:
                thinking += content
        return thinking.strip(), answer.strip()
    for marks in _MARKS[1:]:
        thinking, closed, answer = text.partition(marks.closes)
        if closed or thinking.lstrip().startswith(marks.opens):
            return thinking.strip().removeprefix(marks.opens).strip(), answer.strip()
    return "", text


def with_thinking(usage: Usage, n_thinking: int, n_answer: int) -> Usage:
    """Return `usage` with the tokens of thinking: those reported, else by its share of the
    characters."""
    if usage.tokens_thinking or not usage.tokens_out or not n_thinking:
        return usage
    # Prices are by token, and the endpoint's tokenizer is not at hand.
    n_tokens = round(usage.tokens_out * n_thinking / (n_thinking + n_answer))
    return replace(usage, tokens_thinking=n_tokens)


JsonValue = Mapping[str, Any] | Sequence[Any] | str | float | bool | None
"""What an endpoint may put anywhere in its answer."""
_MOST_TOKENS = 10_000_000
"""Beyond any model's window: a higher token count is as impossible as a negative one."""


def read_usage(value: JsonValue) -> Usage:
    """Return the tokens of an answer's `usage`; 0 for each that is missing or impossible."""
    if not isinstance(value, Mapping):
        return Usage()
    thinking, details = 0, value.get("completion_tokens_details")
    if isinstance(details, Mapping):
        thinking = _n_tokens(details.get("reasoning_tokens"))
    n_out = _n_tokens(value.get("completion_tokens"))
    return Usage(_n_tokens(value.get("prompt_tokens")), n_out, min(thinking, n_out))


def _n_tokens(value: JsonValue) -> int:
    """Return a number of tokens, 0 for an impossible one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not 0 <= value <= _MOST_TOKENS:  # NaN, too
        return 0
    return int(value)
