"""The devices of a run, the ways to spread a step over them, and the changes of a recipe that make a step fit.

Of the ways that fit, the one that sends least is taken: the table `WAYS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.estimate import Memory, Shapes, Step, estimate, is_bitsandbytes, read_shapes
from kinject.process import machine_memory, peak_memory, resident_memory

GIB = 2**30
_UTILIZATION = 0.4
"""Fraction of a data sheet's operations that a step reaches (an assumption)."""
_UNKNOWN_GPU = 1e14
_GPU_CONTEXT, _GPU_FRAGMENTATION = int(0.6 * GIB), 0.05
"""Memory of CUDA before a tensor is made, and the fraction of the peak in unused blocks (assumptions)."""
CPU_WORKING = 60 * 2**20
"""Memory of a run on a CPU beyond its tensors, the holes in its heap and the libraries (docs/figures.md)."""
_LORA = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
GPUS = {
    "H200": (139.7, 989e12), "H100": (79.1, 989e12), "A100": (79.1, 312e12), "A100-40GB": (39.4, 312e12),
    "L40S": (44.4, 362e12), "L4": (22.0, 121e12), "4090": (23.5, 165e12), "T4": (14.6, 65e12),
}  # fmt: skip
"""Card -> the GiB that torch reports, and dense operations a second in bfloat16 (T4: float16) by NVIDIA's data sheet."""
WAYS = {
    "one device": ("", "a whole step fits, and there is one device"),
    "DDP": ("ddp", "a whole step fits on each device; only gradients are sent"),
    "ZeRO-2": ("zero2", "a step fits once gradients and the optimizer's state are divided; the weights stay whole, in bfloat16"),
    "HSDP": ("hsdp", "weights, gradients and state have to be divided, and fit within a machine; gradients go between machines"),
    "FSDP": ("fsdp2", "weights, gradients and state have to be divided; each layer is gathered when it is needed"),
    "offload": ("fsdp2-offload", "all but one layer at a time is in the machine's memory: several times slower"),
}  # fmt: skip
"""Name -> its configuration in recipes/distributed and when it is the choice, from the one that sends least on."""
_LAUNCH = "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes {}{} -m kinject.cli train RECIPE"
_SYNC = "trainer.accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}"
_EXCLUDED = {"projected": "regularization.projection=null", "muon": "techniques.muon=null"}
"""Field of `Step` -> the override that switches it off: some ways to train cannot have it."""


