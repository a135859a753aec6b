"""The memory of one training step, part by part: the model's own forward and backward pass on fake tensors.

Torch's FakeTensorMode runs every operation on shapes alone, without the memory. A tensor is counted for as long as
something refers to it, so the peak, gradient checkpointing, autocast's copies and the tensors of the loss come from the
code that will run. The optimizer's state follows by arithmetic on shapes. If all layers are alike, a stack of two and one
of three are run: each further layer adds as much to each moment of the step as the third.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinject.errors import InputError
from kinject.plan.model import (
    GPU_ATTENTION,
    StepConfig,
    allocate_fake_storages,
    build_model,
    count_alike_layers,
    count_flops,
    count_parameters,
    count_tiled_weights,
    largest_block,
    layer_stack,
)
from kinject.train.loss import divergence, in_tiles
from kinject.train.optimizers import embedding_bits, is_muon_matrix
from kinject.train.regularization import projection_memory

_TILE = (4096, 32_768)
"""Tokens and vocabulary entries that TRL's fused head projects at once, at most."""
_UPDATE = "the optimizer's step"
_MEASURING = "measuring the texts that projection keeps, before the first step"
_SHORT = (2, 3)
"""Layers of the two short stacks that are run in place of a longer one."""
_MIN_OFFLOADED = 1024
"""Bytes; TRL does not move smaller tensors."""
_HEAP_HOLES = 140 * 2**20
"""Bytes in the holes of a CPU's heap, which stay resident: at most half of the tensors. Fitted as the mean of runs of 1M to 80M
parameters (docs/plan.md)."""
_CHECKPOINTING_HOLES = 1 / 4
"""Fraction of activations and logits that they add under gradient checkpointing, where the layers' blocks come and go."""
_STATES = {
    "sgd": 0, "adagrad": 1, "rmsprop": 1, "adamw": 2, "lion": 1, "ademamix": 3, "stable_adamw": 2,
    "schedule_free_adamw": 2, "schedule_free_radam": 2, "schedule_free_sgd": 1, "adamw_anyprecision": 2,
}  # fmt: skip
"""Optimizer family -> numbers in its state for each trained number."""
_BNB_BLOCK = 256
"""States of bitsandbytes' 8-bit optimizers that share a scale of float32."""
_BNB_MIN_NUMBERS = 4096
"""Parameters with fewer numbers keep their state in float32."""
_BNB_ON_CPU = {"adamw": (3, 5), "lion": (3, 5), "ademamix": (4, 9), "rmsprop": (3, 3)}
"""Optimizer family -> float32 numbers for each number of a parameter that bitsandbytes holds at once while it updates it on a
CPU, by torch's operations (0.50; read in its source): with a state in 32 bits, and in 8. Its kernel on a GPU holds none."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of a step, by part; `peak` is their sum, `when` that moment.

    `activations` are the tensors that the backward pass needs or that are being computed, `logits` all tensors over the
    vocabulary, `fragmentation` the estimated holes in a CPU's heap (0 on a GPU). `n_parameters` and `n_trained` are counts.
    `flops` are the operations of an optimizer step on one device, `largest_block` the bytes of weights of the largest layer
    (gathered at a time when weights are sharded). `paged` are bytes of the optimizer's state in the machine's memory, which
    come and go (trainer.optim: paged_...).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    fragmentation: int
    when: str
    n_parameters: int
    n_trained: int
    trained_bytes: int
    largest_block: int
    flops: float
    paged: int = 0

    @property
    def peak(self) -> int:
        """The sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.fragmentation


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that an operation creates, until nothing refers to it any more.

    `parts` are the bytes now, `fullest` the same when they were most in each moment (`moment` names the one now). Tensors
    whose last axis is `vocabulary` long count as logits.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary = vocabulary
        self.parts = {"weights": 0, "gradients": 0, "activations": 0, "logits": 0}
        self.moment = "before the layers"
        self.fullest: dict[str, dict[str, int]] = {}
        self._part_of: dict[int, str] = {}

    def track(self, tensor: torch.Tensor, part: str) -> None:
        """Count the storage of `tensor` as `part` from now on, even if it counted as another part so far."""
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        before = self._part_of.get(key)
        if before is None:
            weakref.finalize(storage, self._forget, key, n_bytes)
        else:
            self.parts[before] -= n_bytes
        self._part_of[key] = part
        self.parts[part] += n_bytes
        if sum(self.parts.values()) > sum(self.fullest.get(self.moment, {}).values()):
            self.fullest[self.moment] = dict(self.parts)

    def name_moments(self, layers: torch.nn.ModuleList) -> None:
        """Let `moment` follow the step: layers and head forwards, head and layers backwards (recomputed or not).

        The names count from the first layer and from the last, so that stacks of any height share them.
        """

        def enter(moment: str, *, backward: bool = False) -> None:
            if backward or not self.moment.startswith(
                "backward"
            ):  # a layer that is recomputed belongs to its backward pass
                self.moment = moment

        for index, layer in enumerate(layers):
            position = "first" if index == 0 else "last" if index == len(layers) - 1 else "between"
            after = "head" if index == len(layers) - 1 else f"forward, {position}"

            def leave(_: Any, __: Any, output: Any, position: str = position, after: str = after) -> None:
                enter(after)
                for tensor in tree_leaves(output):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        tensor.register_hook(lambda _: enter(f"backward, {position}", backward=True))  # type: ignore[no-untyped-call]

            layer.register_forward_pre_hook(lambda *_, position=position: enter(f"forward, {position}"))
            layer.register_forward_hook(leave)

    def _forget(self, key: int, n_bytes: int) -> None:
        self.parts[self._part_of.pop(key)] -= n_bytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the tensors that it made."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._part_of:
                is_logits = tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary and tensor.is_floating_point()
                self.track(tensor, "logits" if is_logits else "activations")
        return result


