"""`kinject plan`: the memory, time, disk and steps of a training run, before it starts.

Memory comes from a simulated step, the length of the run from its corpus, and the time from a few real steps in a process of
their own.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from kinject.disk import is_file, is_folder
from kinject.errors import KinjectError, RecipeError
from kinject.models import choose_device, choose_precision, fastest_attention, load_tokenizer, window_of
from kinject.plan.devices import Change, Devices, find_devices, find_gpu, render_size
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import LIGER_MODELS, StepConfig, new_config, read_config
from kinject.plan.parallelism import Parallelism, choose_way, describe_batch, share_rows
from kinject.recipe import TokenizerSection, TrainRecipe
from kinject.terminal import show
from kinject.train.config import NO_MODEL, NO_TOKENIZER, trainer_field
from kinject.train.contexts import section_of
from kinject.train.load import load_training_tokenizer
from kinject.train.short_run import LOG, last_log_line, read_timing, run_process, short_recipe
from kinject.types import Tabular

_WARM_UP_STEPS = 2
_TIMED_STEPS = 6
_DRAWN_STEPS = 1_000_000
"""Most steps whose learning rate is computed one by one."""
_MAX_ACCUMULATION = 4
"""Micro-batches of a timed step; the time of a step with more is scaled."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command line: bytes of a device and devices of a machine (None: this machine's), time for real steps.

    `nodes` is the number of machines (None: one), `link` the bytes a second of the slowest link between devices, `gpu` the
    name of a card (`kinject.plan.devices.GPUS`). `context` devices are to read a row together, `tensor` to share every layer.
    """

    memory: int | None = None
    devices: int | None = None
    calibration: bool = True
    seconds: float = 120.0
    nodes: int | None = None
    link: float | None = None
    gpu: str | None = None
    context: int | None = None
    tensor: int | None = None

    @property
    def described(self) -> bool:
        """Whether the options describe devices, which may be elsewhere."""
        return any(value is not None for value in (self.memory, self.devices, self.nodes, self.gpu))


@dataclass(frozen=True)
class RunLength:
    """The steps and tokens of a run. `tokens` are read in all `steps` together; `learned` of them are in the loss.

    Padding does not count, and a token that is repeated where a document is cut counts once. `texts_per_document` is the
    (minimum, median, maximum) number of texts of a document in the run, `fill` the fraction of a row that holds tokens.
    `teacher_tokens` are read by a teacher before the first step, whose predictions take `teacher_bytes`.
    """

    n_rows: int
    steps: int
    epochs: float
    tokens: int
    learned: int
    documents: int
    texts_per_document: tuple[float, float, float] | None
    fill: float
    fractions: dict[str, float]
    teacher_tokens: int = 0
    teacher_bytes: int = 0


@dataclass(frozen=True)
class StepTiming:
    """The median seconds of `n_steps` real steps after a warm-up, and the peak memory of their process."""

    step_seconds: float
    n_steps: int
    peak_bytes: int


@dataclass(frozen=True)
class Disk:
    """Bytes for the run's folder: `n_checkpoints` at once (one more while the newest is written) and the final model."""

    checkpoint: int
    n_checkpoints: int
    model: int
    total: int
    free: int


@dataclass(frozen=True)
class Plan(Tabular):
    """The whole plan; `recipe` is its file and overrides, quoted for a shell.

    A field is None if it could not be counted; `notes` hold the reason.
    """

    recipe: str
    model: str
    step: StepConfig
    memory: Memory
    devices: Devices
    need: int
    fits: bool
    changes: tuple[Change, ...]
    changes_suffice: bool
    parallelism: Parallelism
    length: RunLength | None
    disk: Disk
    timing: StepTiming | None
    seconds: float | None
    rates: tuple[float, ...] | None
    batch_advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step over all devices."""
        return self.step.batch * self.step.accumulation * self.devices.count // self.parallelism.sharing

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each part of a device's peak memory, and their sum with the other needs of the process."""
        parts = {
            name: getattr(self.memory, name) for name in ("weights", "gradients", "optimizer", "activations", "logits")
        }
        parts |= {"heap holes": self.memory.fragmentation, "other": self.need - self.memory.peak, "total": self.need}
        return [{"memory": name, "GiB": n_bytes / 2**30} for name, n_bytes in parts.items()]


