"""A plan as text, as JSON values, and its learning rate as a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kinject.errors import InputError
from kinject.plan.estimate import PARTS
from kinject.plan.run import Plan
from kinject.plan.ways import describe_traffic, quoted, render_size
from kinject.report.style import INK, LEARNING, style
from kinject.terminal import duration, sparkline


def render_plan(plan: Plan) -> str:
    """Return the plan as text."""
    blocks = [_head(plan), _memory(plan), _spread(plan), _run(plan), _rates(plan)]
    blocks.append([f"note: {note}" for note in plan.notes])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(plan: Plan) -> list[str]:
    shapes, step, devices = plan.shapes, plan.step, plan.devices
    kind = "full" if step.adapter is None else "LoRA" if step.quantization == "none" else f"QLoRA, {step.quantization}"
    mixed = f", multiplied in {str(step.mixed).removeprefix('torch.')}" if step.mixed is not None else ""
    where = "this machine" if devices.here else "as given, not this machine"
    per_node = devices.count // devices.nodes
    count = f"{devices.nodes} machines with {per_node} x " if devices.nodes > 1 else f"{per_node} x " * (per_node > 1)
    fraction = shapes.n_trained / shapes.n_parameters
    trains = "all train" if fraction == 1 else f"{shapes.n_trained:,} train ({fraction:.2%})"
    return [
        f"recipe       {plan.recipe}",
        f"model        {plan.model}: {shapes.n_parameters:,} parameters, {trains} ({kind})",
        f"weights      {str(step.dtype).removeprefix('torch.')}{mixed}, optimizer {step.optim}, gradient checkpointing "
        f"{'on' if step.checkpointing else 'off'}",
        f"step         {step.batch} rows x {step.accumulation} accumulated x {devices.count} device"
        f"{'s' if devices.count > 1 else ''} = {plan.global_batch} rows of {step.block} tokens",
        f"devices      {count}{devices.name}, {render_size(devices.memory)} ({where})",
    ]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    lines = ["peak memory of a step on one device, estimated"]
    for part in PARTS:
        n_bytes = getattr(memory, part)
        if n_bytes:
            name = "heap holes" if part == "fragmentation" else part
            lines.append(f"  {name:<12} {render_size(n_bytes):>10}  {n_bytes / memory.peak:>4.0%}")
    on_gpu = plan.devices.kind == "cuda"
    other = "CUDA's context and unused blocks of the allocator, assumed" if on_gpu else "Python and its libraries"
    lines.append(f"  {'other':<12} {render_size(plan.need - memory.peak):>10}  {other}")
    verdict = "fits" if plan.fits else "does NOT fit"
    size = f"{verdict} one device of {render_size(plan.devices.memory)}"
    lines.append(
        f"  {'total':<12} {render_size(plan.need):>10}  {size}; the largest layer has {render_size(plan.shapes.layer)}"
    )
    if memory.host:
        lines.append(f"  {'host':<12} {render_size(memory.host):>10}  in the machine's memory besides")
    if plan.timing is not None:
        peak = render_size(plan.timing.peak_bytes)
        lines.append(f"  {'measured':<12} {peak:>10}  in {plan.timing.n_steps} real steps")
    return lines


def _spread(plan: Plan) -> list[str]:
    way, lines = plan.way, []
    if plan.changes:
        enough = " (all together are not enough)" if way.name in ("offload", "none") else ""
        lines.append(f"to fit, in the order of least cost{enough}")
        for number, change in enumerate(plan.changes, 1):
            lines.append(f"  {number}. {' '.join(map(quoted, change.overrides))}")
            lines.append(f"     down to {render_size(plan.devices.need(change.peak))}; {change.cost}")
        lines.append("")
    lines.append(f"parallelism  {way.name}: {way.why}")
    if way.command:
        if plan.devices.count > 1 or plan.changes:
            lines.append(f"             about {render_size(plan.devices.need(way.memory.peak))} on each device")
        lines.append(f"             {way.command.replace('RECIPE', plan.recipe)}")
        if plan.devices.nodes > 1:
            lines.append("             on each machine, with its own --machine_rank and the ADDRESS of the first")
    else:
        lines.append("             Take a smaller model, or more memory.")
    lines += [f"             {line}" for line in describe_traffic(way, plan.step_flops, plan.devices)]
    return lines + [f"{'' if number else 'batch':<12} {line}" for number, line in enumerate(plan.batch_advice)]


def _run(plan: Plan) -> list[str]:
    lines, length = [], plan.length
    if length is not None:
        lines.append(
            f"run          {length.steps:,} steps, {length.epochs:.3g} epochs of {length.n_rows:,} rows, {length.fill:.0%} full"
        )
        lines.append(f"tokens       {length.tokens:,} read, {length.learned:,} of them learned")
        if length.fractions:
            fractions = ", ".join(f"{name} {fraction:.1%}" for name, fraction in length.fractions.items())
            lines.append(f"             of them {fractions}")
        if length.texts_per_document is not None:
            low, median, high = length.texts_per_document
            lines.append(f"exposures    {length.documents:,} documents, each in {median:g} texts ({low:g} to {high:g})")
    lines.append(f"operations   {plan.step_flops / 1e12:,.3g} TFLOP a step on each device")
    if plan.seconds is not None and plan.timing is not None:
        each = f"{plan.timing.step_seconds:.2f} s a step, measured here; without evaluation, probes and saving"
        lines.append(f"time         {duration(plan.seconds)} ({each})")
    elif plan.devices.kind == "cuda":
        seconds = plan.step_flops / plan.devices.flops
        whole = f"{duration(seconds * length.steps)}, " if length is not None else ""
        pace = f"{plan.devices.flops / 1e12:.3g} TFLOP/s on each device (assumed, not measured)"
        lines.append(f"time         {whole}{seconds:.3g} s a step, planned at {pace}")
    return lines


def _rates(plan: Plan) -> list[str]:
    if plan.rates is None:
        return []
    return [
        f"learning rate {sparkline(list(plan.rates))}",
        f"             first {plan.rates[0]:.3g}, highest {max(plan.rates):.3g}, last {plan.rates[-1]:.3g} "
        f"over {len(plan.rates):,} steps",
    ]


def draw_rates(plan: Plan, path: Path) -> None:
    """Write the learning rate by step in the format of `path`'s suffix. Raises `InputError` if the steps are unknown."""
    if plan.rates is None:
        raise InputError("--figure: the number of steps is unknown, so there is no curve. Set trainer.max_steps.")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--figure: found {str(path)!r:.80}, allowed: a name that ends with .png, .svg or .pdf.")
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(plan.rates) + 1), plan.rates, color=LEARNING, linewidth=1.6)
        axes.set_xlabel("optimizer step", color=INK)
        axes.set_title("Learning rate")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def plan_values(plan: Plan) -> Mapping[str, Any]:
    """Return the plan as plain values; bytes, seconds and counts as numbers."""
    values = {f.name: _plain(getattr(plan, f.name)) for f in dataclasses.fields(plan) if f.name != "step"}
    step = {f.name: _plain(getattr(plan.step, f.name)) for f in dataclasses.fields(plan.step) if f.name != "model"}
    values["memory"]["peak"] = plan.memory.peak
    return {**values, "step": step, "global_batch": plan.global_batch, "fits": plan.fits, "need": plan.need}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
