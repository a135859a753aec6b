"""The largest batch that fits divides the rows of an update, and a trial trains on the longest rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import kinject.tune as finding
from kinject.errors import InputError
from kinject.recipe import TrainRecipe, read_recipe
from kinject.train.short_run import read_timing
from kinject.tune import find_batch, render_batch

pytestmark = pytest.mark.usefixtures("forked")

MakeRecipe = Callable[..., TrainRecipe]


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> MakeRecipe:
    """A recipe on the tiny model with rows of several lengths; keyword arguments add to its trainer section."""
    rows = [{"text": f"Person {i} was born in Kelm. " * (1 + i % 5)} for i in range(12)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _make(**trainer: Any) -> TrainRecipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)},
            "corpus": {"path": str(tmp_path / "corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
            "trainer": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "max_length": 250,
                        "use_cpu": True, "bf16": False, "max_steps": 3, **trainer},
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return read_recipe(path, verb="train")

    return _make


@pytest.mark.parametrize(
    ("limit", "tried", "batch", "accumulation"),
    [
        (340, [24], 24, 1),
        (300, [24, 12], 12, 2),
        (160, [24, 12, 8, 6], 6, 4),
        (110, [24, 12, 8, 6, 4, 3, 2, 1], 1, 24),
    ],
)
def test_batch_and_accumulation_keep_the_global_batch(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    tried: list[int],
    batch: int,
    accumulation: int,
) -> None:
    def peak(recipe: Any, batch: int, n_batches: int, folder: Path, limit: int) -> int | None:
        assert n_batches == (1 if batch == 24 else 2), "gradients beside a second batch"
        return 100 + 10 * batch if 100 + 10 * batch <= limit else None

    monkeypatch.setattr(finding, "_peak_of", peak)
    found = find_batch(make_recipe(), limit)
    assert (found.batch, found.accumulation, list(found.peaks)) == (batch, accumulation, tried)
    text = render_batch(found)
    assert f"per_device_train_batch_size: {batch}\n" in text
    assert f"gradient_accumulation_steps: {accumulation}   # global batch 24" in text
    with pytest.raises(InputError, match=r"not one row fits .*gradient_checkpointing"):
        find_batch(make_recipe(), 105)


def test_a_trial_trains_on_the_longest_rows_and_is_ended_alone(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe, folder = make_recipe(), tmp_path / "trial"
    peak = finding._peak_of(recipe, 3, 2, folder, None)
    assert peak is not None
    assert peak > 2**20
    longest = sorted(
        len(row["text"])
        for row in map(json.loads, (tmp_path / "corpus.jsonl").read_text().splitlines())
    )
    timing = read_timing(folder)
    assert len(timing) == 2
    written = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert written["trainer"]["gradient_accumulation_steps"] == 2
    assert (
        timing[-1]["learned_tokens"] > 6 * longest[0] / 10
    )  # the two longest kinds of row, not the shortest
    assert not (folder / "model").exists()
    assert finding._peak_of(recipe, 3, 2, tmp_path / "small", 1) is None  # no process is that small


@pytest.mark.parametrize(("device", "resident"), [("cuda", None), ("cpu", 7 * 2**30)])
def test_the_memory_of_a_gpu_is_no_limit_of_the_process(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    resident: int | None,
) -> None:
    limits: list[int | None] = []

    def run(recipe: TrainRecipe, *, longest_rows: bool, limit: int | None) -> int:
        limits.append(limit)
        recipe.run_dir.mkdir()
        peak = {"peak_bytes": 6 * 2**30, "out_of_memory": False}
        (recipe.run_dir / "result.json").write_text(json.dumps(peak))
        return 0

    monkeypatch.setattr(finding, "run_process", run)
    monkeypatch.setattr("kinject.models.choose_device", lambda wanted: device)
    recipe = make_recipe()
    assert finding._peak_of(recipe, 3, 2, tmp_path / "7", 7 * 2**30) == 6 * 2**30
    assert finding._peak_of(recipe, 3, 2, tmp_path / "5", 5 * 2**30) is None
    assert limits[0] == resident


def test_a_trial_that_fails_is_reported_with_its_last_line(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe()
    (tmp_path / "corpus.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(
        InputError,
        match=r"the trial with batch 24 failed: .*corpus\.jsonl:1: .*\(its log: .*batch-24/log\.txt\)",
    ):
        find_batch(recipe, 2**40)
