"""Every problem that the checks of a recipe can yield is yielded by an example of test_conflicts."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from kinject.recipe import Recipe, conflicts, train_conflicts
from kinject.recipe.sections import augment, eval, model, study

Write = Callable[[str, str], Path]
CHECKS = (conflicts, train_conflicts, augment, eval, model, study)
"""The modules whose functions yield problems, or the keys of problems."""


def _examples() -> ModuleType:
    path = Path(__file__).with_name("test_conflicts.py")
    spec = importlib.util.spec_from_file_location("examples_of_conflicts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = _examples()
RECALLED = {"path": "c.jsonl", "validation_corpus": "v.jsonl", "answers": "own"}
TUNED = {"key": "trainer.max_steps", "values": [1], "arm": "a", "question_sets": "new"}
TRAIN: list[tuple[dict[str, Any], str, str]] = [
    ({"method": "recall", "corpus": RECALLED}, "corpus.validation_corpus", "are drawn. Remove it."),
    ({"method": "recall", "corpus": RECALLED}, "corpus.answers", "are drawn. Remove it."),
    ({"method": "recall", "probes": EXAMPLES.PROBES}, "probes", "are drawn. Remove it."),
    ({"trainer": {"hub_revision": "v2"}}, "trainer.hub_revision", "Set trainer.push_to_hub: true"),
    (
        {
            "probes": EXAMPLES.PROBES,
            "trainer": {"eval_strategy": "epoch", "lr_scheduler_type": "greedy"},
        },
        "trainer.metric_for_best_model",
        "trainer.lr_scheduler_type follows it. Allowed: new_accuracy, accuracy.",
    ),
]
STUDY: list[tuple[dict[str, Any], str, str]] = [
    ({"tune": {"r": {**TUNED, "arms": ["b"]}}}, "study.tune.r.arms.0", "found 'b'."),
    ({"validation": {"nw": 0.5}}, "study.validation.nw", "found 'nw'. Did you mean new?"),
    (
        {"arms": {"a": {"overrides": {"trainr.seed": 1}}}},
        "study.arms.a.overrides.trainr.seed",
        "must begin with one of augment, corpus",
    ),
]
"""Examples beside those of test_conflicts: (sections, key, a part of the message)."""


def _yields() -> Iterator[tuple[str, int]]:
    """Yield (file, line) of each `yield` of the checks."""
    for module in CHECKS:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Yield):
                yield str(module.__file__), node.lineno


def _more_examples(write: Write) -> Iterator[tuple[str, Recipe, Any]]:
    for sections, *_ in TRAIN:
        recipe = EXAMPLES._recipe(write, "train", sections)
        yield "train", recipe, EXAMPLES._facts(recipe, {})
    for section, *_ in STUDY:
        yield "study", *EXAMPLES._study(write, section, {})


def test_each_key_that_is_excluded_has_its_own_problem(write: Write) -> None:
    for (verb, recipe, facts), (_, key, message) in zip(
        _more_examples(write), [*TRAIN, *STUDY], strict=True
    ):
        problems = conflicts.find_problems(verb, recipe, facts)
        assert any(item.dotted == key and message in item.message for item in problems), problems


def test_no_problem_lacks_an_example(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_conflicts, "find_spec", lambda name: None)
    files = {module.__file__ for module in CHECKS}
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    found = [*_more_examples(write)]
    for sections, facts, *_ in EXAMPLES.TRAIN:
        recipe = EXAMPLES._recipe(write, "train", sections)
        found.append(("train", recipe, EXAMPLES._facts(recipe, facts)))
    for verb, section, *_ in EXAMPLES.OTHERS:
        found.append((verb, *EXAMPLES._others(write, verb, section)))
    for section, facts, *_ in EXAMPLES.STUDY:
        found.append(("study", *EXAMPLES._study(write, section, facts)))
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for verb, recipe, known in found:
            conflicts.find_problems(verb, recipe, known)
    finally:
        sys.settrace(previous)
    missing = [f"{Path(file).name}:{line}" for file, line in sorted(set(_yields()) - reached)]
    assert missing == []
