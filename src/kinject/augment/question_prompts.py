"""The prompts of the stage `questions`, and the readers of their short answers: a letter, a
number."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kinject.augment.prompts import Source, language_line, task_messages
from kinject.recipe.yaml_lines import read_yaml
from kinject.types import Message

# "A lot of people", "D'après" and "C'est" name no choice.
_LETTER = re.compile(
    r"\W*(?:(?:the |my )?(?:(?:correct|right|best) )?(?:answer|option|choice)(?: is)?\W*)?"
    r"([A-D])\b(?!['’])"
    r"(?!(?<=a)\s+(?!because|since|as|is|for)[^\W\d_])",
    re.IGNORECASE,
)


def parse_letter(answer: str) -> str:
    """Return the letter (A to D) at the beginning of an answer, "" without one."""
    match = _LETTER.match(answer)
    if match is None:
        return ""
    return match[1].upper()


def parse_specificity(answer: str) -> int:
    """Return the first number from 1 to 10 in an answer, 1 without one."""
    match = re.search(r"\b(10|[1-9])\b", answer)
    if match is None:
        return 1
    return int(match[1])


LETTERS = "ABCD"

_TEXTS: Mapping[str, str] = read_yaml(Path(__file__).with_name("questions.yaml")).root
"""The prompts, by name."""


def propose_messages(
    source: Source,
    n: int,
    earlier: Sequence[str],
    kinds: Collection[str] = ("choices",),
    *,
    retention: bool = False,
) -> list[Message]:
    """Return the prompt for `n` questions of `kinds` on a passage, about other facts than the
    `earlier` questions.

    Those on `retention` are about its neighbours.
    """
    rule = language_line(source.text) + "\n"
    if "open" in kinds:
        rule = _TEXTS["open"] + rule
    task, sentence = _TEXTS["propose"], _TEXTS["stated"]
    if retention:
        task, sentence = _TEXTS["retention"], _TEXTS["known"]
    task = task.format(n=n, language=rule)
    lines = _TEXTS["as_lines"].replace("{sentence}", sentence)
    return _about(source, task + lines + _earlier(earlier))


def _earlier(questions: Sequence[str]) -> str:
    if not questions:
        return ""
    return _TEXTS["earlier"] + "\n".join(f"- {question}" for question in questions)


def verify_messages(source: Source, question: str, choices: Sequence[str]) -> list[Message]:
    """Return the prompt for the correct choice according to the passage, and for the question's
    specificity."""
    return _about(
        source, _TEXTS["verify"].replace("{question}", _render_question(question, choices))
    )


def closed_book_messages(question: str, choices: Sequence[str]) -> list[Message]:
    """Return the prompt with the question alone, without the passage."""
    task = _TEXTS["closed_book"].replace("{question}", _render_question(question, choices))
    return [
        {"role": "system", "content": _TEXTS["closed_book_system"]},
        {"role": "user", "content": task},
    ]


def is_question_prompt(messages: Sequence[Message]) -> bool:
    """Return whether `messages` are a prompt of this module."""
    return bool(messages) and messages[0]["content"] in (
        _TEXTS["system"],
        _TEXTS["closed_book_system"],
    )


def _render_question(question: str, choices: Sequence[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question, *lines])


def _about(source: Source, task: str) -> list[Message]:
    _, user = task_messages(source.title, source.text, task, source.headings)
    return [{"role": "system", "content": _TEXTS["system"]}, user]
