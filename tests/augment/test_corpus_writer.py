"""A quota for each fact, and an account of which facts got it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.prompts import passage_of
from kinject.disk import read_jsonl
from kinject.language.sentences import sentences
from kinject.recipe import Recipe
from kinject.types import Completion, Message

Make = Callable[..., Recipe]


class Model:
    """Lists the sentences of a passage as its facts, and rewords each."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, messages: list[Message], seed: int) -> Completion:
        task = messages[-1]["content"].rpartition("</passage>")[2]
        if "List the single facts" in task:
            self.asked["facts"] += 1
            facts = sentences(passage_of(messages))
            return Completion("\n".join(f"- {fact}" for fact in facts))
        self.asked["reword"] += 1
        fact = task.split("\n")[3]
        words = fact.rstrip(".").split()
        mark = Random(seed).choices("bcdfghjklm", k=6)
        return Completion(
            f"it is told ({''.join(mark)}) {' '.join(reversed(mark))}: {' '.join(words)}."
        )


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    def install() -> Model:
        made = Model()
        monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_rewriting", made)
        return made

    return install


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_every_listed_fact_gets_its_texts(make_recipe: Make, model: Any, documents: Path) -> None:
    made = model()
    facts = {(row["id"], fact) for row in rows(documents) for fact in sentences(row["text"])}
    result = augment(make_recipe(styles={"atomic_facts": 2}, max_attempts=20))
    assert (result.asked, result.got) == (2 * len(facts), 2 * len(facts))
    counts = Counter((row["document_id"], re.sub(r".*: ", "", row["text"])) for row in rows(result.corpus_path)
                   if row["origin"] == "variant")  # fmt: skip
    assert counts == Counter(dict.fromkeys(facts, 2))
    assert made.asked["facts"] == 12
    made.asked.clear()
    again = augment(make_recipe(styles={"atomic_facts": 2}, max_attempts=20))
    assert (again.got, made.asked) == (result.got, {})
    more = augment(make_recipe(styles={"atomic_facts": 3}, max_attempts=20))
    assert more.got == 3 * len(facts)
    assert made.asked["facts"] == 0


def test_a_rewording_that_loses_the_number_of_its_fact_is_refused(
    make_recipe: Make, model: Any
) -> None:
    made = model()

    def forget(messages: list[Message], seed: int) -> Completion:
        completion = made(messages, seed)
        return (
            completion
            if "List the single facts" in messages[-1]["content"]
            else Completion(re.sub(r"19\d\d", "then", completion.text))
        )

    sandbox = import_module("kinject.augment.sandbox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "generate_rewriting", forget)
        result = augment(make_recipe(styles={"atomic_facts": 1}, max_attempts=2))
    assert result.asked - result.got == 12
    assert {row["reason"] for row in rows(result.rejected_path)} <= {"number", "date", "duplicate"}
