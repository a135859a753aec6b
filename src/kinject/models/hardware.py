"""The choice of device, dtype, attention and quantization for this machine; weights split between
processes.

FSDP2 and tensor parallelism are transformers', ZeRO-3 is DeepSpeed's, other FSDP is accelerate's.
With FSDP2 and tensor parallelism each process reads its part of each tensor from the files, so that
it never holds more than its shard and one tensor. Each process then has DTensors. Under ZeRO-3 a
parameter is empty between its uses, and `ds_tensor` is this process's part.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kinject.errors import InputError
from kinject.process import is_fsdp_launch, is_yes, world_size

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig


def choose_device(requested: str) -> str:
    """Return cuda, mps or cpu; `auto` is the first of these that the machine has.

    Raises `InputError` when the requested device is missing.
    """
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    devices = [name for name, is_available in available.items() if is_available]
    if requested == "auto":
        return devices[0]
    if requested not in devices:
        raise InputError(
            f"model.device: {requested} requested, but this machine has {', '.join(devices)}. Set "
            "model.device: auto."
        )
    return requested


def has_fast_bf16(device: str) -> bool:
    """Return whether `device` multiplies bfloat16 in hardware (NVIDIA from Ampere on, CPUs with
    AVX512-BF16 or AMX)."""
    import torch

    if device == "cuda":
        # By default torch counts GPUs that emulate it, many times slower (a T4).
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "cpu":
        # oneDNN alone also accepts AVX512 without BF16, where it emulates the products.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _cpu_has_bf16()
    return False


def _cpu_has_bf16() -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(
        capabilities.get("avx512_bf16")
        or capabilities.get("amx_bf16")
        or capabilities.get("amx_bf16_tile")
    )


def choose_dtype(requested: str, device: str, section: str = "model") -> torch.dtype:
    """Return the dtype of the weights for scoring; `auto` is bfloat16 on a GPU that multiplies it,
    else float32.

    An older NVIDIA GPU (a T4) gets float16. `section` is the recipe's, for messages. Raises
    `InputError` for bfloat16 on a GPU that only emulates it.
    """
    import torch

    if requested == "auto":
        if device != "cuda":
            return torch.float32
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return halves.get(choose_precision(device), torch.float32)
    fault = emulated_bf16(device)
    if fault and requested == "bfloat16":
        raise InputError(
            f"{section}.dtype: {fault} Set {section}.dtype: float16 (scoring, adapters) or float32."
        )
    return cast(torch.dtype, getattr(torch, requested))


def choose_precision(device: str) -> str:
    """Return the arithmetic for training on `device`: bf16 if it multiplies bfloat16, fp16 on an
    older GPU, else no."""
    if has_fast_bf16(device):
        return "bf16"
    return "fp16" if device == "cuda" else "no"


def emulated_bf16(device: str) -> str:
    """Return a sentence that names the GPU if `device` is one that only emulates bfloat16; "" for
    any other device."""
    if device != "cuda" or has_fast_bf16(device):
        return ""
    import torch

    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return (
        f"{name} (compute capability {major}.{minor}) only emulates bfloat16, many times slower "
        "than float16."
    )


_NEWEST = 99
"""Later than any compute capability there is: no GPU is too new."""
_CAPABILITY = {
    "flash_attention_2": (8, _NEWEST),
    "flash_attention_3": (8, 9),
    "flash_attention_4": (9, _NEWEST),
    "flex_attention": (8, _NEWEST),
}
"""Attention -> lowest and highest major compute capability of the NVIDIA GPUs that run it."""
_FASTEST = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
FLEX = "flex_attention"
"""Torch's own, which skips the blocks of a mask that packed documents leave empty."""


def choose_attention(
    requested: str, device: str, section: str = "model", dtype: torch.dtype | None = None
) -> str | None:
    """Return transformers' `attn_implementation`; None (`auto`) leaves it to the architecture (sdpa
    where it has sdpa).

    Training with `auto` then tries `fastest_attention` on the model. `dtype` is that of the
    arithmetic, None where it is not known. Raises `InputError` when the requested attention cannot
    run on this machine, or in `dtype`.
    """
    if requested == "auto":
        return None
    fault = attention_fault(requested, device, dtype)
    if fault:
        raise InputError(
            f"{section}.attention: {requested} {fault}. Or set {section}.attention: auto."
        )
    return requested


