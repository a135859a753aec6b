"""The tokenizer and the model of a training run: loaded, or new."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject import models
from kinject.corpus.chat import ChatFormat, conversation_texts, kwargs_fault, training_template
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.disk import is_folder, read_bytes
from kinject.errors import KinjectError, RecipeError
from kinject.process import is_fsdp_launch, is_yes
from kinject.recipe import ModelSection, TokenizerSection, TrainRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

log = logging.getLogger(__name__)


def load_training_tokenizer(recipe: TrainRecipe, rows: Iterable[CorpusRow] | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the recipe names: the model's, that of a folder, or one trained on the corpus.

    The corpus is `rows`, by default the recipe's, which is then read once more than to tokenise it.
    """
    section, corpus = recipe.model, recipe.corpus
    if isinstance(section.tokenizer, TokenizerSection):
        texts = (text for row in (rows or CorpusFile(Path(corpus.path))) for text in _texts(row))
        return models.train_tokenizer(texts, section.tokenizer.vocab_size)
    tokenizer = models.load_tokenizer(section.tokenizer or section.path or "", revision=section.revision)
    set_special_tokens(recipe, tokenizer)
    return tokenizer


def set_special_tokens(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give `tokenizer` the recipe's eos_token and pad_token. Raises `RecipeError` for a token that it lacks."""
    faults = []
    for key in ("eos_token", "pad_token"):
        token = recipe.trainer.get(key)
        if token is not None and token not in tokenizer.get_vocab():
            special = ", ".join(tokenizer.all_special_tokens)
            faults.append(
                recipe.problem(f"trainer.{key}", f"{token!r:.80} is no token of this tokenizer. It has {special}.")
            )
        elif token is not None:
            setattr(tokenizer, key, token)
    if faults:
        raise RecipeError(faults)


def check_special_tokens(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` if a local tokenizer lacks a token that the trainer section names, or is yet to be trained."""
    named = [key for key in ("eos_token", "pad_token") if recipe.trainer.get(key) is not None]
    path = recipe.model.tokenizer if recipe.model.new is not None else recipe.model.path
    if named and isinstance(path, TokenizerSection):
        raise recipe.error(
            f"trainer.{named[0]}", "a tokenizer that is trained on the corpus has its own. Remove the line."
        )
    if named and isinstance(path, str) and is_folder(path):
        set_special_tokens(recipe, models.load_tokenizer(path))


def _texts(row: CorpusRow) -> list[str]:
    if row.shape == "messages":
        return [text for _, text in conversation_texts(row)]
    return [row.text] if row.shape == "text" else [row.prompt + row.completion]


def load_training_model(
    recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, sharding: models.Sharding | None = None, path: str = ""
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, in float32 unless the recipe names a dtype, and notes on the choices made for it.

    With `path` it is the recipe's model with the weights of that folder, a checkpoint of the run.
    """
    section = recipe.model
    keeps = section.dtype != "auto" or section.quantization != "none"  # quantised: `auto` is what the GPU multiplies
    dtype = section.dtype if keeps else "float32"
    if section.path is None and not path:
        fields = section.new or {}
        device = models.choose_device("cpu" if recipe.trainer.get("use_cpu") else section.device)
        attention = models.choose_attention(section.attention, device)
        model = models.new_model(fields, tokenizer, recipe.seed, attention, dtype)
        n = sum(models.size_of(parameter) for parameter in model.parameters())
        if sharding is not None:
            model = models.shard(model, sharding)
        elif not is_fsdp_launch():
            model = model.to(device)
        chosen = _use_fastest(model, section.attention, device)
        return model, [
            f"new {fields['model_type']} with random weights: {n:,} parameters, "
            f"{len(tokenizer):,} tokens, {model.config._attn_implementation} attention",
            *chosen,
        ]
    loaded = models.load_model(
        path or str(section.path), dtype=dtype, attention=section.attention, device=section.device,
        revision=None if path else section.revision, quantization=section.quantization, tokenizer=tokenizer,
        move=not is_fsdp_launch(), sharding=sharding,
    )  # fmt: skip
    notes = [*loaded.notes, *_use_fastest(loaded.model, section.attention, loaded.device)]
    if section.quantization == "4bit":
        _keep_gradients(loaded.model)
    return loaded.model, notes


def take_over_sharding(config: SFTConfig, recipe: TrainRecipe) -> models.Sharding | None:
    """Return how transformers shards the model of a run while it loads it; `config` then asks accelerate for nothing.

    Activation checkpointing that was set for accelerate becomes the trainer's.

    None for a run on one process or by DDP or DeepSpeed, and for weights that accelerate shards itself: those in 4 and 8
    bits, and those that `models.read_sharding` leaves to it. Raises `RecipeError` for that on CPUs, where accelerate does
    not shard.
    """
    if config.deepspeed_plugin is not None:
        # transformers asks the newest plugin that is alive whether weights are in parts
        config.deepspeed_plugin.set_deepspeed_weakref()
    sharding = models.read_sharding(config.fsdp_config if config.fsdp else None, bf16=config.bf16)
    if sharding is not None and recipe.model.quantization == "none":
        checkpoints = is_yes("FSDP_ACTIVATION_CHECKPOINTING") and is_fsdp_launch()
        config.gradient_checkpointing |= checkpoints or bool(
            config.fsdp and config.fsdp_config.get("activation_checkpointing")
        )
        config.fsdp, config.fsdp_plugin_args = None, None
        return sharding
    if (config.fsdp or is_fsdp_launch()) and config.use_cpu:
        raise recipe.error(
            "trainer", "accelerate shards on GPUs only: no quantized weights, offload or context parallelism on CPUs."
        )
    return None


def what_splits(quantization: str, config: SFTConfig) -> str:
    """Return the reason why kinject has no access to weights and gradients in this launch, "" if it has.

    DeepSpeed's engine keeps them, and so does accelerate for a model that it shards. `accelerate launch` shows in the
    environment and in the plugin, not in the fields of the config.
    """
    if config.deepspeed_plugin is not None:
        return "DeepSpeed keeps them to itself. Use DDP, or FSDP2: recipes/distributed/fsdp2.yaml."
    is_fsdp = bool(config.fsdp) or is_fsdp_launch()
    if is_fsdp and (quantization != "none" or models.read_sharding(config.fsdp_config, bf16=False) is None):
        return "accelerate shards them after the base is read (quantized, offloaded or in context parallel). Use DDP."
    return ""


def is_sharded(config: SFTConfig) -> bool:
    """Return whether each process of this launch holds only a part of the weights (FSDP, ZeRO-3)."""
    is_fsdp = bool(config.fsdp) or is_fsdp_launch()
    return is_fsdp or getattr(config.deepspeed_plugin, "zero_stage", 0) == 3


def _use_fastest(model: PreTrainedModel, attention: str, device: str) -> list[str]:
    """Switch `model` from sdpa to the fastest attention that works on a short row of it, if `attention` is ``auto``."""
    if attention != "auto" or model.config._attn_implementation != "sdpa":
        return []
    if is_fsdp_launch() or not models.is_runnable(model):
        return []  # it cannot be tried on weights that are in parts, or will be
    notes: list[str] = []
    for name in models.fastest_attention(device):
        reason = models.try_attention(model, name)
        if not reason:
            return [*notes, f"attention: {model.config._attn_implementation}"]
        notes.append(f"attention: {name} is not used ({reason})")
    return [*notes, "attention: sdpa with separated documents"] if notes else []


def _keep_gradients(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16.

    One forward pass in evaluation mode (a validation loss, the packing check) would do it, and the repacked product has
    no gradient: adapters below it would stop learning without an error (bitsandbytes 0.50).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def widen_adapter(model: Any) -> None:
    """Make the weights that train float32, for fp16: TRL has the adapters of quantised models in bfloat16.

    The gradient scaler of fp16 refuses gradients in bfloat16 (pytorch/pytorch#127176).
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def precision_warnings(section: ModelSection, config: SFTConfig) -> list[str]:
    """Log and return a warning if training is in fp16 and the weights were saved in bfloat16, whose range fp16 lacks."""
    if config.mixed_precision != "fp16" or section.path is None:
        return []
    if str(models.load_config(section.path, section.revision).dtype) != "torch.bfloat16":
        return []
    message = (
        f"trainer.fp16: {section.path} was saved in bfloat16; activations beyond 65,504 overflow. Use bf16: true if the "
        "hardware has it."
    )
    log.warning(message)
    return [message]


def set_chat_template(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase) -> tuple[ChatFormat, list[str]]:
    """Set a chat template that the recipe names in `tokenizer`; return how conversations become tokens, and notes on it."""
    corpus, trainer = recipe.corpus, recipe.trainer
    if trainer.get("chat_template_path"):
        tokenizer.chat_template = _read_chat_template(recipe, trainer["chat_template_path"])
    assistant_only = bool(trainer.get("assistant_only_loss"))
    template, note = training_template(tokenizer) if assistant_only else (None, "")
    kwargs = corpus.chat_template_kwargs or {}
    if fault := kwargs_fault(kwargs, template, tokenizer.chat_template):
        raise recipe.error("corpus.chat_template_kwargs", fault)
    return ChatFormat(assistant_only, template, kwargs, corpus.allow_dropped_tokens), [note] * bool(note)


def _read_chat_template(recipe: TrainRecipe, path: str) -> str:
    """Return a chat template from a Jinja file, or from the tokenizer in a folder or on the hub."""
    try:
        if path.endswith((".jinja", ".j2")):
            return read_bytes(Path(path)).decode("utf-8-sig")
        template = models.load_tokenizer(path).chat_template
    except (KinjectError, UnicodeDecodeError) as error:
        raise recipe.error("trainer.chat_template_path", f"{path}: {error}") from error
    if not isinstance(template, str):
        raise recipe.error("trainer.chat_template_path", f"the tokenizer in {path} has no chat template.")
    return template
