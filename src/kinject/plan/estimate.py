"""The memory and the operations of a training step by formula, from the shapes of its weights.

Weights, gradients and optimizer state are counts times bytes; activations follow Korthikanti et al.
(arXiv 2205.05198, table 2), counted for the layers of transformers. docs/figures.md compares the
sums with measured runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from kinject.disk import path_exists
from kinject.errors import InputError
from kinject.models import check_model, first_line, load_config, new_config
from kinject.recipe import is_model
from kinject.recipe.makers import command_for
from kinject.train.config import adapter_config
from kinject.train.updates.muon import is_muon_matrix

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STATES = {
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "adamw": 2,
    "lion": 1,
    "ademamix": 3,
    "stable_adamw": 2,
    "schedule_free_adamw": 2,
    "schedule_free_radam": 2,
    "schedule_free_sgd": 1,
    "adamw_anyprecision": 2,
}
"""Optimizer family -> numbers in its state for each trained number."""
_BNB_BLOCK, _BNB_MIN_NUMBERS = 256, 4096
"""States of bitsandbytes that share a float32 scale; parameters with fewer numbers keep a float32
state."""
_BYTES_4BIT = 0.5 + (1 + 4 / 256) / 64
"""Of a weight in NF4: 4 bits, and a scale of a byte for 64 (double quantization)."""
_HEAP_HOLES, _CHECKPOINTING_HOLES = 140 * 2**20, 1 / 4
"""Holes in a CPU's heap, which stay resident: at most half of the tensors, and with gradient
checkpointing this fraction of activations and logits. Fitted on runs of 1M to 80M parameters
(docs/figures.md)."""
_OWN_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_ALL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in configs of the experts that a token passes, and of all in a layer."""
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""Names in configs of the experts that every token passes beside its own, and of their width
together."""
_LOGITS = 3
"""Copies of the logits in float32 that are in memory in the loss: they, their log-probs and a
gradient."""
_TILE = (4096, 32_768)
"""Tokens and vocabulary entries that TRL's fused head on a GPU projects at once."""


@dataclass(frozen=True)
class Step:
    """Everything that decides the memory of a training step.

    `mixed` is the dtype of autocast (None: off). `eager`: attention keeps its square. `fused`: the
    loss never holds all logits (TRL's head on a GPU). `copies` are float32 copies of the trained
    weights that regularization and SAM keep. `projected`: regularization.projection limits the
    updates.
    """

    model: PretrainedConfig
    device: str
    dtype: torch.dtype
    mixed: torch.dtype | None
    batch: int
    block: int
    accumulation: int
    checkpointing: bool
    offloading: bool
    eager: bool
    fused: bool
    optim: str
    optim_args: str | None = None
    quantization: str = "none"
    adapter: Mapping[str, Any] | None = None
    freeze: tuple[str, ...] = ()
    muon: bool = False
    rounding: bool = False
    copies: int = 0
    projected: bool = False
    liger: bool = False


