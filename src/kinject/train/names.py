"""Names of a model's parameters: the layer that each belongs to, and lists of them in few words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# GPT-2 has `h`, MPT `blocks`, BERT `layer`, most others `layers`.
_LAYER = re.compile(r"\.(?:layers?|h|blocks)\.(\d+)\.")


def layer_number(name: str) -> int | None:
    """Return the number of the layer that holds the parameter `name`; None outside the layers."""
    match = _LAYER.search(f".{name}")
    if match is None:
        return None
    return int(match[1])


def count_layers(model: PreTrainedModel) -> int:
    """Return the number of layers that read text.

    In BART's config num_hidden_layers is that of the encoder, which a causal model lacks.
    """
    numbers = [layer_number(name) for name, _ in model.get_decoder().named_parameters()]
    return 1 + max((number for number in numbers if number is not None), default=-1)


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter without what DDP and torch.compile put in front of it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def summarize_names(names: Sequence[str]) -> list[str]:
    """Return names with layer numbers joined: ``model.layers.{0-3}.mlp.up_proj.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match is None:
            layers.setdefault(name, [])
        else:
            key = name[: match.start(1)] + "*" + name[match.end(1) :]
            layers.setdefault(key, []).append(int(match[1]))
    return [key.replace("*", _span(sorted(numbers))) for key, numbers in layers.items()]


def _span(numbers: Sequence[int]) -> str:
    """Return the numbers of layers as ``{0-3}``, or ``{0,2}`` if some are missing."""
    if not numbers:
        return "*"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
