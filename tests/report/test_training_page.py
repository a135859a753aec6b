"""The page of a training run shows what was logged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kinject.cli import main
from kinject.errors import InputError
from kinject.report.training import read_training_run, training_figure, write_training_report

QUESTIONS = {"new": "n.jsonl", "known": {"path": "k.jsonl", "role": "retention"}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 20 steps and two epochs with two probes."""
    folder = tmp_path / "a <b> run"
    folder.mkdir()
    rows = [{"step": 0, "epoch": 0, "eval_new_accuracy": 0.25, "eval_known_accuracy": 1.0, "eval_accuracy": 0.625}]
    rows += [
        {"step": step, "epoch": step / 10, "loss": 4 / step, "learning_rate": 1e-3, "grad_norm": 1.0 / step}
        for step in range(1, 21)
    ]
    rows += [{"step": 10, "epoch": 1.0, "eval_loss": 2.5},
             {"step": 10, "epoch": 1.0, "eval_new_accuracy": 0.75, "eval_known_accuracy": 0.9, "eval_accuracy": 0.8}]  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {"finished": True, "steps": 20, "epochs": 2.0, "loss": 0.7, "seconds": 3.0, "notes": ["<script>"],
              "tokens": {"source": 1000, "trained": 990, "masked": 10, "truncated": 0, "dropped": 0}}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({
        "format_version": 1, "stage": "train", "recipe": {"probes": {"questions": QUESTIONS}}, "counts": counts,
        "command": ["kinject", "train", "r.yaml"], "inputs": {}}))  # fmt: skip
    return folder


def test_the_panels_draw_what_was_logged_with_epochs_marked(run_dir: Path) -> None:
    figure = training_figure(read_training_run(run_dir))
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == ["loss", "learning rate", "gradient norm", "probe accuracy"]
    lines = {line.get_label(): line for line in figure.axes[3].lines}
    assert list(lines["new: to be learned"].get_xydata()[:, 1]) == [0.25, 0.75]
    assert list(lines["known: to be kept"].get_xydata()[:, 1]) == [1.0, 0.9]
    assert lines["new: to be learned"].get_color() != lines["known: to be kept"].get_color()
    for panel in figure.axes:
        assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "epoch"] == pytest.approx([10.0])
    loss = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert loss["training text"] == [4 / step for step in range(1, 21)]
    assert loss["held-out text"] == [2.5]
    legends = [
        [text.get_text() for text in panel.get_legend().get_texts()] for panel in (figure.axes[0], figure.axes[3])
    ]
    assert legends == [["training text", "held-out text"], ["new: to be learned", "known: to be kept"]]


def test_the_page_holds_the_numbers_and_escapes_the_rest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = write_training_report(run_dir).read_text("utf-8")
    for text in (
        "75.0%",
        "90.0%",
        "2.500",
        "tokens in an epoch: trained",
        "990",
        "kinject train r.yaml",
        "&lt;script&gt;",
    ):
        assert text in page
    assert page.count("<script") == 1  # kinject's own
    assert (
        "20 steps in 3 seconds; the training loss went from 4.00 to 0.20; new (to be learned) from 25.0% to 75.0%"
        in page
    )
    assert "a &lt;b&gt; run" in page
    assert (run_dir / "figures" / "training.png").read_bytes()[:4] == b"\x89PNG"
    before = page
    assert main(["report", str(run_dir)]) == 0
    assert str(run_dir / "report.html") in capsys.readouterr().out
    assert (run_dir / "report.html").read_text("utf-8") == before


def test_a_run_that_logged_nothing_has_a_page_without_figures(run_dir: Path) -> None:
    (run_dir / "log.jsonl").write_text("")
    assert "<svg" not in write_training_report(run_dir).read_text("utf-8")


def test_a_folder_without_a_training_run_is_refused(tmp_path: Path, write: Callable[[str, str], Path]) -> None:
    with pytest.raises(InputError, match="holds no training run"):
        write_training_report(tmp_path)


def test_a_loss_that_is_not_finite_is_a_gap_that_the_page_names(run_dir: Path) -> None:
    """log.jsonl holds null for it; 0 or a line across the gap would be another run."""
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("step") in (7, 8) and "loss" in row:
            row |= {"loss": None, "grad_norm": None}
        if "eval_loss" in row:
            row["eval_loss"] = None
    (run_dir / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = training_figure(read_training_run(run_dir))
    loss = list({line.get_label(): line for line in figure.axes[0].lines}["training text"].get_ydata())
    assert [math.isnan(value) for value in loss] == [step in (7, 8) for step in range(1, 21)]
    page = write_training_report(run_dir).read_text("utf-8")
    assert "The loss is not finite at 2 of 20 logged steps (7, 8): gaps in the curve." in page
    assert "not finite" in page.partition("Evaluations")[2].partition("</table>")[0]
    assert "This run is not finished." not in page
