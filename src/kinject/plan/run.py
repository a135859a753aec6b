"""`kinject plan`: what a training run will need, before an hour of a GPU is spent on it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kinject.errors import KinjectError, RecipeError
from kinject.models import choose_device, has_fast_bf16, load_tokenizer
from kinject.plan.corpus import Length, measure
from kinject.plan.devices import Change, Devices, Way, cheapest_changes, choose_way, find_devices
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import Shape, new_config, read_config
from kinject.plan.trial import Trial, try_steps
from kinject.recipe import TokenizerSection, TrainRecipe
from kinject.terminal import show
from kinject.train.config import build_config, trainer_field


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for: memory of a device in bytes and their number (None: this machine's), a calibration."""

    memory: int | None = None
    devices: int | None = None
    calibration: bool = True
    seconds: float = 120.0


@dataclass(frozen=True)
class Disk:
    """Bytes that the run's folder needs: `n_checkpoints` kept at once (one more while the newest is written) and the model."""

    checkpoint: int
    n_checkpoints: int
    model: int
    total: int
    free: int


@dataclass(frozen=True)
class Plan:
    """The whole plan; `recipe` is its file and overrides as a shell takes them.

    Where something could not be counted it is None, and `notes` say why.
    """

    recipe: str
    model: str
    shape: Shape
    memory: Memory
    devices: Devices
    need: int
    fits: bool
    changes: tuple[Change, ...]
    changes_suffice: bool
    way: Way
    length: Length | None
    disk: Disk
    trial: Trial | None
    seconds: float | None
    rates: tuple[float, ...] | None
    notes: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step over all devices."""
        return self.shape.batch * self.shape.accumulation * self.devices.count


def plan(recipe: TrainRecipe, wanted: Wanted) -> Plan:
    """Return the plan of `recipe`. What is missing on disk (corpus, weights) is said in its notes and counted around.

    Raises `RecipeError` for what training would refuse before it starts, `InputError` when the model's config is not to be had.
    """
    from kinject.train.schedules import planned_curve

    kind = _kind(recipe, wanted)
    devices = find_devices(kind, wanted.memory, wanted.devices)
    if devices.here:
        build_config(recipe)
    notes = [*recipe.notes, *_uncounted(recipe)]
    shape = shape_of(recipe, devices)
    memory = simulate(shape)
    length = _length(recipe, devices.count, notes)
    fits = devices.fits(memory.peak)
    changes, suffice = ([], True) if fits else cheapest_changes(shape, devices)
    way = choose_way(shape, memory, devices)
    trial = _trial(recipe, wanted, devices, fits, length, notes)
    steps = length.steps if length is not None else max(trainer_field(recipe, "max_steps"), 0)
    return Plan(
        recipe=recipe.words, model=recipe.model.path or f"new {shape.config.model_type}", shape=shape, memory=memory,
        devices=devices, need=devices.need(memory.peak), fits=fits, changes=tuple(changes), changes_suffice=suffice, way=way,
        length=length, disk=disk_of(recipe, memory, length), trial=trial,
        seconds=trial.step_seconds * steps if trial is not None and steps else None,
        rates=tuple(planned_curve(recipe, steps)) if steps else None, notes=tuple(notes),
    )  # fmt: skip


def _uncounted(recipe: TrainRecipe) -> list[str]:
    """Return a note for each thing of the recipe that holds memory beside what is simulated."""
    held = {
        "regularization (its copies of weights)": recipe.regularization is not None,
        "techniques.sam (a copy of the weights that train)": recipe.techniques.sam > 0,
        "trainer.torch_compile": bool(recipe.trainer.get("torch_compile")),
        "evaluation and probes, which have batches of their own": str(trainer_field(recipe, "eval_strategy")) != "no",
    }
    names = [name for name, there in held.items() if there]
    return [f"memory not counted: {'; '.join(names)}."] if names else []


def _kind(recipe: TrainRecipe, wanted: Wanted) -> str:
    """Return cuda, mps or cpu: what the recipe would take here, or a GPU where one is named that is not here."""
    asked = "cpu" if recipe.trainer.get("use_cpu") else recipe.model.device
    named = wanted.memory is not None or wanted.devices is not None
    if asked == "auto" and named and not torch.cuda.is_available():
        return "cuda"
    if asked == "cuda" and named:
        return "cuda"
    return choose_device(asked)


def shape_of(recipe: TrainRecipe, devices: Devices) -> Shape:
    """Return what decides the memory of a step of `recipe` on `devices`. Raises `InputError` as `read_config` does."""
    model, trainer = recipe.model, recipe.trainer
    config = _config(recipe)
    block = trainer_field(recipe, "max_length")
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if block is None or (not trainer.get("packing") and limit is not None):
        block = min(block or limit, limit or block)
    if block is None:
        raise recipe.error("trainer.max_length", "missing. Without it the length of a row is unknown before training.")
    strategy = trainer_field(recipe, "packing_strategy") if trainer.get("packing") else None
    attention = _attention(model.attention, devices)
    mixed = _mixed(recipe, devices)
    checkpointing = bool(trainer_field(recipe, "gradient_checkpointing"))
    return Shape(
        config=config, device="cpu" if devices.kind == "cpu" else devices.kind,
        dtype=torch.float32 if model.dtype == "auto" else getattr(torch, model.dtype), mixed=mixed,
        batch=int(trainer_field(recipe, "per_device_train_batch_size")), block=int(block),
        accumulation=int(trainer_field(recipe, "gradient_accumulation_steps")), checkpointing=checkpointing,
        offloading=bool(trainer_field(recipe, "activation_offloading")), attention=attention,
        masked=(attention == "sdpa" and strategy in ("bfd", "bfd_split")) or attention == "eager",
        fused=devices.kind != "cpu", optim=str(trainer_field(recipe, "optim")), optim_args=trainer.get("optim_args"),
        quantization=model.quantization, adapter=recipe.adapter, freeze=model.freeze,
    )  # fmt: skip


def _config(recipe: TrainRecipe) -> Any:
    model = recipe.model
    if model.new is None:
        if model.path is None:
            raise recipe.error(
                "model", "give either path (a model to load) or new (config of a model with random weights)."
            )
        return read_config(model.path, model.revision)
    if isinstance(model.tokenizer, TokenizerSection):
        return new_config(model.new, model.tokenizer.vocab_size)
    if model.tokenizer is None:
        raise recipe.error(
            "model.tokenizer", "missing. A new model needs a tokenizer: a folder, or vocab_size to train one."
        )
    return new_config(model.new, len(load_tokenizer(model.tokenizer, revision=model.revision)))


def _attention(asked: str, devices: Devices) -> str:
    """Return eager, sdpa, or flash: an attention that keeps documents apart without a mask."""
    if asked in ("flash_attention_2", "varlen"):
        return "flash"
    if asked != "auto":
        return asked
    installed = importlib.util.find_spec("flash_attn") is not None
    return "flash" if devices.kind == "cuda" and (installed or not devices.here or has_fast_bf16("cuda")) else "sdpa"


def _mixed(recipe: TrainRecipe, devices: Devices) -> torch.dtype | None:
    if recipe.trainer.get("fp16"):
        return torch.float16
    bf16 = recipe.trainer.get("bf16")
    if bf16 is None:
        bf16 = has_fast_bf16(devices.kind) if devices.here or devices.kind == "cpu" else devices.kind == "cuda"
    return torch.bfloat16 if bf16 else None


def _length(recipe: TrainRecipe, n_devices: int, notes: list[str]) -> Length | None:
    """Return how long the run is; None, with a note, where corpus or tokenizer are not there."""
    corpus = recipe.corpus
    parts = [corpus.path, *(part.path for part in corpus.parts().values())]
    missing = [path for path in parts if not Path(path).is_file()]
    if missing:
        notes.append(f"steps, tokens and exposures are not counted: {', '.join(missing)} is not there yet.")
        return None
    try:
        return measure(recipe, _tokenizer(recipe), n_devices)
    except RecipeError:
        raise
    except KinjectError as error:
        notes.append(f"steps, tokens and exposures are not counted: {error}")
        return None


def _tokenizer(recipe: TrainRecipe) -> Any:
    from kinject.corpus import CorpusFile
    from kinject.train.load import tokenizer_of

    model, corpus = recipe.model, recipe.corpus
    if isinstance(model.tokenizer, TokenizerSection):
        return tokenizer_of(model.tokenizer, CorpusFile(Path(corpus.path)))
    path = model.tokenizer or model.path
    assert path is not None
    return load_tokenizer(path, revision=model.revision)


def _trial(
    recipe: TrainRecipe, wanted: Wanted, devices: Devices, fits: bool, length: Length | None, notes: list[str]
) -> Trial | None:
    """Return what a few real steps took; None, with a note, where they were not asked for or cannot be."""
    path = recipe.model.path
    reason = ""
    if not wanted.calibration:
        reason = "--no-calibration"
    elif not devices.here:
        reason = "the devices are not this machine's"
    elif not fits:
        reason = "the step does not fit"
    elif length is None:
        reason = "the corpus cannot be read"
    elif path is not None and Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        reason = f"{path} holds no weights"
    if reason:
        notes.append(f"time is not estimated: {reason}.")
        return None
    show(f"plan: timing a few steps, at most {wanted.seconds:g} s (--no-calibration leaves it out)", file=sys.stderr)
    trial = try_steps(recipe, wanted.seconds)
    if isinstance(trial, str):
        notes.append(f"time is not estimated: {trial}")
        return None
    return trial


def disk_of(recipe: TrainRecipe, memory: Memory, length: Length | None) -> Disk:
    """Return what checkpoints and the model take: an adapter alone where there is one, the optimizer unless save_only_model."""
    model = memory.trained_bytes if recipe.adapter is not None else memory.weights
    checkpoint = model + (0 if trainer_field(recipe, "save_only_model") else memory.optimizer)
    merged = recipe.adapter is not None and recipe.adapter.get("merge")
    final = memory.weights if merged else model
    made = _checkpoints_made(recipe, length)
    limit = trainer_field(recipe, "save_total_limit")
    kept = made if limit is None else min(made, limit + 1)  # an older one goes when the newer is whole
    folder = next(path for path in (recipe.run_dir, *recipe.run_dir.absolute().parents) if path.is_dir())
    return Disk(checkpoint, kept, final, kept * checkpoint + final, shutil.disk_usage(folder).free)


def _checkpoints_made(recipe: TrainRecipe, length: Length | None) -> int:
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
