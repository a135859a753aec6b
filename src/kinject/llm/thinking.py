"""The thinking that a model writes before its answer: found by its marks, and taken off."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kinject.types import Usage


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts with which a model's thinking begins and ends."""

    opens: str
    closes: str

    def are_open(self, prompt: str) -> bool:
        """Return whether `prompt` ends where thinking has begun."""
        return prompt.rstrip().endswith(self.opens)


_CHANNELS = ThinkingMarks("<|channel|>", "<|channel|>final<|message|>")
"""Of gpt-oss: every channel but the final one is thinking."""
_PAIRS = (
    ThinkingMarks("<|channel>", "<channel|>"),  # Gemma 4
    ThinkingMarks("[THINK]", "[/THINK]"),  # Mistral
)
_NAME = r"(?:[a-z]\w{0,15}[:_])?(?:think|thinking|thoughts?|reasoning)"
"""Names of tags around thinking, alone or behind a model's own name: think, seed:think,
longcat_think."""
_OPENS = re.compile(rf"<(?P<name>{_NAME})(?:\s[^<>]{{0,200}})?/?>", re.I)
_CLOSES = re.compile(rf"</(?P<name>{_NAME})\s*>", re.I)
_LINE_OPENS = re.compile(rf"^[ \t]*+{_OPENS.pattern}", re.I | re.M)

_MOST_BLOCKS = 32
"""Some models think in several blocks, one behind the other. Each is searched for in the whole
rest, which an endpoint may make of a million blocks."""


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks of thinking that a chat template writes or takes off; None if it knows
    none."""
    for marks in (_CHANNELS, *_PAIRS):
        if marks.opens in template or marks.closes in template:
            return marks
    tag = _OPENS.search(template) or _CLOSES.search(template)
    if tag is None:
        return None
    return ThinkingMarks(f"<{tag['name']}>", f"</{tag['name']}>")


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
    if _CHANNELS.opens in text:
        return _split_channels(text)
    for marks in _PAIRS:
        thinking, closed, answer = text.partition(marks.closes)
        if closed or thinking.lstrip().startswith(marks.opens):
            return thinking.strip().removeprefix(marks.opens).strip(), answer.strip()
    thoughts: list[str] = []
    parts = _split_tags(text)
    while parts is not None and len(thoughts) < _MOST_BLOCKS:
        thoughts.append(parts[0].strip())
        text = parts[1].strip()
        parts = _split_block(text)
    return "\n\n".join(filter(None, thoughts)), text


def _split_channels(text: str) -> tuple[str, str]:
    thinking = answer = ""
    for name, content in _CHANNEL.findall(text):
        if name == "final":
            answer += content
        else:
            thinking += content
    return thinking.strip(), answer.strip()


def _split_tags(text: str) -> tuple[str, str] | None:
    """Return (thinking, rest) of a text that thinks in tags, None for another."""
    parts = _split_block(text)
    if parts is not None:
        return parts
    closing = _CLOSES.search(text)
    if closing is None:
        return None
    before, rest = text[: closing.start()], text[closing.end() :]
    opening = _LINE_OPENS.search(before)
    if opening is not None:
        # A remark before the thinking is no part of the answer.
        return f"{before[: opening.start()]}{before[opening.end() :]}", rest
    # A sentence about these tags names the opening one, too: it is an answer.
    if any(tag["name"].lower() == closing["name"].lower() for tag in _OPENS.finditer(before)):
        return None
    return before, rest


def _split_block(text: str) -> tuple[str, str] | None:
    """Return (thinking, rest) of a text that begins with an opening tag, None for another."""
    text = text.lstrip()
    opening = _OPENS.match(text)
    if opening is None:
        return None
    body = text[opening.end() :]
    if opening[0].endswith("/>"):
        return "", body
    closing = _closing_tag(body, opening["name"])
    if closing is None:
        return body, ""
    return body[: closing.start()], body[closing.end() :]


def _closing_tag(body: str, name: str) -> re.Match[str] | None:
    """Return the tag that closes `name`: its own, else the first of another name, as models mix
    them up."""
    first: re.Match[str] | None = None
    for closing in _CLOSES.finditer(body):
        if closing["name"].lower() == name.lower():
            return closing
        first = first or closing
    return first


def with_thinking(usage: Usage, n_thinking: int, n_answer: int) -> Usage:
    """Return `usage` with the tokens of thinking: those reported, else by its share of the
    characters."""
    if usage.tokens_thinking or not usage.tokens_out or not n_thinking:
        return usage
    # Prices are by token, and the endpoint's tokenizer is not at hand.
    n_tokens = round(usage.tokens_out * n_thinking / (n_thinking + n_answer))
    return replace(usage, tokens_thinking=n_tokens)
