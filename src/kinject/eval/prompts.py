"""Prompts: a question, its examples and its passages become a text and its continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import Any

from kinject.corpus.chat import question_variables, render_question
from kinject.corpus.passages import with_passages
from kinject.corpus.questions import question_prompt
from kinject.recipe.eval_section import FORMATS
from kinject.types import Question

MOST_LETTERS = len(ascii_uppercase)
_CLOSING = 32  # tokens that close thinking, at most
_ASKS_FOR_LETTER = "Answer with the letter of the correct option."
NO_ANSWER = "unknown"
"""The answer that an example shows whose question has none."""


WITHOUT_QUESTION = frozenset(name for name, traits in FORMATS.items() if not traits.shows_question)
SHOWS_OPTIONS = frozenset(name for name, traits in FORMATS.items() if traits.shows_options)
LETTERED = frozenset(name for name, traits in FORMATS.items() if traits.letters and not traits.generates)
ROTATED = frozenset(name for name, traits in FORMATS.items() if traits.rotates)
GENERATED = frozenset(name for name, traits in FORMATS.items() if traits.generates)
OPEN = frozenset(name for name in GENERATED if not FORMATS[name].letters)
"""The formats of which the question needs no choices."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How long a written answer may be: `max_new_tokens` at most, and up to the first of the texts `stop` (None: a line break,
    no text in a chat).

    With `max_thinking_tokens` a model's thinking has that bound of its own; without, thinking counts as the answer does.
    """

    max_new_tokens: int
    stop: tuple[str, ...] | None = ()
    max_thinking_tokens: int | None = None

    @property
    def most(self) -> int:
        """The most tokens that are written, those that close the thinking among them."""
        return self.max_new_tokens + (self.max_thinking_tokens + _CLOSING if self.max_thinking_tokens else 0)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a prompt becomes a chat: the text of the system's turn and the chat template's own arguments."""

    system: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One question in the form that one arm uses: format, few-shot examples in order, retrieved passages, best first.

    `rotation` is the number of positions by which the question's options were rotated. `template` is the source of a
    Jinja template that writes the context instead of the format's own layout; "" for none. `generation` is there if the
    model writes its answer.
    """

    question: Question
    format: str
    shots: tuple[Question, ...] = ()
    passages: tuple[str, ...] = ()
    rotation: int = 0
    template: str = ""
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before the answer, and for each choice the text whose probability is computed.

    `header` is the start of `context` that a chat template puts into the system's turn. `turns` are the rest in turns of
    user and model, the question last; () if a template of the recipe wrote the text. `is_dialogue`: the turns are the
    question's own, and stay apart.
    """

    context: str
    continuations: tuple[str, ...]
    header: str = ""
    turns: tuple[str, ...] = ()
    is_dialogue: bool = False


def pick_shots(question: Question, pool: Sequence[Question], n_shots: int) -> tuple[Question, ...]:
    """Return the first `n_shots` questions of `pool` that are not `question` itself (by id, or by text and choices)."""
    others = (
        shot
        for shot in pool
        if shot.id != question.id and (shot.question, shot.choices) != (question.question, question.choices)
    )
    return tuple(shot for shot, _ in zip(others, range(n_shots), strict=False))


def rotate_options(question: Question, n: int) -> Question:
    """Return `question` with its options rotated by `n` positions: position i holds option i + n."""
    size = len(question.choices)
    choices = tuple(question.choices[(position + n) % size] for position in range(size))
    return replace(question, choices=choices, answer=(question.answer - n) % size)


