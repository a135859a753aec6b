"""The model of a recipe without its weights: built on torch's meta device from its config, adapter and 4 bits included."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from kinject.disk import path_exists
from kinject.errors import InputError
from kinject.models import first_line, load_config
from kinject.recipe import is_model
from kinject.train.loss import tile_mlps

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BLOCK_4BIT = 64
"""Weights of bitsandbytes' NF4 that share a scale of 8 bits."""
_BLOCK_SCALES = 256
"""Scales that share one of float32 (double quantization)."""
LIGER_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose Liger kernels are counted: RMS norms and a gated MLP with SiLU in every layer."""
_SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a layer that tensor parallelism divides."""
GPU_ATTENTION = "kinject_plan"
"""Name in transformers of an attention with the memory of a GPU's kernels (`kinject.plan.memory` registers it)."""


@dataclass(frozen=True)
class StepConfig:
    """Everything that decides the memory of a training step.

    `mixed` is the dtype of autocast (None: off). `masked`: attention gets a mask, because documents share a row. `fused`: the
    loss never holds all logits (TRL's head on a GPU); kinject's own loss does, unless `loss_tile` limits them. An MLP reads
    `mlp_tile` tokens of a row at once (None: all). `muon`,
    `rounding` and `in_backward` are techniques.muon, stochastic_rounding and optimizer_in_backward. `distilled` is the number
    of a teacher's log-probs of each token (None: no teacher); `teacher_copy`: its weights are in memory beside those that
    train. `projected`: regularization.projection limits the updates. `liger` is trainer.use_liger_kernel. `context` devices
    read a row together, each its part of the tokens; `tensor` devices have a part of every layer each.
    """

    model: PretrainedConfig
    device: str
    dtype: torch.dtype
    mixed: torch.dtype | None
    batch: int
    block: int
    accumulation: int
    checkpointing: bool
    offloading: bool
    attention: str
    masked: bool
    fused: bool
    optim: str
    optim_args: str | None
    quantization: str = "none"
    adapter: Mapping[str, Any] | None = None
    freeze: tuple[str, ...] = ()
    muon: bool = False
    rounding: bool = False
    in_backward: bool = False
    loss_tile: int | None = None
    mlp_tile: int | None = None
    distilled: int | None = None
    teacher_copy: bool = False
    projected: bool = False
    liger: bool = False
    context: int = 1
    tensor: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a row that a device reads."""
        return -(-self.block // self.context)

    @property
    def optim_in_8_bits(self) -> bool:
        """Whether the optimizer's state is in 8 bits."""
        return "8bit" in self.optim


def read_config(path: str, revision: str | None) -> PretrainedConfig:
    """Return the config of the model in a folder (config.json is enough) or on the hub, as `load_config` does.

    If the hub does not give it, the model's public shape is enough for a plan (`shapes.yaml`): its name_or_path is empty.
    Raises `InputError` if there is none or the hub does not answer.
    """
    if not is_model(path):
        raise InputError(f"{path}: there is no model yet. Run the recipe that makes it first, or check the path.")
    try:
        return load_config(path, revision)
    except InputError as error:
        if path_exists(Path(path)):
            raise
        shapes = yaml.safe_load(files("kinject.plan").joinpath("shapes.yaml").read_text("utf-8"))
        if path in shapes:
            return new_config(shapes[path], shapes[path]["vocab_size"])
        raise InputError(
            f"{error} If the model is gated, log in (HF_TOKEN); a folder that holds its config.json is enough: "
            "model.path=FOLDER"
        ) from error


def new_config(values: Mapping[str, Any], vocab_size: int) -> PretrainedConfig:
    """Return the config of `model.new`, for a tokenizer with `vocab_size` entries."""
    from transformers import CONFIG_MAPPING

    options = {key: value for key, value in values.items() if key != "model_type"}
    return CONFIG_MAPPING[values["model_type"]](**{"vocab_size": vocab_size, **options})


