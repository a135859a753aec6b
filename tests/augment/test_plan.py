import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment, preview, render_preview
from kinject.augment.checks.judge import N_TRIALS
from kinject.recipe import Recipe

Make = Callable[..., Recipe]


def test_a_preview_asks_nothing_writes_nothing_and_needs_no_key(make_recipe: Make, tmp_path: Path) -> None:
    found = preview(make_recipe("https://llm.example.org/v1", generator__price_in=1.0, generator__price_out=2.0))
    assert (found.n_documents, found.n_passages, found.n_asked, found.n_stored, found.n_requests) == (12, 12, 36, 0, 36)
    assert found.cost == (found.tokens_in + 2 * found.tokens_out) / 1e6 > 0
    assert not (tmp_path / "run").exists()
    text = render_preview(found)
    assert "requests              36" in text
    assert found.first[0] in text


def test_what_is_stored_already_is_not_counted_again(make_recipe: Make, serving: Callable[..., Any]) -> None:
    url = serving().url
    augment(make_recipe(url))
    assert preview(make_recipe(url)).n_requests == 0
    found = preview(make_recipe(url, styles={"paraphrase": 4}))
    assert (found.n_stored, found.n_requests) == (36, 12)


def test_a_preview_counts_what_is_stored_up_to_a_damaged_line(make_recipe: Make, serving: Callable[..., Any]) -> None:
    recipe = make_recipe(serving().url)
    augment(recipe)
    variants = recipe.run_dir / "variants.jsonl"
    lines = variants.read_text().splitlines(keepends=True)
    variants.write_text("".join([*lines[:10], '{"id": "no hash"}\n', *lines[10:]]))
    assert preview(recipe).n_stored == 10


def test_preparations_and_verifications_are_requests_too(make_recipe: Make) -> None:
    found = preview(make_recipe(styles={"active_reading": 2, "implications": 1, "permuted": 5}))
    # eight strategies are expected for each document
    assert (found.n_asked, found.n_requests) == (12 * (2 * 8 + 1 + 5), 12 * (2 * 8 + 1) + 12 * 2)


def test_a_style_that_goes_by_facts_is_expected_to_find_one_in_each_sentence(
    make_recipe: Make, documents: Path
) -> None:
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    n_sentences = sum(text.count(". ") + 1 for text in texts)
    found = preview(make_recipe(styles={"atomic_facts": 2}))
    assert (found.n_asked, found.n_requests) == (2 * n_sentences, 2 * n_sentences + 12)


def test_a_judge_is_asked_about_each_rewriting_and_tried_first(make_recipe: Make) -> None:
    judge = {"kind": "sandbox", "price_in": 1.0}
    found, plain = preview(make_recipe(judge=judge)), preview(make_recipe())
    assert found.n_requests == 36 + 36 + 2 * N_TRIALS
    assert found.cost == pytest.approx((found.tokens_in - plain.tokens_in) / 1e6)
    assert augment(make_recipe(judge=judge)).judge is not None
