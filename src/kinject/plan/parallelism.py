"""How to spread a step over devices and machines: of the parallelisms that fit, the one that sends least, and its command."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.devices import EXCLUDABLE, Change, Devices, cheapest_changes, render_size
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import StepConfig, tensor_parallel_fault
from kinject.process import machine_memory

_LAUNCH = "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes {}{} -m kinject.cli train RECIPE"
_SYNC = "trainer.accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}"
_PARTS = "weights, gradients and the optimizer's state"
_BUCKET = 2 * 500_000_000
"""Bytes of the gradients that DeepSpeed collects in bfloat16 before it sends them (its own default)."""


@dataclass(frozen=True)
class Parallelism:
    """How to spread the run over the devices, why, the peak of one device, and the command to launch ("" if there is none).

    `overrides` are those of the recipe that the command needs. `sent` are the bytes that go through the slowest link
    (`Devices.link`) in an optimizer step. `notes` are further lines. `sharing` devices read the same rows.
    """

    name: str
    reason: str
    peak: int
    launch: str
    sent: int = 0
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sharing: int = 1

    @property
    def command(self) -> str:
        """The complete command line, with RECIPE for the recipe."""
        return " ".join((self.launch, *map(quoted, self.overrides))) if self.launch else ""

    @property
    def is_last_resort(self) -> bool:
        """Whether the run is several times slower this way, or impossible: changes of the recipe come first."""
        return self.name in ("offload", "none")


def quoted(override: str) -> str:
    """Return an override as a shell needs it."""
    return f"'{override}'" if set(override) & set("{}[]*? ") else override


def with_changes(parallelism: Parallelism, changes: Iterable[str]) -> Parallelism:
    """Return `parallelism` with the overrides `changes` in its command; its own come last, and a later one counts."""
    if not parallelism.launch:
        return parallelism
    merged = {text.partition("=")[0]: text for text in (*changes, *parallelism.overrides)}
    return replace(parallelism, overrides=tuple(merged.values()))


def choose_way(step: StepConfig, memory: Memory, devices: Devices) -> tuple[Parallelism, list[Change], bool]:
    """Return how to run `step`, the changes of the recipe that this needs, and whether they are enough."""
    way = choose_parallelism(step, memory, devices)
    if not way.is_last_resort:
        return way, [], True
    changes, changed = cheapest_changes(step, devices, lambda step: least_peak(step, devices))
    if changed is None:
        return way, changes, False
    way = choose_parallelism(changed, simulate(changed), devices)
    return with_changes(way, (text for change in changes for text in change.overrides)), changes, True


def choose_parallelism(step: StepConfig, memory: Memory, devices: Devices) -> Parallelism:
    """Return how to run `step`, whose memory on one device is `memory`, on `devices`."""
    if step.context * step.tensor > 1:
        changes, plain = _shardable(step)
        return with_changes(_split(plain, devices), changes)
    fits = devices.fits(memory.peak)
    if devices.count == 1 and fits:
        why = "a whole step fits, and there is one device"
        return Parallelism("one device", why, memory.peak, "kinject train RECIPE")
    if devices.count > 1 and not step.in_backward and (ddp := _ddp(memory, devices)) is not None:
        return ddp
    if devices.kind != "cuda":
        why = "a step does not fit on the one device"
        if devices.count > 1:
            why = "processes on a CPU can only run DDP, each with a whole step, which does not fit"
        return Parallelism("none", why, memory.peak, "")
    changes, plain = _shardable(step)
    return with_changes(_sharded(plain, simulate(plain) if changes else memory, devices), changes)


def least_peak(step: StepConfig, devices: Devices) -> int:
    """Return the fewest bytes that a device needs for `step`: whole on one device or a CPU, else sharded over all."""
    if devices.count == 1 or devices.kind != "cuda":
        memory = simulate(step)
        return memory.peak + (memory.trained_bytes if devices.count > 1 else 0)
    _, plain = _shardable(step)
    return _fsdp_peak(plain, _fsdp_step(plain, None), devices.count // plain.tensor)


def share_rows(step: StepConfig, devices: Devices, context: int | None, tensor: int | None) -> StepConfig:
    """Return `step` with each row split between `context` devices (--cp), or each layer between `tensor` (--tp).

    Raises `InputError` if the devices or the model do not allow it.
    """
    context, tensor = context or 1, tensor or 1
    for option, n in (("--cp", context), ("--tp", tensor)):
        if n > 1 and (devices.kind != "cuda" or devices.per_node % n):
            found = f"{devices.per_node} {'GPUs' if devices.kind == 'cuda' else devices.kind.upper()}"
            raise InputError(f"{option}: found {n}, allowed: a divisor of the GPUs of a machine ({found}; --devices).")
    if min(context, tensor) > 1:
        raise InputError("--cp and --tp: give one of them. Both at once are not planned.")
    if tensor > 1:
        fault = "an adapter is not split" if step.adapter is not None else tensor_parallel_fault(step.model, tensor)
        if fault:
            raise InputError(f"--tp: {fault}. Remove the option.")
        return replace(step, tensor=tensor)
    return step if context == 1 else replace(step, context=context, attention="sdpa", masked=False)


def _shardable(step: StepConfig) -> tuple[tuple[str, ...], StepConfig]:
    """Return the overrides that remove keys which need whole weights on each device, and the step with them."""
    overrides: tuple[str, ...] = ()
    if step.rounding:
        overrides += ("techniques.stochastic_rounding=false", "model.dtype=float32")
        step = replace(step, rounding=False, dtype=torch.float32)
    if step.in_backward:
        overrides += ("techniques.optimizer_in_backward=false",)
        step = replace(step, in_backward=False)
    off: dict[str, Any] = {name: False for name in EXCLUDABLE if getattr(step, name)}
    overrides += tuple(EXCLUDABLE[name][0] for name in off)
    step = replace(step, **off)
    if step.loss_tile is not None:
        overrides += ("techniques.loss_tile=null",)
        step = replace(step, loss_tile=None)
    return overrides, step


def _ddp(memory: Memory, devices: Devices) -> Parallelism | None:
    peak = memory.peak + memory.trained_bytes  # DDP's copy of the gradients, in buckets
    if not devices.fits(peak):
        return None
    why = f"a whole step fits on each of the {devices.count}; only gradients are sent"
    on_gpu = devices.kind == "cuda"
    launch, overrides = (_launch("ddp", devices), ()) if on_gpu else (
        _launch("ddp-cpu", devices), ("trainer.use_cpu=true",))  # fmt: skip
    return Parallelism("DDP", why, peak, launch, int(2 * _others(devices.count) * memory.trained_bytes), overrides)


def _sharded(step: StepConfig, memory: Memory, devices: Devices) -> Parallelism:
    """Return the first of ZeRO-2, HSDP, FSDP and offload that fits; "none" without any."""
    n = devices.count
    if n > 1 and step.adapter is None and devices.fits(zero2 := _zero2_peak(step, memory, n)):
        why = "a step fits once gradients and the optimizer's state are sharded; the weights stay whole, in bfloat16"
        sent = int(_others(n) * (step.accumulation + 1) * _half(step, memory.trained_bytes))
        return Parallelism("ZeRO-2", why, zero2, _launch("zero2", devices), sent)
    sharded = _fsdp_step(step, memory)
    overrides = _fsdp_overrides(step, by_accelerate=step.quantization != "none")
    for group in dict.fromkeys((devices.per_node, n)):  # within a machine, then over all
        peak = _fsdp_peak(step, sharded, group)
        if group > 1 and devices.fits(peak):
            return _fsdp(step, sharded, devices, group, overrides)
    return _offload(step, sharded, devices, _fsdp_overrides(step, by_accelerate=True))


def _zero2_peak(step: StepConfig, memory: Memory, n: int) -> int:
    """Return the peak of a device under ZeRO-2 over `n`, before or during the update.

    With autocast DeepSpeed casts the weights to its dtype and keeps them whole, so that autocast copies none. Each device
    has its part of the gradients, of float32 weights, of the optimizer's state, and in the update of float32 gradients.
    """
    states, copies = memory.optimizer + memory.paged, 0
    if step.mixed is not None:
        memory = simulate(replace(step, dtype=step.mixed, mixed=None, accumulation=1))
        copies = 4 * memory.n_trained // n
    n_bytes = memory.weights + (states + memory.trained_bytes) // n + copies
    return n_bytes + max(memory.activations + memory.logits + _BUCKET, copies)


def _half(step: StepConfig, n_bytes: int) -> int:
    """Return the bytes of tensors of the weights' type in the type that is sent: bfloat16 under autocast."""
    return n_bytes // 2 if step.dtype == torch.float32 and step.mixed is not None else n_bytes