def build_model(config: StepConfig, n_layers: int | None = None) -> PreTrainedModel:
    """Return the model on the meta device: frozen, quantised and with an adapter as in the recipe.

    `n_layers` keeps only so many of its layers. Raises `InputError` if transformers or peft refuse the config.
    """
    try:
        with torch.device("meta"):
            model = _bare_model(config)
            if n_layers is not None:
                del layer_stack(model)[n_layers:]
            if config.liger and config.model.model_type in LIGER_MODELS:
                _use_liger(model)
            if config.quantization != "none":
                _quantise(model, config)
            if config.adapter is not None:
                model = _with_adapter(model, config)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"no model can be built from this config: {first_line(error)}.") from error
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in config.freeze):
            parameter.requires_grad_(False)
    model.train()
    if config.mlp_tile is not None:
        tile_mlps(model, config.mlp_tile)
    if config.checkpointing:
        old_name = "gradient_checkpointing_enable"  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old_name)
        enable({"use_reentrant": False, "preserve_rng_state": False})
        if config.adapter is not None:
            model.enable_input_require_grads()
    return model


def _bare_model(config: StepConfig) -> Any:
    from transformers import AutoModelForCausalLM

    attention = "eager" if config.attention == "eager" else "sdpa" if config.device == "cpu" else GPU_ATTENTION
    return AutoModelForCausalLM.from_config(
        _part_of_layers(config.model, config.tensor),
        dtype=config.dtype,
        attn_implementation=attention,
        trust_remote_code=False,
    )


def tensor_parallel_fault(config: PretrainedConfig, n: int) -> str:
    """Return why `n` devices cannot share every layer of a model, "" if they can."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if plan.get("layers.*.mlp.gate_proj") != "colwise" or any("experts" in name for name in plan):
        return f"no plan of transformers splits the layers of {config.model_type} evenly"
    odd = [f"{name} {getattr(config, name)}" for name in _SPLIT_SIZES if getattr(config, name) % n]
    return f"{n} devices cannot share {', '.join(odd)}" if odd else ""


def _part_of_layers(config: PretrainedConfig, n: int) -> PretrainedConfig:
    """Return the config of one of `n` equal parts of every layer: of its heads and of its MLP. The rest stays whole."""
    if n == 1:
        return config
    part = copy.deepcopy(config)
    part.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SPLIT_SIZES:
        setattr(part, name, getattr(config, name) // n)
    return part


def _use_liger(model: Any) -> None:
    """Let norms and MLPs keep the tensors of Liger's kernels. The head stays TRL's, which refuses Liger's fused one."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, norm=module: _LigerNorm.apply(x, norm.weight)  # type: ignore[no-untyped-call]
        elif type(module).__name__.endswith("MLP"):
            module.forward = lambda x, mlp=module: mlp.down_proj(
                _LigerProduct.apply(mlp.gate_proj(x), mlp.up_proj(x))  # type: ignore[no-untyped-call]
            )


class _LigerNorm(torch.autograd.Function):
    """An RMS norm that keeps its input and a number for each row; the gradient of its input takes the place of the output's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.empty_like(ctx.saved_tensors[1]) if ctx.needs_input_grad[1] else None


class _LigerProduct(torch.autograd.Function):
    """``silu(gate) * up`` that keeps its two inputs; their gradients take their places."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors


def layer_stack(model: Any) -> nn.ModuleList:
    """Return the list of layers of a model: of its lists of modules the one with the most weights."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(
        stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()), default=nn.ModuleList()
    )


def count_alike_layers(config: StepConfig) -> int:
    """Return the number of layers of the model if all have weights of the same names and shapes, else 0.

    A pattern of `config.freeze` or of the adapter may choose among layers: 0 if one is given that could.
    """
    layers = config.adapter or {}
    if any("layer" in key and value is not None for key, value in layers.items()) or any(
        map(_has_digit, config.freeze)
    ):
        return 0
    try:
        with torch.device("meta"):
            stack = layer_stack(_bare_model(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"no model can be built from this config: {first_line(error)}.") from error
    shapes = [[(name, parameter.shape) for name, parameter in layer.named_parameters()] for layer in stack]
    return len(shapes) if all(each == shapes[0] for each in shapes) else 0


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def _with_adapter(model: Any, config: StepConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    fields = {key: value for key, value in (config.adapter or {}).items() if key != "merge"}
    model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **fields}))
    if config.quantization != "none" and config.mixed != torch.float16:  # as TRL does for QLoRA
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _quantise(model: Any, config: StepConfig) -> None:
    """Replace every linear layer except the head by `Quantised`, as transformers does for bitsandbytes."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            parent = model.get_submodule(name.rpartition(".")[0])
            transposed = isinstance(module, Conv1D)
            n_in, n_out = module.weight.shape if transposed else reversed(module.weight.shape)
            quantised = Quantised((n_in, n_out), module.bias, config.quantization, config.dtype)
            setattr(parent, name.rpartition(".")[2], quantised)


