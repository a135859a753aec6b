"""The phases of a study: base models, choices on validation questions, all arms, then the test questions, once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.disk import file_name, write_jsonl
from kinject.errors import InputError
from kinject.eval.prompts import WITHOUT_QUESTION
from kinject.recipe import EvalSection, QuestionSetSection, StudyRecipe, is_model, read_recipe
from kinject.results import Choice
from kinject.study.analysis import Run
from kinject.study.arms import Arm, eval_overrides, expand_arms, override_arguments, tuning_grids
from kinject.study.check import check_names
from kinject.study.executors import LOG, Executor
from kinject.study.records import AskSetting, Records
from kinject.study.scheduler import StageStatus, schedule_stages
from kinject.study.stages import ArmStages, Planner, Stage
from kinject.types import Question


@dataclass(frozen=True)
class SplitSet:
    """One set: eval.questions' entry for its test questions, and for its validation questions where it has some."""

    name: str
    role: str
    test: dict[str, Any]
    validation: dict[str, Any] | None


def split_sets(section: EvalSection, shares: Mapping[str, float], folder: Path) -> list[SplitSet]:
    """Return the sets of `section`; those in `shares` are split by source document into files in `folder`.

    Whether a document is validation depends on its id and the share alone. A set without a share that names a validation
    file has those questions for validation. Raises `InputError` when a side is empty.
    """
    found = []
    for name, value in section.questions.items():
        item = QuestionSetSection(path=value) if isinstance(value, str) else value
        entry: dict[str, Any] = {key: field for key, field in asdict(item).items() if field is not None}
        entry.pop("validation", None)
        if name not in shares:
            own_file = {**entry, "path": item.validation} if item.validation else None
            found.append(SplitSet(name, item.role, entry, own_file))
            continue
        questions = read_questions(Path(item.path), item.layout, item.n_choices)
        parts: dict[str, list[Question]] = {"validation": [], "test": []}
        for question in questions:
            parts["validation" if _draw(name, question) < shares[name] else "test"].append(question)
        entries = {}
        for part, own in parts.items():
            if not own:
                raise InputError(f"{item.path}: study.validation.{name}: {shares[name]} leaves no {part} question.")
            path = folder / f"{file_name(name)}.{part}.jsonl"
            write_jsonl(path, (asdict(question) for question in own))
            entries[part] = {**entry, "path": str(path), "layout": "native"}
        found.append(SplitSet(name, item.role, entries["test"], entries["validation"]))
    return found


def _draw(name: str, question: Question) -> float:
    """Return a number in [0, 1) that depends on the question's document (or the question, where it has none)."""
    key = f"{name}\0{question.document_id or question.id}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


ExecutorFactory = Callable[[], Executor]


