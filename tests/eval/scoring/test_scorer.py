"""Scores against the naive way (float64, one row a choice), for every architecture and every way to batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kinject.errors import InputError
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.forward import _log_probs
from kinject.eval.scoring.scorer import Scorer
from kinject.eval.scoring.tree import RowLimits
from small import quick

VOCABULARY = 97
_SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZE},
    "mistral, sliding window": {"model_type": "mistral", **_SIZE, "sliding_window": 11},
    "qwen2": {"model_type": "qwen2", **_SIZE},
    "qwen2, some layers slide": {
        "model_type": "qwen2", **_SIZE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_SIZE, "head_dim": 8},
    "gemma2, soft-capping": {
        "model_type": "gemma2", **_SIZE, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **_SIZE, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "phi": {"model_type": "phi", **_SIZE},
    "mixtral": {
        "model_type": "mixtral", **_SIZE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "experts_implementation": "eager",
    },
    "gpt-neo, local layers": {
        "model_type": "gpt_neo", "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 31, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "bloom": {
        "model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "phi3": {"model_type": "phi3", **_SIZE, "sliding_window": 11},
    "olmo2": {"model_type": "olmo2", **_SIZE},
    "gpt-neox": {"model_type": "gpt_neox", **{key: _SIZE[key] for key in _SIZE if key != "num_key_value_heads"}},
    "falcon": {**_FALCON, "alibi": False},
    "falcon, alibi": {**_FALCON, "alibi": True},
    "mpt": {
        "model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3-next": {
        "model_type": "qwen3_next", **_SIZE, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "experts_implementation": "eager",
    },
    "gpt-oss": {
        "model_type": "gpt_oss", **_SIZE, "head_dim": 8, "sliding_window": 9, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "experts_implementation": "eager",
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", **_SIZE, "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "experts_implementation": "eager",
    },
    "llama4, chunks": {
        "model_type": "llama4_text", **_SIZE, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 48,
        "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
}  # fmt: skip
LONGROPE = {
    "model_type": "phi3", **_SIZE, "sliding_window": None, "original_max_position_embeddings": 62,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4,
        "long_factor": [5.0, 4.0, 2.0, 1.5], "original_max_position_embeddings": 62,
    },
}  # fmt: skip
"""Contexts of `make_prompts` have 48, 63 and 75 tokens."""
_SLOW = (
    "phi3",
    "olmo2",
    "gpt-neox",
    "falcon",
    "mpt",
    "qwen3-next",
    "deepseek-v3",
    "llama4, chunks",
)
EVERY = quick(ARCHITECTURES, *(name for name in ARCHITECTURES if name not in _SLOW))
"""All architectures; those that repeat what another one shows are asked in `make soak`."""


def make_model(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model, its weights large enough that every token matters."""
    options = dict(ARCHITECTURES[architecture])
    experts = options.pop("experts_implementation", None)
    config = CONFIG_MAPPING[options.pop("model_type")](**options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if experts:  # grouped_mm knows no float64
        model.config._experts_implementation = experts
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


def make_prompts(seed: int = 0, n_questions: int = 6) -> list[Encoded]:
    """Return prompts that share a header, passages and questions, with continuations of unequal length."""
    random = np.random.default_rng(seed)

    def ids(n: int) -> Any:
        return random.integers(3, VOCABULARY, n, dtype=np.int32)

    header, prompts = ids(40), []
    for _ in range(n_questions):
        passages, question = [ids(15), ids(12)], ids(8)
        for k in range(3):
            context = np.concatenate([header, *passages[:k], question])
            same = ids(2)
            continuations = (
                ids(1),
                np.concatenate([same, ids(1)]),
                np.concatenate([same, ids(3)]),
                ids(3),
            )
            prompts.append(Encoded((context,) * 4, continuations))
    return prompts


def score(scorer: Scorer, prompts: list[Encoded]) -> np.ndarray:
    scores = dict(scorer.score(prompts))
    assert sorted(scores) == list(range(len(prompts)))
    return np.array([scores[index].log_probs for index in range(len(prompts))])


SMALL_ROWS = RowLimits(row=24, longest=24, overhead=0)
PLAIN = {"gpt-neo, local layers", "bloom", "mamba", "falcon, alibi", "mpt", "qwen3-next"}
WHOLE = {"llama4, chunks"}  # its head cannot run apart from its layers


@pytest.mark.parametrize("architecture", EVERY)
def test_log_probs_equal_a_naive_pass_in_float64(architecture, score_naively):
    model, prompts = make_model(architecture), make_prompts()
    usual, nested = Scorer(model, 512), Scorer(model, 128, SMALL_ROWS)
    first, second = score(usual, prompts), score(nested, prompts)
    expected = score_naively(model, prompts)
    assert expected.std() > 1  # else agreement would mean little
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(second, expected, rtol=0, atol=1e-4)
    assert usual.forward.split == (architecture not in PLAIN | WHOLE)
    if architecture not in PLAIN:
        assert usual.uses_tree
        assert nested.n_pushed < 2 * nested.n_least


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mamba", "it takes no position_ids"),
        ("bloom", "it takes no position_ids"),
        ("gpt-neo, local layers", "its local layers count the columns of a row"),
    ],
)
def test_an_architecture_that_cannot_read_a_tree_gets_plain_rows_and_it_is_said(
    architecture, reason
):
    scorer = Scorer(make_model(architecture), 512)
    assert not scorer.uses_tree
    assert [reason in note for note in scorer.notes] == [True]