def plan(recipe: TrainRecipe, options: PlanOptions) -> Plan:
    """Return the plan of `recipe`. A missing corpus or missing weights become notes; the rest is counted.

    Raises `RecipeError` for faults that training would refuse before it starts, `InputError` if there is no model config.
    """
    from kinject.train.schedules import planned_curve
    from kinject.train.setup import check_training
    from kinject.train.trainable import check_model

    if not options.described:
        check_training(recipe)
    kind = _choose_device_kind(recipe, options)
    gpu = find_gpu(options.gpu) if options.gpu is not None else None
    devices = find_devices(kind, options.memory, options.devices, options.nodes, options.link, gpu)
    if options.described:
        (check_training if devices.here else check_model)(recipe)
    notes = [*recipe.notes, *_uncounted(recipe)]
    step = share_rows(step_config(recipe, devices), devices, options.context, options.tensor)
    if recipe.model.path is not None and not step.model.name_or_path:
        notes.append(f"{recipe.model.path}: not found on the hub from here. This is the plan of its public shape.")
    try:
        memory = simulate(step)
    except DataDependentOutputException as error:
        keys = ", ".join(recipe.adapter or ("model.new" if recipe.model.new else "model.path",))
        fault = (
            f"the step of this model depends on its numbers, and kinject plan simulates none ({keys}). Try find-batch."
        )
        raise recipe.error("adapter" if recipe.adapter else "model", fault) from error
    whole = memory if step.tensor == 1 else simulate(replace(step, tensor=1))
    fits = devices.fits(memory.peak)
    way, changes, suffice = choose_way(step, memory, devices)
    n_readers = devices.count // way.sharing
    length = _count_length(recipe, n_readers, notes)
    timing = _calibrate(recipe, options, devices, fits, length, notes)
    notes += [*_describe_teacher(length, timing), *_describe_liger(step)]
    n_steps = length.steps if length is not None else max(trainer_field(recipe, "max_steps"), 0)
    rate_and_steps = float(trainer_field(recipe, "learning_rate")), int(trainer_field(recipe, "max_steps"))
    per_epoch = updates_per_epoch(recipe, length.n_rows, n_readers) if length is not None else 0
    follows_epochs = "step_epochs" in (recipe.trainer.get("lr_scheduler_kwargs") or {})
    is_drawn = 0 < n_steps <= _DRAWN_STEPS and (per_epoch > 0 or not follows_epochs)
    return Plan(
        recipe=recipe.command_line, model=recipe.model.path or f"new {step.model.model_type}", step=step,
        memory=replace(memory, n_parameters=whole.n_parameters, n_trained=whole.n_trained), devices=devices,
        need=devices.need(memory.peak), fits=fits, changes=tuple(changes), changes_suffice=suffice, parallelism=way,
        length=length, disk=estimate_disk(recipe, whole, length), timing=timing,
        seconds=timing.step_seconds * n_steps if timing is not None and n_steps else None,
        rates=tuple(planned_curve(recipe, n_steps, per_epoch)) if is_drawn else None,
        batch_advice=tuple(describe_batch(step, devices, *rate_and_steps, way.sharing)), notes=tuple(notes),
    )  # fmt: skip


def _uncounted(recipe: TrainRecipe) -> list[str]:
    """Return a note on the parts of the recipe whose memory is not simulated."""
    section = recipe.regularization
    parts = {
        "regularization (its copies of the weights)": section is not None and section.needs_base,
        "techniques.sam (a copy of the weights that train)": recipe.techniques.sam > 0,
        "trainer.torch_compile": bool(recipe.trainer.get("torch_compile")),
        "evaluation and probes, which have batches of their own": str(trainer_field(recipe, "eval_strategy")) != "no",
    }
    names = [name for name, used in parts.items() if used]
    return [f"memory not counted: {'; '.join(names)}."] if names else []


def _describe_liger(step: StepConfig) -> list[str]:
    """Return a note on the memory that Liger's kernels save, if the recipe has them."""
    if not step.liger:
        return []
    if step.model.model_type not in LIGER_MODELS:
        return [f"trainer.use_liger_kernel: its memory is counted for {', '.join(LIGER_MODELS)} only."]
    saved = simulate(replace(step, liger=False)).peak - simulate(step).peak
    return [
        f"trainer.use_liger_kernel: saves {render_size(saved)} of a step in norms and MLPs, by Liger's source (not measured). "
        "Its fused loss is off: TRL's head holds no logits either. Its time is not counted."
    ]


def _choose_device_kind(recipe: TrainRecipe, options: PlanOptions) -> str:
    """Return cuda, mps or cpu: the recipe's device here, or cuda if the options describe a GPU that is not here."""
    device = "cpu" if recipe.trainer.get("use_cpu") else recipe.model.device
    if options.gpu is not None or (
        options.described and (device == "cuda" or (device == "auto" and not torch.cuda.is_available()))
    ):
        return "cuda"
    return choose_device(device)


