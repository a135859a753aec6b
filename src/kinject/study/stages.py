"""Arms to stages: each a piece of work with an id from its content, so that what two arms share is done once.

A stage's id hashes its recipe after overrides, the files that the recipe names, and where earlier stages write (their
folders carry their ids). Its folder is ``cache_dir/KIND/ID``; done.json, written last, says that it is finished.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kinject.corpus.rows import CorpusFile
from kinject.disk import (
    check_output,
    content_id,
    file_hash,
    folder_hash,
    read_checked_json,
    read_manifest,
    write_checked_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError, KinjectError
from kinject.process import peak_memory, reset_peak_memory
from kinject.recipe import StudyRecipe, TrainRecipe, read_recipe, read_values
from kinject.recipe.study_section import ResourcesSection, StudyModelSection, StudySection
from kinject.study.arms import Arm, base_models, eval_overrides, override_arguments

SANDBOX_CORPUS = "sandbox-corpus"
"""In study.setup: write what the sandbox's base model reads."""
SANDBOX_CORPUS_PATH = Path("runs/sandbox/base-corpus.jsonl")
DONE = "done.json"
MODEL = "model"
"""The one model's name in a stage's evaluation."""
_FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """One piece of work. `recipe` and `overrides` say what; `needs` are ids of stages that come first.

    `extra` holds what no recipe says (for JSON): folders of other stages, an alpha. `label` is for people.
    """

    id: str
    kind: str
    folder: Path
    recipe: str
    overrides: tuple[str, ...]
    needs: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    resources: ResourcesSection = ResourcesSection()
    label: str = ""

    @property
    def marker(self) -> Path:
        """The file that is written last. What study.setup makes lies in a run folder of its own, and keeps its name."""
        return self.folder / (f".{self.id}.{DONE}" if self.kind == "prepare" else DONE)

    def done(self) -> dict[str, Any] | None:
        """Return what the finished stage counted, None where it is not finished."""
        if not self.marker.is_file():
            return None
        found = read_checked_json(self.marker, f"Delete {self.folder} to do this stage again.")
        return found if found.get("id") == self.id else None


@dataclass(frozen=True)
class ArmStages:
    """The stages of one arm and seed, in order; `model_dir` is where its weights end up."""

    arm: Arm
    seed: int
    stages: tuple[Stage, ...]
    model_dir: str
    train: Stage | None


