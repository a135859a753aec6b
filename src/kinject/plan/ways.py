"""The devices of a run, the ways to spread a step over them, and the changes of a recipe that make
a step fit.

Of the ways that fit, the one that sends least is taken: the table `WAYS`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from time import monotonic, process_time
from typing import Any, NamedTuple

import torch

from kinject.errors import InputError
from kinject.models import has_fast_bf16
from kinject.plan.estimate import Memory, Shapes, Step, estimate, is_bitsandbytes, read_shapes
from kinject.process import core_count, machine_memory, peak_memory, resident_memory
from kinject.terminal import format_number

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
_PRODUCT, _PRODUCT_SECONDS = 1024, 0.33
"""Rows of the matrices whose product is timed, and for how long."""
_OF_PRODUCTS = 0.6
"""Of the pace of such products, the fraction that a step reaches: 0.57 of them for 1.2M parameters,
0.64 for 50M, 0.79 in a forward pass alone (float32, AVX-512, one thread)."""
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
GPUS = {
    "H200": (139.7, 989e12),
    "H100": (79.1, 989e12),
    "A100": (79.1, 312e12),
    "A100-40GB": (39.4, 312e12),
    "L40S": (44.4, 362e12),
    "L4": (22.0, 121e12),
    "4090": (23.5, 165e12),
    "T4": (14.6, 65e12),
}
"""Card -> the GiB that torch reports, and dense operations a second in bfloat16 (T4: float16) by
NVIDIA's data sheet."""


class _Kind(NamedTuple):
    """A row of `WAYS`: its configuration in recipes/distributed, and when it is the choice."""

    config: str
    why: str


WAYS = {
    "one device": _Kind("", "a whole step fits, and there is one device"),
    "DDP": _Kind("ddp", "a whole step fits on each device; only gradients are sent"),
    "ZeRO-2": _Kind(
        "zero2",
        "a step fits once gradients and the optimizer's state are divided; the weights stay whole, "
        "in bfloat16",
    ),
    "HSDP": _Kind(
        "hsdp",
        "weights, gradients and state have to be divided, and the devices of one machine hold them "
        "together: only gradients go between machines",
    ),
    "FSDP": _Kind(
        "fsdp2",
        "weights, gradients and state have to be divided; each layer is gathered when it is needed",
    ),
    "offload": _Kind(
        "fsdp2-offload",
        "all but one layer at a time is in the machine's memory: several times slower",
    ),
}
"""Ways to spread a step, from the one that sends least on: the first that is possible and fits is
the choice."""
_LAUNCH = (
    "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes {}{} "
    "-m kinject.cli train RECIPE"
)
# Without it FSDP2 under accelerate keeps whole gradients while it accumulates.
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
        if self.kind == "cuda":
            peak = int(peak * (1 + _GPU_FRAGMENTATION))
        return peak + self.reserved

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
        if not self.launch:
            return ""
        return " ".join((self.launch, *map(quoted, self.overrides)))


@dataclass(frozen=True, eq=False)
class Change:
    """A change of the recipe that saves memory: its overrides, its cost, and the `fields` of the
    step."""

    overrides: tuple[str, ...]
    cost: str
    fields: dict[str, Any]


def find_devices(
    kind: str,
    memory: int | None,
    per_node: int | None,
    nodes: int | None = None,
    link: float | None = None,
    gpu: str | None = None,
) -> Devices:
    """Return `per_node` devices of `kind` in each of `nodes` machines, with `memory` bytes each;
    None for this machine's.

    `gpu` is a name in `GPUS`. Processes on a CPU divide the machine's memory. Raises `InputError`
    if the memory is neither given nor known.
    """
    n_nodes = nodes or 1
    if kind != "cuda":
        processes = _processes(kind, memory, per_node or 1, n_nodes)
        return replace(processes, link=link)
    _check_card(gpu)
    name, is_here, known, count = (gpu or "").upper(), False, 0, per_node or 1
    if gpu is None and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        name, known, count = here.name, here.total_memory, per_node or torch.cuda.device_count()
        is_here = memory is None and n_nodes == 1 and count == torch.cuda.device_count()
    card = _card(name)
    has_bf16 = card != "T4"
    if known:
        has_bf16 = has_fast_bf16("cuda")
    size, flops = memory or known, _UNKNOWN_GPU
    if card:
        size = size or int(GPUS[card][0] * GIB)
        flops = _UTILIZATION * GPUS[card][1]
    if not size:
        raise InputError(
            "this machine has no NVIDIA GPU. Name one: --gpu H100; or its memory: --memory 24GiB."
        )
    return Devices(
        kind="cuda",
        name=name or "GPU as given",
        count=count * n_nodes,
        memory=size,
        here=is_here,
        reserved=_GPU_CONTEXT,
        nodes=n_nodes,
        link=link,
        flops=flops,
        has_bf16=has_bf16,
    )


