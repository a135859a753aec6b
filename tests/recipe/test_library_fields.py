"""`trainer:` is SFTConfig's own fields; older names are mapped and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.training_args import OptimizerNames
from trl import SFTConfig

from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.library_fields import REFUSED, RENAMED, RENAMED_OPTIMIZERS

Write = Callable[[str, str], Path]


def _trainer(write: Write, line: str) -> tuple[dict[str, object], tuple[str, ...]]:
    recipe = read_recipe(write("r.yaml", f"run_dir: a\ntrainer:\n  {line}\n"))
    return dict(recipe.trainer), recipe.notes


def test_every_field_of_sftconfig_is_accepted_with_its_own_default(write: Write) -> None:
    fields = [field for field in dataclasses.fields(SFTConfig) if field.init and field.name not in REFUSED]
    assert len(fields) > 100
    for field in fields:
        default = field.default
        if default is dataclasses.MISSING or default is None:
            continue
        value = str(getattr(default, "value", default))
        if not value or value.lower() == "none":
            value = "''"
        assert field.name in _trainer(write, f"{field.name}: {value}")[0]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("evaluation_strategy: epoch", {"eval_strategy": "epoch"}),
        ("warmup_ratio: 0.03", {"warmup_steps": 0.03}),
        ("group_by_length: true", {"train_sampling_strategy": "group_by_length"}),
        ("group_by_length: false", {"train_sampling_strategy": "random"}),
        ("max_seq_length: 256", {"max_length": 256}),
        ("save_safetensors: true", {}),
        ("optim: adamw_hf", {"optim": "adamw_torch"}),
        ("optim: adamw_apex_fused", {"optim": "adamw_torch_fused"}),
    ],
)
def test_an_older_name_is_read_as_todays_and_said(write: Write, line: str, fields: dict[str, object]) -> None:
    trainer, notes = _trainer(write, line)
    assert trainer == fields
    assert len(notes) == 1
    assert line.split(": ")[line.startswith("optim")] in notes[0]


@pytest.mark.parametrize(
    ("steps", "ratio", "read"),
    [(10, 0.03, 10), (0.2, 0.03, 0.2), (0, 0.03, 0.03), (0, 0, 0)],
)
def test_warmup_steps_above_0_override_warmup_ratio_with_a_note(
    write: Write, steps: float, ratio: float, read: float
) -> None:
    for line in (f"warmup_steps: {steps}\n  warmup_ratio: {ratio}", f"warmup_ratio: {ratio}\n  warmup_steps: {steps}"):
        trainer, notes = _trainer(write, line)
        assert trainer == {"warmup_steps": read}
        unread = "warmup_ratio" if steps else "warmup_steps"
        assert f"trainer.{unread} is not read" in notes[0]
    with pytest.raises(RecipeError, match=r"r\.yaml:4: trainer\.warmup_ratio: found 3\.0, allowed: 0 up to 1"):
        _trainer(write, f"warmup_steps: {steps or 1}\n  warmup_ratio: 3")  # also where it is not read


def test_every_successor_is_a_field_of_sftconfig() -> None:
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    for old, replace in RENAMED.items():
        assert old not in names
        assert replace(True)[0].keys() <= names
    today = {member.value for member in OptimizerNames}
    assert not today & RENAMED_OPTIMIZERS.keys()
    assert set(RENAMED_OPTIMIZERS.values()) <= today


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_name_says_why(write: Write, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        _trainer(write, f"{key}: x")
    assert REFUSED[key] in str(caught.value)


def test_old_and_new_name_together_are_refused(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml:4: trainer\.evaluation_strategy: is the same as eval_strategy"):
        _trainer(write, "eval_strategy: no\n  evaluation_strategy: epoch")


def test_pickled_weights_are_refused(write: Write) -> None:
    with pytest.raises(RecipeError, match="weights are always safetensors"):
        _trainer(write, "save_safetensors: false")
