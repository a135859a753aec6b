"""`kinject plan`: the memory, time and steps of a training run before it starts, how to spread it
over devices, as text.

Memory comes from `kinject.plan.estimate`, the length of the run from its corpus, and the time from
a few real steps in a process of their own, or from a card's data sheet.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kinject.disk import is_file, is_folder
from kinject.errors import InputError, fault
from kinject.gguf_files import gguf_file
from kinject.models import choose_device, choose_precision, window_of
from kinject.plan.estimate import (
    PARTS,
    Memory,
    Shapes,
    Step,
    count_flops,
    estimate,
    read_shapes,
)
from kinject.plan.length import (
    RunLength,
    count_length,
    model_config,
    updates_per_epoch,
    without_missing,
)
from kinject.plan.ways import (
    GIB,
    Change,
    Devices,
    Way,
    choose,
    describe_batch,
    describe_traffic,
    find_devices,
    matrix_pace,
    quoted,
    render_size,
)
from kinject.recipe import ModelSection, TrainRecipe
from kinject.recipe.conflicts import find_problems
from kinject.report.figures import INK, LEARNING, style
from kinject.terminal import Progress, duration, format_count, format_number, sparkline
from kinject.train.config import trainer_field
from kinject.train.short_run import LOG, last_log_line, read_timing, run_process, short_recipe
from kinject.types import Tabular

log = logging.getLogger(__name__)

# torch.compile compiles again at the second step, and the heap of a CPU still grows: 1M parameters
# held 1,136 MiB after three steps, 1,218 after six.
_WARM_UP_STEPS, _TIMED_STEPS, _SECONDS = 2, 6, 120.0
"""Of the real steps that are timed, and the longest time for all of them."""


@dataclass(frozen=True)
class StepTiming:
    """The median seconds of `n_steps` real steps after a warm-up, and the peak memory of their
    process."""

    step_seconds: float
    n_steps: int
    peak_bytes: int


@dataclass(frozen=True)
class Plan(Tabular):
    """The whole plan; `recipe` is its file and overrides, quoted for a shell. A field is None if
    `notes` have the reason.

    `memory` is that of a whole step on one device, `way` the way to run it after `changes` of the
    recipe. The seconds are measured (`timing`), else those of the operations at the devices' pace.
    """

    recipe: str
    model: str
    step: Step
    shapes: Shapes
    memory: Memory
    devices: Devices
    changes: tuple[Change, ...]
    way: Way
    length: RunLength | None
    timing: StepTiming | None
    step_seconds: float
    seconds: float | None
    step_flops: float
    rate: float
    rates: tuple[float, ...] | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the step as it is fits one device."""
        return self.devices.fits(self.memory.peak)

    @property
    def need(self) -> int:
        """The bytes of a device for the step as it is."""
        return self.devices.need(self.memory.peak)

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step over all devices."""
        return self.step.batch * self.step.accumulation * self.devices.count

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each part of a device's peak memory, and their sum with the other needs
        of the process."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "fragmentation")
        parts = {name: getattr(self.memory, name) for name in names}
        parts |= {"other": self.need - self.memory.peak, "total": self.need}
        return [{"memory": name, "GiB": n_bytes / GIB} for name, n_bytes in parts.items()]


def plan(  # noqa: PLR0913 (one for each option of the command)
    recipe: TrainRecipe,
    *,
    memory: int | None = None,
    n_devices: int | None = None,
    nodes: int | None = None,
    link: float | None = None,
    gpu: str | None = None,
    calibration: bool = True,
) -> Plan:
    """Return the plan of `recipe`. A missing corpus or missing weights become notes; the rest is
    counted.

    It is for `nodes` machines with `n_devices` of `memory` bytes each, or cards `gpu` (`GPUS`); by
    default this machine's. `link` are the bytes a second of the slowest link. `calibration` times
    real steps.

    Raises `RecipeError` for faults that training would refuse before it starts, `InputError` if
    there is no model config.
    """
    from kinject.train.load import check_model
    from kinject.train.methods import method_of
    from kinject.train.setup import check_training

    _check_counts(n_devices, nodes, link)
    recipe.raise_any(find_problems("plan", recipe))
    recipe = replace(recipe, trainer=method_of(recipe).trainer_with_defaults(recipe.trainer))
    described = any(value is not None for value in (memory, n_devices, nodes, gpu))
    if not described:
        check_training(recipe)
    kind = "cuda" if gpu is not None else _device_kind(recipe.device, described=described)
    devices = find_devices(kind, memory, n_devices, nodes, link, gpu)
    notes = list(recipe.notes)
    with recipe.locating():
        if described:
            (check_training if devices.here else check_model)(recipe)
        _announce(recipe, is_timed=calibration and devices.here)
        step = step_of(recipe, devices)
        if recipe.model.path is not None and not step.model.name_or_path:
            notes.append(
                f"{recipe.model.path}: not found on the hub from here. This is the plan of its "
                "public shape."
            )
        shapes = read_shapes(step)
        length = count_length(recipe, devices.count, notes)
    estimated = estimate(step, shapes)
    way, changes = choose(step, devices)
    timing = None
    if calibration:
        timing = _calibrate(recipe, devices, devices.fits(estimated.peak), length, notes)
    if timing is None:
        devices = _with_pace(devices)
    n_steps, rates = _planned_rates(recipe, step, length, devices.count)
    step_flops = count_flops(_with_mean_rows(recipe, step, length, devices.count), shapes)
    step_seconds = step_flops / devices.flops
    if timing is not None:
        step_seconds = timing.step_seconds
    return Plan(
        recipe=recipe.command_line,
        model=recipe.model.path or f"new {step.model.model_type}",
        step=step,
        shapes=shapes,
        memory=estimated,
        devices=devices,
        changes=tuple(changes),
        way=way,
        length=length,
        timing=timing,
        step_seconds=step_seconds,
        seconds=step_seconds * n_steps or None,
        step_flops=step_flops,
        rate=trainer_field(recipe.trainer, "learning_rate"),
        notes=tuple(notes),
        rates=rates,
    )


def _announce(recipe: TrainRecipe, *, is_timed: bool) -> None:
    steps = ""
    if is_timed:
        steps = ", then some real steps"
    log.info(f"plan: {recipe.model.path or 'a new model'}: its shape, the corpus{steps}")


def _check_counts(n_devices: int | None, nodes: int | None, link: float | None) -> None:
    counts: dict[str, float | None] = {"--devices": n_devices, "--nodes": nodes, "--link": link}
    if link is not None:
        counts["--link"] = link / 1e9  # in the unit of the option
    for flag, value in counts.items():
        # NaN is in no range, and no link is infinitely fast.
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag}: found {value:g}, allowed: more than 0.")


def _with_pace(devices: Devices) -> Devices:
    """Return devices with the operations a second of this machine, unless they are cards."""
    if devices.kind == "cuda":
        return devices
    # No data sheet has it, and before the corpus or the model is there no step can be timed.
    n_processes = devices.count // devices.nodes
    return replace(devices, flops=matrix_pace(devices.kind) / n_processes)


def _with_mean_rows(
    recipe: TrainRecipe, step: Step, length: RunLength | None, n_devices: int
) -> Step:
    """Return a step with rows of the mean length: one that is not packed is as long as its text,
    not as the longest that is allowed, which memory is planned for."""
    if length is None or recipe.trainer.get("packing"):
        return step
    n_rows = length.steps * step.batch * step.accumulation * n_devices
    return replace(step, block=min(step.block, math.ceil(length.tokens / n_rows)))


def _planned_rates(
    recipe: TrainRecipe, step: Step, length: RunLength | None, n_devices: int
) -> tuple[int, tuple[float, ...] | None]:
    """Return (the steps of the run, its learning rates by step); 0 and None where unknown."""
    from kinject.train.schedules import planned_curve

    # Trainer's default of -1 means that none are set.
    n_steps, per_epoch = max(trainer_field(recipe.trainer, "max_steps"), 0), 0
    if length is not None:
        n_steps = length.steps
        per_epoch = updates_per_epoch(recipe.trainer, length.n_rows, n_devices)
    follows_epochs = "step_epochs" in (recipe.trainer.get("lr_scheduler_kwargs") or {})
    if n_steps == 0 or (per_epoch == 0 and follows_epochs):
        return n_steps, None
    return n_steps, tuple(planned_curve(recipe.trainer, step.model, n_steps, per_epoch))


def _device_kind(device: str, *, described: bool) -> str:
    # devices that are described are GPUs, unless the recipe or this machine's GPU says otherwise
    if described and device == "cuda":
        return "cuda"
    if described and device == "auto" and not torch.cuda.is_available():
        return "cuda"
    return choose_device(device)


def step_of(recipe: TrainRecipe, devices: Devices) -> Step:
    """Return everything that decides the memory of a step on `devices`. Raises `InputError` as
    `read_config` does."""
    from kinject.train.objectives import OBJECTIVES

    model, trainer, techniques, section = (
        recipe.model,
        recipe.trainer,
        recipe.techniques,
        recipe.regularization,
    )
    config = model_config(model)
    block, limit = trainer_field(trainer, "max_length"), window_of(config)
    if block is None or (limit is not None and not trainer.get("packing") and limit < block):
        block = limit
    if block is None:
        raise fault(
            "trainer.max_length",
            "missing. Without it the length of a row is unknown before training.",
        )
    is_changed = any(kind.is_on(name, recipe) for name, kind in OBJECTIVES.items())
    is_changed = is_changed or bool(trainer_field(trainer, "label_smoothing_factor"))
    # TRL's head that holds no logits computes the plain mean alone.
    has_mean_loss = not is_changed and not (section is not None and section.kl)
    return Step(
        model=config,
        device=devices.kind,
        dtype=_dtype(model, devices),
        mixed=_mixed(trainer, devices),
        batch=int(trainer_field(trainer, "per_device_train_batch_size")),
        block=int(block),
        accumulation=int(trainer_field(trainer, "gradient_accumulation_steps")),
        checkpointing=bool(trainer_field(trainer, "gradient_checkpointing")),
        offloading=bool(trainer_field(trainer, "activation_offloading")),
        eager=model.attention == "eager",
        fused=devices.kind != "cpu" and has_mean_loss and config.model_type not in _OWN_LOGITS,
        optim=str(trainer_field(trainer, "optim")),
        optim_args=trainer.get("optim_args"),
        quantization=model.quantization,
        adapter=recipe.adapter,
        freeze=model.freeze,
        muon=techniques.muon is not None,
        rounding=techniques.stochastic_rounding,
        copies=_copies(recipe),
        projected=recipe.projection is not None,
        liger=devices.kind == "cuda" and bool(trainer.get("use_liger_kernel")),
    )


_OWN_LOGITS = ("modernbert-decoder", "recurrent_gemma", "xlstm")
"""Model types whose logits are more than their head's product with the last states: training holds
all of them (`kinject.train.guards.fused_head_misfit`, which measures it on the weights)."""


def _copies(recipe: TrainRecipe) -> int:
    """Return the copies of the trained weights that the update rules of a recipe keep."""
    from kinject.train.updates import UPDATE_RULES

    copies = sum(kind.copies for name, kind in UPDATE_RULES.items() if kind.is_on(name, recipe))
    section = recipe.regularization
    # The weights that l2 pulls to, and beside them the model whose predictions kl needs.
    if section is not None and section.l2 and section.kl and recipe.adapter is None:
        copies += 1
    return copies


def _dtype(model: ModelSection, devices: Devices) -> torch.dtype:
    """Return the dtype of the weights; of quantised ones that of their products."""
    if model.dtype != "auto":
        dtype: torch.dtype = getattr(torch, model.dtype)
        return dtype
    if model.quantization == "none" or devices.kind != "cuda":
        return torch.float32
    has_bf16 = devices.has_bf16
    if devices.here:
        has_bf16 = choose_precision("cuda") == "bf16"
    return torch.bfloat16 if has_bf16 else torch.float16


def _mixed(trainer: Mapping[str, Any], devices: Devices) -> torch.dtype | None:
    if trainer.get("fp16"):
        return torch.float16
    if trainer.get("bf16") is not None:
        return torch.bfloat16 if trainer["bf16"] else None
    if not devices.here and devices.kind == "cuda":
        return torch.bfloat16 if devices.has_bf16 else torch.float16
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}
    return dtypes[choose_precision(devices.kind)]


def _calibrate(
    recipe: TrainRecipe, devices: Devices, fits: bool, length: RunLength | None, notes: list[str]
) -> StepTiming | None:
    """Return the timing of a few real steps; None, with a note, if they are impossible."""
    path = recipe.model.path
    timing: StepTiming | str
    if not devices.here:
        timing = "the devices are not this machine's"
    elif devices.kind != "cuda" and devices.count > 1:
        # One process, which is what would be timed, has all cores for itself.
        timing = f"{devices.count} processes share the cores of this machine"
    elif not fits:
        timing = "the step does not fit"
    elif length is None or not is_file(recipe.corpus.path):
        timing = "the corpus is not there yet"
    elif path and is_folder(path) and not _has_weights(path):
        timing = f"{path} holds no weights"
    else:
        timing = time_steps(without_missing(recipe)[0])
    if isinstance(timing, str):
        # Not "not estimated": a plan by the pace of the devices stands beside it.
        notes.append(f"time is not measured: {timing.removesuffix('.')}.")
        return None
    return timing


def _has_weights(folder: str) -> bool:
    return bool(gguf_file(folder)) or any(Path(folder).glob("*.safetensors"))


def time_steps(recipe: TrainRecipe) -> StepTiming | str:
    """Return the timing of real steps, or the reason for having none: they failed, or took too
    long."""
    from kinject.train.methods import method_of

    method = method_of(recipe)
    if method.no_timing:
        return method.no_timing
    recipe = method.for_timing(recipe)
    with tempfile.TemporaryDirectory(prefix="kinject-plan-") as name:
        folder = Path(name) / "run"
        n_steps = _WARM_UP_STEPS + _TIMED_STEPS
        with Progress(f"timing real steps, at most {_SECONDS:g} s", n_steps, "steps") as progress:
            code = run_process(
                short_recipe(recipe, folder, n_steps, {}), seconds=_SECONDS, progress=progress
            )
        rows = read_timing(folder)
        if code:
            reason = last_log_line(folder) if (folder / LOG).is_file() else ""
            return f"the steps failed: {reason or f'exit code {code}'}"
    # Of steps that took too long, those that ended count.
    if len(rows) < _WARM_UP_STEPS + 1:
        return f"{_WARM_UP_STEPS + 1} steps take more than {_SECONDS:g} s here."
    ends = [row["seconds"] for row in rows[_WARM_UP_STEPS - 1 :]]
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    # By the median: other programs moved the mean step by up to 30%.
    return StepTiming(statistics.median(steps), len(steps), max(row["peak_bytes"] for row in rows))


def render_plan(plan: Plan) -> str:
    """Return the plan as text."""
    rows = [*_head(plan), ("", ""), *_memory(plan), ("", ""), *_way(plan), ("", ""), *_run(plan)]
    rows += [("note", note) for note in plan.notes]
    return "\n".join(f"{name:<13}{text}".rstrip() for name, text in rows)


def _head(plan: Plan) -> Iterator[tuple[str, str]]:
    shapes, step, devices = plan.shapes, plan.step, plan.devices
    kind = "full"
    if step.adapter is not None:
        kind = step.adapter.get("type", "LoRA")
    if step.quantization != "none":
        kind += f" in {step.quantization}"
    in_dtype = str(step.dtype).removeprefix("torch.")
    if step.mixed is not None:
        in_dtype += f", multiplied in {str(step.mixed).removeprefix('torch.')}"
    per_node = devices.count // devices.nodes
    count = ""
    if devices.nodes > 1:
        count = f"{devices.nodes} machines with {per_node} x "
    elif per_node > 1:
        count = f"{per_node} x "
    yield "recipe", plan.recipe
    yield (
        "model",
        f"{plan.model}: {shapes.n_parameters:,} parameters in {in_dtype}, {shapes.n_trained:,} of "
        f"them train ({kind})",
    )
    rows = format_count(step.batch, "row")
    rows += f" x {step.accumulation} accumulated x {format_count(devices.count, 'device')}"
    yield "step", f"{rows} = {format_count(plan.global_batch, 'row')} of {step.block} tokens"
    where = "this machine" if devices.here else "as given, not this machine"
    yield "devices", f"{count}{devices.name}, {render_size(devices.memory)} ({where})"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the peak memory of a step on one device by part."""
    for part in PARTS:
        n_bytes = getattr(plan.memory, part)
        if n_bytes:
            yield part, f"{render_size(n_bytes):>10}"
    other = "Python and its libraries"
    if plan.devices.kind == "cuda":
        other = "CUDA's context and unused blocks of the allocator, assumed"
    yield "other", f"{render_size(plan.need - plan.memory.peak):>10}  {other}"
    fits = "fits" if plan.fits else "does NOT fit"
    verdict = f"{fits} one device of {render_size(plan.devices.memory)}"
    layer = render_size(plan.shapes.layer)
    yield (
        "total",
        f"{render_size(plan.need):>10}  estimated; {verdict}; the largest layer has {layer}",
    )
    if plan.timing is not None:
        yield (
            "measured",
            f"{render_size(plan.timing.peak_bytes):>10}  in "
            f"{format_count(plan.timing.n_steps, 'real step')}",
        )