def _processes(kind: str, memory: int | None, per_node: int, n_nodes: int) -> Devices:
    """Return processes on CPUs, or an Apple GPU, which divide a machine's memory."""
    return Devices(
        kind=kind,
        name="Apple GPU" if kind == "mps" else "CPU",
        count=per_node * n_nodes,
        memory=memory or machine_memory() // per_node,
        here=memory is None and n_nodes == 1,
        reserved=program_bytes() + CPU_WORKING,
        nodes=n_nodes,
    )


def _check_card(gpu: str | None) -> None:
    """Raise `InputError` if the card that the user names is none of `GPUS`."""
    if gpu is not None and gpu.upper() not in GPUS:
        raise InputError(
            f"--gpu: found {gpu!r}, allowed: {', '.join(GPUS)}. For another card kinject plan and "
            "kinject try take --memory 24GiB."
        )


def _card(name: str) -> str:
    """Return the name in `GPUS` of what torch or the user calls a card, "" if there is none."""
    if name in GPUS:
        return name
    # torch's names have more words, as NVIDIA H100 80GB HBM3.
    words = name.replace("-", " ").split()
    return next((card for card in GPUS if card in words), "")


@cache
def matrix_pace(kind: str) -> float:
    """Return the operations a second that a training step reaches on an idle CPU or an Apple GPU,
    by products of matrices for a third of a second."""
    # In processor time: beside seven other programs, a product took twenty times as long.
    clock, n_cores = process_time, core_count()
    if kind != "cpu":
        clock, n_cores = monotonic, 1
    matrix = torch.rand(_PRODUCT, _PRODUCT, device=kind)
    (matrix @ matrix)[0, 0].item()  # the first product starts threads
    n_products, started = 0, clock()
    while clock() - started < _PRODUCT_SECONDS:
        # Read, so that a GPU has made it.
        (matrix @ matrix)[0, 0].item()
        n_products += 1
    per_core = 2.0 * n_products * _PRODUCT**3 / (clock() - started)
    return _OF_PRODUCTS * n_cores * per_core


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

    def way(changes: list[Change]) -> Way:
        return _first_way(_changed(step, changes), devices)

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
        if way(others).is_enough:
            chosen = others
    best = way(chosen)
    words: list[str] = []
    for change in chosen:
        words += change.overrides
    words += best.overrides
    # a later override takes the place of an earlier one of the same key
    overrides = {text.partition("=")[0]: text for text in words}
    return replace(best, overrides=tuple(overrides.values())), chosen


def _first_way(step: Step, devices: Devices) -> Way:
    """Return the first of `WAYS` that fits, "none" without any."""
    memories = []
    for name, kind in WAYS.items():
        if not _is_possible(name, devices, step):
            continue
        changed, overrides = _divisible(step, name)
        shapes = read_shapes(changed)
        group = devices.count
        if name == "HSDP":
            group //= devices.nodes  # each machine has a copy of its own
        memories.append(estimate(changed, shapes, name, group))
        if devices.fits(memories[-1].peak):
            sent = _sent_bytes(name, changed, shapes, devices)
            return Way(name, kind.why, memories[-1], _launch(name, devices), overrides, sent)
    why = "a step does not fit, and processes on a CPU divide nothing"
    if devices.kind == "cuda":
        layer = read_shapes(step).layer
        why = "the activations of a device's own rows do not fit: take smaller or shorter rows"
        # two layers are whole at a time, and the gradients of one, twice
        if not devices.fits(4 * layer):
            why = (
                f"the largest layer ({render_size(layer)}) does not fit, since FSDP gathers it "
                "whole with the next one. Tensor parallelism "
                "(recipes/distributed/fsdp2-split.yaml) or a larger device is needed"
            )
    return Way("none", why, min(memories, key=attrgetter("peak")))


