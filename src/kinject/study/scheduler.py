"""A study in progress: its recipe and question sets, the status of its stages, and the scheduler that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.disk import file_name, write_jsonl
from kinject.errors import InputError
from kinject.eval.prompts import WITHOUT_QUESTION
from kinject.executors import Executor
from kinject.recipe import EvalSection, QuestionSetSection, StudyRecipe, read_recipe
from kinject.results import Choice
from kinject.study.arms import Arm, StudyArms, eval_overrides, expand_arms, override_arguments
from kinject.study.check import check_names
from kinject.study.stages import ArmRun, Planner, Stage
from kinject.terminal import Progress
from kinject.types import Question

StartExecutor = Callable[[], Executor]


@dataclass
class StageStatus:
    """The status of stages by id: `done` holds the counts of finished stages, `failed` the error of failed ones."""

    stages: dict[str, Stage] = field(default_factory=dict)
    done: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, stages: Sequence[Stage]) -> list[Stage]:
        """Add `stages`, reading from disk which are done; return those that are neither done nor failed, each once."""
        pending: dict[str, Stage] = {}
        for stage in stages:
            self.stages[stage.id] = stage
            if stage.id in self.done or stage.id in self.failed:
                continue
            done = stage.read_done()
            if done is not None:
                self.done[stage.id] = done
            else:
                pending.setdefault(stage.id, stage)
        return list(pending.values())

    def all_done(self, stages: Sequence[Stage]) -> bool:
        """Return whether all of `stages` are done."""
        return all(stage.id in self.done for stage in stages)

    def first_failure(self, stages: Sequence[Stage]) -> tuple[Stage, str] | None:
        """Return the first of `stages` that failed, with its error; None if none did."""
        return next(((stage, self.failed[stage.id]) for stage in stages if stage.id in self.failed), None)


def run_stages(pending: Sequence[Stage], status: StageStatus, executor: Executor, title: str) -> None:
    """Run each stage once its dependencies are done, and record the outcomes in `status`.

    A stage whose dependency failed is not started and gets no outcome.
    """
    waiting = {stage.id: stage for stage in pending}
    running: set[str] = set()
    with Progress(title, len(waiting), "stages") as progress:
        while waiting or running:
            ready = [stage for stage in waiting.values() if all(other in status.done for other in stage.dependencies)]
            for stage in ready:
                if not executor.has_room(stage):
                    break
                executor.submit(waiting.pop(stage.id))
                running.add(stage.id)
                progress.set_status(stage.label)
            if not running:
                break  # the others depend on a failed stage
            for outcome in executor.wait():
                running.discard(outcome.task.id)
                if outcome.done is None:
                    status.failed[outcome.task.id] = outcome.error
                else:
                    status.done[outcome.task.id] = outcome.done
                progress.advance()


@dataclass(frozen=True)
class SplitQuestions:
    """A question set as values of eval.questions: its test questions, and its validation questions if it has any."""

    name: str
    role: str
    test: dict[str, Any]
    validation: dict[str, Any] | None


@dataclass
class Study:
    """A study in progress. Without `start_executor`, stages are planned and looked up, but not run."""

    recipe: StudyRecipe
    evaluation: EvalSection
    question_sets: list[SplitQuestions]
    expanded: StudyArms
    start_executor: StartExecutor | None = None
    status: StageStatus = field(default_factory=StageStatus)
    tuned: dict[tuple[str, str], Any] = field(default_factory=dict)
    chosen_k: dict[tuple[str, str, str], int] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    late_claims: frozenset[str] = frozenset()
    runs: list[ArmRun] = field(default_factory=list)
    planner: Planner = field(init=False)
    _executor: Executor | None = None
    _exit_stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.planner = Planner(self.recipe)

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit_stack.__exit__(*error)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Every arm, in the order of the recipe."""
        return self.expanded.arms

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of retrieved passages with which arms are evaluated."""
        return tuple(dict.fromkeys(self.evaluation.retrieval.k)) if self.evaluation.retrieval else ()

    @property
    def prompt_format(self) -> tuple[str, int]:
        """The format and number of shots that decide choices and claims: the first of each in the eval recipe."""
        formats = [format for format in self.evaluation.formats if format not in WITHOUT_QUESTION]
        return (formats or list(self.evaluation.formats))[0], self.evaluation.shots[0]

    def plan_run(self, arm: Arm, seed: int) -> ArmRun:
        """Return the stages of `arm` with `seed`."""
        others = {other.name: other for other in self.arms if other.model == arm.model}
        return self.planner.arm_run(arm, seed, others)

    def run_stages(self, stages: Sequence[Stage], title: str) -> None:
        """Run those of `stages` that are not done. The executor starts with the first stage that has to run."""
        pending = self.status.add(stages)
        if pending and self.start_executor is not None:
            if self._executor is None:
                self._executor = self._exit_stack.enter_context(self.start_executor())
            run_stages(pending, self.status, self._executor, title)

    def fresh_copy(self, start_executor: StartExecutor) -> Study:
        """Return the same study with nothing planned or tuned yet, to be run by an executor."""
        return Study(self.recipe, self.evaluation, self.question_sets, self.expanded, start_executor)


def open_study(recipe: StudyRecipe) -> Study:
    """Check the names in `recipe`, split its question sets and return the study, without an executor.

    Raises `RecipeError` with every fault, `InputError` for questions that cannot be split.
    """
    check_names(recipe)
    section = recipe.study
    overrides = override_arguments(eval_overrides(section))
    evaluation = read_recipe(Path(section.eval), overrides, "eval", check_inputs=False).eval
    question_sets = _split_questions(evaluation, section.validation or {}, recipe.run_dir / "questions")
    return Study(recipe, evaluation, question_sets, expand_arms(recipe))


def _split_questions(section: EvalSection, fractions: Mapping[str, float], folder: Path) -> list[SplitQuestions]:
    """Return the sets of `section`; those in `fractions` are split by source document into files in `folder`.

    Whether a document is for validation depends on its id and the fraction alone. A set that names a validation file uses
    its questions for validation, and needs no fraction. Raises `InputError` if a part is empty.
    """
    sets = []
    for name, value in section.questions.items():
        item = QuestionSetSection(path=value) if isinstance(value, str) else value
        entry: dict[str, Any] = {key: field for key, field in asdict(item).items() if field is not None}
        entry.pop("validation", None)
        if name not in fractions:
            validation = {**entry, "path": item.validation} if item.validation else None
            sets.append(SplitQuestions(name, item.role, entry, validation))
            continue
        parts: dict[str, list[Question]] = {"validation": [], "test": []}
        for question in read_questions(Path(item.path), item.layout, item.n_choices):
            is_validation = _document_fraction(name, question) < fractions[name]
            parts["validation" if is_validation else "test"].append(question)
        entries = {}
        for part, questions in parts.items():
            if not questions:
                raise InputError(f"{item.path}: study.validation.{name}: {fractions[name]} leaves no {part} question.")
            path = folder / f"{file_name(name)}.{part}.jsonl"
            write_jsonl(path, (asdict(question) for question in questions))
            entries[part] = {**entry, "path": str(path), "layout": "native"}
        sets.append(SplitQuestions(name, item.role, entries["test"], entries["validation"]))
    return sets


def _document_fraction(name: str, question: Question) -> float:
    """Return a number in [0, 1) that depends on the question's document, or on the question if it has none."""
    key = f"{name}\0{question.document_id or question.id}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