def step_config(recipe: TrainRecipe, devices: Devices) -> StepConfig:
    """Return everything that decides the memory of a step on `devices`. Raises `InputError` as `read_config` does."""
    model, trainer = recipe.model, recipe.trainer
    config = _model_config(recipe)
    block = trainer_field(recipe, "max_length")
    limit = window_of(config)
    if block is None or (limit is not None and not trainer.get("packing") and limit < block):
        block = limit
    if block is None:
        raise recipe.error("trainer.max_length", "missing. Without it the length of a row is unknown before training.")
    strategy = trainer_field(recipe, "packing_strategy") if trainer.get("packing") else None
    attention = _attention(model.attention, devices)
    mixed = _mixed(recipe, devices)
    checkpointing = bool(trainer_field(recipe, "gradient_checkpointing"))
    return StepConfig(
        model=config, device="cpu" if devices.kind == "cpu" else devices.kind,
        dtype=_dtype(recipe, devices), mixed=mixed,
        batch=int(trainer_field(recipe, "per_device_train_batch_size")), block=int(block),
        accumulation=int(trainer_field(recipe, "gradient_accumulation_steps")), checkpointing=checkpointing,
        offloading=bool(trainer_field(recipe, "activation_offloading")), attention=attention,
        masked=(attention == "sdpa" and strategy in ("bfd", "bfd_split")) or attention == "eager",
        fused=devices.kind != "cpu" and _is_plain_loss(recipe), optim=str(trainer_field(recipe, "optim")),
        optim_args=trainer.get("optim_args"), quantization=model.quantization, adapter=recipe.adapter, freeze=model.freeze,
        loss_tile=recipe.techniques.loss_tile, mlp_tile=recipe.techniques.mlp_tile,
        rounding=recipe.techniques.stochastic_rounding,
        in_backward=recipe.techniques.optimizer_in_backward, muon=recipe.techniques.muon is not None,
        projected=recipe.projection is not None,
        liger=devices.kind == "cuda" and bool(recipe.trainer.get("use_liger_kernel")), **_teacher(recipe, config),
    )  # fmt: skip


def _teacher(recipe: TrainRecipe, config: Any) -> dict[str, Any]:
    """Return the fields of `StepConfig` that context distillation decides."""
    if recipe.method != "distill":
        return {}
    section, vocabulary = section_of(recipe), int(config.get_text_config().vocab_size)
    copies = not section.is_cached and (section.teacher == "ema" or recipe.adapter is None)
    return {"distilled": min(section.top_k or vocabulary, vocabulary), "teacher_copy": copies}


def _describe_teacher(length: RunLength | None, timing: StepTiming | None) -> list[str]:
    """Return a note on the predictions that are made before the first step; their time is not in that of the steps."""
    if length is None or not length.teacher_tokens:
        return []
    time = ""
    if timing is not None:
        share = length.teacher_tokens / (length.tokens / length.steps) / 3  # a forward pass is a third of a step
        time = f", about {share * timing.step_seconds:,.0f} s"
    n_bytes = length.teacher_bytes
    return [
        f"distillation: before the first step the teacher reads {length.teacher_tokens:,} tokens once{time}, and writes "
        f"{n_bytes / 2**30:,.2f} GiB to corpus.cache_dir, unless they are there. The steps are timed without its predictions."
    ]


def _dtype(recipe: TrainRecipe, devices: Devices) -> torch.dtype:
    """Return the dtype of the weights; of quantised ones that of their products."""
    if recipe.model.dtype != "auto":
        dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        return dtype
    if recipe.model.quantization == "none" or devices.kind != "cuda":
        return torch.float32
    return (
        torch.bfloat16 if (choose_precision("cuda") == "bf16" if devices.here else devices.has_bf16) else torch.float16
    )


def _is_plain_loss(recipe: TrainRecipe) -> bool:
    """Return whether the loss is the mean over tokens, which TRL computes on a GPU without all logits."""
    techniques, section = recipe.techniques, recipe.regularization
    special = techniques.hard_example_mining is not None or techniques.row_weights is not None
    special = special or recipe.method == "distill"
    return not (special or trainer_field(recipe, "label_smoothing_factor") or (section is not None and section.kl))


def _model_config(recipe: TrainRecipe) -> Any:
    model = recipe.model
    if model.new is None:
        if model.path is None:
            raise recipe.error("model", NO_MODEL)
        return read_config(model.path, model.revision)
    if isinstance(model.tokenizer, TokenizerSection):
        return new_config(model.new, model.tokenizer.vocab_size)
    if model.tokenizer is None:
        raise recipe.error("model.tokenizer", NO_TOKENIZER)
    return new_config(model.new, len(load_tokenizer(model.tokenizer, revision=model.revision)))


