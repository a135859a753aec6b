"""The devices of a run, whether a training step fits one, and the cheapest changes if it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.model import LIGER_MODELS, StepConfig
from kinject.process import machine_memory, peak_memory, resident_memory

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A card: the bytes that torch reports, and its operations a second in bfloat16 (`bf16`) or else in float16, dense."""

    name: str
    memory: int
    flops: float
    bf16: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", int(139.7 * GIB), 989e12), Gpu("H100", int(79.1 * GIB), 989e12), Gpu("A100", int(79.1 * GIB), 312e12),
        Gpu("A100-40GB", int(39.4 * GIB), 312e12), Gpu("L40S", int(44.4 * GIB), 362e12), Gpu("L4", int(22.0 * GIB), 121e12),
        Gpu("4090", int(23.5 * GIB), 165e12), Gpu("T4", int(14.6 * GIB), 65e12, bf16=False),
    )
}  # fmt: skip
"""Cards by name. Operations are those of NVIDIA's data sheets without sparsity (H100 and H200: SXM)."""
_UTILIZATION = 0.4
"""Fraction of these operations that a step reaches (an assumption: nothing was measured on a GPU)."""
_UNKNOWN_GPU = 1e14
"""Operations a second of a GPU that is none of these."""
_GPU_CONTEXT = int(0.6 * GIB)
"""Memory of CUDA and its libraries before a tensor is made (an assumption: driver and GPU decide it)."""
_GPU_FRAGMENTATION = 0.05
"""Fraction of the peak that the caching allocator holds in unused blocks (an assumption)."""
CPU_WORKING = 60 * 2**20
"""Memory of a run on a CPU beyond its tensors, the holes in its heap and the libraries (docs/plan.md)."""
_LONG_ROW = 8192
"""Tokens of a row from which on it is worth splitting between devices, or into tiles."""
_MLP_TILE = 2048
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
EXCLUDABLE = {
    "projected": ("regularization.projection=null", "updates are not projected"),
    "muon": ("techniques.muon=null", "AdamW instead of Muon"),
}
"""Field of `StepConfig` -> the override that switches it off, and the loss; some ways to train cannot have them."""


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory` bytes each; `here`: they are this machine's; `reserved`: bytes used before training.

    They are in `nodes` machines, as many in each. `link` is the speed of the slowest link between them in bytes a second
    (None: not known): of a machine's network if there are several machines, else between two devices. `gpu` is the kind of
    card, if it was named.
    """

    kind: str
    name: str
    count: int
    memory: int
    here: bool
    reserved: int
    nodes: int = 1
    link: float | None = None
    gpu: Gpu | None = None

    @property
    def arithmetic(self) -> float:
        """The operations a second of a device that times are planned with."""
        return _UTILIZATION * self.gpu.flops if self.gpu is not None else _UNKNOWN_GPU

    @property
    def has_bf16(self) -> bool:
        """Whether a GPU that is not here multiplies bfloat16, and so has attention without a mask."""
        return self.gpu is None or self.gpu.bf16

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
    kind: str, memory: int | None, per_node: int | None, nodes: int | None = None, link: float | None = None,
    gpu: Gpu | None = None,
) -> Devices:  # fmt: skip
    """Return `per_node` devices of `kind` in each of `nodes` machines, with `memory` bytes each; None for this machine's.

    With `gpu` they are such cards. Processes on a CPU divide the machine's memory. Raises `InputError` if the memory is
    neither given nor known.
    """
    n_nodes = nodes or 1
    if kind == "cuda" and (gpu is not None or not torch.cuda.is_available()):
        if memory is None and gpu is None:
            raise InputError("this machine has no NVIDIA GPU. Name one: --gpu H100; or its memory: --memory 24GiB.")
        name, count = gpu.name if gpu is not None else "GPU as given", (per_node or 1) * n_nodes
        size = memory or (gpu.memory if gpu is not None else 0)
        return Devices("cuda", name, count, size, False, _GPU_CONTEXT, n_nodes, link, gpu)
    if kind == "cuda":
        here = torch.cuda.get_device_properties(0)
        is_here = memory is None and per_node in (None, torch.cuda.device_count()) and n_nodes == 1
        n_gpus = (per_node or torch.cuda.device_count()) * n_nodes
        size = memory or here.total_memory
        return Devices("cuda", here.name, n_gpus, size, is_here, _GPU_CONTEXT, n_nodes, link, _named_in(here.name))
    name, n_processes = "Apple GPU" if kind == "mps" else "CPU", per_node or 1
    reserved, is_here = program_bytes() + CPU_WORKING, memory is None and n_nodes == 1
    of_each = memory or machine_memory() // n_processes
    return Devices(kind, name, n_processes * n_nodes, of_each, is_here, reserved, n_nodes, link)


def _named_in(name: str) -> Gpu | None:
    """Return the card of `GPUS` whose name is in the driver's name of a GPU, the longest one."""
    matching = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name.replace("-", " ").split()]
    return matching[0] if matching else None


def find_gpu(name: str) -> Gpu:
    """Return the card called `name` (--gpu), as H100. Raises `InputError` for another name."""
    known = {each.lower(): gpu for each, gpu in GPUS.items()}
    if name.lower() not in known:
        raise InputError(f"--gpu: found {name!r}, allowed: {', '.join(GPUS)}. For another card: --memory 24GiB.")
    return known[name.lower()]


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


def cheapest_changes(
    config: StepConfig, devices: Devices, peak_of: Callable[[StepConfig], int]
) -> tuple[list[Change], StepConfig | None]:
    """Return the cheapest changes that make a step of `config` fit, and the step with them (None: they are not enough).

    `peak_of` returns the bytes of a device for a step. Changes are added from the cheapest on until the step fits. Then each
    one that is not needed is removed, the most expensive first.
    """
    peaks: dict[tuple[_Candidate, ...], int] = {}

    def changed(candidates: list[_Candidate]) -> StepConfig:
        return replace(config, **{name: value for candidate in candidates for name, value in candidate.fields})

    def peak(candidates: list[_Candidate]) -> int:
        key = tuple(candidates)
        if key not in peaks:
            peaks[key] = peak_of(changed(candidates))
        return peaks[key]

    chosen: list[_Candidate] = []
    for candidate in _possible_changes(config, devices):
        chosen.append(candidate)
        if devices.fits(peak(chosen)):
            break
    suffice = bool(chosen) and devices.fits(peak(chosen))
    for candidate in chosen[-2::-1] if suffice else ():
        others = [other for other in chosen if other is not candidate]
        if devices.fits(peak(others)):
            chosen = others
    changes = [Change(each.overrides, each.cost, peak(chosen[: n + 1])) for n, each in enumerate(chosen)]
    return changes, changed(chosen) if suffice else None


def _possible_changes(config: StepConfig, devices: Devices) -> Iterator[_Candidate]:
    """Yield the possible changes, from the cheapest to the most expensive."""
    yield from _smaller_batches(config)
    is_full = config.adapter is None and not config.freeze
    if is_full and not config.optim_in_8_bits and config.optim not in ("adafactor", "sgd"):
        cost = "the optimizer's state in 8 bits: nearly the same updates"
        yield _without(("muon",), config, ("trainer.optim=adamw_8bit",), cost, (("optim", "adamw_8bit"),))
    if not config.checkpointing:
        cost = "the same update, about a third more time"
        yield _Candidate(("trainer.gradient_checkpointing=true",), cost, (("checkpointing", True),))
    if not config.fused and config.loss_tile is None:
        cost = "the same update; the last layer's products are computed twice"
        yield _Candidate(("techniques.loss_tile=1024",), cost, (("loss_tile", 1024),))
    if config.tokens >= _LONG_ROW and config.mlp_tile is None and config.model.model_type in LIGER_MODELS:
        cost = f"the same update; the products of the MLPs are computed once more, {_MLP_TILE:,} tokens at a time"
        yield _Candidate((f"techniques.mlp_tile={_MLP_TILE}",), cost, (("mlp_tile", _MLP_TILE),))
    if config.device == "cuda" and not config.liger and config.model.model_type in LIGER_MODELS:
        cost = "the same update by Triton kernels (pip install liger-kernel); read in Liger's source, not measured"
        yield _Candidate(("trainer.use_liger_kernel=true",), cost, (("liger", True),))
    if is_full and config.mixed == torch.bfloat16:
        yield from _smaller_full_training(config, devices)
    if config.device == "cuda" and not config.offloading:
        cost = "the same update, slower by the transfer to the machine's memory and back"
        yield _Candidate(("trainer.activation_offloading=true",), cost, (("offloading", True),))
    if config.device == "cuda" and config.context == config.tensor == 1 and config.block >= _LONG_ROW:
        yield from _split_rows(devices)
    half = config.mixed or torch.bfloat16
    lora: tuple[tuple[str, Any], ...] = (("dtype", half), ("rounding", False), ("in_backward", False))
    words: tuple[str, ...] = (f"model.dtype={str(half).removeprefix('torch.')}",)
    if config.rounding:
        words += ("techniques.stochastic_rounding=false",)
    if config.adapter is None and not config.freeze:
        lora, words = (
            (("adapter", _LORA), *lora),
            ("adapter={r: 64, lora_alpha: 128, target_modules: all-linear}", *words),
        )
        cost = "LoRA: learns fewer new facts than all weights do (kinject eval measures it)"
        yield _Candidate(words, cost, lora)
    if config.quantization == "none" and not config.freeze:
        cost = "QLoRA: base weights in 4 bits; slower products, a little less accurate"
        words = ("model.quantization=4bit",) if config.adapter is not None else (*words, "model.quantization=4bit")
        yield _Candidate(words, cost, (*lora, ("quantization", "4bit")))
    if config.block > 512:
        half_block = config.block // 2
        cost = "longer documents are cut in two"
        yield _Candidate((f"trainer.max_length={half_block}",), cost, (("block", half_block),))


def _smaller_batches(config: StepConfig) -> Iterator[_Candidate]:
    batch = config.batch
    while batch > 1:
        batch //= 2
        more = -(-config.batch * config.accumulation // batch)
        yield _Candidate(
            (f"trainer.per_device_train_batch_size={batch}", f"trainer.gradient_accumulation_steps={more}"),
            "the same update, a little slower where a smaller batch does not fill the device",
            (("batch", batch), ("accumulation", more)),
        )


def _split_rows(devices: Devices) -> Iterator[_Candidate]:
    """Yield context parallelism over 2, 4, ... devices of a machine."""
    n = 2
    while devices.per_node % n == 0:
        cost = f"each row split between {n} devices (context parallelism), without packing; not run on a GPU"
        fields = (("context", n), ("attention", "sdpa"), ("masked", False))
        yield _Candidate(("trainer.packing=false", "model.attention=sdpa"), cost, fields)
        n *= 2


def _smaller_full_training(config: StepConfig, devices: Devices) -> Iterator[_Candidate]:
    """Yield the changes that keep all weights in training on one device: smaller weights, state, gradients."""
    if devices.count > 1:  # these need whole weights on each device; several devices shard instead
        return
    if config.dtype == torch.float32:
        cost = "weights in bfloat16, each update rounded up or down at random, so that small ones count"
        words: tuple[str, ...] = ("model.dtype=bfloat16", "techniques.stochastic_rounding=true")
        yield _without(EXCLUDABLE, config, words, cost, (("dtype", torch.bfloat16), ("rounding", True)))
    if "paged" not in config.optim and config.device == "cuda":
        cost = "the same update; the optimizer's state is in the machine's memory while the GPU's is short"
        yield _without(("muon",), config, ("trainer.optim=paged_adamw_8bit",), cost, (("optim", "paged_adamw_8bit"),))
    if not config.in_backward:
        cost = (
            f"updates in the backward pass, one for each {config.batch} rows, without clipping: lower the learning rate"
        )
        words = (
            "techniques.optimizer_in_backward=true",
            "trainer.max_grad_norm=0",
            "trainer.gradient_accumulation_steps=1",
        )
        yield _without(EXCLUDABLE, config, words, cost, (("in_backward", True), ("accumulation", 1)))


def _without(
    excluded: Iterable[str], config: StepConfig, words: tuple[str, ...], cost: str, fields: tuple[tuple[str, Any], ...]
) -> _Candidate:
    """Return a change that rules out `excluded`, keys of `EXCLUDABLE`: they are switched off if the step has them."""
    for name in excluded:
        if getattr(config, name):
            override, loss = EXCLUDABLE[name]
            words, cost, fields = (*words, override), f"{cost}; {loss}", (*fields, (name, False))
    return _Candidate(words, cost, fields)


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
