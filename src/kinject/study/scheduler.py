"""A study in progress: its recipe and question sets, the status of its stages, and the scheduler
that runs them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from kinject.augment.preview import Preview, preview
from kinject.corpus.questions import read_questions
from kinject.disk import delete_file, file_name, write_json, write_jsonl
from kinject.errors import InputError
from kinject.eval.plan import layout_of
from kinject.executors import Outcome
from kinject.recipe import EvalRecipe, EvalSection, QuestionSetSection, StudyRecipe, read_recipe
from kinject.results import Choice, Cost, Role, fewest_for
from kinject.study.arms import (
    Arm,
    StudyArms,
    check_names,
    check_questions,
    eval_overrides,
    expand_arms,
    head_format,
    override_arguments,
)
from kinject.study.planner import ArmRun, Planner
from kinject.study.stages import STAGE_KINDS, Stage, held
from kinject.terminal import CURRENCY, Progress, aligned, format_count
from kinject.types import Question


class StageExecutor(Protocol):
    """Runs stages elsewhere: in processes of this machine, or as jobs of a cluster."""

    def has_room(self) -> bool: ...

    def submit(self, task: Stage) -> None: ...

    def wait(self) -> list[Outcome]:
        """Wait until a stage has finished; return the outcomes of all that have."""
        ...

    def __enter__(self) -> StageExecutor: ...

    def __exit__(self, *error: object) -> None: ...


StartExecutor = Callable[[], StageExecutor]
CostKind = Literal["setup", "augment", "corpus", "train", "merge", "eval"]
"""The kinds of stages that a report lists."""


@dataclass
class StageStatus:
    """The status of stages by id: `done` holds the counts of finished stages, `failed` the error of
    failed ones."""

    stages: dict[str, Stage] = field(default_factory=dict)
    done: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, stages: Sequence[Stage]) -> list[Stage]:
        """Add `stages`, reading from disk which are done; return those that are neither done nor
        failed, each once.

        A model that was deleted is made again where one of them reads it.
        """
        pending: dict[str, Stage] = {}
        for stage in stages:
            self.stages[stage.id] = stage
            if stage.id in self.done or stage.id in self.failed:
                continue
            counts = stage.read_done()
            if counts is not None:
                self.done[stage.id] = counts
            else:
                pending.setdefault(stage.id, stage)
        readers = list(pending.values())
        while readers:
            stage = readers.pop()
            for other in stage.dependencies:
                if "deleted" in self.done.get(other, {}) and reads_files_of(
                    stage, self.stages[other]
                ):
                    del self.done[other]
                    pending[other] = self.stages[other]
                    readers.append(self.stages[other])
        return list(pending.values())

    def delete_model(self, stage: Stage) -> None:
        """Delete the weights that a finished stage made; its counts then hold `deleted`."""
        counts = self.done.get(stage.id)
        if counts is None or stage.kind not in ("train", "merge"):
            return
        if "deleted" in counts and not _weights_in(stage.folder):
            return
        # Another study that shares the stage may make it again.
        with held(stage):
            if "deleted" not in counts:
                self.done[stage.id] = {**counts, "deleted": True}
                # First: a kill in between must not leave a stage that is done and has no weights.
                write_json(stage.marker, self.done[stage.id])
            # A run that was killed in between has left the weights, and the marker.
            elif "deleted" not in (stage.read_done() or {}):
                return
            for path in _weights_in(stage.folder):
                delete_file(path)

    def all_done(self, stages: Sequence[Stage]) -> bool:
        """Return whether all of `stages` are done."""
        return all(stage.id in self.done for stage in stages)

    def first_failure(self, stages: Sequence[Stage]) -> tuple[Stage, str] | None:
        """Return the first of `stages` that failed, with its error; None if none did."""
        for stage in stages:
            if stage.id in self.failed:
                return stage, self.failed[stage.id]
        return None


def _weights_in(folder: Path) -> list[Path]:
    return [*folder.rglob("*.safetensors"), *folder.rglob("*.pt")]


def reads_files_of(stage: Stage, made: Stage) -> bool:
    """Return whether a stage reads a file of the stage `made`, beyond its manifest."""
    # With the slash: a stage that reads the manifest alone names the folder without it.
    folder = f"{made.folder}/"
    # The values of overrides are JSON, which escapes the letters beyond ASCII.
    in_json = json.dumps(folder).strip('"')
    if any(in_json in text for text in stage.overrides):
        return True
    return any(folder in str(value) for value in stage.parameters.values())


def run_stages(
    pending: Sequence[Stage],
    status: StageStatus,
    executor: StageExecutor,
    title: str,
    *,
    delete_models: bool = False,
) -> None:
    """Run each stage once its dependencies are done, and record the outcomes in `status`.

    A stage whose dependency failed is not started and gets no outcome. With `delete_models` weights
    are deleted once no other of the stages reads them.
    """
    waiting = {stage.id: stage for stage in pending}
    running: set[str] = set()
    with Progress(title, len(waiting), "stages") as progress:
        while waiting or running:
            ready = [
                stage
                for stage in waiting.values()
                if all(other in status.done for other in stage.dependencies)
            ]
            for stage in ready:
                if not executor.has_room():
                    break
                executor.submit(waiting.pop(stage.id))
                running.add(stage.id)
                progress.set_status(stage.label)
            if not running:
                break  # the others depend on a failed stage
            for outcome in executor.wait():
                running.discard(outcome.task.id)
                if outcome.result is None:
                    status.failed[outcome.task.id] = outcome.error
                else:
                    status.done[outcome.task.id] = outcome.result
                    if delete_models:
                        # The same command tries those that failed again.
                        others = [status.stages[name] for name in (*running, *status.failed)]
                        unfinished = [*waiting.values(), *others]
                        _delete_unread(outcome.task.dependencies, unfinished, status)
                progress.advance()


def _delete_unread(ids: Sequence[str], unfinished: Sequence[Stage], status: StageStatus) -> None:
    """Delete the weights of those of the stages `ids` that no unfinished stage reads."""
    for made in (status.stages[name] for name in ids):
        if not any(reads_files_of(stage, made) for stage in unfinished):
            status.delete_model(made)


@dataclass(frozen=True)
class SplitQuestions:
    """A question set as values of eval.questions: its test questions, and its validation questions
    if it has any."""

    name: str
    role: Role
    test: dict[str, Any]
    validation: dict[str, Any] | None
    n_left_out: int = 0
    """The questions that are in neither, because other sets choose on their documents."""
    n_chosen: int = 0
    """Of a set in study.validation, the validation questions of its `n_questions`: more than its
    fraction, where another set chooses with more of the documents."""
    n_questions: int = 0

    def validation_questions(self) -> list[Question]:
        """Return its validation questions, [] without any."""
        if self.validation is None:
            return []
        return read_questions(Path(self.validation["path"]), self.validation["layout"])

    @property
    def gets_passages(self) -> bool:
        """Whether it is asked with passages as well, if the recipe retrieves."""
        return QuestionSetSection(**self.test).gets_passages

    @property
    def chooses_k(self) -> bool:
        """Whether it has validation questions that are asked with passages."""
        return self.validation is not None and self.gets_passages


@dataclass
class Study:
    """A study in progress. Without `start_executor`, stages are planned and looked up, not run."""

    recipe: StudyRecipe
    eval_recipe: EvalRecipe
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
    model_of: dict[str, str] = field(default_factory=dict)
    """Id of a stage that makes or evaluates an arm -> the base model of the first such arm."""
    judge: Stage | None = None
    """The stage that measured the judge of written answers; None without a judge."""
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.planner = Planner(self.recipe.study)

    @property
    def evaluation(self) -> EvalSection:
        """The evaluation of every arm."""
        return self.eval_recipe.eval

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Every arm, in the order of the recipe."""
        return self.expanded.arms

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of retrieved passages with which arms are evaluated."""
        if not self.evaluation.retrieval:
            return ()
        return tuple(dict.fromkeys(self.evaluation.retrieval.k))

    def asked(self, item: SplitQuestions) -> list[Question]:
        """Return the test questions of a set that every arm is asked: the first ones, up to the
        limit."""
        section = QuestionSetSection(**item.test)
        return _read(section, section.path)[: self.evaluation.limit_of(section)]

    def prompt_format(self, question_set: str) -> tuple[str, int]:
        """Return the format and number of shots that decide choices and claims on a set."""
        return head_format(self.evaluation, question_set)

    def plan_run(self, arm: Arm, seed: int) -> ArmRun:
        """Return the stages of `arm` with `seed`."""
        others = {other.name: other for other in self.arms if other.model == arm.model}
        run = self.planner.arm_run(arm, seed, others)
        for stage in run.all_stages:
            self.model_of.setdefault(stage.id, arm.model)
        return run

    def evaluated(self, run: ArmRun, split: str, questions: Mapping[str, Any]) -> ArmRun:
        """Return `run` with the stage that evaluates it on the sets in `questions`."""
        stage = self.planner.eval_stage(run, split, questions, self.judge)
        self.model_of.setdefault(stage.id, run.arm.model)
        return replace(run, evaluations=(*run.evaluations, stage))

    def run_stages(self, stages: Sequence[Stage], title: str, *, is_last: bool = False) -> None:
        """Run those of `stages` that are not done.

        `is_last`: no later stage reads their models, which are deleted then unless
        `study.keep_models`.
        """
        pending, delete = self.status.add(stages), is_last and not self.recipe.study.keep_models
        if self.start_executor is None:
            return
        if pending:
            run_stages(pending, self.status, self.start_executor(), title, delete_models=delete)
        if delete:
            # Those that failed are tried again by the same command.
            unfinished = [stage for stage in stages if stage.id not in self.status.done]
            _delete_unread([stage.id for stage in stages], unfinished, self.status)


def open_study(recipe: StudyRecipe) -> Study:
    """Check the names in `recipe`, split its question sets and return the study, without an
    executor.

    Raises `RecipeError` with every fault, `InputError` for questions that cannot be split.
    """
    check_names(recipe)
    check_questions(recipe)
    section = recipe.study
    overrides = override_arguments(eval_overrides(section))
    evaluation = read_recipe(Path(section.eval), overrides, "eval", check_inputs=False)
    question_sets = _split_questions(
        evaluation.eval, section.validation or {}, recipe.run_dir / "questions"
    )
    return Study(recipe, evaluation, question_sets, expand_arms(section))


def _split_questions(
    section: EvalSection, fractions: Mapping[str, float], folder: Path
) -> list[SplitQuestions]:
    """Return the sets of `section` with their test and validation questions, in files in `folder`
    where they are split.

    A document is for choosing in all sets or in none: one whose id falls below the fraction of a
    set that has questions on it, or that the validation file of a set asks about. Its questions are
    validation questions of a set in `fractions`, and left out of the test questions of every other.
    Raises `InputError` if a part is empty.
    """
    items = {
        name: replace(item, layout=layout_of(item.layout, section.formats_of(item)))
        for name, item in section.sets().items()
    }
    choosing: set[str] = set()
    for name, item in items.items():
        if name in fractions:
            documents = {_document(question) for question in _read(item, item.path)}
            below = fractions[name]
            choosing |= {document for document in documents if _fraction(document) < below}
        elif item.validation:
            choosing |= {_document(question) for question in _read(item, item.validation)}
    return [
        _split_set(name, item, fractions.get(name), choosing, folder)
        for name, item in items.items()
    ]


def _split_set(
    name: str, item: QuestionSetSection, fraction: float | None, choosing: set[str], folder: Path
) -> SplitQuestions:
    """Return one set; the documents in `choosing` are for choosing only."""
    entry: dict[str, Any] = {key: value for key, value in asdict(item).items() if value is not None}
    entry.pop("validation", None)
    validation = None
    if item.validation:
        validation = {**entry, "path": item.validation}
    chosen, test = [], []
    if choosing or fraction is not None:
        for question in _read(item, item.path):
            if _document(question) in choosing:
                chosen.append(question)
            else:
                test.append(question)
    if fraction is None and not chosen:
        return SplitQuestions(name, item.role, entry, validation)

    def write(part: str, questions: Sequence[Question], why_none: str) -> dict[str, Any]:
        if not questions:
            raise InputError(
                f"{item.path}: study.validation: no {part} question of {name}: {why_none}."
            )
        path = folder / f"{file_name(name)}.{part}.jsonl"
        write_jsonl(path, map(_question_row, questions))
        # The rows are in kinject's own layout now, whatever the file was in.
        return {**entry, "path": str(path), "layout": "auto"}

    if fraction is None:
        why = "the other sets choose on all of its documents"
        test_entry = write("test", test, why)
        return SplitQuestions(name, item.role, test_entry, validation, len(chosen))
    why = f"{fraction} leaves none"
    return SplitQuestions(
        name,
        item.role,
        write("test", test, why),
        write("validation", chosen, why),
        n_chosen=len(chosen),
        n_questions=len(chosen) + len(test),
    )


def _question_row(question: Question) -> dict[str, Any]:
    """Return the question as a row of kinject's own layout: an open one has no choices."""
    row = asdict(question)
    left_out = {key for key in ("checks", "messages", "about") if not row[key]}
    if not row["choices"]:
        left_out |= {"choices", "answer"}
    return {key: value for key, value in row.items() if key not in left_out}


