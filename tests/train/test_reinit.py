"""The last layers drawn anew, and a base that holds still for the first updates: seen in the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kinject.errors import RecipeError
from kinject.models import load_model, new_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.load import reinitialize_last_layers
from small import interrupt

MakeRecipe = Callable[..., Recipe]
NORMS = {
    "techniques": {
        "freeze_base_steps": 3,
        "freeze_base_except": ["model.layers.1.*", "model.norm.*"],
    }
}


def _weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def _moved(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], two[name])}


def test_a_held_base_does_not_move_by_a_bit_and_then_thaws(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    save = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 5,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
    }
    result = train(make_recipe(trainer=save, **NORMS))
    run, base = Path(result.run_dir), _weights(tiny_model)
    for step in (1, 3):
        moved = _moved(base, _weights(run / f"checkpoint-{step}"))
        assert moved == {
            name for name in base if ".layers.1." in name or name == "model.norm.weight"
        }
    assert _moved(_weights(run / "checkpoint-3"), _weights(run / "checkpoint-4")) == base.keys()
    note = "techniques.freeze_base_steps: for 3 updates only these train: model.layers.{1-1}.self_attn.q_proj.weight"
    manifest = json.loads((run / "manifest.json").read_text())
    assert any(text.startswith(note) for text in manifest["counts"]["notes"])


@pytest.mark.soak
def test_a_run_resumed_before_the_thaw_ends_bitwise_as_an_uninterrupted_one(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    save = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2, "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1}  # fmt: skip
    techniques = {
        "freeze_base_steps": 3,
        "reinitialize_last_layers": 1,
        "sam": 0.05,
        "hard_example_mining": {"fraction": 0.5},
    }
    runs = []
    for name in ("straight", "broken"):
        recipe = make_recipe(run_dir=str(tmp_path / name), trainer=save, techniques=techniques)
        runs.append(_weights(train(recipe).model_dir))
    interrupt(tmp_path / "broken", 2)
    resumed = train(recipe, resume=True)
    assert resumed.n_steps == 6
    assert not _moved(runs[0], _weights(resumed.model_dir))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_last_layers_are_drawn_as_the_architecture_draws_them_and_nothing_else_moves(
    tiny_tokenizer: Any, tiny_config: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    small = {"llama": {**tiny_config, "num_hidden_layers": 4, "hidden_size": 64},
             "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}}[kind]  # fmt: skip
    folder = tmp_path / kind
    made = new_model(small, tiny_tokenizer, seed=0)
    made.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    scaled = {
        name: weight * 3 + 1 for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})  # far from any draw
    drawn = []
    for _ in range(2):
        model = load_model(str(folder)).model
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        state = torch.get_rng_state()
        names = reinitialize_last_layers(model, 2, 0)
        assert torch.equal(torch.get_rng_state(), state)
        after = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        assert _moved(before, after) == set(names)
        assert {name for name in after if ".2." in name or ".3." in name} == set(names)
        drawn.append(after)
    assert not _moved(drawn[0], drawn[1])
    for name in names:
        weight = drawn[0][name]
        if weight.ndim == 1:
            assert torch.equal(weight, torch.full_like(weight, float("bias" not in name))), name
        else:
            std = 0.02 / (2 * 4) ** 0.5 if kind == "gpt2" and "c_proj" in name else 0.02
            assert float(weight.mean()) == pytest.approx(
                0.0, abs=6 * std / weight.numel() ** 0.5
            ), name
            assert float(weight.std()) == pytest.approx(std, rel=6 / (2 * weight.numel()) ** 0.5), (
                name
            )


@pytest.mark.parametrize(
    ("techniques", "fault"),
    [
        (
            {"freeze_base_steps": 2, "freeze_base_except": ["lm_haed.*"]},
            "techniques.freeze_base_except: 'lm_haed.*' matches no parameter",
        ),
        (
            {"reinitialize_last_layers": 3},
            "techniques.reinitialize_last_layers: found 3, but the model has 2 layers",
        ),
    ],
)
def test_what_the_model_does_not_have_is_reported_with_its_line(
    make_recipe: MakeRecipe, techniques: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        train(make_recipe(techniques=techniques))
    assert fault in str(caught.value)
    assert "recipe.yaml:" in str(caught.value)