def _is_possible(way: str, devices: Devices, step: Step) -> bool:
    """Return whether a way of `WAYS` is one for these devices and this step."""
    if way == "one device":
        return devices.count == 1
    if way == "DDP":
        return devices.count > 1
    if way == "ZeRO-2":
        return devices.are_gpus and step.adapter is None
    if way == "FSDP":
        return devices.are_gpus
    if way == "HSDP":
        # With one device a machine nothing is divided within it.
        return devices.are_gpus and 1 < devices.nodes < devices.count
    return devices.kind == "cuda"


def _sent_bytes(way: str, step: Step, shapes: Shapes, devices: Devices) -> int:
    """Return the bytes that each device sends in an optimizer step, over a ring; with HSDP those
    that each machine sends to others."""
    count, nodes = devices.count, devices.nodes
    trained, weights, times = shapes.trained, shapes.weights, step.accumulation
    if way == "one device":
        return 0
    if way == "offload":  # to the machine's memory, whatever the number of devices
        return int(times * (2 * weights + trained) / count)
    ring = (count - 1) / count
    if way == "DDP":
        return int(ring * 2 * trained)
    if way == "HSDP":
        # The gradients of each micro-batch: its devices send a part each.
        return int((nodes - 1) / nodes * times * 2 * trained)
    # what is gathered is sent in autocast's dtype, half of float32
    halved = 1
    if step.dtype == torch.float32 and step.mixed is not None:
        halved = 2
    if way == "ZeRO-2":
        # The gradients of each micro-batch, and the weights once.
        return int(ring * ((times + 1) * trained / halved))
    # In each micro-batch the weights forwards and backwards, and the gradients.
    return int(ring * (times * (2 * weights / halved + trained)))


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
        if step.checkpointing:
            words.append("trainer.gradient_checkpointing=false")
        if step.accumulation > 1:
            words.append(_SYNC)
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
        more = (
            f" --num_machines {devices.nodes} --machine_rank 0 --main_process_ip ADDRESS "
            "--main_process_port 29500"
        )
    if way == "HSDP":
        more += (
            f" --parallelism_config_dp_replicate_size {devices.nodes}"
            f" --parallelism_config_dp_shard_size {devices.count // devices.nodes}"
        )
    return _LAUNCH.format("ddp-cpu" if devices.kind == "cpu" else config, devices.count, more)


def _changed(step: Step, candidates: list[Change]) -> Step:
    fields: dict[str, Any] = {}
    for change in candidates:
        fields |= change.fields
    return replace(step, **fields)


