"""MLPs that read a row in tiles compute what they compute of the whole row, and keep less for the backward pass."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.config import make_sft_config
from kinject.train.load import sharding_faults
from kinject.train.loss import tile_mlps

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "intermediate_size": 48},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8},
    "gemma3_text": {**SIZES, "num_key_value_heads": 1, "intermediate_size": 48, "head_dim": 8},
    "phi3": {**SIZES, "intermediate_size": 48, "pad_token_id": 0},
    "gpt_neox": {**SIZES, "intermediate_size": 48},
    "gpt2": {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**KINDS[kind])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()


def _loss(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_loss_and_gradients_are_those_of_the_whole_row(kind: str, tokens: int) -> None:
    whole, tiled = _model(kind), _model(kind)
    assert len(tile_mlps(tiled, tokens)) == 2
    tiled.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 60, (2, 23), generator=torch.Generator().manual_seed(1))
    losses = [_loss(model, ids) for model in (whole, tiled)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    for (name, one), two in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.allclose(one.grad, two.grad, atol=1e-12), name
    with torch.no_grad():
        assert _loss(tiled, ids).item() == pytest.approx(losses[0].item(), abs=1e-12)


def _kept(model: Any, ids: torch.Tensor) -> int:
    """Return the bytes of different tensors that autograd keeps in a forward pass."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, ids)
    assert loss.requires_grad
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in weights)


def test_the_inner_tensors_of_an_mlp_are_not_kept() -> None:
    """By hand: of each of two layers the gate, its SiLU, the other projection and the product, 48 wide, in float64."""
    whole, tiled = _model("llama"), _model("llama")
    tile_mlps(tiled, 10)
    ids = torch.randint(3, 60, (1, 50))
    assert _kept(whole, ids) - _kept(tiled, ids) == 2 * 4 * 50 * 48 * 8


def test_a_copy_reads_its_own_weights() -> None:
    model = _model("llama")
    tile_mlps(model, 4)
    ids = torch.randint(3, 60, (1, 9))
    before, twin = _loss(model, ids).item(), copy.deepcopy(model)
    with torch.no_grad():
        for mlp in (layer.mlp for layer in twin.model.layers):
            mlp.down_proj.weight.zero_()
    assert _loss(twin, ids).item() != pytest.approx(before, abs=1e-6)
    assert _loss(model, ids).item() == before


@pytest.mark.parametrize(
    "adapter", [None, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}], ids=["full", "LoRA"]
)
def test_a_run_learns_what_it_learns_without_tiles(
    make_recipe: Callable[..., Recipe], tmp_path: Any, adapter: Any
) -> None:
    losses = []
    for name, techniques in {"whole": {}, "tiled": {"mlp_tile": 5}}.items():
        trainer = {"max_steps": 3, "gradient_checkpointing": name == "tiled", "learning_rate": 0.01}
        more = {"adapter": adapter} if adapter else {}
        recipe = make_recipe(run_dir=str(tmp_path / name), techniques=techniques, trainer=trainer, **more)
        train(recipe)
        losses.append([row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_without_such_mlps_is_refused(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinject.train.setup.tile_mlps", lambda model, tokens: [])
    with pytest.raises(RecipeError, match=r"techniques\.mlp_tile: this model has no MLP that kinject knows"):
        train(make_recipe(techniques={"mlp_tile": 5}))
    config = transformers.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=2, num_key_value_heads=1)
    assert tile_mlps(transformers.AutoModelForCausalLM.from_config(config), 5) == []


def test_zero3_refuses_tiles_whose_number_differs_between_processes(make_recipe: Callable[..., Recipe]) -> None:
    for stage, faults in {2: [], 3: ["techniques.mlp_tile"]}.items():
        recipe = make_recipe(techniques={"mlp_tile": 5})
        config = make_sft_config(recipe)
        config.deepspeed_plugin = types.SimpleNamespace(zero_stage=stage)
        assert [key for key, _ in sharding_faults(recipe, config)] == faults


def test_an_mlp_that_reads_more_than_a_token_is_refused(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + x.cumsum(-2))
    with pytest.raises(RecipeError, match=r"an MLP of this model does more than read each token \(logits differ by"):
        train(make_recipe(techniques={"mlp_tile": 5}, trainer={"packing": False}))
