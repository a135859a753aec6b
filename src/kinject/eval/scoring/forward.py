"""Forward passes over rows of a token tree: the mask, the positions, and the head only where something is asked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kinject.errors import InputError
from kinject.eval.scoring.tree import Node, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Indices = npt.NDArray[np.int64]
_MASKED = ("sdpa", "eager")  # attention that takes any mask
_HEAD_ELEMENTS = (2**26, 2**20)  # logits whose softmax is taken at once: elsewhere, and on the CPU


@dataclass(frozen=True, slots=True)
class Scores:
    """For each score of some rows, in order: its log-prob (float64) and whether its token was the likeliest of all."""

    log_probs: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Read:
    """Rows that went through the layers: what the head needs, shape [n, width], and what it is asked.

    `states` are hidden states, or logits where the model could not be taken apart; score i asks for `targets[i]` at
    `states[asked[i]]`.
    """

    states: torch.Tensor
    asked: _Indices
    targets: _Indices


@dataclass(frozen=True, slots=True)
class _Reach:
    """How far a layer sees: the last `window` positions, or those in the same chunk of `chunk`; None: everything."""

    window: int | None = None
    chunk: int | None = None


class Passes:
    """A model as the scorer sees it: rows in, scores out."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take `model` (a peft model: with its adapter) in evaluation mode; nothing is run."""
        self.model: Any = _unwrapped(model)
        self.device: torch.device = self.model.device
        self.config: Any = self.model.config.get_text_config()
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.notes: list[str] = []
        self.split = False  # whether the head is applied apart from the layers; `Scorer` tries it
        self._output: Any = None  # the type of what the layers return
        self._settle_attention()
        self.reaches = _reaches(self.config)

    def why_not_tree(self) -> str:
        """Return why the model cannot read a tree, as far as its signature and configuration tell; "" where it may."""
        parameters = inspect.signature(self.model.forward).parameters
        missing = [name for name in ("position_ids", "past_key_values", "attention_mask") if name not in parameters]
        if missing:
            return f"it takes no {missing[0]}"
        if self.reaches is None:
            return "its layers are not all attention"
        if self.config._attn_implementation not in _MASKED:
            return f"{self.config._attn_implementation} takes no mask of its own"
        return ""

    def window(self) -> int | None:
        """Return the most tokens that the model reads at once, None where its configuration sets no bound."""
        for name in ("n_positions", "max_position_embeddings", "n_ctx"):
            value = getattr(self.config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    def read_tree(self, rows: Sequence[Row], prefix: Prefix) -> Read:
        """Read `rows` on top of `prefix`; `scores` takes what comes back."""
        ids, depths = _padded(rows)
        base = rows[0].base
        allowed = np.zeros((len(rows), ids.shape[1], base + ids.shape[1]), dtype=np.bool_)
        allowed[:, :, :base] = True
        for index, row in enumerate(rows):
            n = len(row.tokens)
            allowed[index, :n, base : base + n] = row.ancestors()
        padding = np.arange(ids.shape[1])
        allowed[:, padding, base + padding] = True  # a row of nothing but -inf would be NaN
        return self._read(rows, ids, **self._tree_inputs(allowed, depths, base), **_cached(prefix.reading(), base))

    def extend(self, node: Node, prefix: Prefix) -> Prefix:
        """Return the keys and values down to `node`, read on top of those of its parent."""
        n = len(node.tokens)
        if n == 0:
            return prefix
        base = node.depth - n
        depths = np.arange(base, node.depth, dtype=np.int64)[None]
        allowed = np.concatenate([np.ones((n, base), dtype=np.bool_), np.tri(n, dtype=np.bool_)], axis=1)[None]
        cache = prefix.growing()
        inputs = self._tree_inputs(allowed, depths, base)
        ids = self._tensor(node.tokens[None].astype(np.int64))
        with torch.inference_mode():
            if self.split:
                self._layers(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
            else:
                self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
        return Prefix.grown(cache)

    def read_lines(self, rows: Sequence[Row]) -> Read:
        """Read `rows` that each are one plain sequence, padded on the right; `scores` takes what comes back."""
        ids, _ = _padded(rows)
        mask = np.zeros(ids.shape, dtype=np.int64)
        for index, row in enumerate(rows):
            mask[index, : len(row.tokens)] = 1
        return self._read(rows, ids, attention_mask=self._tensor(mask), use_cache=False)

    def scores(self, reads: Sequence[Read]) -> list[Scores]:
        """Return all scores of each of `reads`: one pass of the head for all of them, which costs as much as for one."""
        if not self.split:
            return [_log_probs(read.states, read.asked, read.targets) for read in reads]
        starts = np.cumsum([0, *(len(read.states) for read in reads)])
        with torch.inference_mode():
            logits = self._logits(torch.cat([read.states for read in reads]))
            asked = np.concatenate([read.asked + start for read, start in zip(reads, starts, strict=False)])
            found = _log_probs(logits, asked, np.concatenate([read.targets for read in reads]))
        edges = np.cumsum([len(read.asked) for read in reads])[:-1]
        parts = zip(np.split(found.log_probs, edges), np.split(found.greedy, edges), strict=True)
        return [Scores(*part) for part in parts]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the model makes of the last layer's `states`: its own forward pass, the layers taken out."""
        name, layers = self.model.base_model_prefix, self._layers
        setattr(self.model, name, _Given(self._output(last_hidden_state=states[None])))
        try:
            ids = torch.zeros((1, len(states)), dtype=torch.long, device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
        finally:
            setattr(self.model, name, layers)

    @property
    def _layers(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    def _read(self, rows: Sequence[Row], ids: npt.NDArray[np.int64], **inputs: Any) -> Read:
        keep = np.zeros(ids.shape, dtype=np.bool_)
        for index, row in enumerate(rows):
            keep[index, row.places] = True
        numbers = keep.ravel().cumsum().reshape(keep.shape) - 1
        asked = np.concatenate([numbers[index, row.places] for index, row in enumerate(rows)])
        targets = np.concatenate([row.targets for row in rows]).astype(np.int64)
        with torch.inference_mode():
            if self.split:
                output = self._layers(input_ids=self._tensor(ids), **inputs)
                self._output = type(output)
                return Read(output.last_hidden_state[self._tensor(keep)], asked, targets)
            output = self.model(input_ids=self._tensor(ids), logits_to_keep=self._tensor(keep), **inputs)
            return Read(output.logits.reshape(-1, output.logits.shape[-1]), asked, targets)

    def _tree_inputs(self, allowed: npt.NDArray[np.bool_], depths: npt.NDArray[np.int64], base: int) -> dict[str, Any]:
        """Return position_ids and the additive mask, [B, 1, L, base + L], or one for each kind of layer."""
        assert self.reaches is not None
        keys = np.concatenate([np.broadcast_to(np.arange(base), (len(depths), base)), depths], axis=1)
        seen = self._tensor(allowed)
        q, k = self._tensor(depths)[:, :, None], self._tensor(keys)[:, None, :]
        masks = {kind: self._additive(_within(seen, q, k, reach)) for kind, reach in self.reaches.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"position_ids": self._tensor(depths), "attention_mask": mask}

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        zero = torch.zeros((), dtype=dtype, device=self.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)[:, None]

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _settle_attention(self) -> None:
        """Choose an attention that takes a mask of its own, and say so; not every model has sdpa (Gemma 2 has not)."""
        asked = self.config._attn_implementation
        if asked in _MASKED or _reaches(self.config) is None:
            return
        wanted = "sdpa" if self.model._supports_sdpa else "eager"
        self.model.set_attn_implementation(wanted)
        self.notes.append(f"scored with {wanted} attention instead of {asked}")


class _Given(torch.nn.Module):
    """Stands for a model's layers and returns what it was given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _unwrapped(model: Any) -> Any:
    """Return the transformers model inside a peft model; its adapters stay in it."""
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise InputError("An adapter that learns prompts cannot be scored. Use one that changes weights (LoRA).")
    return model.get_base_model()


def _reaches(config: Any) -> Mapping[str, _Reach] | None:
    """Return how far each kind of layer sees, told apart as in transformers' masking_utils; None for others."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = {
        "full_attention": _Reach(),
        "sliding_attention": _Reach(window=window),
        "chunked_attention": _Reach(chunk=chunk),
    }
    there = set(getattr(config, "layer_types", None) or ())
    if there:
        return {kind: kinds[kind] for kind in sorted(there)} if there <= set(kinds) else None
    return {"all": _Reach(window=window, chunk=None if window else chunk)}


def _within(seen: torch.Tensor, q: torch.Tensor, k: torch.Tensor, reach: _Reach) -> torch.Tensor:
    if reach.window is not None:
        return seen & (k > q - reach.window)
    if reach.chunk is not None:
        return seen & (k // reach.chunk == q // reach.chunk)
    return seen


def _padded(rows: Sequence[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids and depths of `rows`, shape [B, L], zeros where a row is shorter."""
    length = max(len(row.tokens) for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    depths = np.zeros((len(rows), length), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.tokens)] = row.tokens
        depths[index, : len(row.tokens)] = row.depths
    return ids, depths


def _cached(cache: Any, base: int) -> dict[str, Any]:
    return {"past_key_values": cache, "use_cache": True} if base else {"use_cache": False}


def _log_probs(logits: torch.Tensor, asked: _Indices, targets: _Indices) -> Scores:
    """Return log-softmax of `logits` [n, vocabulary] at (asked, targets), in float32 at least, a few rows at a time.

    Rows go through the cache together with their softmax: five times as fast as all of them at once. Of equally likely
    tokens the first counts as the likeliest.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    n_rows = max(1, _HEAD_ELEMENTS[logits.device.type == "cpu"] // logits.shape[1])
    starts = np.arange(0, len(logits), n_rows)
    order = np.argsort(asked, kind="stable")
    edges = np.searchsorted(asked[order], [*starts, len(logits)])
    found, greedy = np.empty(len(asked), dtype=np.float64), np.zeros(len(asked), dtype=np.bool_)
    for start, part, (low, high) in zip(starts, torch.split(logits, n_rows), pairwise(edges), strict=True):
        pairs = order[low:high]
        log_probs = torch.log_softmax(part, dim=-1, dtype=exact)
        at = asked[pairs] - start
        found[pairs] = log_probs[at, targets[pairs]].double().cpu().numpy()
        highest = (part[at, targets[pairs]] == part.amax(dim=-1)[at]).cpu().numpy()  # argmax is ten times as slow
        if highest.any():
            first = part[at[highest]].argmax(dim=-1).cpu().numpy()
            greedy[pairs[highest]] = first == targets[pairs[highest]]
    return Scores(found, greedy)


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
