"""The shipped recipes: listed with what their headers say, copied with everything they refer to, in the wheel too."""

from __future__ import annotations

import glob
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kinject.cli import _VERBS, main
from kinject.recipe import yaml_lines
from kinject.recipe.shipped import FOLDER, ShippedRecipe, read_shipped
from kinject.recipe.yaml_lines import read_yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shipped() -> dict[str, ShippedRecipe]:
    """All of them."""
    return read_shipped()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own to run commands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_of_the_repository_ships_and_says_what_it_is(
    shipped: dict[str, ShippedRecipe],
) -> None:
    files = {
        path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
        for path in ROOT.glob("recipes/**/*.yaml")
    }
    assert shipped.keys() == files
    for recipe in shipped.values():
        assert recipe.purpose, recipe.name
        if recipe.verb != "accelerate":
            assert recipe.needs, recipe.name
            assert recipe.expect, recipe.name
            assert recipe.verb in _VERBS, recipe.name


def test_the_list_has_each_recipe_under_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    verbs = [line for line in lines if line.startswith(("kinject ", "accelerate "))][:-1]
    assert len(verbs) == len(set(verbs))
    assert {f"kinject {verb}" for verb in ("augment", "questions", "train", "eval", "study")} < {
        *verbs
    }
    assert "accelerate launch --config_file" in verbs
    index = lines.index("  recipes/cpt.yaml")
    assert lines[index + 1].startswith(
        "      (sandbox) continued pretraining on the paraphrased documents"
    )
    assert any(line.startswith("      needs: runs/augment/corpus.jsonl") for line in lines[index:])
    assert main(["recipes", "list", "two-phase", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["result"]["recipes"]
    assert [(row["name"], row["verb"]) for row in rows] == [
        ("two-phase/documents", "train"), ("two-phase/questions", "train"),
    ]  # fmt: skip


def test_the_quickstarts_copy_brings_all_that_its_steps_read_and_the_control_is_asked_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/quickstart.md").read_text("utf-8")
    (copy,) = re.findall(r"^\$ kinject (recipes copy .*)$", page, re.MULTILINE)
    assert main(copy.split()) == 0
    out = capsys.readouterr().out
    recipes = {path.relative_to(here).as_posix() for path in here.glob("recipes/**/*.yaml")}
    steps = page.partition(copy)[2]
    assert recipes >= {"recipes/augment.yaml", *re.findall(r"recipes/\S+\.yaml", steps)}
    trained = re.findall(r"^\$ kinject train (\S+\.yaml)", steps, re.MULTILINE)
    (asked, *_) = re.findall(r"^\$ kinject eval (\S+\.yaml)", steps, re.MULTILINE)
    models = read_yaml(Path(asked)).root["eval"]["models"].values()
    assert {f"{read_yaml(Path(path)).root['run_dir']}/model" for path in trained[:2]} < {*models}
    for path in here.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (ROOT / path.relative_to(here)).read_bytes(), path
            assert str(path.relative_to(here)) in out
    assert "yours to bring" not in out  # nothing of other models' recipes
    assert (here / "recipes" / "recipe.schema.json").exists()
    assert (
        main(["augment", "--dry-run"]) == 0
    )  # documents and questions are there, found from the copied recipe
    assert main(["recipes", "check"]) == 0


def test_a_study_is_copied_with_its_shared_recipes_and_theirs(here: Path) -> None:
    assert main(["recipes", "copy", "recipes/studies/paper-mmlu.yaml", "--out", "mine"]) == 0
    study = read_yaml(here / "mine/recipes/studies/paper-mmlu.yaml").root["study"]
    for shared in (study["augment"], study["train"], study["eval"]):
        assert (here / "mine" / shared).exists()
    assert not (here / "mine" / "data").exists()  # nothing of the sandbox's is asked for


def test_a_recipe_is_copied_with_the_style_that_it_names(here: Path) -> None:
    assert main(["recipes", "copy", "endpoints/styles"]) == 0
    copied = (here / "data/styles/letter.yaml").read_bytes()
    assert copied == (ROOT / "data/styles/letter.yaml").read_bytes()


@pytest.mark.parametrize("name", ["llama-3.1-8b/lora", "mistral-7b/cpt", "sft"])
def test_a_copy_for_documents_of_ones_own_brings_nothing_of_the_sandbox(
    name: str, here: Path, shipped: dict[str, ShippedRecipe]
) -> None:
    assert main(["recipes", "copy", name]) == 0
    files = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert files == {f"recipes/{name}.yaml", "recipes/recipe.schema.json"}
    assert not shipped[name].is_sandbox


def test_recipes_that_read_the_sandbox_say_so_first_and_those_of_a_gpu_read_none(
    shipped: dict[str, ShippedRecipe],
) -> None:
    for recipe in shipped.values():
        lines = recipe.text.splitlines()
        if recipe.is_sandbox:
            assert "sandbox" in next(line for line in lines if "Purpose" in line), recipe.name
        if recipe.name.startswith(("qwen3/", "llama-", "mistral-")):
            assert "runs/augment/" not in recipe.text, recipe.name


@pytest.mark.parametrize("verb", ["augment", "eval", "questions"])
def test_a_verb_without_a_recipe_takes_no_invented_people_for_documents_of_ones_own(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == 2
    assert (
        f"For your documents: kinject try FOLDER. For the sandbox: kinject recipes copy {verb}"
        in capsys.readouterr().err
    )
    assert main(["recipes", "copy", verb]) == 0
    (here / "runs/our manual/documents").mkdir(parents=True)
    (here / "runs/our manual/documents/documents.jsonl").write_text("")
    assert main([verb]) == 2
    error = capsys.readouterr().err
    assert f"Name the recipe: kinject {verb} 'recipes/our manual/{verb}.yaml'" in error
    assert f"for the sandbox's invented people: kinject {verb} recipes/{verb}.yaml" in error
    assert not (here / "runs" / verb).exists()
    # A recipe of one's own in this place is no sandbox.
    (here / f"recipes/{verb}.yaml").write_text("run_dir: runs/mine\n")
    assert main([verb]) == 2
    assert "Name the recipe" not in capsys.readouterr().err


def test_the_sandbox_is_named_before_it_is_used(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["recipes", "copy", "augment"])
    capsys.readouterr()
    assert main(["augment", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        "recipes/augment.yaml: the sandbox, people of a country"
    )


def test_what_nobody_ships_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "sft"]) == 0
    yours = "yours to bring (or name others in the recipe): data/general-held-out.jsonl, data/my-qa.jsonl"
    assert yours in capsys.readouterr().out


def test_nothing_is_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "cpt"]) == 0
    assert main(["recipes", "copy", "cpt"]) == 0
    assert "were there already, the same" in capsys.readouterr().out
    (here / "recipes/cpt.yaml").write_text("run_dir: mine\n")
    (here / "recipes/mistral-7b/lora.yaml").unlink(missing_ok=True)
    assert main(["recipes", "copy", "cpt", "mistral-7b/lora"]) == 2
    assert capsys.readouterr().err == (
        "kinject recipes: recipes/cpt.yaml: is there and differs from the shipped file. Move it away, or copy into another "
        "folder: --out FOLDER.\n"
    )
    assert (here / "recipes/cpt.yaml").read_text() == "run_dir: mine\n"
    assert not (here / "recipes/mistral-7b/lora.yaml").exists()  # all or nothing


