"""The ways in which chat models differ: their parameters, the faults of their section in a recipe, and thinking."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Message, Usage

log = logging.getLogger(__name__)

OPTIONS = ("stop", "chat_template_kwargs")
"""Fields of a generator that are sent where the recipe has them."""
_LENGTHS = ("max_tokens", "max_completion_tokens")
_REFUSED = re.compile(
    r"unsupported|not (?:be )?support|(?:does not|doesn['’]t|do not|don['’]t) (?:support|accept|take)|unrecogni[sz]ed"
    r"|unknown|unexpected|extra[_ ](?:forbidden|inputs|fields)|not (?:permitted|allowed|accepted)|cannot find field"
    r"|only [\d.]+ is (?:allowed|supported|permitted)|cannot both be",
    re.IGNORECASE,
)
_LONGEST_ERROR = 10_000


def sampling_options(section: GeneratorSection) -> dict[str, Any]:
    """Return the options of sampling and of the chat template in `generator_identity`: those of the recipe."""
    return _present_fields(section, (*OPTIONS, "extra_body"))


def _present_fields(section: GeneratorSection, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of these names that the recipe has."""
    fields = {name: getattr(section, name) for name in names}
    return {name: value for name, value in fields.items() if value not in (None, ())}


class Parameters:
    """Writes the bodies of requests, with the parameters that the endpoint takes, found from its errors.

    Endpoints know `max_tokens` or `max_completion_tokens`; some models take no temperature or no seed. `shown` makes text
    of the endpoint safe to print.
    """

    def __init__(self, section: GeneratorSection, url: str, shown: Callable[[object], str]) -> None:
        self._section = section
        self._url = url
        self._shown = shown
        by_openai = (urlsplit(url).hostname or "").endswith(".openai.com")
        self._length = _LENGTHS[by_openai]
        self._refused: set[str] = set()
        self._options = _present_fields(section, OPTIONS) | dict(section.extra_body or {})

    def body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        """Return the body of a request."""
        section = self._section
        body: dict[str, Any] = {"model": section.model, "messages": messages}
        if "temperature" not in self._refused:
            body["temperature"] = section.sampling_temperature
        body[self._length] = section.max_tokens
        if "seed" not in self._refused:
            body["seed"] = seed
        return {key: value for key, value in {**body, **self._options}.items() if value is not None}

    def learn(self, sent: Mapping[str, Any], reply: bytes) -> bool:
        """Return whether another body may be taken after a 400 or 422 (`reply`) to the body `sent`.

        Raises `EndpointError` (fatal) if the endpoint refuses a parameter that the recipe asks for, or any limit of length.
        """
        name = refused_parameter(reply, [key for key in sent if key not in ("model", "messages", "prompt")])
        if name is None:
            return False
        if name not in self.body((), 0):  # learned meanwhile from the reply to another request
            return True
        reason = self._shown(reply[:_LONGEST_ERROR].decode("utf-8", "replace"))
        if name in self._options:
            prefix = "extra_body." if name in (self._section.extra_body or {}) else ""
            message = f"the endpoint does not take generator.{prefix}{name} ({reason}). Remove it from the recipe."
            raise EndpointError(f"{self._url}: {message}", fatal=True)
        self._refused.add(name)
        if name in _LENGTHS:
            self._length = next((other for other in _LENGTHS if other not in self._refused), "")
            if not self._length:
                raise EndpointError(f"{self._url}: the endpoint takes no limit of tokens ({reason}).", fatal=True)
            log.info(f"{self._url}: it takes {self._length} instead of {name}.")
        elif name == "temperature":
            log.warning(
                f"{self._url}: this model does not take the temperature {self._section.sampling_temperature:g}; it uses its own."
            )
        else:
            log.warning(f"{self._url}: it takes no seed; without the cache, a rerun would get other answers.")
        return True


def refused_parameter(reply: bytes, sent: Sequence[str]) -> str | None:
    """Return the name of the parameter, one of `sent`, that the endpoint refuses in an error; None for other errors."""
    text = reply[:_LONGEST_ERROR].decode("utf-8", "replace")
    if not _REFUSED.search(text):
        return None
    try:
        error = json.loads(reply)
        name = error["error"]["param"]
    except (ValueError, KeyError, TypeError, RecursionError):
        name = None
    if isinstance(name, str):
        return name if name in sent else None
    # A body that an error quotes may hold the names of all parameters; the refused one comes first.
    positions = {
        match.start(): key for key in sent for match in [re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text)] if match
    }
    return positions[min(positions)] if positions else None


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts with which a model's thinking begins and ends, and the one that ends it before its time."""

    opens: str
    closes: str
    cut: str

    def are_open(self, prompt: str) -> bool:
        """Return whether `prompt` ends where thinking has begun."""
        return prompt.rstrip().endswith(self.opens)