def _fsdp_overrides(step: StepConfig, *, by_accelerate: bool) -> tuple[str, ...]:
    """Return the overrides that a recipe needs under FSDP2, which cannot shard the state of bitsandbytes' optimizers.

    transformers shards weights that are neither quantised nor offloaded (`kinject.models.sharded`). accelerate shards the
    others: it checkpoints activations itself, and without sync_each_batch each device keeps whole gradients while they are
    accumulated.
    """
    overrides: tuple[str, ...] = ("trainer.optim=adamw_torch_fused",) if _is_bitsandbytes_state(step.optim) else ()
    if not by_accelerate:
        return overrides + (() if step.checkpointing else ("trainer.gradient_checkpointing=true",))
    if step.checkpointing:
        overrides += ("trainer.gradient_checkpointing=false",)
    return (*overrides, _SYNC) if step.accumulation > 1 else overrides


def _is_bitsandbytes_state(optim: str) -> bool:
    return any(part in optim for part in ("8bit", "bnb", "paged")) and "torch" not in optim


def _fsdp_step(step: StepConfig, memory: Memory | None) -> Memory:
    """Return the memory of a step as FSDP2 runs it: with torch's AdamW and checkpointed activations.

    FSDP2 gathers weights in autocast's dtype, so that autocast keeps no copies. `memory` is that of the unchanged step, if it
    is known.
    """
    half = step.mixed if step.adapter is None and step.mixed is not None else step.dtype
    changed = replace(step, checkpointing=True, dtype=half, mixed=step.mixed if step.adapter is not None else None)
    if _is_bitsandbytes_state(step.optim):
        changed = replace(changed, optim="adamw_torch_fused", optim_args=None)
    if memory is not None and changed == step:
        return memory
    whole = simulate(changed)
    wider = whole.n_trained * step.dtype.itemsize - whole.trained_bytes if step.adapter is None else 0
    ratio = 1 + wider / whole.trained_bytes  # the shards keep the dtype of the weights
    return replace(
        whole, weights=whole.weights + wider, gradients=whole.trained_bytes + wider, optimizer=int(ratio * whole.optimizer),
        trained_bytes=whole.trained_bytes + wider,
    )  # fmt: skip


