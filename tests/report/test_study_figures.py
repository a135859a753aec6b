"""A study's figures show the numbers of its result, at the right places, and name what they leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from study_results import CURVES, make_paper_study, make_small, make_study

from kinject.report.details import cost_table
from kinject.report.plots.arms import (
    accuracy_by_arm,
    directions,
    flips,
    grids,
    question_strip,
    relative_gains,
    time_by_arm,
)
from kinject.report.plots.sweeps import (
    accuracy_by_k,
    exposures,
    frontier,
    numbers_of,
    positions,
    sweep_figure,
    tick_label,
)
from kinject.report.view import View, arm_label, exposures_label, slug
from kinject.results import ArmInfo, ExposureBin, Sweep, SweepPoint

WHOLE = make_study()
VIEW = View(WHOLE)
EVERY = (accuracy_by_arm, relative_gains, accuracy_by_k, frontier, flips, question_strip, directions, exposures, grids,
         time_by_arm)  # fmt: skip


def lines_of(panel: Any, marker: str) -> list[tuple[list[float], list[float]]]:
    """Return the points of each line drawn with `marker`."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines if line.get_marker() == marker]


def test_accuracies_and_intervals_stand_in_the_row_of_their_arm() -> None:
    figure = accuracy_by_arm(VIEW)
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    for panel, name in zip(figure.axes, ("new", "known", "reverse"), strict=True):
        drawn = {}
        for container in panel.containers:
            line, _, (bars,) = container
            ((low, row), (high, _)) = bars.get_segments()[0]
            drawn[labels[int(row)]] = (float(line.get_xdata()[0]), float(low), float(high))
        expected = {arm_label(s): pytest.approx((s.accuracy, s.low, s.high)) for s in VIEW.shown("sandbox", name)}
        assert drawn == expected


def test_a_curve_holds_each_points_accuracy_band_and_control() -> None:
    (curve,) = [curve for curve in WHOLE.sweeps if curve.name == "paraphrases"]
    figure = sweep_figure(VIEW, [curve])
    assert figure is not None
    scores = [VIEW.point(curve, point, "new") for point in curve.points]
    (drawn,) = [line for line in figure.axes[0].lines if line.get_label() == "new"]
    assert list(drawn.get_xdata()) == [0, 1, 2, 4, 8, 16]
    assert list(drawn.get_ydata()) == [score.accuracy for score in scores if score]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert {round(s.low, 9) for s in scores if s} | {round(s.high, 9) for s in scores if s} == {
        round(y, 9) for y in band
    }
    (control,) = [line for line in figure.axes[0].lines if line.get_label() == "control"]
    repeated = VIEW.result("sandbox", "repeated", "new")
    assert repeated is not None
    assert control.get_ydata()[0] == repeated.accuracy


def test_a_control_for_each_point_is_a_line_of_its_own() -> None:
    arms = ("ft-reg", "repeated", "ft-par")
    points = tuple(SweepPoint(index, str(index), float(index), "ft-par", arm) for index, arm in enumerate(arms))
    figure = sweep_figure(VIEW, [Sweep("n", "n", "sandbox", "", False, False, points)])
    assert figure is not None
    (control,) = [line for line in figure.axes[0].lines if line.get_label() == "control"]
    expected = [VIEW.result("sandbox", arm, "new") for arm in arms]
    assert list(control.get_ydata()) == [score.accuracy for score in expected if score]


def test_values_that_are_no_numbers_stand_evenly_and_are_not_joined() -> None:
    (curve,) = [curve for curve in WHOLE.sweeps if curve.name == "LoRA"]
    assert positions(curve) == [0, 1, 2, 3]
    figure = sweep_figure(VIEW, [curve])
    assert figure is not None
    (drawn,) = [line for line in figure.axes[0].lines if line.get_label() == "new"]
    assert drawn.get_linestyle() == "None"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["4", "16", "64", "full"]


def test_a_mapping_of_one_key_counts_as_its_number() -> None:
    values: list[Any] = [{}, {"paraphrase": 4}, {"paraphrase": 16}]
    points = tuple(SweepPoint(value, str(value), None, "ft-par") for value in values)
    assert numbers_of(Sweep("n", "augment.styles", "m", "", False, False, points)) == [0, 4, 16]
    mixed = (*points, SweepPoint({"permute": 4}, "", None, "ft-par"))
    assert numbers_of(Sweep("n", "augment.styles", "m", "", False, False, mixed)) == [None] * 4


@pytest.mark.parametrize(
    ("x", "text"), [(1e-5, "1e-5"), (5e-4, "5e-4"), (0.25, "0.25"), (0.0, "0"), (16.0, "16"), (2.5e6, "2.5e6")]
)
def test_numbers_on_an_axis_take_few_characters(x: float, text: str) -> None:
    assert tick_label(SweepPoint(x, "long label", x, "a"), x) == text


