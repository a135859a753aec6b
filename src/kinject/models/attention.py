"""What a causal language model attends to: its window, a cartridge, the test that it reads no later
tokens, other kernels.

A model that reads later tokens learns to copy them, and has none to copy when it writes: its
training loss and its log-probs mean nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any, Protocol, cast

from kinject.errors import InputError
from kinject.models.folder import first_line
from kinject.models.hardware import choose_precision
from kinject.process import is_fsdp_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from peft import PeftModel, PromptLearningConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CARTRIDGE = "cartridge"
"""The attention of a model with a cartridge; peft's type of adapter, in small letters."""
_SEPARATOR = "<|endoftext|>"
_LENGTH = 8
_TIMED_TOKENS = 4_096
"""Most tokens of a row that is timed: its activations need memory, and longer ones differ more."""
_GAIN = 0.95
"""Another kernel must save a twentieth of the time: else noise would choose, and a resumed run
might choose otherwise."""
_EXACT, _ROUNDED = 1e-3, 0.1
"""Limits for float32, and for weights that are rounded more. Experts that get other rows at once
change the last digit."""


def window_of(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model of a transformers `config` reads at once, None if the
    config sets no bound."""
    # A model of texts and images has the window of its texts one level down.
    text = config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def padding_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions padding may use, None for any number.

    Beyond the window a model with learned positions has none. Beyond its first, shorter window
    longrope reads the whole batch, texts too, by other frequencies.
    """
    limits = [limit for limit in (window_of(config), longrope_window(config)) if limit is not None]
    return min(limits, default=None)


def longrope_window(config: PretrainedConfig) -> int | None:
    """Return the first window of longrope, None for other positions: a pass with a position beyond
    it is read by other frequencies as a whole."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Some models have parameters for each type of layer.
    kinds = [item for item in (rope, *rope.values()) if isinstance(item, dict)]
    longropes = [item for item in kinds if item.get("rope_type") == "longrope"]
    windows = [item.get("original_max_position_embeddings") for item in longropes]
    return min((window for window in windows if window is not None), default=None)


def text_start(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token behind which a document begins, as in pretraining; None if the tokenizer has
    none.

    That is what the tokenizer itself puts before a text. If it adds nothing, it is the separator of
    documents: many chat models' BOS begins a turn, and their pretraining knew <|endoftext|> alone.
    """
    ids = list(tokenizer("a", verbose=False).input_ids)
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    if len(ids) > len(bare) and ids[1 : len(bare) + 1] == bare:
        return int(ids[0])
    separator = tokenizer.get_vocab().get(_SEPARATOR)
    candidates = (separator, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), None)


def is_runnable(model: torch.nn.Module) -> bool:
    """Return whether `model` can read a row here and now.

    It cannot if this process does not hold its weights (they are sharded), or if they are still in
    memory (FSDP moves them) and its attention is a GPU's.
    """
    parameters = list(model.parameters())
    if any(parameter.is_meta or not parameter.numel() for parameter in parameters):
        return False
    if not is_fsdp_launch() or parameters[0].device.type != "cpu":
        return True
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return attention in (None, "eager", "sdpa")


def reads_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether other tokens in the second half of a short row move the model's logits in the
    first half.

    The limit is relative to the change in the second half. A model that is not runnable is not
    tried.
    """
    import torch

    if not is_runnable(model):
        return False
    n_tokens, half = int(model.get_input_embeddings().weight.shape[0]), _LENGTH // 2
    row = _short_row(model)
    other = torch.cat([row[:half], (row[half:] + n_tokens // 2) % n_tokens])
    with without_flash(model):
        logits = [steady_logits(model, input_ids=ids[None])[0] for ids in (row, other)]
    change = (logits[0] - logits[1]).abs()
    is_exact = model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None
    limit = _EXACT if is_exact else _ROUNDED
    return bool(change[:half].max() > limit * change[half:].max())


def _short_row(model: PreTrainedModel) -> torch.Tensor:
    """Return token ids of `model`, [_LENGTH], on its device."""
    import torch

    n_tokens = int(model.get_input_embeddings().weight.shape[0])
    return torch.arange(3, 3 + _LENGTH, device=model.device) % n_tokens


def steady_logits(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of `model` for `inputs`, [batch, length, vocabulary], float32, as
    `steady_output`."""
    logits: torch.Tensor = steady_output(model, **inputs).logits.float()
    return logits


