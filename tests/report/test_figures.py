"""The figures show the results and the logs, the same way every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from study_results import make_paper_study, make_small, make_study
from study_samples import first, make_evaluation, make_report, make_result, write_log, write_logs

from kinject.errors import DiskError, InputError
from kinject.report.figures import (
    accuracy,
    frontier,
    numbers_of,
    positions,
    sweep,
    tick_label,
    training,
)
from kinject.report.runs import read_training_log
from kinject.report.style import render_png, render_svg, series
from kinject.report.view import Series, TrainingLog, View, arm_label, slug
from kinject.results import Sweep, SweepPoint

STUDY = make_study()
VIEW = View(STUDY)


def log_of(steps: tuple[float, ...], losses: tuple[float, ...], **others: Series) -> TrainingLog:
    return TrainingLog("log", {"loss": Series(steps, losses), **others})


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


def test_an_accuracy_of_one_whose_bound_rounds_below_it_is_drawn() -> None:
    result = make_result("base", first(10, 10), None, high=1 - 1e-12)
    assert render_png(accuracy(View(make_evaluation([result]))))[:4] == b"\x89PNG"


@pytest.mark.parametrize("columns", [1, 3])
def test_forty_arms_and_long_names_fit(columns: int) -> None:
    base = first(10, 40)
    results = [make_result("base", base, None)]
    results += [make_result(f"a model whose name never seems to end {i}", first(i, 40), base) for i in range(40)]
    figure = accuracy(View(make_evaluation(results)), columns=columns)
    assert len(drawn_points(figure)) == 41
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert max(map(len, labels)) <= 22
    assert render_svg(figure)


def test_light_lines_stand_at_the_ends_of_epochs(tmp_path: Path) -> None:
    logs = [read_training_log(name, path) for name, path in write_logs(tmp_path).items()]
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
    log = log_of(steps, tuple(math.sin(step) + 2 for step in steps), epoch=Series(steps, tuple(s / 20 for s in steps)))
    lines = training(log, {}).axes[0].lines
    (values,) = [line.get_ydata() for line in lines if line.get_label() == "training text"]
    assert len(values) <= 500
    assert sum(values) / len(values) == pytest.approx(sum(log.loss.values) / len(steps))
    assert sum(line.get_label() == "epoch" for line in lines) <= 24


def test_of_rows_with_one_step_the_last_counts(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "eval_loss": 9.0}]
    log = read_training_log("resumed", write_log(tmp_path / "log.jsonl", rows))
    assert log.loss == Series((1.0, 2.0), (3.0, 1.5))
    assert log.series["eval_loss"] == Series((2.0,), (9.0,))


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
        first_bytes = render_png(accuracy(View(make_report())))
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcdefaults()
    assert render_png(accuracy(View(make_report()))) == first_bytes


def test_a_figure_is_laid_out_once_and_drawn_once_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    done: list[str] = []
    draw, execute = Figure.draw, ConstrainedLayoutEngine.execute
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (done.append("drawn"), draw(self, renderer)))
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda self, figure: (done.append("laid out"), execute(self, figure))
    )
    figure = accuracy(View(make_report()), columns=2)
    render_svg(figure)
    render_png(figure)
    assert done == ["laid out", "drawn", "drawn"]


def test_a_mark_names_its_numbers_to_a_pointer_and_no_name_becomes_markup() -> None:
    base, right = first(10, 40), first(30, 40)
    results = [make_result("base", base, None), make_result("<b>&'\"", right, base)]
    svg = render_svg(accuracy(View(make_evaluation(results))))
    titles = [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]  # noqa: S314
    assert titles[0] == "base on new: 25.0% (95%: 14.2 to 40.2), 40 questions"
    assert titles[1].startswith(
        "<b>&'\" on new: 75.0% (95%: 59.8 to 85.8), 40 questions; to base +50.0 points, p < 0.001"
    )
    assert len(titles) == 2


def test_a_curve_holds_each_points_accuracy_interval_and_control() -> None:
    (curve,) = [curve for curve in STUDY.sweeps if curve.name == "paraphrases"]
    panel = sweep(VIEW, [curve]).axes[0]
    results = [result for point in curve.points if (result := VIEW.point(curve, point, "new")) is not None]
    (drawn,) = [line for line in panel.lines if line.get_label() == "new"]
    assert list(drawn.get_xdata()) == [0, 1, 2, 4, 8, 16]
    assert list(drawn.get_ydata()) == [result.accuracy for result in results]
    bounds = [(low, high) for (_, low), (_, high) in panel.collections[0].get_segments()]
    assert bounds == [(result.low, result.high) for result in results]
    control = next(line for line in panel.lines if line.get_label() == "control")
    assert set(control.get_ydata()) == {VIEW.result("sandbox", "repeated", "new").accuracy}  # type: ignore[union-attr]


def test_values_that_are_no_numbers_stand_evenly_and_are_not_joined() -> None:
    (curve,) = [curve for curve in STUDY.sweeps if curve.name == "LoRA"]
    assert positions(curve) == [0, 1, 2, 3]
    panel = sweep(VIEW, [curve]).axes[0]
    (drawn,) = [line for line in panel.lines if line.get_label() == "new"]
    assert drawn.get_linestyle() == "None"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["4", "16", "64", "full"]


def test_values_of_a_sweep_become_numbers_where_they_can() -> None:
    def of(values: list[Any], *, log_x: bool = False) -> Sweep:
        points = (SweepPoint(v, str(v), v if isinstance(v, float) else None, "ft-par") for v in values)
        return Sweep("n", "k", "sandbox", log_x, False, tuple(points))

    assert numbers_of(of([{}, {"paraphrase": 4}, {"paraphrase": 16}])) == [0, 4, 16]
    assert numbers_of(of([{}, {"paraphrase": 4}, {"permute": 4}])) == [None] * 3
    assert positions(of([0.0, 0.1, 1.0], log_x=True)) == [0, 1, 2]
    assert positions(of([0.1, 1.0], log_x=True)) == [0.1, 1.0]
    texts = {1e-5: "1e-5", 5e-4: "5e-4", 0.25: "0.25", 0.0: "0", 16.0: "16", 2.5e6: "2.5e6"}
    assert {x: tick_label(SweepPoint(x, "long label", x, "a"), x) for x in texts} == texts


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


@pytest.mark.parametrize("draw", [accuracy, frontier])
def test_without_anything_to_draw_there_is_no_figure(draw: Any) -> None:
    assert draw(View(make_small(results=()))) is None


def test_several_models_have_panels_of_their_own() -> None:
    titles = [panel.get_title(loc="left") for panel in accuracy(View(make_paper_study()), columns=1).axes]
    assert len(titles) == 18
    assert sum(title.startswith("Llama-2-7B\n") for title in titles) == 6


def test_stems_of_files_hold_no_paths_and_are_taken_once() -> None:
    taken: list[str] = []
    for name in ("../../etc/passwd", "../../etc/passwd", "", "漢字"):
        taken.append(slug(name, taken))
    assert taken == ["etc-passwd", "etc-passwd-2", "unnamed", "unnamed-2"]
