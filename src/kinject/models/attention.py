"""What a causal language model attends to: its window, the test that it reads no later tokens, attention for packed rows.

A model that reads later tokens learns to copy them, and has none to copy when it writes: its training loss and its log-probs
mean nothing. With torch's variable-length flash attention a packed row costs what its documents cost one by one. A document
begins where the positions restart. For training only: there is no KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kinject.errors import InputError
from kinject.models.folder import first_line
from kinject.models.hardware import choose_precision
from kinject.process import is_fsdp_launch

if TYPE_CHECKING:
    import torch

NAME = "varlen"
_SEPARATOR = "<|endoftext|>"
_LENGTH = 8
_EXACT, _ROUNDED = 1e-3, 0.1
"""Limits for float32, and for weights that are rounded more. Experts that get other rows at once change the last digit."""


def window_of(config: Any) -> int | None:
    """Return the most tokens that a model of a transformers `config` reads at once, None if the config sets no bound."""
    text = config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def text_start(tokenizer: Any) -> int | None:
    """Return the token behind which a document begins, as in pretraining; None if the tokenizer has none.

    That is what the tokenizer itself puts before a text. If it adds nothing, it is the separator of documents: many chat
    models' BOS begins a turn, and their pretraining knew <|endoftext|> alone.
    """
    ids = list(tokenizer("a", verbose=False).input_ids)
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    if len(ids) > len(bare) and ids[1 : len(bare) + 1] == bare:
        return int(ids[0])
    separator = tokenizer.get_vocab().get(_SEPARATOR)
    candidates = (separator, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), None)


def is_runnable(model: Any) -> bool:
    """Return whether `model` can read a row here and now.

    It cannot if this process does not hold its weights (they are sharded), or if they are still in memory (FSDP moves
    them) and its attention is a GPU's.
    """
    parameters = list(model.parameters())
    if any(parameter.is_meta or not parameter.numel() for parameter in parameters):
        return False
    if not is_fsdp_launch() or parameters[0].device.type != "cpu":
        return True
    return getattr(getattr(model, "config", None), "_attn_implementation", None) in (None, "eager", "sdpa")


def reads_later_tokens(model: Any) -> bool:
    """Return whether other tokens in the second half of a short row move the model's logits in the first half.

    The limit is relative to the change in the second half. A model that is not runnable is not tried.
    """
    import torch

    if not is_runnable(model):
        return False
    n_tokens, half = int(model.get_input_embeddings().weight.shape[0]), _LENGTH // 2
    row = torch.arange(3, 3 + _LENGTH, device=model.device) % n_tokens
    other = torch.cat([row[:half], (row[half:] + n_tokens // 2) % n_tokens])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in (row, other)]
    model.train(was_training)
    change = (logits[0] - logits[1]).abs()
    is_exact = model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None
    return bool(change[:half].max() > (_EXACT if is_exact else _ROUNDED) * change[half:].max())


def not_causal(config: Any) -> str:
    """Return the fault of a model of a transformers `config` that reads later tokens."""
    set_decoder = " Set is_decoder: true in its config, and train it." if hasattr(config, "is_decoder") else ""
    return (
        f"{config.model_type} is no causal language model as configured: it reads later tokens (another token at the end of a "
        f"row moves the logits before it). Take a causal model.{set_decoder}"
    )


def check_causal(model: Any, name: str) -> None:
    """Raise `InputError` if the model `name` is not causal."""
    if reads_later_tokens(model):
        raise InputError(f"{name}: {not_causal(model.config)}")


def causal_fault(config: Any) -> str:
    """Return why a model of a transformers `config` is no causal language model; "" if none is known.

    The rest shows once the model is loaded (`check_causal`).
    """
    from transformers.models.auto import modeling_auto as auto

    if config.model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{config.model_type} is no causal language model. Take a causal model."
    is_masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder
    if is_masked and getattr(config, "is_decoder", None) is False:  # false alone says nothing: GPT-NeoX has it too
        return not_causal(config)
    return ""


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
    import torch

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
    if query.dtype not in (torch.float16, torch.bfloat16):
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
    import torch

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
    """Return causal attention [tokens, heads, dimension] inside each document, by torch's kernel (2.12 or newer)."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if k.shape[1] != q.shape[1]:
        options["enable_gqa"] = True
    return cast("torch.Tensor", varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest, **options))


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    *, window: int | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of `varlen_attention`, computed by sdpa; `starts` [batch, length] marks first tokens."""
    import torch
    import torch.nn.functional as F

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
    import torch

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
