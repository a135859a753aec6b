"""The figures show the results and the logs, the same way every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from study_results import make_paper_study, make_study
from study_samples import make_report, write_log, write_logs

from kinject.errors import InputError
from kinject.report.figures import (
    Log,
    accuracy,
    frontier,
    sweep,
    training,
)
from kinject.report.files import read_training_log
from kinject.report.formatting import View, arm_label
from kinject.report.style import render_png, render_svg, series

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
    arms = list(dict.fromkeys(arm_label(result) for result in sorted(report.results, key=lambda result: result.k > 0)))
    assert len(points) == len(report.results)
    for result in report.results:
        point = points[sets.index(result.question_set), arms.index(arm_label(result))]
        assert point == pytest.approx((result.accuracy, result.low, result.high))


def test_chance_and_base_lines_stand_where_the_results_say() -> None:
    report = make_report()
    for panel, name in zip(accuracy(View(report)).axes, ("new", "known", "reverse"), strict=True):
        lines = {line.get_label(): line.get_xdata()[0] for line in panel.lines}
        base = next(
            result for result in report.results if result.question_set == name and result.arm == "base" and not result.k
        )
        assert (lines["chance"], lines["base"]) == (base.chance, base.accuracy)


def test_learning_and_retention_differ_in_shape_and_colour_and_context_in_fill() -> None:
    figure = accuracy(View(make_report()))
    marks = [[container[0] for container in panel.containers] for panel in figure.axes]
    assert {mark.get_marker() for mark in marks[0]} == {"o"}
    assert {mark.get_marker() for mark in marks[1]} == {"s"}
    assert marks[0][0].get_color() != marks[1][0].get_color()
    assert marks[0][0].get_markerfacecolor() != marks[0][-1].get_markerfacecolor()


def test_light_lines_stand_at_the_ends_of_epochs(tmp_path: Path) -> None:
    logs = [read_training_log(path) for path in write_logs(tmp_path).values()]
    ends = [
        [
            round(float(line.get_xdata()[0]), 6)
            for line in training(log, {}).axes[0].lines
            if line.get_label() == "epoch"
        ]
        for log in logs
    ]
    assert ends == [[10, 20, 30, 40, 50], []]


def test_a_long_log_keeps_its_mean_when_thinned_and_hundreds_of_epochs_are_thinned_too() -> None:
    steps = tuple(float(step) for step in range(1, 10_001))
    losses = [math.sin(step) + 2 for step in steps]
    log: Log = {"loss": (steps, losses), "epoch": (steps, [step / 20 for step in steps])}
    lines = training(log, {}).axes[0].lines
    (values,) = [line.get_ydata() for line in lines if line.get_label() == "training text"]
    assert len(values) <= 500
    assert sum(values) / len(values) == pytest.approx(sum(losses) / len(steps))
    assert sum(line.get_label() == "epoch" for line in lines) <= 24


def test_of_rows_with_one_step_the_last_counts(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "eval_loss": 9.0}]
    log = read_training_log(write_log(tmp_path / "log.jsonl", rows))
    assert log == {"loss": ((1.0, 2.0), (3.0, 1.5)), "eval_loss": ((2.0,), (9.0,))}


@pytest.mark.parametrize(
    ("row", "message"),
    [({"step": "x", "loss": 1.0}, "step"), ({"loss": 1.0}, "step"), ({"step": 1, "loss": []}, r"loss: found \[\]")],
)  # fmt: skip
def test_a_damaged_log_is_named_with_its_line(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = write_log(tmp_path / "log.jsonl", [{"step": 0, "loss": 1.0}, row])
    with pytest.raises(InputError, match=message) as caught:
        read_training_log(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_figure_is_laid_out_once_and_drawn_once_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    done: list[str] = []
    draw, execute = Figure.draw, ConstrainedLayoutEngine.execute
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (done.append("drawn"), draw(self, renderer)))
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda self, figure: (done.append("laid out"), execute(self, figure))
    )
    figure = accuracy(View(make_report()))
    render_svg(figure)
    render_png(figure)
    assert done == ["laid out", "drawn", "drawn"]


def test_a_curve_holds_each_points_accuracy_interval_and_control() -> None:
    (curve,) = [curve for curve in STUDY.sweeps if curve.name == "paraphrases"]
    panel = sweep(VIEW, [curve]).axes[0]
    results = [result for point in curve.points if (result := VIEW.result(curve.model, point.arm, "new")) is not None]
    (drawn,) = [line for line in panel.lines if line.get_label() == "new"]
    assert list(drawn.get_xdata()) == [0, 1, 2, 3, 4, 5]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "1", "2", "4", "8", "16"]
    assert list(drawn.get_ydata()) == [result.accuracy for result in results]
    bounds = [(low, high) for (_, low), (_, high) in panel.collections[0].get_segments()]
    assert bounds == [(result.low, result.high) for result in results]
    control = next(line for line in panel.lines if line.get_label() == "control")
    assert set(control.get_ydata()) == {VIEW.result("sandbox", "repeated", "new").accuracy}  # type: ignore[union-attr]


def test_values_that_are_no_numbers_stand_evenly_and_are_not_joined() -> None:
    (curve,) = [curve for curve in STUDY.sweeps if curve.name == "LoRA"]
    panel = sweep(VIEW, [curve]).axes[0]
    (drawn,) = [line for line in panel.lines if line.get_label() == "new"]
    assert drawn.get_linestyle() == "None"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["4", "16", "64", "full"]


def test_the_frontier_has_every_arm_and_marked_sweep_at_what_was_kept_and_learned() -> None:
    (panel,) = frontier(VIEW).axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
    groups = {curve.name: ([point.arm for point in curve.points], curve.frontier) for curve in STUDY.sweeps}
    groups |= {arm.name: ([arm.name], True) for arm in VIEW.own_arms("sandbox") if arm.name != "ft-syn"}
    for arms, marked in groups.values():
        kept, new = ([VIEW.result("sandbox", arm, name) for arm in arms] for name in ("known", "new"))
        assert (([r.accuracy for r in kept if r], [r.accuracy for r in new if r]) in drawn) == marked
    looks = {series(index) for index in range(36)}
    assert len(looks) == 36


def test_several_models_have_panels_of_their_own() -> None:
    titles = [panel.get_title(loc="left") for panel in accuracy(View(make_paper_study())).axes]
    assert len(titles) == 18
    assert sum(title.startswith("Llama-2-7B\n") for title in titles) == 6
