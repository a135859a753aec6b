"""The figures of a report, accuracy and learning against forgetting, and the style of every figure
of kinject.

Drawn with matplotlib's Figure objects on Agg (no pyplot, no window, no state); the same input gives
the same bytes. Colours are blue and orange of Okabe and Ito (2008), which differ to every kind of
colour vision; no meaning depends on colour alone.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import atomic_file, write_text
from kinject.report.formatting import ROLES, View, arm_key, arm_label, format_name, format_prompt
from kinject.results import ArmResult, PromptFormat
from kinject.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER, OTHER = "#1b1f24", "#5b6570", "#dce1e6", "#ffffff", "#c3cad1"
LEARNING, RETENTION = "#0072b2", "#c44f00"
THIRD, FOURTH, FIFTH = "#00795a", "#a0528a", "#8a6d00"
_SERIES = (
    (LEARNING, "o", "-"),
    (RETENTION, "s", "--"),
    (THIRD, "^", "-."),
    (FOURTH, "D", ":"),
    (FIFTH, "v", "-"),
    (MUTED, "P", "--"),
)


def series(index: int) -> tuple[str, str, str]:
    """Return colour, mark and line of the series of that number; 36 differ."""
    colour, _, line = _SERIES[index % len(_SERIES)]
    # After each round the marks move on by one, so that a colour gets another mark.
    marks = index + index // len(_SERIES)
    return colour, _SERIES[marks % len(_SERIES)][1], line


LONGEST = 34
"""Characters of a name in a figure."""


@dataclass(frozen=True)
class Size:
    """How wide a figure is, in inches, and what it holds: panels side by side, characters of a line
    of a row's name, of a panel's title and of the legend."""

    width: float = 10.0
    columns: int = 3
    name: int = LONGEST
    title: int = 200
    legend: int = 125


# As wide as the page: narrower figures were scaled up together with their text.
WIDE = Size()
# 3.9 inches are 374 pixels of a page; a phone with 390 shows them in 345, so text stays legible.
NARROW = Size(width=3.9, columns=1, name=20, title=22, legend=46)
_PNG_DPI = 160
_MOST_POINTS = 400  # of a curve
_MARK_WIDTH = 7  # characters of a mark with its space
TICKS = ([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
CHANCE: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}
"""The line at the level of chance."""


_STYLE = {
    "svg.fonttype": "none",  # text as text: a missing character is left to its reader
    "svg.hashsalt": "kinject",  # fixed ids: the same report gives the same bytes
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw with kinject's settings instead of the user's matplotlibrc, then restore the user's."""
    # Here: this module is imported also where nothing is drawn.
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name may hold characters that the font lacks: the PNG shows a box, the SVG leaves them
        # to its reader.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def panels(heights: Sequence[float], size: Size = WIDE) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each of `heights`, side by side as far as they fit; a row of
    panels is as high as its highest."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    n_panels = len(heights)
    columns = _n_columns(n_panels, size)
    of_rows = [max(heights[first : first + columns]) for first in range(0, n_panels, columns)]
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
    # The dots of the PNG, in which the layout measures text.
    figure = Figure(figsize=(size.width, sum(of_rows) + 0.55), dpi=_PNG_DPI, layout=layout)
    grid = figure.subplots(len(of_rows), columns, squeeze=False, height_ratios=of_rows)
    axes = list(grid.flat)
    for empty in axes[n_panels:]:
        empty.remove()
    return figure, axes[:n_panels]


def _n_columns(n_panels: int, size: Size) -> int:
    return min(size.columns, n_panels)


def prepare_rows(panel: Axes, names: Sequence[str], *, labelled: bool, size: Size = WIDE) -> None:
    """Set `panel` up for one row a name, the first on top; `labelled` writes the names."""
    labels = [""] * len(names)
    if labelled:
        labels = [_lines_of(name, size) for name in names]
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks(range(len(names)), labels)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)


