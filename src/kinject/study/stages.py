"""Stages of a study, and the functions that run them in a worker.

A stage's folder is ``cache_dir/KIND/ID``; done.json, written last, marks it as finished.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any

from kinject.corpus.rows import CorpusFile
from kinject.disk import (
    Row,
    check_output,
    file_hash,
    file_lock,
    is_amount,
    read_json,
    write_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError
from kinject.executors import LOG
from kinject.manifests import MANIFEST, FinishedTraining, read_train_manifest
from kinject.process import peak_memory
from kinject.recipe import TrainRecipe, read_recipe
from kinject.sandbox import (
    BASE,
    BASE_CORPUS,
    CHAT_CORPUS,
    INSTRUCT,
    write_base_corpus,
    write_dialogues,
    write_sentence_rows,
)
from kinject.terminal import format_count

SANDBOX_RUNS = {"sandbox-base": BASE, "sandbox-instruct": INSTRUCT}
"""Entries of study.setup that copy a model of the sandbox as it ships."""


def _write_sandbox_corpus() -> None:
    if not BASE_CORPUS.exists():
        write_base_corpus(BASE_CORPUS)


def _write_sandbox_sentences() -> None:
    write_sentence_rows(BASE_CORPUS.parent)


def _write_sandbox_chat() -> None:
    if not CHAT_CORPUS.exists():
        write_dialogues(CHAT_CORPUS)


SANDBOX_ROWS: Mapping[str, Callable[[], None]] = {
    "sandbox-corpus": _write_sandbox_corpus,
    "sandbox-sentences": _write_sandbox_sentences,
    "sandbox-chat": _write_sandbox_chat,
}
"""Entries of study.setup that write rows of the sandbox."""
DONE = "done.json"
_COSTS = ("tokens", "money", "written_tokens", "teacher_tokens", "work_seconds")
_COUNTS = (*_COSTS, "seconds", "peak_bytes", "ended")


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
        if self.kind == "setup":
            return self.folder / f".{self.id}.{DONE}"
        return self.folder / DONE

    def run(self) -> dict[str, Any]:
        """Run the stage; see `run_stage`."""
        return run_stage(self)

    def read_done(self) -> dict[str, Any] | None:
        """Return the counts of the finished stage (see `run_stage`), None if it is not finished."""
        if not self.marker.is_file():
            return None
        counts = _read_counts(self.marker, f"Delete {self.folder} to run this stage again.")
        if counts.get("id") != self.id:
            return None
        # The recipe's own folder may hold another training since.
        if self.kind == "setup" and counts.get("manifest") != self.manifest_hash():
            return None
        return counts

    def manifest_hash(self) -> str:
        """Return the hash of the manifest in the folder, "" without one."""
        path = self.folder / MANIFEST
        if not path.is_file():
            return ""
        return file_hash(path)

    def ended(self) -> float | None:
        """Return when the stage was finished, in seconds since 1970; None if it is not."""
        counts = self.read_done()
        if counts is None:
            return None
        # The file's own time is that of the copy in a folder that was copied. Markers of an earlier
        # version have no other.
        return counts["ended"] or self.marker.stat().st_mtime


def _read_counts(marker: Path, fix: str) -> dict[str, Any]:
    """Return the counts in a marker file; those of an earlier version that it lacks are 0. Raises
    `InputError` with `fix` for one that is no number from 0."""
    counts = {**dict.fromkeys(_COUNTS, 0), **read_json(marker, fix)}
    for name in _COUNTS:
        value = counts[name]
        # NaN and infinities end the report.
        if not is_amount(value):
            raise InputError(
                f"{marker}: damaged: {name} is {value!r:.40}, a number from 0 is needed. {fix}"
            )
    return counts


def run_stage(stage: Stage) -> dict[str, Any]:
    """Run one stage; return its id, kind, seconds, peak resident bytes (0: not measured), and
    `_COSTS`.

    written_tokens are those of paraphrases or of the model's own answers, teacher_tokens those that
    a teacher read, and work_seconds those of a training with both (`kinject.process.work_seconds`).

    Writes the same to the stage's marker file, last. Raises `KinjectError` for faults that the user
    can fix.
    """
    with held(stage):
        done = stage.read_done()
        if done is not None and "deleted" not in done:  # by another study, while this one waited
            return done
        if done is not None:
            _empty(stage.folder)
        measures_memory = not _ran and sys.platform == "linux"
        _ran.append(stage.id)
        started = monotonic()
        counts = _RUN[stage.kind](stage)
        record = {
            "id": stage.id,
            "kind": stage.kind,
            "seconds": round(monotonic() - started, 3),
            **{name: counts.get(name, 0) for name in _COSTS},
            "peak_bytes": 0,
            "ended": round(time(), 3),
        }
        if measures_memory:
            record["peak_bytes"] = peak_memory()
        if stage.kind == "setup":
            record["manifest"] = stage.manifest_hash()
        write_json(stage.marker, record)
        return record


_ran: list[str] = []
"""The stages that this process ran: the memory that one leaves behind would count in the peak of
the next."""


def _empty(folder: Path) -> None:
    """Delete the files of a stage whose weights were deleted; its lock and its log, which this
    process writes to, remain."""
    for path in folder.glob("[!.]*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOG:
            path.unlink()


@contextlib.contextmanager
def held(stage: Stage) -> Iterator[None]:
    """Hold the stage while the block runs, on this machine; wait while the process of another study
    does."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    holder = f"{stage.folder}: another study runs this stage."
    with file_lock(stage.folder / ".stage.lock", holder=holder):
        yield


