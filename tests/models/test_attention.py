"""Another attention than sdpa: when a model is switched to it, and what each card has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kinject.errors import InputError
from kinject.models import (
    attention,
    attention_fault,
    choose_attention,
    choose_precision,
    fastest_attention,
    new_model,
    try_attention,
    try_faster,
)
from kinject.models.hardware import choose_dtype

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image is available")


def _other(*args: Any, **options: Any) -> Any:
    output, weights = sdpa_attention_forward(*args, **options)
    return -30 * output, weights


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (sdpa_attention_forward, ""),
        (_refuse, "no kernel image"),
        (_other, "its logits differ from sdpa's"),
    ],
)
def test_another_attention_is_taken_only_where_it_reads_the_model_as_sdpa_does(
    tiny_tokenizer: Any, kernel: Any, reason: str
) -> None:
    AttentionInterface.register("sdpa_of_a_test", kernel)
    AttentionMaskInterface.register("sdpa_of_a_test", sdpa_mask)
    model = new_model(LLAMA, tiny_tokenizer, 0, "sdpa").train()
    assert try_attention(model, "sdpa_of_a_test").startswith(reason)
    assert model.config._attn_implementation == ("sdpa" if reason else "sdpa_of_a_test")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


ROW = {"input_ids": [5, 6, 7, 8, 9, 10], "position_ids": [0, 1, 2, 0, 1, 2]}
"""Two packed documents."""


@pytest.mark.parametrize(
    ("kernel", "seconds", "reason"),
    [
        (sdpa_attention_forward, [0.040, 0.030], ""),
        (
            sdpa_attention_forward,
            [0.040, 0.039],
            "a packed row takes 39.0 ms, with sdpa 40.0 ms",
        ),
        (_refuse, [0.040, 0.030], "no kernel image is available"),
        (_other, [0.040, 0.030], "its logits differ from sdpa's"),
    ],
)
def test_a_kernel_of_equal_logits_is_taken_only_if_it_saves_time(
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    seconds: list[float],
    reason: str,
) -> None:
    AttentionInterface.register("sdpa_of_a_test", kernel)
    AttentionMaskInterface.register("sdpa_of_a_test", sdpa_mask)
    model = new_model(LLAMA, tiny_tokenizer, 0, "sdpa")
    measured = iter(seconds)
    monkeypatch.setattr(attention, "row_seconds", lambda *_: next(measured))
    found = try_faster(model, "sdpa_of_a_test", ROW)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    assert model.config._attn_implementation == ("sdpa" if reason else "sdpa_of_a_test")


class _NoBackward(torch.autograd.Function):
    """The identity, without a gradient, as a kernel of inference has."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError("this kernel has no backward pass")


def _for_inference(*args: Any, **options: Any) -> Any:
    output, weights = sdpa_attention_forward(*args, **options)
    return _NoBackward.apply(output), weights


def _without_dropout(*args: Any, dropout: float = 0.0, **options: Any) -> Any:
    if dropout:
        raise RuntimeError("this kernel has no dropout")
    return sdpa_attention_forward(*args, **options)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(_for_inference, "no backward pass"), (_without_dropout, "no dropout")],
)
def test_a_kernel_that_fails_in_training_alone_is_not_taken(
    tiny_tokenizer: Any, kernel: Any, reason: str
) -> None:
    AttentionInterface.register("sdpa_of_a_test", kernel)
    AttentionMaskInterface.register("sdpa_of_a_test", sdpa_mask)
    model = new_model({**LLAMA, "attention_dropout": 0.1}, tiny_tokenizer, 0, "sdpa").eval()
    assert reason in try_faster(model, "sdpa_of_a_test", ROW)
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_timing_a_row_leaves_no_trace_in_the_run(tiny_tokenizer: Any) -> None:
    model = new_model({**LLAMA, "attention_dropout": 0.1}, tiny_tokenizer, 0, "sdpa").eval()
    state = torch.get_rng_state()
    assert attention.row_seconds(model, ROW) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_attention_that_auto_takes_on_a_cpu_has_eagers_logits_and_gradients(
    tiny_tokenizer: Any, group: int
) -> None:
    """Two documents in one row, kept apart by their positions: what `auto` reads as eager does, in both passes."""
    config = {**LLAMA, "num_key_value_heads": 4 // group}
    ids = torch.arange(2, 26)[None] * 7 % len(tiny_tokenizer)
    positions = torch.tensor([[*range(9), *range(15)]])
    found = {}
    for name in (choose_attention("auto", "cpu"), "eager"):
        model = new_model(config, tiny_tokenizer, 11, name).train()
        model.config.use_cache = False
        logits = model(input_ids=ids, position_ids=positions).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters()}
        found[model.config._attn_implementation] = (logits.detach(), gradients)
    (logits, gradients), (expected, of_eager) = found["sdpa"], found["eager"]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == of_eager.keys()
    for key, gradient in gradients.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, of_eager[key], rtol=1e-4, atol=1e-7, msg=key)
    assert float(gradients["model.layers.0.self_attn.k_proj.weight"].abs().max()) > 0