def _read(item: QuestionSetSection, path: str) -> list[Question]:
    return read_questions(Path(path), item.layout)


def _document(question: Question) -> str:
    # No document has such an id, so a question without one stays alone.
    return question.document_id or f"\0{question.id}"


def _fraction(document: str) -> float:
    """Return a number in [0, 1) that depends on the document's id alone."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=6).digest(), "big") / 2**48


def family_warnings(study: Study) -> list[str]:
    """Return a sentence for each question set and claim whose documents are too few for so many
    comparisons."""
    claims = study.recipe.study.claims or {}
    documents = _documents(study)
    # The headline comparisons of all sets are one family (docs/studies.md).
    family = sum(_headline_comparisons(study, item) for item in study.question_sets)
    warnings = [
        _too_few(f"{name}: the headline comparisons ({family:,})", len(of_set), family)
        for name, of_set in documents.items()
    ]
    for name, claim in claims.items():
        # Both flip the signs of documents, so that few of them give no small p.
        if claim.test in ("difference", "trend") and documents.keys() >= set(claim.sets()):
            asked = set().union(*(documents[item] for item in claim.sets()))
            comparison = f"claim {name}: the claims ({len(claims):,})"
            warnings.append(_too_few(comparison, len(asked), len(claims)))
    return list(filter(None, warnings))


def _too_few(comparison: str, n_documents: int, family: int) -> str:
    """Return a warning where a family of so many comparisons needs more documents, else ""."""
    needed = fewest_for(family)
    if n_documents >= needed:
        return ""
    return (
        f"{comparison} need {needed} documents (or single questions) with test questions, and "
        f"there are {n_documents}: no difference could be shown. Ask about more documents, or "
        "compare fewer arms and sets."
    )


def _headline_comparisons(study: Study, of: SplitQuestions) -> int:
    """Return how many comparisons a question set adds to the family of the recipe's own arms."""
    with_k = False
    if study.ks and of.gets_passages:
        validated = any(item.chooses_k for item in study.question_sets)
        # Of several K one is chosen on validation questions, of which there must be some.
        with_k = len(study.ks) == 1 or validated
    n = 0
    for arm in study.arms:
        if arm.sweep:
            continue
        if arm.trained and not arm.retrieval:
            n += 1  # to the base
            if with_k:
                n += 1  # to the base with passages
        if with_k and arm.rag:
            if not arm.trained:
                n += 1  # with passages to without
            elif arm.retrieval:
                n += 2  # with passages to the base with and without them
            else:
                n += 3  # those, and to itself without passages
    return n