def _lines_of(name: str, size: Size) -> str:
    """Return a name in as many lines as its figure needs, two at most."""
    lines = textwrap.wrap(format_name(name, max(LONGEST, size.name)), size.name) or [""]
    return "\n".join([lines[0], format_name(" ".join(lines[1:]), size.name)]).rstrip()


def margin_text(panel: Axes, row: int, text: str) -> None:
    """Write `text` to the right of the row."""
    panel.annotate(
        text,
        (1, row),
        xycoords=panel.get_yaxis_transform(),
        xytext=(10, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=9,
        annotation_clip=False,
    )


def line_mark(label: str, **style_of: Any) -> Any:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style_of)


def add_legend(figure: Figure, marks: Sequence[Any], size: Size = WIDE) -> int:
    """Set a legend under the panels, in as many columns as the figure's width holds; return its
    number of rows."""
    n_columns = _legend_columns([len(mark.get_label()) for mark in marks], size.legend)
    figure.legend(
        handles=list(marks),
        loc="outside lower left",
        ncols=n_columns,
        columnspacing=1.4,
        handletextpad=0.6,
    )
    return math.ceil(len(marks) / n_columns)


def _legend_columns(lengths: Sequence[int], width: int) -> int:
    """Return the largest number of columns that holds labels of these lengths, in characters."""
    for n_columns in range(len(lengths), 1, -1):
        widths = [max(lengths[start::n_columns]) for start in range(n_columns)]
        if sum(widths) + _MARK_WIDTH * n_columns <= width:
            return n_columns
    return 1


def draw_figure(stem: Path, figure: Figure | None) -> str | None:
    """Write STEM.png and STEM.svg; return the SVG, None for nothing."""
    if figure is None:
        return None
    svg = render_svg(figure)
    write_text(stem.with_suffix(".svg"), svg)
    with atomic_file(stem.with_suffix(".png"), "wb") as file:
        file.write(render_png(figure))
    return svg


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG, 160 dots to the inch, on white."""
    with style(), io.BytesIO() as file:
        _fix_layout(figure)
        # The version of matplotlib would be in the file and change its bytes.
        figure.savefig(file, format="png", dpi=_PNG_DPI, metadata={"Software": None})
        return file.getvalue()


def render_svg(figure: Figure) -> str:
    """Return the figure as an SVG file with text as text, without date or random ids."""
    with style(), io.StringIO() as file:
        _fix_layout(figure)
        # Without a tight box, for which matplotlib would draw the figure once more.
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return printable(file.getvalue())  # XML holds no control characters


def _fix_layout(figure: Figure) -> None:
    """Lay the figure out, once for all files: with a layout engine savefig would do it again for
    each, and draw each figure twice for it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)
        # The layout's solver orders its sums by addresses in memory: the same figure would have
        # other last digits, and a report other bytes, in every process.
        for panel in figure.axes:
            x, y, width, height = panel.get_position().bounds
            panel.set_position((round(x, 6), round(y, 6), round(width, 6), round(height, 6)))


_ROLE_MARKS = {
    "learning": ("o", LEARNING),
    "retention": ("s", RETENTION),
    "unanswerable": ("^", series(3)[0]),
    "baseline": ("D", MUTED),
}


@dataclass(frozen=True)
class _Panel:
    """One model on one question set, asked in one prompt format."""

    model: str
    question_set: str
    format: PromptFormat
    results: tuple[ArmResult, ...]

    @property
    def role(self) -> str:
        return self.results[0].role

    def title(self, view: View) -> str:
        title = f"{format_name(self.question_set, LONGEST)}: {ROLES[self.role]}"
        if not view.is_study and len(view.formats(self.question_set)) > 1:
            title = f"{title}\n{format_prompt(self.format)}"
        if view.several_models:
            title = f"{format_name(self.model, LONGEST)}\n{title}"
        return title