_FINAL = "<|channel|>final<|message|>"
_MARKS = (
    ThinkingMarks("<|channel|>", _FINAL, f"<|end|><|start|>assistant{_FINAL}"),  # harmony: every channel but the final one
    ThinkingMarks("<|channel>", "<channel|>", "\n<channel|>"),
    *(
        ThinkingMarks(start, end, f"\n{end}\n\n")
        for start, end in (
            ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<seed:think>", "</seed:think>"),
            ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>"),
        )
    ),
)  # fmt: skip


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks of thinking that a chat template writes or takes off; None if it knows none."""
    return next((marks for marks in _MARKS if marks.opens in template or marks.closes in template), None)


_TAG = r"(?:seed:)?(?:think(?:ing)?|thought|reason(?:ing)?)"
_THOUGHT = re.compile(
    rf"\A\s*(?:<(?P<tag>{_TAG})>|(?P<bracket>\[THINK\])|(?P<bar><\|channel>)|◁think▷)(?P<thinking>.*?)"
    r"(?(tag)</(?P=tag)>|(?(bracket)\[/THINK\]|(?(bar)<channel\|>|◁/think▷)))",
    re.DOTALL | re.IGNORECASE,
)
_OPENED = re.compile(rf"\A\s*(?:<{_TAG}>|\[THINK\]|<\|channel>|◁think▷)", re.IGNORECASE)
_CLOSED = re.compile(rf"</{_TAG}>|\[/THINK\]|<channel\|>|◁/think▷", re.IGNORECASE)
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w+).{0,200}?<\|message\|>(.*?)(?=<\|(?:start|end|return|call|channel)\|>|\Z)", re.DOTALL
)

_BARE_CHANNELS = re.compile(r"\A\s*analysis(?P<thinking>.*?)assistantfinal(?P<answer>.*)\Z", re.DOTALL)
"""The harmony format from a server that leaves its special tokens out."""


def split_thinking(text: str) -> tuple[str, str]:
    """Return (thinking, answer) of a model's text.

    Thinking is between tags (``<think>``, ``[THINK]`` and their like) at the beginning, before a closing tag whose opening
    one the chat template wrote, or in every channel but the final one of the harmony format (which some servers send
    without its special tokens). A text that never stops thinking has no answer.
    """
    if "<|channel|>" in text:
        channels = _CHANNEL.findall(text)
        answers = [content for name, content in channels if name == "final"]
        return "".join(content for name, content in channels if name != "final").strip(), "".join(answers).strip()
    if "assistantfinal" in text and (bare := _BARE_CHANNELS.match(text)):
        return bare["thinking"].strip(), bare["answer"].strip()
    if not ("<" in text or "[THINK]" in text or "◁" in text or "[/THINK]" in text):
        return "", text
    match = _THOUGHT.match(text)
    if match is not None:
        return match["thinking"].strip(), text[match.end() :].strip()
    if _OPENED.match(text):
        return _OPENED.sub("", text, count=1).strip(), ""
    closed = _CLOSED.search(text)
    if closed is not None:
        return text[: closed.start()].strip(), text[closed.end() :].strip()
    return "", text


def with_thinking(usage: Usage, n_thinking: int, n_answer: int) -> Usage:
    """Return `usage` with the tokens of thinking: those reported, else by its share of the characters."""
    if usage.tokens_thinking or not usage.tokens_out or not n_thinking:
        return usage
    return replace(usage, tokens_thinking=round(usage.tokens_out * n_thinking / (n_thinking + n_answer)))


_MOST_TOKENS = 10_000_000
"""Beyond any model's window: a higher token count is as impossible as a negative one."""


def read_usage(value: object) -> Usage:
    """Return the tokens of an answer's `usage`; 0 for each that is missing or impossible."""
    if not isinstance(value, Mapping):
        return Usage()
    details = value.get("completion_tokens_details")
    thinking = _n_tokens(details.get("reasoning_tokens")) if isinstance(details, Mapping) else 0
    n_out = _n_tokens(value.get("completion_tokens"))
    return Usage(_n_tokens(value.get("prompt_tokens")), n_out, min(thinking, n_out))


def _n_tokens(value: object) -> int:
    """Return a number of tokens, 0 for an impossible one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return 0
    return int(value)
