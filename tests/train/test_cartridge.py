"""Cartridges: packed rows, token trees and generation read them as peft itself does one row at a time; trained and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import CartridgeConfig, PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kinject.corpus.rows import CorpusRow
from kinject.errors import InputError, RecipeError
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.scorer import Scorer
from kinject.models import load_model, new_cartridge, text_start
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.guards import check_isolation
from kinject.train.load import begin_cartridge
from kinject.train.merge import merge_adapter
from small import interrupt

MakeRecipe = Callable[..., Recipe]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "phi": {"num_key_value_heads": 4},
}


def pair(kind: str, folder: Path, n: int = 5, **fields: Any) -> tuple[Any, Any]:
    """A model with a cartridge that kinject reads, and the same as peft reads it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS.get(kind, {}), **fields})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    cartridge = CartridgeConfig(num_virtual_tokens=n, task_type="CAUSAL_LM")
    tuned = new_cartridge(base, cartridge, [1, *range(20, 40)]).eval()
    with torch.no_grad():  # as if trained
        tuned.prompt_encoder["default"].trainable_embedding += 0.5 * torch.randn(n - 1, 1)
    tuned.save_pretrained(folder / "cartridge")
    plain = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return tuned, PeftModel.from_pretrained(plain, folder / "cartridge").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cartridge_is_read_as_peft_reads_it(kind: str, tmp_path: Path) -> None:
    tuned, peft = pair(kind, tmp_path)
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        expected = peft(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.allclose(tuned(input_ids=ids).logits, expected, atol=1e-5)
        with tuned.disable_adapter(), peft.disable_adapter():
            base = peft(input_ids=ids).logits
            assert torch.allclose(tuned(input_ids=ids).logits, base, atol=1e-5)
        assert not torch.allclose(base, expected, atol=1e-2)
        check_isolation(
            tuned, {"input_ids": ids.flatten().tolist(), "position_ids": [*range(9), *range(9)]}
        )
        mask = torch.ones_like(ids)
        written = tuned.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False
        )
        # By peft's forward pass: with transformers 5.24 generate of peft 0.21 leaves the cartridge
        # out.
        for _ in range(6):
            logits = peft(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, ids)


def test_a_token_tree_below_a_cartridge_has_the_log_probs_of_peft(tmp_path: Path) -> None:
    tuned, peft = pair("llama", tmp_path)
    begin, options = [1, 7, 8, 9], [[10, 11, 12], [10, 13], [21, 14, 15]]
    scorer = Scorer(tuned, 64)
    ((_, scores),) = scorer.score([Encoded([begin] * len(options), options)])
    assert scorer.uses_tree
    for option, found in zip(options, scores.log_probs, strict=True):
        ids = torch.tensor([begin + option])
        with torch.no_grad():
            logits = (
                peft(input_ids=ids, attention_mask=torch.ones_like(ids))
                .logits[0, len(begin) - 1 : -1]
                .double()
            )
        expected = torch.log_softmax(logits, -1)[range(len(option)), option].sum()
        assert found == pytest.approx(float(expected), abs=1e-4)


def test_a_cartridge_begins_as_the_first_tokens_of_every_original(tiny_model: Path) -> None:
    loaded, bare = load_model(str(tiny_model)), load_model(str(tiny_model)).model
    texts = ["Person 1 was born in Kelm.", "Farrow", "Person 2 was born in Lowmere."]
    origins = ("original", "original", "generated")
    rows = [
        CorpusRow("", "", origin, "text", text) for text, origin in zip(texts, origins, strict=True)
    ]
    config = CartridgeConfig(num_virtual_tokens=7, task_type="CAUSAL_LM")
    tuned, _ = begin_cartridge(loaded.model, config, loaded.tokenizer, rows)
    first, second = (
        loaded.tokenizer(f"{text}\n\n", add_special_tokens=False).input_ids for text in texts[:2]
    )
    each = next(m for m in range(99) if len(first[:m] + second[:m]) >= 7)
    ids = [text_start(loaded.tokenizer), *first[:each], *second[:each]][:7]
    with torch.no_grad():
        values = (
            bare(input_ids=torch.tensor([ids]), use_cache=True).past_key_values.layers[1].values[0]
        )  # [heads, 7, size]
    found = tuned.prompt_encoder["default"].weight.view(7, -1, 2, *values.shape[::2])[:, 1, 1]
    assert torch.allclose(found, values.transpose(0, 1), atol=1e-6)


def test_a_cartridge_trains_resumes_and_is_loaded_by_peft(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    adapter = {"type": "cartridge", "num_virtual_tokens": 6}
    saving = {"learning_rate": 1e-1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recipe = make_recipe(adapter=adapter, trainer=saving)
    result = train(recipe)
    folder, base = Path(result.model_dir), str(recipe.model.path)
    saved = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
    interrupt(recipe.run_dir, 2)
    assert train(recipe, resume=True).n_steps == 4
    assert torch.equal(load_file(folder / "adapter_model.safetensors")["prompt_embeddings"], saved)
    ids = torch.tensor([[5, 6, 7, 8]])
    tuned, plain = load_model(str(folder)).model, load_model(base).model
    with torch.no_grad():
        before = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, folder).eval()(
            input_ids=ids, attention_mask=torch.ones_like(ids)
        )
        assert torch.allclose(tuned(ids).logits, expected.logits, atol=1e-5)
        assert not torch.allclose(before, expected.logits, atol=1e-2)
    (tmp_path / "folded").mkdir()
    with pytest.raises(
        InputError,
        match=r"of type cartridge cannot be folded into its base .* transformers before 5.24",
    ):
        merge_adapter(folder, tmp_path / "folded")


def test_a_cartridge_that_cannot_be_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    adapter = {"type": "cartridge", "num_virtual_tokens": 6}
    with pytest.raises(
        RecipeError,
        match=r"recipe.yaml:\d+: adapter.num_virtual_tokens: found 90,000, allowed: 1 to ",
    ):
        train(make_recipe(adapter={**adapter, "num_virtual_tokens": 90_000}))
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:\d+: adapter.merge: a cartridge is no part of the weights"
    ):
        train(make_recipe(adapter={**adapter, "merge": True}))
    with pytest.raises(
        InputError,
        match="mistral: a cartridge needs rotary positions and full attention in every layer",
    ):
        pair("mistral", tmp_path, sliding_window=11)