def _attention(attention: str, devices: Devices) -> str:
    """Return eager, sdpa, or flash: an attention that separates documents without a mask."""
    if attention != "auto":
        return attention if attention in ("eager", "sdpa") else "flash"
    if devices.kind != "cuda":
        return "sdpa"
    return "flash" if (fastest_attention("cuda") if devices.here else devices.has_bf16) else "sdpa"


def _mixed(recipe: TrainRecipe, devices: Devices) -> torch.dtype | None:
    if recipe.trainer.get("fp16"):
        return torch.float16
    if recipe.trainer.get("bf16") is not None:
        return torch.bfloat16 if recipe.trainer["bf16"] else None
    here = devices.here or devices.kind != "cuda"
    precision = choose_precision(devices.kind) if here else "bf16" if devices.has_bf16 else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}[precision]


def _count_length(recipe: TrainRecipe, n_devices: int, notes: list[str]) -> RunLength | None:
    """Return the length of the run; None, with a note, if corpus, questions or tokenizer are missing.

    Raises as `measure_length`.
    """
    paths = [recipe.corpus.path, *(part.path for part in recipe.corpus.parts().values())]
    paths += [recipe.corpus.validation_corpus] if recipe.corpus.validation_corpus is not None else []
    paths += [recipe.projection.path] if recipe.projection is not None else []
    paths += [item.path for item in recipe.probes.sets().values()] if recipe.probes is not None else []
    missing = [path for path in paths if not is_file(path)]
    if missing:
        notes.append(f"steps, tokens and exposures are not counted: {', '.join(missing)} does not exist yet.")
        return None
    try:
        tokenizer = load_training_tokenizer(recipe)
    except RecipeError:
        raise
    except KinjectError as error:
        notes.append(f"steps, tokens and exposures are not counted: {error}")
        return None
    return measure_length(recipe, tokenizer, n_devices)


def measure_length(recipe: TrainRecipe, tokenizer: Any, n_devices: int) -> RunLength:
    """Read, tokenize and pack the corpus as training will (corpus.cache_dir keeps it for the run), and count.

    Raises as training for this corpus: `RecipeError`, `InputError` and `TrainingError`.
    """
    from kinject.train.data import check_positions, open_corpora, tokenize_and_pack
    from kinject.train.exposure import summarize_exposures

    tokenized = tokenize_and_pack(recipe, tokenizer, open_corpora(recipe))
    data, teacher = tokenized.train, tokenized.teacher if section_of(recipe).is_cached else None
    check_positions(recipe, _model_config(recipe), data)
    n_rows = len(data.rows)
    steps, epochs = count_steps(recipe, n_rows, n_devices)
    lengths = data.rows.lengths()
    exposures: dict[str, Any] = summarize_exposures(data.exposures, epochs)
    texts = exposures.get("rows")
    block = trainer_field(recipe, "max_length") if recipe.trainer.get("packing") else int(lengths.max())
    return RunLength(
        n_rows=n_rows, steps=steps, epochs=epochs, tokens=round((data.account.source - data.account.lost) * epochs),
        learned=round(data.account.trained * epochs), documents=exposures["documents"],
        texts_per_document=(texts["min"], texts["median"], texts["max"]) if texts else None,
        fill=float(lengths.mean()) / block, fractions=dict(data.fractions),
        teacher_tokens=teacher.count_read() if teacher is not None else 0,
        teacher_bytes=int(teacher.starts[-1]) * (8 * (section_of(recipe).top_k or 0) + 4) if teacher is not None else 0,
    )  # fmt: skip


def count_steps(recipe: TrainRecipe, n_rows: int, n_devices: int) -> tuple[int, float]:
    """Return (optimizer steps, epochs) of a run over `n_rows`, as transformers' Trainer counts them."""
    steps_per_epoch = updates_per_epoch(recipe, n_rows, n_devices)
    max_steps = trainer_field(recipe, "max_steps")
    if max_steps > 0:
        return max_steps, max_steps / steps_per_epoch
    epochs = float(trainer_field(recipe, "num_train_epochs"))
    return math.ceil(epochs * steps_per_epoch), epochs


