"""The section on scaling: accuracy over parameters and over exposures with fitted lines, and bits per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kinject.report.figures import MUTED, RULE, panels, style
from kinject.report.formatting import format_name
from kinject.report.study_blocks import Block, Bullets, Cell, FigureBlock, Section, TableBlock, Text, line
from kinject.report.study_figures import LONGEST, SERIES, line_mark
from kinject.report.study_view import View
from kinject.results import Scaling, ScalingFit, ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL = "Accuracy by parameters and by exposures; the numbers stand in the tables below"
CAPTION = (
    "Small marks: single seeds. Lines: least squares over the logarithm, the slopes in the table. Dashed: chance. Where a line "
    "nears 100% or chance the points bend away from it. Bits per parameter: means with 95% intervals."
)
_DEFINITION = (
    "Bits: facts × mean over questions of log2(values) × (right − chance) / (1 − chance). So much a reader has stored who "
    "knows a share of the facts and guesses evenly at the others, each value being equally likely.",
    "Under that assumption it is a lower bound on what the weights hold: the people's names, the language, how to answer and how "
    "to read a passage are not counted, nor is a fact that a question of four choices fails to bring out.",
    "arXiv 2404.05405 reads bits off the loss and counts names too; its 2 bits per parameter are for 1,000 exposures and a data "
    "set larger than the model can hold. A set whose facts are few beside the parameters can only show a small number.",
    "Parameters: all of them, embeddings included, tied ones once. Exposures: readings of the document behind a question, in any "
    "wording. Slopes: 95% intervals of Student's t over all runs. Seeds of one size share its base model, so along parameters "
    "they are too narrow.",
)


def scaling_figure(view: View, *, columns: int = 3) -> Figure | None:
    """Return three kinds of panels: accuracy by parameters, accuracy by exposures, bits per parameter by parameters."""
    scaling = view.result.scaling
    if scaling is None or not scaling.points:
        return None
    sets = list(dict.fromkeys(point.question_set for point in scaling.points))
    places: list[tuple[str, str]] = [("parameters", name) for name in sets]
    places += [("exposures", name) for name in sets if any(p.exposures for p in _of(scaling, name))]
    places += [("bits", name) for name in sets]
    with style():
        figure, axes, _ = panels(len(places), columns, 2.75)
        for panel, (kind, name) in zip(axes, places, strict=True):
            own = _of(scaling, name)
            marks: list[Any] = []
            key = "model" if kind == "exposures" else "label"
            for at, group in enumerate(dict.fromkeys(getattr(point, key) for point in own)):
                colour, marker, _line = SERIES[at % len(SERIES)]
                held = [point for point in own if getattr(point, key) == group]
                if kind == "bits":
                    _draw_bits(panel, held, colour, marker)
                else:
                    fit = _fit_of(scaling, (name, kind, group))
                    _draw_accuracies(panel, held, kind, fit, (colour, marker))
                label = group if kind == "exposures" else _at_label(scaling, group)
                marks.append(line_mark(format_name(label, LONGEST), color=colour, marker=marker, markersize=5))
            _finish(panel, kind, name, own)
            panel.legend(handles=marks, fontsize=7.5, handlelength=1.5)
    return figure


def _of(scaling: Scaling, question_set: str) -> list[ScalingPoint]:
    return [point for point in scaling.points if point.question_set == question_set]


def _fit_of(scaling: Scaling, place: tuple[str, str, str]) -> ScalingFit | None:
    return next((fit for fit in scaling.fits if (fit.question_set, fit.along, fit.at) == place), None)


def _at_label(scaling: Scaling, label: str) -> str:
    """Return what a value of the curve is called: by its exposures, where they were counted."""
    counts = [point.exposures for point in scaling.points if point.label == label and point.exposures]
    if not label:
        return "base"
    return f"{label} ({sum(counts) / len(counts):.3g} exposures)" if counts else label


def _draw_accuracies(
    panel: Axes, points: Sequence[ScalingPoint], kind: str, fit: ScalingFit | None, series: tuple[str, str]
) -> None:
    colour, marker = series
    held = [(x, point) for point in points if (x := getattr(point, kind))]
    for x, point in held:
        panel.plot([x] * len(point.by_seed), point.by_seed, marker, color=colour, markersize=3.5, alpha=0.7)
    if fit is not None:
        ends = [min(x for x, _ in held), max(x for x, _ in held)]
        panel.plot(ends, [fit.intercept + fit.slope * math.log2(x) for x in ends], color=colour, linewidth=1.4)


def _draw_bits(panel: Axes, points: Sequence[ScalingPoint], colour: str, marker: str) -> None:
    held = sorted(points, key=lambda point: point.parameters)
    values = [point.per_parameter for point in held]
    below = [max(0.0, (point.bits - point.low) / point.parameters) for point in held]
    above = [max(0.0, (point.high - point.bits) / point.parameters) for point in held]
    panel.errorbar([point.parameters for point in held], values, yerr=[below, above], color=colour, marker=marker,
                   markersize=4.5, linewidth=1.2, capsize=2)  # fmt: skip


def _finish(panel: Axes, kind: str, name: str, points: Sequence[ScalingPoint]) -> None:
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="y", color=RULE, linewidth=0.6)
    panel.set_axisbelow(True)
    xs = sorted({x for point in points if (x := getattr(point, "exposures" if kind == "exposures" else "parameters"))})
    if kind == "exposures":  # widths read the same number of texts, to a fraction
        xs = sorted({round(x) for x in xs})
    panel.set_xticks(xs, [f"{x / 1e6:.2g}M" if x >= 1e6 else f"{x / 1e3:.3g}k" if x >= 1e3 else f"{x:g}" for x in xs])
    panel.set_xlabel("times each document was read" if kind == "exposures" else "parameters")
    said = format_name(name, LONGEST)
    panel.set_title(f"{said}: bits per parameter" if kind == "bits" else f"{said}: accuracy", fontweight="bold")
    if kind != "bits":
        panel.set_ylim(0, 1.02)
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])
        panel.axhline(points[0].chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))


def scaling_section(view: View, *, drawn: bool) -> Section:
    """Return the section, without blocks where the study's recipe asks for none."""
    scaling = view.result.scaling
    if scaling is None:
        return Section("Size, repetition, and bits per parameter", ())
    blocks: list[Block] = [FigureBlock("scaling", LABEL, CAPTION)] if drawn else [Text("No base model has a result.")]
    if scaling.fits:
        blocks.append(_fits_table(scaling))
    if scaling.points:
        blocks += [_points_table(scaling), Bullets(_DEFINITION, small=True)]
    return Section("Size, repetition, and bits per parameter", tuple(blocks))


