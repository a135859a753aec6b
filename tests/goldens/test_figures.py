"""What a study's figures draw is what it was (figures.json), to nine digits, for two seeds of simulated answers."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import study_results
from make_figures import FIGURES, SEEDS, answers_of, drawn

GOLD = json.loads(Path(__file__).with_name("figures.json").read_text("utf-8"))
ABOUT = f"drawn with matplotlib {metadata.version('matplotlib')}; where the change is right, run tests/goldens/make_figures.py"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_figure_draws_the_numbers_it_drew(seed: int) -> None:
    figures, wanted = drawn(seed), GOLD[str(seed)]
    assert set(figures) == set(wanted) >= {of.__name__ for of in FIGURES}
    for name, panels in wanted.items():
        assert [len(panel) for panel in figures[name]] == [len(panel) for panel in panels], (
            f"{name}: {ABOUT}"
        )
        for panel, parts in zip(figures[name], panels, strict=True):
            for part, numbers in zip(panel, parts, strict=True):
                assert part == pytest.approx(numbers, abs=2e-9, nan_ok=True), f"{name}: {ABOUT}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_stored_accuracies_are_right_answers_over_questions(seed: int) -> None:
    """Counted here from the simulated answers: the base and each trained arm without context, on the first set."""
    n_right = []
    with answers_of(seed):
        for arm, (_, accuracies) in study_results.ARMS.items():
            index = list(study_results.ARMS).index(arm)
            right = study_results.draw(accuracies[0], 300, index, 1 if arm == "base" else 3)
            n_right.append(sum(map(sum, right)) / len(right) / 300)
    panel = GOLD[str(seed)]["accuracy"][0]
    points: dict[float, float] = {}
    for part in panel:
        if len(part) == 2:  # the accuracy, then the ends of its interval
            points.setdefault(part[1], part[0])
    assert [points[float(row)] for row in range(len(n_right))] == pytest.approx(n_right, abs=1e-9)
