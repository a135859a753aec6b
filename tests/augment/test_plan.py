import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.preview import preview, render_preview
from kinject.recipe import Recipe

Make = Callable[..., Recipe]


def test_a_preview_asks_nothing_writes_nothing_and_needs_no_key(
    make_recipe: Make, tmp_path: Path
) -> None:
    estimate = preview(make_recipe("https://llm.example.org/v1", generator__price=[1.0, 2.0]))
    assert (
        estimate.n_documents,
        estimate.n_passages,
        estimate.n_asked,
        estimate.n_stored,
        estimate.n_requests,
    ) == (
        12,
        12,
        36,
        0,
        36,
    )
    assert estimate.cost == (estimate.tokens_in + 2 * estimate.tokens_out) / 1e6 > 0
    assert not (tmp_path / "run").exists()
    text = render_preview(estimate)
    assert "requests              36" in text
    assert "budget" not in text


def test_what_is_stored_already_is_not_counted_again(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    url = serving().url
    augment(make_recipe(url))
    assert preview(make_recipe(url)).n_requests == 0
    estimate = preview(make_recipe(url, styles={"paraphrase": 4}))
    assert (estimate.n_stored, estimate.n_requests) == (36, 12)


def test_preparations_and_verifications_are_requests_too(make_recipe: Make) -> None:
    estimate = preview(make_recipe(styles={"active_reading": 2, "implications": 1, "permuted": 5}))
    # eight strategies are expected for each document
    assert (estimate.n_asked, estimate.n_requests) == (
        12 * (2 * 8 + 1 + 5),
        12 * (2 * 8 + 1) + 12 * 2,
    )


def test_a_style_that_goes_by_facts_is_expected_to_find_one_in_each_sentence(
    make_recipe: Make, documents: Path
) -> None:
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    n_sentences = sum(text.count(". ") + 1 for text in texts)
    estimate = preview(make_recipe(styles={"atomic_facts": 2}))
    assert (estimate.n_asked, estimate.n_requests) == (2 * n_sentences, 2 * n_sentences + 12)


def test_a_judge_is_asked_about_each_rewriting_and_tried_first(make_recipe: Make) -> None:
    judge = {"kind": "sandbox", "price": [1.0, 0]}
    estimate, plain = preview(make_recipe(judge=judge)), preview(make_recipe())
    assert estimate.n_requests == 36 + 2 * 36 + 12 + 2 * N_TRIALS
    assert estimate.cost == pytest.approx((estimate.tokens_in - plain.tokens_in) / 1e6)
    assert augment(make_recipe(judge=judge)).judge is not None


def test_a_preview_says_whether_the_budget_is_enough(make_recipe: Make) -> None:
    prices = {"generator__price": [1.0, 2.0]}
    url = "https://llm.example.org/v1"
    estimate = preview(make_recipe(url, budget=1.0, **prices))
    assert "enough, by estimate" in render_preview(estimate)
    short = preview(make_recipe(url, budget=estimate.cost / 2, **prices))
    assert "exceeded: raise augment.budget, or request less" in render_preview(short)


def test_a_preview_tells_what_a_fact_costs(make_recipe: Make) -> None:
    few, many = preview(make_recipe()), preview(make_recipe(styles={"paraphrase": 10}))
    assert few.n_facts == many.n_facts > 12
    assert few.tokens_per_fact is None  # three texts hold no fact five times
    assert many.tokens_per_text is not None
    assert many.tokens_per_fact == pytest.approx(many.tokens_per_text * 12 * 5 / many.n_facts)


def test_a_preview_counts_what_the_run_folder_has_cost(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    prices = {"generator__price": [1.0, 2.0], "budget": 1.0}
    recipe = make_recipe(serving().url, **prices)
    paid = augment(recipe).cost
    estimate = preview(make_recipe(serving().url, styles={"paraphrase": 4}, **prices))
    assert estimate.spent == pytest.approx(paid)
    assert paid > 0
    almost = preview(
        make_recipe(serving().url, styles={"paraphrase": 4}, **{**prices, "budget": paid})
    )
    assert "exceeded" in render_preview(almost)