def _fsdp_peak(step: StepConfig, memory: Memory, group: int) -> int:
    """Return the peak of a device if weights, gradients and state are sharded over `group` devices.

    Two layers are whole at a time: one computes, the next arrives. If they train, so are the gradients of one, and a copy
    of these to be sent.
    """
    sharded = (memory.weights + memory.gradients + memory.optimizer) // group
    return sharded + memory.activations + memory.logits + _whole_layers(step, memory)


def _whole_layers(step: StepConfig, memory: Memory) -> int:
    return (2 if step.adapter is not None else 4) * memory.largest_block


def _fsdp(step: StepConfig, memory: Memory, devices: Devices, group: int, overrides: tuple[str, ...]) -> Parallelism:
    """Return FSDP over `group` devices: all, or those of each machine with replicas between machines (HSDP)."""
    peak = _fsdp_peak(step, memory, group)
    each_batch = (
        2 * _half(step, memory.weights) + memory.trained_bytes
    )  # gathered forwards and backwards, then scattered
    if group < devices.count:
        why = (
            f"{_PARTS} have to be sharded, and fit within a machine; only gradients are sent between the {devices.nodes} "
            "machines"
        )
        sent = int(2 * _others(devices.nodes) * step.accumulation * memory.trained_bytes)
        sizes = f" --parallelism_config_dp_replicate_size {devices.nodes} --parallelism_config_dp_shard_size {group}"
        return Parallelism("HSDP", why, peak, _launch("hsdp", devices, sizes), sent, overrides)
    why = f"{_PARTS} have to be sharded; each layer is gathered when it is needed"
    sent = int(_others(group) * step.accumulation * each_batch)
    return Parallelism("FSDP (ZeRO-3)", why, peak, _launch("fsdp2", devices), sent, overrides)


