"""How to spread a step over devices and machines: of the parallelisms that fit, the one that sends least, and its command."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kinject.plan.devices import Devices, render_size
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import StepConfig
from kinject.process import machine_memory

ARITHMETIC = 1e14
"""Operations a second of a GPU, assumed where none can be timed."""
_LAUNCH = "accelerate launch --config_file recipes/distributed/{}.yaml --num_processes {}{} -m kinject.cli train RECIPE"
_SYNC = "'trainer.accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}'"
_PARTS = "weights, gradients and the optimizer's state"


@dataclass(frozen=True)
class Parallelism:
    """How to spread the run over the devices, why, the peak of one device, and the command ("" if kinject has none).

    `sent` are the bytes that go through the slowest link (`Devices.link`) in an optimizer step. `notes` are further lines.
    """

    name: str
    reason: str
    peak: int
    command: str
    sent: int = 0
    notes: tuple[str, ...] = ()


def choose_parallelism(step: StepConfig, memory: Memory, devices: Devices) -> Parallelism:
    """Return how to run `step`, whose memory on one device is `memory`, on `devices`."""
    fits = devices.fits(memory.peak)
    if devices.count == 1 and fits:
        why = "a whole step fits, and there is one device"
        return Parallelism("one device", why, memory.peak, "kinject train RECIPE")
    if devices.count > 1 and (ddp := _ddp(memory, devices)) is not None:
        return ddp
    if devices.kind != "cuda":
        why = "a step does not fit on the one device. Make the changes above"
        if devices.count > 1:
            why = "processes on a CPU can only run DDP, each with a whole step, which does not fit"
        return Parallelism("none", why, memory.peak, "")
    return _sharded(step, memory, devices)


def _ddp(memory: Memory, devices: Devices) -> Parallelism | None:
    peak = memory.peak + memory.trained_bytes  # DDP's copy of the gradients, in buckets
    if not devices.fits(peak):
        return None
    why = f"a whole step fits on each of the {devices.count}; only gradients are sent"
    on_gpu = devices.kind == "cuda"
    command = _command("ddp", devices) if on_gpu else f"{_command('ddp-cpu', devices)} trainer.use_cpu=true"
    return Parallelism("DDP", why, peak, command, int(2 * _others(devices.count) * memory.trained_bytes))


def _sharded(step: StepConfig, memory: Memory, devices: Devices) -> Parallelism:
    """Return the first of ZeRO-2, HSDP, FSDP and offload that fits; "none" without any."""
    n = devices.count
    states = memory.gradients + memory.optimizer
    rest = memory.activations + memory.logits
    zero2 = memory.weights + states // n + rest + memory.trained_bytes // n
    if n > 1 and devices.fits(zero2):
        why = "a step fits once gradients and the optimizer's state are sharded; the weights stay whole"
        sent = int(_others(n) * (step.accumulation + 1) * memory.trained_bytes)
        return Parallelism("ZeRO-2", why, zero2, _command("zero2", devices), sent)
    overrides, sharded = _fsdp_step(step, memory)
    for group in dict.fromkeys((devices.per_node, n)):  # within a machine, then over all
        peak = _fsdp_peak(step, sharded, group)
        if group > 1 and devices.fits(peak):
            return _fsdp(step, sharded, devices, group, overrides)
    return _offload(step, sharded, devices, overrides)


def _fsdp_step(step: StepConfig, memory: Memory) -> tuple[tuple[str, ...], Memory]:
    """Return the overrides that a recipe needs under FSDP2, and the memory of a step with them.

    accelerate checkpoints activations itself, and FSDP2 cannot shard the state of bitsandbytes' optimizers. Without
    sync_each_batch each device keeps whole gradients while they are accumulated. FSDP2 gathers weights in autocast's
    dtype, so that autocast keeps no copies.
    """
    overrides: tuple[str, ...] = ()
    changed = replace(step, checkpointing=True, dtype=step.mixed or step.dtype, mixed=None)
    state = memory.optimizer
    if any(part in step.optim for part in ("8bit", "bnb", "paged")) and "torch" not in step.optim:
        overrides += ("trainer.optim=adamw_torch_fused",)
        changed, state = replace(changed, optim="adamw_torch_fused", optim_args=None), 2 * memory.trained_bytes
    if step.checkpointing:
        overrides += ("trainer.gradient_checkpointing=false",)
    if step.accumulation > 1:
        overrides += (_SYNC,)
    if changed == step:
        return overrides, memory
    trained = memory.trained_bytes
    return overrides, replace(
        simulate(changed), weights=memory.weights, gradients=trained, optimizer=state, trained_bytes=trained
    )


def _fsdp_peak(step: StepConfig, memory: Memory, group: int) -> int:
    """Return the peak of a device if weights, gradients and state are sharded over `group` devices.

    Two layers are whole at a time: one computes, the next arrives. Quantised weights stay whole (their bytes are no
    numbers that FSDP2 shards).
    """
    weights = memory.weights // group if step.quantization == "none" else memory.weights
    states = (memory.gradients + memory.optimizer) // group
    return weights + states + memory.activations + memory.logits + 2 * memory.largest_block


def _fsdp(step: StepConfig, memory: Memory, devices: Devices, group: int, overrides: tuple[str, ...]) -> Parallelism:
    """Return FSDP over `group` devices: all, or those of each machine with replicas between machines (HSDP)."""
    peak = _fsdp_peak(step, memory, group)
    gathered = memory.weights // (2 if step.dtype == torch.float32 and step.mixed is not None else 1)
    each_batch = 2 * gathered + memory.trained_bytes  # gathered forwards and backwards, gradients scattered
    if group < devices.count:
        why = (
            f"{_PARTS} have to be sharded, and fit within a machine; only gradients are sent between the {devices.nodes} "
            "machines"
        )
        sent = int(2 * _others(devices.nodes) * step.accumulation * memory.trained_bytes)
        sizes = f" --parallelism_config_dp_replicate_size {devices.nodes} --parallelism_config_dp_shard_size {group}"
        command = " ".join((_command("hsdp", devices, sizes), *overrides))
        return Parallelism("HSDP", why, peak, command, sent)
    why = f"{_PARTS} have to be sharded; each layer is gathered when it is needed"
    sent = int(_others(group) * step.accumulation * each_batch)
    command = " ".join((_command("fsdp2", devices), *overrides))
    return Parallelism("FSDP (ZeRO-3)", why, peak, command, sent)


def _offload(step: StepConfig, memory: Memory, devices: Devices, overrides: tuple[str, ...]) -> Parallelism:
    """Return FSDP with weights, gradients and state in the machine's memory, or why nothing fits."""
    rest, layer = memory.activations + memory.logits, 2 * memory.largest_block
    if devices.fits(rest + layer):
        host = (memory.weights + memory.gradients + memory.optimizer) // devices.nodes
        why = (
            f"{_PARTS} ({render_size(host)}) are in the machine's memory and one layer at a time on the GPU: several times "
            "slower. The changes above come first"
        )
        notes: tuple[str, ...] = ()
        if devices.here and host > machine_memory():
            notes = (
                f"This machine has {render_size(machine_memory())} of memory. recipes/distributed/zero3-offload.yaml can "
                "use a disk instead (offload_param_device: nvme).",
            )
        command = " ".join((_command("fsdp2-offload", devices), *overrides))
        sent = (2 * memory.weights + memory.trained_bytes) * step.accumulation // devices.count
        return Parallelism("offload", why, rest + layer, command, sent, notes)
    if not devices.fits(layer):
        why = (
            f"the largest layer ({render_size(memory.largest_block)}) does not fit, since FSDP and ZeRO gather it whole with "
            "the next one. Only tensor parallelism splits a layer, and kinject does not run it (docs/distributed.md): use "
            "weights in bfloat16 or 4 bits, or a larger device"
        )
        return Parallelism("none", why, rest + layer, "")
    why = (
        "the activations of a device's own rows do not fit even with all else in the machine's memory. Smaller or shorter "
        "rows, or gradient checkpointing (see the changes), make FSDP enough"
    )
    return Parallelism("none", why, rest + layer, "")


def _command(config: str, devices: Devices, more: str = "") -> str:
    """Return the command; on several machines that of the first, with ADDRESS for its address."""
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
    seconds, busy = parallelism.sent / devices.link, memory.flops / ARITHMETIC
    lines = [
        f"{line}: {seconds:.3g} s at {devices.link / 1e9:g} GB/s, beside {busy:.3g} s of arithmetic at 100 TFLOP/s"
    ]
    if devices.kind == "cuda" and seconds > busy:
        less = "More accumulation sends" if parallelism.name == "DDP" else "A larger batch in fewer micro-batches sends"
        lines.append(
            f"The link is slower than the GPUs. {less} less for the same work; LoRA sends only its own gradients."
        )
    return lines


def describe_batch(step: StepConfig, devices: Devices, rate: float, max_steps: int) -> list[str]:
    """Return lines on the global batch of several devices: how to keep that of one, and the rate for the larger one.

    `rate` is trainer.learning_rate. The rules: linear for SGD (arXiv 1706.02677), the square root for Adam and its kin (arXiv
    2205.10287).
    """
    n = devices.count
    if n == 1:
        return []
    one = step.batch * step.accumulation
    lines = [f"{n} devices read {n} times the rows of one in a step ({n * one} instead of {one})."]
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