def _documents(study: Study) -> dict[str, set[str]]:
    """Return the documents with test questions of each set whose file exists."""
    documents = {}
    for item in study.question_sets:
        # It may be one that setup has still to write.
        if Path(item.test["path"]).is_file():
            documents[item.name] = documents_of(item.name, study.asked(item))
    return documents


def documents_of(question_set: str, questions: Sequence[Question]) -> set[str]:
    """Return the documents that a set's questions are on; one without a document is its own."""
    # Two sets may have questions of one id, and no document has such a name.
    return {item.document_id or f"\0{question_set}: {item.id}" for item in questions}


def render_stages(study: Study, written: Mapping[str, Preview]) -> str:
    """Return the arms, the stages by kind, and the money that the missing ones will cost, by the
    estimates `written` of paraphrases."""
    stages = list(study.status.stages.values())
    missing = [stage for stage in stages if stage.id not in study.status.done]
    counts = Counter(stage.kind for stage in missing)
    to_run = [f"{counts[kind]} {kind}" for kind in STAGE_KINDS if counts[kind]]
    summary = f"{format_count(len(stages), 'stage')}, to run: {', '.join(to_run) or 'none'}"
    money = ""
    if not missing:
        money = "everything is done: the study would only write its report"
    cost = sum(item.cost for item in written.values())
    if cost:
        money = f"paraphrases: at most {cost:.2f} {CURRENCY}"
    return "\n\n".join(filter(None, (_arm_table(study), summary, money)))


