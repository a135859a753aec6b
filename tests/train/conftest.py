"""A corpus and a recipe small enough to train in a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.recipe import Recipe, read_recipe

TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty short documents."""
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": f"Person {i} was born in {TOWNS[i % 4]} in {1900 + i}."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_recipe(tmp_path: Path, corpus: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """Return a recipe on the tiny model; keyword arguments replace whole sections, ``trainer`` adds to the defaults."""

    def _make(**sections: Any) -> Recipe:
        trainer = {
            "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 64,
            "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False, "save_strategy": "no",
            "bf16": False, **sections.pop("trainer", {}),
        }  # fmt: skip
        recipe: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)}, "corpus": {"path": str(corpus)},
            **sections, "trainer": trainer,
        }  # fmt: skip
        recipe["corpus"] = {"cache_dir": str(tmp_path / "tokens"), **recipe["corpus"]}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return read_recipe(path, verb="train")

    return _make