def _possible_changes(step: Step, devices: Devices) -> Iterator[Change]:
    """Yield the possible changes, from the cheapest to the most expensive."""
    words: tuple[str, ...]
    # Divisors alone: 5 rows as 3 times 2 would be an update of 6.
    for batch in range(step.batch // 2, 0, -1):
        if step.batch % batch:
            continue
        more = step.batch * step.accumulation // batch
        words = (
            f"trainer.per_device_train_batch_size={batch}",
            f"trainer.gradient_accumulation_steps={more}",
        )
        yield Change(
            words, "the same update, a little slower", {"batch": batch, "accumulation": more}
        )
    is_full = step.adapter is None and not step.freeze
    off = tuple(override for field, override in _EXCLUDED.items() if getattr(step, field))
    # Adafactor keeps a row and a column of each matrix, SGD nothing: 8 bits would save no state
    # there.
    if is_full and "8bit" not in step.optim and step.optim not in ("adafactor", "sgd"):
        words = ("trainer.optim=adamw_8bit",)
        if step.muon:  # it is for adamw_torch only
            words += (_EXCLUDED["muon"],)
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
        cost = (
            "weights in bfloat16, each update rounded up or down at random, so that small ones "
            "count"
        )
        words = ("model.dtype=bfloat16", "techniques.stochastic_rounding=true", *off)
        fields = {"dtype": torch.bfloat16, "rounding": True, "projected": False, "muon": False}
        yield Change(words, cost, fields)
    yield from _changes_of_base(step, is_full=is_full)


def _changes_of_base(step: Step, *, is_full: bool) -> Iterator[Change]:
    """Yield the changes after which only an adapter trains, so that the base needs no float32."""
    half = step.mixed or torch.bfloat16
    lora: dict[str, Any] = {"dtype": half, "rounding": False}
    words: tuple[str, ...] = (f"model.dtype={str(half).removeprefix('torch.')}",)
    has_wide_base = step.dtype == torch.float32 and step.quantization == "none"
    if step.adapter is not None and has_wide_base:
        cost = "base weights, which do not train, in 16 bits"
        yield Change(words, cost, {"dtype": half})
    if step.rounding:
        words += ("techniques.stochastic_rounding=false",)
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
    n = devices.count
    if n == 1:
        return []
    higher, rule = rate * math.sqrt(n), "square-root rule for Adam and its kin"
    if "sgd" in step.optim:
        higher, rule = rate * n, "linear rule for SGD"
    return [f"{n} times the rows of one device: try trainer.learning_rate={higher:.3g} ({rule})"]


def describe_traffic(way: Way, flops: float, devices: Devices) -> list[str]:
    """Return lines on the bytes that a step sends and, if the link's speed is known, how long that
    takes."""
    if not way.sent:
        return []
    if way.name == "offload":
        return [
            f"{render_size(way.sent)} go between each device and the machine's memory in a step"
        ]
    sender = "machine" if devices.nodes > 1 else "device"
    line = f"{render_size(way.sent)} are sent by each {sender} in a step"
    if devices.link is None:
        return [f"{line} (--link GBPS for the time that takes)"]
    seconds, busy = way.sent / devices.link, flops / devices.flops
    lines = [
        f"{line}: {format_number(seconds)} s at {devices.link / 1e9:g} GB/s, beside "
        f"{format_number(busy)} s of arithmetic"
    ]
    if devices.kind == "cuda" and seconds > busy:
        lines.append(
            "The link is slower than the GPUs: accumulate more with DDP, less with FSDP; LoRA "
            "sends least."
        )
    return lines


def quoted(override: str) -> str:
    """Return an override as a shell needs it."""
    if set(override) & set("{}[]*? "):
        return f"'{override}'"
    return override


def render_size(n_bytes: float) -> str:
    """Return bytes as text: ``3.2 GiB``, ``120 MiB``."""
    for unit, smallest in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= smallest:
            return f"{n_bytes / smallest:.1f} {unit}"
    digits = 1 if n_bytes < 10 * 2**20 else 0
    return f"{n_bytes / 2**20:.{digits}f} MiB"


_UNITS = {"": 2**30, "g": 2**30, "m": 2**20, "t": 2**40}


def parse_memory(size: str | int) -> int:
    """Return the bytes of ``24GiB``, ``24GB`` or ``24G`` (GB is read as GiB, as GPUs are sold); a
    number counts bytes. Raises `InputError`."""
    match, n_bytes = None, 0
    if isinstance(size, int):
        n_bytes = size
    else:
        match = re.fullmatch(r"\s*([\d.]+)\s*([gmt]?)(?:i?b)?\s*", size.lower())
    if match:
        with contextlib.suppress(ValueError, OverflowError):  # of 1.2.3, and of 400 digits
            n_bytes = int(float(match[1]) * _UNITS[match[2]])
    if n_bytes <= 0:
        raise InputError(
            f"--memory: found {size!r}, expected a size such as 24GiB or 512MiB, more than 0."
        )
    return n_bytes