@dataclass(frozen=True)
class Devices:
    """`count` devices of `memory` bytes in `nodes` machines; `here`: this machine's. `reserved` bytes are used before training.

    `link` is the speed of the slowest link between them in bytes a second (None: not known), `flops` the operations a second
    of a device, `has_bf16` whether it multiplies bfloat16.
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

    def need(self, peak: int) -> int:
        """Return the bytes of a device for a step with a `peak` of tensors."""
        return int(peak * (1 + (_GPU_FRAGMENTATION if self.kind == "cuda" else 0.0))) + self.reserved

    def fits(self, peak: int) -> bool:
        """Return whether such a step fits."""
        return self.need(peak) <= self.memory


@dataclass(frozen=True)
class Way:
    """How to spread a step: its name in `WAYS`, why, a device's memory, the launch ("" if none), and the overrides it needs.

    `sent` are the bytes that a device sends in an optimizer step.
    """

    name: str
    why: str
    memory: Memory
    launch: str = ""
    overrides: tuple[str, ...] = ()
    sent: int = 0

    @property
    def command(self) -> str:
        """The command line, with RECIPE for the recipe; "" without any."""
        return " ".join((self.launch, *map(quoted, self.overrides))) if self.launch else ""


@dataclass(frozen=True, eq=False)
class Change:
    """A change of the recipe that saves memory: its overrides, its cost, the `fields` of the step, the peak once it is made."""

    overrides: tuple[str, ...]
    cost: str
    fields: dict[str, Any]
    peak: int = 0


def find_devices(
    kind: str, memory: int | None, per_node: int | None, nodes: int | None = None, link: float | None = None,
    gpu: str | None = None,
) -> Devices:  # fmt: skip
    """Return `per_node` devices of `kind` in each of `nodes` machines, with `memory` bytes each; None for this machine's.

    `gpu` is a name in `GPUS`. Processes on a CPU divide the machine's memory. Raises `InputError` if the memory is neither
    given nor known.
    """
    n_nodes = nodes or 1
    if kind != "cuda":
        n, name = per_node or 1, "Apple GPU" if kind == "mps" else "CPU"
        is_here = memory is None and n_nodes == 1
        of_each = memory or machine_memory() // n
        return Devices(kind, name, n * n_nodes, of_each, is_here, program_bytes() + CPU_WORKING, n_nodes, link)
    if gpu is not None and gpu.upper() not in GPUS:
        raise InputError(f"--gpu: found {gpu!r}, allowed: {', '.join(GPUS)}. For another card: --memory 24GiB.")
    name, is_here, known, count = (gpu or "").upper(), False, 0, per_node or 1
    if gpu is None and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        name, known, count = here.name, here.total_memory, per_node or torch.cuda.device_count()
        is_here = memory is None and n_nodes == 1 and count == torch.cuda.device_count()
    card = name if name in GPUS else next((each for each in GPUS if each in name.replace("-", " ").split()), "")
    size = memory or known or int(GPUS[card][0] * GIB if card else 0)
    if not size:
        raise InputError("this machine has no NVIDIA GPU. Name one: --gpu H100; or its memory: --memory 24GiB.")
    flops = _UTILIZATION * GPUS[card][1] if card else _UNKNOWN_GPU
    name = name or "GPU as given"
    return Devices("cuda", name, count * n_nodes, size, is_here, _GPU_CONTEXT, n_nodes, link, flops, card != "T4")


def program_bytes() -> int:
    """Return the memory of Python with the libraries of training: this process, once they are imported."""
    import peft  # noqa: F401
    import trl  # noqa: F401

    return resident_memory() or peak_memory()


def choose(step: Step, devices: Devices) -> tuple[Way, list[Change]]:
    """Return the way to run `step`, and the changes of the recipe that it needs first: the cheapest that are enough.

    If all together are not enough, the way is offload or "none", as the step is.
    """
    planner = _Planner(devices)
    way = planner.way(step)
    if way.name not in ("offload", "none"):
        return way, []
    chosen: list[Change] = []
    for candidate in _possible_changes(step, devices):
        chosen.append(candidate)
        if planner.fits(_changed(step, chosen)):
            break
    if not planner.fits(_changed(step, chosen)):
        return way, planner.changes(step, chosen)
    for candidate in chosen[-2::-1]:  # the most expensive that is not needed goes first
        others = [other for other in chosen if other is not candidate]
        if planner.fits(_changed(step, others)):
            chosen = others
    way = planner.way(_changed(step, chosen))
    words = (text for candidate in chosen for text in candidate.overrides)
    return replace(way, overrides=_merged((*words, *way.overrides))), planner.changes(step, chosen)


def _merged(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return `overrides` with a later one in the place of an earlier one of the same key."""
    return tuple({text.partition("=")[0]: text for text in overrides}.values())


