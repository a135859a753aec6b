"""The choice of device, dtype, attention and quantization for this machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, cast

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


def choose_dtype(requested: str, device: str, section: str = "model") -> torch.dtype:
    """Return the dtype of the weights for scoring; `auto` is bfloat16 on a GPU that multiplies it, else float32.

    An older NVIDIA GPU (a T4) gets float16. `section` is the recipe's, for messages. Raises `InputError` for bfloat16 on
    a GPU that only emulates it.
    """
    import torch

    if requested == "auto":
        names = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
        return cast(torch.dtype, getattr(torch, names[choose_precision(device)] if device == "cuda" else "float32"))
    fault = emulated_bf16(device) if requested == "bfloat16" else ""
    if fault:
        raise InputError(f"{section}.dtype: {fault} Set {section}.dtype: float16 (scoring, adapters) or float32.")
    return cast(torch.dtype, getattr(torch, requested))


def choose_precision(device: str) -> str:
    """Return the arithmetic for training on `device`: bf16 if it multiplies bfloat16, fp16 on an older GPU, else no."""
    if has_fast_bf16(device):
        return "bf16"
    return "fp16" if device == "cuda" else "no"


def emulated_bf16(device: str) -> str:
    """Return a sentence that names the GPU if `device` is one that only emulates bfloat16; "" for any other device."""
    if device != "cuda" or has_fast_bf16(device):
        return ""
    import torch

    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return f"{name} (compute capability {major}.{minor}) only emulates bfloat16, many times slower than float16."


_CAPABILITY = {
    "flash_attention_2": (8, 99), "flash_attention_3": (8, 9), "flash_attention_4": (9, 99), "flex_attention": (8, 99),
    "varlen": (8, 99), "kernels-community/flash-attn2": (8, 99), "kernels-community/flash-attn3": (8, 9),
    "kernels-community/vllm-flash-attn3": (8, 9), "kernels-community/flash-attn4": (9, 99),
}  # fmt: skip
"""Attention -> lowest and highest major compute capability of the NVIDIA GPUs that run it."""
_FASTEST = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen")


def choose_attention(requested: str, device: str, section: str = "model") -> str | None:
    """Return transformers' `attn_implementation`; None (`auto`) leaves it to the architecture (sdpa where it has sdpa).

    Training with `auto` then tries `fastest_attention` on the model. Raises `InputError` when the requested attention
    cannot run on this machine.
    """
    if requested == "auto":
        return None
    fault = attention_fault(requested, device)
    if fault:
        raise InputError(f"{section}.attention: {requested} {fault}. Or set {section}.attention: auto.")
    return requested


def fastest_attention(device: str) -> tuple[str, ...]:
    """Return the attention that `auto` tries on `device` for training, fastest first: installed ones for this GPU.

    Empty on a CPU, on an AMD GPU, and on an NVIDIA GPU before Ampere (a T4): there sdpa is used.
    """
    import torch
    from transformers.utils import import_utils

    if device != "cuda" or torch.version.hip is not None:
        return ()
    installed = {
        "flash_attention_2": import_utils.is_flash_attn_2_available, "flash_attention_3": import_utils.is_flash_attn_3_available,
        "flash_attention_4": import_utils.is_flash_attn_4_available,
    }  # fmt: skip
    names = (n for n in _FASTEST if n not in installed or installed[n]() or import_utils.is_kernels_available())
    return tuple(name for name in names if not attention_fault(name, device))


def attention_fault(name: str, device: str) -> str:
    """Return why the attention `name` cannot run on `device`, as the end of a sentence; "" if nothing speaks against it.

    Packages that are missing are named by transformers when it loads the model.
    """
    import torch

    if name not in _CAPABILITY or (name == "flex_attention" and device == "cpu"):
        return ""
    if device != "cuda":
        return f"needs an NVIDIA GPU, and the model is on {device}"
    major, minor = torch.cuda.get_device_capability()
    lowest, highest = _CAPABILITY[name]
    if torch.version.hip is None and not lowest <= major <= highest:
        limit = f"{lowest}.0 or newer" if highest == 99 else f"{lowest}.0 to {highest}.x"
        return f"needs a GPU of compute capability {limit}, and {torch.cuda.get_device_name()} has {major}.{minor}"
    if name == "varlen" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        return "needs torch 2.12 or newer (pip install -U torch)"
    return ""


def quantization_config(kind: str, dtype: torch.dtype, section: str = "model") -> Any:
    """Return that of 8 bits, or of QLoRA (arXiv 2305.14314): NF4, its scales quantised too.

    FSDP shards floating-point tensors only, so under it the packed weights are stored as `dtype`. Raises `InputError`
    without bitsandbytes.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"{section}.quantization: needs the package bitsandbytes. Install it: pip install bitsandbytes."
        )
    import torch
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=dtype if is_fsdp_launch() else torch.uint8,
    )  # fmt: skip
