"""A study's files that the disk has damaged: the same scores, or a line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from country import write_study
from damage import Ground, sample
from in_process import InProcess

from kinject.errors import InputError
from kinject.recipe import read_recipe
from kinject.study.run import run_study


def test_every_kind_of_file_of_a_damaged_study_is_mended_or_named(tmp_path: Path, tiny_model: Path) -> None:
    recipe = read_recipe(write_study(tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}}), verb="study")

    def run() -> Any:
        for name in ("manifest.json", "report.html"):  # so that it is made anew from what the stages hold
            (recipe.run_dir / name).unlink(missing_ok=True)
        result, _, _ = run_study(recipe, InProcess)
        if result.failures:
            raise InputError(result.failures[0].message)
        return [(score.arm, score.question_set, score.accuracy, score.n) for score in result.scores], result.exposures

    ground = Ground(tmp_path / "stages", run)
    bad, refused = [], 0
    for pattern in ("train/*/exposures.json", "eval/*/answers.jsonl"):  # the others: tests/soak/test_disk.py
        path = sorted(ground.folder.glob(pattern))[0]
        found, _, n_refused = ground.faults(path, sample(path, 1, 1, 0)[:1])
        bad, refused = bad + found, refused + n_refused
    assert bad == []
    assert refused == 2
