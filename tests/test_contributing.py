"""CONTRIBUTING.md: the walks name functions in the order of their calls, and the code of the examples runs."""

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
from kinject.errors import RecipeError
from kinject.eval import evaluate
from kinject.eval.scoring.answers import read_answers
from kinject.executors import CPU_PRELOAD
from kinject.models import load_model
from kinject.question_formats import FORMATS
from kinject.recipe import read_recipe
from kinject.report.formatting import format_prompt
from small import naive_log_prob

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kinject"
STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)


def _sections() -> dict[str, str]:
    """Return the sections of the page by their headings."""
    sections = re.split(
        r"^### ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE
    )[1:]
    return {section.partition("\n")[0]: section for section in sections}


def _walks() -> dict[str, list[str]]:
    """Return the steps of each walk, `file.py:function`, by its heading."""
    walks = {
        heading: [":".join(step) for step in STEP.findall(text)]
        for heading, text in _sections().items()
    }
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
        paths[verb].write_text(
            yaml.safe_dump({"run_dir": str(tmp_path / verb), **sections}), encoding="utf-8"
        )
    return paths


def test_each_walk_is_the_order_of_calls(recipes: dict[str, Path]) -> None:
    walks = _walks()
    for module in CPU_PRELOAD:  # importing the libraries takes long while calls are noted
        importlib.import_module(module)
    for name, (heading, steps) in zip(
        ("augment", "train", "distill", "eval"), walks.items(), strict=True
    ):
        verb = "train" if name == "distill" else name
        calls = _first_calls(lambda verb=verb, name=name: main([verb, str(recipes[name])]))  # type: ignore[misc]
        assert [step for step in steps if step not in calls] == [], heading
        assert sorted(steps, key=calls.index) == steps, heading


def test_what_where_is_names_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = page.partition("## Where is ...?")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/]+)\.py:([\w.]+)`", table)
    assert len(places) > 8
    for path, name in places:
        found = importlib.import_module("kinject." + path.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_a_question_format_from_outside_is_asked_in_its_own_layout(
    recipes: dict[str, Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "numbered", FORMATS["texts"])  # taken out again after the test
    code = re.search(r"```python\n(.*?)```", _sections()["A question format"], re.DOTALL)
    assert code is not None
    exec(code[1], {})  # noqa: S102 - the code of the page
    recipe = read_recipe(recipes["eval"], ["eval.formats=[numbered]"], "eval")
    report = evaluate(recipe)
    (answer,) = read_answers(recipe.run_dir / "answers.jsonl")
    loaded = load_model(str(tiny_model))
    context = "Where was Arden born?\n1) Lowmere\n2) Kelm\nNumber:"
    expected = [
        naive_log_prob(loaded.model.double(), loaded.tokenizer, context, number)
        for number in (" 1", " 2")
    ]
    assert answer.log_probs == pytest.approx(expected, abs=1e-4)
    assert format_prompt(report.results[0].prompt_format) == "numbers, 0 shots"
    with pytest.raises(RecipeError, match="Did you mean numbered"):
        read_recipe(recipes["eval"], ["eval.formats=[numbred]"], "eval")
