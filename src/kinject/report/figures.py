"""The report's figures: accuracy by arm, and the training loss.

Drawn with matplotlib's Figure objects on Agg (no pyplot, no window, no state); the same input gives the same bytes.
Colours are blue and orange of Okabe and Ito (2008), which every kind of colour vision tells apart, and no meaning
hangs on colour alone. `inline_svg` turns the printed colours into the page's own, so that one drawing serves light,
dark and paper.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kinject.report.formatting import ROLES, arm_names, format_name, format_way
from kinject.report.training_log import TrainingLog
from kinject.terminal import printable
from kinject.types import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER, OTHER = "#1b1f24", "#5b6570", "#dce1e6", "#ffffff", "#c3cad1"
LEARNING, RETENTION = "#0072b2", "#c44f00"
THIRD, FOURTH, FIFTH = "#00795a", "#a0528a", "#8a6d00"
PAGE_COLOURS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    OTHER: "var(--other)",
    LEARNING: "var(--learning)",
    RETENTION: "var(--retention)",
    THIRD: "var(--third)",
    FOURTH: "var(--fourth)",
    FIFTH: "var(--fifth)",
}
"""Colour in the drawing -> colour of the page that it is set in."""

_MARKS = {"learning": ("o", LEARNING), "retention": ("s", RETENTION)}
_LONGEST = 22  # characters of an arm's name
_MOST_POINTS = 500  # of one loss curve: more cannot be seen
_MOST_EPOCHS = 24  # light lines in one panel
_MOST_BEHIND = 20  # other losses in one panel


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw with kinject's settings, whatever the user's matplotlibrc says, and put the user's back."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name may hold characters that the font lacks: the PNG shows a box, the SVG leaves them to its reader.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "svg.fonttype": "none", "svg.hashsalt": "kinject", "text.parse_math": False, "font.size": 10,
            "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": RULE, "axes.facecolor": "none",
            "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
            "xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
            "figure.facecolor": PAPER, "legend.frameon": False, "legend.fontsize": 9.5,
        })  # fmt: skip
        yield


def panels(n_panels: int, columns: int, height: float) -> tuple[Figure, list[Axes], int]:
    """Return a figure with that many panels, side by side up to `columns`, and how many columns there are."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = 10.0 if columns > 1 else 4.4
    columns = min(columns, n_panels)
    rows = math.ceil(n_panels / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(width, rows * height + 0.55), layout=layout)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for empty in axes[n_panels:]:
        empty.remove()
    return figure, axes[:n_panels], columns


def accuracy_figure(cells: Sequence[Cell], *, columns: int = 3) -> Figure:
    """Return accuracy with its 95% interval, one panel for each question set and way of asking, one line for each arm.

    Shape and colour tell learning (circle, blue) from retention (square, orange); a hollow mark has retrieved context.
    """
    keys = list(dict.fromkeys((format_way(cell), cell.question_set) for cell in cells))
    names = arm_names(cells, _LONGEST)
    with style():
        figure, axes, n_columns = panels(len(keys), columns, 0.27 * len(names) + 0.75)
        several_ways = len({way for way, _ in keys}) > 1
        for index, (panel, (way, question_set)) in enumerate(zip(axes, keys, strict=True)):
            shown = [cell for cell in cells if (format_way(cell), cell.question_set) == (way, question_set)]
            _draw_accuracy(panel, shown, list(names))
            title = f"{format_name(question_set, _LONGEST)}: {ROLES[shown[0].role]}"
            title += f"\n{way}" if several_ways else ""
            panel.set_title(title, color=_MARKS[shown[0].role][1], fontweight="bold")
            panel.set_yticks(range(len(names)), list(names.values()) if index % n_columns == 0 else [])
        _add_legend(figure, cells, 6 if columns > 1 else 2)
    return figure


def _draw_accuracy(panel: Axes, cells: Sequence[Cell], arms: Sequence[tuple[str, int]]) -> None:
    panel.set_xlim(0, 1)
    panel.set_ylim(len(arms) - 0.4, -0.6)
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.axvline(cells[0].chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="chance")
    base = next((cell for cell in cells if cell.difference is None), None)
    if base is not None:
        panel.axvline(base.accuracy, color=MUTED, linewidth=0.8, label="base")
    marker, colour = _MARKS[cells[0].role]
    for cell in cells:
        row = arms.index((cell.arm, cell.k))
        whiskers = [[max(0.0, cell.accuracy - cell.low)], [max(0.0, cell.high - cell.accuracy)]]
        panel.errorbar(
            [cell.accuracy], [row], xerr=whiskers, fmt=marker, color=colour, markersize=5, markeredgewidth=1.5,
            markerfacecolor=PAPER if cell.k else colour, elinewidth=1.8, capsize=3, capthick=1.3, clip_on=False,
        )  # fmt: skip
        panel.annotate(
            f"{100 * cell.accuracy:.1f}", (1, row), xycoords=panel.get_yaxis_transform(), xytext=(12, 0),
            textcoords="offset points", va="center_baseline", fontsize=9.5, annotation_clip=False,
        )  # fmt: skip


