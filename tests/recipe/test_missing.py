"""What is missing, or is no recipe: the message has the command that makes it, and no unrelated file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.makers import command_for
from kinject.recipe.read import read_values

RECIPE = "run_dir: runs/a\nmodel: {path: minutes}\ncorpus: {path: minutes/facts.jsonl}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with documents, and a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minutes").mkdir()
    (tmp_path / "minutes" / "acts.jsonl").write_text('{"text": "The bridge opened."}\n')
    (tmp_path / "minutes" / "may.txt").write_text("The bridge opened in May.")
    (tmp_path / "learn.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("minutes", "minutes: found a folder, expected a recipe (a YAML file). For the documents in it: "
         "kinject try minutes"),
        (".", ".: found a folder, expected a recipe (as learn.yaml). For the documents in it: kinject try ."),
        ("minutes/may.txt", "A recipe is a YAML file. For documents: kinject try minutes/may.txt"),
        ("lern.yaml", "lern.yaml: no recipe is there. Did you mean learn.yaml?"),
        ("learn.yml", "Did you mean learn.yaml?"),
        ("recipes/sft.yaml", "recipes/sft.yaml: not in this folder. kinject recipes copy sft puts it here."),
        ("recipes/train.yaml", "no recipe is there. Check the path; kinject try FOLDER writes recipes"),
        ("none/x.yaml", "no recipe is there. Check the path; kinject try FOLDER writes recipes"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_a_recipe_error_with_a_way_out(
    here: Path, path: str, text: str
) -> None:
    for read in (read_recipe, read_values):
        with pytest.raises(RecipeError) as found:
            read(Path(path))
        assert text in str(found.value)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("minutes/corpus.jsonl", " Check the path."),  # acts.jsonl has the suffix alone in common
        ("minutes/act.jsonl", " Did you mean minutes/acts.jsonl?"),
        ("minutes/acts.json", " Did you mean minutes/acts.jsonl?"),
        ("minutes/sections.jsonl", " Check the path."),
        ("runs/minutes/documents/documents.jsonl", " Make it first: kinject try minutes"),
        ("runs/letters/documents/documents.jsonl", " Make it first: kinject try FOLDER"),
        ("runs/letters/pilot/questions.jsonl", " Make it first: kinject try FOLDER"),
        ("runs/minutes/letters/documents.jsonl", " does not exist. Check the path."),
    ],
)  # fmt: skip
def test_a_missing_input_names_what_makes_it_or_a_typing_error(
    here: Path, path: str, end: str
) -> None:
    with pytest.raises(RecipeError) as found:
        read_recipe("learn.yaml", [f"corpus.path={path}"], "train")
    assert str(found.value).endswith(end)


def test_a_recipe_that_a_recipe_names_is_copied(here: Path) -> None:
    assert command_for("recipes/company/train.yaml") == "kinject recipes copy company/train"
