"""A plan as text for a terminal, and its learning rate as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kinject.plan.run import Plan
from kinject.report.plots.style import INK, LEARNING, style
from kinject.terminal import duration

_PARTS = ("weights", "gradients", "optimizer", "activations", "logits")
_BARS = "▁▂▃▄▅▆▇█"


def size(n_bytes: float) -> str:
    """Return bytes in words: ``3.2 GiB``, ``120 MiB``."""
    for unit, least in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= least:
            return f"{n_bytes / least:.1f} {unit}"
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes < 10 * 2**20 else f"{n_bytes / 2**20:.0f} MiB"


def render(found: Plan) -> str:
    """Return the plan as lines for a terminal."""
    blocks = [_head(found), _memory(found), _changes(found), _run(found), _rates(found)]
    blocks.append([f"note: {note}" for note in found.notes])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(found: Plan) -> list[str]:
    memory, shape, devices = found.memory, found.shape, found.devices
    share = memory.n_trained / memory.n_parameters
    kind = (
        "full" if shape.adapter is None else "LoRA" if shape.quantization == "none" else f"QLoRA, {shape.quantization}"
    )
    mixed = f", multiplied in {str(shape.mixed).removeprefix('torch.')}" if shape.mixed is not None else ""
    where = "here" if devices.here else "as named; this machine was not asked"
    count = f"{devices.count} x " if devices.count > 1 else ""
    trains = "all train" if share == 1 else f"{memory.n_trained:,} train ({share:.2%})"
    return [
        f"recipe       {found.recipe}",
        f"model        {found.model}: {memory.n_parameters:,} parameters, {trains} ({kind})",
        f"weights      {str(shape.dtype).removeprefix('torch.')}{mixed}, {_attention(found)}, optimizer {shape.optim}, "
        f"gradient checkpointing {'on' if shape.checkpointing else 'off'}",
        f"step         {shape.batch} rows x {shape.accumulation} accumulated x {devices.count} device"
        f"{'s' if devices.count > 1 else ''} = {found.global_batch} rows of {shape.block} tokens",
        f"devices      {count}{devices.name}, {size(devices.memory)} ({where})",
    ]


def _attention(found: Plan) -> str:
    words = {"flash": "attention without a mask (flash-attn or torch's varlen)", "eager": "eager attention"}
    return words.get(
        found.shape.attention, "sdpa attention" + (" with documents kept apart by a mask" if found.shape.masked else "")
    )


def _memory(found: Plan) -> list[str]:
    memory = found.memory
    lines = [f"memory of a device at its fullest ({memory.when})"]
    for part in _PARTS:
        held = getattr(memory, part)
        lines.append(f"  {part:<12} {size(held):>10}  {held / memory.peak:>4.0%}")
    if memory.heap:
        lines.append(
            f"  {'heap':<12} {size(memory.heap):>10}  {memory.heap / memory.peak:>4.0%}  kept in holes between tensors"
        )
    lines.append(f"  {'the step':<12} {size(memory.peak):>10}")
    other = (
        "Python, its libraries and what they work in"
        if found.devices.kind != "cuda"
        else "CUDA's context and the allocator's gaps, assumed"
    )
    lines.append(f"  {'beside them':<12} {size(found.need - memory.peak):>10}  {other}")
    verdict = "fits" if found.fits else "does NOT fit"
    lines.append(f"  {'in all':<12} {size(found.need):>10}  {verdict} one device of {size(found.devices.memory)}")
    if found.trial is not None:
        lines.append(f"  {'measured':<12} {size(found.trial.peak_bytes):>10}  in {found.trial.n_steps} real steps")
    return lines


def _changes(found: Plan) -> list[str]:
    way = found.way
    lines = []
    if not found.fits:
        lines.append(
            f"to fit on one device, in the order of least cost{'' if found.changes_suffice else ' (all together do not suffice)'}"
        )
        for number, change in enumerate(found.changes, 1):
            lines.append(f"  {number}. {' '.join(_quoted(text) for text in change.overrides)}")
            lines.append(f"     down to {size(found.devices.need(change.peak))}; {change.cost}")
        if not found.changes_suffice:
            lines.append("  Take a smaller model, or more memory.")
        lines.append("")
    lines.append(f"parallelism  {way.name}: {way.reason}")
    if found.devices.count > 1 and way.name != "none":
        lines.append(f"             about {size(found.devices.need(way.peak))} on each device")
    if way.command:
        lines.append(f"             {way.command.replace('RECIPE', found.recipe)}")
    return lines


def _quoted(text: str) -> str:
    return f"'{text}'" if "{" in text else text


def _run(found: Plan) -> list[str]:
    lines = []
    length = found.length
    if length is not None:
        lines.append(
            f"run          {length.steps:,} steps, {length.epochs:.3g} epochs of {length.n_rows:,} rows, {length.fill:.0%} full"
        )
        lines.append(f"tokens       {length.tokens:,} read, {length.learned:,} of them learned")
        if length.shares:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in length.shares.items())
            lines.append(f"             of them {shares}")
        if length.wordings is not None:
            least, median, most = length.wordings
            lines.append(
                f"exposures    {length.documents:,} documents, each read in {median:g} texts (least {least:g}, most {most:g})"
            )
    operations = found.memory.flops / 1e12
    few = f"{operations:,.0f}" if operations >= 100 else f"{operations:.3g}"
    lines.append(f"operations   {few} TFLOP a step on each device")
    if found.seconds is not None and found.trial is not None:
        lines.append(
            f"time         {duration(found.seconds)} ({found.trial.step_seconds:.2f} s a step, measured here; evaluation, probes "
            "and saving not counted)"
        )
    elif length is not None and found.devices.kind == "cuda":
        total = found.memory.flops * length.steps
        lines.append(f"time         {duration(total / 1e14)} for each 100 TFLOP/s that a device really does")
    disk = found.disk
    short = (
        ""
        if disk.total <= disk.free
        else f"; only {size(disk.free)} are FREE there (trainer.save_total_limit, save_only_model)"
    )
    kept = f"{disk.n_checkpoints} checkpoints of {size(disk.checkpoint)} at once + " if disk.n_checkpoints else ""
    lines.append(f"disk         {size(disk.total)}: {kept}model {size(disk.model)}{short}")
    return lines


def _rates(found: Plan) -> list[str]:
    if found.rates is None:
        return []
    return [
        f"learning rate {sparkline(list(found.rates))}",
        f"             first {found.rates[0]:.3g}, highest {max(found.rates):.3g}, last {found.rates[-1]:.3g} "
        f"over {len(found.rates):,} steps",
    ]


def sparkline(rates: list[float], width: int = 48) -> str:
    """Return `rates` as a line of at most `width` bars, each the mean of its share of the steps."""
    top = max(rates)
    n_bars = min(width, len(rates))
    line = ""
    for bar in range(n_bars):
        held = rates[bar * len(rates) // n_bars : (bar + 1) * len(rates) // n_bars]
        level = sum(held) / len(held) / top if top else 0.0
        line += _BARS[min(int(level * len(_BARS)), len(_BARS) - 1)]
    return line


def draw_rates(found: Plan, path: Path) -> None:
    """Write the learning rate by step as a PNG (or what the ending of `path` says). Raises `InputError` without steps."""
    from kinject.errors import InputError

    if found.rates is None:
        raise InputError("--figure: the number of steps is unknown, so there is no curve. Set trainer.max_steps.")
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(found.rates) + 1), found.rates, color=LEARNING, linewidth=1.6)
        axes.set_xlabel("optimizer step", color=INK)
        axes.set_title("Learning rate")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def as_json(found: Plan) -> Mapping[str, Any]:
    """Return the plan as plain values; bytes, seconds and counts as numbers."""
    values = {
        field.name: _plain(getattr(found, field.name)) for field in dataclasses.fields(found) if field.name != "shape"
    }
    shape = {
        field.name: _plain(getattr(found.shape, field.name))
        for field in dataclasses.fields(found.shape)
        if field.name != "config"
    }
    values["memory"]["peak"] = found.memory.peak
    return {**values, "shape": shape, "global_batch": found.global_batch}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
