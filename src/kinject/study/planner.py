"""Plans the stages of a study: how each arm with each seed is split into them, and their ids.

A stage's id is a hash of its recipe after overrides, of the files that the recipe names, and of the
ids of the stages that it reads, so two arms share a stage that does the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from glob import has_magic
from pathlib import Path
from typing import Any

from kinject.augment.styles import styles_apart
from kinject.corpus.spans import Json
from kinject.disk import content_id, file_hash, folder_hash
from kinject.errors import KinjectError, Problem
from kinject.gguf_files import PACKAGE, gguf_file, model_folder
from kinject.heap.parse import find_files
from kinject.hub_data import find_data_set
from kinject.models import model_hash
from kinject.recipe import StudyRecipe, read_recipe, read_values
from kinject.recipe.sections import QuestionSetSection, StudySection
from kinject.sandbox import BASE_CORPUS
from kinject.study.arms import (
    Arm,
    StudyArms,
    base_arm,
    base_models,
    check_shared_recipes,
    drop_output_folders,
    eval_overrides,
    override_arguments,
)
from kinject.study.stages import SANDBOX_ROWS, SANDBOX_RUNS, Stage
from kinject.terminal import exact_number
from kinject.version import package_version

_MODEL = "model"
"""Name of the only model of an eval stage."""
_FORMAT = 2
"""Version of the scheme of ids: a change of it makes every stage of every study again."""


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed: the stages that make its weights, in order, and those that evaluate
    them.

    `model_dir` is the folder of the weights, or the base model's hub name. `train` is one of
    `stages`, None for the base.
    """

    arm: Arm
    seed: int
    stages: tuple[Stage, ...]
    model_dir: str
    train: Stage | None
    evaluations: tuple[Stage, ...] = ()
    matched: tuple[Stage, ...] = ()
    """Those of the arms that it is matched to."""

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Every stage once, in order."""
        every = (*self.matched, *self.stages, *self.evaluations)
        return tuple({stage.id: stage for stage in every}.values())


@dataclass(frozen=True)
class _Match:
    """The arm whose steps, tokens or seconds another takes: `trainings` are read, `stages` come
    before them, and `parameters` name the folders of the trainings."""

    stages: tuple[Stage, ...] = ()
    trainings: tuple[Stage, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)


def check_recipes(recipe: StudyRecipe, expanded: StudyArms) -> None:
    """Raise `RecipeError` for faults of the recipes that the arms share, and of what an arm
    reads."""
    check_shared_recipes(recipe, expanded)
    _check_corpora(recipe, expanded.arms)


def _check_corpora(recipe: StudyRecipe, arms: Iterable[Arm]) -> None:
    """Raise `RecipeError` for arms with a style whose rows no stage trains on: they would be paid
    for, and the arm would read the originals alone."""
    problems = []
    for arm in arms:
        if not arm.trained or arm.corpus != "augmented":
            continue
        overrides = override_arguments(arm.augment_overrides)
        section = read_recipe(Path(recipe.study.augment or ""), overrides).augment
        if section is None:
            continue
        names = styles_apart(section)
        if names:
            message = (
                f"{arm.name!r}: {', '.join(names)} writes prompts or conversations into sft.jsonl, "
                "and a study trains on corpus.jsonl. Set augment.one_corpus: true, or take it out."
            )
            problems.append(Problem("study.arms", message))
    recipe.raise_any(problems)


class Planner:
    """Makes the stages of one study; the same work gets the same stage."""

    def __init__(self, section: StudySection) -> None:
        _hash.cache_clear()  # files may have changed since the last study in this process
        self.section = section
        self.models = base_models(section)
        self.cache_dir = Path(self.section.cache_dir)

    def setup_stages(self) -> Iterator[list[Stage]]:
        """Yield the stages that come first, in rounds: each of study.setup, then the base models
        that recipes make.

        A round is planned when it is requested, because its ids depend on files that earlier rounds
        write.
        """
        for entry in self.section.setup:
            yield [self._setup_stage(entry)]
        stages = [
            self._setup_stage(item.recipe, item.overrides)
            for item in self.models.values()
            if item.recipe
        ]
        # Models of one recipe and overrides are one stage.
        yield list({stage.id: stage for stage in stages}.values())

    def model_dir(self, name: str) -> str:
        """Return the folder or hub name of a base model."""
        item = self.models[name]
        if item.path:
            return item.path
        return str(self._setup_stage(str(item.recipe), item.overrides).folder / "model")

    def _setup_stage(self, entry: str, overrides: Mapping[str, Any] | None = None) -> Stage:
        if entry in SANDBOX_ROWS:
            identity = content_id(_FORMAT, entry)
            return _unchanged_setup(identity, BASE_CORPUS.parent, entry)
        run = SANDBOX_RUNS.get(entry)
        if run is not None:
            identity = content_id(_FORMAT, entry, run.content_hash())
            return _unchanged_setup(identity, run.run_dir, entry)
        arguments = override_arguments(overrides or {})
        values = read_values(Path(entry), arguments)
        identity = content_id(_FORMAT, "setup", *self._hashed(values))
        if not overrides:
            return _unchanged_setup(identity, Path(str(values.get("run_dir"))), entry)
        # With overrides the result is another one, and must not replace that of the recipe itself.
        folder = self.cache_dir / "setup" / identity
        arguments.append(_run_dir_argument(folder))
        return Stage(identity, "setup", folder, entry, tuple(arguments), label=entry)

    def arm_run(self, arm: Arm, seed: int, others: Mapping[str, Arm]) -> ArmRun:
        """Plan `arm` with `seed`, without evaluations; `others` are the arms of its base model by
        name."""
        base = self.model_dir(arm.model)
        if not arm.trained:
            return ArmRun(arm, seed, (), base, None)
        corpus_stages, corpus = self._corpus(arm, seed)
        before = self._start_weights(arm, seed, others)
        match = self._match(arm, seed, others)
        overrides = {
            **arm.train_overrides,
            "model.path": arm.through or before.model_dir,
            "corpus.path": str(corpus),
            "seed": seed,
        }
        # The last stage of each depends on those before it.
        read = (*corpus_stages[-1:], *before.stages[-1:], *match.trainings)
        train = self._train(arm, seed, overrides, read, match.parameters)
        merges, model_dir = self._merge(arm, train, base)
        return ArmRun(
            arm,
            seed,
            (*before.stages, *corpus_stages, train, *merges),
            str(model_dir),
            train,
            matched=(*before.matched, *match.stages),
        )

    def _corpus(self, arm: Arm, seed: int) -> tuple[list[Stage], Path]:
        """Return the stages that write the arm's corpus, and its path."""
        if arm.corpus not in ("augmented", "random"):
            return [], Path(arm.corpus)
        overrides = arm.augment_overrides
        # Otherwise all seeds share the paraphrases, which are written and paid for once.
        if self.section.new_paraphrases_per_seed:
            overrides["seed"] = seed
        label = f"corpus of {arm.name}"
        augment = self._stage("augment", label, self.section.augment, overrides)
        corpus = augment.folder / "corpus.jsonl"
        if arm.corpus == "augmented":
            return [augment], corpus
        parameters = {"source": str(corpus), "seed": seed}
        shuffled = self._stage("corpus", label, dependencies=(augment.id,), parameters=parameters)
        return [augment, shuffled], shuffled.folder / "corpus.jsonl"

    def _start_weights(self, arm: Arm, seed: int, others: Mapping[str, Arm]) -> ArmRun:
        """Return the run whose weights the training of `arm` continues: the base, or the arm that
        it is trained after."""
        if arm.after:
            return self.arm_run(others[arm.after], seed, others)
        return ArmRun(arm, seed, (), self.model_dir(arm.model), None)

    def _match(self, arm: Arm, seed: int, others: Mapping[str, Arm]) -> _Match:
        """Return the trainings that decide for how long `arm` trains."""
        if not arm.matched:
            return _Match()
        other = self.arm_run(others[arm.matched], seed, others)
        if other.train is None:
            return _Match()
        folder = str(other.train.folder)
        if arm.match_steps_of:
            return _Match(other.all_stages, (other.train,), {"match_steps_of": folder})
        if arm.match_tokens_of:
            return _Match(other.all_stages, (other.train,), {"match_tokens_of": folder})
        # Seconds a step are not known beforehand: the arm trains once unmatched to measure them.
        unmatched = self.arm_run(replace(arm, match_seconds_of=""), seed, others)
        assert unmatched.train is not None  # `arm` is trained
        return _Match(
            (*other.all_stages, *unmatched.all_stages),
            (other.train, unmatched.train),
            {"match_seconds_of": folder, "unmatched": str(unmatched.train.folder)},
        )

    def _train(
        self,
        arm: Arm,
        seed: int,
        overrides: Mapping[str, Any],
        read: Sequence[Stage],
        parameters: Mapping[str, str],
    ) -> Stage:
        """Return the training of `arm`, which reads what the stages in `read` wrote."""
        dependencies = tuple(stage.id for stage in read)
        label = _run_label(arm, seed)
        return self._stage("train", label, self.section.train, overrides, dependencies, parameters)

    def _merge(self, arm: Arm, train: Stage, base: str) -> tuple[list[Stage], Path]:
        """Return the stages that merge the trained weights with others, and the folder of the
        result: the trained weights themselves where the arm merges nothing."""
        stages: list[Stage] = []
        made_by, model_dir = train, train.folder / "model"
        if arm.alpha is not None:
            # The base that was tuned: with the other one alpha 0 would be no model of the two.
            merging = {"base": arm.through or base, "tuned": str(model_dir), "alpha": arm.alpha}
            made_by = self._merge_stage(train, made_by, merging)
            stages.append(made_by)
            model_dir = made_by.folder / f"alpha-{exact_number(arm.alpha)}"
        if arm.through:
            sum_of = {
                "tuned": str(model_dir),
                "add": base,
                "minus": arm.through,
                # Files that only parameters name are not hashed by `_hashed`.
                "hash": input_hashes(base, self.cache_dir),
            }
            made_by = self._merge_stage(train, made_by, sum_of)
            stages.append(made_by)
            model_dir = made_by.folder / "merged"
        return stages, model_dir

    def _merge_stage(self, train: Stage, made_by: Stage, parameters: Mapping[str, Any]) -> Stage:
        return self._stage("merge", train.label, dependencies=(made_by.id,), parameters=parameters)

    def eval_stage(
        self, run: ArmRun, split: str, questions: Mapping[str, Any], judge: Stage | None = None
    ) -> Stage:
        """Return the stage that evaluates an arm on the sets in `questions` (values as
        eval.questions takes them).

        `judge` is the stage that measured the judge of written answers.
        """
        arm = run.arm
        if arm.retrieval:
            # Other sets get no passages: the arm itself answers them.
            questions = {
                name: item
                for name, item in questions.items()
                if QuestionSetSection(**item).gets_passages
            }
        overrides = self._asking(run.model_dir, questions, arm)
        dependencies = [stage.id for stage in run.stages[-1:]]
        parameters = {"split": split}
        if judge is not None:
            dependencies.append(judge.id)
            parameters["judge"] = str(judge.folder)
        label = f"{split} questions to {arm.name}"
        if arm.trained:
            label = f"{split} questions to {_run_label(arm, run.seed)}"
        return self._stage("eval", label, self.section.eval, overrides, dependencies, parameters)

    def judge_stage(self, questions: Mapping[str, Any]) -> Stage:
        """Return the stage that measures the judge of written answers on `questions` by set."""
        model = next(iter(self.models))
        arm = base_arm(self.section, model)
        # The judge grades texts alone, so nothing is retrieved for it.
        overrides = self._asking(self.model_dir(model), questions, replace(arm, rag=False))
        label = "the judge on planted answers"
        return self._stage("judge", label, self.section.eval, overrides)

    def _asking(self, model_dir: str, questions: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
        """Return the overrides of the shared eval recipe for the model of an arm, with its
        retrieval or without."""
        overrides = eval_overrides(self.section, arm)
        if not arm.rag:
            overrides = _without(overrides, "eval.retrieval")
            overrides["eval.retrieval"] = None
        if arm.retrieval:
            # Passages do not change the perplexity, which the arm without them has already.
            overrides["eval.perplexity_corpus"] = None
        overrides = _without(overrides, "eval.questions")
        return overrides | {"eval.models": {_MODEL: model_dir}, "eval.questions": dict(questions)}

    def _stage(
        self,
        kind: str,
        label: str,
        recipe: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        dependencies: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
    ) -> Stage:
        """Return a stage of the cache, named by the hash of all that its result depends on."""
        arguments = override_arguments(overrides or {})
        values: dict[str, Any] = {}
        if recipe:
            values = read_values(Path(recipe), arguments)
        if kind in ("eval", "judge"):
            _keep_stored_part(values["eval"])
        # Another version of kinject may train or score differently; paraphrases that were paid for
        # remain valid.
        made_by = package_version()
        if kind == "augment":
            made_by = ""
        hashed = self._hashed(values, dict(parameters or {}), list(dependencies))
        identity = content_id(_FORMAT, kind, made_by, *hashed)
        folder = self.cache_dir / kind / identity
        if recipe:
            # After the hash, which gives the folder its name.
            arguments.append(_run_dir_argument(folder))
        return Stage(
            identity,
            kind,
            folder,
            recipe or "",
            tuple(arguments),
            tuple(dependencies),
            parameters or {},
            label,
        )

    def _hashed(self, values: Mapping[str, Any], *more: Json) -> tuple[Json, dict[str, str]]:
        """Return the part of a stage's id that depends on its recipe, on the files that it names,
        and on `more`."""
        values = drop_output_folders(values)
        relative = _relative_to([values, *more], f"{self.cache_dir}/")
        return relative, input_hashes(values, self.cache_dir)


def _unchanged_setup(identity: str, folder: Path, entry: str) -> Stage:
    """Return the setup stage of an entry as it is, which runs in the entry's own folder."""
    return Stage(identity, "setup", folder, entry, (), label=entry)


def _run_label(arm: Arm, seed: int) -> str:
    return f"{arm.name}, seed {seed}"


def _without(overrides: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key: value for key, value in overrides.items() if not key.startswith(prefix)}


def _keep_stored_part(evaluation: dict[str, Any]) -> None:
    """Remove the scores, in place: answers are stored before they are scored, so these change no
    stage. The judge alone sends further prompts, and has a section of its own, which remains."""
    evaluation.pop("scores", None)


def _relative_to(value: Json, folder: str) -> Json:
    """Return `value` with paths below `folder` made relative, so that ids do not depend on the
    location of the cache."""
    if isinstance(value, dict):
        return {key: _relative_to(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative_to(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(folder):
        return f"stages:{value[len(folder) :]}"
    return value


def _run_dir_argument(folder: Path) -> str:
    return f"run_dir={json.dumps(str(folder))}"


def input_hashes(value: Json, cache_dir: Path) -> dict[str, str]:
    """Return path -> hash of every file and folder that a recipe's values name, except those below
    `cache_dir`."""
    hashes, key = {}, ""
    if isinstance(value, str):
        key = "path"
    for text in _possible_paths(value, key):
        path = model_folder(text)  # of a package that is a model its files, not its name
        # What stages wrote there is known by their ids.
        if cache_dir in path.parents:
            continue
        if path.exists():
            hashes[text] = _hash(path)
            continue
        files = _files_named_by(text)
        if files:
            hashes[text] = content_id([(str(file), _hash(file)) for file in files])
    return hashes


def _files_named_by(text: str) -> list[Path]:
    """Return the files of this machine that a pattern (docs/*.md) or a data set in a folder
    (folder:configuration) names; [] for any other text."""
    data = find_data_set(text)
    if data is not None and data.is_folder:
        return [Path(data.name)]
    if not has_magic(text):
        return []
    # A prompt with a question mark is a pattern too, as a rule one that fits no file.
    with contextlib.suppress(KinjectError):
        return [Path(file.path) for file in find_files([Path(text)]) if not file.fault]
    return []


_MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer.json")
_LONGEST_PATH = 1000
"""Characters of a text that may be a path: beyond, and over several lines, it is a prompt, and the
system refuses to look for it."""


@cache
def _hash(path: Path) -> str:
    if not path.is_dir():
        return file_hash(path)
    # Of a package with a model in GGUF the model alone: Python writes __pycache__ beside it.
    if gguf_file(path) is not None or any((path / name).exists() for name in _MODEL_FILES):
        return model_hash(path)
    return folder_hash(path)


_PATH_TABLES = frozenset(("models", "questions"))
"""Keys of recipes with tables of name: path."""
_PATH_KEYS = _PATH_TABLES.union(
    ("path", "documents", "adapter", "tokenizer", "teacher", "style_files", "contamination_check"),
    ("shots_from", "validation", "perplexity_corpus", "validation_corpus"),
)
"""Keys of recipes whose text, or each of whose texts, is a path."""


def _may_be_path(text: str, key: str) -> bool:
    if len(text) >= _LONGEST_PATH or "\n" in text:
        return False
    if "/" in text or "." in text or text.startswith(PACKAGE):
        return True
    # Elsewhere a word is that of an option, beside which a folder of its name may lie.
    return key in _PATH_KEYS


def _possible_paths(value: Json, key: str) -> Iterator[str]:
    """Yield the texts in `value` that may be paths; `key` is the recipe's key of it."""
    if isinstance(value, str) and _may_be_path(value, key):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _possible_paths(item, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            of_item = name
            if key in _PATH_TABLES and isinstance(item, str):
                of_item = key
            yield from _possible_paths(item, of_item)
