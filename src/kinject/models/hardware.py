"""The choice of device, dtype, attention and quantization for this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Kernel:
    """Attention on NVIDIA GPUs of compute capability `lowest` to `highest`.x; `package` holds it, or a hub kernel does."""

    lowest: int
    highest: int
    package: str = ""


_KERNELS = {
    "flash_attention_2": _Kernel(8, 99, "flash-attn"),
    "flash_attention_3": _Kernel(8, 9, "flash-attn-3"),
    "flash_attention_4": _Kernel(9, 99, "flash-attn-4"),
    "kernels-community/flash-attn2": _Kernel(8, 99),
    "kernels-community/flash-attn3": _Kernel(8, 9),
    "kernels-community/vllm-flash-attn3": _Kernel(8, 9),
    "kernels-community/flash-attn4": _Kernel(9, 99),
    "flex_attention": _Kernel(8, 99),
    "varlen": _Kernel(8, 99),
}
_GENERATIONS = {8: "Ampere", 9: "Hopper", 10: "Blackwell"}
_FASTEST = {8: ("flash_attention_2", "varlen"), 9: ("flash_attention_3", "flash_attention_2", "varlen")}
"""Major compute capability -> attention that `auto` tries, in this order."""
_FASTEST_LATER = ("flash_attention_4", "flash_attention_2", "varlen")


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

    if device != "cuda" or torch.version.hip is not None:
        return ()
    major = torch.cuda.get_device_capability()[0]
    names = _FASTEST.get(major, _FASTEST_LATER if major > max(_FASTEST) else ())
    return tuple(name for name in names if not attention_fault(name, device))


def attention_fault(name: str, device: str) -> str:
    """Return why the attention `name` cannot run on `device`, as the end of a sentence; "" if nothing speaks against it.

    Compared are the GPU's compute capability and the installed packages; the kernel itself is not run.
    """
    import torch

    kernel = _KERNELS.get(name)
    if kernel is None or (name == "flex_attention" and device == "cpu"):
        return ""  # sdpa, eager; flex on a CPU reads, and cannot train (`try_attention`)
    if device != "cuda":
        return f"needs an NVIDIA GPU, and the model is on {device}"
    major, minor = torch.cuda.get_device_capability()
    if torch.version.hip is None and not kernel.lowest <= major <= kernel.highest:
        first, last = (_GENERATIONS.get(generation, "") for generation in (kernel.lowest, kernel.highest))
        required = f"{kernel.lowest}.0 ({first}) or newer" if not last else f"{kernel.lowest}.0 ({first}) to {last}'s"
        return f"needs a GPU of compute capability {required}, and {torch.cuda.get_device_name()} has {major}.{minor}"
    if name == "varlen":
        missing = importlib.util.find_spec("torch.nn.attention.varlen") is None
        return "needs torch 2.10 or newer (pip install -U torch)" if missing else ""
    if name == "flex_attention" or (kernel.package and _version(kernel.package) is not None):
        return ""
    fault = _hub_kernels_fault()
    package = f"the package {kernel.package} or " if kernel.package else ""
    return f"needs {package}prebuilt kernels: {fault}" if fault else ""


def _hub_kernels_fault() -> str:
    """Return why transformers cannot load prebuilt kernels from the hub, "" if it can: it takes few versions of kernels."""
    from packaging.version import Version
    from transformers.utils import import_utils

    install = "pip install 'transformers[kernels]'"
    installed = _version("kernels")
    if installed is None:
        return f"the package kernels is not installed ({install})"
    lowest, below = import_utils.KERNELS_MIN_VERSION, getattr(import_utils, "KERNELS_MAX_VERSION", None)
    if Version(installed) < Version(lowest) or (below is not None and Version(installed) >= Version(below)):
        limit = f" and below {below}" if below else ""
        return f"kernels {installed} is installed, and this transformers takes {lowest} or newer{limit} ({install})"
    return ""


def _version(package: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