def fastest_attention(device: str) -> tuple[str, ...]:
    """Return the attention that `auto` tries on `device` for training, fastest first: installed
    ones for this GPU, and flex attention, which torch has.

    Empty on a CPU, on an AMD GPU, and on an NVIDIA GPU before Ampere (a T4): there sdpa is used.
    """
    import torch
    from transformers.utils import import_utils

    if device != "cuda" or torch.version.hip is not None:
        return ()
    installed = {
        "flash_attention_2": import_utils.is_flash_attn_2_available,
        "flash_attention_3": import_utils.is_flash_attn_3_available,
        "flash_attention_4": import_utils.is_flash_attn_4_available,
    }
    # Where a package is missing transformers downloads a prebuilt kernel (docs/models.md).
    names = [name for name in _FASTEST if installed[name]() or import_utils.is_kernels_available()]
    return tuple(name for name in (*names, FLEX) if not attention_fault(name, device))


def attention_fault(name: str, device: str, dtype: torch.dtype | None = None) -> str:
    """Return why the attention `name` cannot run on `device`, in arithmetic of `dtype` (None: not
    known), as the end of a sentence; "" if nothing speaks against it.

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
        limit = f"{lowest}.0 or newer" if highest == _NEWEST else f"{lowest}.0 to {highest}.x"
        return (
            f"needs a GPU of compute capability {limit}, and {torch.cuda.get_device_name()} has "
            f"{major}.{minor}"
        )
    if "flash" in name and dtype == torch.float32:
        # Their kernels would say so at the first batch, in a traceback.
        return "reads 16 bits alone, and the model computes in float32 (dtype, bf16)"
    return ""


def quantization_config(kind: str, dtype: torch.dtype, section: str = "model") -> Any:
    """Return that of 8 bits, or of QLoRA (arXiv 2305.14314): NF4, its scales quantised too.

    FSDP shards floating-point tensors only, so under it the packed weights are stored as `dtype`.
    Raises `InputError` without bitsandbytes.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"{section}.quantization: needs the package bitsandbytes. Install it: pip install "
            "bitsandbytes."
        )
    import torch
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=dtype if is_fsdp_launch() else torch.uint8,
    )


_REQUESTS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")


@dataclass(frozen=True)
class Sharding:
    """The processes that hold a model together: `shards` x `tensor` of them, in `replicas` copies
    of it.

    `shards` split each weight by rows and gather it for its use (FSDP2), `tensor` split it and
    compute with their parts. With `bf16` the gathered weights are bfloat16; the shards and the
    optimizer keep the weights' own type.
    """

    shards: int
    replicas: int = 1
    tensor: int = 1
    bf16: bool = False

    def describe(self) -> str:
        """Return the sharding in words."""
        parts = []
        if self.shards > 1:
            parts.append(f"FSDP2 over {self.shards}")
        if self.tensor > 1:
            parts.append(f"tensor parallel over {self.tensor}")
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        return f"sharded over processes ({', '.join(parts)})"

    def of(self, config: PretrainedConfig) -> DistributedConfig:
        """Return transformers' form of this sharding for a model of `config`: one unit for each
        layer."""
        from transformers.distributed import DistributedConfig

        plan = _units(config) if self.shards * self.replicas > 1 else None
        return DistributedConfig(
            fsdp_size=self.shards,
            dp_replicate_size=self.replicas,
            tp_size=self.tensor,
            fsdp_plan=plan,
            fsdp_mixed_precision=self.bf16,
        )


