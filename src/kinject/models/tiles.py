"""MLPs that read the tokens of a long row a tile at a time (as ALST's tiled MLP, arXiv 2506.13996).

An MLP reads each token by itself, and its inner tensors are several times as wide as the hidden state: of a long row they
are what fills the memory once a layer is computed again. Only those of one tile are there at a time then.
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

_EXPERTS = ("expert", "router")


def tile_mlps(model: Any, tokens: int) -> list[Any]:
    """Let each MLP of `model` read `mlp_tile` tokens of a row at a time, at first `tokens`, and return the MLPs.

    Each tile is computed again in the backward pass. Modules called mlp are MLPs, unless they hold experts, whose router
    reads all tokens of a batch.
    """
    mlps = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    mlps = [
        module for module in mlps if not any(word in name for name, _ in module.named_modules() for word in _EXPERTS)
    ]
    for mlp in mlps:
        mlp.mlp_tile, mlp.forward_of_tile = tokens, mlp.forward
        mlp.forward = types.MethodType(_forward_in_tiles, mlp)  # a bound method is copied with its module
    return mlps


def _forward_in_tiles(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in hidden.split(self.mlp_tile, dim=-2)]  # copied only in a batch of rows
    if not torch.is_grad_enabled():
        return torch.cat([self.forward_of_tile(part) for part in parts], dim=-2)
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self.modules())
    tiles = [
        checkpoint(self.forward_of_tile, part, use_reentrant=False, preserve_rng_state=has_dropout) for part in parts
    ]
    return torch.cat(cast("list[torch.Tensor]", tiles), dim=-2)
