"""push_to_hub against a server on this machine that speaks the hub's interface: the model arrives as it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import TOKEN, Hub, running
from kinject.errors import TrainingError
from kinject.recipe import Recipe
from kinject.train import train


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine."""
    with running(monkeypatch) as server:
        yield server


def test_the_model_arrives_as_it_was_saved_and_nothing_else(
    make_recipe: Callable[..., Recipe], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_private_repo": True}
    recipe = make_recipe(
        trainer={**publish, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    )
    model = Path(train(recipe).model_dir)
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json", "SHA256SUMS"} <= hub.files.keys()
    assert (hub.commits, hub.tokens) == (["Model save"], {f"Bearer {TOKEN}"})
    assert (hub.created["name"], hub.created["organization"]) == ("mine", "me")
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert hub.unknown == []
    assert not (recipe.run_dir / "README.md").exists()


def test_the_branch_is_made_before_the_first_step_and_gets_the_model(
    make_recipe: Callable[..., Recipe], hub: Hub
) -> None:
    publish = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_revision": "v2"}
    recipe = make_recipe(trainer={**publish, "max_steps": 1})
    train(recipe)
    assert (hub.branches, hub.committed_to) == (["v2"], ["v2"])


def test_an_upload_that_the_hub_refuses_is_one_line_and_leaves_the_model(
    make_recipe: Callable[..., Recipe], hub: Hub
) -> None:
    hub.full = True
    recipe = make_recipe(trainer={"push_to_hub": True, "hub_model_id": "me/mine", "max_steps": 2})
    message = r"run/model is written, but was not uploaded to me/mine: .*507.* Upload it: hf upload me/mine "
    with pytest.raises(TrainingError, match=message) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    assert (recipe.run_dir / "model" / "model.safetensors").is_file()


def test_a_repository_that_the_hub_refuses_is_one_line_before_the_first_step(
    make_recipe: Callable[..., Recipe], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"{hub.url}/elsewhere")
    recipe = make_recipe(trainer={"push_to_hub": True, "hub_model_id": "me/mine", "max_steps": 2})
    with pytest.raises(
        TrainingError, match=r"trainer\.push_to_hub: .*404.* Check HF_TOKEN and"
    ) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    assert not (recipe.run_dir / "log.jsonl").exists()
