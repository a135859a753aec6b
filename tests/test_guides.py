"""docs/techniques.md lists every row of the five guides; its lines are recipe lines, its tests exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from kinject.augment.plan import check_sections
from kinject.cli import _parser
from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.library_fields import schedule_names
from kinject.recipe.read import Verb

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "techniques.md").read_text("utf-8")
ROWS_OF_GUIDE = {1: 25, 2: 93, 3: 21, 4: 61, 5: 56}
"""Guide: number of its rows. A row that is dropped from the page is missed here."""
NOT_BUILT = ("**not built**: ", "**reading**: ")
GENERATOR = {"kind": "sandbox"}
RECIPE: dict[str, Mapping[str, Any]] = {
    "train": {"model": {"path": "some/model"}, "corpus": {"path": "corpus.jsonl"}, "trainer": {}},
    "augment": {
        "augment": {"documents": "d.jsonl", "styles": {"paraphrase": 1}, "generator": GENERATOR}
    },
    "questions": {"questions": {"documents": "d.jsonl", "generator": GENERATOR}},
    "eval": {"eval": {"models": {"base": "m"}, "questions": {"new": "q.jsonl"}}},
    "study": {
        "study": {
            "title": "t",
            "train": "t.yaml",
            "eval": "e.yaml",
            "models": {"m": "m"},
            "arms": {"a": {}},
        }
    },
}
"""Verb: the smallest recipe that it reads. The lines of a row are put into it."""


class Row(NamedTuple):
    """One row of a guide: its number, its subject, its line and the tests of its effect or the reason."""

    number: str
    subject: str
    line: str
    proof: str

    @property
    def settings(self) -> list[str]:
        """The recipe lines as overrides."""
        lines = re.findall(r"`([^`]+)`", self.line)
        return [
            re.sub(r": ", "=", line, count=1)
            for line in lines
            if not line.startswith(("kinject ", "accelerate "))
        ]

    @property
    def commands(self) -> list[str]:
        """The commands."""
        return [
            line
            for line in re.findall(r"`([^`]+)`", self.line)
            if line.startswith(("kinject ", "accelerate "))
        ]

    @property
    def tests(self) -> list[str]:
        """The tests, as file::name."""
        return re.findall(r"[\w/]+\.py::\w+", self.proof)

    @property
    def like(self) -> list[str]:
        """The numbers of the rows that this one refers to."""
        return re.findall(r"\bas (\d\.\d+)", self.proof)


ROWS = [
    Row(*re.split(r"\s*\|\s*", line.strip()[1:-1].strip()))
    for line in PAGE.splitlines()
    if re.match(r"\| \d\.\d", line)
]
BY_NUMBER = {row.number: row for row in ROWS}


@cache
def _tests_of(path: Path) -> dict[str, str]:
    """Return the tests that pytest collects from a file, with their marks and those of the file."""
    module = ast.parse(path.read_text("utf-8")).body
    of_file = [
        ast.unparse(item)
        for item in module
        if isinstance(item, ast.Assign) and "pytestmark" in ast.unparse(item)
    ]
    return {
        item.name: " ".join([*of_file, *map(ast.unparse, item.decorator_list)])
        for item in module
        if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")
    }


def test_every_row_of_the_guides_is_on_the_page() -> None:
    assert [row.number for row in ROWS] == [
        f"{guide}.{n}" for guide, last in ROWS_OF_GUIDE.items() for n in range(1, last + 1)
    ]
    assert len({(row.number[0], row.subject) for row in ROWS}) == len(ROWS)
    documented = ast.parse((ROOT / "tests" / "train" / "test_documented.py").read_text("utf-8"))
    (arguments,) = (
        ast.literal_eval(item.value)
        for item in documented.body
        if isinstance(item, ast.Assign)
        and isinstance(item.targets[0], ast.Name)
        and item.targets[0].id == "DOCUMENTED"
    )
    text = " ".join(row.subject + row.line for row in ROWS)
    assert [name for name in arguments if not re.search(rf"\b{name}\b", text)] == []
    schedules = (ROOT / "docs" / "schedules.md").read_text("utf-8")
    assert [name for name in schedule_names() if f"`{name}`" not in schedules] == []


def test_every_row_has_a_line_and_a_test_or_a_reason() -> None:
    for row in ROWS:
        if row.proof.startswith(NOT_BUILT):
            reason = row.proof.partition("**: ")[2]
            assert len(reason) > 10, row.number
            assert "[above]" not in reason or "(#what-is-not-built)" in reason, row.number
            continue
        assert row.line, row.number
        assert all(
            (ROOT / path).is_file() for path in re.findall(r"recipes/[\w./-]+\.yaml", row.line)
        ), row.number
        assert row.tests or row.like, row.number
        for number in row.like:
            other = BY_NUMBER[number]
            assert other.tests, f"{row.number}: {number} names no test itself"
            assert not other.proof.startswith(NOT_BUILT), f"{row.number}: {number} is not built"


def test_every_test_of_a_row_is_collected_and_needs_a_gpu_only_where_that_is_said() -> None:
    for owner, test in [(row, test) for row in ROWS for test in row.tests]:
        path, name = test.split("::")
        marks = _tests_of(ROOT / "tests" / path).get(name)
        assert marks is not None, test
        assert ("cuda" in marks and "skipif" in marks) == (f"{test} (GPU)" in owner.proof), test
        assert ("pytest.mark.soak" in marks.split()) == (f"{test} (soak)" in owner.proof), test


@pytest.mark.parametrize("guide", ROWS_OF_GUIDE)
def test_the_lines_of_a_row_are_read_by_its_verb(guide: int, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    refused: dict[str, str] = {}
    for row in ROWS:
        if not row.settings or row.number[0] != str(guide):
            continue
        first = row.settings[0].partition("=")[0].partition(".")[0]
        verb = cast(Verb, first if first in RECIPE else "train")
        path.write_text(json.dumps({"run_dir": "runs/x", **RECIPE[verb]}), encoding="utf-8")
        try:
            check_sections(read_recipe(path, row.settings, verb, check_inputs=False))
        except RecipeError as error:
            refused[row.number] = str(error)
    assert refused == {}


def test_the_commands_of_the_rows_parse_and_their_recipes_are_read() -> None:
    commands, parser = {command for row in ROWS for command in row.commands}, _parser()
    recipes: set[tuple[str, str, tuple[str, ...]]] = set()
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command)
        for word in words:
            assert not word.startswith("recipes/") or (ROOT / word).is_file(), command
        words = words[words.index("kinject.cli") + 1 :] if "kinject.cli" in words else words[1:]
        arguments, rest = parser.parse_known_args(words)
        operands = [*getattr(arguments, "arguments", []), *rest]
        assert not any(word.startswith("-") for word in operands), command
        verb = "study" if words[0] == "study" else "train"
        overrides = tuple(word for word in operands if "=" in word)
        recipes |= {(word, verb, overrides) for word in operands if word.startswith("recipes/")}
    for recipe, verb, overrides in recipes:
        check_sections(read_recipe(ROOT / recipe, overrides, cast(Verb, verb), check_inputs=False))
