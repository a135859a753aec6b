"""Which parameters train, at which share of the learning rate, and proof that they are those that were asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from kinject.errors import TrainingError
from kinject.recipe import TrainRecipe

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|embed_in)\.")


def freeze(model: Any, recipe: TrainRecipe) -> None:
    """Stop the parameters that match `model.freeze` from training. Raises `RecipeError` for a pattern without a match."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.model.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise recipe.error(
                "model.freeze", f"{pattern!r} matches no parameter. Names look like {', '.join(names[:3])}."
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in recipe.model.freeze):
            parameter.requires_grad_(False)


def check_trained(model: Any, recipe: TrainRecipe) -> list[str]:
    """Return the names that train. Raises `TrainingError` when they are not exactly those that the recipe asks for.

    Without an adapter these are all but the frozen; with one, its own weights beside every target, and a whole copy of
    every module in `modules_to_save` (embed_tokens and lm_head among them).
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if recipe.adapter is None:
        frozen = recipe.model.freeze
        asked = [n for n, _ in model.named_parameters() if not any(fnmatchcase(n, pattern) for pattern in frozen)]
        astray = sorted(set(asked) ^ set(trained))
        if astray:
            raise TrainingError(f"what trains is not what was asked; these differ: {', '.join(astray[:5])}.")
    else:
        _check_adapter(trained, recipe.adapter)
    if not trained:
        raise TrainingError("no parameter trains. Look at model.freeze and at the adapter section.")
    return trained


def _check_adapter(trained: Sequence[str], adapter: Any) -> None:
    targets = adapter.get("target_modules")
    wanted = [(name, "lora_") for name in targets or ()] if isinstance(targets, list | tuple) else []
    wanted += [(name, "modules_to_save") for name in adapter.get("modules_to_save") or ()]
    for module, mark in wanted:
        if not any(f".{module}." in f".{name}" and mark in name for name in trained):
            raise TrainingError(f"the adapter asks to train {module}, but none of its weights train. Check its name.")
    own = ("lora_", "modules_to_save", "trainable_tokens")
    stray = [name for name in trained if not any(mark in name for mark in own)]
    if stray and adapter.get("bias", "none") == "none":
        raise TrainingError(f"beside the adapter these train, unasked: {', '.join(stray[:5])}.")


def summarise(names: Sequence[str]) -> list[str]:
    """Return names with layer numbers joined: ``model.layers.{0-3}.mlp.up_proj.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        found = _LAYER.search(name)
        key = name if found is None else name[: found.start(1)] + "*" + name[found.end(1) :]
        layers.setdefault(key, []).extend([] if found is None else [int(found[1])])
    return [key.replace("*", _span(sorted(held))) if held else key for key, held in layers.items()]


def _span(numbers: Sequence[int]) -> str:
    whole = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{{{numbers[0]}-{numbers[-1]}}}" if whole else "{" + ",".join(map(str, numbers)) + "}"


def layer_number(name: str) -> int | None:
    """Return the layer in which the parameter `name` stands, None outside the layers."""
    found = _LAYER.search(f".{name}")
    return None if found is None else int(found[1])


def rate_share(name: str, n_layers: int, decay: float) -> float:
    """Return what `name` gets of the learning rate: 1 above the layers and in the last, `decay` less a layer below.

    The embeddings lie under layer 0 (ULMFiT's discriminative fine-tuning, arXiv 1801.06146).
    """
    found = _LAYER.search(name)
    if found is not None:
        return float(decay ** (n_layers - 1 - int(found[1])))
    return float(decay**n_layers) if _EMBEDDING.search(name) else 1.0


def split_by_layer(optimizer: Any, model: Any, decay: float) -> None:
    """Split the groups of a fresh `optimizer` so that each holds the parameters of one rate share, in order."""
    n_layers = model.config.get_text_config().num_hidden_layers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        by_share: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_share.setdefault(rate_share(names[id(parameter)], n_layers, decay), []).append(parameter)
        groups += [{**group, "params": held, "lr": group["lr"] * share} for share, held in sorted(by_share.items())]
    optimizer.param_groups[:] = groups
