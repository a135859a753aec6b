"""The question sets, arms and contexts of an evaluation, read and checked before any model is
loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from kinject.corpus.gold_answers import GoldIndex
from kinject.corpus.questions import Layout, read_questions
from kinject.errors import InputError, Problem
from kinject.eval.prompts import Generation, PromptRequest, pick_shots, rotate_options
from kinject.eval.retrieval import Retriever, make_retriever, read_passages
from kinject.process import world_size
from kinject.question_formats import FORMATS, MOST_LETTERS, QuestionFormat
from kinject.recipe import EvalRecipe, Recipe
from kinject.recipe.conflicts import find_problems
from kinject.recipe.sections import EvalSection, QuestionSetSection
from kinject.recipe.sections.eval import Asking
from kinject.results import Role
from kinject.terminal import format_count
from kinject.types import ArmName, Passage, Question


@dataclass(frozen=True, slots=True)
class EvalArm:
    """A model with one format, one number of few-shot examples and one number `k` of retrieved
    passages."""

    model: str
    format: str
    shots: int
    k: int

    @property
    def name(self) -> str:
        """The arm's name in results."""
        return ArmName.asked(self.model, self.k)

    @property
    def control(self) -> EvalArm:
        """The arm that compares the same answers without the question; its format is "" if none
        does."""
        return EvalArm(self.model, FORMATS[self.format].control, 0, 0)


@dataclass(frozen=True)
class QuestionSet:
    """A question set of the recipe: questions, pool of examples, retrieved passages (best first),
    and its arms.

    `contexts` has the passages of each question, or is empty. `generation` bounds the answers that
    a model writes.
    """

    name: str
    role: Role
    questions: tuple[Question, ...]
    pool: tuple[Question, ...]
    contexts: tuple[tuple[Passage, ...], ...]
    arms: tuple[EvalArm, ...] = ()
    generation: Generation = Generation(32)

    def examples(self, n: int) -> list[tuple[Question, ...]]:
        """Return the `n` examples before each question, fewer if there are not enough."""
        return [pick_shots(question, self.pool, n) for question in self.questions]

    def requests(self, arm: EvalArm) -> Iterator[tuple[PromptRequest, tuple[str, ...]]]:
        """Yield the prompts of `arm` for each question, each with the ids of the passages in it."""
        contexts: Sequence[tuple[Passage, ...]] = self.contexts or ((),) * len(self.questions)
        form = FORMATS[arm.format]
        examples = self.examples(arm.shots)
        for question, context, shots in zip(self.questions, contexts, examples, strict=True):
            texts = tuple(passage.shown for passage in context[: arm.k])
            ids = tuple(passage.id for passage in context[: arm.k])
            for n in range(len(question.choices) if form.rotates else 1):
                request = PromptRequest(rotate_options(question, n), arm.format, shots, texts, n)
                if form.generates:
                    request = replace(request, generation=self.generation)
                yield request, ids


@dataclass(frozen=True)
class Plan:
    """All question sets of an evaluation; `inputs` are the files that were read, `models` (name ->
    hash) those for retrieval."""

    sets: tuple[QuestionSet, ...]
    notes: tuple[str, ...]
    inputs: tuple[Path, ...]
    models: Mapping[str, str] = field(default_factory=dict)

    def open_questions(self) -> dict[tuple[str, str], Question]:
        """Return the questions that are answered in writing, by question set and id."""
        found: dict[tuple[str, str], Question] = {}
        for item in self.sets:
            if any(FORMATS[arm.format].is_open for arm in item.arms):
                found |= {(item.name, question.id): question for question in item.questions}
        return found


def read_plan(recipe: EvalRecipe) -> Plan:
    """Return the plan of `recipe`.

    Raises `RecipeError` or `InputError` with every fault that can be found without a model.
    """
    section = recipe.eval
    check_section(recipe)
    retriever = _make_retriever(recipe, section)
    sets: list[QuestionSet] = []
    problems: list[str] = []
    inputs: list[Path] = []
    if section.retrieval:
        inputs.extend(map(Path, section.retrieval.documents))
    for name, item in section.sets().items():
        inputs.extend(Path(path) for path in (item.path, item.shots_from) if path)
        try:
            sets.append(_read_set(name, item, section, retriever))
        # All sets are read, so that their faults are named together.
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    plan = Plan(tuple(sets), (), tuple(dict.fromkeys(inputs)))
    if retriever is not None:
        plan = replace(plan, notes=tuple(retriever.notes), models=retriever.models)
    return plan


def expand_arms(section: EvalSection, item: QuestionSetSection) -> tuple[EvalArm, ...]:
    """Return every arm in the order of results: formats, shots, models, K; the first model without
    context leads.

    Controls, which leave out the question, come last and get neither examples nor passages.
    """
    ks = [0]
    if section.retrieval and item.gets_passages:
        # Without repeats: an arm is asked once.
        ks += dict.fromkeys(section.retrieval.k)
    arms: list[EvalArm] = []
    for format in section.formats_with_controls(item):
        ways = product(section.shots, section.models, ks)
        if not FORMATS[format].shows_question:
            ways = product((0,), section.models, (0,))
        arms += [EvalArm(model, format, shots, k) for shots, model, k in ways]
    return tuple(arms)