def render_prompt(request: PromptRequest) -> Prompt:
    """Return `request` as text.

    ``texts``: "Question: ...\\nAnswer:" with the choices as continuations. ``letters``: the layout of MMLU in
    lm-evaluation-harness 0.4 (tasks/mmlu/default): a header that names the subject, the options as "A. ...", "Answer:",
    with the letters as continuations; ``rotations`` is the same. ``letters-written``: that layout with a line that asks for
    the letter, and the model writes on. ``hybrid``: the layout of ``letters`` with the choices as continuations.
    ``...-no-question``: without the question. ``generate``: that of ``texts``, and the model writes on.
    Each example ends in its gold continuation and a blank line. Passages follow the examples, directly before the
    question, each followed by a blank line. A question with ``checks`` or ``messages`` is an instruction: its text stays as it
    is, after its own turns. Raises `InputError` if the template cannot be rendered.
    """
    if _is_instruction(request.question):
        return _render_instruction(request)
    if request.template:
        return Prompt(_render_template(request), _scored_continuations(request))
    examples = "".join(f"{_with_answer(shot, request)}\n\n" for shot in request.shots)
    header = _subject_header(request)
    question_text = with_passages(request.passages, _unanswered(request.question, request.format))
    turns = [text for shot in request.shots for text in (_unanswered(shot, request.format), _answer(shot, request))]
    context = f"{header}{examples}{question_text}"
    return Prompt(context, _scored_continuations(request), header, (*turns, question_text))


def _is_instruction(question: Question) -> bool:
    return bool(question.checks or question.messages)


def _render_instruction(request: PromptRequest) -> Prompt:
    turns = [message["content"] for message in request.question.messages]
    system = [turns.pop(0)] if request.question.messages and request.question.messages[0]["role"] == "system" else []
    question_text = "\n\n".join((*request.passages, request.question.question))
    header = "".join(f"{text}\n\n" for text in system)
    context = header + "\n\n".join((*turns, question_text))
    return Prompt(context, (), header, (*turns, question_text), is_dialogue=True)


def scored_texts(question: Question, format: str) -> tuple[str, ...]:
    """Return the text of each continuation without its leading space: letters, choices, or the first accepted text."""
    if format in OPEN:
        return question.accepted[:1] or (NO_ANSWER,)
    lettered = FORMATS[format].letters
    return tuple(ascii_uppercase[: len(question.choices)]) if lettered else question.choices


def _subject_header(request: PromptRequest) -> str:
    if request.format not in SHOWS_OPTIONS or not request.question.subject:
        return ""
    subject = request.question.subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n"


def _with_answer(shot: Question, request: PromptRequest) -> str:
    return f"{_unanswered(shot, request.format)} {_answer(shot, request)}"


def _answer(shot: Question, request: PromptRequest) -> str:
    return scored_texts(shot, request.format)[_gold(shot, request.format)]


def _gold(question: Question, format: str) -> int:
    return 0 if format in OPEN else question.answer


def _unanswered(question: Question, format: str) -> str:
    traits = FORMATS[format]
    if not traits.shows_options:
        return question_prompt(question.question) if traits.shows_question else "Answer:"
    lettered = zip(ascii_uppercase, question.choices, strict=False)
    options = "".join(f"\n{letter}. {choice}" for letter, choice in lettered)
    text = f"{question.question.strip()}{options}" if traits.shows_question else options.removeprefix("\n")
    return f"{text}\n{_ASKS_FOR_LETTER}\nAnswer:" if traits.generates else f"{text}\nAnswer:"


def _scored_continuations(request: PromptRequest) -> tuple[str, ...]:
    if request.format in GENERATED:
        return ()
    return tuple(f" {text}" for text in scored_texts(request.question, request.format))


def _render_template(request: PromptRequest) -> str:
    """Return the context that `request.template` writes.

    Its variables: question, choices, letters, subject, shots (with answer), passages, format.
    """

    def variables(question: Question) -> dict[str, Any]:
        texts = scored_texts(question, request.format)
        return {**question_variables(question), "answer": texts[_gold(question, request.format)]}

    values = {
        "shots": [variables(shot) for shot in request.shots],
        "passages": list(request.passages),
        "format": request.format,
    }
    return render_question(request.template, request.question, "eval.template", values)
