"""The figures show the results and the logs, the same way every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from study_samples import first, make_evaluation, make_report, make_result, write_log, write_logs

from kinject.errors import DiskError, InputError
from kinject.report.plots.arms import accuracy_by_arm
from kinject.report.plots.style import render_png, render_svg
from kinject.report.training import TrainingLog, loss_figure, read_training_log
from kinject.report.view import View, arm_label


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
    points = drawn_points(accuracy_by_arm(View(report)))
    sets = list(dict.fromkeys(result.question_set for result in report.results))
    arms = list(dict.fromkeys(arm_label(result) for result in sorted(report.results, key=lambda result: result.k > 0)))
    assert len(points) == len(report.results)
    for result in report.results:
        point = points[sets.index(result.question_set), arms.index(arm_label(result))]
        assert point == pytest.approx((result.accuracy, result.low, result.high))


def test_chance_and_base_lines_stand_where_the_results_say() -> None:
    report = make_report()
    for panel, name in zip(accuracy_by_arm(View(report)).axes, ("new", "known", "reverse"), strict=True):
        lines = {line.get_label(): line.get_xdata()[0] for line in panel.lines}
        base = next(
            result for result in report.results if result.question_set == name and result.arm == "base" and not result.k
        )
        assert (lines["chance"], lines["base"]) == (base.chance, base.accuracy)


def test_learning_and_retention_differ_in_shape_and_colour_and_context_in_fill() -> None:
    figure = accuracy_by_arm(View(make_report()))
    marks = [[container[0] for container in panel.containers] for panel in figure.axes]
    assert {mark.get_marker() for mark in marks[0]} == {"o"}
    assert {mark.get_marker() for mark in marks[1]} == {"s"}
    assert marks[0][0].get_color() != marks[1][0].get_color()
    assert marks[0][0].get_markerfacecolor() != marks[0][-1].get_markerfacecolor()


def test_an_accuracy_of_one_whose_bound_rounds_below_it_is_drawn() -> None:
    result = make_result("base", first(10, 10), None, high=1 - 1e-12)
    assert render_png(accuracy_by_arm(View(make_evaluation([result]))))[:4] == b"\x89PNG"


@pytest.mark.parametrize("columns", [1, 3])
def test_forty_arms_and_long_names_fit(columns: int) -> None:
    base = first(10, 40)
    results = [make_result("base", base, None)]
    results += [make_result(f"a model whose name never seems to end {i}", first(i, 40), base) for i in range(40)]
    figure = accuracy_by_arm(View(make_evaluation(results)), columns=columns)
    assert len(drawn_points(figure)) == 41
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert max(map(len, labels)) <= 22
    assert render_svg(figure)


def test_loss_panels_hold_the_log(tmp_path: Path) -> None:
    logs = [read_training_log(name, path) for name, path in write_logs(tmp_path).items()]
    for panel, log in zip(loss_figure(logs).axes, logs, strict=True):
        (line,) = [line for line in panel.lines if line.get_label() == "loss"]
        assert tuple(line.get_xdata()) == log.steps
        assert tuple(line.get_ydata()) == log.losses


def test_light_lines_stand_at_the_ends_of_epochs(tmp_path: Path) -> None:
    logs = [read_training_log(name, path) for name, path in write_logs(tmp_path).items()]
    ends = [
        [round(float(line.get_xdata()[0]), 6) for line in panel.lines if line.get_label() == "epoch"]
        for panel in loss_figure(logs).axes
    ]
    assert ends == [[10, 20, 30, 40, 50], []]


def test_hundreds_of_epochs_are_thinned_and_the_figure_says_so() -> None:
    steps = tuple(float(step) for step in range(1, 301))
    log = TrainingLog("long", steps, tuple(1 / step for step in steps), steps, ())
    (panel,) = loss_figure([log]).axes
    assert sum(line.get_label() == "epoch" for line in panel.lines) <= 24
    assert any("every 13 epochs" in text.get_text() for text in panel.texts)


def test_a_long_log_keeps_its_mean_when_thinned() -> None:
    steps = tuple(float(step) for step in range(1, 10_001))
    log = TrainingLog("long", steps, tuple(math.sin(step) + 2 for step in steps), (), ())
    (panel,) = loss_figure([log]).axes
    values = panel.lines[0].get_ydata()
    assert len(values) <= 500
    assert sum(values) / len(values) == pytest.approx(sum(log.losses) / len(log.losses))


def test_of_many_losses_some_twenty_stand_behind_each(tmp_path: Path) -> None:
    logs = [
        read_training_log(
            f"run {index}", write_log(tmp_path / f"{index}.jsonl", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
        )
        for index in range(45)
    ]
    panels = loss_figure(logs).axes
    assert len(panels) == 45
    assert {len(panel.lines) for panel in panels} <= {15, 16}  # every third of the others, and its own


@pytest.mark.parametrize("losses", [(math.nan, 1.0, math.inf), (0.0, 0.0, 0.0), (-1.0, 5.0, 9.0), (1e-9, 1.0, 1e9)])
def test_losses_that_no_scale_likes_are_still_drawn(losses: tuple[float, ...]) -> None:
    log = TrainingLog("odd", (1.0, 2.0, 3.0), losses, (0.1, 0.2, 0.3), ())
    assert render_svg(loss_figure([log]))


def test_of_rows_with_one_step_the_last_counts(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "eval_loss": 9.0}]
    log = read_training_log("resumed", write_log(tmp_path / "log.jsonl", rows))
    assert (log.steps, log.losses, log.epochs) == ((1.0, 2.0), (3.0, 1.5), ())


@pytest.mark.parametrize(
    ("row", "message"),
    [({"step": "1", "loss": 1.0}, "step: found '1'"), ({"loss": 1.0}, "no step"),
     ({"step": 1, "loss": True}, "loss: found True"), ({"step": 1, "loss": 1.0, "epoch": math.inf}, "epoch: found inf"),
     ({"step": -1, "loss": 1.0}, "step: found -1")],
)  # fmt: skip
def test_a_damaged_log_is_named_with_its_line(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = write_log(tmp_path / "log.jsonl", [{"step": 0, "loss": 1.0}, row])
    with pytest.raises(InputError, match=message) as caught:
        read_training_log("damaged", path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"gone\.jsonl"):
        read_training_log("gone", tmp_path / "gone.jsonl")


def test_drawing_leaves_the_users_matplotlib_settings_alone() -> None:
    import matplotlib

    matplotlib.rcParams["font.size"] = 17
    try:
        before = dict(matplotlib.rcParams)
        first_bytes = render_png(accuracy_by_arm(View(make_report())))
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcdefaults()
    assert render_png(accuracy_by_arm(View(make_report()))) == first_bytes


def test_a_figure_is_laid_out_once_and_drawn_once_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    done: list[str] = []
    draw, execute = Figure.draw, ConstrainedLayoutEngine.execute
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (done.append("drawn"), draw(self, renderer)))
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda self, figure: (done.append("laid out"), execute(self, figure))
    )
    figure = accuracy_by_arm(View(make_report()), columns=2)
    render_svg(figure)
    render_png(figure)
    assert done == ["laid out", "drawn", "drawn"]


def test_a_mark_names_its_numbers_to_a_pointer_and_no_name_becomes_markup() -> None:
    base, right = first(10, 40), first(30, 40)
    results = [make_result("base", base, None), make_result("<b>&'\"", right, base)]
    svg = render_svg(accuracy_by_arm(View(make_evaluation(results))))
    titles = [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]  # noqa: S314
    assert titles[0] == "base on new: 25.0% (95%: 14.2 to 40.2), 40 questions"
    assert titles[1].startswith(
        "<b>&'\" on new: 75.0% (95%: 59.8 to 85.8), 40 questions; to base +50.0 points, p < 0.001"
    )
    assert len(titles) == 2
