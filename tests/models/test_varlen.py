"""Torch's variable-length attention behind transformers' interface, and when it is chosen.

Its kernel is CUDA's alone, so here a plain loop over the documents stands in for it: what is tested is everything around it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kinject.errors import InputError
from kinject.models import choose_attention, new_model, try_varlen, varlen_unavailable_reason
from kinject.models.varlen import register, varlen_attention

SHAPES: dict[str, dict[str, Any]] = {
    "llama, grouped": {"model_type": "llama", "num_key_value_heads": 2},
    "mistral, short window": {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 5},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(40)[None].repeat(2, 1) % 97 + 5
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 21, 12), (40,))])


def _loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    ends_k: torch.Tensor,
    *longest: int,
    **how: Any,
) -> torch.Tensor:
    """What `varlen_attn` documents, one document after the other."""
    assert torch.equal(ends, ends_k)
    assert ends.dtype == torch.int32
    assert longest == (int(ends.diff().max()),) * 2
    back, ahead = how["window_size"]
    assert ahead == 0
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        n = end - start
        far = torch.arange(n)[:, None] - torch.arange(n)[None]
        seen = (far >= 0) & ((far <= back) if back >= 0 else True)
        out = F.scaled_dot_product_attention(*part, attn_mask=seen, scale=how["scale"], enable_gqa=how["enable_gqa"])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the loop in the kernel's place and count its calls."""
    from torch.nn.attention import varlen

    calls: list[int] = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **how: calls.append(1) or _loop(*args, **how))
    return calls


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_logits_are_those_of_sdpa(
    shape: str, dtype: torch.dtype, tiny_tokenizer: Any, kernel: list[int]
) -> None:
    register()
    logits = []
    for name in ("sdpa", "varlen"):
        model = new_model({**SMALL, **SHAPES[shape]}, tiny_tokenizer, 0, name).to(dtype)
        logits.append(model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits.float())
    assert torch.allclose(*logits, atol=1e-5 if dtype == torch.float32 else 3e-2)
    assert bool(kernel) is (dtype == torch.bfloat16)  # the kernel takes no float32


def test_gradients_flow_to_where_sdpa_sends_them(tiny_tokenizer: Any, kernel: list[int]) -> None:
    register()
    gradients = []
    for name in ("sdpa", "varlen"):
        model = new_model({**SMALL, **SHAPES["llama, grouped"]}, tiny_tokenizer, 0, name)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, position_ids=POSITIONS, labels=IDS, use_cache=False).loss
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, wanted in gradients[0].items():
        assert torch.allclose(gradients[1][name], wanted, atol=0.05 * float(wanted.abs().max())), name
    assert kernel


def test_what_the_kernel_cannot_do_is_refused() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="no dropout"):
        varlen_attention(None, q, q, q, None, dropout=0.1, position_ids=torch.arange(4)[None])
    with pytest.raises(ValueError, match="training rows"):
        varlen_attention(None, q[:, :, :1], q, q, None, position_ids=torch.arange(4)[None])


def test_it_is_taken_only_where_it_reads_the_model_as_sdpa_does(
    tiny_tokenizer: Any, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model({**SMALL, **SHAPES["llama, grouped"]}, tiny_tokenizer, 0, "sdpa")
    assert try_varlen(model) == ""
    assert model.config._attn_implementation == "varlen"
    assert kernel
    from torch.nn.attention import varlen

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    def other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return -30 * v.repeat(1, 2, 1)

    for broken, reason in ((refuse, "no kernel image"), (other, "differ from sdpa's")):
        monkeypatch.setattr(varlen, "varlen_attn", broken)
        model.set_attn_implementation("sdpa")
        assert reason in try_varlen(model)
        assert model.config._attn_implementation == "sdpa"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs an NVIDIA GPU, and the model is on cpu" in varlen_unavailable_reason("cpu")
    with pytest.raises(
        InputError, match=r"model\.attention: varlen needs an NVIDIA GPU.*Or set model\.attention: auto"
    ):
        choose_attention("varlen", "cpu")
    monkeypatch.setattr("kinject.models.hardware.has_fast_bf16", lambda device: False)
    assert "Ampere or newer" in varlen_unavailable_reason("cuda")
    monkeypatch.setattr("kinject.models.hardware.has_fast_bf16", lambda device: True)
    assert varlen_unavailable_reason("cuda") == ""
    assert choose_attention("varlen", "cuda") == "varlen"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install -U torch" in varlen_unavailable_reason("cuda")
    assert choose_attention("auto", "cuda") is None
    with pytest.raises(InputError, match=r"is not installed \(pip install 'kinject\[flash\]'\)"):
        choose_attention("flash_attention_2", "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_attention("auto", "cuda") == "flash_attention_2"
    assert choose_attention("auto", "cpu") is None
