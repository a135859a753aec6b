"""Lower learning rates for lower layers (techniques.layerwise_lr_decay)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from kinject.train.names import layer_number
from kinject.train.updates.base import RunningTrainer, UpdateRule

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe

_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|embed_in)\.")


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
        n_layers = model.config.get_text_config().num_hidden_layers
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            by_factor: dict[float, list[Any]] = {}
            for parameter in group["params"]:
                factor = rate_factor(names[id(parameter)], n_layers, self.decay)
                by_factor.setdefault(factor, []).append(parameter)
            # In a fixed order: a checkpoint's states are loaded by their position.
            for factor, parameters in sorted(by_factor.items()):
                groups.append({**group, "params": parameters, "lr": group["lr"] * factor})
        optimizer.param_groups[:] = groups
        return optimizer


def rate_factor(name: str, n_layers: int, decay: float) -> float:
    """Return the factor of `name` on the learning rate: 1 above the layers and in the last, times
    `decay` a layer below.

    The embeddings lie under layer 0 (ULMFiT's discriminative fine-tuning, arXiv 1801.06146).
    """
    layer = layer_number(name)
    if layer is not None:
        return float(decay ** (n_layers - 1 - layer))
    if _EMBEDDING.search(name):
        return float(decay**n_layers)
    return 1.0