def preview_paraphrases(study: Study) -> dict[str, Preview]:
    """Return the estimate of each stage that writes paraphrases and is not done, by its id."""
    written = {}
    for stage in study.status.stages.values():
        if stage.kind == "augment" and stage.id not in study.status.done:
            recipe = read_recipe(Path(stage.recipe), stage.overrides, "augment")
            written[stage.id] = preview(recipe, count_facts=False)
    return written


def _arm_table(study: Study) -> str:
    rows: list[tuple[str, ...]] = [("arm", "model", "seeds", "stages", "done", "differs in")]
    shared = study.recipe.study.overrides or {}
    for arm in study.arms:
        ids: set[str] = set()
        for run in study.runs:
            if run.arm == arm:
                ids.update(stage.id for stage in run.all_stages)
        n_done = sum(stage_id in study.status.done for stage_id in ids)
        own = {
            key: value
            for key, value in arm.overrides.items()
            # What the study sets for every arm tells none of them apart.
            if key not in shared or shared[key] != value
        }
        seeds = ""
        if arm.trained:
            seeds = ",".join(map(str, arm.seeds))
        rows.append((arm.name, arm.model, seeds, str(len(ids)), str(n_done), _differs(arm, own)))
    return aligned(rows, frozenset({3, 4}))


_WIDEST = 70
"""Characters of a table's last column, so that a row of usual names fits into a terminal."""