class _Planner:
    """Estimates steps on `devices`; the shapes of a model are read once for each kind of weights and state."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._shapes: dict[str, Shapes] = {}

    def shapes(self, step: Step) -> Shapes:
        """Return `read_shapes` of the step."""
        fields = (step.dtype, step.optim, step.optim_args, step.adapter, step.quantization, step.muon, step.rounding)
        key = repr((*fields, step.projected))
        if key not in self._shapes:
            self._shapes[key] = read_shapes(step)
        return self._shapes[key]

    def ways(self, step: Step) -> Iterator[Way]:
        """Yield every way that could run the step, whether it fits or not."""
        devices = self.devices
        n, on_gpu = devices.count, devices.kind == "cuda"
        allowed = {
            "one device": n == 1, "DDP": n > 1, "ZeRO-2": on_gpu and n > 1 and step.adapter is None,
            "HSDP": on_gpu and n > devices.nodes > 1, "FSDP": on_gpu and n > 1, "offload": on_gpu,
        }  # fmt: skip
        for name in (name for name, is_allowed in allowed.items() if is_allowed):
            changed, overrides = _divisible(step, name)
            shapes = self.shapes(changed)
            memory = estimate(changed, shapes, name, n // devices.nodes if name == "HSDP" else n)
            sent = _sent(name, changed, shapes, devices)
            yield Way(name, WAYS[name][1], memory, _launch(name, devices), overrides, sent)

    def way(self, step: Step) -> Way:
        """Return the first way that fits, "none" without any."""
        ways = list(self.ways(step))
        fitting = (way for way in ways if self.devices.fits(way.memory.peak))
        layer = 4 * self.shapes(step).layer
        why = "a step does not fit, and processes on a CPU divide nothing"
        if self.devices.kind == "cuda":
            why = "the activations of a device's own rows do not fit: take smaller or shorter rows"
            if not self.devices.fits(layer):
                why = (
                    f"the largest layer ({render_size(layer // 4)}) does not fit, since FSDP gathers it whole with the next "
                    "one. Tensor parallelism (recipes/distributed/fsdp2-split.yaml) or a larger device is needed"
                )
        return next(fitting, Way("none", why, min((way.memory for way in ways), key=lambda memory: memory.peak)))

    def least_peak(self, step: Step) -> int:
        """Return the fewest bytes of a device without offloading."""
        return min((way.memory.peak for way in self.ways(step) if way.name != "offload"), default=2**62)

    def fits(self, step: Step) -> bool:
        """Return whether the step fits without offloading."""
        return self.devices.fits(self.least_peak(step))

    def changes(self, step: Step, chosen: list[Change]) -> list[Change]:
        """Return the chosen candidates with the peak after each."""
        peaks = [self.least_peak(_changed(step, chosen[: n + 1])) for n in range(len(chosen))]
        return [replace(change, peak=peak) for change, peak in zip(chosen, peaks, strict=True)]


def _divisible(step: Step, way: str) -> tuple[Step, tuple[str, ...]]:
    """Return the step as `way` runs it, and the overrides of the recipe that this needs.

    What is divided holds no state of bitsandbytes, and no technique that needs whole weights. accelerate shards what is
    offloaded or quantised: it checkpoints activations itself, and needs sync_each_batch to divide gradients.
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


def _sent(way: str, step: Step, shapes: Shapes, devices: Devices) -> int:
    """Return the bytes that a device sends in an optimizer step, over a ring: all but its own part."""
    n, times = devices.count, step.accumulation
    halved = 2 if step.dtype == torch.float32 and step.mixed is not None else 1  # autocast's dtype is sent
    others = (n - 1) / n
    sent = {
        "DDP": 2 * others * shapes.trained,
        "ZeRO-2": others * (times + 1) * shapes.trained / halved,
        "FSDP": others * times * (2 * shapes.weights / halved + shapes.trained),
        "HSDP": 2 * (devices.nodes - 1) / devices.nodes * times * shapes.trained,
        "offload": times * (2 * shapes.weights + shapes.trained) / n,
    }
    return int(sent.get(way, 0))


def _launch(way: str, devices: Devices) -> str:
    """Return the command without overrides; on several machines that of the first, with ADDRESS for its address."""
    config = WAYS[way][0]
    if not config:
        return "kinject train RECIPE"
    more = ""
    if devices.nodes > 1:
        more = f" --num_machines {devices.nodes} --machine_rank 0 --main_process_ip ADDRESS --main_process_port 29500"
    if way == "HSDP":
        per_node = devices.count // devices.nodes
        more += f" --parallelism_config_dp_replicate_size {devices.nodes} --parallelism_config_dp_shard_size {per_node}"
    return _LAUNCH.format("ddp-cpu" if devices.kind == "cpu" else config, devices.count, more)


def _changed(step: Step, candidates: list[Change]) -> Step:
    return replace(step, **{name: value for item in candidates for name, value in item.fields.items()})


