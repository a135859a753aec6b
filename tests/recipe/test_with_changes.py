"""A value of a recipe is changed alone: its comments, its layout and every other value stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.errors import RecipeError
from kinject.recipe.check import KeyPath, Value
from kinject.recipe.yaml_lines import with_changes

TEXT = """\
# first
seed: 7
trainer: # of it
  learning_rate: 1e-4 # slow
  optim:
  notes: >
    two
    lines
flow: {a: 1, "b c": [2, 3]}
none: {}
base: &base
  path: models/a
again: *base
"""


@pytest.mark.parametrize(
    ("key", "value", "line", "changed"),
    [
        (("seed",), 12, "seed: 7", "seed: 12"),
        (("trainer", "learning_rate"), 2e-5, "rate: 1e-4 #", "rate: 2e-05 #"),
        (("trainer", "optim"), "adamw_torch", "optim:", "optim: adamw_torch"),
        (("trainer", "optim"), "no: one", "optim:", 'optim: "no: one"'),
        (("trainer", "optim"), "1e5", "optim:", 'optim: "1e5"'),
        (("trainer", "optim"), "true", "optim:", 'optim: "true"'),
        (("flow", "a"), None, "{a: 1,", "{a: null,"),
        (("flow", "new"), 3, "{a", "{new: 3, a"),
        (("none", "x", "y"), 3, "{}", '{x: {"y": 3}}'),
        (("model", "path"), "b", "seed: 7", 'model: {"path": "b"}\nseed: 7'),
    ],
)
def test_one_value_is_changed(key: KeyPath, value: Value, line: str, changed: str) -> None:
    assert with_changes(TEXT, {key: value}, Path("r.yaml")) == TEXT.replace(line, changed)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("base", "path"), 12),
        (("again", "path"), 12),
        (("base", "dtype"), 11),
        (("flow", "b c"), 9),
        (("trainer",), 3),
    ],
)
def test_what_cannot_be_changed_alone_is_refused_at_its_line(key: KeyPath, line: int) -> None:
    with pytest.raises(RecipeError, match=rf"^r\.yaml:{line}: {'.'.join(map(str, key))}: "):
        with_changes(TEXT, {key: "x"}, Path("r.yaml"))
