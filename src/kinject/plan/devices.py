"""Whether a training step fits, the cheapest changes if it does not, and how to spread it over several devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import StepConfig
from kinject.process import machine_memory, peak_memory, resident_memory

GIB = 2**30
_GPU_CONTEXT = int(0.6 * GIB)
"""Memory of CUDA and its libraries before a tensor is made (an assumption: driver and GPU decide it)."""
_GPU_FRAGMENTATION = 0.05
"""Fraction of the peak that the caching allocator holds in unused blocks (an assumption)."""
CPU_WORKING = 160 * 2**20
"""Memory of a run on a CPU beyond its tensors, fragmentation and libraries: about the mean over runs of 1M to 50M parameters
(docs/plan.md)."""
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory` bytes each; `here`: they are this machine's; `reserved`: bytes used before training."""

    kind: str
    name: str
    count: int
    memory: int
    here: bool
    reserved: int

    def need(self, peak: int) -> int:
        """Return the bytes of a device for a step with a `peak` of tensors."""
        return int(peak * (1 + (_GPU_FRAGMENTATION if self.kind == "cuda" else 0.0))) + self.reserved

    def fits(self, peak: int) -> bool:
        """Return whether such a step fits."""
        return self.need(peak) <= self.memory


@dataclass(frozen=True)
class Change:
    """A change of the recipe that saves memory: its overrides, its cost, and the peak after it and all before it."""

    overrides: tuple[str, ...]
    cost: str
    peak: int


@dataclass(frozen=True)
class Parallelism:
    """How to spread the run over the devices, why, the peak of one device, and the command ("" if kinject has none)."""

    name: str
    reason: str
    peak: int
    command: str


