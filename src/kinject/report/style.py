"""Colours, settings, panels and legends of every figure, and figures as PNG, SVG and inline SVG.

Drawn with matplotlib's Figure objects on Agg (no pyplot, no window, no state); the same input gives the same bytes.
Colours are blue and orange of Okabe and Ito (2008), which differ to every kind of colour vision; no meaning
depends on colour alone. `inline_svg` replaces the printed colours by the page's own, so that one drawing serves light,
dark and paper.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import atomic_file, write_text
from kinject.report.formatting import format_name
from kinject.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER, OTHER = "#1b1f24", "#5b6570", "#dce1e6", "#ffffff", "#c3cad1"
LEARNING, RETENTION = "#0072b2", "#c44f00"
THIRD, FOURTH, FIFTH = "#00795a", "#a0528a", "#8a6d00"
PAGE_COLOURS = {
    INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)", OTHER: "var(--other)",
    LEARNING: "var(--learning)", RETENTION: "var(--retention)", THIRD: "var(--third)", FOURTH: "var(--fourth)",
    FIFTH: "var(--fifth)",
}  # fmt: skip
"""Colour in the drawing -> colour of the page that holds it."""

_SERIES = (
    (LEARNING, "o", "-"), (RETENTION, "s", "--"), (THIRD, "^", "-."), (FOURTH, "D", ":"), (FIFTH, "v", "-"),
    (MUTED, "P", "--"),
)  # fmt: skip


def series(index: int) -> tuple[str, str, str]:
    """Return colour, mark and line of the series of that number; 36 differ."""
    marks = index + index // len(_SERIES)
    return _SERIES[index % len(_SERIES)][0], _SERIES[marks % len(_SERIES)][1], _SERIES[index % len(_SERIES)][2]


LONGEST = 34
"""Characters of a name in a figure."""
_WIDTH = 125  # characters of a legend's row
TICKS = ([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
CHANCE: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}
"""The line at the level of chance."""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw with kinject's settings instead of the user's matplotlibrc, then restore the user's."""
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

    columns = min(columns, n_panels)
    rows = math.ceil(n_panels / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(10.0, rows * height + 0.55), layout=layout)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for empty in axes[n_panels:]:
        empty.remove()
    return figure, axes[:n_panels], columns


def percent_axis(panel: Axes, *, labelled: bool) -> None:
    """Set the vertical axis of `panel` up for accuracies; `labelled` writes the ticks."""
    panel.set_ylim(0, 1.02)
    panel.set_yticks(TICKS[0], TICKS[1] if labelled else [""] * len(TICKS[0]))
    panel.grid(axis="y", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)


def prepare_rows(panel: Axes, names: Sequence[str], *, labelled: bool) -> None:
    """Set `panel` up for one row a name, the first on top; `labelled` writes the names."""
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks(range(len(names)), [format_name(n, LONGEST) for n in names] if labelled else [""] * len(names))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)


def margin_text(panel: Axes, row: int, text: str) -> None:
    """Write `text` to the right of the row."""
    panel.annotate(
        text, (1, row), xycoords=panel.get_yaxis_transform(), xytext=(10, 0), textcoords="offset points",
        va="center_baseline", fontsize=9, annotation_clip=False,
    )  # fmt: skip


def line_mark(label: str, **style_of: Any) -> Any:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style_of)


def add_legend(figure: Figure, marks: Sequence[Any]) -> int:
    """Set a legend under the panels, in as many columns as the page's width holds; return its number of rows."""
    widths = [len(mark.get_label()) + 7 for mark in marks]  # in characters
    n = next((n for n in range(len(marks), 1, -1) if sum(max(widths[i::n]) for i in range(n)) <= _WIDTH), 1)
    figure.legend(handles=list(marks), loc="outside lower left", ncols=n, columnspacing=1.4, handletextpad=0.6)
    return math.ceil(len(marks) / n)


def draw_figure(stem: Path, figure: Figure | None, label: str) -> str | None:
    """Write STEM.png and STEM.svg; return the figure for the page, None for nothing."""
    if figure is None:
        return None
    svg = render_svg(figure)
    write_text(stem.with_suffix(".svg"), svg)
    with atomic_file(stem.with_suffix(".png"), "wb") as file:
        file.write(render_png(figure))
    return inline_svg(svg, prefix=stem.name, label=label)


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG, 160 dots to the inch, on white."""
    with style(), io.BytesIO() as file:
        _compute_layout(figure)
        figure.savefig(file, format="png", dpi=160, metadata={"Software": None})
        return file.getvalue()


def render_svg(figure: Figure) -> str:
    """Return the figure as an SVG file with text as text, without date or random ids."""
    with style(), io.StringIO() as file:
        _compute_layout(figure)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return printable(file.getvalue())  # XML holds no control characters


def _compute_layout(figure: Figure) -> None:
    """Lay the figure out once, and draw it no more often than there are files: matplotlib would do both for each file."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)  # with "none" each file would draw it once more to see where things are


def inline_svg(svg: str, *, prefix: str, label: str) -> str:
    """Return an SVG of `render_svg` for an HTML page: ids begin with `prefix`, colours are the page's.

    No address outside the page remains. `label` (kinject's words, not data) is for screen readers.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)

    def adapt(tag: re.Match[str]) -> str:  # text cannot look like a tag: it is escaped
        text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", tag[0])
        text = re.sub(r'\bid="', f'id="{prefix}-', text)
        text = re.sub(r'href="#|url\(#', lambda start: f"{start[0]}{prefix}-", text)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda colour: PAGE_COLOURS.get(colour[0], colour[0]), text)
        text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
        if text.startswith("<svg"):
            text = re.sub(r'\s(?:width|height)="[^"]*"', "", text)
            text = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        return text

    return re.sub(r"<[^<>]+>", adapt, body)
