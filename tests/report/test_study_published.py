"""The paper's numbers are shipped as printed and found for the models and tasks of a study by name."""

from __future__ import annotations

import pytest

from kinject.report.tables import load_published, published_by_k, published_scores


def test_each_row_has_a_value_for_each_column() -> None:
    published = load_published()
    for name, n_rows in (("table1", 30), ("table2", 3), ("table3", 30)):
        assert len(published[name]) == n_rows
        for _, _, model, *values in published[name]:
            assert model in published["models"]
            assert len(values) == len(published["columns"][name])
            assert all(0 < value < 1 for value in values)


def test_each_printed_accuracy_is_a_whole_number_of_questions() -> None:
    # Within the printed digits a share of n questions; a wrong digit would seldom be one for these n.
    published = load_published()
    for table in ("table1", "table3"):
        for task, _, _, *values in published[table]:
            n = published["sizes"][task]
            assert all(abs(round(value * n) / n - value) < 0.00051 for value in values), task


def test_the_papers_retrieval_cells_are_the_best_k_on_the_test_questions() -> None:
    # What `about` says of Table 1; it also ties two tables together.
    for task, shots, model, _, with_context, *_ in load_published()["table1"]:
        assert with_context == max(published_by_k(model, task, shots).values())


@pytest.mark.parametrize("model", ["mistral-7b", "Mistral-7B", "mistralai/Mistral-7B-v0.1", "models/mistral_7b"])
def test_a_model_is_found_by_its_usual_names(model: str) -> None:
    assert published_scores(model, "anatomy", 0) == {"base": 0.556, "base+rag": 0.681, "ft": 0.57, "ft+rag": 0.659}


def test_current_events_hold_table_2_whatever_the_shots() -> None:
    scores = published_scores("Llama-2-7b-hf", "current-events", 5)
    assert scores["ft-reg"] == 0.219
    assert scores["ft-par+rag"] == 0.52


@pytest.mark.parametrize(
    ("model", "task", "shots"),
    [("Mistral-7B-Instruct", "anatomy", 0), ("mistral-7b", "virology", 0), ("mistral-7b", "anatomy", 1), ("sandbox", "new", 0)],
)  # fmt: skip
def test_other_models_tasks_and_shots_have_none(model: str, task: str, shots: int) -> None:
    assert published_scores(model, task, shots) == {}
    assert published_by_k(model, task, shots) == {}