def _way(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the changes of the recipe, in the order of least cost, and the way to run the step."""
    way = plan.way
    for change in plan.changes:
        yield "change", f"{' '.join(map(quoted, change.overrides))}  ({change.cost})"
    if plan.changes and not way.is_enough:
        yield "", "All together are not enough."
    yield "parallelism", f"{way.name}: {way.why}"
    if way.command:
        yield "", f"about {render_size(plan.devices.need(way.memory.peak))} on each device"
        yield "", way.command.replace("RECIPE", plan.recipe)
        if plan.devices.nodes > 1:
            yield "", "on each machine, with its own --machine_rank and the ADDRESS of the first"
    else:
        yield "", "Take a smaller model, or more memory."
    for line in describe_traffic(way, plan.step_flops, plan.devices):
        yield "", line
    for line in describe_batch(plan.step, plan.devices, plan.rate):
        yield "", line


def _run(plan: Plan) -> Iterator[tuple[str, str]]:
    length, flops = plan.length, plan.step_flops
    if length is not None:
        epochs = f"{format_number(length.epochs)} epochs"
        if length.epochs == 1:
            epochs = "1 epoch"
        rows = format_count(length.n_rows, "row")
        yield "run", f"{format_count(length.steps, 'step')}, {epochs} of {rows}"
        yield "tokens", f"{length.tokens:,} read, {length.learned:,} of them learned"
    yield "operations", f"{format_number(flops / 1e12)} TFLOP a step on each device"
    whole = ""
    if plan.seconds is not None:
        whole = f"{duration(plan.seconds)}, "
    each = f"{whole}{format_number(plan.step_seconds)} s a step"
    pace = f"{format_number(plan.devices.flops / 1e12)} TFLOP/s"
    if plan.timing is not None:
        yield "time", f"{each}, measured here; without evaluation, probes and saving"
    elif plan.devices.kind == "cuda":
        yield "time", f"{each}, planned at {pace} on each device (assumed, not measured)"
    else:
        yield "time", f"{each}, planned at {pace}: products of float32 matrices here, when idle"
    if plan.rates is not None:
        yield "rate", sparkline(list(plan.rates))
        yield (
            "",
            f"first {plan.rates[0]:.3g}, highest {max(plan.rates):.3g}, last {plan.rates[-1]:.3g}",
        )


def check_figure(path: Path) -> None:
    """Raise `InputError` unless the name of a figure's file ends with a format that is drawn."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(
            f"--figure: found {str(path)!r:.80}, allowed: a name that ends with .png, .svg or .pdf."
        )


def draw_rates(plan: Plan, path: Path) -> None:
    """Write the learning rate by step in the format of `path`'s suffix (`check_figure`). Raises
    `InputError` if the steps are unknown."""
    if plan.rates is None:
        raise InputError(
            "--figure: the number of steps is unknown, so there is no curve. Set trainer.max_steps."
        )
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(plan.rates) + 1), plan.rates, color=LEARNING, linewidth=1.6)
        axes.set_xlabel("optimizer step", color=INK)
        axes.set_title("Learning rate")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
