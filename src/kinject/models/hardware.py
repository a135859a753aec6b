"""The choice of device, dtype, attention and quantization for this machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.process import is_fsdp_launch

if TYPE_CHECKING:
    import torch


def choose_device(requested: str) -> str:
    """Return cuda, mps or cpu; `auto` is the first of these that the machine has.

    Raises `InputError` when the requested device is missing.
    """
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    devices = [name for name, is_available in available.items() if is_available]
    if requested == "auto":
        return devices[0]
    if requested not in devices:
        raise InputError(
            f"model.device: {requested} requested, but this machine has {', '.join(devices)}. Set model.device: auto."
        )
    return requested


def has_fast_bf16(device: str) -> bool:
    """Return whether `device` multiplies bfloat16 in hardware (NVIDIA from Ampere on, CPUs with AVX512-BF16 or AMX)."""
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _cpu_has_bf16()
    return False


def _cpu_has_bf16() -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("amx_bf16_tile"))


def choose_dtype(requested: str, device: str) -> torch.dtype:
    """Return the dtype of the weights for scoring; `auto` is bfloat16 on a GPU that supports it, else float32."""
    import torch

    if requested == "auto":
        return torch.bfloat16 if device == "cuda" and has_fast_bf16(device) else torch.float32
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def choose_attention(requested: str, device: str) -> str | None:
    """Return transformers' `attn_implementation`; None leaves it to the architecture (sdpa where it has sdpa).

    `auto` is flash-attn on a GPU where it is installed, else None; training then also considers varlen
    (`varlen_unavailable_reason`). Raises `InputError` when the requested attention cannot run on this machine.
    """
    installed = importlib.util.find_spec("flash_attn") is not None
    if requested == "auto":
        return "flash_attention_2" if installed and device == "cuda" else None
    if requested == "flash_attention_2" and not (installed and device == "cuda"):
        reason = "needs an NVIDIA GPU" if device != "cuda" else "is not installed (pip install 'kinject[flash]')"
        raise InputError(f"model.attention: flash_attention_2 {reason}. Or set model.attention: auto.")
    if requested == "varlen":
        reason = varlen_unavailable_reason(device)
        if reason:
            raise InputError(f"model.attention: varlen {reason}. Or set model.attention: auto.")
    return requested


def varlen_unavailable_reason(device: str) -> str:
    """Return why torch's variable-length attention cannot run on `device`, or "" if it can.

    It needs CUDA, torch 2.10 and bfloat16 in hardware.
    """
    if device != "cuda":
        return f"needs an NVIDIA GPU, and the model is on {device}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "needs torch 2.10 or newer (pip install -U torch)"
    return "" if has_fast_bf16(device) else "needs a GPU that multiplies bfloat16 (Ampere or newer)"


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """Return that of 8 bits, or of QLoRA (arXiv 2305.14314): NF4, its scales quantised too.

    FSDP shards floating-point tensors only, so under it the packed weights are stored as `dtype`.
    """
    import torch
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=dtype if is_fsdp_launch() else torch.uint8,
    )  # fmt: skip
