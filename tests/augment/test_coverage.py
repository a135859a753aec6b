"""Facts of a passage are counted in its accepted texts, and those that too few carry are asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.checks.additions import carried, facts_of, find_missing, source_facts
from kinject.augment.prompts import passage_of
from kinject.disk import read_jsonl, read_manifest
from kinject.recipe import Recipe
from kinject.types import Completion, Message, Usage

Make = Callable[..., Recipe]
PASSAGE = 'Mara Lind built the Falk Bridge on 3 May 1931. It is 120 m long. She called it "my long stride".'


def _rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_the_facts_of_a_passage_and_those_that_a_text_carries() -> None:
    source = source_facts(PASSAGE)
    facts = facts_of(source)
    assert {fact.id for fact in facts} == {
        "number:3", "number:1931", "number:120", "date:05-03", "name:lind", "name:falk bridge", "quotation:my long stride",
    }  # fmt: skip
    text = (
        "The bridge of Lind is one hundred and twenty metres long; Falk is its name, and my long stride she called it."
    )
    assert {fact.id for fact in carried(facts, source, text)} == {
        "number:120", "name:lind", "name:falk bridge", "quotation:my long stride",
    }  # fmt: skip
    missing = find_missing(source, text)
    assert missing is not None
    assert (missing.reason, missing.detail) == ("number", "3 is lost")


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A writer that leaves the year out, unless it is asked for facts by name; returns the prompts."""
    prompts: list[str] = []

    def answer(messages: list[Message], seed: int) -> Completion:
        prompt = messages[-1]["content"]
        prompts.append(prompt)
        sentences = passage_of(messages).removesuffix(".").split(". ")
        if "left some of its facts out" not in prompt:
            sentences = [sentence for sentence in sentences if not any(map(str.isdigit, sentence))]
        kept = ". ".join(
            f"As is told {seed % 1000}x".rstrip("x0123456789 ") + f", {text}" for text in reversed(sentences)
        )
        return Completion(f"{kept}.", usage=Usage(10, 100))

    monkeypatch.setattr("kinject.augment.sandbox.generate_answer", answer)
    return prompts


def test_the_summary_and_the_manifest_show_which_facts_few_texts_carry(
    make_recipe: Make, forgetful: list[str], exact_copies_only: None
) -> None:
    result = augment(make_recipe(styles={"paraphrase": 1}, max_attempts=1))
    assert (result.got, result.coverage.n_topped_up) == (12, 0)
    years = [row for row in _rows(result.coverage.path) if row["fact"].startswith("number:")]
    assert len(years) == 12
    assert all(row["texts"] == 0 for row in years)
    assert result.coverage.n_short >= 12
    summary = render_summary(result)
    assert "stand in fewer than 5 texts, or half of them" in summary
    manifest = read_manifest(result.manifest_path)
    assert manifest is not None
    counts = manifest["counts"]["coverage"]
    assert (counts["short"], counts["facts"]) == (result.coverage.n_short, result.coverage.n_facts)


def test_what_is_short_is_asked_for_by_name_until_the_quota_and_never_twice(
    make_recipe: Make, forgetful: list[str], exact_copies_only: None
) -> None:
    recipe = make_recipe(styles={"paraphrase": 1}, max_attempts=1, coverage=1)
    result = augment(recipe)
    assert result.coverage.n_topped_up == 12
    assert result.coverage.n_short == 0
    named = [prompt for prompt in forgetful if "left some of its facts out" in prompt]
    assert len(named) == 12
    assert all("\n- 19" in prompt or "\n- 18" in prompt or "\n- 20" in prompt for prompt in named)
    assert result.n_rows == 12 * 3
    again = augment(recipe)
    assert (again.n_sent, again.n_rows, again.coverage) == (0, result.n_rows, result.coverage)
