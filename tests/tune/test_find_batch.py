"""The search finds what trying every batch would find, and the global batch stays what the recipe says."""

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
from kinject.train.short_run import read_timing, run_process
from kinject.tune import BatchTrial, find_batch, largest_that_fits, render_batch

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


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials hold 100 bytes and 10 a row; returns the batches that were tried."""
    tried: list[int] = []

    def _try(self: Any, batch: int) -> BatchTrial:
        tried.append(batch)
        return BatchTrial(batch, 100 + 10 * batch, False)

    monkeypatch.setattr(finding._Trials, "_try", _try)
    return tried


def test_the_search_agrees_with_trying_every_batch() -> None:
    for most in range(1, 40):
        for room in range(45):
            tried: list[int] = []

            def _fits(batch: int, room: int = room, tried: list[int] = tried) -> bool:
                tried.append(batch)
                return batch <= room

            assert largest_that_fits(_fits, most) == max((b for b in range(1, most + 1) if b <= room), default=0)
            assert len(set(tried)) == len(tried) <= 2 * most.bit_length()
            assert max(tried) <= most


@pytest.mark.parametrize(
    ("limit", "largest", "batch", "accumulation"),
    [(340, 24, 24, 1), (300, 20, 12, 2), (160, 6, 6, 4), (155, 5, 4, 6), (110, 1, 1, 24)],
)
def test_batch_and_accumulation_keep_the_global_batch(
    make_recipe: MakeRecipe, memory: list[int], limit: int, largest: int, batch: int, accumulation: int
) -> None:
    found = find_batch(make_recipe(), limit, None)
    assert (found.largest, found.batch, found.accumulation) == (largest, batch, accumulation)
    assert found.global_batch == 24
    said = render_batch(found)
    assert f"per_device_train_batch_size: {batch}\n" in said
    assert f"gradient_accumulation_steps: {accumulation} " in said


def test_trials_are_kept_and_serve_another_limit(make_recipe: MakeRecipe, memory: list[int]) -> None:
    find_batch(make_recipe(), 300, None)
    first = len(memory)
    find_batch(make_recipe(), 300, None)
    assert len(memory) == first
    find_batch(make_recipe(), 160, None)  # between 4 and 8: 6 and 7 are new
    assert memory[first:] == [6, 7]
    find_batch(
        make_recipe(per_device_train_batch_size=6, gradient_accumulation_steps=4), 160, None
    )  # the lines it told
    assert memory[first:] == [6, 7]
    find_batch(make_recipe(max_length=100), 300, None)  # another recipe: nothing is known
    assert len(memory) == 2 * first + 2


def test_a_trial_that_was_ended_at_a_limit_is_done_again_with_a_higher_one(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [2]
    monkeypatch.setattr(
        finding._Trials, "_try", lambda self, batch: BatchTrial(batch, 1 if batch <= room[0] else None, False)
    )
    assert find_batch(make_recipe(), 100, None).largest == 2
    room[0] = 24
    assert find_batch(make_recipe(), 200, None).largest == 24


def test_what_does_not_fit_at_all_is_told_with_a_cure(make_recipe: MakeRecipe, memory: list[int]) -> None:
    with pytest.raises(InputError, match=r"not one row fits .*gradient_checkpointing"):
        find_batch(make_recipe(), 105, None)


def test_a_trial_over_the_limit_is_ended_alone(make_recipe: MakeRecipe) -> None:
    with pytest.raises(InputError, match="not one row fits"):
        find_batch(make_recipe(), 1, None)  # no process is that small


def test_a_trial_trains_the_longest_rows_and_records_its_peak(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    folder = tmp_path / "trial"
    short = finding._Trials(recipe, tmp_path / "trials", "cpu", None).trial_recipe(3, folder)
    assert run_process(short, longest_rows=True) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["peak_bytes"] > 2**20
    assert not result["out_of_memory"]
    longest = sorted(len(row["text"]) for row in map(json.loads, (tmp_path / "corpus.jsonl").read_text().splitlines()))
    timing = read_timing(folder)
    assert len(timing) == 2
    assert timing[-1]["learned_tokens"] > 6 * longest[0] / 10  # the two longest kinds of row, not the shortest
    assert not (folder / "model").exists()


def test_a_trial_that_fails_is_reported_with_its_last_line(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    (tmp_path / "corpus.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(
        InputError, match=r"the trial with batch 1 failed: .*corpus\.jsonl:1: .*\(its log: .*batch-1/log\.txt\)"
    ):
        find_batch(recipe, 2**40, 1)
