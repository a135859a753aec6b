"""Prompts: a question, its examples and its passages become a text and its continuations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kinject.corpus.grading import plain_text
from kinject.corpus.passages import with_passages
from kinject.question_formats import FORMATS, QuestionFormat
from kinject.types import Question


@dataclass(frozen=True, slots=True)
class Generation:
    """How long a written answer may be: `max_new_tokens` at most, thinking included, and up to the
    first of the texts `stop`.

    Without `stop` (None) a line break ends it, no text in a chat.
    """

    max_new_tokens: int
    stop: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a prompt becomes a chat: the text of the system's turn and the chat template's own
    arguments."""

    system: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One question in the form that one arm uses: format, few-shot examples in order, retrieved
    passages, best first.

    `rotation` is the number of positions by which the question's options were rotated. `generation`
    is there if the model writes its answer.
    """

    question: Question
    format: str
    shots: tuple[Question, ...] = ()
    passages: tuple[str, ...] = ()
    rotation: int = 0
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before the answer, and for each choice the text whose probability is computed.

    `header` is the start of `context` that a chat template puts into the system's turn. `turns` are
    the rest in turns of user and model, the question last. `is_dialogue`: the turns are the
    question's own, and stay apart.
    """

    context: str
    continuations: tuple[str, ...]
    header: str = ""
    turns: tuple[str, ...] = ()
    is_dialogue: bool = False


def pick_shots(question: Question, pool: Sequence[Question], n_shots: int) -> tuple[Question, ...]:
    """Return the first `n_shots` questions of `pool` that are not `question` itself, by id or by
    what it asks."""
    others = (shot for shot in pool if shot.id != question.id and not _is_same(shot, question))
    return tuple(shot for shot, _ in zip(others, range(n_shots), strict=False))


def _is_same(shot: Question, question: Question) -> bool:
    """Return whether an example asks what `question` asks, so that it would show the answer: with
    its choices in another order too, or other wrong ones."""
    if _plain(shot.question) != _plain(question.question):
        return False
    if not (shot.choices and question.choices):
        return True
    # "Which of these is true?" is another question for other choices.
    return _plain(shot.choices[shot.answer]) == _plain(question.choices[question.answer])


def _plain(text: str) -> str:
    return plain_text(text).casefold()


def rotate_options(question: Question, n: int) -> Question:
    """Return `question` with its options rotated by `n` positions: position i holds option i +
    n."""
    if not n:
        return question
    size = len(question.choices)
    choices = tuple(question.choices[(position + n) % size] for position in range(size))
    return replace(question, choices=choices, answer=(question.answer - n) % size)


def render_prompt(request: PromptRequest) -> Prompt:
    """Return `request` as text, in the layout of its format.

    Each example ends in its gold continuation and a blank line. Passages follow the examples,
    directly before the question, each followed by a blank line. A question with ``checks`` or
    ``messages`` is an instruction: its text stays as it is, after its own turns; with choices it
    is in the layout of its format. Without the question there are no turns either.
    """
    question, form = request.question, FORMATS[request.format]
    if question.checks or (question.messages and form.shows_question):
        return _render_instruction(request)
    shots = [(form.prompt(shot), form.answers(shot)[form.gold(shot)]) for shot in request.shots]
    header, examples = (
        form.header(question),
        "".join(f"{text} {answer}\n\n" for text, answer in shots),
    )
    question_text = with_passages(request.passages, form.prompt(question))
    continuations = _continuations(form, question)
    turns = (*(text for shot in shots for text in shot), question_text)
    return Prompt(f"{header}{examples}{question_text}", continuations, header, turns)


def _render_instruction(request: PromptRequest) -> Prompt:
    question, form = request.question, FORMATS[request.format]
    turns = [message["content"] for message in question.messages]
    # The system's text is no turn but the header, which a chat template gets apart.
    system = (
        [turns.pop(0)] if question.messages and question.messages[0]["role"] == "system" else []
    )
    text = question.question
    continuations: tuple[str, ...] = ()
    if not form.is_open:
        text, continuations = form.prompt(question), _continuations(form, question)
    question_text = "\n\n".join((*request.passages, text))
    header = "".join(f"{text}\n\n" for text in system)
    context = header + "\n\n".join((*turns, question_text))
    return Prompt(context, continuations, header, (*turns, question_text), is_dialogue=True)


def _continuations(form: QuestionFormat, question: Question) -> tuple[str, ...]:
    """Return the texts that are compared behind a prompt; none where the model writes."""
    if form.generates:
        return ()
    # The space before an answer is lm-evaluation-harness's default delimiter.
    return tuple(f" {text}" for text in form.answers(question))