def _add_legend(figure: Figure, cells: Sequence[Cell], columns: int) -> None:
    from matplotlib.lines import Line2D

    marks: list[Any] = []
    for role, (marker, colour) in _MARKS.items():
        if any(cell.role == role for cell in cells):
            marks.append(Line2D([], [], marker=marker, color=colour, linestyle="none", label=ROLES[role]))
    if any(cell.k for cell in cells):
        marks.append(Line2D([], [], marker="o", color=INK, markerfacecolor=PAPER, linestyle="none", markeredgewidth=1.6,
                            label="hollow: with retrieved context"))  # fmt: skip
    marks.append(Line2D([], [], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="chance"))
    marks.append(Line2D([], [], color=MUTED, linewidth=0.8, label="base"))
    columns = min(columns, len(marks))
    figure.legend(handles=marks, loc="outside lower left", ncols=columns, columnspacing=1.4, handletextpad=0.5)


def loss_figure(logs: Sequence[TrainingLog], *, columns: int = 3) -> Figure:
    """Return the training loss, one panel for each run, the others in grey behind it as far as this one goes.

    Behind stand some twenty at most, evenly chosen: a panel shows no more, and all behind all would be their square.

    Light lines mark the ends of epochs. All share one scale of loss, logarithmic where the losses span more than a
    factor of five.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    finite = [loss for log in logs for loss in log.losses if math.isfinite(loss)]
    logarithmic = bool(finite) and min(finite) > 0 and max(finite) > 5 * min(finite)
    behind = [(other, _thinned(other)) for other in logs[:: math.ceil(len(logs) / _MOST_BEHIND)]]
    with style():
        figure, axes, n_columns = panels(len(logs), columns, 2.5)
        for index, (panel, log) in enumerate(zip(axes, logs, strict=True)):
            for other, (steps, losses) in behind:
                if other is not log:
                    panel.plot(steps, losses, color=OTHER, linewidth=0.9)
            draw_epochs(panel, log)
            panel.plot(*_thinned(log), color=LEARNING, linewidth=1.5, label="loss")
            panel.set_title(format_name(log.name, 30), fontweight="bold")
            if logarithmic:
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                panel.yaxis.set_minor_locator(NullLocator())
                panel.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
            panel.grid(axis="y", color=RULE, linewidth=0.6)
            if index % n_columns == 0:
                panel.set_ylabel("training loss" + (" (log scale)" if logarithmic else ""))
            if index >= len(logs) - n_columns:
                panel.set_xlabel("step")
            panel.set_xlim(0, log.steps[-1] or 1)
        for panel in axes[1:]:
            panel.sharey(axes[0])
        axes[0].autoscale(axis="y")
    return figure


def draw_epochs(panel: Axes, log: TrainingLog) -> None:
    """Mark where epochs end with light lines, every few of them where there are many."""
    ends = log.epoch_ends()
    every = max(1, math.ceil(len(ends) / _MOST_EPOCHS))
    for step in ends[every - 1 :: every]:
        panel.axvline(step, color=RULE, linewidth=0.9, label="epoch")
    if ends:
        text = "light lines: epochs" if every == 1 else f"light lines: every {every} epochs"
        panel.text(1, 1.02, text, transform=panel.transAxes, ha="right", va="bottom", color=MUTED, fontsize=8.5)


def _thinned(log: TrainingLog) -> tuple[list[float], list[float]]:
    """Return steps and losses; where there are more than can be seen, means of equally many neighbours."""
    size = math.ceil(len(log.steps) / _MOST_POINTS)
    starts = range(0, len(log.steps), max(1, size))
    means = [
        [sum(column[i : i + size]) / len(column[i : i + size]) for i in starts] for column in (log.steps, log.losses)
    ]
    return means[0], means[1]


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG, 160 dots to the inch, on white."""
    with style(), io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=160, metadata={"Software": None})
        return file.getvalue()


def render_svg(figure: Figure) -> str:
    """Return the figure as an SVG file with text as text, without date or random ids."""
    with style(), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return printable(file.getvalue())  # XML holds no control characters


def inline_svg(svg: str, *, prefix: str, label: str) -> str:
    """Return an SVG of `render_svg` to be set into an HTML page: ids begin with `prefix`, colours are the page's.

    Nothing is left in it that names a place outside the page. `label` (plain words of kinject's own) is what a screen
    reader says.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)

    def mend(tag: re.Match[str]) -> str:  # text cannot look like a tag: it is escaped
        text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", tag[0])
        text = re.sub(r'\bid="', f'id="{prefix}-', text)
        text = re.sub(r'href="#|url\(#', lambda start: f"{start[0]}{prefix}-", text)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda colour: PAGE_COLOURS.get(colour[0], colour[0]), text)
        text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
        if text.startswith("<svg"):
            text = re.sub(r'\s(?:width|height)="[^"]*"', "", text)
            text = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        return text

    return re.sub(r"<[^<>]+>", mend, body)
