"""What a study takes before it runs, for its dry run: hours by the operations of its stages, at the
pace that `kinject plan` plans with, and disk, for all models and for each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kinject.augment.preview import TOKENS_PER_WORD, Preview
from kinject.corpus.chat import conversation_texts
from kinject.corpus.passages import word_spans
from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.disk import is_file, path_exists
from kinject.errors import InputError, KinjectError
from kinject.eval.plan import expand_arms, layout_of
from kinject.models import choose_device
from kinject.plan.estimate import Shapes, Step, count_flops, read_shapes
from kinject.plan.length import RunLength, corpus_tokens, length_of_texts
from kinject.plan.run import step_of
from kinject.plan.ways import Devices, find_devices, matrix_pace, render_size
from kinject.question_formats import FORMATS
from kinject.recipe import EvalRecipe, EvalSection, QuestionSetSection, TrainRecipe, read_recipe
from kinject.study.scheduler import Study, reads_files_of
from kinject.study.stages import SANDBOX_ROWS, SANDBOX_RUNS, Stage
from kinject.terminal import aligned, duration
from kinject.train.config import trainer_field

_HUB_BYTES = 2
"""Of a weight in a download from the hub: models are published in 16 bits."""


@dataclass(frozen=True)
class _Work:
    """The operations of a stage, and the bytes of the weights that it leaves on disk."""

    flops: float = 0.0
    n_bytes: int = 0


@dataclass(frozen=True)
class _Training:
    """What other stages take from a training: its steps, the tokens that it reads, its operations,
    and the bytes of the whole model that it makes."""

    n_steps: int
    n_tokens: float
    flops: float
    n_bytes: int


@dataclass
class Total:
    """The work of the stages of one base model: trainings and the operations of them and of its
    scoring, the bytes of its download (of setup those of its models, which stay as well), and the
    most bytes of what is trained at once."""

    n_trainings: int = 0
    training: float = 0.0
    scoring: float = 0.0
    download: int = 0
    peak: int = 0


@dataclass
class Estimator:
    """Estimates the work of the stages that are not done; `unknown` has the reason for each that it
    cannot estimate."""

    study: Study
    devices: Devices
    written: Mapping[str, Preview]
    """The estimate of each stage that writes paraphrases, by id."""
    unknown: dict[str, str] = field(default_factory=dict)
    _trainings: dict[Path, _Training] = field(default_factory=dict)
    _texts: dict[Path, tuple[int, float]] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)

    def totals(self, stages: Sequence[Stage]) -> dict[str, Total]:
        """Return the work of `stages` by base model; that of no model's arms under "setup", if
        there is any."""
        totals = {model: Total() for model in self.study.recipe.study.models}
        setup = Total()
        sizes: dict[str, int] = {}
        for stage in stages:
            work = self.work(stage)
            sizes[stage.id] = work.n_bytes
            total = totals.get(self.study.model_of.get(stage.id, ""), setup)
            if stage.kind == "eval":
                total.scoring += work.flops
            elif work.flops:
                total.n_trainings += 1
                total.training += work.flops
            if total is setup:
                # What setup makes stays, as a download does.
                setup.download += work.n_bytes
        for model, total in totals.items():
            own = [stage for stage in stages if self.study.model_of.get(stage.id) == model]
            total.peak = peak_bytes(own, sizes, keep=self.study.recipe.study.keep_models)
            total.download = self.download(model)
        if setup.n_trainings:
            totals["setup"] = setup
        return totals

    def work(self, stage: Stage) -> _Work:
        """Return the work of a stage; none, with a reason in `unknown`, if it cannot be known
        yet."""
        try:
            if stage.kind == "train" or _trains_a_base(stage):
                return self._train(stage)
            if stage.kind == "merge":
                return _Work(n_bytes=self._merged_bytes(stage))
            if stage.kind == "eval":
                return self._score(stage)
        except KinjectError as error:
            self.unknown[stage.id] = str(error)
        return _Work()

    def download(self, model: str) -> int:
        """Return the bytes of a base model that comes from the hub, 0 for a folder."""
        path = self.study.planner.model_dir(model)
        if path_exists(Path(path)) or self.study.planner.models[model].recipe:
            return 0
        try:
            return _HUB_BYTES * self._base_shapes(path)[1].n_parameters
        except KinjectError as error:
            self.unknown[model] = str(error)
            return 0

    def _train(self, stage: Stage) -> _Work:
        recipe = self._train_recipe(stage)
        n_texts, n_tokens = self._corpus(stage, recipe)
        length = length_of_texts(recipe, n_texts, n_tokens, self.devices.count)
        step = step_of(recipe, self.devices)
        shapes = read_shapes(step)
        per_token = count_flops(step, shapes) / (step.batch * step.block * step.accumulation)
        n_read: float = length.tokens
        same_tokens = self._matched(stage, "match_tokens_of")
        if same_tokens is not None:
            n_read = same_tokens.n_tokens
        flops = per_token * n_read
        same_seconds = self._matched(stage, "match_seconds_of")
        if same_seconds is not None:
            flops = same_seconds.flops
        whole = shapes.n_parameters * step.dtype.itemsize
        self._trainings[stage.folder] = _Training(length.steps, n_read, flops, whole)
        return _Work(flops, _saved_bytes(recipe, step, shapes, length))

    def _matched(self, stage: Stage, key: str) -> _Training | None:
        """Return the training that a stage is matched to by a parameter, None without one."""
        if key not in stage.parameters:
            return None
        folder = Path(stage.parameters[key])
        if folder not in self._trainings:
            # One that is done: nobody has asked for its work.
            for other in self.study.status.stages.values():
                if other.folder == folder:
                    self._train(other)
        return self._trainings.get(folder)

    def _merged_bytes(self, stage: Stage) -> int:
        """Return the bytes of whole weights, of the training whose model a stage merges."""
        made_by = self.study.status.stages[stage.dependencies[-1]]
        if made_by.kind == "merge":
            return self._merged_bytes(made_by)
        if made_by.folder not in self._trainings:
            self._train(made_by)  # one that is done
        return self._trainings[made_by.folder].n_bytes

    def _train_recipe(self, stage: Stage) -> TrainRecipe:
        """Return the recipe of a training, on its base model, whose shape the weights have that an
        earlier stage trains, and with the steps of the arm that it is matched to."""
        overrides = list(stage.overrides)
        model = self.study.model_of.get(stage.id)
        if model is not None:
            path = self.study.planner.model_dir(model)
            overrides.append(f"model.path={json.dumps(path)}")
        matched = self._matched(stage, "match_steps_of")
        if matched is not None:
            overrides.append(f"trainer.max_steps={matched.n_steps}")
        recipe: TrainRecipe = read_recipe(
            Path(stage.recipe), overrides, "train", check_inputs=False
        )
        return recipe

    def _corpus(self, stage: Stage, recipe: TrainRecipe) -> tuple[int, float]:
        """Return the texts and the tokens of a training's corpus: of its file, or by the estimate
        of the paraphrases that it consists of."""
        path = Path(recipe.corpus.path)
        if is_file(str(path)):
            if path not in self._texts:
                self._texts[path] = _count_texts(path)
            return self._texts[path]
        for writer in self._writers(stage):
            written = self.written.get(writer)
            if written is not None:
                return written.n_passages + written.n_asked, corpus_tokens(written)
        raise InputError(f"{path}: is not there yet.")

    def _writers(self, stage: Stage) -> Iterator[str]:
        """Yield the ids of the stages that write a training's corpus: of words at random, those of
        the text that they are drawn from."""
        for name in stage.dependencies:
            yield name
            dependency = self.study.status.stages.get(name)
            if dependency is not None and dependency.kind == "corpus":
                yield from dependency.dependencies

    def _score(self, stage: Stage) -> _Work:
        recipe: EvalRecipe = read_recipe(
            Path(stage.recipe), stage.overrides, "eval", check_inputs=False
        )
        # The models of a study are asked the same, so their prompts are counted once: anew for each
        # of 68 evaluations it was two thirds of a dry run's time.
        key = repr(replace(recipe.eval, models={}))
        if key not in self._asked:
            self._asked[key] = _tokens_asked(recipe.eval)
        n_tokens = self._asked[key]
        path = self.study.planner.model_dir(self.study.model_of[stage.id])
        return _Work(2 * self._base_shapes(path)[1].active * n_tokens)

    def _base_shapes(self, path: str) -> tuple[Step, Shapes]:
        """Return a step of the shared train recipe on a base model, and the model's weights."""
        # Nothing of quantized weights trains, and a step without a trained weight is refused.
        whole = ("adapter=null", "model.quantization=none")
        overrides = [f"model.path={json.dumps(path)}", *whole]
        recipe = read_recipe(
            Path(self.study.recipe.study.train), overrides, "train", check_inputs=False
        )
        step = step_of(recipe, self.devices)
        return step, read_shapes(step)


