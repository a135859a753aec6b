"""The formats in which a question is asked: the layout of its prompt, and the form of its answers.

A format of your own is a `QuestionFormat` in a file of yours, and one line of `FORMATS`
(CONTRIBUTING.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase

from kinject.types import Question

MOST_LETTERS = len(ascii_uppercase)
NO_ANSWER = "unknown"
"""The answer that an example shows whose question has none."""
_ASKS_FOR_LETTER = "Answer with the letter of the correct option."


def question_prompt(question: str) -> str:
    """Return the plain prompt of a question, ``Question: ...\\nAnswer:``; an answer follows after
    a space."""
    return f"Question: {question}\nAnswer:"


@dataclass(frozen=True)
class QuestionFormat:
    """A format, `label` in reports. Its answers are scored by log-prob, or with `generates` written
    by the model.

    `shows_question`, `shows_options`: the parts of the prompt. `letters`: an answer is the letter
    of an option. `rotates`: the question is asked once for each rotation of its options. `control`
    names the format that compares the same answers without the question, "" where there is none. A
    subclass may write `header`, `prompt` and `answers` otherwise.
    """

    label: str
    shows_question: bool = True
    shows_options: bool = False
    letters: bool = False
    rotates: bool = False
    generates: bool = False
    control: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the model writes a text, so that the question needs no choices."""
        return self.generates and not self.letters

    def header(self, question: Question) -> str:
        """Return the text before examples and passages, which a chat template puts into the
        system's turn."""
        if not self.shows_options or not question.subject:
            return ""
        # The words of MMLU's own prompts, as lm-evaluation-harness has them.
        subject = question.subject.replace("_", " ")
        return f"The following are multiple choice questions (with answers) about {subject}.\n\n"

    def prompt(self, question: Question) -> str:
        """Return the question without its answer, which follows after a space.

        With options it is the layout of MMLU in lm-evaluation-harness 0.4 (tasks/mmlu/default).
        """
        if not self.shows_options:
            return question_prompt(question.question) if self.shows_question else "Answer:"
        lettered = zip(ascii_uppercase, question.choices, strict=False)
        options = "".join(f"\n{letter}. {choice}" for letter, choice in lettered)
        text = options.removeprefix("\n")
        if self.shows_question:
            text = f"{question.question.strip()}{options}"
        if self.generates:
            text += f"\n{_ASKS_FOR_LETTER}"
        return f"{text}\nAnswer:"

    def answers(self, question: Question) -> tuple[str, ...]:
        """Return the text of each answer that is compared; of a written one the text that an
        example shows."""
        if self.is_open:
            return question.accepted[:1] or (NO_ANSWER,)
        if self.letters:
            return tuple(ascii_uppercase[: len(question.choices)])
        return question.choices

    def gold(self, question: Question) -> int:
        """Return the index of the correct one of `answers`."""
        return 0 if self.is_open else question.answer


# Of a base that read only stories, "Question: ... Answer:" gave 36 to 41%, this 63 to 70%.
class Continuation(QuestionFormat):
    """The question is the beginning of a text, which each choice continues: for a base model that
    knows no questions."""

    def prompt(self, question: Question) -> str:
        """Return the question as it is, without an ellipsis at its end."""
        return question.question.removesuffix(" ...")


FORMATS: dict[str, QuestionFormat] = {
    "letters": QuestionFormat(
        "letters", shows_options=True, letters=True, control="letters-no-question"
    ),
    "texts": QuestionFormat("option texts", control="texts-no-question"),
    "hybrid": QuestionFormat(
        "option texts with the options shown", shows_options=True, control="hybrid-no-question"
    ),
    "rotations": QuestionFormat(
        "letters, options rotated",
        shows_options=True,
        letters=True,
        rotates=True,
        control="rotations-no-question",
    ),
    "continuation": Continuation(
        "option texts that continue the question", control="texts-no-question"
    ),
    "letters-no-question": QuestionFormat(
        "letters without the question", shows_question=False, shows_options=True, letters=True
    ),
    "texts-no-question": QuestionFormat("option texts without the question", shows_question=False),
    "hybrid-no-question": QuestionFormat(
        "option texts with the options shown, without the question",
        shows_question=False,
        shows_options=True,
    ),
    "rotations-no-question": QuestionFormat(
        "letters, options rotated, without the question",
        shows_question=False,
        shows_options=True,
        letters=True,
        rotates=True,
    ),
    "letters-written": QuestionFormat(
        "letters, written", shows_options=True, letters=True, generates=True
    ),
    "generate": QuestionFormat("written answers", generates=True),
}
"""Name in a recipe (eval.formats) -> the format."""


def format_of(name: str) -> QuestionFormat:
    """Return the format `name` of stored answers; one that this program does not have compares
    choices."""
    return FORMATS.get(name, QuestionFormat(name))