@dataclass
class Study:
    """A study on its way: what is planned, what was chosen, what is done. Without `make_executor` nothing is run."""

    recipe: StudyRecipe
    planner: Planner
    asked: EvalSection
    sets: list[SplitSet]
    make_executor: ExecutorFactory | None
    stack: ExitStack
    status: StageStatus = field(default_factory=StageStatus)
    chosen: dict[tuple[str, str], Any] = field(default_factory=dict)
    chosen_k: dict[tuple[str, str, str], int] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    _executor: Executor | None = None

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of passages that are asked."""
        return tuple(dict.fromkeys(self.asked.retrieval.k)) if self.asked.retrieval else ()

    @property
    def head(self) -> tuple[str, int]:
        """The format and shots by which choices are made and claims judged: the first of each."""
        formats = [format for format in self.asked.formats if format not in WITHOUT_QUESTION]
        return (formats or list(self.asked.formats))[0], self.asked.shots[0]

    @property
    def arms(self) -> list[Arm]:
        """Every arm, in the order of the recipe."""
        return list({(run.stages.arm.model, run.stages.arm.name): run.stages.arm for run in self.runs}.values())

    def do(self, stages: Sequence[Stage], what: str) -> None:
        """Do what is missing of `stages`; the executor starts with the first that is."""
        schedule_stages(stages, self.status, None, what)
        if self.make_executor is None or all(s.id in self.status.done or s.id in self.status.failed for s in stages):
            return
        if self._executor is None:
            self._executor = self.stack.enter_context(self.make_executor())
        schedule_stages(stages, self.status, self._executor, what)


def open_study(recipe: StudyRecipe, make_executor: ExecutorFactory | None, stack: ExitStack) -> Study:
    """Check `recipe` whole and return the study, nothing run. Raises `RecipeError` with every fault, `InputError`."""
    check_names(recipe)
    section = recipe.study
    asked = read_recipe(
        Path(section.eval), override_arguments(eval_overrides(section)), "eval", check_inputs=False
    ).eval
    sets = split_sets(asked, section.validation or {}, recipe.run_dir / "questions")
    return Study(recipe, Planner(recipe), asked, sets, make_executor, stack)


def prepare(study: Study) -> None:
    """Make what study.setup and study.models ask for. Raises `InputError` where that fails: nothing else can start."""
    for stages in study.planner.prepare_stages():
        study.do(stages, "preparing")
        failure = study.status.first_failure(stages)
        if failure is not None:
            raise InputError(f"{failure[0].recipe}: {failure[1]} (its log: {failure[0].folder / LOG})")
    for name in study.recipe.study.models if study.make_executor is not None else ():
        path = study.planner.model_dir(name)
        if not is_model(path):
            raise study.recipe.error(
                ("study", "models", name), f"found {path!r}, but nothing is there. Check the path."
            )


def choose(study: Study) -> None:
    """Try each grid on validation questions and take the best value; of equals the first."""
    grids = tuning_grids(study.recipe)
    runs = {
        key: [(value, [_validated(study, _stages(study, arm, seed, [])) for seed in arm.seeds]) for value, arm in grid]
        for key, grid in grids.items()
    }
    study.do([stage for grid in runs.values() for _, own in grid for run in own for stage in run.all], "choosing")
    for (model, name), grid in runs.items():
        choice = (study.recipe.study.tune or {})[name]
        candidates = []
        for value, own in grid:
            done = [run for run in own if study.status.all_done(run.all)]
            if done:
                candidates.append((value, *_pooled([_accuracy(study, done, name, 0) for name in choice.sets()])))
        if candidates:
            best = max(candidates, key=lambda candidate: candidate[1])
            at_edge = len(grid) > 1 and best[0] in (grid[0][0], grid[-1][0])
            found = Choice(model, choice.key, choice.arm, ", ".join(choice.sets()), tuple(candidates), best[0], at_edge)
            study.chosen[model, name] = best[0]
            study.choices.append(found)
        elif study.make_executor is not None:
            failure = study.status.first_failure([stage for _, own in grid for run in own for stage in run.all])
            first = f"{failure[0].label}: {failure[1]} (its log: {failure[0].folder / LOG})" if failure else "none ran"
            raise InputError(f"study.tune.{name}: every value failed for {model}; the first: {first}")


def plan_runs(study: Study) -> None:
    """Expand every arm and seed to its stages; the evaluations come later."""
    arms = expand_arms(study.recipe, study.chosen)
    study.runs = [Run(_stages(study, arm, seed, arms), ()) for arm in arms for seed in arm.seeds]


def train_arms(study: Study) -> None:
    """Do what all arms need before they are asked."""
    study.do([stage for run in study.runs for stage in run.all], "arms")


def choose_k(study: Study) -> None:
    """Ask validation questions with each K; take the best for each arm and set. A lone K needs no questions."""
    if not study.ks:
        return
    split = [item for item in study.sets if item.validation is not None]
    if len(study.ks) > 1 and split:
        study.runs = [_validated(study, run.stages) if run.stages.arm.rag else run for run in study.runs]
        study.do([stage for run in study.runs for stage in run.asked], "choosing K")
    for arm in (arm for arm in study.arms if arm.rag):
        for item in split if len(study.ks) > 1 else ():
            _choose_k(study, arm, item)
        first = next(
            (study.chosen_k[key] for item in split if (key := (arm.model, arm.name, item.name)) in study.chosen_k), None
        )
        lone = study.ks[0] if len(study.ks) == 1 else first
        for item in study.sets:  # a set without validation questions is asked with the K of the first that has some
            if lone is not None:
                study.chosen_k.setdefault((arm.model, arm.name, item.name), lone)


def _choose_k(study: Study, arm: Arm, item: SplitSet) -> None:
    own = [run for run in study.runs if run.stages.arm == arm and study.status.all_done(run.all)]
    if own:
        candidates = [(k, *_accuracy(study, own, item.name, k)) for k in study.ks]
        best = max(candidates, key=lambda candidate: candidate[1])[0]
        at_edge = best in (study.ks[0], study.ks[-1])
        study.choices.append(Choice(arm.model, "k", arm.name, item.name, tuple(candidates), best, at_edge))
        study.chosen_k[arm.model, arm.name, item.name] = best


def ask_test(study: Study) -> None:
    """Ask every arm the test questions."""
    questions = {item.name: item.test for item in study.sets}
    study.runs = [
        replace(run, asked=(*run.asked, _asked(study, run.stages, "test", questions))) for run in study.runs
    ]  # fmt: skip
    study.do([stage for run in study.runs for stage in run.all], "asking")


def run_phases(study: Study, before_test: Callable[[Study], None]) -> None:
    """Go through all phases; `before_test` is called when everything is chosen and no test question was read."""
    for phase in (prepare, choose, plan_runs, train_arms, choose_k):
        phase(study)
    before_test(study)
    ask_test(study)


def read_records(study: Study) -> Records:
    """Return the test answers of every run that finished."""
    records = Records(study.asked.scores[0])
    for run in study.runs:
        if study.status.all_done(run.all):
            arm = run.stages.arm
            records.read(arm.model, arm.name, run.stages.seed, run.asked[-1].folder)
    return records


def _stages(study: Study, arm: Arm, seed: int, arms: Sequence[Arm]) -> ArmStages:
    own = {other.name: other for other in arms if other.model == arm.model}
    return study.planner.arm_stages(arm, seed, own)


def _validated(study: Study, stages: ArmStages) -> Run:
    questions = {item.name: item.validation for item in study.sets if item.validation is not None}
    return Run(stages, (_asked(study, stages, "validation", questions),))


def _asked(study: Study, stages: ArmStages, split: str, questions: Mapping[str, Any]) -> Stage:
    return study.planner.eval_stage(stages, split, questions, rag=stages.arm.rag)


def _pooled(found: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return the accuracy over the questions of several sets, and their number."""
    n_questions = sum(n for _, n in found)
    return round(sum(accuracy * n for accuracy, n in found) / n_questions, 6), n_questions


def _accuracy(study: Study, runs: Sequence[Run], question_set: str, k: int) -> tuple[float, int]:
    """Return the mean validation accuracy of `runs` (seeds of one arm) and the number of questions."""
    records = Records(study.asked.scores[0])
    for run in runs:
        arm = run.stages.arm
        records.read(arm.model, arm.name, run.stages.seed, run.asked[0].folder)
    matrix = records.matrix(arm.model, arm.name, AskSetting(question_set, *study.head, k))
    return round(matrix.mean(), 6), len(matrix.question_ids)
