"""Optimizers beside transformers' own: 8-bit embeddings, schedule-free, layer-wise rates, sharpness-aware minimisation."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from kinject.models import own_part, whole
from kinject.train.config import embedding_bits
from kinject.train.trainable import layer_number

_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|embed_in)\.")


def set_embedding_bits(optimizer: Any, model: nn.Module, optim_args: str | None) -> None:
    """Let a new bitsandbytes `optimizer` of `model` keep the embeddings' state in the bits that `optim_args` names.

    transformers keeps it in float32 by default. With a large vocabulary the embeddings are most of a small model: in
    float32 they hold adamw_8bit at 0.5 to 0.63 of AdamW's state.
    """
    bits = embedding_bits(optim_args)
    if bits is None:
        return
    manager = optimizer.mng
    tables = {id(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    manager.module_weight_config_triple = [
        (module, name, {**config, "optim_bits": int(bits)} if id(module) in tables else config)
        for module, name, config in manager.module_weight_config_triple
    ]


def leave_warmup_to_schedule(optimizer: Any) -> None:
    """Turn off the warm-up of a new schedule-free `optimizer`: transformers gives the same warm-up to the schedule too."""
    if {"train_mode", "warmup_steps"} <= getattr(optimizer, "defaults", {}).keys():  # DeepSpeed's placeholder has none
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0


def rate_factor(name: str, n_layers: int, decay: float) -> float:
    """Return the factor of `name` on the learning rate: 1 above the layers and in the last, times `decay` a layer below.

    The embeddings lie under layer 0 (ULMFiT's discriminative fine-tuning, arXiv 1801.06146).
    """
    layer = layer_number(name)
    if layer is not None:
        return float(decay ** (n_layers - 1 - layer))
    return float(decay**n_layers) if _EMBEDDING.search(name) else 1.0


def split_by_layer(optimizer: Any, model: Any, decay: float) -> None:
    """Split the groups of a new `optimizer` so that each holds the parameters of one rate factor, in order."""
    n_layers = model.config.get_text_config().num_hidden_layers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(rate_factor(names[id(parameter)], n_layers, decay), []).append(parameter)
        groups += [
            {**group, "params": parameters, "lr": group["lr"] * factor}
            for factor, parameters in sorted(by_factor.items())
        ]
    optimizer.param_groups[:] = groups


class SharpnessAware:
    """Sharpness-aware minimisation (SAM, arXiv 2010.01412): the gradient is taken near the highest loss nearby.

    The optimizer sees the gradient at ``w + rho * g / |g|`` with g over all accumulated batches. A scaled gradient (fp16)
    perturbs the weights in the same way. `restore` puts them back bitwise. Nothing is kept from one update to the next.
    """

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._batches: list[Any] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, batch: Any) -> None:
        """Keep a batch of the current update."""
        self._batches.append(batch)

    def take_batches(self) -> list[Any]:
        """Return the batches kept, in order, and forget them."""
        batches, self._batches = self._batches, []
        return batches

    @torch.no_grad()
    def perturb(self, model: Any) -> bool:
        """Move the weights uphill; False (and no weight moves) if the gradient is zero or not finite."""
        moving = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if not moving:
            return False
        norm = whole(torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in moving]))
        if not bool(norm.isfinite()) or float(norm) == 0.0:
            return False
        self._weights = [(parameter, parameter.detach().clone()) for parameter in moving]
        for parameter in moving:
            step = own_part(parameter.grad).float() * (self.rho / norm)
            own_part(parameter).add_(step.to(parameter.dtype))
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back to their values before `perturb`."""
        for parameter, before in self._weights:
            parameter.copy_(before)
        self._weights = []