def test_a_model_that_returns_the_logits_of_every_token_is_scored_at_those_of_the_choices(
    score_naively,
):
    model, prompts = make_model("bloom"), make_prompts(5, 2)
    expected, whole = score_naively(model, prompts), model.forward

    def forward(input_ids, attention_mask=None, **_):  # as xLSTM's
        return whole(input_ids=input_ids, attention_mask=attention_mask)

    model.forward = forward
    np.testing.assert_allclose(score(Scorer(model, 512), prompts), expected, rtol=0, atol=1e-4)


def test_longrope_reads_a_sequence_by_its_own_length_and_not_by_that_of_others(
    monkeypatch, score_naively
):
    monkeypatch.setitem(ARCHITECTURES, "longrope", LONGROPE)
    model, prompts = make_model("longrope"), make_prompts(3, 2)
    scorer = Scorer(model, 512)
    expected = score_naively(model, prompts)
    np.testing.assert_allclose(score(scorer, prompts), expected, rtol=0, atol=1e-4)
    assert scorer.uses_tree
    assert score(scorer, prompts[:1]).tolist() == [pytest.approx(expected[0].tolist(), abs=1e-4)]
    note = "plain rows for sequences of over 62 tokens, which longrope reads otherwise"
    assert scorer.notes == [note]


@pytest.mark.parametrize(
    ("architecture", "instead"), [("llama", "sdpa"), ("gemma2, soft-capping", "eager")]
)
def test_an_attention_without_masks_is_replaced_and_it_is_said(architecture, instead):
    model = make_model(architecture)
    model.set_attn_implementation("flex_attention")
    scorer = Scorer(model, 512)
    assert scorer.forward.config._attn_implementation == instead
    assert scorer.notes == [f"scored with {instead} attention instead of flex_attention"]


@pytest.mark.parametrize("batch_tokens", [1, 70, 300, 100_000])
def test_scores_do_not_depend_on_the_batch(batch_tokens):
    model, prompts = make_model("llama"), make_prompts()
    np.testing.assert_allclose(
        score(Scorer(model, batch_tokens), prompts),
        score(Scorer(model, 1000), prompts),
        rtol=0,
        atol=2e-5,
    )


def test_half_precision_is_summed_in_float32():
    model, prompts = make_model("llama", torch.bfloat16), make_prompts()
    scorer = Scorer(model, 512)
    scores = score(scorer, prompts)
    assert model.lm_head(torch.ones(1, 32, dtype=torch.bfloat16)).dtype == torch.float32, (
        "rounded logits tie"
    )
    assert len(np.unique(scores)) == scores.size  # in bfloat16 log-probs about 1 in 100 would tie


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    "trained", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [5, 60]}}]
)
def test_a_head_that_an_adapter_trains_gives_logits_in_float32_too(trained: dict[str, Any]) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], **trained)
    tuned: Any = get_peft_model(make_model("llama", torch.bfloat16), config).eval()
    with torch.no_grad():
        for weight in tuned.parameters():
            if weight.requires_grad:
                weight += 0.1
    head = tuned.get_base_model().get_output_embeddings()
    states = torch.arange(64, dtype=torch.bfloat16).view(2, 32) / 64
    rounded = head(states)
    Scorer(tuned, 512)
    logits = head(states)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.to(torch.bfloat16), rounded)
    assert not torch.equal(logits, rounded.float())


def test_the_head_sees_only_what_is_scored():
    model, prompts = make_model("llama"), make_prompts()
    seen = []
    hook = model.lm_head.register_forward_hook(
        lambda *call: seen.append(call[2].shape[:-1].numel())
    )
    scorer = Scorer(model, 4096)
    assert scorer.uses_tree
    seen.clear()
    score(scorer, prompts)
    hook.remove()
    n_positions = sum(
        len({tuple(ids[:n]) for ids in prompt.continuations for n in range(len(ids))})
        for prompt in prompts
    )
    n_beginnings = len(seen) - sum(n > 1 for n in seen)
    assert sum(seen) <= n_positions + n_beginnings


