"""Does a training step fit, what to change first where it does not, and how to spread it over several devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import Shape
from kinject.process import machine_memory, peak_memory, resident_memory

GIB = 2**30
_GPU_CONTEXT = int(0.6 * GIB)
"""What CUDA and its libraries take of a GPU before a tensor is made (an assumption: driver and GPU decide it)."""
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
CPU_WORKING = 160 * 2**20
"""What a run on a CPU holds beyond its tensors and their heap as `plan_heap` replays it: the mean of runs of 1M to 50M
parameters (docs/plan.md)."""
_GPU_FRAGMENTED = 0.05
"""Share of the peak that the caching allocator holds in pieces that fit nothing (an assumption)."""


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory` bytes each; `here` whether they are this machine's, `taken` what is gone before training."""

    kind: str
    name: str
    count: int
    memory: int
    here: bool
    taken: int

    def need(self, peak: int) -> int:
        """Return the bytes of a device that a step with `peak` bytes of tensors takes."""
        return int(peak * (1 + (_GPU_FRAGMENTED if self.kind == "cuda" else 0.0))) + self.taken

    def fits(self, peak: int) -> bool:
        """Return whether such a step fits."""
        return self.need(peak) <= self.memory


@dataclass(frozen=True)
class Change:
    """One change of the recipe that saves memory: its overrides, what it costs, and the peak with all up to it made."""

    overrides: tuple[str, ...]
    cost: str
    peak: int


@dataclass(frozen=True)
class Way:
    """How to spread the run over the devices, why, what a device then holds, and what starts it ("" where kinject cannot)."""

    name: str
    reason: str
    peak: int
    command: str