def accuracy(view: View, size: Size = WIDE) -> Figure | None:
    """Return accuracy with its interval and each seed's, one panel for each model and set, one row
    for each arm.

    An evaluation has a panel for each prompt format, a study for the headline alone. Learning is a
    blue circle, retention an orange square; a hollow mark has retrieved context.
    """
    groups = view.groups(1 if view.is_study else None)
    drawn = [_Panel(model, name, form, tuple(results)) for model, name, form, results in groups]
    if not drawn:
        return None
    results = [result for panel in drawn for result in panel.results]
    n_columns = _n_columns(len(drawn), size)
    # Panels side by side share their rows: where few sets are asked with passages, the others would
    # be mostly empty.
    beside = [drawn[first : first + n_columns] for first in range(0, len(drawn), n_columns)]
    labels_of_rows = list(map(_row_labels, beside))
    labels = [labels_of_rows[index // n_columns] for index in range(len(drawn))]
    with style():
        figure, axes = panels([_height(list(names.values()), size) for names in labels], size)
        for index, (panel, shown) in enumerate(zip(axes, drawn, strict=True)):
            names = list(labels[index].values())
            prepare_rows(panel, names, labelled=index % n_columns == 0, size=size)
            rows = {key: row for row, key in enumerate(labels[index])}
            _draw_panel(panel, shown, rows, view)
            title = [textwrap.fill(line, size.title) for line in shown.title(view).splitlines()]
            colour = _ROLE_MARKS[shown.role][1]
            panel.set_title("\n".join(title), color=colour, fontweight="bold")
        n_rows = add_legend(figure, list(_accuracy_marks(drawn, results)), size)
        _make_room(figure, n_rows)
    return figure


def _height(names: Sequence[str], size: Size) -> float:
    """Return the height of a panel with these rows, in inches: a name in two lines needs a higher
    row."""
    row_height = max(0.27 + 0.14 * _lines_of(name, size).count("\n") for name in names)
    return row_height * len(names) + 0.75


def _row_labels(drawn: Sequence[_Panel]) -> dict[tuple[str, int | None], str]:
    """Return the name of each row of panels by its arm's key: arms without context, then with."""
    results = list(chain.from_iterable(panel.results for panel in drawn))
    without = {arm_key(result): arm_label(result) for result in results if not result.k}
    with_context = {arm_key(result): arm_label(result) for result in results if result.k}
    return without | with_context


def _accuracy_marks(drawn: Sequence[_Panel], results: Sequence[ArmResult]) -> Iterator[Any]:
    """Yield an entry of the legend for each kind of mark that is drawn."""
    roles = {panel.role for panel in drawn}
    for role, (marker, colour) in _ROLE_MARKS.items():
        if role in roles:
            yield line_mark(ROLES[role], marker=marker, color=colour, linestyle="none")
    if any(result.k for result in results):
        hollow = {"marker": "o", "color": INK, "markerfacecolor": PAPER}
        yield line_mark("hollow: with retrieved context", **hollow, linestyle="none")
    if any(len(result.by_seed) > 1 for result in results):
        yield line_mark("one seed", marker="|", color=MUTED, linestyle="none")
    if any(result.control for result in results):
        yield line_mark("without the question", marker="x", color=INK, linestyle="none")
    # Written answers have no accuracy of guessing.
    if any(result.chance for result in results):
        yield line_mark("guessing", **CHANCE)
    yield line_mark("base", color=MUTED, linewidth=0.8)


def _draw_panel(
    panel: Axes, shown: _Panel, rows: Mapping[tuple[str, int | None], int], view: View
) -> None:
    panel.set_xlim(0, 1)
    panel.set_xticks(*TICKS)
    chance = shown.results[0].chance
    if chance:
        panel.axvline(chance, **CHANCE, label="chance")
    base = view.result(shown.model, view.base(shown.model), shown.question_set, 0, shown.format)
    if base is not None:
        panel.axvline(base.accuracy, color=MUTED, linewidth=0.8, label="base")
    for result in shown.results:
        _draw_accuracy(panel, rows[arm_key(result)], result)


def _draw_accuracy(panel: Axes, row: int, result: ArmResult) -> None:
    marker, colour = _ROLE_MARKS[result.role]
    n_seeds = len(result.by_seed)
    if n_seeds > 1:
        below = [row + 0.27] * n_seeds
        # Not clipped: a mark at 0 or 100% would be cut in half.
        panel.plot(result.by_seed, below, "|", color=MUTED, markersize=4, clip_on=False)
    if result.control is not None:
        x = [result.control.accuracy]
        panel.plot(x, [row], "x", color=INK, markersize=5, clip_on=False, zorder=3)
    # matplotlib refuses a negative length, which rounding might leave.
    whiskers = [[max(0.0, result.accuracy - result.low)], [max(0.0, result.high - result.accuracy)]]
    panel.errorbar(
        [result.accuracy],
        [row],
        xerr=whiskers,
        fmt=marker,
        color=colour,
        markersize=5,
        markeredgewidth=1.5,
        markerfacecolor=PAPER if result.k else colour,
        elinewidth=1.8,
        capsize=3,
        capthick=1.3,
        clip_on=False,
    )
    margin_text(panel, row, f"{100 * result.accuracy:.1f}")


@dataclass(frozen=True)
class _Trade:
    """One model's question sets of a panel: what it learned against what it kept."""

    model: str
    learned: str
    kept: str


def _make_room(figure: Figure, n_rows: int) -> None:
    """Make a figure higher for a legend of more than two rows, for which the layout has room: each
    further one would shrink the panels."""
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, n_rows - 2))


