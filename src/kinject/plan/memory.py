"""The memory of one training step, part by part, without the memory: the model's own forward and backward pass on fake tensors.

Torch's FakeTensorMode runs every operation on shapes alone. What each creates is counted while something holds it, so that
the peak, gradient checkpointing, autocast's copies and the loss's own tensors come from the code that will run.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import ModuleList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinject.plan.heap import Heap
from kinject.plan.model import GPU_ATTENTION, Shape, build, count
from kinject.plan.optimizer import optimizer_memory

_TILE = (4096, 32_768)
"""Tokens and pieces of the vocabulary that TRL's fused head projects at once, at most."""
_STEPS = 2
"""Steps after the first in which a heap settles."""
_LEAST_OFFLOADED = 1024
"""Bytes; TRL keeps smaller tensors where they are."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of a step: `peak` is their sum, `when` that moment.

    `activations` are what the backward pass needs and what is being worked on, `logits` all tensors over the vocabulary,
    `heap` what a CPU's heap keeps beyond the tensors (`kinject.plan.heap`; 0 on a GPU).
    `n_parameters` and `n_trained` are counts, `flops` the operations of an optimizer step on one device,
    `largest_block` the bytes of weights of the largest layer (what sharding gathers at a time).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    heap: int
    when: str
    n_parameters: int
    n_trained: int
    trained_bytes: int
    largest_block: int
    flops: float

    @property
    def peak(self) -> int:
        """The sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.heap


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that an operation creates, until nothing holds it any more.

    `parts` are the bytes now, `fullest` the same at the fullest moment so far. Tensors whose last axis is `vocabulary`
    long count as logits. `heap` is asked for each storage as a CPU's would be.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary = vocabulary
        self.parts = {"weights": 0, "gradients": 0, "activations": 0, "logits": 0}
        self.fullest = dict(self.parts)
        self.heap = Heap()
        self._held: dict[int, str] = {}

    def hold(self, tensor: torch.Tensor, part: str) -> None:
        """Count the storage of `tensor` as `part`, from now on also where it was counted as another."""
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        before = self._held.get(key)
        if before is None:
            weakref.finalize(storage, self._forget, key, n_bytes)
            self.heap.take(key, n_bytes)
        else:
            self.parts[before] -= n_bytes
        self._held[key] = part
        self.parts[part] += n_bytes
        if sum(self.parts.values()) > sum(self.fullest.values()):
            self.fullest = dict(self.parts)

    def _forget(self, key: int, n_bytes: int) -> None:
        self.parts[self._held.pop(key)] -= n_bytes
        self.heap.give_back(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._held:
                over_pieces = tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary and tensor.is_floating_point()
                self.hold(tensor, "logits" if over_pieces else "activations")
        return found


def _gpu_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[Any, None]:
    """Attention [batch, length, heads, dimension] as a GPU's kernels keep it; query is [batch, heads, length, dimension].

    What stays for the backward pass: query, key, value, output, a log-sum for each row, and the mask where there is one.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if mask is not None:  # kernels that take a mask want as many keys as queries
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        mask = mask.to(query.dtype)
    return _Kept.apply(query, key, value, mask), None  # type: ignore[no-untyped-call]


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        rows, heads, length, _ = query.shape
        out = query.new_empty(rows, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _FusedHead(torch.autograd.Function):
    """The loss of TRL's fused head as it allocates: a tile of logits at a time, gradients gathered in float32."""

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


def simulate(shape: Shape) -> Memory:
    """Return the memory of an optimizer step of `shape` once the optimizer has its state. Raises `InputError` as `build` does.

    A second micro-batch is run where gradients are accumulated: its forward pass finds gradients in memory.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(GPU_ATTENTION, _gpu_attention)
    AttentionMaskInterface.register(GPU_ATTENTION, sdpa_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(shape)
        counts = count(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _make_room(model)
            meter = Meter(int(shape.config.get_text_config().vocab_size))
            for tensor in (*model.parameters(), *model.buffers()):
                meter.hold(tensor, "weights")
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda held: meter.hold(held.grad, "gradients"))
            _accumulate(model, shape, meter)
            found = _fullest(model, shape, meter, counts)
            return replace(found, heap=_kept_by_heap(model, shape, meter, found)) if shape.device == "cpu" else found


def _kept_by_heap(model: Any, shape: Shape, meter: Meter, found: Memory) -> int:
    """Return the bytes beyond the tensors of `found` that the heap spans once a few more steps have gone through it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, parameter in enumerate(trained):  # the first step makes the optimizer's state: two numbers for most
        for half in range(2):
            meter.heap.take((number, half), found.optimizer * parameter.numel() // (2 * found.n_trained))
    for _ in range(_STEPS):
        model.zero_grad(set_to_none=True)
        _accumulate(model, shape, meter)
    return max(meter.heap.peak - found.peak, 0)


def _make_room(model: Any) -> None:
    """Give the tensors of a model on the meta device fake storages; what was shared (tied embeddings) stays shared."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device="cpu")
    for first, *others in names.values():
        for name in others:
            folder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(folder), leaf, model.get_parameter(first))


def _accumulate(model: Any, shape: Shape, meter: Meter) -> None:
    """Run the micro-batches of a step; from the second on each finds what the second finds."""
    for _ in range(min(shape.accumulation, 2)):
        _pass(model, shape, meter)


def _pass(model: Any, shape: Shape, meter: Meter) -> None:
    """Run a micro-batch forwards and backwards."""
    with meter:
        ids = torch.zeros(shape.batch, shape.block, dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if shape.masked:
            mask = torch.ones(shape.batch, 1, shape.block, shape.block, dtype=torch.bool)
            eager = shape.attention == "eager"
            inputs["attention_mask"] = torch.zeros_like(mask, dtype=shape.mixed or shape.dtype) if eager else mask
            inputs["position_ids"] = ids
        with _offload(model) if shape.offloading and shape.device != "cpu" else contextlib.nullcontext():
            loss = _loss(model, shape, inputs)
        loss.backward()  # type: ignore[no-untyped-call]


def _loss(model: Any, shape: Shape, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the loss as the trainer computes it on the device of `shape`."""
    autocast = torch.autocast("cpu", shape.mixed) if shape.mixed is not None else contextlib.nullcontext()
    if not shape.fused:
        with autocast:
            logits = model(**inputs).logits
        logits = logits.float()[:, :-1].float()
        labels = inputs["input_ids"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    whole = model.get_base_model() if shape.adapter is not None else model
    with autocast:
        hidden = whole.base_model(**inputs).last_hidden_state[:, :-1].reshape(-1, whole.config.hidden_size)
        weight = whole.get_output_embeddings().weight
        found = _FusedHead.apply(hidden, weight, shape.mixed or hidden.dtype)  # type: ignore[no-untyped-call]
    assert isinstance(found, torch.Tensor)
    return found.sum()


@contextlib.contextmanager
def _offload(model: Any) -> Iterator[None]:
    """Keep what the backward pass needs off the device, as trainer.activation_offloading does, but for weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < _LEAST_OFFLOADED
        if small or tensor.untyped_storage()._cdata in weights:
            return tensor
        return tensor.shape, tensor.dtype

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.empty(packed[0], dtype=packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _fullest(model: Any, shape: Shape, meter: Meter, counts: tuple[int, int]) -> Memory:
    """Return the fuller of two moments: within forward and backward pass, or while the optimizer steps."""
    state, working = optimizer_memory(model, shape)
    parts, when = dict(meter.fullest), "forward and backward pass"
    now = dict(meter.parts)
    if sum(now.values()) + working > sum(parts.values()):
        parts, when = {**now, "activations": now["activations"] + working}, "the optimizer's step"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Memory(
        weights=parts["weights"], gradients=parts["gradients"], optimizer=state, activations=parts["activations"],
        logits=parts["logits"], heap=0, when=when, n_parameters=counts[0], n_trained=counts[1],
        trained_bytes=_bytes(trained),
        largest_block=_largest_block(model), flops=_flops(counts, shape),
    )  # fmt: skip


def _flops(counts: tuple[int, int], shape: Shape) -> float:
    """Return the operations of an optimizer step: 2 a weight and token forwards, again for each gradient and recomputation.

    The embeddings' look-up counts as a product, which it is not; the square of attention is added.
    """
    n_all, n_trained = counts
    passes = 2 + shape.checkpointing
    config = shape.config.get_text_config()
    attention = (
        2 * (passes + 1) * config.num_hidden_layers * shape.block * config.hidden_size
    )  # causal: half the square
    tokens = shape.batch * shape.block * shape.accumulation
    return float(tokens * (2 * (passes * n_all + n_trained) + attention))


def _largest_block(model: Any) -> int:
    """Return the bytes of the largest layer of the stack, or of the embeddings where they are larger."""
    sizes = [_bytes(module.parameters()) for held in model.modules() if isinstance(held, ModuleList) for module in held]
    return max([*sizes, _bytes(model.get_input_embeddings().parameters())])


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