def find_devices(kind: str, memory: int | None, count: int | None) -> Devices:
    """Return this machine's devices of `kind`, or those that `memory` (bytes each) and `count` name.

    Raises `InputError` where neither are there.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        if memory is None:
            raise InputError("this machine has no NVIDIA GPU to look at. Say how large one is: --memory 24GiB.")
        return Devices("cuda", "GPU as named", count or 1, memory, False, _GPU_CONTEXT)
    if kind == "cuda":
        held = torch.cuda.get_device_properties(0)
        here = memory is None and count in (None, torch.cuda.device_count())
        found = count or torch.cuda.device_count()
        return Devices("cuda", held.name, found, memory or held.total_memory, here, _GPU_CONTEXT)
    name = "Apple GPU" if kind == "mps" else "CPU"
    return Devices(kind, name, count or 1, memory or machine_memory(), memory is None, program_bytes() + CPU_WORKING)


def program_bytes() -> int:
    """Return what Python with the libraries of training takes: this process, once they are imported."""
    import peft  # noqa: F401
    import trl  # noqa: F401

    return resident_memory() or peak_memory()


@dataclass(frozen=True, eq=False)
class _Step:
    overrides: tuple[str, ...]
    cost: str
    change: tuple[tuple[str, Any], ...]


def cheapest_changes(shape: Shape, devices: Devices) -> tuple[list[Change], bool]:
    """Return the changes of least cost that make a step of `shape` fit on one device, and whether they do.

    Changes are added from the cheapest on until it fits; then each that is not needed is taken out, the dearest first.
    """
    peaks: dict[tuple[_Step, ...], int] = {}

    def peak(steps: list[_Step]) -> int:
        key = tuple(steps)
        if key not in peaks:
            peaks[key] = simulate(replace(shape, **{name: value for step in steps for name, value in step.change})).peak
        return peaks[key]

    chosen: list[_Step] = []
    for step in _ladder(shape):
        chosen.append(step)
        if devices.fits(peak(chosen)):
            break
    suffice = devices.fits(peak(chosen))
    for step in chosen[-2::-1] if suffice else ():
        rest = [other for other in chosen if other is not step]
        if devices.fits(peak(rest)):
            chosen = rest
    priced = [Change(step.overrides, step.cost, peak(chosen[: place + 1])) for place, step in enumerate(chosen)]
    return priced, suffice


def _ladder(shape: Shape) -> Iterator[_Step]:
    """Yield what can be changed, from the cheapest to the dearest."""
    batch = shape.batch
    while batch > 1:
        batch //= 2
        more = -(-shape.batch * shape.accumulation // batch)
        yield _Step(
            (f"trainer.per_device_train_batch_size={batch}", f"trainer.gradient_accumulation_steps={more}"),
            "the same update, a little slower where a smaller batch does not fill the device",
            (("batch", batch), ("accumulation", more)),
        )
    if shape.adapter is None and "8bit" not in shape.optim and shape.optim not in ("adafactor", "sgd"):
        cost = "the optimizer's state in 8 bits: nearly the same updates"
        yield _Step(("trainer.optim=adamw_8bit",), cost, (("optim", "adamw_8bit"),))
    if not shape.checkpointing:
        cost = "the same update, about a third more time"
        yield _Step(("trainer.gradient_checkpointing=true",), cost, (("checkpointing", True),))
    if shape.device == "cuda" and not shape.offloading:
        cost = "the same update, slower by the way to the machine's memory and back"
        yield _Step(("trainer.activation_offloading=true",), cost, (("offloading", True),))
    if shape.adapter is None and shape.dtype == torch.float32 and shape.mixed == torch.bfloat16:
        cost = "small updates are rounded away: watch guards.vanishing_rate, and compare by kinject eval"
        yield _Step(("model.dtype=bfloat16",), cost, (("dtype", torch.bfloat16),))
    if shape.adapter is None and not shape.freeze:
        yield _Step(
            ("adapter={r: 64, lora_alpha: 128, target_modules: all-linear}", "model.dtype=bfloat16"),
            "LoRA: learns fewer new facts than all weights do (kinject bench and kinject eval measure it)",
            (("adapter", _LORA), ("dtype", torch.bfloat16)),
        )
    if shape.quantization == "none":
        cost = "QLoRA: base weights in 4 bits; slower products, a little less accurate"
        yield _Step(("model.quantization=4bit",), cost, (("quantization", "4bit"),))
    if shape.block > 512:
        half = shape.block // 2
        yield _Step((f"trainer.max_length={half}",), "longer documents are cut in two", (("block", half),))


def choose_way(shape: Shape, memory: Memory, devices: Devices) -> Way:
    """Return how to run `shape` on `devices`: the way that sends least between them of those that fit."""
    n = devices.count
    if n == 1:
        return _alone(memory, devices)
    buckets = memory.trained_bytes  # DDP's own copy of the gradients, in buckets
    rest = memory.activations + memory.logits
    gathered = 2 * memory.largest_block
    launch = (
        "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes "
        + str(n)
        + " -m kinject.cli train RECIPE"
    )
    ddp = memory.peak + buckets
    if devices.fits(ddp):
        why = f"a whole step fits on each of the {n}; only gradients travel ({_size(memory.trained_bytes)} a step)"
        return Way("DDP", why, ddp, launch.format("ddp" if devices.kind == "cuda" else "ddp-cpu"))
    if devices.kind != "cuda":
        return Way("none", "processes on a CPU can only run DDP, each with a whole step, which does not fit", ddp, "")
    zero2 = memory.weights + (memory.gradients + memory.optimizer) // n + rest + buckets // n
    if devices.fits(zero2):
        why = "a step fits once gradients and the optimizer's state are shared out; the weights stay whole"
        return Way("ZeRO-2", why, zero2, launch.format("zero2"))
    fsdp = (memory.weights + memory.gradients + memory.optimizer) // n + rest + gathered
    if devices.fits(fsdp):
        why = "weights, gradients and state have to be shared out; each layer is gathered when its turn comes"
        return Way("FSDP (ZeRO-3)", why, fsdp, launch.format("fsdp2"))
    return _beyond_sharding(memory, devices, fsdp)


def _alone(memory: Memory, devices: Devices) -> Way:
    if devices.fits(memory.peak):
        return Way("one device", "a whole step fits, and there is one device", memory.peak, "kinject train RECIPE")
    offloaded = memory.activations + memory.logits + 2 * memory.largest_block
    if devices.kind == "cuda" and devices.fits(offloaded):
        host = memory.weights + memory.gradients + memory.optimizer
        why = (
            f"weights, gradients and state ({_size(host)}) would have to lie in the machine's memory (ZeRO-3 with offload): "
            "several times slower. Make the changes above first"
        )
        return Way("offload", why, offloaded, "")
    return Way("none", "a step does not fit on the one device. Make the changes above", memory.peak, "")


def _beyond_sharding(memory: Memory, devices: Devices, fsdp: int) -> Way:
    split = memory.peak // devices.count
    if devices.fits(split):
        why = (
            "what a device works on for its own rows does not fit even with all weights shared out, so the layers themselves "
            "have to be split: tensor parallel within a machine (fast links), pipeline between machines. kinject runs neither; "
            "smaller rows or gradient checkpointing (see the changes) make FSDP enough"
        )
        return Way("tensor or pipeline", why, split, "")
    why = f"even split over {devices.count} devices a step needs {_size(split)} on each. Make the changes above"
    return Way("none", why, fsdp, "")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"


def parse_memory(text: str) -> int:
    """Return the bytes of ``24GiB``, ``24GB`` or ``24G`` (GB as makers of GPUs say it is read as GiB). Raises `InputError`."""
    units = {
        "": 2**30,
        "g": 2**30,
        "gb": 2**30,
        "gib": 2**30,
        "m": 2**20,
        "mb": 2**20,
        "mib": 2**20,
        "t": 2**40,
        "tib": 2**40,
    }
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        n_bytes = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError) as error:
        raise InputError(f"--memory: found {text!r}, expected a size such as 24GiB or 512MiB.") from error
    if n_bytes <= 0:
        raise InputError(f"--memory: found {text!r}, expected more than nothing.")
    return n_bytes
