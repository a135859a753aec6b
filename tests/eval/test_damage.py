"""An evaluation's files that the disk has damaged: the same accuracies, or a line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kinject.disk import write_manifest, write_sha256sums
from kinject.errors import InputError
from kinject.eval import evaluate
from kinject.eval.compare import read_run, split_known
from kinject.eval.run import evaluate_shard, merge_answers
from kinject.eval.scoring.answers import read_answers
from kinject.recipe import Recipe, read_recipe
from kinject.shards import Shard

pytestmark = pytest.mark.usefixtures("blank_figures")

TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Recipe:
    """Six questions to a tiny model in two formats."""
    write_sha256sums(tiny_model)
    questions = tmp_path / "new.jsonl"
    rows = [
        {"id": f"q{i}", "question": f"Where was {i} born?", "choices": TOWNS, "answer": i % 4}
        for i in range(6)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "eval.yaml"
    section = {
        "models": {"base": str(tiny_model)},
        "questions": {"new": str(questions)},
        "formats": ["letters", "texts"],
    }
    path.write_text(
        yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": {"control": False, **section}})
    )
    return read_recipe(path, verb="eval")


def test_answers_that_were_cut_at_a_line_are_not_compared(recipe: Recipe) -> None:
    evaluate(recipe)
    path = recipe.run_dir / "answers.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(
        InputError,
        match=r"answers\.jsonl: holds 11 rows, 12 were written .* Run kinject eval again",
    ):
        read_run(recipe.run_dir)
    evaluate(recipe)
    assert len(read_run(recipe.run_dir).settings) == 2
    # Within a row, as by a full disk or a crash of the machine.
    path.write_bytes(path.read_bytes()[:-9])
    evaluate(recipe)
    assert len(read_run(recipe.run_dir).settings) == 2


def test_answers_that_were_changed_are_neither_read_nor_reported(recipe: Recipe) -> None:
    evaluate_shard(recipe, Shard(1, 1))
    path = Shard(1, 1).folder(recipe.run_dir) / "answers.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:5], rows[5].replace('"gold": 1', '"gold": 2'), *rows[6:]]))
    assert path.read_text() != "".join(rows)
    with pytest.raises(InputError, match=r"bytes are not those .* \(--shard 1/1\); if you changed"):
        merge_answers(recipe)
    for use in (lambda: evaluate_shard(recipe, Shard(1, 1)), lambda: read_run(path.parent)):
        with pytest.raises(
            InputError, match=r"answers\.jsonl: its rows are not those that were wr"
        ):
            use()
    path.write_text("".join(rows[:-1]))
    assert evaluate_shard(recipe, Shard(1, 1)) == len(rows)
    assert len(read_answers(path)) == len(rows)


def test_answers_of_a_run_that_was_stopped_are_not_mixed_with_those_of_the_run_before(
    recipe: Recipe,
) -> None:
    evaluate(recipe)
    path = recipe.run_dir / "answers.jsonl"
    with path.open("a") as file:
        file.write(path.read_text().splitlines(keepends=True)[3].replace('"key": "', '"key": "f0'))
    with pytest.raises(InputError, match=r"holds 13 rows, 12 of them of the last .*, or was stop"):
        read_run(recipe.run_dir)
    evaluate(recipe)
    read_run(recipe.run_dir)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"n_tokens": [1, 1]}, "n_tokens: found 2 numbers, needed are 4"),
        ({"log_probs": []}, "log_probs: is empty"),
        ({"log_probs": [-1.0, 800.0, -2.0, -3.0]}, "log_probs: found 800"),
        ({"text": "Kelm"}, "text: found 'Kelm' in the format texts"),
        ({"format": "generate"}, "text: found None in the format generate"),
    ],
)
def test_fields_of_an_answer_that_do_not_belong_together_are_named(
    tmp_path: Path, change: dict[str, object], fault: str
) -> None:
    row = {
        "key": "k", "question_id": "q", "question_set": "new", "arm": "base", "format": "texts", "shots": 0, "k": 0,
        "context_ids": [], "gold": 0, "log_probs": [-1.0, -2.0, None, -4.0], "n_tokens": [1, 2, 1, 1], "n_bytes": [3] * 4,
    }  # fmt: skip
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row) + "\n")
    read_run(path)
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, **change}) + "\n")
    with pytest.raises(InputError, match=rf"answers\.jsonl:2: {fault}"):
        read_run(path)


def test_a_base_without_answers_to_a_set_parts_no_questions(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").touch()
    counts = {"answers": 0, "scored_now": 0, "stored": 0}
    for models, said in (({}, "of a base to old"), ({"plain": "m"}, "of plain to old")):
        section = {"models": models, "questions": {"old": "old.jsonl"}}
        path = tmp_path / "manifest.json"
        write_manifest(path, stage="eval", inputs={}, recipe={"eval": section}, counts=counts)
        with pytest.raises(InputError, match=said):
            split_known(tmp_path)


def test_a_model_with_a_flipped_bit_is_not_asked(recipe: Recipe, tiny_model: Path) -> None:
    weights = tiny_model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-7] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        InputError, match=r"model\.safetensors: its bytes are not .* delete SHA256SUMS"
    ):
        evaluate(recipe)
    (tiny_model / "SHA256SUMS").unlink()
    evaluate(recipe)


def test_questions_that_are_not_as_they_were_written_are_refused(
    recipe: Recipe, tmp_path: Path
) -> None:
    path = tmp_path / "new.jsonl"
    write_manifest(
        tmp_path / "manifest.json",
        stage="questions",
        inputs={},
        recipe={},
        counts={"asked": 4, "got": 4},
        outputs=["new.jsonl"],
    )
    evaluate(recipe)
    path.write_bytes(path.read_bytes().replace(b'"answer": 3', b'"answer": 2', 1))
    with pytest.raises(
        InputError, match=r"new\.jsonl: its bytes are not those that were written .* another name"
    ):
        evaluate(recipe)
