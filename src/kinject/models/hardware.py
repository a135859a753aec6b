"""What this machine can do, asked once and said aloud: device, dtype, attention."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kinject.errors import InputError

if TYPE_CHECKING:
    import torch


def choose_device(asked: str) -> str:
    """Return cuda, mps or cpu. Raises `InputError` when the asked one is not there."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked == "auto":
        return next(name for name, available in there.items() if available)
    if not there[asked]:
        found = ", ".join(name for name, available in there.items() if available)
        raise InputError(f"model.device: {asked} asked for, but this machine has {found}. Set model.device: auto.")
    return asked


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


def choose_dtype(asked: str, device: str) -> torch.dtype:
    """Return the dtype of the weights in memory for scoring: `auto` is bfloat16 on a GPU that has it, else float32."""
    import torch

    if asked == "auto":
        return torch.bfloat16 if device == "cuda" and has_fast_bf16(device) else torch.float32
    chosen = getattr(torch, asked)
    assert isinstance(chosen, torch.dtype)
    return chosen


def choose_attention(asked: str, device: str) -> str | None:
    """Return the attention to ask transformers for; None leaves it to the architecture (sdpa wherever it has it).

    `auto` is flash-attn on a GPU where it is installed, else None: training then looks further (`varlen_missing`).
    Raises `InputError` when something is asked for that cannot run here.
    """
    installed = importlib.util.find_spec("flash_attn") is not None
    if asked == "auto":
        return "flash_attention_2" if installed and device == "cuda" else None
    if asked == "flash_attention_2" and not (installed and device == "cuda"):
        missing = "needs an NVIDIA GPU" if device != "cuda" else "is not installed (pip install 'kinject[flash]')"
        raise InputError(f"model.attention: flash_attention_2 {missing}. Or set model.attention: auto.")
    if asked == "varlen":
        missing = varlen_missing(device)
        if missing:
            raise InputError(f"model.attention: varlen {missing}. Or set model.attention: auto.")
    return asked


def varlen_missing(device: str) -> str:
    """Return why torch's variable-length attention cannot run on `device`, "" where it can (torch 2.10, bfloat16 in hardware)."""
    if device != "cuda":
        return f"needs an NVIDIA GPU, and the model is on {device}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "needs torch 2.10 or newer (pip install -U torch)"
    return "" if has_fast_bf16(device) else "needs a GPU that multiplies bfloat16 (Ampere or newer)"
