"""Rules by layer: learning rates that fall towards the embeddings, and a base that is frozen for the first updates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kinject.train.optimizers import UpdateInputs, UpdateRule

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|embed_in)\.")


class LayerwiseRates(UpdateRule):
    """techniques.layerwise_lr_decay: each layer has `decay` times the rate of the one above it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether rates decay."""
        return recipe.techniques.layerwise_lr_decay < 1.0

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> LayerwiseRates:
        """Return the rule with the recipe's decay."""
        return cls(inputs.recipe.techniques.layerwise_lr_decay)

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer, its groups split by layer."""
        split_by_layer(optimizer, trainer.model, self.decay)
        return optimizer


class FreezeWarmup(UpdateRule):
    """techniques.freeze_base_steps: drops the gradients of the base in the first updates.

    `patterns` name the parameters that train from the start; without any these are `reinitialized`. An optimizer does not
    change weights without a gradient, by weight decay neither, and their moments begin with their first gradient. The count
    comes from the trainer's step, so resuming changes nothing.
    """

    def __init__(self, recipe: TrainRecipe, steps: int, reinitialized: Sequence[str]) -> None:
        self.recipe, self.steps = recipe, steps
        self.patterns, self.first = recipe.techniques.freeze_base_except, list(reinitialized)
        self._guard: Any = None

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the base is frozen at first."""
        return recipe.techniques.freeze_base_steps is not None

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> FreezeWarmup:
        """Return the rule with the recipe's steps."""
        return cls(inputs.recipe, inputs.recipe.techniques.freeze_base_steps or 0, inputs.reinitialized)

    def start(self, trainer: Any) -> None:
        """Find the parameters that train first. Raises `RecipeError` for a pattern without a match."""
        self._guard = trainer.guard
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                fault = f"{pattern!r} matches no parameter that trains. Names look like {', '.join(names[:3])}."
                raise self.recipe.error("techniques.freeze_base_except", fault)
        matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]
        self.first = matched or self.first

    def change_gradient(self, model: Any, step: int) -> None:
        """Drop the base's gradients if this update is one of the first."""
        if step == self.steps:  # from here on the norm is that of more weights
            self._guard.norms.clear()
        if step < self.steps:
            for name, parameter in model.named_parameters():
                if name.removeprefix("module.").replace("_orig_mod.", "") not in self.first:
                    parameter.grad = None

    def note(self) -> str:
        """Return what trains first."""
        names = ", ".join(summarize_names(self.first))
        return f"techniques.freeze_base_steps: for {self.steps} updates only these train: {names}"


def layer_number(name: str) -> int | None:
    """Return the number of the layer that holds the parameter `name`; None outside the layers."""
    match = LAYER.search(f".{name}")
    return None if match is None else int(match[1])


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


def summarize_names(names: Sequence[str]) -> list[str]:
    """Return names with layer numbers joined: ``model.layers.{0-3}.mlp.up_proj.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = LAYER.search(name)
        key = name if match is None else name[: match.start(1)] + "*" + name[match.end(1) :]
        layers.setdefault(key, []).extend([] if match is None else [int(match[1])])
    return [key.replace("*", _span(sorted(numbers))) if numbers else key for key, numbers in layers.items()]


def _span(numbers: Sequence[int]) -> str:
    contiguous = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{{{numbers[0]}-{numbers[-1]}}}" if contiguous else "{" + ",".join(map(str, numbers)) + "}"
