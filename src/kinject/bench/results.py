"""The results of a bench: statistics of each strategy against the vanilla runs of the same round, tables and a figure.

On disk: bench.json, bench.csv, bench.md, bench.png and bench.svg.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, geometric_mean, quantiles
from typing import TYPE_CHECKING, Any

from kinject.disk import atomic_file, write_json, write_text
from kinject.eval.statistics import seed_interval
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
from kinject.types import Tabular

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30
WARM_UP = 2
"""Steps reported apart: torch.compile compiles in the first and, for other row lengths, again in the second."""
MIN_STEPS = WARM_UP + 2
"""Fewer cannot be measured."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds with its 95% interval; the geometric mean for times, memory and ratios.

    `low` and `high` are None with one round.
    """

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Measurement:
    """One run of one strategy in one round.

    `seconds` is the time of 1,000 learned tokens at the `pace` of the steps after the first `WARM_UP`; `first_seconds` is the
    time of those. `peak_bytes` is the peak memory up to the last step, `accuracy` that of each question set of the final
    weights, `run_seconds` the time of the training with its evaluations.
    """

    strategy: str
    round: int
    seconds: float
    first_seconds: float
    peak_bytes: int
    tokens: int
    loss: float
    accuracy: Mapping[str, float]
    run_seconds: float


@dataclass(frozen=True)
class StrategyResult:
    """One strategy of the table. Without runs, `reason` has the cause.

    `spread` is the range of `time_ratio` divided by its mean; for vanilla, the largest difference between its two runs of a
    round.
    """

    name: str
    label: str
    description: str
    overrides: Mapping[str, Any]
    reason: str = ""
    n_rounds: int = 0
    time: Estimate | None = None
    time_ratio: Estimate | None = None
    spread: float | None = None
    first_seconds: float | None = None
    peak: Estimate | None = None
    peak_ratio: Estimate | None = None
    tokens: float | None = None
    loss: Estimate | None = None
    accuracy: Mapping[str, Estimate] | None = None
    run_time: Estimate | None = None
    run_ratio: Estimate | None = None
    gain: Mapping[str, Estimate] | None = None


@dataclass(frozen=True)
class BenchResult(Tabular):
    """The whole table: `rows` by time, those that did not run last; `n_failed` of them broke.

    `steps` is None if each run had the recipe's own length.
    """

    recipe: str
    device: str
    rows: tuple[StrategyResult, ...]
    question_sets: tuple[str, ...]
    repeats: int
    steps: int | None
    notes: tuple[str, ...]
    n_failed: int

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each strategy: seconds for 1,000 tokens and peak bytes, and their ratios to vanilla."""
        means = ("time", "time_ratio", "peak", "peak_ratio", "loss")
        return [
            {
                "strategy": row.label,
                **{name: (estimate := getattr(row, name)) and estimate.mean for name in means},
                "reason": row.reason,
            }
            for row in self.rows
        ]


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95% interval."""
    interval = seed_interval(values)
    return Estimate(fmean(values), None, None) if interval is None else Estimate(interval[0], interval[2], interval[3])


def _clamp_to_fraction(estimate: Estimate) -> Estimate:
    """Return an estimate of an accuracy, its interval limited to 0 to 1."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(estimate.mean, max(0.0, estimate.low), min(1.0, estimate.high))


def ratio_estimate(values: Sequence[float], vanilla: Sequence[float]) -> Estimate:
    """Return the geometric mean of value / vanilla, paired by round, with Student's 95% interval on the log scale."""
    logs = mean_estimate([math.log(value / base) for value, base in zip(values, vanilla, strict=True)])
    if logs.low is None or logs.high is None:
        return Estimate(math.exp(logs.mean), None, None)
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def relative_range(values: Sequence[float], vanilla: Sequence[float]) -> float:
    """Return the range of value / vanilla over the rounds, divided by its mean; 0 with one round."""
    ratios = [value / base for value, base in zip(values, vanilla, strict=True)]
    return (max(ratios) - min(ratios)) / fmean(ratios)


def pace(steps: Sequence[tuple[float, float]]) -> float:
    """Return the lower quartile of seconds per token over steps of (seconds, tokens), two or more.

    Other work on the machine slows steps down and never speeds them up, so the faster ones show the cost of a step.
    """
    return quantiles([seconds / n_tokens for seconds, n_tokens in steps], n=4, method="inclusive")[0]


def _merge_by_round(runs: Sequence[Measurement]) -> dict[int, Measurement]:
    """Return one measurement per round: of several runs, the geometric means of time and memory."""
    rounds: dict[int, list[Measurement]] = {}
    for run in runs:
        rounds.setdefault(run.round, []).append(run)
    return {
        number: replace(
            group[0], seconds=geometric_mean([run.seconds for run in group]),
            first_seconds=max(run.first_seconds for run in group),
            peak_bytes=round(geometric_mean([run.peak_bytes for run in group])),
            run_seconds=geometric_mean([run.run_seconds for run in group]),
        )
        for number, group in rounds.items()
    }  # fmt: skip


