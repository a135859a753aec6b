import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.preview import preview, render_preview
from kinject.recipe import Recipe

Make = Callable[..., Recipe]


def test_a_preview_asks_nothing_writes_nothing_and_needs_no_key(make_recipe: Make, tmp_path: Path) -> None:
    found = preview(make_recipe("https://llm.example.org/v1", generator__price_in=1.0, generator__price_out=2.0))
    assert (found.n_documents, found.n_passages, found.n_asked, found.n_stored, found.n_requests) == (12, 12, 36, 0, 36)
    assert found.cost == (found.tokens_in + 2 * found.tokens_out) / 1e6 > 0
    assert not (tmp_path / "run").exists()
    text = render_preview(found)
    assert "requests              36" in text
    assert "budget" not in text
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


def test_a_preview_tells_where_the_budget_ends_and_what_is_most_expensive(make_recipe: Make, documents: Path) -> None:
    rows = [json.loads(line) for line in documents.read_text().splitlines()]
    rows[7]["text"] = " ".join(3 * [rows[7]["text"]])
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prices = {"generator__price_in": 1.0, "generator__price_out": 2.0}
    found = preview(make_recipe("https://llm.example.org/v1", budget=1.0, **prices))
    assert (found.crossed_at, found.dearest[0].name, len(found.dearest)) == ("", f"{rows[7]['title']} (document 8)", 5)
    assert "enough, by estimate" in render_preview(found)
    costs = []
    for n in range(1, 13):
        documents.write_text("".join(json.dumps(row) + "\n" for row in rows[:n]))
        costs.append(preview(make_recipe("https://llm.example.org/v1", **prices)).cost)
    assert found.dearest[0].cost == pytest.approx(costs[7] - costs[6])
    half = costs[-1] / 2
    first_beyond = next(n for n, cost in enumerate(costs) if cost > half)
    found = preview(make_recipe("https://llm.example.org/v1", budget=half, **prices))
    assert found.crossed_at == f"{rows[first_beyond]['title']} (document {first_beyond + 1})"
    assert f"exceeded at {found.crossed_at}" in render_preview(found)


def test_a_preview_counts_what_the_run_folder_has_cost(make_recipe: Make, serving: Callable[..., Any]) -> None:
    prices = {"generator__price_in": 1.0, "generator__price_out": 2.0, "budget": 1.0}
    recipe = make_recipe(serving().url, **prices)
    paid = augment(recipe).cost
    found = preview(make_recipe(serving().url, styles={"paraphrase": 4}, **prices))
    assert found.spent == pytest.approx(paid)
    assert paid > 0
    almost = preview(make_recipe(serving().url, styles={"paraphrase": 4}, **{**prices, "budget": paid}))
    assert almost.crossed_at.endswith("(document 1)")


def test_the_time_is_in_hours_where_it_is_hours_and_several_files_are_compared(
    make_recipe: Make, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    for n, text in enumerate(texts[:3]):
        (folder / f"{n}.txt").write_text(" ".join([text] * (1 + n)))
    given = {"documents": str(folder), "styles": {"paraphrase": 900}, "generator__requests_per_minute": 10}
    found = preview(make_recipe("https://llm.example.org/v1", **given))
    assert [Path(expense.name).name for expense in found.dearest] == ["2.txt", "1.txt", "0.txt"]
    assert re.search(r"^time +4 h 30 min  by estimate$", render_preview(found), re.MULTILINE)
    assert "tokens  " in render_preview(found)