def frontier(view: View, size: Size = WIDE) -> Figure | None:
    """Return learning against retention, one panel for each model and retention set: sweeps as
    lines, arms as marks."""
    drawn = [trade for model in view.report.models for trade in _trades(view, model)]
    if not drawn:
        return None
    marks: dict[str, Any] = {}
    with style():
        height = 4.45 if len(drawn) == 1 else 3.9
        figure, axes = panels([height] * len(drawn), size)
        for panel, trade in zip(axes, drawn, strict=True):
            marks |= _draw_trades(panel, view, trade)
        _make_room(figure, add_legend(figure, list(marks.values()), size))
    return figure


def _trades(view: View, model: str) -> list[_Trade]:
    """Return what to draw of one base model: nothing for one trained arm, which is a single
    point."""
    n_trained = sum(arm.trained for arm in view.arms.values() if arm.model == model)
    learning = view.sets("learning", model)
    if n_trained < 2 or not learning:
        return []
    return [_Trade(model, learning[0], kept) for kept in view.sets("retention", model)]


def _draw_trades(panel: Axes, view: View, trade: _Trade) -> dict[str, Any]:
    """Draw the sweeps and arms of one model; return the entries of the legend."""
    sweeps = [s for s in view.report.sweeps if s.model == trade.model and s.frontier]
    groups = [(sweep.name, [point.arm for point in sweep.points]) for sweep in sweeps]
    groups += [(arm.name, [arm.name]) for arm in view.own_arms(trade.model)]
    marks: dict[str, Any] = {}
    for index, (name, arms) in enumerate(groups):
        look = (INK, "*", "none") if name == view.base(trade.model) else series(index)
        marks |= _draw_trade(panel, view, trade, _Group(name, arms, look))
    panel.xaxis.set_major_formatter(_percent_tick)
    panel.yaxis.set_major_formatter(_percent_tick)
    panel.grid(color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(0.1)
    panel.set_xlabel(f"{format_name(trade.kept, LONGEST)}: kept")
    panel.set_ylabel(f"{format_name(trade.learned, LONGEST)}: learned")
    if view.several_models:
        panel.set_title(format_name(trade.model, LONGEST), fontweight="bold")
    return marks


def _percent_tick(value: float, _: float) -> str:
    # Of thousands of questions the ticks are half a point apart: no whole percents.
    return f"{round(100 * value, 2) + 0.0:g}%"


@dataclass(frozen=True)
class _Group:
    """The arms of a sweep, or one arm; `look` is colour, mark and line."""

    name: str
    arms: Sequence[str]
    look: tuple[str, str, str]


def _draw_trade(panel: Axes, view: View, trade: _Trade, group: _Group) -> dict[str, Any]:
    """Draw what the arms kept and learned, with both intervals; return the entry of the legend."""
    points = []
    for arm in group.arms:
        kept = view.result(trade.model, arm, trade.kept)
        learned = view.result(trade.model, arm, trade.learned)
        if kept is not None and learned is not None:
            points.append((kept, learned))
    if not points:
        return {}
    colour, marker, line = group.look
    is_sweep = len(group.arms) > 1
    look: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "linestyle": line if is_sweep else "none",
    }
    panel.plot(
        [kept.accuracy for kept, _ in points],
        [learned.accuracy for _, learned in points],
        **look,
        markersize=12 if marker == "*" else 6,
        linewidth=1.3,
        clip_on=False,
    )
    whiskers: dict[str, Any] = {"colors": colour, "linewidth": 0.8, "alpha": 0.4, "zorder": 1}
    for kept, learned in points:
        panel.hlines(learned.accuracy, kept.low, kept.high, **whiskers)
        panel.vlines(kept.accuracy, learned.low, learned.high, **whiskers)
    # A sweep may have the name of an arm, and both are drawn.
    key = f"{group.name}\0{is_sweep}"
    return {key: line_mark(format_name(group.name, LONGEST), **look, markersize=6)}


