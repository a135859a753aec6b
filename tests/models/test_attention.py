"""Torch's variable-length attention behind transformers' interface, and when it is chosen.

Its kernel is CUDA's alone, so here a plain loop over the documents stands in for it: what is tested is everything around it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kinject.errors import InputError
from kinject.models import (
    attention_fault,
    choose_attention,
    choose_precision,
    fastest_attention,
    new_model,
    try_attention,
)
from kinject.models.attention import register, varlen_attention
from kinject.models.hardware import choose_dtype

SHAPES: dict[str, dict[str, Any]] = {
    "llama, grouped": {"model_type": "llama", "num_key_value_heads": 2},
    "mistral, short window": {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 5},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(40)[None].repeat(2, 1) % 97 + 5
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 21, 12), (40,))])


def _loop(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, longest: Any, longest_k: Any, back: int, scale: Any) -> Any:
    """What `varlen_attn` documents, one document after the other; `back`: tokens that a token sees before it, -1 for all."""
    assert torch.equal(ends, ends_k)
    assert ends.dtype == torch.int32
    assert longest == longest_k == int(ends.diff().max())
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        n = end - start
        far = torch.arange(n)[:, None] - torch.arange(n)[None]
        seen = (far >= 0) & ((far <= back) if back >= 0 else True)
        gqa = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(*part, attn_mask=seen, scale=scale, enable_gqa=gqa)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the loop in the kernel's place and count its calls."""
    from torch.nn.attention import varlen

    calls: list[int] = []

    def varlen_attn(q: Any, k: Any, v: Any, a: Any, b: Any, n: int, m: int, *, scale: Any = None,
                    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Any:  # fmt: skip
        assert enable_gqa or k.shape[1] == q.shape[1]
        assert window_size[1] == 0
        calls.append(1)
        return _loop(q, k, v, a, b, n, m, window_size[0], scale)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
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


def test_a_batch_finds_its_documents_once(
    tiny_tokenizer: Any, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search waits for the GPU; every layer, and the next batch, must still get its own documents."""
    register()
    model = new_model({**SMALL, **SHAPES["llama, grouped"]}, tiny_tokenizer, 0, "varlen").to(torch.bfloat16)
    searches = []
    nonzero = torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda tensor: searches.append(1) or nonzero(tensor))
    for positions in (POSITIONS.clone(), POSITIONS.flip(0)):
        model(input_ids=IDS, position_ids=positions, use_cache=False)
    assert len(searches) == 2
    assert len(kernel) == 4  # two layers


def test_it_is_taken_only_where_it_reads_the_model_as_sdpa_does(
    tiny_tokenizer: Any, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model({**SMALL, **SHAPES["llama, grouped"]}, tiny_tokenizer, 0, "sdpa").train()
    assert try_attention(model, "varlen") == ""
    assert model.config._attn_implementation == "varlen"
    assert model.training
    assert kernel
    assert all(parameter.grad is None for parameter in model.parameters())
    from torch.nn.attention import varlen

    def refuse(q: Any, k: Any, v: Any, *_: Any, window_size: Any, enable_gqa: Any, scale: Any) -> None:
        raise RuntimeError("no kernel image is available")

    def other(q: Any, k: Any, v: Any, *_: Any, window_size: Any, enable_gqa: Any, scale: Any) -> torch.Tensor:
        return -30 * v.repeat(1, 2, 1)

    faults = {"no kernel image": refuse, "differ from sdpa's": other}
    for reason, broken in faults.items():
        monkeypatch.setattr(varlen, "varlen_attn", broken)
        model.set_attn_implementation("sdpa")
        assert reason in try_attention(model, "varlen")
        assert model.config._attn_implementation == "sdpa"


CARDS = {"T4": (7, 5), "A100": (8, 0), "RTX 4090": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
FA2, FA3, FA4 = "flash_attention_2", "flash_attention_3", "flash_attention_4"


def _card(monkeypatch: pytest.MonkeyPatch, name: str, packages: tuple[str, ...] = ()) -> None:
    """Let this machine have a GPU and packages."""
    from transformers.utils import import_utils

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: CARDS[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: CARDS[name][0] >= 8)
    for package in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "kernels"):
        monkeypatch.setattr(import_utils, f"is_{package}_available", lambda package=package: package in packages)


@pytest.mark.parametrize(
    ("card", "packages", "expected"),
    [
        ("T4", ("flash_attn_2", "kernels"), ()),
        ("A100", (), ("varlen",)),
        ("A100", ("flash_attn_2",), (FA2, "varlen")),
        ("RTX 4090", ("flash_attn_2",), (FA2, "varlen")),
        ("H100", ("flash_attn_3",), (FA3, "varlen")),
        ("B200", ("flash_attn_3",), ("varlen",)),
        ("B200", ("flash_attn_4",), (FA4, "varlen")),
        ("RTX 5090", ("kernels",), (FA4, FA2, "varlen")),
    ],
)
def test_auto_tries_what_the_card_has_and_is_installed(
    card: str, packages: tuple[str, ...], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _card(monkeypatch, card, packages)
    assert fastest_attention("cuda") == expected
    assert fastest_attention("cpu") == ()
    assert choose_attention("auto", "cuda") is None
    for name in expected:
        assert choose_attention(name, "cuda") == name


@pytest.mark.parametrize(
    ("card", "name", "fault"),
    [
        ("T4", FA2, r"needs a GPU of compute capability 8\.0 or newer, and T4 has 7\.5"),
        ("T4", "varlen", r"8\.0 or newer, and T4 has 7\.5"),
        ("B200", FA3, r"8\.0 to 9\.x, and B200 has 10\.0"),
        ("A100", FA4, r"9\.0 or newer, and A100 has 8\.0"),
    ],
)
def test_what_the_card_lacks_is_one_line(card: str, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, card)
    with pytest.raises(InputError, match=rf"^model\.attention: {name} .*{fault}.*Or set model\.attention: auto\.$"):
        choose_attention(name, "cuda")
    assert "needs an NVIDIA GPU, and the model is on cpu" in attention_fault(name, "cpu")


@pytest.mark.parametrize(
    ("card", "precision", "dtype"), [("T4", "fp16", torch.float16), ("A100", "bf16", torch.bfloat16)]
)
def test_a_card_without_bfloat16_gets_float16(
    card: str, precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _card(monkeypatch, card)
    assert choose_precision("cuda") == precision
    assert choose_dtype("auto", "cuda") == dtype
    if card == "T4":
        with pytest.raises(InputError, match=r"model\.dtype: T4 \(compute capability 7\.5\) only emulates bfloat16"):
            choose_dtype("bfloat16", "cuda")
    else:
        assert choose_dtype("bfloat16", "cuda") == torch.bfloat16
