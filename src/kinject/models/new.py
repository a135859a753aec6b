"""A model with random weights and a tokenizer trained from nothing: how the sandbox's base comes to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.recipe.check import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MOST_LAYERS = 2_000
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"


def check_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, fault) for each key of `config` that its `model_type` does not know, and for values it refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return [("model_type", f"found {model_type!r}.{suggestion(model_type, CONFIG_MAPPING.keys())}")]
    known = set(CONFIG_MAPPING[model_type]().to_dict()) - {"bos_token_id", "eos_token_id", "pad_token_id"}
    faults = [(key, f"unknown key.{suggestion(key, known)}") for key in config if key not in known]
    n_layers = config.get("num_hidden_layers")
    if isinstance(n_layers, int) and n_layers > _MOST_LAYERS:
        faults.append(("num_hidden_layers", f"found {n_layers}, allowed: up to {_MOST_LAYERS:,}."))
    if faults:
        return faults
    try:
        CONFIG_MAPPING[model_type](**{key: value for key, value in config.items() if key != "model_type"})
    except (TypeError, ValueError, StrictDataclassError) as error:
        return [("model_type", f"{model_type} refuses this configuration: {str(error).splitlines()[-1].strip()}")]
    return []


def new_model(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int, attention: str | None = None
) -> PreTrainedModel:
    """Return a float32 model of `config` with random weights drawn from `seed`, sized and bound to `tokenizer`.

    A `vocab_size` in `config` may exceed the tokenizer's: rows that no token has (a larger model's shape, a round number).
    Raises `InputError` where it is smaller.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    n_pieces = config.get("vocab_size", len(tokenizer))
    if n_pieces < len(tokenizer):
        raise InputError(
            f"model.new.vocab_size: found {n_pieces}, but the tokenizer has {len(tokenizer)} pieces. Set at least as many."
        )
    options = {key: value for key, value in config.items() if key not in ("model_type", "vocab_size")}
    built = CONFIG_MAPPING[config["model_type"]](
        **options,
        vocab_size=n_pieces,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(built, dtype=torch.float32, attn_implementation=attention)
    return model


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of `vocab_size` pieces, digits apart, that puts BOS before a text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)