def _parallelism_sizes() -> dict[str, int]:
    """Return the sizes of parallelism_config that `accelerate launch` sets; {} for none."""
    if not is_yes("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}
    return {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
    }


def read_sharding(fsdp_config: Mapping[str, Any] | None, *, bf16: bool) -> Sharding | None:
    """Return the sharding that `accelerate launch`, or the trainer's `fsdp_config`, sets; None for
    none.

    None as well for the cases that accelerate shards itself: one process, weights in the machine's
    memory (offload), context parallelism, FSDP1, and weights that stay whole after a forward pass.
    Raises `InputError` for sizes that do not make up the processes.
    """
    sizes = _parallelism_sizes()
    tensor, replicas = sizes.get("TP", 1), sizes.get("DP_REPLICATE", 1)
    wants_fsdp = is_yes("ACCELERATE_USE_FSDP") or fsdp_config is not None
    offloads = is_yes("FSDP_OFFLOAD_PARAMS") or bool((fsdp_config or {}).get("cpu_offload"))
    keeps = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    is_first_version = os.environ.get("FSDP_VERSION", "2") == "1"
    n, splits = world_size(), sizes.get("CP", 1) * sizes.get("SP", 1)
    if (
        n == 1
        or offloads
        or keeps
        or is_first_version
        or splits > 1
        or not (wants_fsdp or tensor > 1)
    ):
        return None
    shards = n // (replicas * tensor) if wants_fsdp else 1
    n_requested = max(sizes.get("DP_SHARD", 1), 1)
    # 1 is accelerate's default: the launch left the number of shards open.
    if shards * replicas * tensor != n or n_requested not in (1, shards):
        shown = shards if n_requested == 1 else n_requested
        raise InputError(
            f"parallelism_config: {replicas} replicas x {shown} shards x {tensor} tensor parallel "
            f"are not the {n} processes of this launch. Correct the sizes, or --num_processes."
        )
    return Sharding(shards, replicas, tensor, bf16)


@contextlib.contextmanager
def sharded_by_transformers(sharding: Sharding | None) -> Iterator[None]:
    """Keep accelerate from sharding a model that transformers has sharded already, while a trainer
    is made."""
    saved = {name: os.environ[name] for name in _REQUESTS if name in os.environ}
    if sharding is None:
        saved = {}
    os.environ.update(dict.fromkeys(saved, "false"))
    try:
        yield
    finally:
        os.environ.update(saved)


def zero3_dtype() -> torch.dtype | None:
    """Return the dtype of a model's weights under ZeRO-3, which DeepSpeed's configuration sets;
    None without ZeRO-3."""
    import torch
    from transformers.integrations import deepspeed

    if not deepspeed.is_deepspeed_zero3_enabled():
        return None
    config = deepspeed.deepspeed_config()
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next(
        (dtype for name, dtype in halves.items() if config.get(name, {}).get("enabled") is True),
        torch.float32,
    )


def shard(model: PreTrainedModel, sharding: Sharding) -> PreTrainedModel:
    """Split a model that each process holds whole, with equal weights in all."""
    config, _, mesh = model.prepare_distribute_model(sharding.of(model.config))
    return release_whole(model.maybe_distribute_model(model, config, mesh))


def release_whole(model: PreTrainedModel) -> PreTrainedModel:
    """Let every unit of a model that FSDP2 shards drop its gathered weights after each forward
    pass; return the model.

    By default the last unit and the root keep them: then parameters are whole where nothing is
    trained. Tied weights are saved once; transformers would gather them twice.
    """
    if hasattr(model, "set_reshard_after_forward"):
        model.set_reshard_after_forward(True)
    gather, tied = model.gather_sharded_state_dict_for_save, model.all_tied_weights_keys

    def gather_once(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {
            name: weight for name, weight in gather(*args, **options).items() if name not in tied
        }

    model.gather_sharded_state_dict_for_save = gather_once
    return model


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter or buffer that this process holds, without its graph: the
    whole of one not sharded."""
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor).detach()
    if hasattr(part, "to_local"):  # a DTensor
        part = part.to_local()
    return part


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, that of the whole tensor if it is sharded."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of values of a parameter, that of the whole tensor if it is sharded."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, those of all processes if FSDP2 or tensor parallelism shards
    it; then all call this."""
    values = tensor.detach()
    if hasattr(values, "full_tensor"):  # a DTensor
        values = values.full_tensor()
    return values


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy the weights and buffers of `source` into `target`, a model of the same kind and
    sharding."""
    import torch

    weights = dict(source.named_parameters()) | dict(source.named_buffers())
    with torch.no_grad():
        for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
            own_part(tensor).copy_(own_part(weights[name]))


def _units(config: PretrainedConfig) -> dict[str, str]:
    """Return transformers' FSDP plan for a model of `config`: each layer, and input and output
    embeddings that are not tied."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    }
    # Lists of experts lie within the list of layers, which is the largest.
    layers = max(sizes, key=sizes.__getitem__)
    plan = {f"{layers}.*": "free_full_weight"}
    names = {id(module): name for name, module in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    # FSDP shards a parameter in one unit only, so tied embeddings stay with the root.
    if None not in ends and ends[0].weight is not ends[1].weight:
        plan |= {names[id(module)]: "free_full_weight" for module in ends}
    return plan
