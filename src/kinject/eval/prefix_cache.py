"""Keys and values of a beginning, shared by every row of a batch without being copied or grown."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_States = torch.Tensor | None


class _PrefixLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: `keys` and `values` of the beginning, shape [1, heads, depth, head size], or none yet.

    With `keep`, what an update adds becomes part of the beginning; without, it is attended to and forgotten. Sliding
    windows are the mask's business: everything is kept.
    """

    is_sliding = False

    def __init__(self, keys: _States = None, values: _States = None, keep: bool = False) -> None:
        super().__init__()
        self.keys, self.values, self.keep = keys, values, keep
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to lay out in advance."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return beginning and new states, shape [B, heads, depth + L, head size]."""
        keys, values = _after(self.keys, key_states), _after(self.values, value_states)
        if self.keep:
            self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self) -> int:
        """Return the depth of the beginning."""
        return 0 if self.keys is None else int(self.keys.shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys attended to, offset 0)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no bound."""
        return -1


def _after(beginning: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    if beginning is None:
        return states
    return torch.cat([beginning.expand(states.shape[0], -1, -1, -1), states], dim=-2)


class Prefix:
    """The keys and values of a beginning, layer by layer; empty at first."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._states: list[tuple[_States, _States]] = []

    def reading(self) -> Cache:
        """Return a cache to read rows on top of this beginning; it stays as it is."""
        return Cache(layers=[_PrefixLayer(*states) for states in self._states])

    def growing(self) -> Cache:
        """Return a cache to read the next tokens of the beginning (batch of one); give it to `grown` afterwards."""
        if not self._states:
            return Cache(layer_class_to_replicate=_GrowingLayer)
        return Cache(layers=[_PrefixLayer(*states, keep=True) for states in self._states])

    @staticmethod
    def grown(cache: Cache) -> Prefix:
        """Return the beginning that a `growing` cache holds after its forward pass."""
        prefix = Prefix()
        prefix._states = [(layer.keys, layer.values) for layer in cache.layers]
        return prefix


class _GrowingLayer(_PrefixLayer):
    def __init__(self, **_: Any) -> None:
        super().__init__(keep=True)