def _possible_changes(step: Step, devices: Devices) -> Iterator[Change]:
    """Yield the possible changes, from the cheapest to the most expensive."""
    words: tuple[str, ...]
    batch = step.batch
    while batch > 1:
        batch //= 2
        more = -(-step.batch * step.accumulation // batch)
        words = (f"trainer.per_device_train_batch_size={batch}", f"trainer.gradient_accumulation_steps={more}")
        yield Change(words, "the same update, a little slower", {"batch": batch, "accumulation": more})
    is_full = step.adapter is None and not step.freeze
    off = tuple(override for field, override in _EXCLUDED.items() if getattr(step, field))
    if is_full and "8bit" not in step.optim and step.optim not in ("adafactor", "sgd"):
        words = ("trainer.optim=adamw_8bit", *((_EXCLUDED["muon"],) if step.muon else ()))
        cost = "the optimizer's state in 8 bits: nearly the same updates"
        yield Change(words, cost, {"optim": "adamw_8bit", "muon": False})
    if not step.checkpointing:
        cost = "the same update, about a third more time"
        yield Change(("trainer.gradient_checkpointing=true",), cost, {"checkpointing": True})
    if is_full and devices.count == 1 and step.mixed == torch.bfloat16 and step.dtype == torch.float32:
        cost = "weights in bfloat16, each update rounded up or down at random, so that small ones count"
        words = ("model.dtype=bfloat16", "techniques.stochastic_rounding=true", *off)
        fields = {"dtype": torch.bfloat16, "rounding": True, "projected": False, "muon": False}
        yield Change(words, cost, fields)
    if step.device == "cuda" and not step.offloading:
        cost = "the same update, slower by the transfer to the machine's memory and back"
        yield Change(("trainer.activation_offloading=true",), cost, {"offloading": True})
    half = step.mixed or torch.bfloat16
    lora: dict[str, Any] = {"dtype": half, "rounding": False}
    words = (f"model.dtype={str(half).removeprefix('torch.')}",)
    words += ("techniques.stochastic_rounding=false",) if step.rounding else ()
    if is_full:
        lora["adapter"] = _LORA
        words = ("adapter={r: 64, lora_alpha: 128, target_modules: all-linear}", *words)
        yield Change(words, "LoRA: learns fewer new facts than all weights do (kinject eval measures it)", lora)
    if step.quantization == "none" and not step.freeze:
        cost = "QLoRA: base weights in 4 bits; slower products, a little less accurate"
        yield Change((*words, "model.quantization=4bit"), cost, {**lora, "quantization": "4bit"})
    if step.block > 512:
        cost = "longer documents are cut in two"
        yield Change((f"trainer.max_length={step.block // 2}",), cost, {"block": step.block // 2})


def describe_batch(step: Step, devices: Devices, rate: float) -> list[str]:
    """Return a line with the learning rate for the larger batch of several devices.

    It is linear for SGD (arXiv 1706.02677), the square root for Adam and its kin (arXiv 2205.10287).
    """
    n, is_sgd = devices.count, "sgd" in step.optim
    higher = rate * (n if is_sgd else math.sqrt(n))
    rule = "linear rule for SGD" if is_sgd else "square-root rule for Adam and its kin"
    return [f"{n} times the rows of one device: try trainer.learning_rate={higher:.3g} ({rule})"] if n > 1 else []


def describe_traffic(way: Way, flops: float, devices: Devices) -> list[str]:
    """Return lines on the bytes that a step sends and, if the link's speed is known, how long that takes."""
    if not way.sent:
        return []
    if way.name == "offload":
        return [f"{render_size(way.sent)} go between each device and the machine's memory in a step"]
    line = f"{render_size(way.sent)} are sent by each {'machine' if devices.nodes > 1 else 'device'} in a step"
    if devices.link is None:
        return [f"{line} (--link GBPS for the time that takes)"]
    seconds, busy = way.sent / devices.link, flops / devices.flops
    lines = [f"{line}: {seconds:.3g} s at {devices.link / 1e9:g} GB/s, beside {busy:.3g} s of arithmetic"]
    if devices.kind == "cuda" and seconds > busy:
        lines.append("The link is slower than the GPUs: accumulate more with DDP, less with FSDP; LoRA sends least.")
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
    """Return the bytes of ``24GiB``, ``24GB`` or ``24G`` (GB is read as GiB, as GPUs are sold). Raises `InputError`."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([gmt]?)(?:i?b)?\s*", text.lower())
    try:
        n_bytes = int(float(match[1]) * {"": 2**30, "g": 2**30, "m": 2**20, "t": 2**40}[match[2]]) if match else 0
    except ValueError:
        n_bytes = 0
    if n_bytes <= 0:
        raise InputError(f"--memory: found {text!r}, expected a size such as 24GiB or 512MiB, more than 0.")
    return n_bytes
