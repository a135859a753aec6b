"""The parameters that train: frozen ones, re-initialised layers, a base frozen for the first updates; and a check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from kinject.errors import TrainingError
from kinject.recipe import TrainRecipe

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def freeze(model: Any, recipe: TrainRecipe) -> None:
    """Freeze the parameters that match `model.freeze`. Raises `RecipeError` for a pattern without a match."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.model.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise recipe.error(
                "model.freeze", f"{pattern!r} matches no parameter. Names look like {', '.join(names[:3])}."
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in recipe.model.freeze):
            parameter.requires_grad_(False)


def check_trainable(model: Any, recipe: TrainRecipe) -> list[str]:
    """Return the names that train. Raises `TrainingError` if they are not exactly those that the recipe names.

    Without an adapter these are all but the frozen; with one, its own weights beside every target, and a whole copy of
    every module in `modules_to_save` (embed_tokens and lm_head among them).
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if recipe.adapter is None:
        frozen = recipe.model.freeze
        wanted = [n for n, _ in model.named_parameters() if not any(fnmatchcase(n, pattern) for pattern in frozen)]
        different = sorted(set(wanted) ^ set(trained))
        if different:
            raise TrainingError(
                f"the parameters that train are not those of the recipe; these differ: {', '.join(different[:5])}."
            )
    else:
        _check_adapter(trained, recipe.adapter)
    if not trained:
        raise TrainingError("no parameter trains. Check model.freeze and the adapter section.")
    return trained


def _check_adapter(trained: Sequence[str], adapter: Any) -> None:
    targets = adapter.get("target_modules")
    wanted = [(name, "lora_") for name in targets or ()] if isinstance(targets, list | tuple) else []
    wanted += [(name, "modules_to_save") for name in adapter.get("modules_to_save") or ()]
    for module, mark in wanted:
        if not any(f".{module}." in f".{name}" and mark in name for name in trained):
            raise TrainingError(f"the adapter asks to train {module}, but none of its weights train. Check its name.")
    marks = ("lora_", "modules_to_save", "trainable_tokens")
    others = [name for name in trained if not any(mark in name for mark in marks)]
    if others and adapter.get("bias", "none") == "none":
        raise TrainingError(f"these train although they are not in the adapter: {', '.join(others[:5])}.")


def reinitialize_last_layers(model: Any, recipe: TrainRecipe) -> list[str]:
    """Draw new weights for the last `techniques.reinitialize_last_layers`, as the architecture does for a new model.

    Re-initialising helps small data sets (arXiv 2006.05987). The weights depend on the recipe's seed alone, so a resumed
    run draws the same. Returns the names of the parameters. Raises `RecipeError` if the model has fewer layers.
    """
    wanted = recipe.techniques.reinitialize_last_layers
    n_layers = model.config.get_text_config().num_hidden_layers
    if wanted > n_layers:
        fault = f"found {wanted}, but the model has {n_layers} layers. Set at most {n_layers}."
        raise recipe.error("techniques.reinitialize_last_layers", fault)
    if not wanted:
        return []
    names = [name for name, _ in model.named_parameters() if _at_least(name, n_layers - wanted)]
    for name in names:
        model.get_parameter(name)._is_hf_initialized = False  # transformers skips weights that it has marked as loaded
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(recipe.seed)
        for name, module in model.named_modules():
            if _at_least(f"{name}.", n_layers - wanted) and not _at_least(f"{name.rpartition('.')[0]}.", 0):
                module.apply(model._init_weights)
    return names


def _at_least(name: str, first: int) -> bool:
    number = layer_number(name)
    return number is not None and number >= first


class FreezeWarmup:
    """Drops the gradients of the base in the first updates; `first` are the names that train from the start.

    An optimizer does not change weights without a gradient, by weight decay neither, and their moments begin with their
    first gradient. The count comes from the trainer's step, so resuming changes nothing.
    """

    def __init__(self, steps: int, first: Sequence[str]) -> None:
        self.steps, self.first = steps, frozenset(first)

    def drop_gradients(self, model: Any, step: int) -> None:
        """Drop the base's gradients if this (0-based) update is one of the first."""
        if step >= self.steps:
            return
        for name, parameter in model.named_parameters():
            if name.removeprefix("module.").replace("_orig_mod.", "") not in self.first:
                parameter.grad = None


def freeze_base_steps(model: Any, recipe: TrainRecipe, reinitialized: Sequence[str]) -> FreezeWarmup | None:
    """Return the warm-up of `techniques.freeze_base_steps`, if any. Raises `RecipeError` for a pattern without a match.

    The parameters of `freeze_base_except` train from the start; by default those of `reinitialized`.
    """
    techniques = recipe.techniques
    if techniques.freeze_base_steps is None:
        return None
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for pattern in techniques.freeze_base_except:
        if not any(fnmatchcase(name, pattern) for name in names):
            fault = f"{pattern!r} matches no parameter that trains. Names look like {', '.join(names[:3])}."
            raise recipe.error("techniques.freeze_base_except", fault)
    first = [name for name in names if any(fnmatchcase(name, pattern) for pattern in techniques.freeze_base_except)]
    return FreezeWarmup(techniques.freeze_base_steps, first or reinitialized)


def summarize_names(names: Sequence[str]) -> list[str]:
    """Return names with layer numbers joined: ``model.layers.{0-3}.mlp.up_proj.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = _LAYER.search(name)
        key = name if match is None else name[: match.start(1)] + "*" + name[match.end(1) :]
        layers.setdefault(key, []).extend([] if match is None else [int(match[1])])
    return [key.replace("*", _span(sorted(numbers))) if numbers else key for key, numbers in layers.items()]


def _span(numbers: Sequence[int]) -> str:
    contiguous = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{{{numbers[0]}-{numbers[-1]}}}" if contiguous else "{" + ",".join(map(str, numbers)) + "}"


def layer_number(name: str) -> int | None:
    """Return the number of the layer that holds the parameter `name`; None outside the layers."""
    match = _LAYER.search(f".{name}")
    return None if match is None else int(match[1])
