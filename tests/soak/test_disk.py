"""Every byte of every file that kinject writes: a bit of it flipped, the file cut there; deleted, emptied, hidden, replaced.

KINJECT_DAMAGES bytes of each file, spread over it (default 200); the rerun must come to the same end or name the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from country import outcome_of_stages, write_study
from damage import Ground, every_byte
from safetensors.torch import load_file

from kinject.augment import augment
from kinject.disk import read_jsonl
from kinject.eval import evaluate
from kinject.recipe import Recipe, read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from kinject.train import train

pytestmark = pytest.mark.soak
N_BYTES = int(os.environ.get("KINJECT_DAMAGES", "200"))
TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")


def _recipe(folder: Path, verb: str, **sections: Any) -> Recipe:
    path = folder / f"{verb}.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(folder / "run"), **sections}))
    return read_recipe(path, verb=verb)


def _rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _augment(folder: Path, model: Path) -> Callable[[], Any]:
    people = create_country(n_known=1, n_new=5).new
    documents = _rows(folder / "documents.jsonl", [{"title": p.name, "text": render_entry(p, 0)} for p in people])
    section = {"documents": documents, "styles": {"tagged": 1, "paraphrase": 2}, "generator": {"kind": "sandbox"}}
    recipe = _recipe(folder, "augment", augment=section)

    def run() -> Any:
        result = augment(recipe)
        return result.asked, result.got, dict(result.refused), result.corpus_path.read_bytes()

    return run


def _eval(folder: Path, model: Path) -> Callable[[], Any]:
    rows = [{"id": f"q{i}", "question": f"Where was {i} born?", "choices": TOWNS, "answer": i % 4} for i in range(4)]
    section = {"models": {"base": str(model)}, "questions": {"new": _rows(folder / "questions.jsonl", rows)}}
    recipe = _recipe(folder, "eval", eval=section)
    return lambda: [(result.n, result.n_correct, result.n_unscored) for result in evaluate(recipe).results]


def _train(folder: Path, model: Path) -> Callable[[], Any]:
    corpus = _rows(folder / "corpus.jsonl", [{"text": f"Person {i} was born in {TOWNS[i % 4]}."} for i in range(12)])
    trainer = {
        "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "max_length": 32, "per_device_train_batch_size": 2,
        "gradient_checkpointing": False, "bf16": False, "logging_steps": 1,
    }  # fmt: skip
    recipe = _recipe(
        folder, "train", model={"path": str(model)}, trainer=trainer,
        corpus={"path": corpus, "cache_dir": str(folder / "run" / "tokens")},
    )  # fmt: skip

    def run() -> Any:
        shutil.rmtree(recipe.run_dir / "model", ignore_errors=True)  # so that the checkpoints are gone on from
        result = train(recipe, resume=True)
        weights = load_file(Path(result.model_dir) / "model.safetensors")
        losses = [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]
        return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}, losses

    return run


def _study(folder: Path, model: Path) -> Callable[[], Any]:
    path = write_study(folder, model, seeds=[0], arms={"ft": {"rag": False}}, cache_dir=str(folder / "run"))
    recipe = read_recipe(path, verb="study")

    return lambda: outcome_of_stages(recipe)


@pytest.mark.parametrize(("make", "n_bytes"), [(_augment, 1.0), (_eval, 0.5), (_train, 0.05), (_study, 0.02)])
def test_no_damage_to_any_file_gives_another_result_or_a_traceback(
    make: Any, n_bytes: float, tmp_path: Path, tiny_model: Path
) -> None:
    ground = Ground(tmp_path / "run", make(tmp_path, tiny_model))
    bad, mended, refused = [], 0, 0
    for path in ground.files():
        damages = list(every_byte(path, 7, max(1, int(N_BYTES * n_bytes))))
        faults, n_mended, n_refused = ground.faults(path, damages)
        bad, mended, refused = bad + faults, mended + n_mended, refused + n_refused
    print(f"{make.__name__[1:]}: {mended} mended, {refused} refused, {len(bad)} neither")
    assert bad == []
