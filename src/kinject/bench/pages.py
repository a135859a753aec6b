"""A bench on disk and on the screen: bench.json, bench.csv, bench.md, and its figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.bench.results import Bench, Estimate, Row
from kinject.disk import write_json, write_text
from kinject.disk.atomic import atomic_file
from kinject.report.formatting import escape_markdown, format_name
from kinject.report.plots.style import (
    FOURTH,
    INK,
    LEARNING,
    MUTED,
    RETENTION,
    RULE,
    panels,
    render_png,
    render_svg,
    style,
)
from kinject.terminal import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30


def write_pages(run_dir: Path, bench: Bench) -> Path:
    """Write every form of the table and the figure (PNG and SVG); return bench.md's path. Raises `DiskError`."""
    write_json(run_dir / "bench.json", asdict(bench))
    write_text(run_dir / "bench.csv", _csv(bench))
    figure = draw(bench)
    write_text(run_dir / "bench.svg", render_svg(figure))
    with atomic_file(run_dir / "bench.png", "wb") as file:
        file.write(render_png(figure))
    write_text(run_dir / "bench.md", _markdown(bench))
    return run_dir / "bench.md"


def render_bench(bench: Bench) -> str:
    """Return the table as aligned text, what did not run, and the notes."""
    head, *rows = _cells(bench)
    lines = [aligned([head, *rows], frozenset(range(1, len(head))))]
    lines += [f"{row.label}: not run: {row.reason}" for row in bench.rows if row.reason]
    lines += [f"{row.label}: {row.about}" for row in bench.rows if row.name in ("combined", "packing") and row.time]
    return "\n".join([*lines, "", *(f"note: {note}" for note in bench.notes)])


def _cells(bench: Bench) -> list[tuple[str, ...]]:
    """Return the head of the table and its lines."""
    several = bench.repeats > 1
    head = ["strategy", "s / 1,000 tokens", "of vanilla", *(["spread"] if several else []), "first steps", "peak memory",
            "of vanilla", "loss", *map(format_name, bench.sets)]  # fmt: skip
    lines = [tuple(head)]
    for row in bench.rows:
        if row.time is None or row.time_share is None or row.peak is None or row.peak_share is None or row.loss is None:
            lines.append((row.label, *["–"] * (len(head) - 1)))
            continue
        lines.append((
            row.label, _with_range(row.time, lambda x: f"{x:.3g}"), _with_range(row.time_share, _share),
            *([f"{row.spread or 0:.0%}"] if several else []), f"{row.first_seconds or 0:.1f} s",
            f"{row.peak.mean / _GIB:.2f} GiB", _with_range(row.peak_share, _share), f"{row.loss.mean:.3f}",
            *(_with_range((row.accuracy or {})[name], lambda x: f"{x:.3f}") for name in bench.sets),
        ))  # fmt: skip
    return lines


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


def _with_range(value: Estimate, say: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return say(value.mean)
    return f"{say(value.mean)} [{say(value.low)}, {say(value.high)}]"


def _markdown(bench: Bench) -> str:
    head, *rows = ([escape_markdown(cell) for cell in line] for line in _cells(bench))
    lines = [
        "# Training strategies side by side", "", f"Recipe {escape_markdown(bench.recipe)}; {escape_markdown(bench.device)}.",
        "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(line) + " |" for line in rows), "",
    ]  # fmt: skip
    left_out = [
        f"- {escape_markdown(row.label)}: not run: {escape_markdown(row.reason)}" for row in bench.rows if row.reason
    ]
    lines += [*left_out, ""] if left_out else []
    lines += [
        f"- {escape_markdown(row.label)}: {escape_markdown(row.about)}; `{_overrides(row)}`"
        for row in bench.rows
        if not row.reason
    ]
    lines += ["", *(f"- {escape_markdown(note)}" for note in bench.notes), "", "![time and memory](bench.svg)", ""]
    return "\n".join(lines)


def _overrides(row: Row) -> str:
    return format_name(", ".join(f"{key}={value}" for key, value in row.overrides.items()) or "nothing").replace(
        "`", "'"
    )


def _csv(bench: Bench) -> str:
    """Return one line a strategy; each estimate as three columns (mean, low, high)."""
    estimates = ("time", "time_share", "peak", "peak_share", "loss")
    names = [*estimates, *(f"accuracy {name}" for name in bench.sets), *(f"gain {name}" for name in bench.sets)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["strategy", "rounds", "reason", "first_seconds", "spread", "tokens",
                     *(f"{name}{part}" for name in names for part in ("", " low", " high"))])  # fmt: skip
    for row in bench.rows:
        found: list[Estimate | None] = [getattr(row, name) for name in estimates]
        found += [(row.accuracy or {}).get(name) for name in bench.sets]
        found += [(row.gain or {}).get(name) for name in bench.sets]
        numbers = [
            part for item in found for part in ((item.mean, item.low, item.high) if item else (None, None, None))
        ]
        cells = [row.name, row.n_rounds, row.reason, row.first_seconds, row.spread, row.tokens, *numbers]
        writer.writerow([_no_formula(cell) for cell in cells])
    return file.getvalue()


def _no_formula(cell: object) -> object:
    """Return a cell; a text that a spreadsheet would take for a formula behind an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def draw(bench: Bench) -> Figure:
    """Return shares of vanilla's time and memory and the accuracies, a line a strategy, with their intervals."""
    rows = [row for row in bench.rows if row.time_share is not None]
    columns: list[tuple[str, str, str, list[Estimate | None]]] = [
        ("time of vanilla", LEARNING, "o", [row.time_share for row in rows]),
        ("peak memory of vanilla", RETENTION, "s", [row.peak_share for row in rows]),
    ]
    for name, (colour, mark) in zip(bench.sets, ((FOURTH, "^"), (INK, "D")), strict=False):
        own = [(row.accuracy or {}).get(name) for row in rows]
        columns.append((f"accuracy, {format_name(name, 22)}", colour, mark, own))
    with style():
        figure, axes, n_columns = panels(len(columns), len(columns), 0.27 * len(rows) + 0.75)
        for at, (panel, (title, colour, mark, found)) in enumerate(zip(axes, columns, strict=True)):
            _draw_column(panel, found, colour, mark)
            panel.set_title(title, color=colour, fontweight="bold", fontsize=9.5)
            panel.set_yticks(range(len(rows)), [row.label for row in rows] if at % n_columns == 0 else [])
            if at < 2:
                panel.axvline(1, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
                panel.set_xlim(
                    0, 1.1 * max(1.0, *(min(item.high or item.mean, 2 * item.mean) for item in found if item))
                )
            else:
                panel.set_xlim(0, 1.03)
            panel.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    return figure


def _draw_column(panel: Axes, found: Sequence[Estimate | None], colour: str, mark: str) -> None:
    panel.set_ylim(len(found) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    for line, item in enumerate(found):
        if item is None:
            continue
        bounds: dict[str, Any] = {}
        if item.low is not None and item.high is not None:
            bounds = {"xerr": [[item.mean - item.low], [item.high - item.mean]]}
        panel.errorbar(item.mean, line, fmt=mark, color=colour, markersize=6, capsize=3, **bounds)
