"""Torch's own variable-length attention as an attention of transformers: measured beside those that kinject can choose.

kinject does not use it. Where its figures show that it is what makes packed rows fast without flash-attn, which has no wheel,
it belongs into kinject.models.attention, with dropout, windows and capped logits refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NAME = "varlen"
_CAUSAL = (-1, 0)
"""The window of torch's kernel: all tokens before, none behind."""


def register() -> None:
    """Make `NAME` known to transformers, as an attention without a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def use(model: PreTrainedModel) -> None:
    """Let a model read packed rows with torch's kernel. Raises `RuntimeError` on a CPU, which has none."""
    if model.device.type == "cpu":
        raise RuntimeError(f"{NAME} needs an NVIDIA GPU, and the model is on cpu")
    register()
    model.set_attn_implementation(NAME)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention [rows, length, heads, dimension] of packed rows: a document begins where the positions restart."""
    import torch
    from torch.nn.attention import varlen

    n_rows, n_heads, length, size = query.shape
    starts = options["position_ids"].expand(n_rows, length) == 0
    # A row begins a document, whatever its positions.
    starts = starts | (torch.arange(length, device=query.device) == 0)
    offsets = starts.flatten().nonzero()[:, 0].to(torch.int32)
    offsets = torch.cat([offsets, offsets.new_tensor([starts.numel()])])
    longest = int(offsets.diff().max())
    # Keys are repeated, since the kernel of torch 2.11 has no parameter for grouped heads.
    groups = n_heads // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Under autocast rotary positions leave query and key in float32; the kernel knows 16 bits alone.
    half = torch.get_autocast_dtype(query.device.type)
    flat = [
        part.to(half).transpose(1, 2).reshape(n_rows * length, n_heads, size)
        for part in (query, key, value)
    ]
    out = varlen.varlen_attn(
        *flat,
        offsets,
        offsets,
        longest,
        longest,
        scale=options.get("scaling"),
        window_size=_CAUSAL,
    )
    # Without autocast the weights behind it have the dtype of the values.
    return out.view(n_rows, length, n_heads, size).to(value.dtype), None
