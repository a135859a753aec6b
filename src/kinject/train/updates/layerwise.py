"""Lower learning rates for lower layers (techniques.layerwise_lr_decay)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from kinject.errors import InputError
from kinject.train.names import count_layers, layer_number
from kinject.train.updates.base import RunningTrainer, UpdateRule

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe

_WRAPPERS = re.compile(r"(?:\.(?:base_layer|original_module|token_adapter))+$")
"""What peft puts behind the name of a module that it adapts."""
_TABLE_NORM = re.compile(
    r"embeddings?_?layer_?norm\.|layernorm_embedding\.|embeddings\.\w*norm\.", re.I
)
"""The norm of what tables give, as BLOOM, BART and BERT have one."""


class LayerwiseRates(UpdateRule):
    """techniques.layerwise_lr_decay: each layer has `decay` times the rate of the one above it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether rates decay."""
        return recipe.techniques.layerwise_lr_decay < 1.0

    def change_optimizer(self, optimizer: Optimizer, trainer: RunningTrainer) -> Optimizer:
        """Return the optimizer, its groups split so that each holds the parameters of one rate
        factor, in order."""
        model = trainer.model
        groups: list[dict[str, Any]] = []
        n_layers = count_layers(model)
        if not n_layers:
            raise InputError(
                "techniques.layerwise_lr_decay: no parameter of this model has the number of its "
                "layer in its name, so all would have one rate. Remove the line."
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tables = tuple(table_names(model))
        for group in optimizer.param_groups:
            by_factor: dict[float, list[Any]] = {}
            for parameter in group["params"]:
                factor = rate_factor(names[id(parameter)], n_layers, self.decay, tables)
                by_factor.setdefault(factor, []).append(parameter)
            # In a fixed order: a checkpoint's states are loaded by their position. The highest rate
            # is the first, which Trainer logs.
            for factor, parameters in sorted(by_factor.items(), reverse=True):
                groups.append({**group, "params": parameters, "lr": group["lr"] * factor})
        optimizer.param_groups[:] = groups
        return optimizer


def table_names(model: nn.Module) -> Iterator[str]:
    """Yield the beginning of the names of what belongs to an embedding, an adapter of it too.

    By the kind of module: word_embeddings, embeddings, w, embed_positions are some of their names.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield f"{_WRAPPERS.sub('', name)}."


def rate_factor(name: str, n_layers: int, decay: float, tables: tuple[str, ...] = ()) -> float:
    """Return the factor of `name` on the learning rate: 1 above the layers and in the last, times
    `decay` a layer below.

    The embeddings, `tables` and their norm, lie under layer 0 (ULMFiT's discriminative
    fine-tuning, arXiv 1801.06146).
    """
    layer = layer_number(name)
    if layer is not None:
        return float(decay ** (n_layers - 1 - layer))
    if name.startswith(tables) or _TABLE_NORM.search(name):
        return float(decay**n_layers)
    return 1.0
