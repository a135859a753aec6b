"""The model of a recipe without its weights: made on torch's meta device from its config alone, adapter and 4 bits included."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kinject.errors import InputError
from kinject.recipe import is_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BLOCK_4BIT = 64
"""Weights that share a scale of float32 in bitsandbytes' NF4."""
GPU_ATTENTION = "kinject_plan"
"""The name under which transformers finds attention as a GPU's kernels keep it (`kinject.plan.memory`)."""


@dataclass(frozen=True)
class Shape:
    """What decides the memory of a training step, and nothing else.

    `mixed` is the dtype that autocast multiplies in (None: that of the weights), `masked` whether attention gets a mask
    because documents share a row, `fused` whether the loss never holds all logits (TRL's head on a GPU) or does (kinject's
    on a CPU).
    """

    config: PretrainedConfig
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


def read_config(path: str, revision: str | None) -> PretrainedConfig:
    """Return the config of the model in a folder (that needs to hold config.json only) or on the hub.

    A folder with a peft adapter stands for its base. Raises `InputError` when there is none, or the hub is out of reach.
    """
    from transformers import AutoConfig

    from kinject.models.load import base_of_adapter

    adapter = Path(path) / "adapter_config.json"
    if adapter.is_file():
        return read_config(base_of_adapter(adapter), None)
    if not is_model(path):
        raise InputError(f"{path}: no model is there yet. Run the recipe that makes it first, or check the path.")
    try:
        with _quiet_hub():
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if Path(path).is_dir():
            raise InputError(f"{path}: no usable config.json in this folder ({_first_line(error)}).") from error
        raise InputError(
            f"{path}: its config is neither here nor to be had from the hub ({_first_line(error)}). With a network, log in "
            "where the model is gated (HF_TOKEN); without one, give a folder that holds its config.json: model.path=FOLDER"
        ) from error


class _quiet_hub:
    """Keeps huggingface_hub from telling every retry on the screen."""

    def __enter__(self) -> None:
        self.log = logging.getLogger("huggingface_hub")
        self.level = self.log.level
        self.log.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self.log.setLevel(self.level)


def new_config(values: Mapping[str, Any], vocab_size: int) -> PretrainedConfig:
    """Return the config of `model.new`, for a tokenizer of `vocab_size` pieces."""
    from transformers import CONFIG_MAPPING

    options = {key: value for key, value in values.items() if key != "model_type"}
    return CONFIG_MAPPING[values["model_type"]](**{"vocab_size": vocab_size, **options})


def build(shape: Shape) -> PreTrainedModel:
    """Return the model that would train, on the meta device: frozen, quantised and with its adapter as the recipe asks.

    Raises `InputError` when transformers or peft refuse the config.
    """
    from transformers import AutoModelForCausalLM

    attention = "eager" if shape.attention == "eager" else "sdpa" if shape.device == "cpu" else GPU_ATTENTION
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape.config, dtype=shape.dtype, attn_implementation=attention, trust_remote_code=False
            )
            if shape.quantization != "none":
                _quantise(model, shape)
            if shape.adapter is not None:
                model = _with_adapter(model, shape)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the model cannot be laid out from its config: {_first_line(error)}.") from error
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in shape.freeze):
            parameter.requires_grad_(False)
    model.train()
    if shape.checkpointing:
        old_name = "gradient_checkpointing_enable"  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old_name)
        enable({"use_reentrant": False, "preserve_rng_state": False})
        if shape.adapter is not None:
            model.enable_input_require_grads()
    return model


def _with_adapter(model: Any, shape: Shape) -> Any:
    from peft import LoraConfig, get_peft_model

    assert shape.adapter is not None
    asked = {key: value for key, value in shape.adapter.items() if key != "merge"}
    model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **asked}))
    if shape.quantization != "none":  # as TRL does for QLoRA
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _quantise(model: Any, shape: Shape) -> None:
    """Put `Quantised` in the place of every linear layer but the head, as transformers does for bitsandbytes."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            parent = model.get_submodule(name.rpartition(".")[0])
            turned = isinstance(module, Conv1D)
            n_in, n_out = module.weight.shape if turned else reversed(module.weight.shape)
            setattr(
                parent, name.rpartition(".")[2], Quantised((n_in, n_out), module.bias, shape.quantization, shape.dtype)
            )


class Quantised(nn.Linear):
    """A linear layer whose weights lie in 4 or 8 bits and are unfolded for each product, forwards and backwards."""

    def __init__(self, size: tuple[int, int], bias: Any, kind: str, dtype: torch.dtype) -> None:
        super().__init__(1, 1, bias=False)
        self.in_features, self.out_features = size
        self.unfolded = dtype
        n = size[0] * size[1]
        small = torch.empty(n // 2, 1, dtype=torch.uint8) if kind == "4bit" else torch.empty(n, 1, dtype=torch.int8)
        scales = torch.empty(-(-n // _BLOCK_4BIT) if kind == "4bit" else size[1])
        self.weight = nn.Parameter(small, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out_features]."""
        found = _Unfold.apply(x.to(self.unfolded), self.out_features)  # type: ignore[no-untyped-call]
        assert isinstance(found, torch.Tensor)
        return found if self.bias is None else found + self.bias


class _Unfold(torch.autograd.Function):
    """``x @ weight`` with a weight that is made for the product and kept for nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_out: int) -> torch.Tensor:
        ctx.n_in = x.shape[-1]
        return x @ x.new_empty(ctx.n_in, n_out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ grad.new_empty(grad.shape[-1], ctx.n_in), None


def count(model: Any) -> tuple[int, int]:
    """Return (parameters, those that train). Weights in 4 bits count once each."""
    halves = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, Quantised) and module.weight.dtype == torch.uint8
    )
    scales = sum(module.scales.numel() for module in model.modules() if isinstance(module, Quantised))
    n_all = sum(parameter.numel() for parameter in model.parameters()) + halves - scales
    return n_all, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
