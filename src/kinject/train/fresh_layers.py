"""Layers drawn anew (arXiv 2006.05987), and a base that holds still while they, or other parts, train first."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from kinject.recipe import TrainRecipe
from kinject.train.trainable import layer_number


def redraw_last_layers(model: Any, recipe: TrainRecipe) -> list[str]:
    """Draw the weights of the last `techniques.reinitialize_last_layers` anew, as the architecture does for a new model.

    The draw depends on the recipe's seed alone, so a resumed run draws the same. Returns the names of the parameters.
    Raises `RecipeError` where the model has not so many layers.
    """
    wanted = recipe.techniques.reinitialize_last_layers
    n_layers = model.config.get_text_config().num_hidden_layers
    if wanted > n_layers:
        what = f"found {wanted}, but the model has {n_layers} layers. Set at most {n_layers}."
        raise recipe.error("techniques.reinitialize_last_layers", what)
    if not wanted:
        return []
    redrawn = [name for name, _ in model.named_parameters() if _at_least(name, n_layers - wanted)]
    for name in redrawn:
        model.get_parameter(name)._is_hf_initialized = False  # transformers leaves alone what it has marked as loaded
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(recipe.seed)
        for name, module in model.named_modules():
            if _at_least(f"{name}.", n_layers - wanted) and not _at_least(f"{name.rpartition('.')[0]}.", 0):
                module.apply(model._init_weights)
    return redrawn


def _at_least(name: str, first: int) -> bool:
    number = layer_number(name)
    return number is not None and number >= first


class HeldBase:
    """Leaves the gradients of the base out of the first updates; `first` are the names that train from the start.

    Weights without a gradient are left alone by every optimizer, weight decay included, and their moments begin when
    they are freed. Which update it is says the trainer's step, so that a resumed run goes on as an undisturbed one.
    """

    def __init__(self, steps: int, first: Sequence[str]) -> None:
        self.steps, self.first = steps, frozenset(first)

    def drop(self, model: Any, step: int) -> None:
        """Forget the base's gradients if this (0-based) update is one of the first."""
        if step >= self.steps:
            return
        for name, parameter in model.named_parameters():
            if name.removeprefix("module.").replace("_orig_mod.", "") not in self.first:
                parameter.grad = None


def hold_base(model: Any, recipe: TrainRecipe, redrawn: Sequence[str]) -> HeldBase | None:
    """Return what `techniques.freeze_base_steps` asks for. Raises `RecipeError` for patterns by which nothing would train."""
    techniques = recipe.techniques
    if techniques.freeze_base_steps is None:
        return None
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for pattern in techniques.freeze_base_except:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"{pattern!r} matches no parameter that trains. Names look like {', '.join(names[:3])}."
            raise recipe.error("techniques.freeze_base_except", what)
    first = [name for name in names if any(fnmatchcase(name, pattern) for pattern in techniques.freeze_base_except)]
    return HeldBase(techniques.freeze_base_steps, first or redrawn)