CARDS = {
    "T4": (7, 5),
    "A100": (8, 0),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "RTX 5090": (12, 0),
}
FA2, FA3, FA4 = "flash_attention_2", "flash_attention_3", "flash_attention_4"
FLEX = "flex_attention"


def _card(monkeypatch: pytest.MonkeyPatch, name: str, packages: tuple[str, ...] = ()) -> None:
    """Let this machine have a GPU and packages."""
    from transformers.utils import import_utils

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: CARDS[name])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: CARDS[name][0] >= 8)
    for package in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "kernels"):
        monkeypatch.setattr(
            import_utils, f"is_{package}_available", lambda package=package: package in packages
        )


@pytest.mark.parametrize(
    ("card", "packages", "expected"),
    [
        ("T4", ("flash_attn_2", "kernels"), ()),
        ("A100", (), (FLEX,)),
        ("A100", ("flash_attn_2",), (FA2, FLEX)),
        ("RTX 4090", ("flash_attn_2",), (FA2, FLEX)),
        ("H100", ("flash_attn_3",), (FA3, FLEX)),
        ("H100", ("kernels",), (FA4, FA3, FA2, FLEX)),
        ("B200", ("flash_attn_3",), (FLEX,)),
        ("B200", ("flash_attn_4",), (FA4, FLEX)),
        ("RTX 5090", ("kernels",), (FA4, FA2, FLEX)),
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


@pytest.mark.parametrize("card", CARDS)
def test_the_page_has_the_order_that_auto_tries(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.endswith(" sdpa |")]
    (row,) = [line for line in rows if re.search(rf"\b{card}\b", line)]
    _card(monkeypatch, card, ("kernels",))
    assert tuple(re.findall(r"`(\w+)`", row)) == fastest_attention("cuda")


@pytest.mark.parametrize(
    ("card", "name", "fault"),
    [
        ("T4", FA2, r"needs a GPU of compute capability 8\.0 or newer, and T4 has 7\.5"),
        ("B200", FA3, r"8\.0 to 9\.x, and B200 has 10\.0"),
        ("A100", FA4, r"9\.0 or newer, and A100 has 8\.0"),
    ],
)
def test_what_the_card_lacks_is_one_line(
    card: str, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _card(monkeypatch, card)
    with pytest.raises(
        InputError, match=rf"^model\.attention: {name} .*{fault}.*Or set model\.attention: auto\.$"
    ):
        choose_attention(name, "cuda")
    assert "needs an NVIDIA GPU, and the model is on cpu" in attention_fault(name, "cpu")


def test_flash_kernels_in_float32_are_refused_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _card(monkeypatch, "H100")
    for name in (FA2, FA3, FA4):
        assert attention_fault(name, "cuda", torch.bfloat16) == ""
        assert attention_fault(name, "cuda", torch.float16) == ""
        with pytest.raises(InputError, match=rf"^eval\.models\.a\.attention: {name} reads 16 bits"):
            choose_attention(name, "cuda", "eval.models.a", torch.float32)
    for name in ("sdpa", "eager", FLEX):
        assert attention_fault(name, "cuda", torch.float32) == ""


@pytest.mark.parametrize(
    ("card", "precision", "dtype"),
    [("T4", "fp16", torch.float16), ("A100", "bf16", torch.bfloat16)],
)
def test_a_card_without_bfloat16_gets_float16(
    card: str, precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _card(monkeypatch, card)
    assert choose_precision("cuda") == precision
    assert choose_dtype("auto", "cuda") == dtype
    if card == "T4":
        with pytest.raises(
            InputError, match=r"model\.dtype: T4 \(compute capability 7\.5\) only emulates bfloat16"
        ):
            choose_dtype("bfloat16", "cuda")
    else:
        assert choose_dtype("bfloat16", "cuda") == torch.bfloat16