def test_padding_stays_below_a_tenth_with_questions_of_all_lengths():
    random = np.random.default_rng(0)
    header, prompts = random.integers(3, VOCABULARY, 400, dtype=np.int32), []
    for _ in range(60):
        context = np.concatenate(
            [header, random.integers(3, VOCABULARY, int(random.integers(20, 180)), dtype=np.int32)]
        )
        choices = (
            random.integers(3, VOCABULARY, int(random.integers(1, 25)), dtype=np.int32)
            for _ in range(4)
        )
        prompts.append(Encoded((context,) * 4, tuple(choices)))
    scorer = Scorer(make_model("llama"), 16_384)
    score(scorer, prompts)
    assert scorer.n_least < scorer.n_pushed < 1.10 * scorer.n_least


def test_letters_of_one_question_cost_one_sequence():
    context = np.arange(3, 60, dtype=np.int32)
    letters = tuple(np.array([letter], dtype=np.int32) for letter in (70, 71, 72, 73))
    scorer = Scorer(make_model("gpt2"), 512)
    score(scorer, [Encoded((context,) * 4, letters)])
    assert scorer.n_pushed == scorer.n_least == len(context)


def test_sharing_reads_a_fraction_of_the_tokens():
    prompts = make_prompts(n_questions=30)
    scorer = Scorer(make_model("llama"), 512)
    score(scorer, prompts)
    separate = sum(
        len(a) + len(b) - 1
        for p in prompts
        for a, b in zip(p.contexts, p.continuations, strict=True)
    )
    assert scorer.n_pushed < separate / 6
    assert scorer.n_pushed < 1.15 * scorer.n_least


def fail_above(
    monkeypatch, n_tokens: int, message: str = "can't allocate memory: you tried to allocate"
) -> list[int]:
    """Let every pass of more than n_tokens run out of memory; return the sizes of those that went through."""
    from kinject.eval.scoring.forward import TreeForward

    sizes: list[int] = []
    whole = TreeForward._read

    def limited(self, rows, ids, **inputs):
        if ids.size > n_tokens:
            raise RuntimeError(message)
        sizes.append(ids.size)
        return whole(self, rows, ids, **inputs)

    monkeypatch.setattr(TreeForward, "_read", limited)
    return sizes


def test_a_sequence_that_alone_is_too_long_is_reported(monkeypatch):
    scorer = Scorer(make_model("llama"), 512)
    assert scorer.uses_tree
    fail_above(monkeypatch, 3)
    with pytest.raises(InputError, match=r"Out of memory with .* tokens in one pass"):
        score(scorer, make_prompts())


def test_a_broken_model_answers_nan():
    model = make_model("llama")
    model.lm_head.weight.data[5] = float("nan")
    assert np.isnan(score(Scorer(model, 512), make_prompts())).all()


def test_an_empty_continuation_is_nan_and_the_others_are_scored():
    context, nothing = np.arange(3, 20, dtype=np.int32), np.zeros(0, dtype=np.int32)
    some = np.array([7, 8], dtype=np.int32)
    scorer = Scorer(make_model("llama"), 512)
    scored = dict(
        scorer.score([Encoded((context,) * 2, (nothing, some)), Encoded((context,), (nothing,))])
    )
    assert np.isnan(scored[0].log_probs[0])
    assert scored[0].log_probs[1] < 0
    assert np.isnan(scored[1].log_probs).all()


def test_an_adapter_is_scored_with_its_weights(score_naively):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    ).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    prompts = make_prompts()
    scores = score(Scorer(model, 512), prompts)
    np.testing.assert_allclose(scores, score_naively(model, prompts), rtol=0, atol=1e-4)
    with model.disable_adapter():
        assert np.abs(scores - score_naively(model, prompts)).max() > 0.1


def test_greedy_is_what_the_model_would_have_written():
    model, scorer_prompts = make_model("llama"), []
    for prompt in make_prompts():
        written: list[int] = []
        for _ in range(2):
            ids = torch.tensor([[*prompt.contexts[0].tolist(), *written]])
            with torch.no_grad():
                written.append(int(model(ids).logits[0, -1].argmax()))
        whole, first = np.array(written, dtype=np.int32), np.array(written[:1], dtype=np.int32)
        other, half = (
            (first + 1) % VOCABULARY,
            np.array([written[0], (written[1] + 2) % VOCABULARY], dtype=np.int32),
        )
        scorer_prompts.append(Encoded((prompt.contexts[0],) * 4, (whole, first, other, half)))
    scores = dict(Scorer(model, 512).score(scorer_prompts))
    assert {score.greedy for score in scores.values()} == {(True, True, False, False)}


def test_of_equally_likely_tokens_the_first_is_greedy():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]], dtype=torch.bfloat16)
    scores = _log_probs(logits, np.array([0, 1, 0, 0]), np.array([1, 0, 2, 0]))
    assert scores.greedy.tolist() == [True, True, False, False]
    np.testing.assert_allclose(
        scores.log_probs, logits.double().log_softmax(-1)[[0, 1, 0, 0], [1, 0, 2, 0]], atol=1e-6
    )
