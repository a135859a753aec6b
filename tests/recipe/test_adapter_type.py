"""The type of an adapter is read in both spellings and in any case, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.adapter_fields import adapter_types


def _read(folder: Path, adapter: dict[str, object]) -> object:
    (folder / "corpus.jsonl").write_text('{"text": "a b c"}\n')
    (folder / "model").mkdir(exist_ok=True)
    recipe = {
        "run_dir": str(folder / "run"), "method": "cpt", "model": {"path": str(folder / "model")},
        "corpus": {"path": str(folder / "corpus.jsonl")}, "adapter": adapter, "trainer": {"max_steps": 1},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return read_recipe(path, verb="train")


def test_every_type_of_peft_is_the_same_in_both_spellings(tmp_path: Path) -> None:
    from peft import PeftType

    for kind in PeftType:
        found = []
        for adapter in (
            {"type": kind.value.lower()},
            {"peft_type": kind.value},
            {"type": kind.value},
        ):
            try:
                found.append(_read(tmp_path, dict(adapter)).raw["adapter"])  # type: ignore[attr-defined]
            except RecipeError as error:
                found.append([problem.message for problem in error.problems])
        assert found[0] == found[1] == found[2], kind
        if isinstance(found[0], dict):
            assert found[0]["type"] == kind.value.lower()
            assert kind.value.lower() in adapter_types()


def test_two_types_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"adapter\.peft_type: found OFT, but adapter\.type is lora"
    ):
        _read(tmp_path, {"type": "lora", "peft_type": "OFT"})
