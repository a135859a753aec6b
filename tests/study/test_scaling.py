"""Scaling: bits by hand, lines as scipy and numpy have them, and the section of the report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from country import write_study
from in_process import InProcess
from study_results import make_small

from kinject.disk import read_json
from kinject.errors import InputError
from kinject.recipe import read_recipe
from kinject.report.files import read_report, write_report
from kinject.report.page import render_markdown_table
from kinject.report.tables import small_tables
from kinject.report.view import View
from kinject.scaling import Scaling, ScalingFit, ScalingPoint
from kinject.stats.matrix import CorrectnessMatrix
from kinject.study.analysis import bits_matrix
from kinject.study.run import count_parameters, run_study

pytestmark = pytest.mark.usefixtures("blank_figures")

SCALING = {"sweep": "steps", "question_sets": ["new", "known"], "values": {"": 16}, "facts": {"known": 80}}
CURVES = {"steps": {"key": "trainer.max_steps", "arm": "ft", "values": [1, 2, 4]}}


def test_bits_are_corrected_for_guessing() -> None:
    sheet = CorrectnessMatrix(np.array([[1.0, 0.0], [1.0, 1.0]]), ("a", "b"), ("d", "e"))
    # of 16 values 4 bits; a right answer of four counts whole, a wrong one takes the third of a guess back
    assert bits_matrix(sheet, [4, 4], [16, 16]).correct.tolist() == [[4.0, pytest.approx(-4 / 3)], [4.0, 4.0]]
    assert bits_matrix(sheet, [2, 2], [8, 2]).correct.tolist() == [[3.0, -1.0], [3.0, 1.0]]
    guesser = CorrectnessMatrix(np.array([[1.0, 0.0, 0.0, 0.0]]), tuple("abcd"), tuple("abcd"))
    assert bits_matrix(guesser, [4] * 4, [24] * 4).mean() == pytest.approx(0.0)
    knows_half = CorrectnessMatrix(
        np.array([[1.0] * 5 + [0.0] * 3]), tuple("abcdefgh"), tuple("abcdefgh")
    )  # 4 known, 1 of 4 guessed
    assert bits_matrix(knows_half, [4] * 8, [32] * 8).mean() == pytest.approx(2.5)


def test_a_study_measures_what_its_models_hold(tmp_path: Path, tiny_model: Path) -> None:
    path = write_study(tmp_path, tiny_model, scaling=SCALING, sweeps=CURVES, arms={"ft": {"rag": False}})
    result, page, _ = run_study(read_recipe(path, (), "study"), InProcess)
    assert result.scaling is not None
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(tiny_model).parameters()
    assert {point.parameters for point in result.scaling.points} == {sum(weight.numel() for weight in weights)}
    new = [point for point in result.scaling.points if point.question_set == "new"]
    (known,) = (point for point in result.scaling.points if point.question_set == "known")
    assert [point.label for point in new] == ["1", "2", "4"]
    for point, n_facts in ((known, 80), *((point, 8) for point in new)):
        assert point.bits == pytest.approx(n_facts * 4 * (point.accuracy - 0.25) / 0.75)
        assert point.low <= point.bits <= point.high
        assert (point.n_facts, point.most_bits) == (n_facts, 4 * n_facts)
        assert point.per_parameter == pytest.approx(point.bits / point.parameters)
    assert known.exposures is None
    for point in new:
        logs = [page.parent / log for _, arm, _, log in result.logs if arm == point.arm]
        assert len(logs) == 2
        read = [list(read_json(log.parent / "exposures.json", "").values()) for log in logs]
        assert point.exposures == pytest.approx(np.mean(read))
    assert [(fit.question_set, fit.along, fit.fixed, fit.n) for fit in result.scaling.fits] == [
        ("new", "exposures", "tiny", 6)
    ]
    pairs = [(math.log2(point.exposures or 0), y) for point in new for y in point.by_seed]
    assert result.scaling.fits[0].slope == pytest.approx(np.polyfit(*zip(*pairs, strict=True), 1)[0])
    assert read_report(page.parent / "report.json").scaling == result.scaling


def _scaling() -> Scaling:
    def point(model: str, parameters: int, accuracy: float, label: str, exposures: float | None) -> ScalingPoint:
        return ScalingPoint(
            model=model, arm="ft", question_set="new", label=label, parameters=parameters, exposures=exposures,
            by_seed=(accuracy - 0.01, accuracy + 0.01), accuracy=accuracy, chance=0.25, n_facts=600, bits=500.0, low=400.0,
            high=610.0, most_bits=2790.0, per_parameter=500 / parameters,
        )  # fmt: skip

    points = [point(f"w{w}", 1000 * w, 0.3 + w / 100, f"{e}", 1.0 * e) for w in (16, 32, 64) for e in (4, 8, 16)]
    return Scaling(tuple(points), (ScalingFit("new", "parameters", "4", 6, 0.12, 0.08, 0.16, -1.2, 0.97),))


def test_the_report_shows_lines_bits_and_what_they_mean(tmp_path: Path) -> None:
    report = make_small(scaling=_scaling())
    text = "\n".join(line for table in small_tables(View(report)) for line in render_markdown_table(table))
    assert "| new | doubling of parameters | 4 (4 exposures) | +12.0 (+8.0 – +16.0) | 6 |" in text
    assert "| new | w16 | 4 (4 exposures) | 16,000 | 46.0% | 500 (400 – 610) | 2,790 | 0.0312 |" in text
    assert "lower bound" in write_report(tmp_path, report).read_text("utf-8")
    assert "bits per parameter" not in write_report(tmp_path, make_small()).read_text("utf-8")


def test_weights_that_are_not_there_cannot_be_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no weights"):
        count_parameters(tmp_path)
