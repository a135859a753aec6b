"""A recipe's question sets and contexts, read and checked: faults come before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kinject.corpus.questions import read_questions
from kinject.disk import read_bytes
from kinject.errors import Fault, InputError, RecipeError
from kinject.eval.prompts import (
    MOST_LETTERS,
    SHOWS_OPTIONS,
    WITHOUT_QUESTION,
    Ask,
    Format,
    TaskStyle,
    pick_shots,
    rotated,
)
from kinject.eval.retrieval import measure_recall, read_contexts, read_passages
from kinject.eval.retrieval.retrievers import Ranks, make_retriever
from kinject.eval.tasks.task import Task, read_task
from kinject.eval.tasks.templates import compile_template
from kinject.recipe import EvalRecipe
from kinject.recipe.sections import EvalSection, QuestionSetSection
from kinject.results import Recall
from kinject.types import Passage, Question


def read_plan(recipe: EvalRecipe) -> Plan:
    """Return what `recipe` asks. Raises `RecipeError` or `InputError` with every fault that shows without a model."""
    section = recipe.eval
    if section is None:
        raise recipe.error("eval", "missing. kinject eval needs this section.")
    faults = list(_faults(recipe, section))
    if faults:
        raise RecipeError(faults)
    retriever = _load_retriever(recipe, section)
    sets: list[QuestionSet] = []
    problems: list[str] = []
    inputs = [Path(path) for path in (section.retrieval.documents if section.retrieval else ())]
    for name, value in section.questions.items():
        item = _item(value)
        named = (item.path, item.shots_from, item.validation, item.contexts)
        inputs.extend(Path(path) for path in named if path)
        try:
            found = list(_read_sets(name, item, section, retriever))
            sets.extend(found)
            inputs.extend(path for part in found if part.task for path in part.task.files)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    notes = [note for question_set in sets if question_set.task for note in question_set.task.notes]
    notes += retriever.notes if retriever else ()
    recalls = tuple(recall for question_set in sets for recall in _recalls(question_set, section))
    return Plan(tuple(sets), tuple(notes), tuple(dict.fromkeys(inputs)), _read_template(section), recalls)


def _item(value: str | QuestionSetSection) -> QuestionSetSection:
    return QuestionSetSection(path=value) if isinstance(value, str) else value


def _is_task(path: str) -> bool:
    return Path(path).suffix in (".yaml", ".yml")


def _faults(recipe: EvalRecipe, section: EvalSection) -> Iterator[Fault]:
    """Yield the faults that the sections' own types cannot see."""
    most_shots = max(section.shots)
    for name, value in section.questions.items():
        item, key = _item(value), f"eval.questions.{name}"
        if most_shots and item.shots_from is None and not _is_task(item.path):
            what = (
                f"eval.shots asks for {most_shots} examples, but shots_from is missing. Name the file that holds them."
            )
            yield Fault(recipe.where(key), key, what)
        if section.retrieval is None and (item.validation or item.contexts):
            given = "validation" if item.validation else "contexts"
            yield Fault(recipe.where(key), key, f"{given} is there, but eval.retrieval, which sets K, is missing.")
        if section.retrieval is not None and not section.retrieval.documents and not item.contexts:
            what = "has no contexts, and eval.retrieval names no documents to find them in. Give one or the other."
            yield Fault(recipe.where(key), key, what)
        if item.validation and item.contexts:
            yield Fault(
                recipe.where(key), key, "validation cannot be asked with contexts prepared for other questions."
            )
        if item.validation and _is_task(item.path):
            yield Fault(recipe.where(key), key, "validation is for question files; a task names its own splits.")
        if item.shots_from and _is_task(item.path):
            yield Fault(recipe.where(key), key, "shots_from is for question files; a task names its own examples.")
    for index, name in enumerate(section.retrieval_models or ()):
        if name not in section.models:
            key = f"eval.retrieval_models.{index}"
            what = f"found {name!r}, allowed are {', '.join(section.models)} (the names in eval.models)."
            yield Fault(recipe.where(key), key, what)
    if section.retrieval_models is not None and section.retrieval is None:
        what = "models are to get context, but eval.retrieval is missing. Add it, or take this key out."
        yield Fault(recipe.where("eval.retrieval_models"), "eval.retrieval_models", what)


