"""bitsandbytes on a CPU: states in 8 bits, adapters on packed weights, and bases that are stored packed.

Each test is of public reports, which docs/public-reports.md lists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kinject.errors import InputError, RecipeError
from kinject.models import LoadOptions, load_model, new_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.merge import merge_adapter
from small import interrupt, quick

MakeRecipe = Callable[..., Recipe]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SAVED = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def wide(tmp_path: Path, tiny_tokenizer: Any, tiny_config: dict[str, Any]) -> Path:
    """A model with a head of its own whose matrices have 4,096 numbers and more: smaller ones have states in 32 bits."""
    fields = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    folder = tmp_path / "wide"
    new_model({**tiny_config, **fields}, tiny_tokenizer, 0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def packed(wide: Path, tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """The same model, stored in 4 bits as models on the hub are."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        wide, quantization_config=settings, dtype=torch.bfloat16
    )
    folder = tmp_path / "packed"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def _trained(model_dir: str) -> dict[str, torch.Tensor]:
    (file,) = Path(model_dir).glob("*model.safetensors")
    return load_file(file)


def _assert_resumes_to_the_bit(make_recipe: MakeRecipe, run: Path, **sections: Any) -> None:
    uninterrupted = _trained(train(make_recipe(run_dir=str(run), **sections)).model_dir)
    interrupt(run, 2)
    resumed = _trained(train(make_recipe(run_dir=str(run), **sections), resume=True).model_dir)
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.parametrize("optim", quick(["adamw_8bit", "lion_8bit"], "adamw_8bit"))
def test_states_in_eight_bits_go_through_a_checkpoint_as_they_are(
    make_recipe: MakeRecipe, wide: Path, tmp_path: Path, optim: str
) -> None:
    """torch casts the states of a checkpoint to the dtype of their weights."""
    run = tmp_path / "run"
    trainer = {**SAVED, "optim": optim}
    _assert_resumes_to_the_bit(make_recipe, run, model={"path": str(wide)}, trainer=trainer)
    states = torch.load(run / "checkpoint-4/optimizer.pt", weights_only=True)["state"].values()
    packed = (state.get("__bnb_optimizer_quant_state__", state) for state in states)
    kinds = {state["state1"].dtype for state in packed}
    assert kinds == {
        torch.uint8,
        torch.float32,
    }  # norms are small, and the embedding stays in 32 bits


def test_an_adapter_on_packed_weights_learns_resumes_and_folds_into_the_plain_base(
    make_recipe: MakeRecipe, wide: Path, tmp_path: Path
) -> None:
    """With checkpointing, below which a frozen base once passed no gradient; folded into what was packed it is rounded away."""
    run = tmp_path / "run"
    model = {"path": str(wide), "quantization": "4bit", "dtype": "bfloat16"}
    trainer = {**SAVED, "gradient_checkpointing": True}
    _assert_resumes_to_the_bit(make_recipe, run, model=model, adapter=LORA, trainer=trainer)
    parts = _trained(str(run / "model"))
    assert all(weight.abs().max() > 0 for name, weight in parts.items() if "lora_B" in name)
    assert len(parts) == 2 * 7 * 2  # seven matrices of each layer: the head is none of all-linear
    folded = tmp_path / "folded"
    folded.mkdir()
    merge_adapter(run / "model", folded)
    ours, base = load_file(folded / "model.safetensors"), load_file(wide / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        stem = f"model.layers.1.{name}"
        b, a = (
            parts[f"base_model.model.{stem}.lora_{part}.weight"].double() for part in ("B", "A")
        )
        learned = ours[f"{stem}.weight"].double() - base[f"{stem}.weight"].double()
        torch.testing.assert_close(learned, 2 * b @ a, rtol=0, atol=1e-6)
    assert {weight.dtype for weight in ours.values()} == {torch.float32}


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_what_is_not_packed_keeps_the_dtype_of_the_recipe(
    make_recipe: MakeRecipe, wide: Path, quantization: str
) -> None:
    """Norms, embedding and head in float32 would take more memory than the packed weights saved."""
    loaded = load_model(str(wide), LoadOptions(quantization=quantization, dtype="bfloat16"))
    plain = {
        name: weight.dtype for name, weight in loaded.model.named_parameters() if "proj" not in name
    }
    assert len(plain) == 7
    assert set(plain.values()) == {torch.bfloat16}
    assert isinstance(loaded.model.lm_head, torch.nn.Linear)
    layer = loaded.model.model.layers[0].mlp.up_proj
    assert getattr(layer, "compute_dtype", torch.bfloat16) == torch.bfloat16
    assert loaded.model(IDS).logits.dtype == torch.bfloat16


def test_a_base_that_is_stored_packed_is_named_by_the_recipe(
    make_recipe: MakeRecipe, packed: Path, wide: Path, tmp_path: Path
) -> None:
    """Otherwise it would pass for a plain one: trained whole, folded into, decomposed."""
    for model, found in (
        ({"path": str(packed)}, "none"),
        ({"path": str(packed), "quantization": "8bit"}, "8bit"),
    ):
        adapter = LORA if found == "8bit" else None
        with pytest.raises(
            RecipeError,
            match=rf"model\.quantization: found {found}, and the weights of .* are stored in 4bit",
        ):
            train(make_recipe(model=model, **({"adapter": adapter} if adapter else {})))
    losses = []
    for base in (packed, wide):
        model = {"path": str(base), "quantization": "4bit", "dtype": "bfloat16"}
        run = str(tmp_path / f"run-{base.name}")
        losses.append(train(make_recipe(model=model, adapter=LORA, run_dir=run)).final_loss)
    assert losses[0] == losses[1]


def test_a_packed_base_is_scored_as_it_is_stored(packed: Path, wide: Path) -> None:
    stored = load_model(str(packed), LoadOptions(dtype="bfloat16"))
    now = load_model(str(wide), LoadOptions(dtype="bfloat16", quantization="4bit"))
    assert torch.equal(stored.model(IDS).logits, now.model(IDS).logits)
    assert "bfloat16 in 4bit" in stored.notes[0]
    with pytest.raises(InputError, match=r"quantization: found 8bit, .* are stored in 4bit"):
        load_model(str(packed), LoadOptions(quantization="8bit"))


def test_a_row_in_eight_bits_is_read_alone_as_in_a_batch(wide: Path) -> None:
    """On GPUs a feature that is large in one row is multiplied in 16 bits for all rows of the batch."""
    options = LoadOptions(quantization="8bit", dtype="float32", device="cpu")
    model = load_model(str(wide), options).model
    rows = torch.arange(20).reshape(4, 5) + 3
    alone = torch.cat([model(row[None]).logits for row in rows])
    torch.testing.assert_close(model(rows).logits, alone, rtol=0, atol=1e-6)
