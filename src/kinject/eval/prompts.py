"""Prompts as data: how a question, its examples and its passages become a text and its continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, Literal

from kinject.errors import InputError
from kinject.eval.scores import LETTERED
from kinject.eval.tasks.templates import compile_template, render
from kinject.types import Question

Format = Literal["letters", "texts", "hybrid", "rotations", "letters-no-question", "texts-no-question", "task"]
MOST_LETTERS = len(ascii_uppercase)
WITHOUT_QUESTION = frozenset({"letters-no-question", "texts-no-question"})
SHOWS_OPTIONS = LETTERED | {"hybrid"}


@dataclass(frozen=True, slots=True)
class TaskStyle:
    """What a task of lm-evaluation-harness writes around its questions, which come rendered."""

    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"


@dataclass(frozen=True, slots=True)
class Ask:
    """One question as one arm asks it: format, few-shot examples in order, retrieved passages, the best first.

    `rotation` is how far the question's options were moved round. `template` is the source of a Jinja template that
    writes the context instead of the format's own layout; "" for none. `style` belongs to the format ``task``.
    """

    question: Question
    format: Format
    shots: tuple[Question, ...] = ()
    passages: tuple[str, ...] = ()
    rotation: int = 0
    template: str = ""
    style: TaskStyle = TaskStyle()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before the answer, and for each choice the text whose probability is asked.

    `header` is the beginning of `context` that a chat template gets as the system's turn.
    """

    context: str
    continuations: tuple[str, ...]
    header: str = ""


def pick_shots(question: Question, pool: Sequence[Question], n_shots: int) -> tuple[Question, ...]:
    """Return the first `n_shots` questions of `pool` that are not `question` itself (by id, or by text and choices)."""
    others = (
        shot
        for shot in pool
        if shot.id != question.id and (shot.question, shot.choices) != (question.question, question.choices)
    )
    return tuple(shot for shot, _ in zip(others, range(n_shots), strict=False))


def rotated(question: Question, n: int) -> Question:
    """Return `question` with its options moved round by `n` places: place i holds the option i + n."""
    size = len(question.choices)
    choices = tuple(question.choices[(place + n) % size] for place in range(size))
    return replace(question, choices=choices, answer=(question.answer - n) % size)


def render_prompt(ask: Ask) -> Prompt:
    """Return `ask` as text.

    ``texts``: "Question: ...\\nAnswer:" with the choices as continuations. ``letters``: the layout of MMLU in
    lm-evaluation-harness 0.4 (tasks/mmlu/default): a header that names the subject, the options as "A. ...", "Answer:",
    with the letters as continuations; ``rotations`` is the same. ``hybrid``: that layout with the choices as
    continuations. ``...-no-question``: the question left out. ``task``: the question's text as it is, within `style`.
    Each example ends in its gold continuation and a blank line. Passages stand after the examples, directly before the
    question, each followed by a blank line. Raises `InputError` when the template cannot be rendered.
    """
    if ask.template:
        return Prompt(_from_template(ask), _continuations(ask.question, ask))
    between = ask.style.fewshot_delimiter
    examples = "".join(f"{_solved(shot, ask)}{between}" for shot in ask.shots)
    passages = "".join(f"{passage}\n\n" for passage in ask.passages)
    header = _header(ask)
    context = f"{header}{examples}{passages}{_stem(ask.question, ask.format)}"
    return Prompt(context, _continuations(ask.question, ask), header)


def scored_texts(question: Question, format: str) -> tuple[str, ...]:
    """Return what each continuation says without its leading space: the letters, or the choices themselves."""
    return tuple(ascii_uppercase[: len(question.choices)]) if format in LETTERED else question.choices


def _header(ask: Ask) -> str:
    if ask.format == "task":
        return ask.style.description
    if ask.format not in SHOWS_OPTIONS or not ask.question.subject:
        return ""
    subject = ask.question.subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n"


def _solved(shot: Question, ask: Ask) -> str:
    return f"{_stem(shot, ask.format)}{_continuations(shot, ask)[shot.answer]}"


def _stem(question: Question, format: str) -> str:
    if format == "task":
        return question.question
    if format == "texts-no-question":
        return "Answer:"
    if format == "texts":
        return f"Question: {question.question}\nAnswer:"
    lettered = zip(ascii_uppercase, question.choices, strict=False)
    options = "".join(f"\n{letter}. {choice}" for letter, choice in lettered)
    asked = f"{question.question.strip()}{options}" if format not in WITHOUT_QUESTION else options.removeprefix("\n")
    return f"{asked}\nAnswer:"


def _continuations(question: Question, ask: Ask) -> tuple[str, ...]:
    between = ask.style.target_delimiter if ask.format == "task" else " "
    return tuple(f"{between}{text}" for text in scored_texts(question, ask.format))


def _from_template(ask: Ask) -> str:
    """Return the context by `ask.template`: it sees question, choices, letters, subject, shots, passages, format."""

    def seen(question: Question) -> dict[str, Any]:
        texts = scored_texts(question, ask.format)
        return {
            "question": question.question, "choices": list(question.choices), "subject": question.subject,
            "letters": list(ascii_uppercase[: len(question.choices)]), "answer": texts[question.answer],
        }  # fmt: skip

    own = seen(ask.question)
    del own["answer"]  # the prompt must not hold it
    values = {**own, "shots": [seen(shot) for shot in ask.shots], "passages": list(ask.passages), "format": ask.format}
    try:
        return render(compile_template(ask.template), values)
    except InputError as error:
        raise InputError(f"eval.template: cannot be rendered for question {ask.question.id!r}: {error}") from error
