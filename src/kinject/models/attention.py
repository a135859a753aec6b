"""Attention for training: torch's variable-length flash attention behind transformers' interface, and a short trial.

With variable-length attention a packed row costs what its documents cost one by one. A document begins where the positions
restart. For training only: there is no KV cache.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F

from kinject.models.causal import is_runnable
from kinject.models.folder import first_line
from kinject.models.hardware import choose_precision

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
    offsets, longest = _boundaries(options["position_ids"], starts)
    q, k, v = (tensor.transpose(1, 2).reshape(n_rows * length, -1, size) for tensor in (query, key, value))
    out = _run_kernel(q, k, v, offsets, longest, window=window, scaling=scaling)
    return out.view(n_rows, length, n_heads, size), None


_last: tuple[torch.Tensor, torch.Size, torch.Tensor, int] | None = None


def _boundaries(positions: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the offsets of the documents of all rows (int32, with the end), and the tokens of the longest document.

    All layers of a forward pass, and their recomputation, are given the same tensor of positions. Its result is kept, so
    that the GPU is waited for once a batch, not twice a layer.
    """
    global _last  # a batch's positions are not written to after it was made
    cached = _last
    if cached is None or cached[0] is not positions or cached[1] != starts.shape:
        offsets = starts.flatten().nonzero()[:, 0].to(torch.int32)
        offsets = torch.cat([offsets, offsets.new_tensor([starts.numel()])])
        _last = cached = positions, starts.shape, offsets, int(offsets.diff().max())
    return cached[2:]


def _run_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int,
    *, window: int | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention [tokens, heads, dimension] inside each document, by the kernel of this torch.

    Older versions (2.10, 2.11) lack windows or grouped heads; keys and values are then repeated. Raises
    `ValueError` for a window that the kernel lacks.
    """
    from torch.nn.attention import varlen

    known = inspect.signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None and window < longest:
        raise ValueError("this torch's varlen attention has no window. Update torch, or set model.attention: sdpa.")
    else:
        options["is_causal"] = True
    if k.shape[1] != q.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    return cast(torch.Tensor, varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest, **options))


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    *, window: int | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of `varlen_attention`, computed by sdpa; `starts` [batch, length] marks first tokens."""
    document = starts.cumsum(-1)
    index = torch.arange(starts.shape[1], device=starts.device)
    distance = index[:, None] - index[None, :]
    in_window = (distance >= 0) & (distance < (window if window is not None else starts.shape[1]))
    mask = (document[:, :, None] == document[:, None, :]) & in_window
    gqa = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


def try_attention(model: Any, name: str) -> str:
    """Switch `model` from its attention to `name` and return ""; if that fails or differs, keep it and return the reason.

    Both read one row of two short documents in the dtype of training; the logits may differ by a tenth of their length.
    Sharded weights are not tried.
    """
    if not is_runnable(model):
        return "it is not tried on weights that are sharded or still to be moved to the GPU"
    if name == NAME:
        register()
    device, before = model.device, model.config._attn_implementation
    ids = torch.arange(3, 35, device=device)[None] % int(model.get_input_embeddings().weight.shape[0])
    positions = torch.cat([torch.arange(12), torch.arange(20)]).to(device)[None]
    half = torch.float16 if choose_precision(device.type) == "fp16" else torch.bfloat16

    def read() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, half):
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()  # type: ignore[no-any-return]

    try:
        expected = read()
        model.set_attn_implementation(name)
        gap = float((read() - expected).norm() / expected.norm().clamp(min=1e-6))
        reason = "" if gap < 0.1 else f"its logits differ from {before}'s by {gap:.2g} of their length"
    except Exception as error:  # noqa: BLE001 - kernels and compilers raise what they like; `auto` has another attention
        reason = first_line(error)[:120] or type(error).__name__
    if reason:
        model.set_attn_implementation(before)
    return reason
