"""Weights split between processes: FSDP2 and tensor parallelism by transformers, ZeRO-3 by DeepSpeed, FSDP by accelerate.

With FSDP2 and tensor parallelism each process reads its part of each tensor from the files, so that it never holds more
than its shard and one tensor. Each process then has DTensors. Under ZeRO-3 a parameter is empty between its uses, and
`ds_tensor` is this process's part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.process import is_yes, world_size

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig

_REQUESTS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")


@dataclass(frozen=True)
class Sharding:
    """The processes that hold a model together: `shards` x `tensor` of them, in `replicas` copies of it.

    `shards` split each weight by rows and gather it for its use (FSDP2), `tensor` split it and compute with their parts.
    With `bf16` the gathered weights are bfloat16; the shards and the optimizer keep the weights' own type.
    """

    shards: int
    replicas: int = 1
    tensor: int = 1
    bf16: bool = False

    def describe(self) -> str:
        """Return the sharding in words."""
        parts = [f"FSDP2 over {self.shards}"] if self.shards > 1 else []
        parts += [f"tensor parallel over {self.tensor}"] if self.tensor > 1 else []
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"sharded over processes ({', '.join(parts)}{copies})"

    def of(self, config: PretrainedConfig) -> DistributedConfig:
        """Return transformers' form of this sharding for a model of `config`: one unit for each layer."""
        from transformers.distributed import DistributedConfig

        plan = _units(config) if self.shards * self.replicas > 1 else None
        return DistributedConfig(
            fsdp_size=self.shards, dp_replicate_size=self.replicas, tp_size=self.tensor, fsdp_plan=plan,
            fsdp_mixed_precision=self.bf16,
        )  # fmt: skip


def read_sharding(fsdp_config: Mapping[str, Any] | None, *, bf16: bool) -> Sharding | None:
    """Return the sharding that `accelerate launch`, or the trainer's `fsdp_config`, sets; None for none.

    None as well for the cases that accelerate shards itself: one process, weights in the machine's memory (offload),
    context parallelism, FSDP1, and weights that stay whole after a forward pass. Raises `InputError` for sizes that do not
    make up the processes.
    """
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
    } if is_yes("ACCELERATE_USE_PARALLELISM_CONFIG") else {}  # fmt: skip
    tensor, replicas = sizes.get("TP", 1), sizes.get("DP_REPLICATE", 1)
    wants_fsdp = is_yes("ACCELERATE_USE_FSDP") or fsdp_config is not None
    offloads = is_yes("FSDP_OFFLOAD_PARAMS") or bool((fsdp_config or {}).get("cpu_offload"))
    keeps = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    is_first_version = os.environ.get("FSDP_VERSION", "2") == "1"
    n, splits = world_size(), sizes.get("CP", 1) * sizes.get("SP", 1)
    if n == 1 or offloads or keeps or is_first_version or splits > 1 or not (wants_fsdp or tensor > 1):
        return None
    shards = n // (replicas * tensor) if wants_fsdp else 1
    n_requested = max(sizes.get("DP_SHARD", 1), 1)
    if shards * replicas * tensor != n or n_requested not in (1, shards):
        shown = n_requested if n_requested > 1 else shards
        raise InputError(
            f"parallelism_config: {replicas} replicas x {shown} shards x {tensor} tensor parallel "
            f"are not the {n} processes of this launch. Correct the sizes, or --num_processes."
        )
    return Sharding(shards, replicas, tensor, bf16)


@contextlib.contextmanager
def sharded_by_transformers(sharding: Sharding | None) -> Iterator[None]:
    """Keep accelerate from sharding a model that transformers has sharded already, while a trainer is made."""
    saved = {name: os.environ[name] for name in _REQUESTS if name in os.environ} if sharding is not None else {}
    os.environ.update(dict.fromkeys(saved, "false"))
    try:
        yield
    finally:
        os.environ.update(saved)


def zero3_dtype() -> torch.dtype | None:
    """Return the dtype of a model's weights under ZeRO-3, which DeepSpeed's configuration sets; None without ZeRO-3."""
    import torch
    from transformers.integrations import deepspeed

    if not deepspeed.is_deepspeed_zero3_enabled():
        return None
    config = deepspeed.deepspeed_config()
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in halves.items() if config.get(name, {}).get("enabled") is True), torch.float32)


def shard(model: PreTrainedModel, sharding: Sharding) -> PreTrainedModel:
    """Split a model that each process holds whole, with equal weights in all."""
    config, _, mesh = model.prepare_distribute_model(sharding.of(model.config))
    return release_whole(model.maybe_distribute_model(model, config, mesh))


def release_whole(model: PreTrainedModel) -> PreTrainedModel:
    """Let every unit of a model that FSDP2 shards drop its gathered weights after each forward pass; return the model.

    By default the last unit and the root keep them: then parameters are whole where nothing is trained. Tied weights are
    saved once; transformers would gather them twice.
    """
    if hasattr(model, "set_reshard_after_forward"):
        model.set_reshard_after_forward(True)
    gather, tied = model.gather_sharded_state_dict_for_save, model.all_tied_weights_keys

    def gather_once(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in gather(*args, **options).items() if name not in tied}

    model.gather_sharded_state_dict_for_save = gather_once
    return model


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter or buffer that this process holds, without its graph: the whole of one not sharded."""
    part = getattr(tensor, "ds_tensor", tensor).detach()
    return part.to_local() if hasattr(part, "to_local") else part


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, that of the whole tensor if it is sharded."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of values of a parameter, that of the whole tensor if it is sharded."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, those of all processes if FSDP2 or tensor parallelism shards it; then all call this."""
    values = tensor.detach()
    return values.full_tensor() if hasattr(values, "full_tensor") else values


@contextlib.contextmanager
def whole_weights(module: torch.nn.Module) -> Iterator[None]:
    """Let the module's own parameters (not those of its children) be whole while the block writes them.

    Every process writes the same values, and keeps its part of them afterwards.
    """
    import torch
    from torch.distributed.tensor import distribute_tensor

    parameters = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if any(hasattr(weight, "ds_tensor") for weight in parameters.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
            yield
        return
    sharded: dict[str, Any] = {name: weight for name, weight in parameters.items() if hasattr(weight, "full_tensor")}
    module._parameters.update({name: torch.nn.Parameter(full_tensor(weight)) for name, weight in sharded.items()})
    yield
    for name, weight in sharded.items():
        parts = distribute_tensor(
            module.get_parameter(name).detach(), weight.device_mesh, weight.placements, src_data_rank=None
        )
        own_part(weight).copy_(own_part(parts))
        module._parameters[name] = weight


def copy_weights(source: Any, target: Any) -> None:
    """Copy the weights and buffers of `source` into `target`, a model of the same kind and sharding."""
    import torch

    weights = dict(source.named_parameters()) | dict(source.named_buffers())
    with torch.no_grad():
        for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
            own_part(tensor).copy_(own_part(weights[name]))


def _units(config: PretrainedConfig) -> dict[str, str]:
    """Return transformers' FSDP plan for a model of `config`: each layer, and input and output embeddings that are not tied."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    layers = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    plan = {f"{layers}.*": "free_full_weight"}
    names = {id(module): name for name, module in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if None not in ends and ends[0].weight is not ends[1].weight:
        plan |= {names[id(module)]: "free_full_weight" for module in ends}
    return plan
