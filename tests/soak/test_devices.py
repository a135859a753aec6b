"""kinject bench by number of devices, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kinject.bench.run import BenchOptions, bench
from kinject.process import core_count
from kinject.recipe import read_recipe

pytestmark = pytest.mark.soak


@pytest.mark.skipif(core_count() < 2, reason="needs two cores")
def test_two_processes_learn_what_one_learns(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"text": f"Person {i} was born in Lowmere in {1900 + i}."} for i in range(48)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run_dir": str(tmp_path / "bench"), "model": {"path": str(tiny_model), "device": "cpu"},
        "corpus": {"path": str(tmp_path / "corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
        "trainer": {"max_length": 64, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 6},
        "bench": {"devices": [2], "built_in": False},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    result, _ = bench(read_recipe(path, verb="bench"), BenchOptions(repeats=1))
    one, two = (next(row for row in result.rows if row.name == name) for name in ("vanilla", "devices-2"))
    assert one.loss is not None
    assert two.loss is not None
    assert two.loss.mean == pytest.approx(one.loss.mean, rel=1e-4)
    assert two.tokens == one.tokens
