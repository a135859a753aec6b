"""Write figures.json beside this file: what a study's figures draw, as numbers, from simulated answers of two seeds.

    PYTHONPATH=tests/report python tests/goldens/make_figures.py

The answers are drawn by tests/report/study_results.py from Python's own generator. tests/report/test_figures.py holds what
is drawn to the result's numbers; this file holds it to what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import study_results

from kinject.report.figures import accuracy, frontier
from kinject.report.formatting import View

SEEDS = (0, 1)
FIGURES: tuple[Callable[[View], Any], ...] = (accuracy, frontier)
_DIGITS = 9


@contextmanager
def answers_of(seed: int) -> Iterator[None]:
    """While it lasts `study_results` simulates other answers, of `seed`."""
    draw = study_results.draw
    study_results.draw = lambda fraction, n, draw_seed, n_seeds: draw(
        fraction, n, draw_seed + 100_000 * seed, n_seeds
    )
    try:
        yield
    finally:
        study_results.draw = draw


def drawn(seed: int) -> dict[str, list[list[list[float]]]]:
    """Return figure -> panels -> one list of numbers for each thing drawn, rounded to nine digits after the point."""
    with answers_of(seed):
        result = study_results.make_study()
    view = View(result)
    return {of.__name__: [_panel(panel) for panel in of(view).axes] for of in FIGURES}


def _panel(panel: Any) -> list[list[float]]:
    lines = [
        np.column_stack([line.get_xdata(orig=False), line.get_ydata(orig=False)])
        for line in panel.lines
    ]
    patches = [
        np.array(patch.get_bbox().bounds) for patch in panel.patches if hasattr(patch, "get_width")
    ]
    bands = [path.vertices for collection in panel.collections for path in collection.get_paths()]
    return [
        [round(float(value), _DIGITS) for value in np.ravel(part)]
        for part in (*lines, *patches, *bands)
    ]


def main() -> None:
    """Draw and write."""
    gold = {str(seed): drawn(seed) for seed in SEEDS}
    Path(__file__).with_name("figures.json").write_text(json.dumps(gold) + "\n", "utf-8")


if __name__ == "__main__":
    main()
