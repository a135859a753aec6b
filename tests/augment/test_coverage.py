"""Facts of a passage are counted in its accepted texts, and those that too few carry are asked for by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.checks.additions import carried, facts_of, find_missing, source_facts
from kinject.augment.checks.checker import Checker
from kinject.augment.preview import preview
from kinject.augment.prompts import passage_of
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.recipe import Recipe, read_recipe
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
    text = "The bridge of Lind is one hundred and twenty metres long; Falk is its name, and my long stride she called it."
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
            f"As is told {seed % 1000}x".rstrip("x0123456789 ") + f", {text}"
            for text in reversed(sentences)
        )
        return Completion(f"{kept}.", usage=Usage(10, 100))

    monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_answer", answer)
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
    assert "writer tokens: 100 for each accepted text" in summary
    manifest = read_manifest_fields(result.manifest_path)
    assert manifest is not None
    counts = manifest["counts"]["coverage"]
    assert (counts["short"], counts["facts"], counts["tokens_per_text"]) == (
        result.coverage.n_short, result.coverage.n_facts, 100.0,
    )  # fmt: skip
    variants = [row for row in _rows(result.corpus_path) if row["origin"] == "variant"]
    assert all(
        row["facts"] and not any(fact.startswith("number:") for fact in row["facts"])
        for row in variants
    )


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


def test_texts_that_bring_nothing_are_counted_and_a_rerun_takes_no_copy_of_what_was_asked_for(
    make_recipe: Make,
    forgetful: list[str],
    exact_copies_only: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = source_facts(PASSAGE)
    assert len(facts_of(facts)) == 7
    for text in (
        "Here is the paraphrase that you asked for",
        "This text describes a thing and why it is important.",
    ):
        verdict = Checker(PASSAGE).check(text)
        assert (verdict.reason, "has none of its 7 facts" in verdict.detail) == ("wrapper", True)
        assert Checker("The text tells of the paraphrase of a law.").check(text).accepted
    monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_answer", lambda messages, seed: Completion(
        passage_of(messages).removesuffix(".") + ", they say." if "left some" in messages[-1]["content"] else "It is long ago.",
        usage=Usage(10, 100),
    ))  # fmt: skip
    recipe = make_recipe(styles={"paraphrase": 1}, coverage=3)
    result = augment(recipe)
    assert (result.got, result.coverage.n_without, result.coverage.n_topped_up) == (24, 12, 12)
    assert result.refused == {
        "duplicate": 24
    }  # asked three times, as no one more text brings a fact to three
    assert (result.asked, result.tokens_out) == (24, 4800)
    assert "12  of 24 accepted texts carry none of their passage's facts" in render_summary(result)
    assert augment(recipe).coverage == result.coverage


def test_texts_over_two_documents_that_share_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        "Mara Lind built the Falk Bridge.",
        "Later on, the Falk Bridge burned down.",
        "Nobody lives in Arvika.",
    ]
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps({"id": t[:4], "text": t}) + "\n" for t in texts)
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\naugment: {{documents: {tmp_path}/documents.jsonl, styles: {{related: 1}}, "
        "generator: {kind: sandbox}}\n"
    )
    prompts: list[str] = []

    def answer(messages: list[Message], seed: int) -> Completion:
        prompts.append(messages[-1]["content"])
        return Completion("What Mara Lind had built, the Falk Bridge, is no more since it burned.")

    monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_answer", answer)
    recipe = read_recipe(path, verb="augment")
    assert preview(recipe).n_requests == 1
    result = augment(recipe)
    (prompt,) = prompts
    assert f"{texts[0]}\n\n{texts[1]}" in prompt
    assert "both tell something about Falk Bridge" in prompt
    assert (result.asked, result.got, result.n_rows) == (1, 1, 4)


@pytest.mark.usefixtures("exact_copies_only")
def test_with_a_judge_the_statements_of_a_passage_are_facts(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    second = serving()
    model = {"kind": "openai", "model": "sandbox", "base_url": second.url}
    recipe = make_recipe(styles={"paraphrase": 2, "reversed": 1}, judge=model)
    result = augment(recipe)
    rows = [row for row in _rows(result.coverage.path) if row["fact"].startswith("statement:")]
    texts = {row["text"] for row in rows}
    assert len(rows) == len(texts) > 24
    assert all(row["texts"] == 3 for row in rows)  # the sandbox leaves nothing out
    assert {row["style"] for row in _rows(recipe.run_dir / "notes.jsonl")} == {""}
    row = next(row for row in _rows(result.corpus_path) if row["origin"] == "variant")
    assert "statement:1" in row["facts"]
    n_sent = second.n_requests
    assert augment(recipe).coverage == result.coverage
    assert second.n_requests == n_sent