def _trains_a_base(stage: Stage) -> bool:
    """Return whether a stage of study.setup trains a model by a recipe."""
    is_shipped = stage.recipe in SANDBOX_ROWS or stage.recipe in SANDBOX_RUNS
    return stage.kind == "setup" and not is_shipped


def _saved_bytes(recipe: TrainRecipe, step: Step, shapes: Shapes, length: RunLength) -> int:
    """Return the bytes of the model that a training leaves, with its checkpoints, at most."""
    whole = shapes.n_parameters * step.dtype.itemsize
    saved = whole
    if recipe.adapter is not None:
        saved = shapes.n_trained * step.dtype.itemsize
        if not recipe.adapter.get("merge"):
            whole = saved
    strategy = str(trainer_field(recipe.trainer, "save_strategy"))
    n_checkpoints = 1
    if strategy in ("no", "False"):
        n_checkpoints = 0
    elif strategy == "epoch":
        n_checkpoints = math.ceil(length.epochs)
    elif strategy == "steps":
        save_steps = float(trainer_field(recipe.trainer, "save_steps"))
        # Below 1 it is a fraction of the steps, which Trainer rounds up. The last step is saved,
        # too.
        if save_steps < 1:
            save_steps = math.ceil(save_steps * length.steps)
        n_checkpoints = math.ceil(length.steps / save_steps)
    checkpoint = saved + shapes.state
    limit = trainer_field(recipe.trainer, "save_total_limit")
    if limit is None or limit == 0 or n_checkpoints <= limit:  # with 0 Trainer deletes none
        return whole + n_checkpoints * checkpoint
    n_kept = int(limit)
    # Trainer deletes the oldest once the next is complete; the model comes after the last.
    return max((n_kept + 1) * checkpoint, whole + n_kept * checkpoint)


