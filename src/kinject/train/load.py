"""The tokenizer and the model of a training run, loaded or new; the parameters that train, and
checks of both."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kinject import models
from kinject.corpus.chat import ChatFormat, check_kwargs, conversation_texts, training_template
from kinject.corpus.rows import CorpusRow
from kinject.disk import path_exists, read_bytes
from kinject.errors import InputError, KinjectError, RecipeError, TrainingError, fault
from kinject.hub import find_source
from kinject.process import is_fsdp_launch, is_shortage, is_yes, machine_memory
from kinject.recipe import CorpusSection, ModelSection, TokenizerSection, TrainRecipe
from kinject.recipe.library_fields import starts_in_the_base
from kinject.terminal import format_number
from kinject.train.batches import RowDataset, packed_row
from kinject.train.config import adapter_config, build
from kinject.train.decomposed import check_parts
from kinject.train.names import count_layers, layer_number

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig, SFTTrainer

log = logging.getLogger(__name__)


def load_training_tokenizer(
    section: ModelSection, rows: Iterable[CorpusRow]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the recipe names: the model's, that of a folder, or one trained on
    the corpus, `rows`."""
    if isinstance(section.tokenizer, TokenizerSection):
        texts = chain.from_iterable(map(_texts, rows))
        return models.train_tokenizer(texts, section.tokenizer.vocab_size)
    return models.load_tokenizer(section.tokenizer or section.path or "", revision=section.revision)


def _texts(row: CorpusRow) -> list[str]:
    if row.shape == "messages":
        return [text for _, text in conversation_texts(row)]
    if row.shape == "text":
        return [row.text]
    return [row.prompt + row.completion]


