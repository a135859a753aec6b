"""The schema says what kinject recipes check says. Run this file as a script to write recipes/recipe.schema.json anew."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import kinject
from kinject.augment.plan import check_sections
from kinject.augment.styles import STYLES
from kinject.cli import main
from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.schema import FILE, recipe_schema, schema_line, write_schema
from kinject.recipe.yaml_lines import read_yaml
from small import quick

ROOT = Path(__file__).parents[2]
RECIPES = [
    path
    for path in sorted((ROOT / "recipes").rglob("*.yaml"))
    if "compute_environment" not in path.read_text("utf-8")  # accelerate's own configurations
]
TRAIN = {"run_dir": "runs/x", "model": {"path": "m"}, "corpus": {"path": "c.jsonl"}, "trainer": {}}
AUGMENT = {"documents": "d.jsonl", "styles": {"paraphrase": 1}, "generator": {"kind": "sandbox"}}
EVAL = {"models": {"base": "m"}, "questions": {"new": "q.jsonl"}}
STYLE_TEXTS = {name: style.about for name, style in STYLES.items()}
STUDY = {"title": "t", "train": "t.yaml", "eval": "e.yaml", "models": {"m": "m"}, "arms": {"a": {}}}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The schema as the installed trl and peft make it."""
    return recipe_schema(STYLE_TEXTS)


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    """What the schema accepts, judged by another's implementation of JSON schema."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def _accepted_by_check(recipe: Any, folder: Path) -> bool:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    try:
        check_sections(read_recipe(path))
    except RecipeError:
        return False
    return True


def test_the_schema_in_the_repository_is_what_the_grammar_writes(schema: dict[str, Any]) -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text("utf-8").split()
        if "==" in line
    )
    other = [name for name in ("trl", "peft", "transformers") if version(name) != pins[name]]
    if other:
        pytest.skip(f"{', '.join(other)}: another version than the file was written with")
    stored = json.loads((ROOT / FILE).read_text("utf-8"))
    assert stored == schema, "stale: run python tests/recipe/test_schema.py"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_shipped_recipe_is_valid_and_names_the_schema(
    path: Path, validator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert kinject.check(path) == {str(path): None}
    assert [error.message for error in validator.iter_errors(read_yaml(path).root)] == []
    first = path.read_text("utf-8").partition("\n")[0]
    assert first == schema_line(path, ROOT / FILE)
    assert (path.parent / first.partition("$schema=")[2]).resolve() == (ROOT / FILE).resolve()


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"run_dir": 3},
        {"run_dir": "x", "seed": -1},
        {"run_dir": "x", "sed": 1},
        {"run_dir": "x", "method": "rlhf"},
        {**TRAIN, "model": {"path": "m", "dtype": "float8"}},
        {**TRAIN, "model": {"path": "m", "tokenizer": {"vocab_size": 10}}},
        {**TRAIN, "model": {"path": "m", "freeze": "embed*"}},
        {**TRAIN, "corpus": {}},
        {**TRAIN, "corpus": {"path": "c", "replay": {"path": "r", "fraction": 1.5}}},
        {**TRAIN, "corpus": {"path": "c", "mix": {"qa": {"path": "r"}}}},
        {**TRAIN, "regularization": {"l2": -1}},
        {**TRAIN, "guards": {"instability": "explode"}},
        {**TRAIN, "probes": {"questions": {}}},
        {**TRAIN, "adapter": {"rank": 4}},
        {**TRAIN, "trainer": {"learning_rat": 1e-5}},
        {**TRAIN, "trainer": {"learning_rate": "1e-5 "}},
        {**TRAIN, "trainer": {"max_steps": 1.5}},
        {**TRAIN, "trainer": {"optim": "adamw_9bit"}},
        {**TRAIN, "trainer": {"eval_strategy": False}},
        {**TRAIN, "trainer": {"output_dir": "here"}},
        {**TRAIN, "trainer": {"hub_token": "secret"}},
        {**TRAIN, "trainer": {"save_safetensors": False}},
        {**TRAIN, "trainer": {"warmup_ratio": "a tenth"}},
        {"run_dir": "x", "augment": {**AUGMENT, "styles": {"paraphrased": 4}}},
        {"run_dir": "x", "augment": {**AUGMENT, "styles": {"paraphrase": -4}}},
        {"run_dir": "x", "augment": {**AUGMENT, "generator": {"kind": "openai"}}},
        {"run_dir": "x", "augment": {**AUGMENT, "generator": {"kind": "sandbox", "batch": True}}},
        {"run_dir": "x", "augment": {**AUGMENT, "generator": {"kind": "file"}}},
        {"run_dir": "x", "augment": {**AUGMENT, "max_attempts": 0}},
        {"run_dir": "x", "questions": {"generator": {"kind": "sandbox"}}},
        {"run_dir": "x", "eval": {**EVAL, "models": {}}},
        {"run_dir": "x", "eval": {**EVAL, "formats": []}},
        {"run_dir": "x", "eval": {**EVAL, "formats": ["essay"]}},
        {"run_dir": "x", "eval": {**EVAL, "shots": [5, 65]}},
        {"run_dir": "x", "eval": {**EVAL, "questions": {"new": {"path": "q", "role": "exam"}}}},
        {"run_dir": "x", "eval": {**EVAL, "retrieval": {"k": [0]}}},
        {"run_dir": "x", "study": {**STUDY, "arms": {"a": {"alpha": 2}}}},
        {"run_dir": "x", "study": {**STUDY, "seeds": []}},
        {
            "run_dir": "x",
            "study": {
                **STUDY,
                "claims": {"c": {"statement": "s", "test": "vote", "question_set": "q"}},
            },
        },
    ],
    ids=lambda recipe: json.dumps(recipe)[-60:],
)
def test_a_faulty_recipe_fails_in_both(
    recipe: dict[str, Any], validator: Any, tmp_path: Path
) -> None:
    assert not validator.is_valid(recipe)
    assert not _accepted_by_check(recipe, tmp_path)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value that has no values below it, and of every mapping's key."""
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _put(recipe: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(recipe)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


REPLACED = ("augment", "questions", "eval", "sandbox/documented", "two-phase/questions")
SLOW = ("mistral-7b/lora", "sandbox/keep")


@pytest.mark.parametrize("name", quick([*REPLACED, *SLOW], "augment", "sandbox/documented"))
def test_schema_and_check_agree_on_every_value_of_a_recipe_replaced(
    name: str, validator: Any, tmp_path: Path
) -> None:
    recipe = read_yaml(ROOT / "recipes" / f"{name}.yaml").root
    disagreed = []
    for path in _paths(recipe):
        for value in (None, "word", -7, 0.5, True, [], ["word"], {}, {"word": 1}):
            changed = _put(recipe, path, value)
            if validator.is_valid(changed) != _accepted_by_check(changed, tmp_path):
                disagreed.append((path, value))
    assert disagreed == []


def test_scalars_are_read_as_yaml_1_2_has_them(validator: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "run_dir: r\ntrainer: {eval_strategy: no, learning_rate: 1e-5, bf16: true, run_name: on}\n"
    )
    assert validator.is_valid(read_yaml(path).root)
    path.write_text("run_dir: r\ntrainer: {bf16: yes}\n")
    assert not validator.is_valid(read_yaml(path).root)


def test_an_editor_shows_the_help_of_a_key(schema: dict[str, Any]) -> None:
    trainer = schema["properties"]["trainer"]["properties"]
    assert "cosine_with_restarts" in json.dumps(trainer["lr_scheduler_type"])
    assert trainer["per_device_train_batch_size"]["default"] == 8  # SFTConfig's own
    assert trainer["evaluation_strategy"]["deprecationMessage"] == (
        "evaluation_strategy is called eval_strategy today; read as that."
    )
    assert schema["properties"]["adapter"]["properties"]["r"] == {
        "description": "Lora attention dimension.", "default": 8, "type": "integer", "minimum": 1, "maximum": 65536,
    }  # fmt: skip
    about = schema["definitions"]["ModelSection"]["properties"]["dtype"]
    assert about == {"description": "Weights in memory.", "enum": ["auto", "float32", "bfloat16", "float16"],
                     "default": "auto"}  # fmt: skip
    nameless = [
        f"{name}.{key}"
        for name, definition in schema["definitions"].items()
        for key, value in definition["properties"].items()
        if "description" not in value
    ]
    assert nameless == []


def test_the_command_writes_the_schema_and_says_the_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "schema"]) == 0
    assert json.loads((tmp_path / "recipes" / "recipe.schema.json").read_text("utf-8"))[
        "definitions"
    ]
    assert capsys.readouterr().out.endswith("# yaml-language-server: $schema=recipe.schema.json\n")


if __name__ == "__main__":
    write_schema(STYLE_TEXTS, ROOT / FILE)
