"""The devices of a run, the ways to spread a step over them, and the changes of a recipe that make
a step fit.

Of the ways that fit, the one that sends least is taken: the table `WAYS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kinject.errors import InputError
from kinject.plan.estimate import Memory, Shapes, Step, estimate, is_bitsandbytes, read_shapes
from kinject.process import machine_memory, peak_memory, resident_memory

GIB = 2**30
_UTILIZATION = 0.4
"""Fraction of a data sheet's operations that a step reaches (an assumption)."""
_UNKNOWN_GPU = 1e14
_GPU_CONTEXT, _GPU_FRAGMENTATION = int(0.6 * GIB), 0.05
"""Memory of CUDA before a tensor is made, and the fraction of the peak in unused blocks
(assumptions)."""
CPU_WORKING = 60 * 2**20
"""Memory of a run on a CPU beyond its tensors, the holes in its heap and the libraries
(docs/figures.md)."""
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
GPUS = {
    "H200": (139.7, 989e12), "H100": (79.1, 989e12), "A100": (79.1, 312e12), "A100-40GB": (39.4, 312e12),
    "L40S": (44.4, 362e12), "L4": (22.0, 121e12), "4090": (23.5, 165e12), "T4": (14.6, 65e12),
}  # fmt: skip
"""Card -> the GiB that torch reports, and dense operations a second in bfloat16 (T4: float16) by
NVIDIA's data sheet."""


class _Kind(NamedTuple):
    """A row of `WAYS`: its configuration in recipes/distributed, and when it is the choice.

    `is_possible` is about devices and step; `sent` are the bytes that a device sends in an
    optimizer step of so many micro-batches over a ring, times n / (n - 1), by the bytes of trained
    and of all weights, and by autocast's division of them.
    """

    config: str
    why: str
    is_possible: Callable[[Devices, Step], bool]
    sent: Callable[[int, int, int, int], float]