def _fits_table(scaling: Scaling) -> TableBlock:
    lines = tuple(
        line(format_name(fit.question_set), f"doubling of {fit.along}",
             format_name(_at_label(scaling, fit.at) if fit.along == "parameters" else fit.at),
             Cell(f"{100 * fit.slope:+.1f}", "", f"{100 * fit.low:+.1f} – {100 * fit.high:+.1f}"),
             "–" if fit.r_squared is None else f"{fit.r_squared:.2f}", str(fit.n))
        for fit in scaling.fits
    )  # fmt: skip
    columns = ("set", "along", "at", "points of accuracy", "r²", "runs")
    return TableBlock("What a doubling adds", "least squares, 95% interval below", columns, lines, heads=3)


def _points_table(scaling: Scaling) -> TableBlock:
    lines = tuple(
        line(format_name(point.question_set), format_name(point.model), format_name(_at_label(scaling, point.label)),
             f"{point.parameters:,}", f"{100 * point.accuracy:.1f}%",
             Cell(f"{point.bits:,.0f}", "", f"{point.low:,.0f} – {point.high:,.0f}"), f"{point.most_bits:,.0f}",
             f"{point.per_parameter:.3g}")
        for point in scaling.points
    )  # fmt: skip
    columns = ("set", "model", "at", "parameters", "accuracy", "bits", "of at most", "bits per parameter")
    return TableBlock("Bits held", "95% interval below", columns, lines, heads=3)