def updates_per_epoch(recipe: TrainRecipe, n_rows: int, n_devices: int) -> int:
    """Return the optimizer steps of an epoch over `n_rows`, as transformers' Trainer counts them."""
    rows_per_batch = trainer_field(recipe, "per_device_train_batch_size") * n_devices
    drop_last = trainer_field(recipe, "dataloader_drop_last")
    n_batches = n_rows // rows_per_batch if drop_last else -(-n_rows // rows_per_batch)
    return int(max(-(-n_batches // trainer_field(recipe, "gradient_accumulation_steps")), 1))


def _calibrate(
    recipe: TrainRecipe, options: PlanOptions, devices: Devices, fits: bool, length: RunLength | None, notes: list[str]
) -> StepTiming | None:
    """Return the timing of a few real steps; None, with a note, if they are switched off or impossible."""
    path = recipe.model.path
    reason = ""
    if not options.calibration:
        reason = "--no-calibration"
    elif not devices.here:
        reason = "the devices are not this machine's"
    elif not fits:
        reason = "the step does not fit"
    elif length is None:
        reason = "the corpus cannot be read"
    elif path is not None and is_folder(path) and not any(Path(path).glob("*.safetensors")):
        reason = f"{path} holds no weights"
    if reason:
        notes.append(f"time is not estimated: {reason}.")
        return None
    show(f"plan: timing a few steps, at most {options.seconds:g} s (--no-calibration skips it)", file=sys.stderr)
    timing = time_steps(recipe, options.seconds)
    if isinstance(timing, str):
        notes.append(f"time is not estimated: {timing}")
        return None
    return timing


def time_steps(recipe: TrainRecipe, seconds: float) -> StepTiming | str:
    """Return the timing of real steps, or the reason for having none: they failed, or took longer than `seconds`."""
    accumulation = int(trainer_field(recipe, "gradient_accumulation_steps"))
    timed_accumulation = min(accumulation, _MAX_ACCUMULATION)
    if recipe.method == "distill" and section_of(recipe).is_cached:  # the teacher would read the whole corpus first
        raw = {key: value for key, value in recipe.raw.items() if key not in ("method", "distillation")}
        recipe = replace(recipe, method=None, distillation=None, raw=raw)
    with tempfile.TemporaryDirectory(prefix="kinject-plan-") as name:
        folder = Path(name) / "run"
        trainer = {"gradient_accumulation_steps": timed_accumulation}
        code = run_process(short_recipe(recipe, folder, _WARM_UP_STEPS + _TIMED_STEPS, trainer), seconds=seconds)
        rows = read_timing(folder)
        if code:
            reason = last_log_line(folder) if (folder / LOG).is_file() else ""
            return f"the steps failed: {reason or f'exit code {code}'}"
    if len(rows) < _WARM_UP_STEPS + 1:
        return f"{_WARM_UP_STEPS + 1} steps take more than {seconds:g} s here (--seconds)."
    ends = [row["seconds"] for row in rows[_WARM_UP_STEPS - 1 :]]
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    step_seconds = statistics.median(steps) * accumulation / timed_accumulation
    return StepTiming(step_seconds, len(steps), max(row["peak_bytes"] for row in rows))


def estimate_disk(recipe: TrainRecipe, memory: Memory, length: RunLength | None) -> Disk:
    """Return the size of checkpoints (with the optimizer unless save_only_model) and model; of an adapter, only the adapter."""
    model = memory.trained_bytes if recipe.adapter is not None else memory.weights
    checkpoint = model + (0 if trainer_field(recipe, "save_only_model") else memory.optimizer)
    merged = recipe.adapter is not None and recipe.adapter.get("merge")
    final = memory.weights if merged else model
    n_written = _count_checkpoints(recipe, length)
    limit = trainer_field(recipe, "save_total_limit")
    at_once = n_written if limit is None else min(n_written, limit + 1)  # an old one is deleted after the new one
    at_once += 2 if recipe.techniques.save_minutes is not None else 0  # the newest, and one that is being written
    folder = next(path for path in (recipe.run_dir, *recipe.run_dir.absolute().parents) if path.is_dir())
    return Disk(checkpoint, at_once, final, at_once * checkpoint + final, shutil.disk_usage(folder).free)


def _count_checkpoints(recipe: TrainRecipe, length: RunLength | None) -> int:
    strategy = str(trainer_field(recipe, "save_strategy"))
    limit = trainer_field(recipe, "save_total_limit") or 1
    if strategy == "no":
        return 0
    if length is None or strategy == "best":
        return int(limit) + 1
    if strategy == "epoch":
        return max(round(length.epochs), 1)
    every = float(trainer_field(recipe, "save_steps"))
    return max(length.steps // max(int(every * length.steps) if every < 1 else int(every), 1), 1)
