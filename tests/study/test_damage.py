"""A study's files that the disk has damaged: the same scores, or a line that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from country import outcome_of_stages, write_study
from damage import Ground, sample

from kinject.recipe import read_recipe

pytestmark = pytest.mark.usefixtures("blank_figures")


def test_every_kind_of_file_of_a_damaged_study_is_mended_or_named(tmp_path: Path, tiny_model: Path) -> None:
    recipe = read_recipe(write_study(tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}}), verb="study")

    ground = Ground(tmp_path / "stages", lambda: outcome_of_stages(recipe))
    bad, refused = [], 0
    for pattern in ("train/*/exposures.json", "eval/*/answers.jsonl"):  # the others: tests/soak/test_disk.py
        path = sorted(ground.folder.glob(pattern))[0]
        faults, _, n_refused = ground.faults(path, sample(path, 1, 1, 0)[:1])
        bad, refused = bad + faults, refused + n_refused
    assert bad == []
    assert refused == 2
