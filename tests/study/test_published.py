"""What a paper printed, beside what a study measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.recipe import read_recipe
from kinject.recipe.sections import ClaimSection
from kinject.results import ArmResult
from kinject.stats.intervals import Bounded, difference_bounds, wilson
from kinject.study.analysis import PublishedRow, beside_published, published_by

ROOT = Path(__file__).parents[2]
ROW = {
    "model": "a-hub/tiny", "arm": "ft", "question_set": "new", "shots": 0, "accuracy": 0.4, "n": 250,
    "source": "a paper, table 9",
}  # fmt: skip


def result(**changes: object) -> ArmResult:
    fields: dict[str, object] = {
        "model": "tiny", "arm": "ft", "question_set": "new", "role": "learning", "format": "texts",
        "shots": 0, "k": 0, "n": 8, "by_seed": (0.5,), "accuracy": 0.5, "low": 0.2, "high": 0.8,
        "interval": "Wilson", "chance": 0.25, "to_base": None,
    }  # fmt: skip
    return ArmResult(**(fields | changes))  # type: ignore[arg-type]


def test_the_interval_of_a_difference_is_newcombes_printed_one():
    # Newcombe 1998, table II: 56 of 70 and 48 of 80, method 10.
    first, second = (Bounded(x / n, *wilson(x / n, n)) for x, n in ((56, 70), (48, 80)))
    assert difference_bounds(first, second) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = difference_bounds(second, first)
    assert (-high, -low) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_a_published_accuracy_stands_beside_the_same_arm_shots_and_k_in_each_format():
    rows = [
        PublishedRow(**ROW),
        PublishedRow(**ROW | {"arm": "ft+rag", "accuracy": 0.6}),
        PublishedRow(**ROW | {"arm": "ft+rag", "accuracy": 0.7, "k": 1}),
    ]
    results = [
        result(), result(format="letters", accuracy=0.45), result(format="texts-no-question"),
        result(shots=5), result(arm="base"), result(subject="one of them"), result(model="other"),
        result(k=1, accuracy=0.55), result(k=3, accuracy=0.65, chosen_k=True),
    ]  # fmt: skip
    found = beside_published(rows, results, {"tiny": "a-hub/tiny", "other": "a-hub/other"})
    assert [(item.arm, item.k, item.format, item.measured) for item in found] == [
        ("ft", 0, "texts", 0.5), ("ft", 0, "letters", 0.45), ("ft+rag", 3, "texts", 0.65), ("ft+rag", 1, "texts", 0.55),
    ]  # fmt: skip
    assert {item.model for item in found} == {"tiny"}
    published = Bounded(0.4, *wilson(0.4, 250))
    assert (found[0].low, found[0].high) == difference_bounds(Bounded(0.5, 0.2, 0.8), published)


def claim(source: str) -> ClaimSection:
    return ClaimSection(
        statement="", test="difference", arm="ft", question_set="new", source=source
    )


def test_a_paper_that_a_claim_names_is_found_and_another_has_no_numbers():
    named = published_by(
        [claim("arXiv 2312.05934, table 1"), claim("see arXiv 2312.05934v3"), claim("")]
    )
    assert len(named) == 30 * 4 + 3 * 6 + 30 * 5
    assert {row.source for row in named} == {f"arXiv 2312.05934v3, table {n}" for n in (1, 2, 3)}
    assert published_by([claim("arXiv 2404.05405"), claim("a talk")]) == []


@pytest.mark.parametrize("name", ["mmlu", "current-events"])
def test_the_shipped_numbers_are_of_the_studies_models_arms_and_questions(name):
    recipe = read_recipe(ROOT / "recipes" / "studies" / f"paper-{name}.yaml").study
    evaluation = read_recipe(ROOT / recipe.eval).eval
    rows = published_by(recipe.claims.values())
    here = [row for row in rows if row.question_set in evaluation.questions]
    assert {row.arm.removesuffix("+rag") for row in here} <= {"base", *recipe.arms}
    assert {row.shots for row in here} == set(evaluation.shots)
    assert {row.model for row in here} - {*recipe.models.values()} == {"microsoft/Orca-2-7b"}


def test_the_best_k_of_table_3_is_the_number_of_table_1():
    rows = published_by([claim("2312.05934")])
    for row in rows:
        if row.arm == "base+rag" and row.k is None and row.question_set != "current events":
            asked = (row.model, row.question_set, row.shots)
            by_k = [r.accuracy for r in rows if r.k and (r.model, r.question_set, r.shots) == asked]
            assert len(by_k) == 5
            assert max(by_k) == row.accuracy