def vanilla_noise(runs: Sequence[Measurement]) -> float:
    """Return the largest difference in time of two runs of the same round, divided by their mean."""
    means = {number: run.seconds for number, run in _merge_by_round(runs).items()}
    pairs = combinations(runs, 2)
    return max((abs(a.seconds - b.seconds) / means[a.round] for a, b in pairs if a.round == b.round), default=0.0)


def summarize(row: StrategyResult, runs: Sequence[Measurement], vanilla: Sequence[Measurement]) -> StrategyResult:
    """Return `row` with the numbers of its `runs`; rounds without a vanilla run do not count.

    Time and memory are geometric means like their ratios, so that no interval reaches below 0.
    """
    every, references = runs, _merge_by_round(vanilla)
    runs = [run for number, run in _merge_by_round(runs).items() if number in references]
    if not runs:
        return row
    bases = [references[run.round] for run in runs]
    seconds, base_seconds = [run.seconds for run in runs], [base.seconds for base in bases]
    run_seconds, base_run_seconds = [run.run_seconds for run in runs], [base.run_seconds for base in bases]
    peaks, base_peaks = [run.peak_bytes for run in runs], [base.peak_bytes for base in bases]
    sets = [name for name in runs[0].accuracy if all(name in run.accuracy for run in [*runs, *bases])]  # scored in each
    ones = [1.0] * len(runs)
    return replace(
        row, n_rounds=len(runs),
        time=ratio_estimate(seconds, ones), time_ratio=ratio_estimate(seconds, base_seconds),
        spread=vanilla_noise(every) if row.name == "vanilla" else relative_range(seconds, base_seconds),
        first_seconds=max(run.first_seconds for run in runs),
        run_time=ratio_estimate(run_seconds, ones), run_ratio=ratio_estimate(run_seconds, base_run_seconds),
        peak=ratio_estimate(peaks, ones), peak_ratio=ratio_estimate(peaks, base_peaks),
        tokens=fmean(run.tokens for run in runs), loss=mean_estimate([run.loss for run in runs]),
        accuracy={name: _clamp_to_fraction(mean_estimate([run.accuracy[name] for run in runs])) for name in sets},
        gain={
            name: mean_estimate([run.accuracy[name] - base.accuracy[name] for run, base in zip(runs, bases, strict=True)])
            for name in sets
        },
    )  # fmt: skip


def sort_rows(rows: Sequence[StrategyResult]) -> list[StrategyResult]:
    """Return the rows by time; those without a measurement come last, in their order."""
    return sorted(rows, key=lambda row: row.time_ratio.mean if row.time_ratio else math.inf)


def write_pages(run_dir: Path, bench: BenchResult) -> Path:
    """Write the table in every format and the figure; return the path of bench.md. Raises `DiskError`."""
    write_json(run_dir / "bench.json", asdict(bench))
    write_text(run_dir / "bench.csv", _csv(bench))
    figure = _draw(bench)
    write_text(run_dir / "bench.svg", render_svg(figure))
    with atomic_file(run_dir / "bench.png", "wb") as file:
        file.write(render_png(figure))
    write_text(run_dir / "bench.md", _markdown(bench))
    return run_dir / "bench.md"


def render_bench(bench: BenchResult) -> str:
    """Return the table as aligned text, the strategies that did not run, and the notes."""
    head, *rows = _table_cells(bench)
    lines = [aligned([head, *rows], frozenset(range(1, len(head))))]
    lines += [f"{row.label}: not run: {row.reason}" for row in bench.rows if row.reason]
    lines += [
        f"{row.label}: {row.description}" for row in bench.rows if row.name in ("combined", "packing") and row.time
    ]
    return "\n".join([*lines, "", *(f"note: {note}" for note in bench.notes)])


def _table_cells(bench: BenchResult) -> list[tuple[str, ...]]:
    """Return the head of the table and its rows."""
    several, whole_runs = bench.repeats > 1, bench.steps is None
    head = ["strategy", *(["whole run", "of vanilla"] if whole_runs else []), "s / 1,000 tokens", "of vanilla",
            *(["spread"] if several else []), "first steps", "peak memory", "of vanilla", "loss",
            *map(format_name, bench.question_sets)]  # fmt: skip
    lines = [tuple(head)]
    for row in bench.rows:
        if row.time is None or row.time_ratio is None or row.peak is None or row.peak_ratio is None or row.loss is None:
            lines.append((row.label, *["–"] * (len(head) - 1)))
            continue
        accuracy = row.accuracy or {}
        lines.append((
            row.label, *([_with_range(row.run_time, _seconds), _with_range(row.run_ratio, _percent)]
                         if whole_runs and row.run_time and row.run_ratio else []),
            _with_range(row.time, lambda x: f"{x:.3g}"), _with_range(row.time_ratio, _percent),
            *([f"{row.spread or 0:.0%}"] if several else []), f"{row.first_seconds or 0:.1f} s",
            f"{row.peak.mean / _GIB:.2f} GiB", _with_range(row.peak_ratio, _percent), f"{row.loss.mean:.3f}",
            *(_with_range(accuracy[name], lambda x: f"{x:.3f}") if name in accuracy else "unscored"
              for name in bench.question_sets),
        ))  # fmt: skip
    return lines


