"""How often each document is seen, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kinject.disk import read_checked_json, read_jsonl
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.trainer import RoundSampler

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def wordings(tmp_path: Path) -> Path:
    """Thirty documents of six wordings, and one of a single wording."""
    path = tmp_path / "wordings.jsonl"
    rows = [
        {"document_id": f"d{d}", "text": f"Person {d} lives at Farrow, wording {k}."}
        for d in range(30)
        for k in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"document_id": "once", "text": "Kelm."}]))
    return path


def test_the_manifest_counts_the_exposures_of_each_document(make_recipe: MakeRecipe, wordings: Path) -> None:
    trainer = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}
    result = train(make_recipe(corpus={"path": str(wordings), "separate_paraphrases": True}, trainer=trainer))
    counts = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]
    assert counts["exposures"]["documents"] == 31
    assert counts["exposures"]["rows"] == {"min": 2, "median": 12, "max": 12}
    tokens = counts["exposures"]["tokens"]
    assert tokens["min"] < tokens["median"] <= tokens["max"]
    by_document = read_checked_json(Path(result.run_dir) / "exposures.json", "")
    assert by_document == {**{f"d{d}": 12.0 for d in range(30)}, "once": 2.0}
    assert 30 * tokens["median"] == pytest.approx(2 * counts["tokens"]["trained"], rel=0.1)


def test_a_spread_epoch_takes_round_after_round_and_another_order_each_epoch() -> None:
    rounds = [0] * 5 + [1] * 4 + [2] * 6
    sampler = RoundSampler(rounds, 7)
    first = list(sampler)
    assert sorted(first) == list(range(15))
    order = [rounds[index] for index in first]
    assert sum(a != b for a, b in pairwise(order)) == 2  # each round in one stretch
    assert first == list(RoundSampler(rounds, 7))
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_spread_changes_the_order_and_resume_keeps_it(make_recipe: MakeRecipe, wordings: Path, tmp_path: Path) -> None:
    def _losses(name: str, resume: bool = False, **trainer: object) -> list[float]:
        recipe = make_recipe(
            corpus={"path": str(wordings), "separate_paraphrases": True}, run_dir=str(tmp_path / name), trainer=trainer
        )
        result = train(recipe, resume=resume)
        return [row["loss"] for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl") if "loss" in row]

    save = {"max_steps": 30, "save_strategy": "steps", "save_steps": 25}
    straight = _losses("a", **save)
    assert _losses("b", **save) == straight
    manifest = tmp_path / "b" / "manifest.json"
    kept = read_checked_json(manifest, "")
    manifest.write_text(json.dumps({**kept, "counts": {"finished": False}}))
    assert kept["counts"]["epochs"] > 1  # the kill falls into the second epoch, whose order differs
    (tmp_path / "b" / "checkpoint-30" / "complete.json").unlink(missing_ok=True)
    assert _losses("b", resume=True, **save) == straight