_PALETTE = {
    "ink": (INK, "#e4e8ec"),
    "muted": (MUTED, "#9aa5b1"),
    "rule": (RULE, "#333b44"),
    "paper": (PAPER, "#14181d"),
    "other": (OTHER, "#4c5762"),
    "learning": (LEARNING, "#56b4e9"),
    "retention": (RETENTION, "#f09a52"),
    "third": (THIRD, "#4fd0a5"),
    "fourth": (FOURTH, "#e3a0cd"),
    "fifth": (FIFTH, "#dcc25c"),
}
"""Name of a colour -> as it is drawn, and on a dark page; those of templates/style.css."""
_STYLED = re.compile(r'style="[^"]*"')


def follow_page(svg: str) -> str:
    """Return a figure that is dark on a dark page. The files of the figures stay as drawn: programs
    other than browsers read no variables."""
    for name, (drawn, _) in _PALETTE.items():
        svg = _STYLED.sub(partial(_with_variable, drawn, f"var(--{name})"), svg)
    light = " ".join(f"--{name}: {colour};" for name, (colour, _) in _PALETTE.items())
    dark = " ".join(f"--{name}: {colour};" for name, (_, colour) in _PALETTE.items())
    query = "@media screen and (prefers-color-scheme: dark)"
    style = f"<style>:root {{ {light} }} {query} {{ :root {{ {dark} }} }}</style>"
    return svg.replace("<defs>", f"{style}<defs>", 1)


def _with_variable(colour: str, variable: str, styled: re.Match[str]) -> str:
    return styled[0].replace(colour, variable)


def thinned(points: Sequence[tuple[float, float]]) -> list[list[float | None]]:
    """Return the steps and the values of a curve as at most `_MOST_POINTS` means of neighbours, for
    a page that draws it; None for a value that is not finite."""
    size = math.ceil(len(points) / _MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    steps: list[float | None] = [sum(step for step, _ in part) / len(part) for part in parts]
    values = [sum(value for _, value in part) / len(part) for part in parts]
    return [steps, [None if math.isnan(value) else value for value in values]]
