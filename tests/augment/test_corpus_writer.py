"""A quota for each fact, and an account of which facts got it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.prompts import passage_of
from kinject.corpus.passages import sentences
from kinject.disk import read_jsonl, read_manifest
from kinject.recipe import Recipe
from kinject.types import Completion, Message

Make = Callable[..., Recipe]


class Model:
    """Lists the sentences of a passage as its facts, and rewords each; `deaf` is a word of facts that it only refuses."""

    def __init__(self, deaf: str = "", leave_out: str = "") -> None:
        self.deaf, self.leave_out = deaf, leave_out
        self.asked: Counter[str] = Counter()

    def __call__(self, messages: list[Message], seed: int) -> Completion:
        task = messages[-1]["content"].rpartition("</passage>")[2]
        if "List the single facts" in task:
            self.asked["facts"] += 1
            facts = sentences(passage_of(messages))
            return Completion(
                "\n".join(f"- {fact}" for fact in facts if not self.leave_out or self.leave_out not in fact)
            )
        self.asked["reword"] += 1
        fact = task.split("\n")[3]
        if self.deaf and self.deaf in fact:
            return Completion("I'm sorry, I cannot say that.")
        words = fact.rstrip(".").split()
        mark = Random(seed).choices("bcdfghjklm", k=6)
        return Completion(f"it is told ({''.join(mark)}) {' '.join(reversed(mark))}: {' '.join(words)}.")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    def install(**options: str) -> Model:
        made = Model(**options)
        monkeypatch.setattr("kinject.augment.sandbox.generate_rewriting", made)
        return made

    return install


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_every_fact_gets_its_quota_and_the_report_says_so(make_recipe: Make, model: Any, documents: Path) -> None:
    made = model()
    facts = {(row["id"], fact) for row in rows(documents) for fact in sentences(row["text"])}
    result = augment(make_recipe(styles={"atomic_facts": 2}, max_attempts=20))
    assert (result.asked, result.got) == (2 * len(facts), 2 * len(facts))
    assert result.coverage is not None
    assert (result.coverage.n_facts, result.coverage.by_count, result.coverage.n_short) == (
        len(facts),
        {2: len(facts)},
        0,
    )
    listed = rows(result.coverage.path)
    assert {(row["document_id"], row["fact"]) for row in listed} == facts
    counts = Counter((row["document_id"], re.sub(r".*: ", "", row["text"])) for row in rows(result.corpus_path)
                   if row["origin"] == "variant")  # fmt: skip
    assert counts == Counter(dict.fromkeys(facts, 2))
    manifest = read_manifest(result.manifest_path)
    assert manifest is not None
    assert manifest["counts"]["coverage"]["facts_by_rewritings"] == {"2": len(facts)}
    assert f"facts, 2 rewritings each: {len(facts)} in" in render_summary(result)
    assert made.asked["facts"] == 12
    made.asked.clear()
    again = augment(make_recipe(styles={"atomic_facts": 2}, max_attempts=20))
    assert (again.got, made.asked) == (result.got, {})
    more = augment(make_recipe(styles={"atomic_facts": 3}, max_attempts=20))
    assert more.got == 3 * len(facts)
    assert made.asked["facts"] == 0


def test_a_fact_that_gets_none_is_named(make_recipe: Make, model: Any, documents: Path) -> None:
    model(deaf="19")
    n_years = sum("19" in fact for row in rows(documents) for fact in sentences(row["text"]))
    assert n_years == 12
    result = augment(make_recipe(styles={"atomic_facts": 1}, max_attempts=20))
    assert result.coverage is not None
    assert (result.coverage.by_count[0], result.coverage.n_short) == (n_years, n_years)
    assert result.asked - result.got == n_years
    assert all("19" in fact and count == 0 for fact, count in result.coverage.short)
    assert f"{n_years:>8}  with 0 rewritings" in render_summary(result)


def test_a_rewording_that_loses_the_number_of_its_fact_is_refused(make_recipe: Make, model: Any) -> None:
    made = model()

    def forget(messages: list[Message], seed: int) -> Completion:
        completion = made(messages, seed)
        return (
            completion
            if "List the single facts" in messages[-1]["content"]
            else Completion(re.sub(r"19\d\d", "then", completion.text))
        )

    model_of = "kinject.augment.sandbox.generate_rewriting"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_of, forget)
        result = augment(make_recipe(styles={"atomic_facts": 1}, max_attempts=2))
    assert result.coverage is not None
    assert result.coverage.by_count[0] == 12
    assert {row["reason"] for row in rows(result.rejected_path)} <= {"number", "date", "duplicate"}


def test_a_list_of_facts_that_lacks_a_number_of_the_passage_is_told(make_recipe: Make, model: Any) -> None:
    model(leave_out="19")
    result = augment(make_recipe(styles={"atomic_facts": 1}, max_attempts=20))
    assert result.coverage is not None
    assert result.coverage.incomplete == 12
    assert "12  passages whose list of facts is incomplete" in render_summary(result)
    assert all(fault.startswith(("number", "date")) for _, fault in result.coverage.lost)


def test_without_a_style_that_goes_by_facts_there_is_no_report(make_recipe: Make) -> None:
    result = augment(make_recipe(styles={"permuted": 1}))
    assert result.coverage is None
    assert not (result.run_dir / "coverage.jsonl").exists()