def _gpu_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: int, **options: Any
) -> tuple[Any, None]:
    """Return attention [batch, length, heads, dimension] with the memory of a GPU's kernels.

    `query` is [batch, heads, length, dimension]. Kept for the backward pass: query, key, value, output, a log-sum for each
    row, and the mask if there is one. With `context` devices for a row each has its part of the length.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if mask is not None:  # kernels with a mask need as many keys as queries
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        mask = mask.to(query.dtype)
    return _GpuAttention.apply(query, key, value, mask, context), None  # type: ignore[no-untyped-call]


class _GpuAttention(torch.autograd.Function):
    """Allocates the tensors of the forward and backward pass of a GPU's attention.

    With context parallelism these are those of torch's ring attention with accelerate's default, allgather: keys and values
    of the whole row, and the output or the gradients of this device's part summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, context: int) -> Any:
        rows, heads, length, _ = query.shape
        ctx.context = context
        if context > 1:
            _ = _whole_row(key, value, context), query.new_empty(query.shape, dtype=torch.float32)
        out = query.new_empty(rows, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        if ctx.context > 1:
            summed = [tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (query, key, value)]
            sent = [tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (key, value)]
            _ = _whole_row(key, value, ctx.context)
            del summed, sent
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _whole_row(key: torch.Tensor, value: torch.Tensor, context: int) -> torch.Tensor:
    return key.new_empty(context * (key.numel() + value.numel()))


class _FusedHead(torch.autograd.Function):
    """Allocates the tensors of TRL's fused head: a tile of logits at a time, gradients summed in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        _tile(hidden, weight, dtype)
        return hidden.new_empty(hidden.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        to_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32)
        to_weight = weight.new_empty(weight.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _tile(hidden, weight, ctx.dtype)
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype) if to_weight is not None else None, None


def _tile(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return hidden.new_empty(min(hidden.shape[0], _TILE[0]), min(weight.shape[0], _TILE[1]), dtype=dtype)


def simulate(config: StepConfig) -> Memory:
    """Return the memory of an optimizer step once the optimizer has its state. Raises `InputError` as `build_model` does.

    If gradients are accumulated, the micro-batch that is run is not the first: it starts with gradients in memory.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(GPU_ATTENTION, functools.partial(_gpu_attention, context=config.context))
    AttentionMaskInterface.register(GPU_ATTENTION, sdpa_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        n_layers = count_alike_layers(config)
        if n_layers <= _SHORT[1]:
            return _fullest_moment(_run_step(config, None), config)
        low, high = (_run_step(config, n) for n in _SHORT)
    further = n_layers - _SHORT[0]
    return _fullest_moment({key: low[key] + (high[key] - low[key]) * further for key in low if key in high}, config)


def _run_step(config: StepConfig, n_layers: int | None) -> dict[tuple[str, str], int]:
    """Return the bytes of a step of the first `n_layers` (None: all) by (moment, part), and its counts by (``counts``, name)."""
    model = build_model(config, n_layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    n_all, n_trained, n_multiplied = count_parameters(model)
    state, working = optimizer_memory(model, config)
    counts = {
        "parameters": n_all, "trained": n_trained, "multiplied": n_multiplied, "state": state, "working": working,
        "bases": 0, "measuring": 0, "trained bytes": _bytes(trained), "largest block": largest_block(model),
        "in tiles": count_tiled_weights(model),
    }  # fmt: skip
    if config.projected:
        projection = projection_memory(model, on_cpu=config.device == "cpu")
        counts |= {"bases": projection.bases, "measuring": projection.measuring}
        counts["working"] = projection.copies + max(working, projection.correction)

    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        tracker.track(parameter.grad, "gradients")

    def update(parameter: torch.Tensor) -> None:
        keep(parameter)
        n_copies = _copies_of_update(config, id(parameter) in in_8_bits)
        torch.empty(n_copies * parameter.numel(), dtype=torch.float32)  # counted, and gone at once
        parameter.grad = None

    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate_fake_storages(model)
        in_8_bits = _parameters_in_8_bits(model, config)
        tracker = MemoryTracker(int(config.model.get_text_config().vocab_size))
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.track(tensor, "weights")
        copies = [
            torch.empty_like(weight) for weight in model.parameters() if config.teacher_copy and weight.requires_grad
        ]
        for copied in copies:
            tracker.track(copied, "weights")
        for parameter in model.parameters():
            if parameter.requires_grad:
                if config.accumulation > 1:
                    parameter.grad = torch.empty_like(parameter)
                    tracker.track(parameter.grad, "gradients")
                parameter.register_post_accumulate_grad_hook(update if config.in_backward else keep)
        tracker.name_moments(layer_stack(model))
        _run_micro_batch(model, config, tracker)
        moments = {**tracker.fullest, _UPDATE: tracker.parts, "counts": counts}
    return {(moment, part): n_bytes for moment, parts in moments.items() for part, n_bytes in parts.items()}


def _run_micro_batch(model: Any, config: StepConfig, tracker: MemoryTracker) -> None:
    """Run the forward and backward pass of a micro-batch."""
    with tracker:
        ids = torch.zeros(config.batch, config.tokens, dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if config.masked:
            mask = torch.ones(config.batch, 1, config.block, config.block, dtype=torch.bool)
            eager = config.attention == "eager"
            inputs["attention_mask"] = torch.zeros_like(mask, dtype=config.mixed or config.dtype) if eager else mask
            inputs["position_ids"] = ids
        with _offload(model) if config.offloading and config.device != "cpu" else contextlib.nullcontext():
            loss = _loss(model, config, inputs, tracker)
        tracker.moment = "backward, head"
        loss.backward()  # type: ignore[no-untyped-call]


def _loss(model: Any, config: StepConfig, inputs: dict[str, Any], tracker: MemoryTracker) -> torch.Tensor:
    """Return the loss as the trainer computes it on the device of `config`."""
    autocast = torch.autocast("cpu", config.mixed) if config.mixed is not None else contextlib.nullcontext()
    if config.loss_tile is not None:
        return _tiled_loss(model, config, inputs, autocast)
    if not config.fused:
        with autocast:
            logits = model(**inputs).logits
        tracker.moment = "loss"  # autocast's copies are gone
        logits = logits.float()[:, :-1].float()
        labels = inputs["input_ids"][:, 1:].flatten()
        if config.distilled is not None:
            return _distance(logits.flatten(0, 1), labels, config.distilled)
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    base = model.get_base_model() if config.adapter is not None else model
    with autocast:
        hidden = base.base_model(**inputs).last_hidden_state[:, :-1].reshape(-1, base.config.hidden_size)
        weight = base.get_output_embeddings().weight
        losses = _FusedHead.apply(hidden, weight, config.mixed or hidden.dtype)  # type: ignore[no-untyped-call]
    assert isinstance(losses, torch.Tensor)
    return losses.sum()


def _distance(logits: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    """Return the loss of tokens with a teacher's predictions, as `TrainingLoss.by_token` computes it."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    taught = torch.arange(len(labels))
    ids = torch.zeros(len(labels), k, dtype=torch.long) if k < logits.shape[-1] else None
    target = torch.zeros(len(labels), k + 1 if ids is not None else logits.shape[-1])
    return losses.index_copy(0, taught, divergence(logits[taught] / 1.0, target, ids)).sum()


def _tiled_loss(model: Any, config: StepConfig, inputs: dict[str, Any], autocast: Any) -> torch.Tensor:
    """Return the loss with the logits of `loss_tile` tokens at a time, as techniques.loss_tile computes it."""
    base = model.get_base_model() if config.adapter is not None else model
    with autocast:
        hidden = base.base_model(**inputs).last_hidden_state[:, :-1].flatten(0, 1)
        head = base.get_output_embeddings()
        losses = in_tiles(
            lambda part, labels: F.cross_entropy(head(part).float(), labels, reduction="none"),
            config.loss_tile or 1, hidden, inputs["input_ids"][:, 1:].flatten(),
        )  # fmt: skip
    return torch.cat(losses).sum()


@contextlib.contextmanager
def _offload(model: Any) -> Iterator[None]:
    """Keep the tensors saved for the backward pass off the device, except weights, as trainer.activation_offloading does."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < _MIN_OFFLOADED
        if small or tensor.untyped_storage()._cdata in weights:
            return tensor
        return tensor.shape, tensor.dtype

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.empty(packed[0], dtype=packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _fullest_moment(figures: Mapping[tuple[str, str], int], config: StepConfig) -> Memory:
    """Return the memory at the moment of the most bytes; the optimizer's step needs its working memory besides."""
    counts = {name: count for (moment, name), count in figures.items() if moment == "counts"}
    moments: dict[str, dict[str, int]] = {}
    for (moment, part), n_bytes in figures.items():
        if moment != "counts":
            moments.setdefault(moment, {})[part] = n_bytes
    moments[_UPDATE]["activations"] += counts["working"]
    when = max(moments, key=lambda moment: sum(moments[moment].values()))
    parts = moments[when]
    is_paged = config.optim.startswith("paged") and config.device == "cuda"
    state = counts["bases"] + (0 if is_paged else counts["state"])
    weights = moments[_UPDATE]["weights"]
    if weights + counts["measuring"] > sum(parts.values()) + state:
        when, state = _MEASURING, 0
        parts = {"weights": weights, "gradients": 0, "activations": counts["measuring"], "logits": 0}
    holes = min(_HEAP_HOLES, (sum(parts.values()) + state) // 2) if config.device == "cpu" else 0
    if config.device == "cpu" and config.checkpointing:
        holes += int(_CHECKPOINTING_HOLES * (parts["activations"] + parts["logits"]))
    return Memory(
        weights=parts["weights"], gradients=parts["gradients"], optimizer=state,
        activations=parts["activations"], logits=parts["logits"], fragmentation=holes,
        when=when if when in (_UPDATE, _MEASURING) else "forward and backward pass", n_parameters=counts["parameters"],
        n_trained=counts["trained"], trained_bytes=counts["trained bytes"], largest_block=counts["largest block"],
        flops=count_flops(counts["multiplied"], counts["trained"], config, counts["in tiles"]),
        paged=counts["state"] if is_paged else 0,
    )  # fmt: skip


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def known_optimizers() -> tuple[str, ...]:
    """Return the optimizer families whose memory is known."""
    return (*_STATES, "adafactor")


def optimizer_memory(model: Any, config: StepConfig) -> tuple[int, int]:
    """Return (bytes of state, bytes of working memory of a step) of the optimizer; `InputError` if they are not known."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("no parameter trains. Look at model.freeze and at the adapter section.")
    optim = config.optim
    in_8_bits = _parameters_in_8_bits(model, config)
    by_itself = 4 * max(_copies_of_update(config, id(p) in in_8_bits) * p.numel() for p in trained)
    if optim == "adafactor":
        return sum(map(_adafactor_state, trained)), by_itself
    family = _family(optim)
    n_states = _STATES[family] + (family in ("sgd", "rmsprop") and _has_option(config.optim_args, "momentum"))
    if _is_bitsandbytes(optim):
        state = sum(n_states * (_state_in_8_bits(p) if id(p) in in_8_bits else 4 * p.numel()) for p in trained)
        return state, by_itself
    if config.rounding or config.in_backward:
        numbers = [4 if config.rounding else parameter.element_size() for parameter in trained]
        return n_states * sum(n * parameter.numel() for n, parameter in zip(numbers, trained, strict=True)), by_itself
    sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
    state = n_states * sum(sizes)
    if config.muon:  # one state for a matrix; Newton-Schulz holds its momentum and four matrices of bfloat16
        matrices = [p for name, p in model.named_parameters() if p.requires_grad and is_muon_matrix(name, p.shape)]
        return state - _bytes(matrices), max((p.numel() * (p.element_size() + 8) for p in matrices), default=0)
    if optim in ("adamw_torch_fused", "sgd"):
        return state, 0
    return state, sum(sizes) if config.device == "cuda" else 2 * max(sizes)  # all at once on a GPU, else one by one


def _copies_of_update(config: StepConfig, in_8_bits: bool) -> int:
    """Return the float32 numbers for each number of a parameter that is updated by itself, beside its gradient and state.

    Stochastic rounding copies the parameter and its gradient; torch's own optimizers keep two steps of the update besides.
    """
    if not _is_bitsandbytes(config.optim):
        return 2 * config.rounding + 2
    return 2 * config.rounding + (_BNB_ON_CPU[_family(config.optim)][in_8_bits] if config.device == "cpu" else 0)


def _family(optim: str) -> str:
    family = re.sub(r"^paged_|_(?:torch|fused|bnb|8bit|32bit)(?![a-z])", "", optim)
    if family not in _STATES:
        raise InputError(
            f"trainer.optim: the memory of {optim} is not known to kinject plan. Known: {', '.join(known_optimizers())}, "
            "also with _8bit and paged_. Plan with the nearest of them."
        )
    return family


def _is_bitsandbytes(optim: str) -> bool:
    return bool(re.search(r"8bit|32bit|bnb|paged|^lion|^ademamix", optim)) and "torch" not in optim


def _has_option(optim_args: str | None, key: str) -> bool:
    return any(pair.strip().startswith(f"{key}=") for pair in (optim_args or "").split(","))


def _parameters_in_8_bits(model: Any, config: StepConfig) -> set[int]:
    """Return the ids of the parameters with a state in 8 bits: large ones, embeddings only if the recipe asks for it."""
    if not _is_bitsandbytes(config.optim) or not config.optim_in_8_bits:
        return set()
    tables: Iterable[Any] = (module for module in model.modules() if isinstance(module, Embedding))
    excluded = set() if embedding_bits(config.optim_args) == "8" else {id(t.weight) for t in tables}
    return {id(p) for p in model.parameters() if p.numel() >= _BNB_MIN_NUMBERS and id(p) not in excluded}


def _state_in_8_bits(parameter: torch.Tensor) -> int:
    return parameter.numel() + 4 * -(-parameter.numel() // _BNB_BLOCK)


def _adafactor_state(parameter: torch.Tensor) -> int:
    """Return the bytes of Adafactor's state: a row and a column for each matrix, all numbers of a vector."""
    if parameter.ndim < 2:
        return 4 * parameter.numel()
    return 4 * (parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2])