def _offload(step: StepConfig, memory: Memory, devices: Devices, overrides: tuple[str, ...]) -> Parallelism:
    """Return FSDP with weights, gradients and state in the machine's memory, or the reason why nothing fits."""
    on_gpu, layer = memory.activations + memory.logits, _whole_layers(step, memory)
    if devices.fits(on_gpu + layer):
        host = (memory.weights + memory.gradients + memory.optimizer) // devices.nodes
        why = (
            f"{_PARTS} ({render_size(host)}) are in the machine's memory and one layer at a time on the GPU: several times "
            "slower"
        )
        notes: tuple[str, ...] = ()
        if devices.here and host > machine_memory():
            notes = (
                f"This machine has {render_size(machine_memory())} of memory. recipes/distributed/zero3-offload.yaml can "
                "use a disk instead (offload_param_device: nvme).",
            )
        sent = (2 * memory.weights + memory.trained_bytes) * step.accumulation // devices.count
        launch = _launch("fsdp2-offload", devices)
        return Parallelism("offload", why, on_gpu + layer, launch, sent, overrides, notes)
    if not devices.fits(layer):
        why = (
            f"the largest layer ({render_size(memory.largest_block)}) does not fit, since FSDP and ZeRO gather it whole with "
            "the next one. Between several devices tensor parallelism splits a layer (--tp 2 plans it): use that, weights in "
            "bfloat16 or 4 bits, or a larger device"
        )
        return Parallelism("none", why, on_gpu + layer, "")
    why = (
        "the activations of a device's own rows do not fit even with all else in the machine's memory: take smaller or "
        "shorter rows"
    )
    return Parallelism("none", why, on_gpu + layer, "")