WAYS = {
    "one device": _Kind("", "a whole step fits, and there is one device",
        lambda d, s: d.count == 1, lambda trained, weights, times, halved: 0),
    "DDP": _Kind("ddp", "a whole step fits on each device; only gradients are sent",
        lambda d, s: d.count > 1, lambda trained, weights, times, halved: 2 * trained),
    "ZeRO-2": _Kind("zero2",
        "a step fits once gradients and the optimizer's state are divided; the weights stay whole, in bfloat16",
        lambda d, s: d.are_gpus and s.adapter is None, lambda trained, weights, times, halved: (times + 1) * trained / halved),
    "FSDP": _Kind("fsdp2", "weights, gradients and state have to be divided; each layer is gathered when it is needed",
        lambda d, s: d.are_gpus, lambda trained, weights, times, halved: times * (2 * weights / halved + trained)),
    "offload": _Kind("fsdp2-offload", "all but one layer at a time is in the machine's memory: several times slower",
        lambda d, s: d.kind == "cuda", lambda trained, weights, times, halved: times * (2 * weights + trained)),
}  # fmt: skip
"""Ways to spread a step, from the one that sends least on: the first that is possible and fits is
the choice."""
_LAUNCH = "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes {}{} -m kinject.cli train RECIPE"
_SYNC = "trainer.accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}"
_EXCLUDED = {"projected": "regularization.projection=null", "muon": "techniques.muon=null"}
"""Field of `Step` -> the override that switches it off: some ways to train cannot have it."""


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory` bytes in `nodes` machines; `here`: this machine's. `reserved`
    bytes are used before training.

    `link` is the speed of the slowest link between them in bytes a second (None: not known),
    `flops` the operations a second of a device, `has_bf16` whether it multiplies bfloat16.
    """

    kind: str
    name: str
    count: int
    memory: int
    here: bool
    reserved: int
    nodes: int = 1
    link: float | None = None
    flops: float = _UNKNOWN_GPU
    has_bf16: bool = True

    @property
    def are_gpus(self) -> bool:
        """Whether there are several GPUs, between which weights can be divided."""
        return self.kind == "cuda" and self.count > 1

    def need(self, peak: int) -> int:
        """Return the bytes of a device for a step with a `peak` of tensors."""
        return (
            int(peak * (1 + (_GPU_FRAGMENTATION if self.kind == "cuda" else 0.0))) + self.reserved
        )

    def fits(self, peak: int) -> bool:
        """Return whether such a step fits."""
        return self.need(peak) <= self.memory


@dataclass(frozen=True)
class Way:
    """How to spread a step: its name in `WAYS`, why, a device's memory, the launch ("" if none),
    and the overrides it needs.

    `sent` are the bytes that a device sends in an optimizer step.
    """

    name: str
    why: str
    memory: Memory
    launch: str = ""
    overrides: tuple[str, ...] = ()
    sent: int = 0

    @property
    def is_enough(self) -> bool:
        """Whether the step fits the devices without the machine's memory."""
        return self.name not in ("offload", "none")

    @property
    def command(self) -> str:
        """The command line, with RECIPE for the recipe; "" without any."""
        return " ".join((self.launch, *map(quoted, self.overrides))) if self.launch else ""


@dataclass(frozen=True, eq=False)
class Change:
    """A change of the recipe that saves memory: its overrides, its cost, and the `fields` of the
    step."""

    overrides: tuple[str, ...]
    cost: str
    fields: dict[str, Any]


def find_devices(
    kind: str, memory: int | None, per_node: int | None, nodes: int | None = None, link: float | None = None,
    gpu: str | None = None,
) -> Devices:  # fmt: skip
    """Return `per_node` devices of `kind` in each of `nodes` machines, with `memory` bytes each;
    None for this machine's.

    `gpu` is a name in `GPUS`. Processes on a CPU divide the machine's memory. Raises `InputError`
    if the memory is neither given nor known.
    """
    n_nodes = nodes or 1
    if kind != "cuda":
        n, name = per_node or 1, "Apple GPU" if kind == "mps" else "CPU"
        is_here = memory is None and n_nodes == 1
        of_each = memory or machine_memory() // n
        return Devices(
            kind, name, n * n_nodes, of_each, is_here, program_bytes() + CPU_WORKING, n_nodes, link
        )
    if gpu is not None and gpu.upper() not in GPUS:
        raise InputError(
            f"--gpu: found {gpu!r}, allowed: {', '.join(GPUS)}. For another card: --memory 24GiB."
        )
    name, is_here, known, count = (gpu or "").upper(), False, 0, per_node or 1
    if gpu is None and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        name, known, count = here.name, here.total_memory, per_node or torch.cuda.device_count()
        is_here = memory is None and n_nodes == 1 and count == torch.cuda.device_count()
    card = (
        name
        if name in GPUS
        else next((each for each in GPUS if each in name.replace("-", " ").split()), "")
    )
    size = memory or known or int(GPUS[card][0] * GIB if card else 0)
    if not size:
        raise InputError(
            "this machine has no NVIDIA GPU. Name one: --gpu H100; or its memory: --memory 24GiB."
        )
    flops = _UTILIZATION * GPUS[card][1] if card else _UNKNOWN_GPU
    name = name or "GPU as given"
    return Devices(
        "cuda",
        name,
        count * n_nodes,
        size,
        is_here,
        _GPU_CONTEXT,
        n_nodes,
        link,
        flops,
        card != "T4",
    )


def program_bytes() -> int:
    """Return the memory of Python with the libraries of training: this process, once they are
    imported."""
    import peft  # noqa: F401
    import trl  # noqa: F401

    return resident_memory() or peak_memory()


def choose(step: Step, devices: Devices) -> tuple[Way, list[Change]]:
    """Return the way to run `step`, and the changes of the recipe that it needs first: the cheapest
    that are enough.

    If all together are not enough, the way is offload or "none", as the step is.
    """
    known: dict[str, Shapes] = {}

    def way(changes: list[Change]) -> Way:
        return _first_way(_changed(step, changes), devices, known)

    whole = way([])
    chosen: list[Change] = []
    if whole.is_enough:
        return whole, chosen
    for change in _possible_changes(step, devices):
        chosen.append(change)
        if way(chosen).is_enough:
            break
    else:
        return whole, chosen
    for change in chosen[-2::-1]:  # the most expensive that is not needed goes first
        others = [other for other in chosen if other is not change]
        chosen = others if way(others).is_enough else chosen
    best = way(chosen)
    words = [*(text for change in chosen for text in change.overrides), *best.overrides]
    # a later override takes the place of an earlier one of the same key
    return replace(
        best, overrides=tuple({text.partition("=")[0]: text for text in words}.values())
    ), chosen


def _first_way(step: Step, devices: Devices, known: dict[str, Shapes]) -> Way:
    """Return the first of `WAYS` that fits, "none" without any; `known` keeps the shapes of each
    kind of weights and state."""

    def shapes_of(step: Step) -> Shapes:
        key = repr((step.dtype, step.optim, step.optim_args, step.adapter, step.quantization, step.muon, step.rounding,
                    step.projected))  # fmt: skip
        if key not in known:
            known[key] = read_shapes(step)
        return known[key]

    memories = []
    for name, kind in WAYS.items():
        if not kind.is_possible(devices, step):
            continue
        changed, overrides = _divisible(step, name)
        shapes = shapes_of(changed)
        memories.append(estimate(changed, shapes, name, devices.count))
        if devices.fits(memories[-1].peak):
            part = (1 if name == "offload" else devices.count - 1) / devices.count
            halved = (
                2 if changed.dtype == torch.float32 and changed.mixed is not None else 1
            )  # autocast's dtype is sent
            sent = int(
                part * kind.sent(shapes.trained, shapes.weights, changed.accumulation, halved)
            )
            return Way(name, kind.why, memories[-1], _launch(name, devices), overrides, sent)
    why = "a step does not fit, and processes on a CPU divide nothing"
    if devices.kind == "cuda":
        layer = shapes_of(step).layer
        why = "the activations of a device's own rows do not fit: take smaller or shorter rows"
        if not devices.fits(4 * layer):
            why = (
                f"the largest layer ({render_size(layer)}) does not fit, since FSDP gathers it whole with the next one. "
                "Tensor parallelism (recipes/distributed/fsdp2-split.yaml) or a larger device is needed"
            )
    return Way("none", why, min(memories, key=lambda memory: memory.peak))


def _divisible(step: Step, way: str) -> tuple[Step, tuple[str, ...]]:
    """Return the step as `way` runs it, and the overrides of the recipe that this needs.

    What is divided holds no state of bitsandbytes, and no technique that needs whole weights.
    accelerate shards what is offloaded or quantised: it checkpoints activations itself, and needs
    sync_each_batch to divide gradients.
    """
    if way == "DDP" and step.device == "cpu":
        return step, ("trainer.use_cpu=true",)
    if way in ("one device", "DDP"):
        return step, ()
    words: list[str] = []
    if step.rounding:
        words += ["techniques.stochastic_rounding=false", "model.dtype=float32"]
        step = replace(step, rounding=False, dtype=torch.float32)
    words += [override for field, override in _EXCLUDED.items() if getattr(step, field)]
    step = replace(step, projected=False, muon=False)
    if way == "ZeRO-2":
        return step, tuple(words)
    if is_bitsandbytes(step.optim):
        words.append("trainer.optim=adamw_torch_fused")
        step = replace(step, optim="adamw_torch_fused", optim_args=None)
    if way == "offload" or step.quantization != "none":
        words += ["trainer.gradient_checkpointing=false"] if step.checkpointing else []
        words += [_SYNC] if step.accumulation > 1 else []
    elif not step.checkpointing:
        words.append("trainer.gradient_checkpointing=true")
    return replace(step, checkpointing=True), tuple(words)


def _launch(way: str, devices: Devices) -> str:
    """Return the command without overrides; on several machines that of the first, with ADDRESS for
    its address."""
    config = WAYS[way].config
    if not config:
        return "kinject train RECIPE"
    more = ""
    if devices.nodes > 1:
        more = f" --num_machines {devices.nodes} --machine_rank 0 --main_process_ip ADDRESS --main_process_port 29500"
    return _LAUNCH.format("ddp-cpu" if devices.kind == "cpu" else config, devices.count, more)


def _changed(step: Step, candidates: list[Change]) -> Step:
    return replace(
        step, **{name: value for item in candidates for name, value in item.fields.items()}
    )


def _possible_changes(step: Step, devices: Devices) -> Iterator[Change]:
    """Yield the possible changes, from the cheapest to the most expensive."""
    words: tuple[str, ...]
    batch = step.batch
    while batch > 1:
        batch //= 2
        more = -(-step.batch * step.accumulation // batch)
        words = (
            f"trainer.per_device_train_batch_size={batch}",
            f"trainer.gradient_accumulation_steps={more}",
        )
        yield Change(
            words, "the same update, a little slower", {"batch": batch, "accumulation": more}
        )
    is_full = step.adapter is None and not step.freeze
    off = tuple(override for field, override in _EXCLUDED.items() if getattr(step, field))
    if is_full and "8bit" not in step.optim and step.optim not in ("adafactor", "sgd"):
        words = ("trainer.optim=adamw_8bit", *((_EXCLUDED["muon"],) if step.muon else ()))
        cost = "the optimizer's state in 8 bits: nearly the same updates"
        yield Change(words, cost, {"optim": "adamw_8bit", "muon": False})
    if not step.checkpointing:
        cost = "the same update, about a third more time"
        yield Change(("trainer.gradient_checkpointing=true",), cost, {"checkpointing": True})
    if (
        is_full
        and devices.count == 1
        and step.mixed == torch.bfloat16
        and step.dtype == torch.float32
    ):
        cost = "weights in bfloat16, each update rounded up or down at random, so that small ones count"
        words = ("model.dtype=bfloat16", "techniques.stochastic_rounding=true", *off)
        fields = {"dtype": torch.bfloat16, "rounding": True, "projected": False, "muon": False}
        yield Change(words, cost, fields)
    half = step.mixed or torch.bfloat16
    lora: dict[str, Any] = {"dtype": half, "rounding": False}
    words = (f"model.dtype={str(half).removeprefix('torch.')}",)
    words += ("techniques.stochastic_rounding=false",) if step.rounding else ()
    if is_full:
        lora["adapter"] = _LORA
        words = ("adapter={r: 64, lora_alpha: 128, target_modules: all-linear}", *words)
        yield Change(
            words,
            "LoRA: learns fewer new facts than all weights do (kinject eval measures it)",
            lora,
        )
    if step.quantization == "none" and not step.freeze:
        cost = "QLoRA: base weights in 4 bits; slower products, a little less accurate"
        yield Change((*words, "model.quantization=4bit"), cost, {**lora, "quantization": "4bit"})


def describe_batch(step: Step, devices: Devices, rate: float) -> list[str]:
    """Return a line with the learning rate for the larger batch of several devices.

    It is linear for SGD (arXiv 1706.02677), the square root for Adam and its kin (arXiv
    2205.10287).
    """
    n, is_sgd = devices.count, "sgd" in step.optim
    higher = rate * (n if is_sgd else math.sqrt(n))
    rule = "linear rule for SGD" if is_sgd else "square-root rule for Adam and its kin"
    return (
        [f"{n} times the rows of one device: try trainer.learning_rate={higher:.3g} ({rule})"]
        if n > 1
        else []
    )


def describe_traffic(way: Way, flops: float, devices: Devices) -> list[str]:
    """Return lines on the bytes that a step sends and, if the link's speed is known, how long that
    takes."""
    if not way.sent:
        return []
    if way.name == "offload":
        return [
            f"{render_size(way.sent)} go between each device and the machine's memory in a step"
        ]
    line = f"{render_size(way.sent)} are sent by each {'machine' if devices.nodes > 1 else 'device'} in a step"
    if devices.link is None:
        return [f"{line} (--link GBPS for the time that takes)"]
    seconds, busy = way.sent / devices.link, flops / devices.flops
    lines = [
        f"{line}: {seconds:.3g} s at {devices.link / 1e9:g} GB/s, beside {busy:.3g} s of arithmetic"
    ]
    if devices.kind == "cuda" and seconds > busy:
        lines.append(
            "The link is slower than the GPUs: accumulate more with DDP, less with FSDP; LoRA sends least."
        )
    return lines


def quoted(override: str) -> str:
    """Return an override as a shell needs it."""
    return f"'{override}'" if set(override) & set("{}[]*? ") else override


def render_size(n_bytes: float) -> str:
    """Return bytes as text: ``3.2 GiB``, ``120 MiB``."""
    for unit, smallest in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= smallest:
            return f"{n_bytes / smallest:.1f} {unit}"
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes < 10 * 2**20 else f"{n_bytes / 2**20:.0f} MiB"


def parse_memory(text: str) -> int:
    """Return the bytes of ``24GiB``, ``24GB`` or ``24G`` (GB is read as GiB, as GPUs are sold).
    Raises `InputError`."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([gmt]?)(?:i?b)?\s*", text.lower())
    try:
        n_bytes = (
            int(float(match[1]) * {"": 2**30, "g": 2**30, "m": 2**20, "t": 2**40}[match[2]])
            if match
            else 0
        )
    except ValueError:
        n_bytes = 0
    if n_bytes <= 0:
        raise InputError(
            f"--memory: found {text!r}, expected a size such as 24GiB or 512MiB, more than 0."
        )
    return n_bytes