def _count_texts(path: Path) -> tuple[int, float]:
    """Return the rows of a corpus, and their tokens by their words."""
    n_rows, n_words = 0, 0
    for row in CorpusFile(path):
        n_rows += 1
        n_words += sum(len(word_spans(text)) for text in _texts_of(row))
    return n_rows, n_words * TOKENS_PER_WORD


def _texts_of(row: CorpusRow) -> Iterator[str]:
    yield from (row.text, row.prompt, row.completion)
    for _, text in conversation_texts(row):
        yield text


def _tokens_asked(section: EvalSection) -> float:
    """Return the tokens that an evaluation reads with one model."""
    n_tokens = 0.0
    for item in section.sets().values():
        n_tokens += _prompt_tokens(section, item)
    if section.perplexity_corpus is not None and is_file(section.perplexity_corpus):
        n_tokens += _count_texts(Path(section.perplexity_corpus))[1]
    return n_tokens


def _prompt_tokens(section: EvalSection, item: QuestionSetSection) -> float:
    """Return the tokens of all prompts of a question set with one model, at most: passages are
    counted as long as they may be, and examples in each prompt, though they are read once."""
    layout = layout_of(item.layout, section.formats_of(item))
    questions = read_questions(Path(item.path), layout)[: section.limit_of(item)]
    if not questions:
        return 0.0
    passage = 0
    if section.retrieval is not None:
        passage = section.retrieval.passage_tokens
    n_words = 0.0
    for arm in expand_arms(section, item):
        form = FORMATS[arm.format]
        own = 0
        for question in questions:
            n_prompts = 1
            if form.rotates:
                n_prompts = len(question.choices)
            texts = (form.prompt(question), *form.answers(question))
            own += n_prompts * sum(len(word_spans(text)) for text in texts)
        n_words += own * (1 + arm.shots) + len(questions) * arm.k * passage
    return n_words * TOKENS_PER_WORD


