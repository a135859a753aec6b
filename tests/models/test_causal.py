"""A model that reads later tokens is found by that, whatever its configuration says; none that is causal is taken for one.

The window and the tokens that end an answer are found where models keep them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
)

from kinject.errors import InputError
from kinject.models import causal_fault, check_first_position, window_of
from kinject.models.attention import reads_later_tokens
from kinject.models.generate import end_tokens
from small import have_flash_on_cpu

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "head_dim": 16}
_EXPERTS = {**_GROUPED, "num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 64}
_DEEPSEEK = {
    **_SIZES, "moe_intermediate_size": 32, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED, "mistral": {**_GROUPED, "sliding_window": 3}, "gemma3_text": {**_GROUPED, "sliding_window": 3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "gpt_neox": _SIZES, "bloom": {"hidden_size": 32, "n_head": 2},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2}, "falcon": {**_SIZES, "alibi": True}, "mamba": _SIZES,
    "mixtral": _EXPERTS, "gpt_oss": {**_EXPERTS, "sliding_window": 3}, "deepseek_v3": _DEEPSEEK,
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 4},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
    "bert": {**_SIZES, "is_decoder": True}, "roberta": {**_SIZES, "is_decoder": True},
}  # fmt: skip
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "bert": _SIZES, "roberta": _SIZES, "electra": _SIZES, "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 2}, "gemma3_text": {**_GROUPED, "use_bidirectional_attention": True},
}  # fmt: skip


def _model(model_type: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=300, pad_token_id=2, bos_token_id=0, eos_token_id=1, **fields
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_is_not_refused_in_any_dtype(model_type: str) -> None:
    """With sliding windows, chunks, experts, states instead of attention, ALiBi."""
    model = _model(model_type, CAUSAL[model_type])
    assert causal_fault(model.config) == ""
    state = torch.get_rng_state()
    assert not reads_later_tokens(model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not reads_later_tokens(model.bfloat16())


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_model_that_begins_behind_position_0_is_refused(model_type: str) -> None:
    """RoBERTa without positions begins behind its padding token's number."""
    model = _model(model_type, CAUSAL[model_type])
    if model_type == "roberta":
        with pytest.raises(InputError, match="here: roberta does not begin a text at position 0"):
            check_first_position(model, "here")
    else:
        check_first_position(model, "here")
    assert model.training


@pytest.mark.parametrize("model_type", BOTH_WAYS)
def test_a_model_that_reads_later_tokens_is_found(model_type: str) -> None:
    model = _model(model_type, BOTH_WAYS[model_type])
    assert reads_later_tokens(model)


def test_a_mask_that_is_off_by_one_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = _model("llama", _GROUPED)
    made = modeling_llama.create_causal_mask

    def _late(*args: Any, **kwargs: Any) -> Any:
        n = args[1].shape[1] if len(args) > 1 else kwargs["inputs_embeds"].shape[1]
        made(*args, **kwargs)
        return torch.ones(n, n, dtype=torch.bool).tril(1)[None, None]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", _late)
    assert reads_later_tokens(model)


def test_a_sharded_model_is_not_tried() -> None:
    with torch.device("meta"):
        assert not reads_later_tokens(_model("bert", _SIZES))


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (GPT2Config(n_positions=77), 77),
        (LlamaConfig(max_position_embeddings=99), 99),
        (Gemma3Config(text_config={"max_position_embeddings": 55}), 55),
        (MambaConfig(), None),
    ],
)
def test_the_window_is_found_under_its_names_and_inside_a_model_of_texts_and_images(config, window):
    assert window_of(config) == window


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "ends"),
    [(None, None, []), (None, 2, [2]), (0, 2, [0, 2]), ([5, 2], 2, [5, 2])],
)
def test_an_answer_ends_at_the_tokens_of_the_model_and_at_that_of_the_tokenizer(
    of_model, of_tokenizer, ends
):
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=of_model))
    assert end_tokens(model, SimpleNamespace(eos_token_id=of_tokenizer)) == ends


def test_weights_in_float32_are_checked_where_their_attention_is_a_flash_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_flash_on_cpu(monkeypatch)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_GROUPED, vocab_size=90)).eval()
    model.set_attn_implementation("flash_on_cpu")
    assert not reads_later_tokens(model)
    check_first_position(model, "named in a recipe")
    assert model.config._attn_implementation == "flash_on_cpu"