class Planner:
    """Makes stages for one study; the same work gets the same stage."""

    def __init__(self, recipe: StudyRecipe) -> None:
        _hash.cache_clear()  # files may have changed since the last study of this process
        self.section: StudySection = recipe.study
        self.cache_dir = Path(self.section.cache_dir)

    def prepare_stages(self) -> Iterator[list[Stage]]:
        """Yield what comes first, in rounds: study.setup one by one, then the base models that recipes make.

        A round is planned when it is asked for: what an earlier one wrote counts for its ids.
        """
        for entry in self.section.setup:
            yield [self._prepare(entry, None)]
        made = (item for item in base_models(self.section).values() if item.recipe)
        yield list(
            {stage.id: stage for stage in (self._prepare(item.recipe or "", item.overrides) for item in made)}.values()
        )

    def model_dir(self, name: str) -> str:
        """Return the folder or hub name of a base model."""
        item = base_models(self.section)[name]
        if item.path is not None:
            return item.path
        assert item.recipe is not None
        return str(self._prepare_dir(item) / "model")

    def _prepare_dir(self, item: StudyModelSection) -> Path:
        assert item.recipe is not None
        return self._prepare(item.recipe, item.overrides).folder

    def _prepare(self, entry: str, changed: Mapping[str, Any] | None) -> Stage:
        if entry == SANDBOX_CORPUS:
            return Stage(content_id(_FORMAT, entry), "prepare", SANDBOX_CORPUS_PATH.parent, entry, (), label=entry)
        overrides = override_arguments(changed or {})
        values = read_values(Path(entry), overrides)
        raw = _bare(values)
        identity = content_id(
            _FORMAT, "prepare", _placeless(raw, f"{self.cache_dir}/"), input_hashes(raw, self.cache_dir)
        )
        if not changed:
            return Stage(identity, "prepare", Path(str(values.get("run_dir"))), entry, (), label=entry)
        folder = self.cache_dir / "prepare" / identity
        return Stage(identity, "prepare", folder, entry, (*overrides, _run_dir(folder)), label=entry)

    def arm_stages(self, arm: Arm, seed: int, others: Mapping[str, Arm]) -> ArmStages:
        """Return what `arm` needs with `seed`; `others` are the arms of the same model by name."""
        base = self.model_dir(arm.model)
        if not arm.trained:
            return ArmStages(arm, seed, (), base, None)
        stages: list[Stage] = []
        corpus = self._corpus(arm, seed, stages)
        overrides = {**arm.train_overrides, "model.path": base, "corpus.path": str(corpus), "seed": seed}
        extra: dict[str, Any] = {}
        needs = [stages[-1].id] if stages else []
        matched = arm.match_steps_of or arm.match_tokens_of
        if matched:
            other = self.arm_stages(others[matched], seed, others)
            assert other.train is not None
            stages = [*other.stages, *stages]
            extra["match_steps_of" if arm.match_steps_of else "match_tokens_of"] = str(other.train.folder)
            needs.append(other.train.id)
        label = f"{arm.name}, seed {seed}"
        train = self._stage("train", self.section.train, overrides, needs=needs, extra=extra, label=label, arm=arm)
        stages.append(train)
        model_dir = train.folder / "model"
        if arm.alpha is not None:
            extra = {"base": base, "tuned": str(model_dir), "alpha": arm.alpha}
            merged = self._stage("merge", "", {}, needs=[train.id], extra=extra, label=label, arm=arm)
            stages.append(merged)
            model_dir = merged.folder / f"alpha-{arm.alpha:g}"
        return ArmStages(arm, seed, tuple(stages), str(model_dir), train)

    def _corpus(self, arm: Arm, seed: int, stages: list[Stage]) -> Path:
        """Return the corpus that `arm` trains on; put the stages that write it into `stages`."""
        if arm.corpus not in ("augmented", "random"):
            return Path(arm.corpus)
        assert self.section.augment is not None
        overrides = dict(arm.augment_overrides)
        if self.section.new_paraphrases_per_seed:
            overrides["seed"] = seed
        augment = self._stage("augment", self.section.augment, overrides, label=f"corpus of {arm.name}", arm=arm)
        stages.append(augment)
        if arm.corpus == "augmented":
            return augment.folder / "corpus.jsonl"
        extra = {"source": str(augment.folder / "corpus.jsonl"), "seed": seed}
        stages.append(
            self._stage("corpus", "", {}, needs=[augment.id], extra=extra, label=f"corpus of {arm.name}", arm=arm)
        )
        return stages[-1].folder / "corpus.jsonl"

    def eval_stage(self, of: ArmStages, split: str, questions: Mapping[str, Any], *, rag: bool) -> Stage:
        """Return the stage that asks the weights of `of` the sets in `questions` (as eval.questions takes them)."""
        overrides: dict[str, Any] = {
            **eval_overrides(self.section), "eval.models": {MODEL: of.model_dir}, "eval.questions": dict(questions),
        }  # fmt: skip
        if not rag:
            overrides = {key: value for key, value in overrides.items() if not key.startswith("eval.retrieval")}
            overrides["eval.retrieval"] = None
        needs = [of.stages[-1].id] if of.stages else []
        label = f"{split} questions to {of.arm.name}" + (f", seed {of.seed}" if of.arm.trained else "")
        return self._stage(
            "eval", self.section.eval, overrides, needs=needs, extra={"split": split}, label=label, arm=of.arm
        )

    def _stage(
        self, kind: str, recipe_path: str, overrides: Mapping[str, Any], *, label: str, arm: Arm,
        needs: Sequence[str] = (), extra: Mapping[str, Any] | None = None,
    ) -> Stage:  # fmt: skip
        given = override_arguments(overrides)
        raw = _bare(read_values(Path(recipe_path), given)) if recipe_path else {}
        # another kinject may train or score otherwise; rewritings that were paid for stay what they are
        made_by = "" if kind == "augment" else version("kinject")
        what = _placeless([raw, dict(extra or {}), list(needs)], f"{self.cache_dir}/")
        identity = content_id(_FORMAT, kind, made_by, what, input_hashes(raw, self.cache_dir))
        folder = self.cache_dir / kind / identity
        if recipe_path:
            given.append(_run_dir(folder))
        return Stage(
            identity, kind, folder, recipe_path, tuple(given), tuple(needs), dict(extra or {}), arm.resources, label
        )