def load_training_model(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    device: str,
    sharding: models.Sharding | None = None,
    path: str = "",
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model on `device`, in float32 unless the section names a dtype, and notes on the
    choices made for it.

    `seed` draws the weights of a new one. With `path` they are those of that folder, a checkpoint
    of the run.
    """
    dtype = section.dtype
    # Of quantised weights `auto` is the dtype in which the GPU multiplies them.
    if dtype == "auto" and section.quantization == "none":
        dtype = "float32"
    if section.path is None and not path:
        return _new_training_model(section, tokenizer, seed, device, dtype, sharding)
    options = models.LoadOptions(
        dtype=dtype,
        attention=section.attention,
        device=device,
        quantization=section.quantization,
        revision=None if path else section.revision,
        sharding=sharding,
        move=not is_fsdp_launch(),
    )
    loaded = models.load_model(path or str(section.path), options, tokenizer=tokenizer)
    _check_stored(section, loaded.model.config)  # of a model that was not here before
    if section.quantization == "4bit":
        _keep_gradients(loaded.model)
    return loaded.model, list(loaded.notes)


def _new_training_model(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    device: str,
    dtype: str,
    sharding: models.Sharding | None,
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model with random weights, and notes, as `load_training_model` does."""
    fields = section.new or {}
    device = models.choose_device(device)
    attention = models.choose_attention(section.attention, device)
    model = models.new_model(fields, tokenizer, seed, attention, dtype)
    models.check_saved_tokenizer(model, tokenizer)
    n = sum(models.size_of(parameter) for parameter in model.parameters())
    if sharding is not None:
        model = models.shard(model, sharding)
    elif not is_fsdp_launch():
        model = model.to(device)
    note = (
        f"new {fields['model_type']} with random weights: {n:,} parameters, {len(tokenizer):,} "
        f"tokens, {model.config._attn_implementation} attention"
    )
    return model, [note]


def take_over_sharding(config: SFTConfig, quantization: str) -> models.Sharding | None:
    """Return how transformers shards the model of a run while it loads it; `config` then asks
    accelerate for nothing.

    Activation checkpointing that was set for accelerate becomes the trainer's.

    None for a run on one process or by DDP or DeepSpeed, and for weights that accelerate shards
    itself: those in 4 and 8 bits, and those that `models.read_sharding` leaves to it. Raises
    `RecipeError` for that on CPUs, where accelerate does not shard.
    """
    if config.deepspeed_plugin is not None:
        # transformers asks the newest plugin that is alive whether weights are in parts
        config.deepspeed_plugin.set_deepspeed_weakref()
    sharding = models.read_sharding(config.fsdp_config if config.fsdp else None, bf16=config.bf16)
    if sharding is not None and quantization == "none":
        checkpoints = is_yes("FSDP_ACTIVATION_CHECKPOINTING") and is_fsdp_launch()
        if config.fsdp and config.fsdp_config.get("activation_checkpointing"):
            checkpoints = True
        if checkpoints:
            # transformers' Trainer reads the one name, TRL's the other.
            config.activation_checkpointing = config.gradient_checkpointing = True
        # accelerate would shard the model a second time.
        config.fsdp, config.fsdp_plugin_args = None, None
        return sharding
    if (config.fsdp or is_fsdp_launch()) and config.use_cpu:
        raise fault(
            "trainer",
            "accelerate shards on GPUs only: no quantized weights, offload or context parallelism "
            "on CPUs.",
        )
    return None


def use_fastest_attention(
    model: PreTrainedModel, recipe: TrainRecipe, dataset: RowDataset, precision: str
) -> list[str]:
    """Switch `model` from sdpa to the fastest attention that works on a short row of it, if
    `model.attention` is ``auto``; return notes on those that were tried.

    Flex attention is taken only if it is faster on a packed row of `dataset`. `precision` is that
    of autocast in training (bf16, fp16, no).
    """
    if recipe.model.attention != "auto" or model.config._attn_implementation != "sdpa":
        return []
    if is_fsdp_launch() or not models.is_runnable(model):
        return []  # it cannot be tried on weights that are in parts, or will be
    notes: list[str] = []
    for name in models.fastest_attention(model.device.type):
        if name == models.FLEX:
            packed = packed_row(recipe, dataset)
            if packed is None:
                continue  # sdpa needs no mask for one document a row, and is faster without
            # Which is faster depends on GPU, model and row: measured here, not kept in a table.
            reason = models.try_faster(model, name, packed)
        elif precision == "no" and model.dtype == torch.float32:
            # It is tried in 16 bits, and would fail at the first step.
            reason = "it reads 16 bits alone, and this training is in float32"
        else:
            reason = models.try_attention(model, name)
        if not reason:
            return [*notes, f"attention: {model.config._attn_implementation}"]
        notes.append(f"attention: {name} is not used ({reason})")
    if notes:  # something faster was tried
        notes.append("attention: sdpa with separated documents")
    return notes


def _keep_gradients(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16.

    One forward pass in evaluation mode (a validation loss, the packing check) would do it, and the
    repacked product has no gradient: adapters below it would stop learning without an error
    (bitsandbytes 0.50).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def begin_cartridge(
    model: PreTrainedModel,
    adapter: PeftConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[CorpusRow],
) -> tuple[PreTrainedModel | PeftModel, PeftConfig | None]:
    """Return `model` and `adapter`, peft's config; a cartridge is in the model already.

    It begins as the first tokens of each text of the corpus, as many of all; of originals alone
    where `rows` have some.
    """
    if adapter is None or adapter.peft_type.value.lower() != models.CARTRIDGE:
        return model, adapter
    rows = list(rows)
    originals = [row for row in rows if row.origin == "original"]
    texts = [f"{text}\n\n" for row in originals or rows for text in _texts(row)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    n = adapter.num_virtual_tokens or 0
    start = models.text_start(tokenizer)
    tokens = [] if start is None else [start]
    each = _length_of_each(ids, n)
    for text_ids in ids:
        tokens += text_ids[:each]
    if not 0 < n <= len(tokens):
        allowed = (
            f"allowed: 1 to the {len(tokens):,} tokens of the corpus, where a cartridge begins."
        )
        raise fault("adapter.num_virtual_tokens", f"found {n:,}, {allowed}")
    return models.new_cartridge(model, adapter, tokens), None


def _length_of_each(texts: Sequence[Sequence[int]], n_tokens: int) -> int:
    """Return the least length to which all texts are cut that leaves `n_tokens`; that of the
    longest text if there are fewer."""
    longest = max(map(len, texts))
    for length in range(longest):
        if sum(min(length, len(text)) for text in texts) >= n_tokens:
            return length
    return longest


def complete_head(model: PreTrainedModel | PeftModel) -> None:
    """Give the head of a model the bias that TRL's reads, where an adapter trains tokens of it.

    peft (0.21) wraps such a head, as one that is the embedding. The wrapper has the weight with the
    trained rows, but no bias, not even None: on a GPU each such run ended in an AttributeError.
    """
    from peft.utils.other import TrainableTokensWrapper

    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.register_parameter("bias", head.original_module.bias)


def widen_adapter(model: nn.Module) -> None:
    """Make the weights that train float32, for fp16: TRL has the adapters of quantised models in
    bfloat16.

    The gradient scaler of fp16 refuses gradients in bfloat16 (pytorch/pytorch#127176).
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def precision_warnings(section: ModelSection, config: SFTConfig) -> list[str]:
    """Log and return a warning if training is in fp16 and the weights were saved in bfloat16, whose
    range fp16 lacks."""
    if config.mixed_precision != "fp16" or section.path is None:
        return []
    if str(models.load_config(section.path, section.revision).dtype) != "torch.bfloat16":
        return []
    message = (
        f"trainer.fp16: {section.path} was saved in bfloat16; activations beyond 65,504 overflow. "
        "Use bf16: true if the hardware has it."
    )
    log.warning(message)
    return [message]


def set_chat_template(
    corpus: CorpusSection, trainer: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[ChatFormat, list[str]]:
    """Set a chat template that the recipe names in `tokenizer`; return how conversations become
    tokens, and notes on it."""
    if trainer.get("chat_template_path"):
        tokenizer.chat_template = _read_chat_template(trainer["chat_template_path"])
    assistant_only = bool(trainer.get("assistant_only_loss"))
    template, note = training_template(tokenizer) if assistant_only else (None, "")
    kwargs = corpus.chat_template_kwargs or {}
    try:
        check_kwargs(kwargs, template, tokenizer.chat_template)
    except InputError as error:
        raise fault("corpus.chat_template_kwargs", str(error)) from error
    chat = ChatFormat(assistant_only, template, kwargs, corpus.allow_dropped_tokens)
    return chat, [note] if note else []


def _read_chat_template(path: str) -> str:
    """Return a chat template from a Jinja file, or from the tokenizer in a folder or on the hub."""
    try:
        if path.endswith((".jinja", ".j2")):
            return read_bytes(Path(path)).decode("utf-8-sig")
        template = models.load_tokenizer(path).chat_template
    except (KinjectError, UnicodeDecodeError) as error:
        raise fault("trainer.chat_template_path", f"{path}: {error}") from error
    if not isinstance(template, str):
        raise fault("trainer.chat_template_path", f"the tokenizer in {path} has no chat template.")
    return template


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match `patterns`, model.freeze. Raises `RecipeError` for one
    without a match."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            looks = ", ".join([*parameters][:3])
            message = f"{pattern!r} matches no parameter. Names look like {looks}."
            raise fault("model.freeze", message)
        for name in matched:
            parameters[name].requires_grad_(False)


def has_idle_parts(model: PreTrainedModel) -> bool:
    """Return whether weights that train lie beside the part of `model` that reads text, as the
    tower for images of Gemma 3: they get no gradient."""
    head = model.get_output_embeddings()
    reading = [*model.get_decoder().parameters(), *(head.parameters() if head is not None else ())]
    read = {id(weight) for weight in reading}
    return any(weight.requires_grad and id(weight) not in read for weight in model.parameters())


def check_trainable(
    model: PreTrainedModel | PeftModel, frozen: Sequence[str], adapter: Mapping[str, Any] | None
) -> None:
    """Raise `TrainingError` if the parameters that train are not exactly those that the recipe
    names.

    Without an `adapter` these are all that match no pattern of `frozen`; with one, its own weights
    beside every target, and a whole copy of every module in `modules_to_save` (embed_tokens and
    lm_head among them).
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if adapter is None:
        expected = {name for name, _ in model.named_parameters()}
        for pattern in frozen:
            expected = {name for name in expected if not fnmatchcase(name, pattern)}
        different = sorted(expected ^ set(trained))
        if different:
            raise TrainingError(
                "the parameters that train are not those of the recipe; these differ: "
                f"{', '.join(different[:5])}."
            )
    else:
        _check_adapter(trained, adapter)
        try:
            _check_layers(model)  # of a model on the hub, which was not seen before
        except ValueError as error:
            raise fault(
                "adapter", f"{error}. Take other target_modules, or none of that."
            ) from error
    if not trained:
        raise TrainingError("no parameter trains. Check model.freeze and the adapter section.")


def check_model(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for impossible values of model.new and adapter, before any weight is
    read.

    The model is built without weights, from model.new or the config.json of a local folder; one on
    the hub is not fetched for this.
    """
    section = recipe.model
    if section.path is not None and path_exists(Path(section.path) / models.ADAPTER_CONFIG):
        raise fault(
            "model.path",
            f"{section.path} is an adapter. Train the folder that kinject export makes of it.",
        )
    config = _read_config(section)
    reason = models.causal_fault(config) if config is not None else ""
    if reason and section.new is None:
        raise fault("model.path", f"{section.path}/config.json: {reason}")
    if reason:
        raise fault("model.new", reason)
    _check_stored(section, config)
    if section.new is not None:
        fields = {key: value for key, value in section.new.items() if key != "model_type"}
        model_type = section.new["model_type"]
        recipe.raise_any(
            build(functools.partial(_shape, model_type), fields, "model.new", model_type)[1]
        )
    wants_router = recipe.trainer.get("router_aux_loss_coef") is not None
    wants_layers = recipe.techniques.reinitialize_last_layers > 0
    if config is None or not (
        recipe.adapter is not None or wants_router or wants_layers or section.freeze
    ):
        return
    try:
        empty = empty_model(config)
    except Exception:  # noqa: BLE001 (loading the folder reports what is wrong with it)
        return
    freeze(empty, section.freeze)
    _check_last_layers(recipe.techniques.reinitialize_last_layers, empty)
    if wants_router and not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        message = f"is for mixtures of experts, and {config.model_type} is none. Remove the line."
        raise fault("trainer.router_aux_loss_coef", message)
    if recipe.adapter is not None:
        adapt = functools.partial(_adapt, config)
        recipe.raise_any(build(adapt, recipe.adapter, "adapter", "peft")[1])


def _check_stored(section: ModelSection, config: PretrainedConfig | None) -> None:
    """Raise `RecipeError` if a base is stored in other bits than the recipe names; None is a base
    that is not here yet.

    All that cannot be on packed weights is refused by model.quantization: training them without an
    adapter, folding, decomposing. Below a plain recipe they would pass for plain weights.
    """
    if config is None:
        return
    stored = models.stored_quantization(config)
    if stored in (section.quantization, "none"):
        return
    fix = f"Set model.quantization: {stored}, with an adapter, or give the plain model."
    if stored not in ("4bit", "8bit"):
        fix = "Give the plain model: no adapter trains on these here."
    raise fault(
        "model.quantization",
        f"found {section.quantization}, and the weights of {section.path} are stored in {stored}. "
        f"{fix}",
    )


def _read_config(section: ModelSection) -> PretrainedConfig | None:
    """Return the config of the model to train; None if it is on the hub, or cannot be read (loading
    it says why)."""
    from transformers import AutoConfig

    try:
        if section.new is not None:
            return models.new_config(section.new)
        if section.path is not None and path_exists(Path(section.path)):
            return AutoConfig.from_pretrained(
                find_source(section.path, "model"), trust_remote_code=False
            )
    except Exception:  # noqa: BLE001
        return None
    return None


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a transformers config on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _shape(model_type: str, fields: Mapping[str, Any]) -> None:
    """Build a new model without weights. Raises what transformers makes of impossible fields."""
    model = empty_model(models.new_config({"model_type": model_type, **fields}))
    model.config.validate()  # as saving does
    n = sum(parameter.numel() for parameter in model.parameters())
    # Four bytes each: a new model is in float32 unless the recipe names a dtype.
    if n * 4 > machine_memory():
        raise ValueError(
            f"{format_number(n)} parameters are more than the memory of this machine holds."
        )


def _adapt(config: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    """Adapt a model without weights. Raises what peft makes of impossible fields."""
    from peft import PeftConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    drawn = dict(fields)
    if isinstance(fields.get("init_lora_weights"), str):
        drawn["init_lora_weights"] = True  # those that read the base's weights, which are not here
    try:
        model = get_peft_model(empty_model(config), adapter_config(drawn))
        tokens = fields.get("trainable_token_indices")
        size = config.get_text_config().vocab_size
        if isinstance(tokens, list) and max(tokens, default=-1) >= size:
            raise ValueError(f"trainable_token_indices: the vocabulary has {size:,} tokens.")
        if isinstance(model.get_output_embeddings(), BaseTunerLayer):
            raise ValueError(
                "the trainer computes the loss from lm_head's own weight; it can be in "
                "modules_to_save."
            )
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        _check_adapter(trained, fields)
        # loading the adapter makes its config anew, from what peft has filled in
        saved = model.peft_config[model.active_adapter].to_dict()
        PeftConfig.from_peft_type(**saved)
        _check_layers(model)
        if starts_in_the_base(fields):
            check_parts(model, fields["init_lora_weights"])
        if fields.get("merge"):
            model.merge_and_unload()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):  # what that device cannot compute is no fault
            raise


def _check_layers(model: PeftModel) -> None:
    """Raise `ValueError` if an adapter of `model` trains a bias of a layer that has none, or
    replicates layers that are of several kinds."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds and len(kinds) != model.config.num_hidden_layers:
        raise ValueError(
            f"layer_replication: layers of {model.config.model_type} have kinds, which peft does "
            "not replicate"
        )
    is_beft = model.peft_config[model.active_adapter].peft_type.value == "BEFT"
    for name, layer in model.named_modules():
        trains_bias = is_beft and hasattr(layer, "beft_bias")
        trains_bias |= any(getattr(layer, "lora_bias", {}).values())
        if trains_bias and layer.get_base_layer().bias is None:
            raise ValueError(
                f"{name.removeprefix('base_model.model.')} has no bias that could train, so that "
                "such an adapter could not be folded into the base"
            )


NOT_RUNNING = (RuntimeError, TypeError, AttributeError, LookupError, AssertionError)
"""What peft and bitsandbytes raise on packed weights: DoRA on 8 bits an AttributeError."""


def check_runs(trainer: SFTTrainer) -> None:
    """Raise `RecipeError` if the adapter of a quantized model cannot read a row: peft does not
    check which of its kinds can."""
    ids = torch.arange(2, 10, device=trainer.model.device)[None]
    was_training = trainer.model.training
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            trainer.model.eval()(input_ids=ids, use_cache=False)
    except NOT_RUNNING as error:
        if is_shortage(error):
            raise
        raise quantized_fault(error) from error
    trainer.model.train(was_training)


def quantized_fault(error: Exception) -> RecipeError:
    """Return the fault of an adapter that fails on quantized weights."""
    reason = " ".join(str(error).split())[:200].rstrip(".")
    message = (
        f"it does not run on model.quantization ({reason}). Take type: lora, or plain weights."
    )
    return fault("adapter", message)


def _check_adapter(trained: Sequence[str], adapter: Mapping[str, Any]) -> None:
    targets = adapter.get("target_modules") or ()
    if isinstance(targets, str):  # a pattern, or all-linear
        targets = ()
    for module in (*targets, *(adapter.get("modules_to_save") or ())):
        if not any(f".{module}." in f".{name}" for name in trained):
            raise TrainingError(
                f"the adapter asks to train {module}, but none of its weights train. Check its "
                "name."
            )


def reinitialize_last_layers(model: PreTrainedModel, n_last: int, seed: int) -> list[str]:
    """Draw new weights for the last `n_last` layers, as the architecture does for a new model.

    Re-initialising helps small data sets (arXiv 2006.05987). The weights depend on `seed` alone, so
    a resumed run draws the same. Returns the names of the parameters. Raises `RecipeError` if the
    model has fewer layers.
    """
    if not n_last:
        return []
    _check_last_layers(n_last, model)
    first = count_layers(model) - n_last
    # A tower for images may have as many layers.
    text = model.get_decoder()
    read = {id(weight) for weight in text.parameters()}
    names = [
        name
        for name, weight in model.named_parameters()
        if id(weight) in read and _at_least(name, first)
    ]
    for name in names:
        # transformers skips weights that it has marked as loaded.
        model.get_parameter(name)._is_hf_initialized = False
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}

    # Forked, so that the other draws of the run are those of one without new layers.
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in text.named_modules():
            parent = name.rpartition(".")[0]
            is_layer = _at_least(f"{name}.", first) and not _at_least(f"{parent}.", 0)
            if is_layer:  # its modules are drawn with it, each once
                module.apply(model._init_weights)
    return names


def _check_last_layers(n_last: int, model: PreTrainedModel) -> None:
    n_layers = count_layers(model)
    if n_last > n_layers:
        message = f"found {n_last}, but the model has {n_layers} layers. Set at most {n_layers}."
        raise fault("techniques.reinitialize_last_layers", message)


def _at_least(name: str, first: int) -> bool:
    number = layer_number(name)
    return number is not None and number >= first
