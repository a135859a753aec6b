"""What an optimizer keeps for each parameter, and what its step needs on top: by arithmetic on shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kinject.errors import InputError
from kinject.plan.model import Shape
from kinject.train.config import embedding_bits

_STATES = {
    "sgd": 0, "adagrad": 1, "rmsprop": 1, "adamw": 2, "lion": 1, "ademamix": 3, "stable_adamw": 2,
    "schedule_free_adamw": 2, "schedule_free_radam": 2, "schedule_free_sgd": 1, "adamw_anyprecision": 2,
}  # fmt: skip
"""Numbers kept for each number that trains, by family."""
_BNB_BLOCK = 256
"""States of bitsandbytes' 8-bit optimizers that share a scale of float32."""
_BNB_LEAST = 4096
"""Parameters with fewer numbers keep their state in float32."""


def known_optimizers() -> tuple[str, ...]:
    """Return the families whose memory is known."""
    return (*_STATES, "adafactor")


def optimizer_memory(model: Any, shape: Shape) -> tuple[int, int]:
    """Return (bytes of state, bytes that a step works in) for what trains in `model`.

    Raises `InputError` for an optimizer whose memory is not known here.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("no parameter trains. Look at model.freeze and at the adapter section.")
    optim = shape.optim
    if optim == "adafactor":
        return sum(map(_factored, trained)), 2 * max(4 * parameter.numel() for parameter in trained)
    family = _family(optim)
    n_states = _STATES[family] + (family in ("sgd", "rmsprop") and _asks(shape.optim_args, "momentum"))
    if _of_bitsandbytes(optim):
        bits = _eight_bit(model, shape) if "8bit" in optim else set()
        return sum(n_states * (_small(p) if id(p) in bits else 4 * p.numel()) for p in trained), 0
    sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
    state = n_states * sum(sizes)
    if optim in ("adamw_torch_fused", "sgd") or family == "lion":
        return state, 0
    return state, sum(sizes) if shape.device == "cuda" else 2 * max(sizes)  # all at once on a GPU, else one by one


def _family(optim: str) -> str:
    found = re.sub(r"^paged_|_(?:torch|fused|bnb|8bit|32bit)(?![a-z])", "", optim)
    if found not in _STATES:
        raise InputError(
            f"trainer.optim: the memory of {optim} is not known to kinject plan. Known: {', '.join(known_optimizers())}, "
            "also with _8bit and paged_. Plan with the nearest of them."
        )
    return found


def _of_bitsandbytes(optim: str) -> bool:
    return bool(re.search(r"8bit|32bit|bnb|paged|^lion|^ademamix", optim)) and "torch" not in optim


def _asks(optim_args: str | None, key: str) -> bool:
    return any(pair.strip().startswith(f"{key}=") for pair in (optim_args or "").split(","))


def _eight_bit(model: Any, shape: Shape) -> set[int]:
    """Return the ids of the parameters whose state is kept in 8 bits: large, and in no embedding unless the recipe says so."""
    tables: Iterable[Any] = (module for module in model.modules() if isinstance(module, nn.Embedding))
    whole = set() if embedding_bits(shape.optim_args) == "8" else {id(t.weight) for t in tables}
    return {id(p) for p in model.parameters() if p.numel() >= _BNB_LEAST and id(p) not in whole}


def _small(parameter: torch.Tensor) -> int:
    return parameter.numel() + 4 * -(-parameter.numel() // _BNB_BLOCK)


def _factored(parameter: torch.Tensor) -> int:
    """Return Adafactor's bytes: a row and a column for each matrix, all of a vector."""
    if parameter.ndim < 2:
        return 4 * parameter.numel()
    return 4 * (parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2])
