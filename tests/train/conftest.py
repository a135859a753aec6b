"""A corpus and a recipe small enough to train in a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kinject.corpus.packing import PackingConfig, TrainingRow
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.models import load_model
from kinject.recipe import Recipe, read_recipe
from kinject.train.data import CorpusPacker
from kinject.train.trainer import KnowledgeTrainer

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
        path.write_text(yaml.dump(recipe, Dumper=yaml.CSafeDumper, sort_keys=False))
        return read_recipe(path, verb="train")

    return _make


@pytest.fixture
def cpu_scaler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let fp16 run on the CPU: there accelerate makes no scaler, and kinject refuses it.

    Call it with the options of torch's GradScaler; it returns a list of those of the runs, newest last. Each has `order`, the
    calls of its methods and of the clipping.
    """
    begin, clip = KnowledgeTrainer.train, torch.nn.utils.clip_grad_norm_

    class Scaler(torch.amp.GradScaler):
        def __init__(self, **options: Any) -> None:
            super().__init__("cpu", **options)
            self.order: list[str] = []

    def _watch(name: str) -> None:
        call = getattr(torch.amp.GradScaler, name)
        setattr(Scaler, name, lambda self, *a, **k: self.order.append(name) or call(self, *a, **k))

    for name in ("scale", "unscale_", "step", "update"):
        _watch(name)

    def _make(**options: Any) -> list[Any]:
        scalers: list[Any] = []

        def _train(self: KnowledgeTrainer, **arguments: Any) -> Any:
            scalers.append(Scaler(**options))
            self.accelerator.native_amp, self.accelerator.scaler = True, scalers[-1]
            return begin(self, **arguments)

        def _clip(*arguments: Any, **options: Any) -> Any:
            scalers[-1].order.append("clip")
            return clip(*arguments, **options)

        monkeypatch.setattr(import_module("kinject.train.config"), "find_problems", lambda *_: [])
        monkeypatch.setattr(KnowledgeTrainer, "train", _train)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", _clip)
        return scalers

    return _make


@dataclass
class ByHand:
    """A hand-written training loop's material: a model in float64, and batches of training rows as a run reads them."""

    model: Any
    rows: list[TrainingRow]
    batch: int

    def rows_of(self, step: int) -> list[TrainingRow]:
        """The rows of an update, those of all accumulated batches in order."""
        per_epoch = len(self.rows) // self.batch
        start = step % per_epoch * self.batch
        return self.rows[start : start + self.batch]

    def losses(
        self, row: TrainingRow, target: Callable[[Any, Any], Any]
    ) -> list[tuple[list[int], Any]]:
        """Each text of a packed row read alone: (its places in the row, `target` of log-probs and next tokens)."""
        starts = [index for index, position in enumerate(row.position_ids) if position == 0]
        losses = []
        for a, b in zip(starts, [*starts[1:], len(row.input_ids)], strict=True):
            ids = torch.tensor(row.input_ids[a:b])
            logp = self.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            losses.append((list(range(a + 1, b)), target(logp, ids[1:])))
        return losses


@pytest.fixture
def by_hand(tiny_model: Path) -> Callable[[Recipe, int], ByHand]:
    """Return the tiny model and the rows of a recipe whose updates read so many rows in a sequential order."""

    def _make(recipe: Recipe, batch: int) -> ByHand:
        assert recipe.corpus is not None
        loaded = load_model(str(tiny_model))
        packing = "bfd_split" if recipe.trainer.get("packing") else None
        layout = PackingConfig(recipe.trainer["max_length"], packing)
        packer = CorpusPacker(loaded.tokenizer, Tokenization(), layout, recipe.seed)
        rows = list(packer.pack(list(CorpusFile(Path(recipe.corpus.path)))).rows)
        return ByHand(loaded.model.double(), rows, batch)

    return _make