def check_section(recipe: Recipe) -> None:
    """Raise `RecipeError` with every problem of the eval section that no file is needed to see."""
    if recipe.eval is None:
        return
    formats: list[QuestionFormat] = []
    for item in recipe.eval.sets().values():
        formats += [FORMATS[name] for name in recipe.eval.formats_of(item)]
    asking = Asking(
        writes=any(form.is_open for form in formats),
        scores=not all(form.generates for form in formats),
        is_shared=world_size() > 1,
    )
    recipe.raise_any(find_problems("eval", recipe, asking))


def _make_retriever(recipe: EvalRecipe, section: EvalSection) -> Retriever | None:
    if section.retrieval is None or not section.retrieval.documents:
        return None
    passages = read_passages(section.retrieval, recipe.documents)
    most, n_shown = max(section.retrieval.k), len(passages)
    if most > n_shown:
        message = (
            f"found {most}, but the documents hold only {format_count(n_shown, 'passage')}. Ask "
            "for fewer."
        )
        recipe.raise_any([Problem("eval.retrieval.k", message)])
    return make_retriever(section.retrieval, passages)


def _read_set(
    name: str, item: QuestionSetSection, section: EvalSection, retriever: Retriever | None
) -> QuestionSet:
    pool: tuple[Question, ...] = ()
    golds = GoldIndex()
    formats = section.formats_of(item)
    layout = layout_of(item.layout, formats)
    if Path(item.path).suffix in (".yaml", ".yml"):
        raise InputError(
            f"{item.path}: a task of lm-evaluation-harness? It runs its own tasks on this model: "
            "python -m kinject.eval.harness run --model kinject --model_args path=MODEL --tasks "
            "TASK."
        )
    # One index for both files: a question may not have two golds.
    questions = tuple(read_questions(Path(item.path), layout, golds=golds))
    if item.shots_from and max(section.shots):
        pool = tuple(read_questions(Path(item.shots_from), layout, golds=golds))
    questions = questions[: section.limit_of(item)]
    contexts: tuple[tuple[Passage, ...], ...] = ()
    if retriever and section.retrieval and item.gets_passages:
        # For the largest K once: smaller ones are its first passages.
        contexts = tuple(retriever.find(questions, max(section.retrieval.k)))
    arms = expand_arms(section, item)
    answered = next((question for question in questions if question.is_answerable), None)
    if item.role == "unanswerable" and answered is not None:
        raise InputError(
            f"{item.path}: question {answered.id!r} has an answer, "
            "but the set's role is unanswerable."
        )
    test = QuestionSet(
        name,
        role_of(item.role, questions),
        questions,
        pool,
        contexts,
        arms,
        Generation(section.max_new_tokens, section.stop),
    )
    _check_questions(item, section, test)
    return test


def layout_of(layout: Layout, formats: Iterable[str]) -> Layout:
    """Return the layout in which a set asked in `formats` is read: answers are no choices if models
    only write theirs."""
    if all(FORMATS[name].is_open for name in formats):
        return "open"
    return layout


def role_of(role: Role, questions: Sequence[Question]) -> Role:
    """Return the role of a set: that of the recipe, or unanswerable if none of its questions has an
    answer."""
    has_answers = not questions or any(question.is_answerable for question in questions)
    return role if has_answers else "unanswerable"


def _check_instructions(
    item: QuestionSetSection, section: EvalSection, questions: Sequence[Question]
) -> None:
    """Raise `InputError` for turns before a question outside a chat, and for examples before an
    instruction."""
    plain = [name for name, table in section.tables().items() if not table.chat]
    for question in questions:
        at = f"{item.path}: question {question.id!r}"
        if question.messages and plain:
            raise InputError(
                f"{at}: messages: are turns of a chat, but {plain[0]} is asked without one. "
                "Set eval.chat: true."
            )
        if (question.checks or question.messages) and max(section.shots):
            raise InputError(f"{at}: checks and messages take no examples. Set eval.shots: [0].")


def _check_questions(
    item: QuestionSetSection, section: EvalSection, question_set: QuestionSet
) -> None:
    """Raise `InputError` if there are too few examples, or more choices than letters."""
    n_most = max(section.shots)
    # A question is no example of itself, so some have fewer than others.
    n_fewest = min(map(len, question_set.examples(n_most)))
    if n_fewest < n_most:
        raise InputError(
            f"{item.shots_from or item.path}: holds {format_count(n_fewest, 'example')} for a "
            f"question of {question_set.name} (not counting itself), but eval.shots asks for "
            f"{n_most}. Ask for fewer or name another file."
        )
    _check_instructions(item, section, question_set.questions)
    formats = section.formats_of(item)
    chosen = [name for name in formats if not FORMATS[name].is_open]
    lettered = [name for name in formats if FORMATS[name].shows_options]
    # Examples are shown in the same format.
    for question in (*question_set.questions, *question_set.pool):
        if chosen and not question.choices:
            raise InputError(
                f"{item.path}: question {question.id!r} has no choices, which format {chosen[0]} "
                "needs. Give it choices and the index of the correct one, or set "
                "eval.formats: [generate]."
            )
        if lettered and len(question.choices) > MOST_LETTERS:
            raise InputError(
                f"{item.path}: question {question.id!r} has {len(question.choices)} choices, "
                f"format {lettered[0]} has {MOST_LETTERS} letters. Use format texts."
            )