def test_a_name_that_is_none_gets_the_nearest(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "copy", "mistral7b/lora"]) == 2
    assert capsys.readouterr().err == (
        "kinject recipes: mistral7b/lora: no such recipe. Did you mean mistral-7b/lora? kinject recipes lists them.\n"
    )


def test_a_missing_shipped_recipe_is_reported_with_the_command_that_copies_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipes/qwen3/8b-lora.yaml"]) == 2
    assert capsys.readouterr().err == (
        "kinject train: recipes/qwen3/8b-lora.yaml: not in this folder. kinject recipes copy qwen3/8b-lora puts it here.\n"
    )


def test_every_recipe_that_needs_no_data_of_others_goes_into_a_wheel_where_an_installed_kinject_looks() -> (
    None
):
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    taken = {
        f"{folder}/{Path(path).name}"
        for folder, patterns in setup["data-files"].items()
        for pattern in patterns
        for path in glob.glob(pattern, root_dir=ROOT)
    }
    shipped_recipes = {
        path.relative_to(ROOT).as_posix()
        for path in FOLDER.rglob("*")
        if path.suffix in (".yaml", ".json") and "../shared" not in path.read_text("utf-8")
    }
    recipes = {name for name in taken if name.startswith("share/kinject/recipes/")}
    assert recipes == {f"share/kinject/{name}" for name in shipped_recipes}
    assert ROOT / "recipes" == FOLDER


class KeyReader:
    """Collects the keys of recipes by the section of the schema that they belong to."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.found: set[tuple[str, str]] = set()

    def known(self) -> set[tuple[str, str]]:
        """Return all (section, key) of kinject; the fields of trainer and adapter are the libraries'."""
        known = {("", key) for key in self.schema["properties"]}
        for name, section in self.schema["definitions"].items():
            known |= {(name, key) for key in section.get("properties", ())}
        return known

    def read(self, value: object, schema: dict[str, Any], section: str = "") -> None:
        """Collect the keys in the value of a recipe."""
        if "$ref" in schema:
            section = schema["$ref"].rpartition("/")[2]
            schema = self.schema["definitions"][section]
        for one in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
            self.read(value, one, section)
        if isinstance(value, list):
            for item in value:
                self.read(item, schema.get("items") or {}, section)
        own = schema.get("properties", {})
        if not isinstance(value, dict) or (schema.get("required") and value.keys() - own.keys()):
            return  # of several kinds of tables, this is another one
        for key, inner in value.items():
            if key in own:
                self.found.add((section, key))
            if section and "." in key:
                self.read_setting(key, inner)
            else:
                self.read(inner, own.get(key) or schema.get("additionalProperties") or {}, section)

    def read_setting(self, dotted: str, value: object) -> None:
        """Collect the keys of a setting of a study for another section, as techniques.sam."""
        for key in reversed(dotted.split(".")):
            value = {key: value}
        self.read(value, self.schema)


def test_libyaml_reads_every_file_as_pyyaml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and the line of every key: a message names it."""
    paths = sorted(ROOT.glob("recipes/own/*.yaml")) + sorted(ROOT.glob("recipes/real/*.yaml"))
    fast = [read_yaml(path) for path in paths]
    monkeypatch.setattr(yaml_lines, "_FastLoader", yaml_lines._Loader)
    assert fast == [read_yaml(path) for path in paths]


OF_YOUR_CODE = {("TechniquesSection", "custom")}
"""Keys that name a class outside of kinject, so that no recipe that ships can hold them."""


def test_every_own_key_stands_in_a_recipe_that_ships() -> None:
    keys = KeyReader(json.loads((ROOT / "recipes/recipe.schema.json").read_text("utf-8")))
    for path in sorted(ROOT.glob("recipes/**/*.yaml")):
        keys.read(read_yaml(path).root, keys.schema)
    assert sorted(keys.known() - keys.found - OF_YOUR_CODE) == []