def _run_setup(stage: Stage) -> dict[str, Any]:
    if stage.recipe in SANDBOX_ROWS:
        SANDBOX_ROWS[stage.recipe]()
        return {}
    run = SANDBOX_RUNS.get(stage.recipe)
    if run is not None:
        run.write()
        return {}
    return _train_recipe(read_recipe(Path(stage.recipe), stage.overrides, "train"))


def _run_train(stage: Stage) -> dict[str, Any]:
    overrides = list(stage.overrides)
    # Not in the plan: the other arm has to train first.
    if "match_steps_of" in stage.parameters:
        matched = _read_finished(Path(stage.parameters["match_steps_of"]))
        overrides.append(f"trainer.max_steps={matched.steps}")
    if "match_tokens_of" in stage.parameters:
        unmatched = read_recipe(Path(stage.recipe), overrides, "train")
        overrides += _matching_epochs(unmatched, Path(stage.parameters["match_tokens_of"]))
    if "match_seconds_of" in stage.parameters:
        unmatched = read_recipe(Path(stage.recipe), overrides, "train")
        overrides += _matching_steps(unmatched.trainer, stage.parameters)
    return _train_recipe(read_recipe(Path(stage.recipe), overrides, "train"))


def _train_recipe(recipe: TrainRecipe) -> dict[str, Any]:
    # Here: the process that plans a study loads no torch.
    from kinject.train import train

    # A stage that was killed continues from its newest checkpoint.
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


def _read_finished(folder: Path) -> FinishedTraining:
    """Return the counts of the finished training in `folder`, to which an arm is matched."""
    manifest = read_train_manifest(folder)
    counts = None if manifest is None else manifest.finished()
    if counts is None:
        raise InputError(
            f"{folder}: no manifest of the run that this arm is matched to. Delete "
            f"{folder / DONE}, and run the study again."
        )
    return counts


def _matching_epochs(recipe: TrainRecipe, matched: Path) -> list[str]:
    """Return the overrides by which a training reads as many tokens of its corpus as the one in
    `matched` read of its own."""
    from kinject.plan.length import measure_length
    from kinject.train.load import load_training_tokenizer

    tokenizer = load_training_tokenizer(recipe.model, CorpusFile(Path(recipe.corpus.path)))
    length = measure_length(recipe, tokenizer, 1)
    counts = _read_finished(matched)
    tokens = counts.tokens
    # Not those of its corpus: what was cut off or left out was not read, and `length` has neither.
    n_read = tokens["source"] - tokens["truncated"] - tokens["dropped"]
    n_epochs = counts.epochs * n_read * length.epochs / length.tokens
    # More than four digits would be a fraction of a step.
    return ["trainer.max_steps=-1", f"trainer.num_train_epochs={round(n_epochs, 4)!r}"]


