"""Torch's variable-length flash attention for transformers: a packed row costs what its documents cost one by one.

A document begins where the positions restart. For training only: there is no KV cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NAME = "varlen"
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def register() -> None:
    """Register ``varlen`` with transformers, as an attention that needs no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def varlen_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return the attention output [batch, length, heads, dimension] of rows of packed documents.

    `query` is [batch, heads, length, dimension]; `options` are transformers' own: scaling, sliding_window, position_ids
    [batch or 1, length], dropout, softcap. The kernel does not support float32; sdpa with a mask then computes the same.
    Raises `ValueError` for what the kernel does not support (dropout, capped logits, keys longer than the query).
    """
    if options.get("dropout") or options.get("softcap") or options.get("s_aux") is not None:
        raise ValueError("varlen attention has no dropout, no capped logits and no sinks. Set model.attention: sdpa.")
    if query.shape[2] != key.shape[2] or options.get("position_ids") is None:
        raise ValueError("varlen attention is for training rows with positions. Set model.attention: sdpa.")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary positions leave query and key in float32; sdpa casts them as well
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    n_rows, n_heads, length, size = query.shape
    starts = options["position_ids"].expand(n_rows, length) == 0
    starts = starts | (torch.arange(length, device=query.device) == 0)
    window, scaling = options.get("sliding_window"), options.get("scaling")
    if query.dtype not in _KERNEL_DTYPES:
        return _masked_attention(query, key, value, starts, window=window, scaling=scaling), None
    from torch.nn.attention import varlen

    offsets = starts.flatten().nonzero()[:, 0].to(torch.int32)
    offsets = torch.cat([offsets, offsets.new_tensor([n_rows * length])])
    longest = int(offsets.diff().max())
    q, k, v = (tensor.transpose(1, 2).reshape(n_rows * length, -1, size) for tensor in (query, key, value))
    out: Any = varlen.varlen_attn(
        q, k, v, offsets, offsets, longest, longest, scale=scaling,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=key.shape[1] != n_heads,
    )  # fmt: skip
    return out.view(n_rows, length, n_heads, size), None


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    *, window: int | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return what `varlen_attention` returns, computed by sdpa; `starts` [batch, length] marks first tokens."""
    document = starts.cumsum(-1)
    index = torch.arange(starts.shape[1], device=starts.device)
    distance = index[:, None] - index[None, :]
    in_window = (distance >= 0) & (distance < (window if window is not None else starts.shape[1]))
    mask = (document[:, :, None] == document[:, None, :]) & in_window
    gqa = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


@torch.no_grad()
def try_varlen(model: Any) -> str:
    """Switch `model` from sdpa to ``varlen`` and return ""; if their logits differ, keep sdpa and return the reason.

    Both read one row of two short documents in bfloat16. The largest difference of the logits must stay below a tenth
    of the largest logit.
    """
    register()
    ids = torch.arange(3, 35, device=model.device)[None] % int(model.get_input_embeddings().weight.shape[0])
    positions = torch.cat([torch.arange(12), torch.arange(20)]).to(model.device)[None]
    was_training = model.training
    model.eval()
    logits = []
    try:
        for name in ("sdpa", NAME):
            model.set_attn_implementation(name)
            with torch.autocast(model.device.type, torch.bfloat16):
                logits.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits.float())
        difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max().clamp(min=1e-6))
        reason = "" if difference < 0.1 else f"its logits differ from sdpa's by {difference:.2g} of the largest logit"
    except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    if reason:
        model.set_attn_implementation("sdpa")
    model.train(was_training)
    return reason