def _split(step: StepConfig, devices: Devices) -> Parallelism:
    """Return FSDP over all devices, of which some read a row together or have a part of every layer each."""
    n, by_rows = step.context * step.tensor, step.context > 1
    split = f"each row is split between {n} devices" if by_rows else f"each layer is split between {n} devices"
    memory = _fsdp_step(step, None)
    peak = _fsdp_peak(step, memory, devices.count // step.tensor)
    if not devices.fits(peak):
        return Parallelism("none", f"{split}, and a step does not fit all the same", peak, "", sharing=n)
    overrides = _fsdp_overrides(step, by_accelerate=by_rows)
    overrides += ("trainer.packing=false", "model.attention=sdpa") if by_rows else ()
    sizes = f" --parallelism_config_dp_shard_size {devices.count // n}"
    sizes += f" --parallelism_config_cp_size {step.context} --parallelism_config_tp_size {step.tensor}"
    group = devices.count // step.tensor
    gathered = _others(group) * step.accumulation * (2 * _half(step, memory.weights) + memory.trained_bytes)
    why = f"{split}, which read the same rows; {_PARTS} are sharded"
    note = "Read in the sources of accelerate, transformers and torch: not run, and its memory not measured."
    return Parallelism(
        f"FSDP, {'context' if by_rows else 'tensor'} parallel", why, peak, _launch("fsdp2-split", devices, sizes),
        int(gathered) + _sent_within_layers(step), overrides, (note,), n,
    )  # fmt: skip


def _sent_within_layers(step: StepConfig) -> int:
    """Return the bytes that a device sends in the layers of an optimizer step: keys and values, or sums over a layer's parts.

    Context parallelism gathers keys and values forwards, recomputed and backwards, and sends their gradients in float32
    around the ring. Tensor parallelism sums a hidden state after attention and MLP, and as many gradients backwards.
    """
    text: Any = step.model.get_text_config()
    n = step.context * step.tensor
    tokens, size = step.batch * step.tokens * step.accumulation, (step.mixed or step.dtype).itemsize
    if step.tensor > 1:
        return int(12 * _others(n) * text.num_hidden_layers * tokens * text.hidden_size * size)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return int(text.num_hidden_layers * (n - 1) * tokens * 2 * width * (3 * size + 4))


def _launch(config: str, devices: Devices, more: str = "") -> str:
    """Return the command without overrides; on several machines that of the first, with ADDRESS for its address."""
    machines = ""
    if devices.nodes > 1:
        machines = (
            f" --num_machines {devices.nodes} --machine_rank 0 --main_process_ip ADDRESS --main_process_port 29500"
        )
    return _LAUNCH.format(config, devices.count, machines + more)


def _others(n: int) -> float:
    """Return the fraction of a tensor that a device of a ring of `n` sends: all but its own part."""
    return (n - 1) / n


def describe_traffic(parallelism: Parallelism, memory: Memory, devices: Devices) -> list[str]:
    """Return lines on the bytes that a step sends and, if the link's speed is known, how long that takes."""
    if not parallelism.sent:
        return []
    if parallelism.name == "offload":
        return [f"{render_size(parallelism.sent)} go between each device and the machine's memory in a step"]
    line = f"{render_size(parallelism.sent)} are sent by each {'machine' if devices.nodes > 1 else 'device'} in a step"
    if devices.link is None:
        return [f"{line} (--link GBPS for the time that takes)"]
    seconds, busy = parallelism.sent / devices.link, memory.flops / devices.arithmetic
    lines = [
        f"{line}: {seconds:.3g} s at {devices.link / 1e9:g} GB/s, beside {busy:.3g} s of arithmetic at "
        f"{devices.arithmetic / 1e12:.3g} TFLOP/s"
    ]
    if devices.kind == "cuda" and seconds > busy:
        less = "More accumulation sends" if parallelism.name == "DDP" else "A larger batch in fewer micro-batches sends"
        lines.append(
            f"The link is slower than the GPUs. {less} less for the same work; LoRA sends only its own gradients."
        )
    return lines


def describe_batch(step: StepConfig, devices: Devices, rate: float, max_steps: int, sharing: int = 1) -> list[str]:
    """Return lines on the global batch of several devices: how to keep that of one, and the rate for the larger one.

    `sharing` devices read the same rows.

    `rate` is trainer.learning_rate. The rules: linear for SGD (arXiv 1706.02677), the square root for Adam and its kin (arXiv
    2205.10287).
    """
    n = devices.count // sharing
    if n == 1:
        return []
    one = step.batch * step.accumulation
    readers = f"{n} devices" if sharing == 1 else f"{n} groups of {sharing} devices"
    lines = [f"{readers} read {n} times the rows of one in a step ({n * one} instead of {one})."]
    if one % n == 0:
        rows = one // n
        batch = max(size for size in range(1, min(step.batch, rows) + 1) if rows % size == 0)
        lines.append(
            f"To keep batch, steps and rate: trainer.per_device_train_batch_size={batch} "
            f"trainer.gradient_accumulation_steps={rows // batch}"
        )
    is_sgd = "sgd" in step.optim
    rule = "linear rule for SGD" if is_sgd else "square-root rule for Adam and its kin"
    steps = f" trainer.max_steps={max(max_steps // n, 1)}" if max_steps > 0 else ""
    higher = rate * (n if is_sgd else math.sqrt(n))
    lines.append(f"For the larger batch: trainer.learning_rate={higher:.3g}{steps} ({rule}; a start for find-lr)")
    return lines