def _matching_steps(trainer: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which `trainer` takes the seconds of the arm that it is matched to,
    warm-up in proportion."""
    fix = "Delete this folder to train it again."
    matched, unmatched = (Path(parameters[key]) for key in ("match_seconds_of", "unmatched"))
    for folder in (matched, unmatched):
        if _read_finished(folder).resumed_from:
            raise InputError(
                f"{folder}: resumed, so the seconds of all its steps are not known. {fix}"
            )
    counts = _read_finished(unmatched)
    wanted = _read_counts(matched / DONE, fix)["work_seconds"]
    total = _read_counts(unmatched / DONE, fix)["work_seconds"]
    n_steps, step_seconds = counts.steps, counts.cost.get("work_seconds", 0.0)
    # A clock that stood, or a manifest of another version.
    if not is_amount(step_seconds) or not step_seconds or not n_steps:
        raise InputError(f"{unmatched}: no seconds of its steps are known. {fix}")
    # The teacher and the model's own answers take as long however many steps follow.
    fixed = total - step_seconds
    scaled = round(n_steps * (wanted - fixed) / step_seconds)
    if scaled < 1:
        raise InputError(
            f"match_seconds_of: teacher and own answers alone take {fixed:.1f} s of "
            f"{wanted:.1f} s. Take the arm out."
        )
    overrides = [f"trainer.max_steps={scaled}"]
    warmup = trainer.get("warmup_steps") or 0
    # Below 1 it is a fraction of the steps, which is in proportion already.
    if warmup >= 1:
        overrides.append(f"trainer.warmup_steps={round(warmup * scaled / n_steps)}")
    return overrides


def _run_augment(stage: Stage) -> dict[str, Any]:
    from kinject.augment import augment

    result = augment(read_recipe(Path(stage.recipe), stage.overrides, "augment"))
    if result.short:
        why = "see rejected.jsonl there"
        fix = "Raise augment.max_attempts, or lower augment.styles."
        if result.out_of_budget:
            why = "the budget is spent"
            fix = "Raise augment.budget, or lower augment.styles."
        elif result.failed:
            why = "see rejected.jsonl and failures.jsonl there"
            fix = "Run the study again, or lower augment.styles."
        raise InputError(
            f"{stage.folder}: {result.n_missing} of {format_count(result.asked, 'paraphrase')} "
            f"missing ({why}). {fix}"
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
            f"{source}: holds no text rows to shuffle. "
            "Use corpus: random with an augmented text corpus."
        )
    rng = random.Random(f"{stage.parameters['seed']} random text")
    write_jsonl(stage.folder / "corpus.jsonl", _random_rows(rows, words, rng))
    write_manifest(
        stage.folder / MANIFEST,
        stage="corpus",
        inputs={"source": check_output(source, "Delete its folder: the study makes it again.")},
        recipe={},
        counts={},
        outputs=["corpus.jsonl"],
    )
    return {}


def _random_rows(rows: CorpusFile, words: Sequence[str], rng: random.Random) -> Iterator[Row]:
    for row in rows:
        if row.text:
            text = " ".join(rng.choice(words) for _ in row.text.split())
            yield {"id": f"random-{row.id}", "origin": "random", "text": text}


def _run_merge(stage: Stage) -> dict[str, Any]:
    from kinject.train.merge import add_difference, merge

    values = stage.parameters
    if "alpha" in values:
        merge(values["base"], values["tuned"], [values["alpha"]], stage.folder)
        return {}
    made = add_difference(values["tuned"], values["add"], values["minus"], [1.0], stage.folder)[1.0]
    # `add_difference` names its folder by the factor; the planner expects this name.
    made.replace(stage.folder / "merged")
    return {}


def _run_judge(stage: Stage) -> dict[str, Any]:
    from kinject.eval.run import measure_judge

    return {"money": measure_judge(read_recipe(Path(stage.recipe), stage.overrides, "eval"))}


def _run_eval(stage: Stage) -> dict[str, Any]:
    from kinject.eval.endpoint import money_spent
    from kinject.eval.run import evaluate
    from kinject.eval.scoring.answers import read_answers

    recipe = read_recipe(Path(stage.recipe), stage.overrides, "eval")
    judge = None
    if "judge" in stage.parameters:
        judge = Path(stage.parameters["judge"])
    evaluate(recipe, judge)
    answers = read_answers(stage.folder / "answers.jsonl")
    n_tokens = sum(sum(answer.n_tokens) for answer in answers)
    return {"tokens": n_tokens, "money": money_spent(recipe.eval, stage.folder)}


_RUN: Mapping[str, Callable[[Stage], dict[str, Any]]] = {
    "setup": _run_setup,
    "judge": _run_judge,
    "augment": _run_augment,
    "corpus": _run_random_corpus,
    "train": _run_train,
    "merge": _run_merge,
    "eval": _run_eval,
}
STAGE_KINDS = tuple(_RUN)
"""The kinds of stages, in the order in which a study runs them."""
