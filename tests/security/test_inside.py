"""What data and recipes call things never decides where kinject writes: names and links stay inside the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from kinject.augment import augment
from kinject.cli import main
from kinject.disk import file_name, lock_dir
from kinject.errors import DiskError
from kinject.eval import evaluate
from kinject.recipe import read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country

HOSTILE = (
    "../../escaped", "/absolute/escaped", "..", ".", "", "nul\0byte", "line\nbreak", "back\\slash", "a" * 5000, "CON", "nul.txt",
    "~", "$(touch escaped)", "-rf", " space ", "é" * 300, "\u202eexe", "a/b", ".hidden", "\ud800",
)  # fmt: skip


@hypothesis.given(st.text(max_size=300) | st.sampled_from(HOSTILE), st.text(max_size=300))
def test_a_file_name_is_one_short_plain_word_and_tells_names_apart(name: str, other: str) -> None:
    made = file_name(name)
    assert Path(made).name == made
    assert made not in ("", ".", "..")
    assert made[0] not in ".-~ "
    assert not set(made) & set('/\\\0:*?"<>|\n\r\t$')
    assert len(made.encode()) <= 120
    assert (file_name(other) == made) == (other == name)


def written(folder: Path) -> set[Path]:
    """Return every path below `folder`, links not followed."""
    return {
        Path(parent, name)
        for parent, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }


def test_names_of_models_and_questions_do_not_lead_out_of_the_folder_of_an_evaluation(
    tmp_path: Path, tiny_model: Path, write_rows: Callable[..., Path]
) -> None:
    rows = [{"id": name or "x", "question": "Where?", "choices": ["a", "b"], "answer": 0, "subject": name, "document_id": name}
            for name in HOSTILE if name != "\ud800" and "\0" not in name]  # fmt: skip
    questions = write_rows("questions.jsonl", rows)
    names = [
        name for name in HOSTILE if name != "\ud800" and "\0" not in name and len(name) < 1000
    ]  # as YAML can hold them
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({
            "run_dir": str(tmp_path / "runs" / "run"),
            "eval": {
                "models": {name: str(tiny_model) for name in names[:5]},
                "questions": {name: str(questions) for name in names[5:8]},
            },
        })
    )  # fmt: skip
    before = written(tmp_path)
    report = evaluate(read_recipe(recipe, verb="eval"))
    assert {result.arm for result in report.results} >= set(names[:5])
    new = written(tmp_path) - before
    assert all(path.is_relative_to(tmp_path / "runs") for path in new)
    assert main(["view", str(tmp_path / "runs" / "run"), "--draw"]) == 0
    assert all(path.is_relative_to(tmp_path / "runs") for path in written(tmp_path) - before)


def test_ids_and_titles_of_documents_do_not_lead_out_of_the_folder_of_an_augmentation(
    tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    people = create_country(n_known=1, n_new=len(HOSTILE)).new
    names = [name for name in HOSTILE if name not in ("", "\ud800") and "\0" not in name]
    rows = [{"id": name, "title": name, "source": name, "text": render_entry(person, 0)}
            for name, person in zip(names, people, strict=False)]  # fmt: skip
    documents = write_rows("documents.jsonl", rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/runs/run\naugment:\n  documents: {documents}\n  styles: {{paraphrase: 1}}\n"
        "  generator: {kind: sandbox}\n"
    )
    before = written(tmp_path)
    assert augment(read_recipe(recipe, verb="augment")).n_documents == len(names)
    assert all(path.is_relative_to(tmp_path / "runs") for path in written(tmp_path) - before)


@pytest.mark.parametrize(
    "link", ["variants.jsonl", ".lock", "figures", "cache.sqlite", "harness/base", "model"]
)
def test_a_link_that_leads_out_of_a_run_folder_is_refused_and_what_it_names_is_left_alone(
    tmp_path: Path, link: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("untouched")
    folder = tmp_path / "run"
    (folder / link).parent.mkdir(parents=True)
    (folder / link).symlink_to(precious)
    with (
        pytest.raises(DiskError, match=r"a link that leads out of the run folder\. Remove it"),
        lock_dir(folder),
    ):
        pytest.fail("the folder was taken")
    assert precious.read_text() == "untouched"


def test_links_within_a_run_folder_and_to_it_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "there" / "wandb").mkdir(parents=True)
    (tmp_path / "there" / "wandb" / "latest").symlink_to(tmp_path / "there" / "wandb")
    (tmp_path / "run").symlink_to(tmp_path / "there")
    with lock_dir(tmp_path / "run"):
        assert (tmp_path / "there" / ".lock").is_file()


def test_a_report_is_not_written_through_a_link(
    tmp_path: Path, tiny_model: Path, write_rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_rows(
        "q.jsonl", [{"id": "x", "question": "Where?", "choices": ["a", "b"], "answer": 0}]
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\neval: {{models: {{base: {tiny_model}}}, questions: {{s: {questions}}}}}\n"
    )
    evaluate(read_recipe(recipe, verb="eval"))
    precious = tmp_path / "precious.html"
    precious.write_text("untouched")
    (tmp_path / "run" / "report.html").symlink_to(precious)
    assert main(["view", str(tmp_path / "run"), "--draw"]) == 2
    assert "a link that leads out of the run folder" in capsys.readouterr().err
    assert precious.read_text() == "untouched"
