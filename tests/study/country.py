"""A study small enough for a test: a tiny model, documents of one fact each, questions on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")
CLAIM = {
    "statement": "training helps",
    "test": "difference",
    "arm": "ft",
    "baseline": "base",
    "question_set": "new",
}
"""On the arm ft of a study."""
PEOPLE = ("Arden", "Bryn", "Cael", "Dora", "Edda", "Finn", "Gwen", "Hale")


def write_study(folder: Path, model: Path, **study: Any) -> Path:
    """Write documents, questions, shared recipes and a study over them below `folder`; return the study's recipe."""
    documents = [
        {"id": f"d{i}", "text": f"{name} was born in {TOWNS[i % 4]}."}
        for i, name in enumerate(PEOPLE)
    ]
    questions = [
        {
            "id": f"q{i}",
            "question": f"Where was {name} born?",
            "choices": list(TOWNS),
            "answer": i % 4,
            "document_id": f"d{i}",
        }
        for i, name in enumerate(PEOPLE)
    ]
    _write_rows(folder / "documents.jsonl", documents)
    _write_rows(folder / "new.jsonl", questions)
    _write_rows(folder / "known.jsonl", [{**row, "id": f"k{row['id']}"} for row in questions])
    train = {
        "run_dir": str(folder / "train"), "method": "cpt",
        "model": {"path": str(model), "attention": "eager", "dtype": "float32"},
        "corpus": {"path": str(folder / "documents.jsonl")},
        "trainer": {
            "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01, "max_length": 64, "packing": True,
            "packing_strategy": "bfd_split", "save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False,
            "bf16": False,
        },
    }  # fmt: skip
    augment = {
        "run_dir": str(folder / "augment"),
        "augment": {
            "documents": str(folder / "documents.jsonl"), "styles": {"tagged": 1}, "generator": {"kind": "sandbox"},
        },
    }  # fmt: skip
    evaluate = {
        "run_dir": str(folder / "eval"),
        "eval": {
            "models": {"any": str(model)},
            "questions": {
                "new": str(folder / "new.jsonl"),
                "known": {"path": str(folder / "known.jsonl"), "role": "retention", "retrieval": True},
            },
            "retrieval": {"documents": [str(folder / "documents.jsonl")], "k": [1, 2]},
        },
    }  # fmt: skip
    for name, recipe in (("train", train), ("augment", augment), ("eval", evaluate)):
        _write_yaml(folder / f"{name}.yaml", recipe)
    section: dict[str, Any] = {
        "title": "A small study", "train": str(folder / "train.yaml"), "augment": str(folder / "augment.yaml"),
        "eval": str(folder / "eval.yaml"), "models": {"tiny": str(model)}, "seeds": [0, 1],
        "cache_dir": str(folder / "stages"), "arms": {"ft": {"description": "trained"}},
    }  # fmt: skip
    path = folder / "study.yaml"
    _write_yaml(path, {"run_dir": str(folder / "study"), "study": section | study})
    return path


def _write_yaml(path: Path, value: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
