"""The devices of a run, whether a training step fits one, and the cheapest changes if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.memory import simulate
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
    """`count` devices of `memory` bytes each; `here`: they are this machine's; `reserved`: bytes used before training.

    They are in `nodes` machines, as many in each. `link` is the speed of the slowest link between them in bytes a second
    (None: not known): of a machine's network if there are several machines, else between two devices.
    """

    kind: str
    name: str
    count: int
    memory: int
    here: bool
    reserved: int
    nodes: int = 1
    link: float | None = None

    @property
    def per_node(self) -> int:
        """The number of devices of a machine."""
        return self.count // self.nodes

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


def find_devices(
    kind: str, memory: int | None, per_node: int | None, nodes: int | None = None, link: float | None = None
) -> Devices:
    """Return `per_node` devices of `kind` in each of `nodes` machines, with `memory` bytes each; None for this machine's.

    Processes on a CPU divide the machine's memory. Raises `InputError` if the memory is neither given nor known.
    """
    n_nodes = nodes or 1
    if kind == "cuda" and not torch.cuda.is_available():
        if memory is None:
            raise InputError("this machine has no NVIDIA GPU. Give the memory of one: --memory 24GiB.")
        n_given = (per_node or 1) * n_nodes
        return Devices("cuda", "GPU as given", n_given, memory, False, _GPU_CONTEXT, n_nodes, link)
    if kind == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        here = memory is None and per_node in (None, torch.cuda.device_count()) and n_nodes == 1
        n_gpus = (per_node or torch.cuda.device_count()) * n_nodes
        return Devices("cuda", gpu.name, n_gpus, memory or gpu.total_memory, here, _GPU_CONTEXT, n_nodes, link)
    name, n_processes = "Apple GPU" if kind == "mps" else "CPU", per_node or 1
    reserved, here = program_bytes() + CPU_WORKING, memory is None and n_nodes == 1
    of_each = memory or machine_memory() // n_processes
    return Devices(kind, name, n_processes * n_nodes, of_each, here, reserved, n_nodes, link)


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
