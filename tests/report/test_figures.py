"""The figures show the results and the logs, the same way every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine
from study_results import make_paper_study, make_study
from study_samples import make_evaluation, make_report, make_result

from kinject.report.figures import NARROW, accuracy, draw_figure, frontier, series
from kinject.report.formatting import View, arm_label
from kinject.report.result_tables import results_table

STUDY = make_study()
VIEW = View(STUDY)


def drawn_points(figure: Any) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Return (panel, row) -> (accuracy, low, high) as drawn."""
    points = {}
    for index, panel in enumerate(figure.axes):
        for container in panel.containers:
            line, _, (bars,) = container
            ((low, row), (high, _)) = bars.get_segments()[0]
            points[index, int(row)] = (float(line.get_xdata()[0]), float(low), float(high))
    return points


def test_drawn_accuracies_and_intervals_equal_the_results() -> None:
    report = make_report()
    points = drawn_points(accuracy(View(report)))
    sets = list(dict.fromkeys(result.question_set for result in report.results))
    arms = list(
        dict.fromkeys(
            arm_label(result) for result in sorted(report.results, key=lambda result: result.k > 0)
        )
    )
    assert len(points) == len(report.results)
    for result in report.results:
        point = points[sets.index(result.question_set), arms.index(arm_label(result))]
        assert point == pytest.approx((result.accuracy, result.low, result.high))


def test_panels_side_by_side_have_the_rows_that_one_of_them_needs() -> None:
    """Of four sets the last alone is not asked with passages: below it no rows stay empty."""
    report = make_report()
    (name, *_) = (result.question_set for result in report.results)
    of_set = [result for result in report.results if result.question_set == name]
    assert any(result.k for result in of_set)
    results = [replace(result, question_set=f"set {n}") for n in range(3) for result in of_set]
    results += [replace(result, question_set="set 3") for result in of_set if not result.k]
    figure = accuracy(View(replace(report, results=tuple(results))))
    n_without = sum(not result.k for result in of_set)
    n_rows = [round(abs(panel.get_ylim()[0] - panel.get_ylim()[1])) for panel in figure.axes]
    assert n_rows == [len(of_set)] * 3 + [n_without]
    assert len(drawn_points(figure)) == len(results)
    heights = [panel.get_position().height for panel in figure.axes]
    assert heights[3] < heights[0]


def test_chance_and_base_lines_stand_where_the_results_say() -> None:
    report = make_report()
    for panel, name in zip(accuracy(View(report)).axes, ("new", "known", "reverse"), strict=True):
        lines = {line.get_label(): line.get_xdata()[0] for line in panel.lines}
        base = next(
            result
            for result in report.results
            if result.question_set == name and result.arm == "base" and not result.k
        )
        assert (lines["chance"], lines["base"]) == (base.chance, base.accuracy)


def test_written_answers_have_no_line_and_no_number_of_guessing() -> None:
    written = [make_result(arm, [True, False, True], None, chance=0.0) for arm in ("base", "ft")]
    view = View(make_evaluation(written))
    figure = accuracy(view)
    assert "chance" not in [line.get_label() for line in figure.axes[0].lines]
    assert "guessing" not in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "guessing" not in results_table(view).columns


def test_learning_and_retention_differ_in_shape_and_colour_and_context_in_fill() -> None:
    figure = accuracy(View(make_report()))
    marks = [[container[0] for container in panel.containers] for panel in figure.axes]
    assert {mark.get_marker() for mark in marks[0]} == {"o"}
    assert {mark.get_marker() for mark in marks[1]} == {"s"}
    assert marks[0][0].get_color() != marks[1][0].get_color()
    assert marks[0][0].get_markerfacecolor() != marks[0][-1].get_markerfacecolor()


def test_the_frontier_has_every_arm_and_marked_sweep_at_what_was_kept_and_learned() -> None:
    (panel,) = frontier(VIEW).axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
    groups = {
        curve.name: ([point.arm for point in curve.points], curve.frontier)
        for curve in STUDY.sweeps
    }
    groups |= {
        arm.name: ([arm.name], True) for arm in VIEW.own_arms("sandbox") if arm.name != "ft-syn"
    }
    for arms, marked in groups.values():
        kept, new = (
            [VIEW.result("sandbox", arm, name) for arm in arms] for name in ("known", "new")
        )
        assert (
            ([r.accuracy for r in kept if r], [r.accuracy for r in new if r]) in drawn
        ) == marked
    looks = {series(index) for index in range(36)}
    assert len(looks) == 36


@pytest.mark.parametrize(("low", "high"), [(0.41, 0.43), (0.283, 0.289), (0.0, 0.06), (0.0, 1.0)])
def test_ticks_of_the_frontier_name_the_values_at_which_they_stand(low: float, high: float) -> None:
    (panel,) = frontier(VIEW).axes
    panel.set_xlim(low, high)
    ticks = panel.get_xticks()
    names = [panel.xaxis.get_major_formatter()(tick, 0) for tick in ticks]
    assert [float(name.removesuffix("%")) for name in names] == pytest.approx(100 * ticks)
    assert "-0%" not in names


def test_the_frontier_is_of_the_first_set_to_learn_whatever_its_name() -> None:
    renamed = [
        replace(result, question_set=result.question_set.replace("new", "reverse engineering"))
        for result in STUDY.results
    ]
    (panel,) = frontier(View(replace(STUDY, results=tuple(renamed)))).axes
    assert panel.get_ylabel() == "reverse engineering: learned"


def test_several_models_have_panels_of_their_own() -> None:
    titles = [panel.get_title(loc="left") for panel in accuracy(View(make_paper_study())).axes]
    assert len(titles) == 18
    assert sum(title.startswith("Llama-2-7B\n") for title in titles) == 6


def test_a_figure_is_laid_out_once_for_all_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, laid_out = ConstrainedLayoutEngine.execute, []

    def execute_and_count(engine: Any, figure: Any) -> None:
        laid_out.append(figure)
        execute(engine, figure)

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", execute_and_count)
    figure = frontier(VIEW, NARROW)
    draw_figure(tmp_path / "frontier", figure)
    assert laid_out == [figure]
    bottom, top = (figure.axes[0].get_position().y0, figure.axes[0].get_position().y1)
    assert 0.1 < bottom < top < 1  # there is room for the legend and the labels under it
