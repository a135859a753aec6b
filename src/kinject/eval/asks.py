"""What a recipe's `eval` section asks: every arm's prompts over question sets that are read. No model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kinject.eval.prompts import WITHOUT_QUESTION, Ask, Format, TaskStyle, pick_shots, rotated
from kinject.eval.tasks import Task
from kinject.recipe.sections import EvalSection
from kinject.results import Recall
from kinject.types import Passage, Question


@dataclass(frozen=True)
class QuestionSet:
    """A question set as the recipe wants it: its questions, the pool of examples, and passages, the best first.

    `task` is the lm-evaluation-harness task that it comes from, None for others. `chooses_k_for` names the set for which
    this one is the validation split, "" for others.
    """

    name: str
    role: Literal["learning", "retention"]
    questions: tuple[Question, ...]
    pool: tuple[Question, ...]
    contexts: tuple[tuple[Passage, ...], ...]
    task: Task | None = None
    chooses_k_for: str = ""

    def examples(self, n: int) -> list[tuple[Question, ...]]:
        """Return the `n` examples before each question, fewer where there are not enough."""
        if self.task is not None:
            return self.task.examples(n)[: len(self.questions)]
        return [pick_shots(question, self.pool, n) for question in self.questions]

    def styles(self) -> list[TaskStyle]:
        """Return what the task writes around each question."""
        return (
            [TaskStyle()] * len(self.questions) if self.task is None else list(self.task.styles[: len(self.questions)])
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """One cell of the results before its answers: `model` asked in one way."""

    model: str
    format: Format
    shots: int
    k: int

    @property
    def name(self) -> str:
        """The arm's name in results: the model's, with "+rag" where it gets passages."""
        return f"{self.model}+rag" if self.k else self.model


@dataclass(frozen=True)
class Plan:
    """Everything that a run asks; `recalls` say what retrieval found, `inputs` are the files that were read."""

    sets: tuple[QuestionSet, ...]
    notes: tuple[str, ...]
    inputs: tuple[Path, ...]
    template: str = ""
    recalls: tuple[Recall, ...] = ()


def arms_of(section: EvalSection, task: Task | None = None) -> list[Arm]:
    """Return every arm in the order of results: formats, shots, models, K; the first model without context leads.

    A task has a format of its own. Baselines without the question get neither examples nor passages; one is added where
    pmi needs it.
    """
    with_context = section.models if section.retrieval_models is None else section.retrieval_models
    ks = section.retrieval.k if section.retrieval else ()
    formats: list[Format] = ["task"] if task is not None else list(section.formats)
    if task is None and "pmi" in section.scores and "texts-no-question" not in formats:
        formats.append("texts-no-question")
    return [
        Arm(model, format, shots, k)
        for format in dict.fromkeys(formats)
        for shots in ((0,) if format in WITHOUT_QUESTION else section.shots)
        for model in section.models
        for k in (0, *(dict.fromkeys(ks) if model in with_context and format not in WITHOUT_QUESTION else ()))
    ]


def asks_of(question_set: QuestionSet, arm: Arm, template: str = "") -> Iterator[tuple[Ask, tuple[str, ...]]]:
    """Yield what `arm` asks of each question, with the ids of the passages that stand before it."""
    contexts: Sequence[tuple[Passage, ...]] = question_set.contexts or ((),) * len(question_set.questions)
    source = "" if arm.format in WITHOUT_QUESTION or arm.format == "task" else template
    examples, styles = question_set.examples(arm.shots), question_set.styles()
    for question, context, shots, style in zip(question_set.questions, contexts, examples, styles, strict=True):
        texts, ids = zip(*((p.text, p.id) for p in context[: arm.k]), strict=True) if context[: arm.k] else ((), ())
        for n in range(len(question.choices) if arm.format == "rotations" else 1):
            yield Ask(rotated(question, n), arm.format, shots, texts, n, source, style), ids