@dataclass(frozen=True)
class Shapes:
    """The weights of a step's model: `state` are the bytes of its optimizer, `layer` those of the
    largest layer's weights.

    `multiplied` weights are multiplied by tokens, `active` of them by each token (of experts those
    of its own); `largest` is the number of weights of the largest trained tensor.
    """

    n_parameters: int
    n_trained: int
    weights: int
    trained: int
    state: int
    bases: int
    layer: int
    multiplied: int
    active: int
    largest: int
    is_tied: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at the fullest moment of a step, by part; `peak` is their sum.

    `gathered` are weights and gradients of layers that are whole while the rest is divided,
    `fragmentation` the holes in a CPU's heap. `host` are bytes in the machine's memory instead of
    the device's.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    fragmentation: int = 0
    host: int = 0

    @property
    def peak(self) -> int:
        """The sum of the parts on the device."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "gathered", "fragmentation")
_SHARDED = ("FSDP", "HSDP")
"""The ways that divide the weights."""


def estimate(step: Step, shapes: Shapes, way: str = "one device", group: int = 1) -> Memory:
    """Return the memory of a device, with what `way` (a name of `kinject.plan.ways.WAYS`) divides
    divided by `group`.

    The fullest moment is the start of the backward pass, or the update with all gradients.
    """
    held = _held(step, shapes, way, group)
    gradients = held.gradients
    activations, layer = _activations(step)
    logits = _logits(step)
    if way not in (*_SHARDED, "ZeRO-2", "offload"):
        activations += _autocast_copies(step, shapes)
    if layer > logits:  # once the loss is done, the backward pass computes in a layer
        activations, logits = activations + layer, 0
    kept = 0
    if step.accumulation > 1 or way == "DDP":
        kept = gradients
    update = gradients + _workspace(step, shapes)
    if activations + logits + kept >= update:
        # the backward pass begins: gradients are there only if earlier batches left them
        gradients = kept
    else:
        # the update: activations are gone, its workspace takes their row in the table
        activations, logits = update - gradients, 0
    gathered = 0
    if way in (*_SHARDED, "offload"):
        # two layers are whole at a time, and if they train the gradients of one, twice
        n_whole = 4 if step.adapter is None else 2
        gathered = n_whole * shapes.layer
    memory = replace(
        held, gradients=gradients, activations=activations, logits=logits, gathered=gathered
    )
    if step.device == "cpu":
        # Without the holes each of 12 measured runs had 100 to 300 MiB more than was planned.
        memory = replace(memory, fragmentation=_heap_holes(step, memory))
    return memory


def _held(step: Step, shapes: Shapes, way: str, group: int) -> Memory:
    """Return what a device holds of weights, all gradients and states of the optimizer."""
    is_sharded, is_zero = way in _SHARDED, way == "ZeRO-2"
    weights, gradients, state = shapes.weights, shapes.trained, shapes.state + shapes.bases
    if is_zero and step.mixed is not None:
        # DeepSpeed keeps whole weights in 16 bits and its part of float32 ones
        whole = weights * step.mixed.itemsize // step.dtype.itemsize
        weights = whole + 4 * shapes.n_trained // group
    host = 0
    if way == "offload":
        host = weights + gradients + state
        weights = gradients = state = 0
    # Paged states are in memory that CUDA moves out where the GPU is full.
    elif "paged" in step.optim and step.device == "cuda":
        host, state = shapes.state, shapes.bases
    if is_sharded or is_zero:
        gradients, state = gradients // group, state // group
    if is_sharded:
        weights //= group
    if way == "DDP":
        gradients *= 2  # the buckets that are sent
    return Memory(weights, gradients, state, host=host)


def _heap_holes(step: Step, memory: Memory) -> int:
    """Return the bytes of a CPU's heap that no tensor uses."""
    total = memory.peak - memory.gathered
    # No constant: 200 MiB at any size put a step of 125 MiB of tensors at 1.14 of the measurement.
    holes = min(_HEAP_HOLES, total // 2)
    if step.checkpointing:
        holes += int(_CHECKPOINTING_HOLES * (memory.activations + memory.logits))
    return holes


def _autocast_copies(step: Step, shapes: Shapes) -> int:
    """Return the bytes of autocast's copies of float32 weights, kept until the backward pass."""
    is_cast = step.mixed is not None and step.dtype == torch.float32 and step.quantization == "none"
    if not is_cast:
        return 0
    if not step.checkpointing:
        return 2 * shapes.multiplied
    # Autocast itself keeps copies of trained weights alone. That of a frozen weight is there for
    # the backward pass, which with checkpointing has those of one layer at a time.
    trained = min(shapes.n_trained, shapes.multiplied)
    frozen = shapes.multiplied - trained
    return 2 * trained + min(2 * frozen, shapes.layer // 2)


def _activations(step: Step) -> tuple[int, int]:
    """Return the bytes that the backward pass needs (of all layers, or with checkpointing of their
    inputs), and of a layer."""
    text: Any = step.model.get_text_config()
    width, n_layers = text.hidden_size, text.num_hidden_layers
    heads = _largest(text, "num_attention_heads")
    if not heads:
        raise InputError(
            f"the memory of a {step.model.model_type} model is not known to kinject plan: "
            "its layers have no attention."
        )
    size = (step.mixed or step.dtype).itemsize
    head = _head_size(text)
    keys = (_largest(text, "num_key_value_heads") or heads) * head
    act = str(getattr(text, "hidden_act", None) or getattr(text, "activation_function", ""))
    inner = _largest(text, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * width
    # A token passes its own experts only, and those that all tokens share.
    shared = _largest(text, *_SHARED_WIDTH) or inner * _largest(text, *_SHARED_EXPERTS)
    inner = inner * (_largest(text, *_OWN_EXPERTS) or 1) + shared
    stream = 4 if step.dtype == torch.float32 else size
    if act == "gelu_new":  # layer norms keep their input; this GELU is made of six operations
        norms, mlp = 2 * width * (stream + size), 6 * inner * size
    elif step.liger:
        norms, mlp = 2 * width * (stream + size), 3 * inner * size
    else:
        # norms in float32: their input, the normalised and what is multiplied;
        # gate, its SiLU, up, and their product
        norms, mlp = 2 * width * (4 + stream + size), 4 * inner * size
    attention = (2 * heads * head + 2 * keys) * size
    if step.eager:
        # the square of scores, and in 16 bits its softmax in float32 beside it
        attention += step.block * heads * (4 if size == 4 else 6)
    tokens = step.batch * step.block
    layer = kept = tokens * (norms + mlp + attention)
    if step.checkpointing:
        # a layer is computed again, while its gradients are made
        kept, layer = tokens * width * stream, 2 * layer
    if step.offloading:
        kept = 0
    return int(n_layers * kept), int(layer)


def _head_size(text: PretrainedConfig) -> int:
    """Return the numbers of a query of one head; Qwen3's have more together than the model's
    width. Where queries and values differ it is their mean."""
    query, value = _largest(text, "qk_head_dim"), _largest(text, "v_head_dim")
    if query and value:  # of DeepSeek's latent attention head_dim is the rotated part alone
        return (query + value) // 2
    return _largest(text, "head_dim") or text.hidden_size // text.num_attention_heads


def _largest(text: PretrainedConfig, *names: str) -> int:
    """Return the first of these numbers that a config sets, 0 without any; of one for each layer
    the largest."""
    for name in names:
        value = getattr(text, name, None)
        if isinstance(value, list | tuple):
            value = max(value, default=0)
        if value:
            return int(value)
    return 0


def _logits(step: Step) -> int:
    """Return the bytes of tensors over the vocabulary: all logits in the loss, or a tile of them in
    TRL's head."""
    vocabulary = int(step.model.get_text_config().vocab_size)
    tokens = step.batch * step.block
    if step.fused:
        return 4 * min(tokens, _TILE[0]) * min(vocabulary, _TILE[1])
    return _LOGITS * 4 * tokens * vocabulary


def _workspace(step: Step, shapes: Shapes) -> int:
    """Return the bytes that the update of the largest weight needs besides gradients and state."""
    if step.optim == "adamw_torch" and step.device == "cuda":
        return shapes.trained
    numbers = 0
    if step.rounding:
        numbers += 2
    if is_bitsandbytes(step.optim):
        if step.device == "cpu":  # its kernel on a GPU holds none
            numbers += 3
    elif step.optim not in ("adamw_torch_fused", "sgd"):
        numbers += 2
    if shapes.is_tied:  # a tied embedding has two gradients, which are summed
        numbers = max(numbers, 2)
    return 4 * numbers * shapes.largest


def count_flops(step: Step, shapes: Shapes) -> float:
    """Return the operations of an optimizer step: 2 for each token and weight forwards, as many for
    each gradient.

    An embedding is looked up. Attention adds its causal half of the square; checkpointing a second
    forward pass.
    """
    # By arithmetic: torch's FlopCounterMode keeps the tensors of the backward pass alive to its
    # end.
    passes = 3 if step.checkpointing else 2
    text: Any = step.model.get_text_config()
    queries = text.num_attention_heads * _head_size(text)
    attention = 2 * (passes + 1) * text.num_hidden_layers * step.block * queries
    tokens = step.batch * step.block * step.accumulation
    trained = min(shapes.n_trained, shapes.active)
    return float(tokens * (2 * (passes * shapes.active + trained) + attention))


_counted: dict[str, Shapes] = {}
"""Shapes by the settings of a step that decide them."""


def read_shapes(step: Step) -> Shapes:
    """Return the weights of the model, built on torch's meta device. Raises `InputError` if no
    model can be built."""
    # A plan asks for those of a step several times, and peft takes a second or more for the
    # adapters of a model of 8B, several for 70B.
    key = repr(
        replace(
            step,
            batch=0,
            block=0,
            accumulation=0,
            checkpointing=False,
            offloading=False,
            eager=False,
            fused=False,
            liger=False,
        )
    )
    if key not in _counted:
        _counted[key] = _count_shapes(step)
    return _counted[key]


@dataclass(frozen=True)
class _Model:
    """A model without numbers, as a step trains it: its layers in `stack`, the table of its
    embedding, and the ids of the weights that are quantized."""

    model: Any
    stack: Sequence[nn.Module]
    table: nn.Parameter
    is_tied: bool
    quantized: frozenset[int]


def _build(step: Step) -> _Model:
    """Return the model of a step. Raises `InputError` if its config is of none."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                step.model, dtype=step.dtype, trust_remote_code=False
            )
            table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
            stack, quantized = _layers(model), frozenset[int]()
            if step.quantization != "none":
                quantized = frozenset(id(w) for w in _matrices(stack))
                model.requires_grad_(False)
            if step.adapter is not None:
                model = _with_adapter(model, step)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"no model can be built from this config: {first_line(error)}.") from error
    _freeze(model, step.freeze)
    return _Model(model, stack, table, head is not None and head.weight is table, quantized)


def _count_shapes(step: Step) -> Shapes:
    """Return the weights of the model."""
    built = _build(step)
    model = built.model
    per_weight = {"4bit": _BYTES_4BIT, "8bit": 1.0}.get(step.quantization, 0.0)

    def size(parameters: Iterable[torch.Tensor]) -> int:
        n_bytes = 0.0
        for w in parameters:
            n_bytes += w.numel() * (per_weight if id(w) in built.quantized else w.element_size())
        return int(n_bytes)

    trained = [(name, w) for name, w in model.named_parameters() if w.requires_grad]
    if not trained:
        raise InputError("no parameter trains. Look at model.freeze and at the adapter section.")
    n_all = sum(w.numel() for w in model.parameters())
    blocks: list[nn.Module] = [model.get_input_embeddings(), *built.stack]
    n_trained, whole = sum(w.numel() for _, w in trained), size(model.parameters())
    copies = 4 * n_trained * step.copies
    # GPT-2 has a table of positions, Gemma 3n one of each layer's own embeddings as well.
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    if built.is_tied:  # a tied table is looked up and multiplied, another one is only looked up
        tables.discard(built.table)
    multiplied = n_all - sum(table.numel() for table in tables)
    n_idle = round(_idle_fraction(step.model) * sum(w.numel() for w in _expert_weights(model)))
    return Shapes(
        n_parameters=n_all,
        n_trained=n_trained,
        weights=whole + copies,
        trained=size([w for _, w in trained]),
        state=optimizer_state(model, step),
        bases=_projection_bases(built.stack) if step.projected else 0,
        layer=max(size(layer.parameters()) for layer in blocks),
        multiplied=multiplied,
        active=multiplied - n_idle,
        largest=max(w.numel() for _, w in trained),
        is_tied=built.is_tied,
    )


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def _matrices(stack: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the matrices of layers, which bitsandbytes quantizes."""
    found: list[torch.Tensor] = []
    for layer in stack:
        found += [w for w in layer.parameters() if w.ndim == 2]
    return found


def _expert_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of experts of which a token passes some."""
    return [w for name, w in model.named_parameters() if "experts" in name.split(".")]


def _idle_fraction(config: PretrainedConfig) -> float:
    """Return the fraction of its experts that a token does not pass, 0 where it is not known."""
    text = config.get_text_config()
    n_own, n_experts = _largest(text, *_OWN_EXPERTS), _largest(text, *_ALL_EXPERTS)
    if not n_own or n_own > n_experts:
        return 0.0
    return 1 - n_own / n_experts


def _projection_bases(stack: Sequence[nn.Module]) -> int:
    """Return the bytes of the directions that regularization.projection keeps of each matrix."""
    # In float32, at most half of the directions: random weights need more than a quarter of them.
    return sum(2 * w.shape[1] ** 2 for w in _matrices(stack))


def _layers(model: Any) -> list[nn.Module]:
    """Return the layers of a model: of its lists of modules the one with the most weights."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(w.numel() for w in stack.parameters()) for stack in stacks]
    if not stacks:
        return []
    return list(stacks[sizes.index(max(sizes))])


def _with_adapter(model: Any, step: Step) -> Any:
    from peft import get_peft_model

    model = get_peft_model(model, adapter_config(step.adapter or {}))
    if step.quantization != "none" and step.mixed != torch.float16:  # as TRL does for QLoRA
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def optimizer_state(model: Any, step: Step) -> int:
    """Return the bytes of the optimizer's state. Raises `InputError` for an optimizer whose memory
    is not known."""
    trained = [(name, w) for name, w in model.named_parameters() if w.requires_grad]
    if step.optim == "adafactor":
        return _adafactor_state([w for _, w in trained])
    family = re.sub(r"^paged_|_(?:torch|fused|bnb|8bit|32bit)(?![a-z])", "", step.optim)
    if family not in _STATES:
        raise InputError(
            f"trainer.optim: the memory of {step.optim} is not known to kinject plan. Known: "
            f"{', '.join(_STATES)}, adafactor; "
            "also with _8bit and paged_. Plan with the nearest of them."
        )
    has_momentum = family in ("sgd", "rmsprop") and "momentum=" in (step.optim_args or "")
    n_states = _STATES[family] + has_momentum
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = 0
    for name, weight in trained:
        n, in_8_bits = weight.numel(), "8bit" in step.optim
        # transformers asks for float32 states of embeddings: models of 50M to 77M had 0.5 to 0.63
        # of adamw_torch's state, where 0.3 was expected.
        if in_8_bits and n >= _BNB_MIN_NUMBERS and id(weight) not in tables:
            total += n_states * (n + 4 * -(-n // _BNB_BLOCK))
        else:
            wide = is_bitsandbytes(step.optim) or step.rounding
            is_single = step.muon and is_muon_matrix(name, weight.shape)
            total += (1 if is_single else n_states) * n * (4 if wide else weight.element_size())
    return total


def _adafactor_state(weights: list[torch.Tensor]) -> int:
    """Return the bytes of a row and a column for each matrix, and of all numbers of a vector."""
    numbers = 0
    for w in weights:
        if w.ndim < 2:
            numbers += w.numel()
        else:
            numbers += w.numel() // w.shape[-1] + w.numel() // w.shape[-2]
    return 4 * numbers


def is_bitsandbytes(optim: str) -> bool:
    """Return whether bitsandbytes makes the update, whose state FSDP cannot divide."""
    return bool(re.search(r"8bit|32bit|bnb|paged|^lion|^ademamix", optim)) and "torch" not in optim


def read_config(path: str, revision: str | None) -> PretrainedConfig:
    """Return the config of the model in a folder (config.json is enough) or on the hub, as
    `load_config` does.

    If the hub does not give it, the model's public shape is enough for a plan (`shapes.yaml`): its
    name_or_path is empty. Raises `InputError` if there is none or the hub does not answer.
    """
    if not is_model(path):
        command = command_for(path)
        fix = f"Make it first: {command}" if command else "Check the path."
        raise InputError(f"{path}: there is no model yet. {fix}")
    if any(Path(path).glob("*.safetensors")):
        check_model(path)
    try:
        return load_config(path, revision)
    except InputError as error:
        if path_exists(Path(path)):
            raise
        shapes = yaml.safe_load(files("kinject.plan").joinpath("shapes.yaml").read_text("utf-8"))
        if path in shapes:
            return new_config(shapes[path], shapes[path]["vocab_size"])
        raise InputError(
            f"{error} If the model is gated, log in (HF_TOKEN); a folder that holds its "
            "config.json is enough: model.path=FOLDER"
        ) from error
