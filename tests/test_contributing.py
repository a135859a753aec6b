"""The walks in CONTRIBUTING.md: each function that they name is called, in their order, by a small run of the command."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from kinject.cli import main
from kinject.executors import CPU_PRELOAD

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kinject"
STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)


def _walks() -> dict[str, list[str]]:
    """Return the steps of each walk, `file.py:function`, by its heading."""
    sections = re.split(r"^### ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    walks = {section.partition("\n")[0]: [":".join(step) for step in STEP.findall(section)] for section in sections}
    return {heading: steps for heading, steps in walks.items() if steps}


def _first_calls(run: Callable[[], Any]) -> list[str]:
    """Return kinject's functions in the order in which `run` first called them, as `file.py:qualified_name`."""
    calls: dict[str, None] = {}

    def _note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            calls.setdefault(f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_qualname}")

    sys.setprofile(_note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(calls)


@pytest.fixture
def recipes(tmp_path: Path, tiny_model: Path, write_rows: Callable[..., Path]) -> dict[str, Path]:
    """A recipe for each command of the walks, over two sandbox documents and a tiny model."""
    lines = (ROOT / "data/sandbox/documents.jsonl").read_text("utf-8").splitlines()[:2]
    documents = write_rows("documents.jsonl", [json.loads(line) for line in lines])
    question = {"question": "Where was Arden born?", "choices": ["Lowmere", "Kelm"], "answer": 0}
    questions = write_rows("questions.jsonl", [{"id": str(n), **question} for n in range(2)])
    values: dict[str, dict[str, Any]] = {
        "augment": {
            "augment": {"documents": str(documents), "styles": {"paraphrase": 1}, "generator": {"kind": "sandbox"}}
        },
        "train": {
            "model": {"path": str(tiny_model), "attention": "eager"},
            "corpus": {"path": str(tmp_path / "augment/corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
            "trainer": {
                "max_steps": 1, "packing": True, "packing_strategy": "bfd_split", "max_length": 64,
                "save_strategy": "no", "bf16": False,
                "per_device_train_batch_size": 1, "gradient_checkpointing": False,
            },
        },
        "eval": {"eval": {"models": {"base": str(tiny_model)}, "questions": {"new": str(questions)}}},
    }  # fmt: skip
    values["distill"] = {**values["train"], "method": "distill"}
    paths = {}
    for verb, sections in values.items():
        paths[verb] = tmp_path / f"{verb}.yaml"
        paths[verb].write_text(yaml.safe_dump({"run_dir": str(tmp_path / verb), **sections}), encoding="utf-8")
    return paths


def test_each_walk_is_the_order_of_calls(recipes: dict[str, Path]) -> None:
    walks = _walks()
    for module in CPU_PRELOAD:  # importing the libraries takes long while calls are noted
        importlib.import_module(module)
    for name, (heading, steps) in zip(("augment", "train", "distill", "eval"), walks.items(), strict=True):
        verb = "train" if name == "distill" else name
        calls = _first_calls(lambda verb=verb, name=name: main([verb, str(recipes[name])]))  # type: ignore[misc]
        assert [step for step in steps if step not in calls] == [], heading
        assert sorted(steps, key=calls.index) == steps, heading
