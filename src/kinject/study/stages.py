"""Stages of a study: how arms are split into stages, and the function that runs a stage in a
worker.

A stage's id is a hash of its recipe after overrides, of the files that the recipe names, and of the
ids of the stages that it reads, so two arms share a stage that does the same. Its folder is
``cache_dir/KIND/ID``; done.json, written last, marks it as finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from kinject.corpus.rows import CorpusFile
from kinject.disk import (
    check_output,
    content_id,
    file_hash,
    folder_hash,
    read_json,
    read_manifest,
    write_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError
from kinject.models import model_hash
from kinject.process import peak_memory
from kinject.recipe import TrainRecipe, read_recipe, read_values
from kinject.recipe.sections import QuestionSetSection, StudySection
from kinject.sandbox import (
    BASE,
    BASE_CORPUS,
    CHAT_CORPUS,
    INSTRUCT,
    write_base_corpus,
    write_dialogues,
    write_sentence_rows,
)
from kinject.study.arms import (
    Arm,
    base_arm,
    base_models,
    drop_output_folders,
    eval_overrides,
    override_arguments,
)

_SANDBOX_RUNS = {"sandbox-base": BASE, "sandbox-instruct": INSTRUCT}
"""Entries of study.setup that copy a model of the sandbox as it ships."""
_SANDBOX_ROWS: Mapping[str, Callable[[], object]] = {
    "sandbox-corpus": lambda: (BASE_CORPUS.exists() or write_base_corpus(BASE_CORPUS),),
    "sandbox-sentences": lambda: write_sentence_rows(BASE_CORPUS.parent),
    "sandbox-chat": lambda: CHAT_CORPUS.exists() or write_dialogues(CHAT_CORPUS),
}
"""Entries of study.setup that write rows of the sandbox."""
DONE = "done.json"
MODEL = "model"
"""Name of the only model of an eval stage."""
_FORMAT = 2
_COSTS = ("tokens", "money", "written_tokens", "teacher_tokens", "work_seconds")


@dataclass(frozen=True)
class Stage:
    """One unit of work: a recipe with overrides, to be run once the stages with ids `dependencies`
    are done.

    `parameters` holds JSON values beside the recipe: folders of other stages, an alpha. `label`
    names the stage for people.
    """

    id: str
    kind: str
    folder: Path
    recipe: str
    overrides: tuple[str, ...]
    dependencies: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def marker(self) -> Path:
        """The file that is written last. A setup stage may run in the recipe's own folder, so its
        marker has the id."""
        return self.folder / (f".{self.id}.{DONE}" if self.kind == "setup" else DONE)

    def run(self) -> dict[str, Any]:
        """Run the stage; see `run_stage`."""
        return run_stage(self)

    def read_done(self) -> dict[str, Any] | None:
        """Return the counts of the finished stage (see `run_stage`), or None if it is not finished."""
        if not self.marker.is_file():
            return None
        counts = read_json(self.marker, f"Delete {self.folder} to run this stage again.")
        return counts if counts.get("id") == self.id else None


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
        return tuple(
            {stage.id: stage for stage in (*self.matched, *self.stages, *self.evaluations)}.values()
        )


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
        yield list({stage.id: stage for stage in stages}.values())

    def model_dir(self, name: str) -> str:
        """Return the folder or hub name of a base model."""
        item = self.models[name]
        return item.path or str(
            self._setup_stage(str(item.recipe), item.overrides).folder / "model"
        )

    def _setup_stage(self, entry: str, overrides: Mapping[str, Any] | None = None) -> Stage:
        if entry in _SANDBOX_ROWS:
            return Stage(
                content_id(_FORMAT, entry), "setup", BASE_CORPUS.parent, entry, (), label=entry
            )
        if run := _SANDBOX_RUNS.get(entry):
            return Stage(
                content_id(_FORMAT, entry, run.content_hash()),
                "setup",
                run.run_dir,
                entry,
                (),
                label=entry,
            )
        arguments = override_arguments(overrides or {})
        values = read_values(Path(entry), arguments)
        identity = content_id(_FORMAT, "setup", *self._hashed(values))
        if not overrides:
            return Stage(
                identity, "setup", Path(str(values.get("run_dir"))), entry, (), label=entry
            )
        folder = self.cache_dir / "setup" / identity
        return Stage(
            identity, "setup", folder, entry, (*arguments, _run_dir_argument(folder)), label=entry
        )

    def arm_run(self, arm: Arm, seed: int, others: Mapping[str, Arm]) -> ArmRun:
        """Plan `arm` with `seed`, without evaluations; `others` are the arms of its base model by
        name."""
        base = self.model_dir(arm.model)
        if not arm.trained:
            return ArmRun(arm, seed, (), base, None)
        stages, corpus = self._corpus_stages(arm, seed)
        dependencies, matched = [stage.id for stage in stages[-1:]], list[Stage]()
        before = self.arm_run(others[arm.after], seed, others) if arm.after else None
        if before is not None:
            stages = [*before.stages, *stages]
            matched += before.matched
            dependencies.append(before.stages[-1].id)
        start = arm.through or (before.model_dir if before else base)
        overrides = {
            **arm.train_overrides,
            "model.path": start,
            "corpus.path": str(corpus),
            "seed": seed,
        }
        parameters = {}
        other = self.arm_run(others[arm.matched], seed, others) if arm.matched else None
        if other is not None and other.train is not None:
            matched += other.all_stages
            dependencies.append(other.train.id)
            parameters["match_steps_of" if arm.match_steps_of else "match_seconds_of"] = str(
                other.train.folder
            )
            unmatched = (
                self.arm_run(replace(arm, match_seconds_of=""), seed, others)
                if arm.match_seconds_of
                else None
            )
            if unmatched is not None and unmatched.train is not None:
                matched += unmatched.all_stages
                dependencies.append(unmatched.train.id)
                parameters["unmatched"] = str(unmatched.train.folder)
        label = f"{arm.name}, seed {seed}"
        train = self._arm_stage(
            arm, "train", label, self.section.train, overrides, dependencies, parameters
        )
        stages.append(train)
        model_dir = train.folder / "model"
        if arm.alpha is not None:
            merging = {"base": base, "tuned": str(model_dir), "alpha": arm.alpha}
            stages.append(
                self._arm_stage(arm, "merge", label, dependencies=[train.id], parameters=merging)
            )
            model_dir = stages[-1].folder / f"alpha-{arm.alpha:g}"
        if arm.through:
            sum_of = {
                "tuned": str(model_dir),
                "add": base,
                "minus": arm.through,
                "hash": input_hashes(base, self.cache_dir),
            }
            stages.append(
                self._arm_stage(
                    arm, "merge", label, dependencies=[stages[-1].id], parameters=sum_of
                )
            )
            model_dir = stages[-1].folder / "merged"
        return ArmRun(arm, seed, tuple(stages), str(model_dir), train, matched=tuple(matched))

    def _corpus_stages(self, arm: Arm, seed: int) -> tuple[list[Stage], Path]:
        """Return the stages that write the arm's corpus, and its path."""
        if arm.corpus not in ("augmented", "random"):
            return [], Path(arm.corpus)
        overrides = {
            **arm.augment_overrides,
            **({"seed": seed} if self.section.new_paraphrases_per_seed else {}),
        }
        label = f"corpus of {arm.name}"
        augment = self._arm_stage(arm, "augment", label, self.section.augment, overrides)
        corpus = augment.folder / "corpus.jsonl"
        if arm.corpus == "augmented":
            return [augment], corpus
        parameters = {"source": str(corpus), "seed": seed}
        shuffled = self._arm_stage(
            arm, "corpus", label, dependencies=[augment.id], parameters=parameters
        )
        return [augment, shuffled], shuffled.folder / "corpus.jsonl"

    def eval_stage(
        self, run: ArmRun, split: str, questions: Mapping[str, Any], judge: Stage | None = None
    ) -> Stage:
        """Return the stage that evaluates an arm on the sets in `questions` (values as
        eval.questions takes them).

        `judge` is the stage that measured the judge of written answers.
        """
        arm = run.arm
        if arm.retrieval:
            questions = {
                name: item
                for name, item in questions.items()
                if QuestionSetSection(**item).gets_passages
            }
        overrides = self._asking(run.model_dir, questions, arm)
        dependencies = [stage.id for stage in (*run.stages[-1:], *([judge] if judge else []))]
        label = f"{split} questions to {arm.name}" + (f", seed {run.seed}" if arm.trained else "")
        parameters = {"split": split, **({"judge": str(judge.folder)} if judge else {})}
        return self._arm_stage(
            arm, "eval", label, self.section.eval, overrides, dependencies, parameters
        )

    def judge_stage(self, questions: Mapping[str, Any]) -> Stage:
        """Return the stage that measures the judge of written answers on the sets in `questions`."""
        model = next(iter(self.models))
        arm = base_arm(self.section, model)
        overrides = self._asking(self.model_dir(model), questions, replace(arm, rag=False))
        return self._arm_stage(
            arm, "judge", "the judge on planted answers", self.section.eval, overrides
        )

    def _asking(self, model_dir: str, questions: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
        """Return the overrides of the shared eval recipe for the model of an arm, with its
        retrieval or without."""
        replaced = ("eval.questions", *(() if arm.rag else ("eval.retrieval",)))
        overrides = {
            k: v for k, v in eval_overrides(self.section, arm).items() if not k.startswith(replaced)
        }
        overrides |= {} if arm.rag else {"eval.retrieval": None}
        overrides |= {"eval.perplexity_corpus": None} if arm.retrieval else {}
        return overrides | {"eval.models": {MODEL: model_dir}, "eval.questions": dict(questions)}

    def _arm_stage(
        self, arm: Arm, kind: str, label: str, recipe: str | None = None, overrides: Mapping[str, Any] | None = None,
        dependencies: Sequence[str] = (), parameters: Mapping[str, Any] | None = None,
    ) -> Stage:  # fmt: skip
        arguments = override_arguments(overrides or {})
        values = read_values(Path(recipe), arguments) if recipe else {}
        if kind in (
            "eval",
            "judge",
        ):  # answers are stored before they are scored; a judge alone asks further prompts
            scores = values["eval"].pop("scores", ())
            values["eval"] |= {"judge": True} if "judge" in scores else {}
        # Another version of kinject may train or score differently; paraphrases that were paid for remain valid.
        made_by = "" if kind == "augment" else version("kinject")
        identity = content_id(
            _FORMAT,
            kind,
            made_by,
            *self._hashed(values, dict(parameters or {}), list(dependencies)),
        )
        folder = self.cache_dir / kind / identity
        if recipe:
            arguments.append(_run_dir_argument(folder))
        return Stage(
            identity, kind, folder, recipe or "", tuple(arguments), tuple(dependencies), parameters or {},
            label,
        )  # fmt: skip

    def _hashed(self, values: Mapping[str, Any], *more: Any) -> tuple[Any, ...]:
        """Return the part of a stage's id that depends on its recipe, on the files that it names,
        and on `more`."""
        values = drop_output_folders(values)
        return _relative_to([values, *more], f"{self.cache_dir}/"), input_hashes(
            values, self.cache_dir
        )


def _relative_to(value: Any, folder: str) -> Any:
    """Return `value` with paths below `folder` made relative, so that ids do not depend on the
    location of the cache."""
    if isinstance(value, dict):
        return {key: _relative_to(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative_to(item, folder) for item in value]
    return (
        f"stages:{value[len(folder) :]}"
        if isinstance(value, str) and value.startswith(folder)
        else value
    )


def _run_dir_argument(folder: Path) -> str:
    return f"run_dir={json.dumps(str(folder))}"


def input_hashes(value: object, cache_dir: Path) -> dict[str, str]:
    """Return path -> hash of every file and folder that a recipe's values name, except those below
    `cache_dir`."""
    hashes = {}
    for text in _possible_paths(value):
        path = Path(text)
        if (
            len(text) < 1000
            and "\n" not in text
            and cache_dir not in path.parents
            and path.exists()
        ):
            hashes[text] = _hash(path)
    return hashes


@cache
def _hash(path: Path) -> str:
    if not path.is_dir():
        return file_hash(path)
    is_model = any(
        (path / name).exists() for name in ("config.json", "adapter_config.json", "tokenizer.json")
    )
    return model_hash(path) if is_model else folder_hash(path)


def _possible_paths(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if "/" in value or "." in value:
            yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _possible_paths(item)


def run_stage(stage: Stage) -> dict[str, Any]:
    """Run one stage; return its id, kind, seconds, peak resident bytes (0: not measured), and
    `_COSTS`.

    written_tokens are those of paraphrases or of the model's own answers, teacher_tokens those that
    a teacher read, and work_seconds those of a training with both (`kinject.process.work_seconds`).

    Writes the same to the stage's marker file, last. Raises `KinjectError` for faults that the user
    can fix.
    """
    with _held(stage):
        done = stage.read_done()
        if done is not None and "deleted" not in done:  # by another study, while this one waited
            return done
        if done is not None:
            for path in stage.folder.glob("[!.]*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        is_first = not _ran
        _ran.append(stage.id)
        started = monotonic()
        counts = _RUN[stage.kind](stage)
        record = {
            "id": stage.id, "kind": stage.kind, "seconds": round(monotonic() - started, 3),
            **{name: counts.get(name, 0) for name in _COSTS},
            "peak_bytes": peak_memory() if is_first and sys.platform == "linux" else 0,
        }  # fmt: skip
        write_json(stage.marker, record)
        return record


_ran: list[str] = []
"""The stages that this process ran: the memory that one leaves behind would count in the peak of
the next."""


@contextlib.contextmanager
def _held(stage: Stage) -> Iterator[None]:
    """Hold the stage while the block runs, on this machine; wait while the process of another study
    does."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    with (stage.folder / ".stage.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with the process
        yield


def _run_setup(stage: Stage) -> dict[str, Any]:
    if stage.recipe in _SANDBOX_ROWS:
        _SANDBOX_ROWS[stage.recipe]()
        return {}
    if run := _SANDBOX_RUNS.get(stage.recipe):
        run.write()
        return {}
    return _train_recipe(read_recipe(Path(stage.recipe), stage.overrides, "train"))


def _run_train(stage: Stage) -> dict[str, Any]:
    overrides = list(stage.overrides)
    if "match_steps_of" in stage.parameters:
        manifest = _read_matched_manifest(Path(stage.parameters["match_steps_of"]))
        overrides.append(f"trainer.max_steps={manifest['counts']['steps']}")
    if "match_seconds_of" in stage.parameters:
        overrides += _matching_steps(
            read_recipe(Path(stage.recipe), overrides, "train").trainer, stage.parameters
        )
    return _train_recipe(read_recipe(Path(stage.recipe), overrides, "train"))


def _train_recipe(recipe: TrainRecipe) -> dict[str, Any]:
    from kinject.train import train

    result = train(recipe, resume=True)
    cost = dict(result.cost)
    seconds = sum(
        cost.pop(name, 0.0) for name in ("work_seconds", "teacher_seconds", "written_seconds")
    )
    return {
        "tokens": round(result.n_epochs * result.account["source"]),
        **cost,
        "work_seconds": round(seconds, 2),
    }


def _read_matched_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputError(
            f"{folder}: no manifest of the run that this arm is matched to. Run the study again."
        )
    return manifest


def _matching_steps(trainer: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which `trainer` takes the seconds of the arm that it is matched to,
    warm-up in proportion."""
    fix = "Delete this folder to train it again."
    matched, unmatched = (Path(parameters[key]) for key in ("match_seconds_of", "unmatched"))
    for folder in (matched, unmatched):
        if _read_matched_manifest(folder)["counts"]["resumed_from"]:
            raise InputError(
                f"{folder}: resumed, so the seconds of all its steps are not known. {fix}"
            )
    counts = _read_matched_manifest(unmatched)["counts"]
    wanted, total = (
        read_json(folder / DONE, fix)["work_seconds"] for folder in (matched, unmatched)
    )
    n_steps, step_seconds = counts["steps"], counts["cost"]["work_seconds"]
    scaled = round(n_steps * (wanted - (total - step_seconds)) / step_seconds)
    if scaled < 1:
        raise InputError(
            f"match_seconds_of: teacher and own answers alone take {total - step_seconds:.1f} s of {wanted:.1f} s. Take the "
            "arm out."
        )
    overrides = [f"trainer.max_steps={scaled}"]
    warmup = trainer.get("warmup_steps") or 0
    return (
        [*overrides, f"trainer.warmup_steps={round(warmup * scaled / n_steps)}"]
        if warmup >= 1
        else overrides
    )


def _run_augment(stage: Stage) -> dict[str, Any]:
    from kinject.augment import augment

    result = augment(read_recipe(Path(stage.recipe), stage.overrides, "augment"))
    if result.got < result.asked:
        raise InputError(
            f"{stage.folder}: {result.asked - result.got} of {result.asked} paraphrases are missing "
            f"({'the budget is spent' if result.out_of_budget else 'see rejected.jsonl and failures.jsonl there'}). "
            "Run the study again, or lower augment.styles."
        )
    return {
        "tokens": result.tokens_in + result.tokens_out,
        "money": result.cost,
        "written_tokens": result.tokens_out,
    }


def _run_random_corpus(stage: Stage) -> dict[str, Any]:
    """Write a corpus of the source's words in random order, with rows of the same lengths: text
    without its facts."""
    source = Path(stage.parameters["source"])
    rows = CorpusFile(source)
    words = [word for row in rows for word in row.text.split()]
    if not words:
        raise InputError(
            f"{source}: holds no text rows to shuffle. Use corpus: random with an augmented text corpus."
        )
    rng = random.Random(f"{stage.parameters['seed']} random text")
    shuffled = (
        {"id": f"random-{row.id}", "origin": "random", "text": " ".join(rng.choice(words) for _ in row.text.split())}
        for row in rows if row.text
    )  # fmt: skip
    write_jsonl(stage.folder / "corpus.jsonl", shuffled)
    inputs = {"source": check_output(source, "Delete its folder: the study makes it again.")}
    outputs = ["corpus.jsonl"]
    write_manifest(
        stage.folder / "manifest.json",
        stage="corpus",
        inputs=inputs,
        recipe={},
        counts={},
        outputs=outputs,
    )
    return {}


def _run_merge(stage: Stage) -> dict[str, Any]:
    from kinject.train.merge import add_difference, merge

    values = stage.parameters
    if "alpha" in values:
        merge(values["base"], values["tuned"], [values["alpha"]], stage.folder)
        return {}
    made = add_difference(values["tuned"], values["add"], values["minus"], [1.0], stage.folder)[1.0]
    made.replace(stage.folder / "merged")
    return {}


def _run_judge(stage: Stage) -> dict[str, Any]:
    from kinject.eval.run import measure_judge

    return {"money": measure_judge(read_recipe(Path(stage.recipe), stage.overrides, "eval"))}


def _run_eval(stage: Stage) -> dict[str, Any]:
    from kinject.eval.endpoint import money_spent
    from kinject.eval.run import evaluate
    from kinject.eval.scoring.answers import read_answers

    judge = stage.parameters.get("judge")
    recipe = read_recipe(Path(stage.recipe), stage.overrides, "eval")
    evaluate(recipe, Path(judge) if judge else None)
    n_tokens = sum(sum(answer.n_tokens) for answer in read_answers(stage.folder / "answers.jsonl"))
    return {"tokens": n_tokens, "money": money_spent(recipe.eval, stage.folder)}


_RUN: Mapping[str, Callable[[Stage], dict[str, Any]]] = {
    "setup": _run_setup, "judge": _run_judge, "augment": _run_augment, "corpus": _run_random_corpus, "train": _run_train,
    "merge": _run_merge, "eval": _run_eval,
}  # fmt: skip
STAGE_KINDS = tuple(_RUN)
"""The kinds of stages, in the order in which a study runs them."""