def _differs(arm: Arm, overrides: Mapping[str, Any]) -> str:
    """Return the corpus and the overrides of an arm, as far as they fit into the table."""
    corpus = ""
    if arm.corpus not in ("", "augmented"):
        corpus = f"corpus={arm.corpus} "
    text = corpus + ", ".join(f"{key}={json.dumps(value)}" for key, value in overrides.items())
    return text[:_WIDEST]


def make_costs(runs: Sequence[ArmRun], status: StageStatus, judge: Stage | None) -> list[Cost]:
    """Return the cost of each finished stage of each arm. A shared stage is listed with every arm
    that used it.

    `judge` is the stage that measured the judge of all arms: it counts as setup.
    """
    users = Counter(chain.from_iterable(_ids(run.all_stages) for run in runs))
    shared: tuple[Stage, ...] = ()
    if judge is not None:
        shared = (judge,)
        # Every arm uses the judge, so its cost is divided among all of them.
        users[judge.id] += len(runs)
    costs = []
    for run in runs:
        own = set(_ids(run.stages))
        for stage in (*shared, *run.all_stages):
            counts = status.done.get(stage.id)
            if counts is None:
                continue
            kind: CostKind = "setup"  # of the judge
            if stage is not judge:
                kind = cast(CostKind, stage.kind)
            cost = _cost(run, kind, counts, users[stage.id])
            # What the arm that it is matched to wrote and trained is in that one's costs.
            if stage.id not in own:
                cost = replace(cost, written_tokens=0, teacher_tokens=0, work_seconds=0.0)
            costs.append(cost)
    return costs


def _ids(stages: Sequence[Stage]) -> list[str]:
    return [stage.id for stage in stages]


def _cost(run: ArmRun, kind: CostKind, counts: Mapping[str, Any], shared_by: int) -> Cost:
    seed = None
    # The base is not trained, so no seed belongs to its costs.
    if run.arm.trained:
        seed = run.seed
    return Cost(
        arm=run.arm.name,
        model=run.arm.model,
        seed=seed,
        stage=kind,
        seconds=counts["seconds"],
        tokens=counts["tokens"],
        peak_bytes=counts["peak_bytes"],
        money=counts["money"],
        shared_by=shared_by,
        written_tokens=counts["written_tokens"],
        teacher_tokens=counts["teacher_tokens"],
        work_seconds=counts["work_seconds"],
    )