class Quantised(nn.Linear):
    """A linear layer with weights in 4 or 8 bits that are dequantised for each product, forwards and backwards."""

    def __init__(self, size: tuple[int, int], bias: Any, kind: str, dtype: torch.dtype) -> None:
        super().__init__(1, 1, bias=False)
        self.in_features, self.out_features = size
        self.product_dtype = dtype
        n = size[0] * size[1]
        small = torch.empty(n // 2, 1, dtype=torch.uint8) if kind == "4bit" else torch.empty(n, 1, dtype=torch.int8)
        n_scales = -(-n // _BLOCK_4BIT)
        scales = torch.empty(
            n_scales + 4 * -(-n_scales // _BLOCK_SCALES) if kind == "4bit" else 4 * size[1], dtype=torch.uint8
        )
        self.weight = nn.Parameter(small, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out_features]."""
        product = _QuantisedProduct.apply(x.to(self.product_dtype), self.out_features)  # type: ignore[no-untyped-call]
        assert isinstance(product, torch.Tensor)
        return product if self.bias is None else product + self.bias


class _QuantisedProduct(torch.autograd.Function):
    """``x @ weight`` with a weight that is dequantised for the product and not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_out: int) -> torch.Tensor:
        ctx.n_in = x.shape[-1]
        return x @ x.new_empty(ctx.n_in, n_out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ grad.new_empty(grad.shape[-1], ctx.n_in), None


def allocate_fake_storages(model: Any) -> None:
    """Give the tensors of a model on the meta device fake storages. Shared ones (tied embeddings, adapters) stay shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    new = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                    made[id(tensor)] = (tensor, new)
                tensors[name] = None if tensor is None else made[id(tensor)][1]


def count_parameters(model: Any) -> tuple[int, int, int]:
    """Return (parameters, trained parameters, parameters multiplied by each token). Each weight in 4 bits counts as one."""
    quantised = [module for module in model.modules() if isinstance(module, Quantised)]
    packed = sum(module.weight.numel() for module in quantised if module.weight.dtype == torch.uint8)
    scales = sum(module.scales.numel() for module in quantised)
    n_all = sum(parameter.numel() for parameter in model.parameters()) + packed - scales
    n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = head is not None and head.weight is table
    return n_all, n_trained, n_all - (0 if is_tied else table.numel())


def count_flops(n_multiplied: int, n_trained: int, config: StepConfig, n_tiled: int = 0) -> float:
    """Return the operations of an optimizer step.

    Forward: 2 for each token and weight that is multiplied (an embedding is looked up); as many again for each gradient and
    for recomputation, which the `n_tiled` weights of MLPs in tiles have once more. Attention adds its causal half of the square.
    """
    passes = 2 + config.checkpointing
    text = config.model.get_text_config()
    attention = 2 * (passes + 1) * text.num_hidden_layers * config.block * text.hidden_size // config.tensor
    tokens = config.batch * config.tokens * config.accumulation
    return float(tokens * (2 * (passes * n_multiplied + n_tiled + min(n_trained, n_multiplied)) + attention))


def count_tiled_weights(model: Any) -> int:
    """Return the number of weights in MLPs that read a row in tiles."""
    mlps = [module for module in model.modules() if hasattr(module, "mlp_tile")]
    return sum(parameter.numel() for mlp in mlps for parameter in mlp.parameters())


def largest_block(model: Any) -> int:
    """Return the bytes of the largest layer of the stack, or of the embeddings if they are larger."""
    blocks: list[nn.Module] = [*layer_stack(model), model.get_input_embeddings()]
    return max(sum(weight.numel() * weight.element_size() for weight in block.parameters()) for block in blocks)