def peak_bytes(stages: Sequence[Stage], sizes: Mapping[str, int], *, keep: bool) -> int:
    """Return the most bytes of weights on disk at once, if the stages run one at a time: each as
    soon as those before it are done, and weights go with their last reader unless `keep`."""
    waiting = {stage.id: stage for stage in stages}
    readers: dict[str, set[str]] = {name: set() for name in waiting}
    for stage in stages:
        for name in stage.dependencies:
            # An arm that is matched to another reads how long it trained, not its weights.
            if name in waiting and reads_files_of(stage, waiting[name]):
                readers[name].add(stage.id)
    live: dict[str, int] = {}
    peak = 0
    while waiting:
        for stage in waiting.values():
            if not any(name in waiting for name in stage.dependencies):
                break
        del waiting[stage.id]
        live[stage.id] = sizes.get(stage.id, 0)
        peak = max(peak, sum(live.values()))
        for name in stage.dependencies:
            if name in readers:
                readers[name].discard(stage.id)
                if not keep and not readers[name]:
                    live.pop(name, None)
    return peak


def render_outlook(study: Study, written: Mapping[str, Preview], gpu: str | None) -> str:
    """Return the hours and the disk that the stages to run take, by estimate; `written` are the
    estimates of the stages that write paraphrases. "" if nothing is left to train or to score.

    It is for cards `gpu`, or for this machine's own device. Raises `InputError` for a card that is
    not known.
    """
    missing = [s for s in study.status.stages.values() if s.id not in study.status.done]
    if not any(stage.kind in ("train", "eval") or _trains_a_base(stage) for stage in missing):
        return ""
    devices, pace, source = _device(gpu)
    estimator = Estimator(study, devices, written)
    totals = estimator.totals(missing)
    reasons = [f"not counted: {reason}" for reason in dict.fromkeys(estimator.unknown.values())]
    # A table of 0 s would say that it takes no time.
    if reasons and not any(total.training or total.scoring for total in totals.values()):
        return "\n".join(["no estimate of time and disk:", *reasons])
    keep = study.recipe.study.keep_models
    lines = [f"time and disk by estimate, {source}:", _table(totals, pace, keep=keep)]
    lines.append(
        "one stage at a time; without what endpoints, teachers, probes and written answers take. "
        "Disk: weights alone, downloads of base models among them"
    )
    return "\n".join([*lines, *reasons])


def _device(gpu: str | None) -> tuple[Devices, float, str]:
    """Return the device that stages run on, its operations a second, and where these are from."""
    kind = "cuda"
    if gpu is None:
        kind = choose_device("auto")
    devices = find_devices(kind, None, 1, gpu=gpu)
    if kind == "cuda":
        pace = devices.flops
        source = f"{devices.name} at {pace / 1e12:.3g} TFLOP/s (by its data sheet, not measured)"
        return devices, pace, source
    pace = matrix_pace(kind)
    source = (
        f"this machine's {devices.name} at {pace / 1e9:.3g} GFLOP/s (by products of matrices, just "
        "now; --gpu NAME for a card)"
    )
    return devices, pace, source


def _table(totals: Mapping[str, Total], pace: float, *, keep: bool) -> str:
    """Return a row for each base model and one for all of them."""
    rows: list[tuple[str, ...]] = [
        ("model", "trainings", "training", "scoring", "together", "disk at most")
    ]
    every = Total()
    for name, total in totals.items():
        rows.append(_row(name, total, pace, total.download + total.peak))
        every.n_trainings += total.n_trainings
        every.training += total.training
        every.scoring += total.scoring
        every.download += total.download
        # What one model leaves is deleted before the next is trained, but for its download.
        if keep:
            every.peak += total.peak
        else:
            every.peak = max(every.peak, total.peak)
    rows.append(_row("all", every, pace, every.download + every.peak))
    return aligned(rows, frozenset(range(1, 6)))


def _row(name: str, total: Total, pace: float, n_bytes: int) -> tuple[str, ...]:
    training, scoring = total.training / pace, total.scoring / pace
    return (
        name,
        str(total.n_trainings),
        duration(training),
        duration(scoring),
        duration(training + scoring),
        render_size(n_bytes),
    )