def steady_output(model: PreTrainedModel, **inputs: torch.Tensor | bool) -> Any:
    """Return what `model` makes of `inputs`, without gradients, and without dropout, which would
    make two passes differ."""
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        # As in training: with the cache positions do not separate documents (off by 0.44).
        output = model(**inputs, use_cache=False)
    model.train(was_training)
    return output


def not_causal(config: PretrainedConfig) -> str:
    """Return the fault of a model of a transformers `config` that reads later tokens."""
    set_decoder = ""
    if hasattr(config, "is_decoder"):
        set_decoder = " Set is_decoder: true in its config, and train it."
    return (
        f"{config.model_type} is no causal language model as configured: it reads later tokens "
        "(another token at the end of a "
        f"row moves the logits before it). Take a causal model.{set_decoder}"
    )


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Raise `InputError` if the model `name` is not causal."""
    if reads_later_tokens(model):
        raise InputError(f"{name}: {not_causal(model.config)}")


def check_first_position(model: PreTrainedModel, name: str) -> None:
    """Raise `InputError` if the model `name` does not begin a text at position 0, as rows do.

    RoBERTa's relatives begin behind the number of the padding token. With positions from 0 they
    train without an error on embeddings that they never had there, and read others once trained. A
    model that is not runnable is not tried.
    """
    import torch

    if not is_runnable(model):
        return
    ids = _short_row(model)[None]
    positions = torch.arange(_LENGTH, device=model.device)[None]
    with without_flash(model):
        own = steady_logits(model, input_ids=ids)
        given = steady_logits(model, input_ids=ids, position_ids=positions)
    if not torch.allclose(own, given, rtol=0, atol=_ROUNDED * float(own.abs().max())):
        raise InputError(
            f"{name}: {model.config.model_type} does not begin a text at position 0, which kinject "
            "gives the first token of each document (its logits differ from those with positions "
            "of its own). Take another model."
        )


def causal_fault(config: PretrainedConfig) -> str:
    """Return why a model of a transformers `config` is no causal language model; "" if none is
    known.

    The rest shows once the model is loaded (`check_causal`).
    """
    from transformers.models.auto import modeling_auto as auto

    if config.model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{config.model_type} is no causal language model. Take a causal model."
    is_masked = (
        config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not config.is_encoder_decoder
    )
    # False alone says nothing: GPT-NeoX has it too.
    if is_masked and getattr(config, "is_decoder", None) is False:
        return not_causal(config)
    return ""


def try_attention(model: PreTrainedModel, name: str) -> str:
    """Switch `model` from its attention to `name` and return ""; if that fails or differs, keep it
    and return the reason.

    Both read one row of two short documents in the dtype of training; the logits may differ by a
    tenth of their length. Sharded weights are not tried.
    """
    import torch

    if not is_runnable(model):
        return "it is not tried on weights that are sharded or still to be moved to the GPU"
    device, before = model.device, model.config._attn_implementation
    ids = torch.arange(3, 35, device=device)[None] % int(
        model.get_input_embeddings().weight.shape[0]
    )
    positions = torch.cat([torch.arange(12), torch.arange(20)]).to(device)[None]
    half = _half(device)

    def read() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, half):
            output = model(input_ids=ids, position_ids=positions, use_cache=False)
            logits: torch.Tensor = output.logits.float()
            return logits

    try:
        expected = read()
        model.set_attn_implementation(name)
        gap = float((read() - expected).norm() / expected.norm().clamp(min=1e-6))
        reason = (
            "" if gap < 0.1 else f"its logits differ from {before}'s by {gap:.2g} of their length"
        )
    except Exception as error:  # noqa: BLE001
        # Kernels and compilers raise what they like; `auto` has another attention.
        reason = first_line(error)[:120] or type(error).__name__
    if reason:
        model.set_attn_implementation(before)
    return reason


def _half(device: torch.device) -> torch.dtype:
    """Return the 16 bits in which attention is computed in training on `device`."""
    import torch

    return torch.float16 if choose_precision(device.type) == "fp16" else torch.bfloat16


def try_faster(model: PreTrainedModel, name: str, row: Mapping[str, Sequence[int]]) -> str:
    """Switch `model` to the attention `name` and return ""; if that fails, differs or is not faster
    on `row`, keep its own and return the reason.

    `row` is a packed row of the run: how much a kernel gains depends on its length and documents.
    """
    before = model.config._attn_implementation
    try:
        expected = row_seconds(model, row)
        reason = try_attention(model, name)
        if reason:
            return reason
        seconds = row_seconds(model, row)
    except Exception as error:  # noqa: BLE001
        # As in try_attention: compilers raise what they like, and memory may not suffice.
        reason = first_line(error)[:120] or type(error).__name__
    else:
        if seconds <= _GAIN * expected:
            return ""
        reason = (
            f"a packed row takes {1000 * seconds:.1f} ms, with {before} {1000 * expected:.1f} ms"
        )
    model.set_attn_implementation(before)
    return reason


def row_seconds(model: PreTrainedModel, row: Mapping[str, Sequence[int]]) -> float:
    """Return the seconds of a pass over `row`, forward and backward: the median of three.

    The gradient is that of the inputs alone, which needs no memory for gradients of weights and
    passes through each attention all the same.
    """
    import torch

    device, was_training = model.device, model.training
    columns = (row["input_ids"][:_TIMED_TOKENS], row["position_ids"][:_TIMED_TOKENS])
    ids, positions = (torch.tensor([column], device=device) for column in columns)
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    devices = []
    if device.type == "cuda":
        devices.append(device)
    seconds = []
    # Dropout draws numbers, and the run must draw those that it draws without this.
    with torch.random.fork_rng(devices), torch.autocast(device.type, _half(device)):
        # In training mode: a kernel without dropout must be refused here, not at the first step.
        model.train()
        try:
            for _ in range(4):
                began = time.perf_counter()
                output = model.base_model(
                    inputs_embeds=inputs, position_ids=positions, use_cache=False
                )
                gradient = torch.autograd.grad(output[0].float().sum(), inputs)[0]
                gradient.sum().item()  # waits for the GPU
                seconds.append(time.perf_counter() - began)
        finally:
            model.train(was_training)
    # The first pass compiles.
    return statistics.median(seconds[1:])


@contextlib.contextmanager
def without_flash(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Let a model whose attention is a flash kernel read by another one in the block.

    Those kernels refuse float32. In training its weights are multiplied in 16 bits by autocast, but
    not where it reads before that, which is done in the dtype of the weights.
    """
    name = str(model.config._attn_implementation)
    if "flash" not in name:
        yield
        return
    plain = "eager"
    if model._supports_sdpa:
        plain = "sdpa"
    model.set_attn_implementation(plain)
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def new_cartridge(
    model: PreTrainedModel, config: PromptLearningConfig, ids: Sequence[int]
) -> PeftModel:
    """Return `model` with a new cartridge of a peft `config`: the keys and values of the first
    tokens of `ids`.

    Raises `InputError` as `attend_to_cartridge` does.
    """
    import torch
    from peft import get_peft_model
    from peft.tuners.cartridge.utils import initialize_kv_prefix_from_past_key_values

    first = torch.tensor([list(ids[: config.num_virtual_tokens])], device=model.device)
    with torch.no_grad(), without_flash(model):
        output = model(input_ids=first, use_cache=True)
    cache = getattr(output, "cache", None)
    if cache is None:  # before transformers 5.24
        cache = output.past_key_values
    tuned = get_peft_model(model, config)
    initialize_kv_prefix_from_past_key_values(
        tuned, past_key_values=[(x.keys, x.values) for x in cache.layers]
    )
    attend_to_cartridge(tuned)
    return tuned