def test_a_logarithmic_axis_with_a_zero_stands_evenly() -> None:
    points = tuple(SweepPoint(x, f"{x:g}", x, "ft-par") for x in (0.0, 0.1, 1.0))
    assert positions(Sweep("n", "k", "sandbox", "", True, False, points)) == [0, 1, 2]
    assert positions(Sweep("n", "k", "sandbox", "", True, False, points[1:])) == [0.1, 1.0]


def test_the_frontier_has_a_point_for_each_value_at_what_was_kept_and_learned() -> None:
    figure = frontier(VIEW)
    assert figure is not None
    (panel,) = figure.axes
    for curve in WHOLE.sweeps:
        results = [(VIEW.point(curve, point, "known"), VIEW.point(curve, point, "new")) for point in curve.points]
        expected = ([kept.accuracy for kept, _ in results if kept], [new.accuracy for _, new in results if new])
        drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
        assert (expected in drawn) == curve.frontier
    assert {name for name, (_, _, _, marked, _) in CURVES.items() if marked} == {
        "learning rate",
        "replay",
        "alpha",
        "LoRA",
    }


NEAR = {"plain": (0.973, 0.779), "best": (0.971, 0.989), "again": (0.968, 0.987), "cpt": (0.976, 0.988),
        "best.yaml": (0.990, 0.994), "spaced": (0.949, 0.979), "LoRA": (0.947, 0.984), "EntiGraph": (0.935, 0.989),
        "twice": (0.967, 0.967), "general": (0.961, 0.953)}  # fmt: skip
"""Arms with nearly the same accuracies: arm -> learned, kept."""


@pytest.mark.parametrize("columns", [2, 1])
def test_labels_of_near_arms_cover_neither_each_other_nor_a_point(columns: int) -> None:
    results = [
        replace(result, arm=arm, accuracy=accuracy) for arm, accuracies in NEAR.items()
        for name, accuracy in zip(("new", "known"), accuracies, strict=True)
        if (result := VIEW.result("sandbox", "ft-reg", name)) is not None
    ]  # fmt: skip
    arms = tuple(ArmInfo(arm, "sandbox", "", True) for arm in NEAR)
    figure = frontier(
        View(replace(WHOLE, arms=WHOLE.arms + arms, results=WHOLE.results + tuple(results))), columns=columns
    )
    assert figure is not None
    (panel,) = figure.axes
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = {text.get_text(): Text.get_window_extent(text, renderer) for text in panel.texts}
    (legend,) = figure.legends
    numbers = dict(label.get_text().split("  ") for label in legend.get_texts() if "  " in label.get_text())
    assert set(NEAR) <= set(numbers.values())
    assert set(numbers) <= set(texts)
    points = {arm: panel.transData.transform((kept, learned)) for arm, (learned, kept) in NEAR.items()}
    boxes = list(texts.values())
    assert not [(a, b) for index, a in enumerate(boxes) for b in boxes[:index] if a.overlaps(b)]
    assert not [arm for arm, point in points.items() for box in boxes if box.contains(*point)]


def test_the_table_of_costs_has_tokens_and_work_of_a_seed() -> None:
    seeds = {cost.seed for cost in WHOLE.costs if cost.arm == "ft-par"}
    costs = tuple(
        replace(cost, written_tokens=700, teacher_tokens=3000, work_seconds=12.5)
        if (cost.arm, cost.stage) == ("ft-par", "train")
        else cost
        for cost in WHOLE.costs
    )
    table = cost_table(View(replace(WHOLE, costs=costs)))
    by_name = {line.cells[0].text: dict(zip(table.columns, line.cells, strict=True)) for line in table.lines}
    shown = ["tokens written, a seed", "read by a teacher, a seed", "work of training, a seed"]
    assert [by_name["ft-par"][name].text for name in shown] == ["700", "3,000", "12.5 s"]
    assert len(seeds) > 1
    assert all(by_name["ft-reg"][name].text == "" for name in shown)
    assert not set(shown) & set(cost_table(VIEW).columns)


def test_few_arms_are_named_at_their_points() -> None:
    figure = frontier(VIEW)
    assert figure is not None
    names = {arm.name for arm in VIEW.own_arms("sandbox") if arm.trained and VIEW.result("sandbox", arm.name, "known")}
    assert 2 < len(names) <= 8
    assert names <= {text.get_text() for text in figure.axes[0].texts}