def _placeless(value: Any, folder: str) -> Any:
    """Return `value` with paths below `folder` written without it: stages are the same wherever their cache lies."""
    if isinstance(value, dict):
        return {key: _placeless(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeless(item, folder) for item in value]
    return f"stages:{value[len(folder) :]}" if isinstance(value, str) and value.startswith(folder) else value


def _run_dir(folder: Path) -> str:
    return f"run_dir={json.dumps(str(folder))}"


def _bare(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values without where it writes: that does not change what comes out."""
    return {key: value for key, value in values.items() if key != "run_dir"}


def input_hashes(value: object, cache_dir: Path) -> dict[str, str]:
    """Return path -> hash of every file and folder that a recipe's values name, but for stages' own."""
    found = {}
    for text in _texts(value):
        path = Path(text)
        if len(text) < 1000 and "\n" not in text and cache_dir not in path.parents and path.exists():
            found[text] = _hash(path)
    return found


@cache
def _hash(path: Path) -> str:
    return folder_hash(path) if path.is_dir() else file_hash(path)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if "/" in value or "." in value:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


_CURE = "Delete the folder that it is in: the study makes it again."


def stage_message(stage: Stage) -> dict[str, Any]:
    """Return `stage` as JSON values, for a worker."""
    return {**asdict(stage), "folder": str(stage.folder), "marker": str(stage.marker)}


def run_stage(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one stage and return what it counted: seconds, tokens, peak resident bytes (0: not measured), money.

    Writes the same to done.json in the stage's folder, last. Raises `KinjectError` for what a user can mend.
    """
    folder = Path(job["folder"])
    reset_peak_memory()
    started = time.monotonic()
    counts = _DO[job["kind"]](job, folder)
    done = {
        "id": job["id"], "kind": job["kind"], "seconds": round(time.monotonic() - started, 3),
        "tokens": counts.get("tokens", 0), "money": counts.get("money", 0.0),
        "peak_bytes": peak_memory() if sys.platform == "linux" else 0,
    }  # fmt: skip
    write_checked_json(Path(job["marker"]), done)
    return done


def _prepare(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if job["recipe"] == SANDBOX_CORPUS:
        from kinject.sandbox import write_base_corpus

        if not SANDBOX_CORPUS_PATH.exists():
            write_base_corpus(SANDBOX_CORPUS_PATH)
        return {}
    return _train_recipe(read_recipe(Path(job["recipe"]), job["overrides"], "train"))


def _train(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    overrides = list(job["overrides"])
    recipe = read_recipe(Path(job["recipe"]), overrides, "train")
    extra = job["extra"]
    if "match_steps_of" in extra:
        overrides.append(f"trainer.max_steps={_counts(Path(extra['match_steps_of']))['steps']}")
    if "match_tokens_of" in extra:
        overrides += ["trainer.max_steps=-1", f"trainer.num_train_epochs={_epochs_of_equal_tokens(recipe, extra)!r}"]
    return _train_recipe(read_recipe(Path(job["recipe"]), overrides, "train"))


def _train_recipe(recipe: TrainRecipe) -> dict[str, Any]:
    from kinject.train import train

    result = train(recipe, resume=True)
    return {"tokens": round(result.n_epochs * result.account["source"])}


def _counts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputError(f"{folder}: no manifest of the run that this arm is matched to. Run the study again.")
    return dict(manifest["counts"])


def _epochs_of_equal_tokens(recipe: TrainRecipe, extra: Mapping[str, Any]) -> float:
    """Return the epochs over the recipe's corpus that read as many corpus tokens as the run in ``match_tokens_of`` did."""
    from kinject.corpus.tokenize import Tokenization, tokenize_rows
    from kinject.models import load_tokenizer

    other = Path(extra["match_tokens_of"])
    manifest = read_manifest(other / "manifest.json")
    epochs = float(_counts(other)["epochs"])
    assert manifest is not None
    tokenizer = load_tokenizer(recipe.model.path or str(recipe.model.tokenizer))
    how = Tokenization(recipe.corpus.bos, recipe.corpus.eos, None, False)
    own, theirs = (
        sum(len(row.input_ids) for row in tokenize_rows(CorpusFile(Path(path)), tokenizer, how))
        for path in (recipe.corpus.path, manifest["recipe"]["corpus"]["path"])
    )
    return round(epochs * theirs / own, 4)


def _augment(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.augment import augment

    result = augment(read_recipe(Path(job["recipe"]), job["overrides"], "augment"))
    if result.got < result.asked:
        raise InputError(
            f"{folder}: {result.asked - result.got} of {result.asked} rewritings are missing "
            f"({'the budget is spent' if result.out_of_budget else 'see rejected.jsonl and failures.jsonl there'}). "
            "Run the study again, or lower augment.styles."
        )
    return {"tokens": result.tokens_in + result.tokens_out, "money": result.cost}


def _random_corpus(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the source corpus with its words drawn anew, each row as long as before: text without its facts."""
    source = Path(job["extra"]["source"])
    rows = CorpusFile(source)
    words = [word for row in rows for word in row.text.split()]
    if not words:
        raise InputError(f"{source}: holds no text rows to shuffle. Use corpus: random with an augmented text corpus.")
    draw = random.Random(f"{job['extra']['seed']} random text")
    write_jsonl(
        folder / "corpus.jsonl",
        (
            {
                "id": f"random-{row.id}",
                "origin": "random",
                "text": " ".join(draw.choice(words) for _ in row.text.split()),
            }
            for row in rows
            if row.text
        ),
    )
    inputs = {"source": check_output(source, _CURE)}
    path = folder / "manifest.json"
    write_manifest(path, stage="corpus", inputs=inputs, recipe={}, counts={}, outputs=["corpus.jsonl"])
    return {}


def _merge(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.train.merge import merge

    extra = job["extra"]
    merge(extra["base"], extra["tuned"], [extra["alpha"]], folder)
    return {}


def _evaluate(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from kinject.eval import evaluate
    from kinject.eval.scoring.answers import read_answers

    evaluate(read_recipe(Path(job["recipe"]), job["overrides"], "eval"))
    return {"tokens": sum(sum(answer.n_tokens) for answer in read_answers(folder / "answers.jsonl"))}


_DO = {
    "prepare": _prepare, "train": _train, "augment": _augment, "corpus": _random_corpus, "merge": _merge,
    "eval": _evaluate,
}  # fmt: skip


def one_line(error: BaseException) -> str:
    """Return what went wrong in one line, for a table."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0][:300]
    return first if isinstance(error, KinjectError) else f"{type(error).__name__}: {first}"
