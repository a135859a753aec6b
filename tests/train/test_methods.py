"""A training method is one entry of a table, and the rest of the program does not know its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import kinject
from kinject.recipe import TrainRecipe
from kinject.train.methods import METHODS

SOURCE = Path(kinject.__file__).parent


def test_every_method_of_a_recipe_has_its_file() -> None:
    literal, _ = get_args(get_type_hints(TrainRecipe)["method"])
    assert METHODS.keys() == {None, *get_args(literal)}
    assert {name: method.name for name, method in METHODS.items()} == {n: n for n in METHODS}
    modules = [type(method).__module__ for method in METHODS.values()]
    assert len(set(modules)) == len(METHODS)


def test_nothing_but_the_checks_of_recipes_asks_for_a_methods_name() -> None:
    asks = re.compile(r"\bmethod (==|!=|in|not in) [(\[{\"']")
    found = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if asks.search(path.read_text("utf-8"))
    ]
    assert [path for path in found if not path.startswith("recipe/")] == []