def test_every_arm_on_the_frontier_has_both_intervals_once() -> None:
    figure = frontier(VIEW)
    assert figure is not None
    (panel,) = figure.axes
    drawn = sorted(tuple(map(tuple, segment.tolist())) for part in panel.collections for segment in part.get_segments())
    expected = []
    for arm in {arm.name for arm in VIEW.own_arms("sandbox")} | {
        p.arm for c in WHOLE.sweeps if c.frontier for p in c.points
    }:
        kept, new = VIEW.result("sandbox", arm, "known"), VIEW.result("sandbox", arm, "new")
        if kept and new:
            expected += [((kept.low, new.accuracy), (kept.high, new.accuracy))]
            expected += [((kept.accuracy, new.low), (kept.accuracy, new.high))]
    assert set(drawn) == set(expected)
    on_curves = [p.arm for c in WHOLE.sweeps if c.frontier for p in c.points if VIEW.point(c, p, "known")]
    assert len(drawn) == len(expected) + 2 * (len(on_curves) - len(set(on_curves)))  # one cross a curve


def test_each_k_of_each_arm_is_drawn_and_the_chosen_is_ringed() -> None:
    figure = accuracy_by_k(VIEW)
    assert figure is not None
    (panel,) = figure.axes
    base = VIEW.every_k("sandbox", "base", "new")
    assert ([0, 1, 2, 3, 4, 5], [score.accuracy for score in base]) in lines_of(panel, "o")
    rings = [line for line in panel.lines if line.get_markersize() == 11]
    assert [list(ring.get_xdata()) for ring in rings] == [[1], [1], [1]]


def test_flips_are_as_long_as_their_counts() -> None:
    figure = flips(VIEW)
    assert figure is not None
    widths = sorted(round(patch.get_width()) for patch in figure.axes[0].patches)
    contrasts = [score.to_base for score in VIEW.shown("sandbox", "new") if score.to_base is not None]
    assert widths == sorted([c.wrong_to_right for c in contrasts] + [-c.right_to_wrong for c in contrasts])


def test_relative_gains_are_the_contrasts_shares() -> None:
    figure = relative_gains(VIEW)
    assert figure is not None
    expected = [s.to_base.relative for s in VIEW.shown("sandbox", "reverse") if s.to_base is not None]
    assert [patch.get_width() for patch in figure.axes[1].patches] == pytest.approx(expected)


def test_the_strip_is_dark_over_as_many_questions_as_every_seed_had_right() -> None:
    figure = question_strip(VIEW, columns=3)
    assert figure is not None
    items = [item for item in WHOLE.questions if item.question_set == "new"]
    dark = sum(item.fraction_correct["ft-par"] == 1 for item in items)
    row = [label.get_text() for label in figure.axes[0].get_yticklabels()].index("ft-par")
    drawn = 0.0
    for patch in figure.axes[0].patches:
        box = patch.get_path().get_extents(patch.get_patch_transform())
        if patch.get_alpha() == 1.0 and abs((box.y0 + box.y1) / 2 - row) < 0.1:
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            drawn += float((corners[:, :, 0].max(1) - corners[:, :, 0].min(1)).sum())
    assert drawn == dark


def test_time_is_shared_out_among_the_arms_that_used_a_stage() -> None:
    figure = time_by_arm(VIEW)
    assert figure is not None
    total = sum(patch.get_width() for patch in figure.axes[0].patches)
    assert total == pytest.approx(sum(cost.seconds / cost.shared_by for cost in WHOLE.costs))


@pytest.mark.parametrize("draw", EVERY)
def test_without_anything_to_draw_there_is_no_figure(draw: Any) -> None:
    assert draw(View(make_small(results=()))) is None


@pytest.mark.parametrize("draw", [accuracy_by_arm, relative_gains, accuracy_by_k, flips])
def test_several_models_have_panels_of_their_own(draw: Any) -> None:
    figure = draw(View(make_paper_study()), columns=1)
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert len(titles) == 18
    assert sum(title.startswith("Llama-2-7B\n") for title in titles) == 6


def test_exposures_of_curve_arms_are_left_out_and_bins_named_by_their_bounds() -> None:
    extra = ExposureBin("sandbox", "replay=0", "new", 0.0, 1.0, 5, 0.5)
    figure = exposures(View(replace(WHOLE, exposures=(*WHOLE.exposures, extra))))
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert (
        labels == [exposures_label(bin) for bin in WHOLE.exposures[:5]] == ["under 1", "1", "2 – 3", "4 – 7", "8 – 15"]
    )


def test_stems_of_files_hold_no_paths_and_are_taken_once() -> None:
    taken: list[str] = []
    for name in ("../../etc/passwd", "../../etc/passwd", "", "漢字"):
        taken.append(slug(name, taken))
    assert taken == ["etc-passwd", "etc-passwd-2", "unnamed", "unnamed-2"]