def _read_template(section: EvalSection) -> str:
    """Return the source of the recipe's own template, "" for none, after compiling it once."""
    if section.template is None:
        return ""
    try:
        source = read_bytes(Path(section.template)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{section.template}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    try:
        compile_template(source)
    except InputError as error:
        raise InputError(f"{section.template}: {error}") from error
    return source


def _load_retriever(recipe: EvalRecipe, section: EvalSection) -> Ranks | None:
    if section.retrieval is None or not section.retrieval.documents:
        return None
    passages = read_passages([Path(path) for path in section.retrieval.documents], section.retrieval.passage_tokens)
    if max(section.retrieval.k) > len(passages):
        what = f"found {max(section.retrieval.k)}, but the documents hold only {len(passages)} passages. Ask for fewer."
        raise recipe.error("eval.retrieval.k", what)
    return make_retriever(section.retrieval, passages)


def _read_sets(
    name: str, item: QuestionSetSection, section: EvalSection, retriever: Ranks | None
) -> Iterator[QuestionSet]:
    """Yield the set, and its validation split where it has one."""
    task: Task | None = None
    if _is_task(item.path):
        task = read_task(Path(item.path))
        questions, pool = task.questions, task.pool
    else:
        questions, pool = tuple(read_questions(Path(item.path), item.layout, item.n_choices)), ()
    if item.shots_from and max(section.shots):
        pool = tuple(read_questions(Path(item.shots_from)))
    questions = questions[: section.limit]
    k = max(section.retrieval.k) if section.retrieval else 0
    contexts: tuple[tuple[Passage, ...], ...] = ()
    if item.contexts:
        contexts = tuple(read_contexts(Path(item.contexts), questions))
    elif retriever:
        contexts = _retrieved(retriever, questions, k)
    found = QuestionSet(name, item.role, questions, pool, contexts, task)
    _check_questions(item, section, found)
    yield found
    if item.validation and retriever:
        own = tuple(read_questions(Path(item.validation), item.layout, item.n_choices))
        split = replace(
            found,
            name=f"{name} (validation)",
            questions=own,
            contexts=_retrieved(retriever, own, k),
            chooses_k_for=name,
        )
        _check_questions(item, section, split)
        yield split


def _retrieved(retriever: Ranks, questions: Sequence[Question], k: int) -> tuple[tuple[Passage, ...], ...]:
    ranked = retriever.rank([item.question for item in questions], k)
    return tuple(tuple(retriever.passages[at] for at in places) for places in ranked)


def _check_questions(item: QuestionSetSection, section: EvalSection, found: QuestionSet) -> None:
    """Raise `InputError` where there are too few examples, or more choices than letters."""
    n_most = max(section.shots)
    n_fewest = min(map(len, found.examples(n_most)))
    if n_fewest < n_most:
        raise InputError(
            f"{item.shots_from or item.path}: holds {n_fewest} examples for a question of {found.name} (not counting "
            f"itself), but eval.shots asks for {n_most}. Ask for fewer or name another file."
        )
    lettered = [format for format in section.formats if format in SHOWS_OPTIONS]
    if lettered and found.task is None:
        for question in (*found.questions, *found.pool):
            if len(question.choices) > MOST_LETTERS:
                raise InputError(
                    f"{item.path}: question {question.id!r} has {len(question.choices)} choices, "
                    f"format {lettered[0]} has {MOST_LETTERS} letters. Use format texts."
                )


def _recalls(question_set: QuestionSet, section: EvalSection) -> Iterator[Recall]:
    if section.retrieval is None:
        return
    for k in dict.fromkeys(section.retrieval.k):
        recall = measure_recall(question_set.name, question_set.questions, question_set.contexts, k)
        if recall.n:
            yield recall


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