def find_devices(kind: str, memory: int | None, count: int | None) -> Devices:
    """Return `count` devices of `kind` with `memory` bytes each; None for this machine's.

    Raises `InputError` if the memory is neither given nor known.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        if memory is None:
            raise InputError("this machine has no NVIDIA GPU. Give the memory of one: --memory 24GiB.")
        return Devices("cuda", "GPU as given", count or 1, memory, False, _GPU_CONTEXT)
    if kind == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        here = memory is None and count in (None, torch.cuda.device_count())
        n_gpus = count or torch.cuda.device_count()
        return Devices("cuda", gpu.name, n_gpus, memory or gpu.total_memory, here, _GPU_CONTEXT)
    name = "Apple GPU" if kind == "mps" else "CPU"
    return Devices(kind, name, count or 1, memory or machine_memory(), memory is None, program_bytes() + CPU_WORKING)


def program_bytes() -> int:
    """Return the memory of Python with the libraries of training: this process, once they are imported."""
    import peft  # noqa: F401
    import trl  # noqa: F401

    return resident_memory() or peak_memory()


@dataclass(frozen=True, eq=False)
class _Candidate:
    overrides: tuple[str, ...]
    cost: str
    fields: tuple[tuple[str, Any], ...]


def cheapest_changes(config: StepConfig, devices: Devices) -> tuple[list[Change], bool]:
    """Return the cheapest changes that make a step of `config` fit on one device, and whether they do.

    Changes are added from the cheapest on until the step fits. Then each one that is not needed is removed, the most
    expensive first.
    """
    peaks: dict[tuple[_Candidate, ...], int] = {}

    def peak(candidates: list[_Candidate]) -> int:
        key = tuple(candidates)
        if key not in peaks:
            fields = {name: value for candidate in candidates for name, value in candidate.fields}
            peaks[key] = simulate(replace(config, **fields)).peak
        return peaks[key]

    chosen: list[_Candidate] = []
    for candidate in _possible_changes(config):
        chosen.append(candidate)
        if devices.fits(peak(chosen)):
            break
    suffice = devices.fits(peak(chosen))
    for candidate in chosen[-2::-1] if suffice else ():
        rest = [other for other in chosen if other is not candidate]
        if devices.fits(peak(rest)):
            chosen = rest
    return [Change(each.overrides, each.cost, peak(chosen[: n + 1])) for n, each in enumerate(chosen)], suffice


def _possible_changes(config: StepConfig) -> Iterator[_Candidate]:
    """Yield the possible changes, from the cheapest to the most expensive."""
    batch = config.batch
    while batch > 1:
        batch //= 2
        more = -(-config.batch * config.accumulation // batch)
        yield _Candidate(
            (f"trainer.per_device_train_batch_size={batch}", f"trainer.gradient_accumulation_steps={more}"),
            "the same update, a little slower where a smaller batch does not fill the device",
            (("batch", batch), ("accumulation", more)),
        )
    if config.adapter is None and "8bit" not in config.optim and config.optim not in ("adafactor", "sgd"):
        cost = "the optimizer's state in 8 bits: nearly the same updates"
        yield _Candidate(("trainer.optim=adamw_8bit",), cost, (("optim", "adamw_8bit"),))
    if not config.checkpointing:
        cost = "the same update, about a third more time"
        yield _Candidate(("trainer.gradient_checkpointing=true",), cost, (("checkpointing", True),))
    if config.device == "cuda" and not config.offloading:
        cost = "the same update, slower by the transfer to the machine's memory and back"
        yield _Candidate(("trainer.activation_offloading=true",), cost, (("offloading", True),))
    if config.adapter is None and config.dtype == torch.float32 and config.mixed == torch.bfloat16:
        cost = "small updates are rounded away: watch guards.vanishing_rate, and compare by kinject eval"
        yield _Candidate(("model.dtype=bfloat16",), cost, (("dtype", torch.bfloat16),))
    if config.adapter is None and not config.freeze:
        yield _Candidate(
            ("adapter={r: 64, lora_alpha: 128, target_modules: all-linear}", "model.dtype=bfloat16"),
            "LoRA: learns fewer new facts than all weights do (kinject bench and kinject eval measure it)",
            (("adapter", _LORA), ("dtype", torch.bfloat16)),
        )
    if config.quantization == "none":
        cost = "QLoRA: base weights in 4 bits; slower products, a little less accurate"
        yield _Candidate(("model.quantization=4bit",), cost, (("quantization", "4bit"),))
    if config.block > 512:
        half = config.block // 2
        yield _Candidate((f"trainer.max_length={half}",), "longer documents are cut in two", (("block", half),))


def choose_parallelism(memory: Memory, devices: Devices) -> Parallelism:
    """Return how to run a step on `devices`: of the parallelisms that fit, the one with the least communication."""
    n = devices.count
    if n == 1:
        return _one_device(memory, devices)
    buckets = memory.trained_bytes  # DDP's copy of the gradients, in buckets
    rest = memory.activations + memory.logits
    gathered = 2 * memory.largest_block
    launch = (
        f"accelerate launch --config_file recipes/distributed/{{}}.yaml --num_processes {n} -m kinject.cli train RECIPE"
    )
    ddp = memory.peak + buckets
    if devices.fits(ddp):
        why = f"a whole step fits on each of the {n}; only gradients are sent ({render_size(memory.trained_bytes)} a step)"
        return Parallelism("DDP", why, ddp, launch.format("ddp" if devices.kind == "cuda" else "ddp-cpu"))
    if devices.kind != "cuda":
        why = "processes on a CPU can only run DDP, each with a whole step, which does not fit"
        return Parallelism("none", why, ddp, "")
    zero2 = memory.weights + (memory.gradients + memory.optimizer) // n + rest + buckets // n
    if devices.fits(zero2):
        why = "a step fits once gradients and the optimizer's state are sharded; the weights stay whole"
        return Parallelism("ZeRO-2", why, zero2, launch.format("zero2"))
    fsdp = (memory.weights + memory.gradients + memory.optimizer) // n + rest + gathered
    if devices.fits(fsdp):
        why = "weights, gradients and state have to be sharded; each layer is gathered when it is needed"
        return Parallelism("FSDP (ZeRO-3)", why, fsdp, launch.format("fsdp2"))
    return _beyond_sharding(memory, devices, fsdp)


def _one_device(memory: Memory, devices: Devices) -> Parallelism:
    if devices.fits(memory.peak):
        why = "a whole step fits, and there is one device"
        return Parallelism("one device", why, memory.peak, "kinject train RECIPE")
    offloaded = memory.activations + memory.logits + 2 * memory.largest_block
    if devices.kind == "cuda" and devices.fits(offloaded):
        host = memory.weights + memory.gradients + memory.optimizer
        why = (
            f"weights, gradients and state ({render_size(host)}) would have to be in the machine's memory (ZeRO-3 with offload): "
            "several times slower. Make the changes above first"
        )
        return Parallelism("offload", why, offloaded, "")
    return Parallelism("none", "a step does not fit on the one device. Make the changes above", memory.peak, "")


def _beyond_sharding(memory: Memory, devices: Devices, fsdp: int) -> Parallelism:
    split = memory.peak // devices.count
    if devices.fits(split):
        why = (
            "the activations of a device's own rows do not fit even with all weights sharded, so the layers themselves "
            "have to be split: tensor parallel within a machine (fast links), pipeline between machines. kinject runs neither; "
            "smaller rows or gradient checkpointing (see the changes) make FSDP enough"
        )
        return Parallelism("tensor or pipeline", why, split, "")
    why = f"even split over {devices.count} devices a step needs {render_size(split)} on each. Make the changes above"
    return Parallelism("none", why, fsdp, "")


def render_size(n_bytes: float) -> str:
    """Return bytes as text: ``3.2 GiB``, ``120 MiB``."""
    for unit, smallest in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= smallest:
            return f"{n_bytes / smallest:.1f} {unit}"
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes < 10 * 2**20 else f"{n_bytes / 2**20:.0f} MiB"


def parse_memory(text: str) -> int:
    """Return the bytes of ``24GiB``, ``24GB`` or ``24G`` (GB is read as GiB, as GPUs are sold). Raises `InputError`."""
    units = {
        "": 2**30, "g": 2**30, "gb": 2**30, "gib": 2**30, "m": 2**20, "mb": 2**20, "mib": 2**20, "t": 2**40, "tib": 2**40,
    }  # fmt: skip
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        n_bytes = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError) as error:
        raise InputError(f"--memory: found {text!r}, expected a size such as 24GiB or 512MiB.") from error
    if n_bytes <= 0:
        raise InputError(f"--memory: found {text!r}, expected more than 0.")
    return n_bytes
