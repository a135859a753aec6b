"""Forward passes over rows of a token tree: attention mask, positions, prefix cache, and the head
for scored tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer

from kinject.errors import InputError
from kinject.eval.scoring.tree import Node, Row
from kinject.models import CARTRIDGE, longrope_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Indices = npt.NDArray[np.int64]
_CACHE_NAMES = ("past_key_values", "cache")  # the second one since transformers 5.24
_MASKED = ("sdpa", "eager", CARTRIDGE)  # attention that takes any mask
_HEAD_ELEMENTS = (2**26, 2**20)  # logits in one softmax: on a GPU, on the CPU


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For each scored token of some rows, in order: its log-prob (float64) and whether it was the
    likeliest of all."""

    log_probs: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The output of the layers for some rows: the states that are scored, shape [n, width].

    `states` are hidden states, or logits if layers and head could not be run apart. Score i is that
    of token `targets[i]` under `states[indices[i]]`.
    """

    states: torch.Tensor
    indices: _Indices
    targets: _Indices


@dataclass(frozen=True, slots=True)
class _Reach:
    """The positions that a layer attends to: the last `window`, or those in the same chunk of
    `chunk`; None: all."""

    window: int | None = None
    chunk: int | None = None


class TreeForward:
    """Forward passes of one model over rows of a token tree."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take `model` (a peft model: with its adapter) in evaluation mode; nothing is run."""
        self.model: Any = _unwrapped(model)
        self.device: torch.device = self.model.device
        self.config: Any = self.model.config.get_text_config()
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.notes: list[str] = []
        _apply_head_in_float32(self.model)
        self.split = False  # whether the head runs apart from the layers; `Scorer` tests it
        self._output: Any = None  # the type that the layers return
        self._choose_attention()
        # Models that do not know it (xLSTM) swallow it, and return the logits of every token.
        parameters = inspect.signature(self.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache_name = _CACHE_NAMES[0]
        if _CACHE_NAMES[1] in parameters:
            self._cache_name = _CACHE_NAMES[1]
        self.reaches = _reaches(self.config)
        self.longrope_window = longrope_window(self.config)

    def why_not_tree(self) -> str:
        """Return why the model cannot read a tree, judged by its signature and configuration; "" if
        it may."""
        parameters = inspect.signature(self.model.forward).parameters
        missing = [
            name
            for name in ("position_ids", self._cache_name, "attention_mask")
            if name not in parameters
        ]
        if missing:
            return f"it takes no {missing[0]}"
        if not self.reaches:
            return "its layers are not all attention"
        if "local" in (getattr(self.config, "attention_layers", None) or ()):
            return "its local layers count the columns of a row, not the tokens of a text"
        if self.config._attn_implementation not in _MASKED:
            return f"{self.config._attn_implementation} takes no custom mask"
        return ""

    def read_tree(self, rows: Sequence[Row], prefix: Prefix) -> HiddenStates:
        """Return the states of `rows` below `prefix`; `scores` takes them."""
        ids, depths = _padded(rows)
        # Rows of one pass are below the same node.
        base = rows[0].base
        allowed = np.zeros((len(rows), ids.shape[1], base + ids.shape[1]), dtype=np.bool_)
        # All rows are below the node, whose tokens are ancestors of each of theirs.
        allowed[:, :, :base] = True
        for index, row in enumerate(rows):
            n = len(row.tokens)
            allowed[index, :n, base : base + n] = row.ancestors()
        padding = np.arange(ids.shape[1])
        allowed[:, padding, base + padding] = True  # a row of nothing but -inf would be NaN
        return self._read(
            rows,
            ids,
            **self._tree_inputs(allowed, depths, base),
            **self._cache_inputs(prefix.cache(_SharedLayer), base),
        )

    def extend(self, node: Node, prefix: Prefix) -> Prefix:
        """Return the keys and values down to `node`, given those of its parent."""
        n = len(node.tokens)
        # The root of a tree has no tokens of its own.
        if n == 0:
            return prefix
        base = node.depth - n
        depths = np.arange(base, node.depth, dtype=np.int64)[None]
        allowed = np.concatenate(
            [np.ones((n, base), dtype=np.bool_), np.tri(n, dtype=np.bool_)], axis=1
        )[None]
        cache = prefix.cache()
        inputs = {
            **self._tree_inputs(allowed, depths, base),
            self._cache_name: cache,
            "use_cache": True,
        }
        ids = self._tensor(node.tokens[None].astype(np.int64))
        with torch.inference_mode():
            if self.split:
                self._layers(input_ids=ids, **inputs)
            else:
                # 0 would keep the logits of all tokens, and nothing of a node is scored.
                self.model(input_ids=ids, logits_to_keep=1, **inputs)
        return Prefix(cache)

    def append(
        self,
        cache: Cache,
        tokens: _Indices,
        depths: _Indices,
        visible: npt.NDArray[np.bool_],
        wanted: _Indices,
    ) -> torch.Tensor:
        """Read `tokens` as one row behind the columns in `cache`, which keeps them; return the
        logits of those `wanted`.

        `depths` are those of all columns, `visible` [tokens, columns] marks those that each token
        attends to.
        """
        q, k = (
            self._tensor(depths[-len(tokens) :])[None, :, None],
            self._tensor(depths)[None, None, :],
        )
        # A sequence sees all of its columns, also later ones of this pass: depths make it causal.
        allowed = self._tensor(visible)[None] & (k <= q)
        inputs = {
            "input_ids": self._tensor(tokens[None]),
            "position_ids": q[:, :, 0],
            self._cache_name: cache,
            "attention_mask": self._masks(allowed, q, k),
            "use_cache": True,
        }
        rows = self._tensor(wanted)
        with torch.inference_mode():
            if not self.split:
                logits: torch.Tensor = self.model(logits_to_keep=rows, **inputs).logits
                return logits[0]
            output = self._layers(**inputs)
            self._output = type(output)
            return self._logits(output.last_hidden_state[0, rows])

    def likeliest_alone(self, tokens: _Indices) -> int:
        """Return the likeliest token after `tokens`, read in a pass of their own."""
        with torch.inference_mode():
            return int(
                self.model(input_ids=self._tensor(tokens[None]), use_cache=False)
                .logits[0, -1]
                .argmax()
            )

    def read_unshared(self, rows: Sequence[Row]) -> HiddenStates:
        """Return the states of `rows` that each are one plain sequence, padded on the right;
        `scores` takes them."""
        ids, _ = _padded(rows)
        mask = np.zeros(ids.shape, dtype=np.int64)
        for index, row in enumerate(rows):
            mask[index, : len(row.tokens)] = 1
        return self._read(rows, ids, attention_mask=self._tensor(mask), use_cache=False)

    def scores(self, parts: Sequence[HiddenStates]) -> list[TokenScores]:
        """Return the scores of each of `parts`: one pass of the head for all of them, which costs
        as much as for one."""
        if not self.split:
            return [_log_probs(part.states, part.indices, part.targets) for part in parts]
        starts = np.cumsum([0, *(len(part.states) for part in parts)])
        # `starts` has one entry more, the end of the last part.
        with torch.inference_mode():
            logits = self._logits(torch.cat([part.states for part in parts]))
            indices = np.concatenate(
                [part.indices + start for part, start in zip(parts, starts, strict=False)]
            )
            scores = _log_probs(logits, indices, np.concatenate([part.targets for part in parts]))
        edges = np.cumsum([len(part.indices) for part in parts])[:-1]
        pairs = zip(np.split(scores.log_probs, edges), np.split(scores.greedy, edges), strict=True)
        return [TokenScores(*pair) for pair in pairs]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's `states`: the model's own forward pass with its
        layers replaced."""
        name, layers = self.model.base_model_prefix, self._layers
        setattr(self.model, name, _FixedOutput(self._output(last_hidden_state=states[None])))
        try:
            # Any tokens, as many as states: the layers that would read them are replaced.
            ids = torch.zeros((1, len(states)), dtype=torch.long, device=self.device)
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits[0]
        finally:
            setattr(self.model, name, layers)

    @property
    def _layers(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    def _read(self, rows: Sequence[Row], ids: npt.NDArray[np.int64], **inputs: Any) -> HiddenStates:
        keep = np.zeros(ids.shape, dtype=np.bool_)
        for index, row in enumerate(rows):
            # Several leaves may be scored at one token: its state is kept once.
            keep[index, row.indices] = True
        numbers = keep.ravel().cumsum().reshape(keep.shape) - 1
        indices = np.concatenate([numbers[index, row.indices] for index, row in enumerate(rows)])
        targets = np.concatenate([row.targets for row in rows]).astype(np.int64)
        with torch.inference_mode():
            if self.split:
                output = self._layers(input_ids=self._tensor(ids), **inputs)
                self._output = type(output)
                return HiddenStates(output.last_hidden_state[self._tensor(keep)], indices, targets)
            kept = self._tensor(keep)
            if not self._keeps_logits:
                output = self.model(input_ids=self._tensor(ids), **inputs)
                return HiddenStates(output.logits[kept], indices, targets)
            output = self.model(input_ids=self._tensor(ids), logits_to_keep=kept, **inputs)
            return HiddenStates(
                output.logits.reshape(-1, output.logits.shape[-1]), indices, targets
            )

    def _tree_inputs(
        self, allowed: npt.NDArray[np.bool_], depths: npt.NDArray[np.int64], base: int
    ) -> dict[str, Any]:
        """Return position_ids and the additive mask, [B, 1, L, base + L], or one for each kind of
        layer."""
        keys = np.concatenate(
            [np.broadcast_to(np.arange(base), (len(depths), base)), depths], axis=1
        )
        visible = self._tensor(allowed)
        # Windows count depths, not columns: branches of a row go back to the depth of their parent.
        q, k = self._tensor(depths)[:, :, None], self._tensor(keys)[:, None, :]
        mask = self._masks(visible, q, k)
        return {"position_ids": self._tensor(depths), "attention_mask": mask}

    def _cache_inputs(self, cache: Cache, base: int) -> dict[str, Any]:
        if base == 0:
            return {"use_cache": False}
        return {self._cache_name: cache, "use_cache": True}

    def _masks(
        self, visible: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the mask of each kind of layer; the mask itself where there is one kind, as most
        models take it."""
        masks = {
            kind: self._additive(_within(visible, q, k, reach))
            for kind, reach in self.reaches.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        zero = torch.zeros((), dtype=dtype, device=self.device)
        return torch.where(visible, zero, torch.finfo(dtype).min)[:, None]

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _choose_attention(self) -> None:
        """Choose an attention that takes a custom mask, and note it; not every model has sdpa
        (Gemma 2 has not)."""
        configured = self.config._attn_implementation
        # Without a kind of layer that is known there is no tree, and no mask of our own.
        if configured in _MASKED or not _reaches(self.config):
            return
        chosen = "sdpa" if self.model._supports_sdpa else "eager"
        self.model.set_attn_implementation(chosen)
        self.notes.append(f"scored with {chosen} attention instead of {configured}")


def _apply_head_in_float32(model: Any) -> None:
    """Let a model in bfloat16 or float16 compute its logits in float32: rounded logits tie, and the
    first choice wins."""
    head = model.get_output_embeddings()
    # peft wraps a head that an adapter trains, whole or some tokens of it. The wrapper's weight is
    # the trained one, but for tokens alone it has no bias.
    plain = getattr(head, "original_module", head)
    # A subclass of Linear (weights in 8 or 4 bits) has a forward pass of its own.
    if type(plain) is not torch.nn.Linear or plain.weight.dtype not in (
        torch.bfloat16,
        torch.float16,
    ):
        return

    def forward(states: torch.Tensor) -> torch.Tensor:
        bias = getattr(head, "bias", plain.bias)
        if bias is not None:
            bias = bias.float()
        return torch.nn.functional.linear(states.float(), head.weight.float(), bias)

    head.forward = forward


class _FixedOutput(torch.nn.Module):
    """Replaces a model's layers and returns a fixed output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _unwrapped(model: Any) -> Any:
    """Return the transformers model inside a peft model; its adapters stay in it."""
    if not hasattr(model, "get_base_model"):
        return model
    base = model.get_base_model()
    if (
        model.active_peft_config.is_prompt_learning
        and base.config._attn_implementation != CARTRIDGE
    ):
        raise InputError(
            "An adapter that learns prompts cannot be scored. Use a cartridge, or one that "
            "changes weights (LoRA)."
        )
    return base


def _reaches(config: Any) -> Mapping[str, _Reach]:
    """Return the reach of each kind of layer, with the kinds of transformers' masking_utils; {} for
    other kinds."""
    window, chunk = (
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    )
    kinds = {
        "full_attention": _Reach(),
        "sliding_attention": _Reach(window=window),
        "chunked_attention": _Reach(chunk=chunk),
    }
    used = set(getattr(config, "layer_types", None) or ())
    if used:
        # Layers of other kinds keep no keys and values that could be shared.
        return {kind: kinds[kind] for kind in sorted(used)} if used <= set(kinds) else {}
    return {"all": _Reach(window=window, chunk=None if window else chunk)}


def _within(visible: torch.Tensor, q: torch.Tensor, k: torch.Tensor, reach: _Reach) -> torch.Tensor:
    if reach.window is not None:
        return visible & (k > q - reach.window)
    if reach.chunk is not None:
        return visible & (k // reach.chunk == q // reach.chunk)
    return visible


def _padded(rows: Sequence[Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids and depths of `rows`, shape [B, L], padded with zeros."""
    length = max(len(row.tokens) for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    depths = np.zeros((len(rows), length), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.tokens)] = row.tokens
        depths[index, : len(row.tokens)] = row.depths
    return ids, depths


def _log_probs(logits: torch.Tensor, indices: _Indices, targets: _Indices) -> TokenScores:
    """Return log-softmax of `logits` [n, vocabulary] at (indices, targets), in float32 at least, a
    few rows at a time.

    A few rows stay in the processor's cache together with their softmax: five times as fast as all
    rows at once. Of equally likely tokens the first counts as the likeliest.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    n_rows = max(1, _HEAD_ELEMENTS[logits.device.type == "cpu"] // logits.shape[1])
    starts = np.arange(0, len(logits), n_rows)
    # Sorted, the pairs of each part of the rows are one slice.
    order = np.argsort(indices, kind="stable")
    edges = np.searchsorted(indices[order], [*starts, len(logits)])
    log_probs, greedy = (
        np.empty(len(indices), dtype=np.float64),
        np.zeros(len(indices), dtype=np.bool_),
    )
    for start, part, (low, high) in zip(
        starts, torch.split(logits, n_rows), pairwise(edges), strict=True
    ):
        pairs = order[low:high]
        in_part = indices[pairs] - start
        softmax = torch.log_softmax(part, dim=-1, dtype=exact)
        log_probs[pairs] = softmax[in_part, targets[pairs]].double().cpu().numpy()
        # argmax of every row is ten times as slow
        highest = (part[in_part, targets[pairs]] == part.amax(dim=-1)[in_part]).cpu().numpy()
        if highest.any():
            first = part[in_part[highest]].argmax(dim=-1).cpu().numpy()
            greedy[pairs[highest]] = first == targets[pairs[highest]]
    return TokenScores(log_probs, greedy)


class _SharedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `Prefix` below which rows are read: they attend to it and to their own states,
    which are discarded."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states, shape [B, heads, depth + L, head size]."""
        n = len(key_states)
        keys, values = (of.expand(n, -1, -1, -1) for of in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


class Prefix:
    """The keys and values of a prefix, layer by layer, which every row of a batch uses without a
    copy; empty at first.

    Everything is kept, because the mask implements sliding windows.
    """

    def __init__(self, cache: Cache | None = None) -> None:
        """Take the states in `cache` after a forward pass; without it, start without tokens."""
        self._states = [(layer.keys, layer.values) for layer in cache.layers] if cache else []

    def cache(self, kind: type[DynamicLayer] = DynamicLayer) -> Cache:
        """Return a cache that begins with this prefix, which does not change: it takes the next
        tokens (batch of one).

        With layers of the `kind` `_SharedLayer`: to read rows below it.
        """
        layers = []
        for keys, values in self._states:
            layer = kind()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layers.append(layer)
        return Cache(layers=layers) if layers else Cache(layer_class_to_replicate=kind)