def attend_to_cartridge(tuned: PeftModel) -> None:
    """Let the layers of a peft model read its cartridge themselves, so that rows may be packed and
    trees of tokens read.

    A cartridge (arXiv 2506.06266) holds keys and values that every token sees. peft passes them on
    as a cache, which fits one text a row alone. As in peft they are at positions 0 to n - 1, so a
    row's positions begin at n. Raises `InputError` if the model's attention cannot be extended so.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    encoder, base = tuned.prompt_encoder[tuned.active_adapter], tuned.get_base_model()
    layers = [
        module
        for module in base.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "head_dim")
    ]
    rotary = [
        module for name, module in base.named_modules() if name.rpartition(".")[2] == "rotary_emb"
    ]
    n, n_layers = tuned.active_peft_config.num_virtual_tokens, tuned.active_peft_config.num_layers
    if len(rotary) != 1 or len(layers) != n_layers or getattr(base.config, "sliding_window", None):
        raise InputError(
            f"{base.config.model_type}: a cartridge needs rotary positions and full attention in "
            "every layer."
        )
    # Of the pass under way, a pair for each layer; none while the adapter is switched off.
    held: list[Any] = []

    def begin(
        _: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        held.clear()
        if tuned._adapters_disabled:
            return arguments, options
        states = encoder.weight.view(n, n_layers, 2, -1, layers[0].head_dim).permute(1, 2, 3, 0, 4)
        held.extend(states.unbind())
        if "position_ids" in options:
            return arguments, options | {"position_ids": options["position_ids"] + n}
        return (arguments[0], arguments[1] + n, *arguments[2:]), options

    rotary[0].register_forward_pre_hook(begin, with_kwargs=True)
    for layer in layers:
        layer.cartridge = held
    AttentionInterface.register(CARTRIDGE, _attend)
    # For a name that it does not know transformers makes no mask at all.
    AttentionMaskInterface.register(CARTRIDGE, sdpa_mask)
    base.set_attn_implementation(CARTRIDGE)
    # peft's own would pass the cartridge on as a cache, which fits one text a row alone.
    tuned.forward, tuned.generate = base.forward, base.generate


class _Layer(Protocol):
    """An attention layer of a model with a cartridge: keys and values by layer, and its number."""

    cartridge: list[torch.Tensor]
    layer_idx: int


def _attend(
    module: _Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of a layer, sdpa's, to its cartridge and to the row."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sdpa = cast("Callable[..., tuple[torch.Tensor, None]]", sdpa_attention_forward)
    if not module.cartridge:
        return sdpa(module, query, key, value, mask, **options)
    # Under autocast rotary positions leave keys in float32.
    of_layer = module.cartridge[module.layer_idx].to(key.dtype)
    before = of_layer[:, None].expand(-1, len(key), -1, -1, -1)
    key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
    if mask is None:
        n_queries, n_keys = query.shape[2], key.shape[2]
        mask = torch.ones((n_queries, n_keys), dtype=torch.bool, device=key.device)
        # Shifted, so that every token sees the cartridge, and what the cache holds.
        mask = mask.tril(n_keys - n_queries)[None, None]
    else:
        # Every token sees the cartridge: True in a mask of bools, 0 in one that is added.
        is_bool = mask.dtype == torch.bool
        mask = torch.nn.functional.pad(mask, (before.shape[3], 0), value=is_bool)
    # The mask holds what causal attention needs; sdpa's own would be aligned at the first key.
    return sdpa(module, query, key, value, mask, **{**options, "is_causal": False})