def _seconds(value: float) -> str:
    return f"{value:.0f} s"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _with_range(value: Estimate, text: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return text(value.mean)
    return f"{text(value.mean)} [{text(value.low)}, {text(value.high)}]"


def _markdown(bench: BenchResult) -> str:
    head, *rows = ([escape_markdown(cell) for cell in line] for line in _table_cells(bench))
    lines = [
        "# Training strategies side by side", "", f"Recipe {escape_markdown(bench.recipe)}; {escape_markdown(bench.device)}.",
        "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(line) + " |" for line in rows), "",
    ]  # fmt: skip
    not_run = [
        f"- {escape_markdown(row.label)}: not run: {escape_markdown(row.reason)}" for row in bench.rows if row.reason
    ]
    lines += [*not_run, ""] if not_run else []
    lines += [
        f"- {escape_markdown(row.label)}: {escape_markdown(row.description)}; `{_overrides(row)}`"
        for row in bench.rows
        if not row.reason
    ]
    lines += ["", *(f"- {escape_markdown(note)}" for note in bench.notes), "", "![time and memory](bench.svg)", ""]
    return "\n".join(lines)


def _overrides(row: StrategyResult) -> str:
    text = ", ".join(f"{key}={value}" for key, value in row.overrides.items())
    return format_name(text or "nothing").replace("`", "'")


def _csv(bench: BenchResult) -> str:
    """Return a line for each strategy; an estimate has three columns (mean, low, high)."""
    estimates = ("time", "time_ratio", "run_time", "run_ratio", "peak", "peak_ratio", "loss")
    names = [*estimates, *(f"{kind} {name}" for kind in ("accuracy", "gain") for name in bench.question_sets)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["strategy", "rounds", "reason", "first_seconds", "spread", "tokens",
                     *(f"{name}{part}" for name in names for part in ("", " low", " high"))])  # fmt: skip
    for row in bench.rows:
        values: list[Estimate | None] = [getattr(row, name) for name in estimates]
        values += [(row.accuracy or {}).get(name) for name in bench.question_sets]
        values += [(row.gain or {}).get(name) for name in bench.question_sets]
        numbers = [
            part for item in values for part in ((item.mean, item.low, item.high) if item else (None, None, None))
        ]
        cells = [row.name, row.n_rounds, row.reason, row.first_seconds, row.spread, row.tokens, *numbers]
        writer.writerow([_escape_formula(cell) for cell in cells])
    return file.getvalue()


def _escape_formula(cell: object) -> object:
    """Return a cell; a text that a spreadsheet would read as a formula gets an apostrophe in front."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def _draw(bench: BenchResult) -> Figure:
    """Return a figure of time and memory relative to vanilla and of the accuracies, with intervals, by strategy."""
    rows = [row for row in bench.rows if row.time_ratio is not None]
    columns: list[tuple[str, str, str, list[Estimate | None]]] = [
        ("time of vanilla", LEARNING, "o", [row.time_ratio for row in rows]),
        ("peak memory of vanilla", RETENTION, "s", [row.peak_ratio for row in rows]),
    ]
    for name, (colour, mark) in zip(bench.question_sets, ((FOURTH, "^"), (INK, "D")), strict=False):
        accuracies = [(row.accuracy or {}).get(name) for row in rows]
        columns.append((f"accuracy, {format_name(name, 22)}", colour, mark, accuracies))
    with style():
        figure, axes, n_columns = panels(len(columns), len(columns), 0.27 * len(rows) + 0.75)
        for index, (panel, (title, colour, mark, estimates)) in enumerate(zip(axes, columns, strict=True)):
            _draw_column(panel, estimates, colour, mark)
            panel.set_title(title, color=colour, fontweight="bold", fontsize=9.5)
            panel.set_yticks(range(len(rows)), [row.label for row in rows] if index % n_columns == 0 else [])
            if index < 2:
                panel.axvline(1, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
                ends = (min(item.high or item.mean, 2 * item.mean) for item in estimates if item)
                panel.set_xlim(0, 1.1 * max(1.0, *ends))
            else:
                panel.set_xlim(0, 1.03)
            panel.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    return figure


def _draw_column(panel: Axes, estimates: Sequence[Estimate | None], colour: str, mark: str) -> None:
    panel.set_ylim(len(estimates) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    for line, item in enumerate(estimates):
        if item is None:
            continue
        bounds: dict[str, Any] = {}
        if item.low is not None and item.high is not None:
            bounds = {"xerr": [[item.mean - item.low], [item.high - item.mean]]}
        panel.errorbar(item.mean, line, fmt=mark, color=colour, markersize=6, capsize=3, **bounds)
