"""Models and tokenizers made anew: from a config with random weights, from texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.models.folder import check_buffers
from kinject.models.load import load_tokenizer
from kinject.recipe.check import suggestion

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_MAX_LAYERS = 2_000
# Tokenizers differ in how they split numbers, marks and white space.
_HARD_TEXT = "It's 12,345.67 or  x1; don't\n\n  WE'LL Ünï 你好 9999 \t(a_b)"


def check_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, fault) for each key of `config` that its `model_type` does not know, and for too
    many layers.

    Building the model shows what else is wrong (`kinject.train.load.check_model`).
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return [
            ("model_type", f"found {model_type!r}.{suggestion(model_type, CONFIG_MAPPING.keys())}")
        ]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        fault = f"found {model_type!r}, which is no causal language model. Take llama, for example."
        return [("model_type", fault)]
    # new_model takes these from the tokenizer.
    known = set(CONFIG_MAPPING[model_type]().to_dict()) - {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    faults = [(key, f"unknown key.{suggestion(key, known)}") for key in config if key not in known]
    n_layers = config.get("num_hidden_layers")
    if isinstance(n_layers, int) and n_layers > _MAX_LAYERS:
        faults.append(("num_hidden_layers", f"found {n_layers}, allowed: up to {_MAX_LAYERS:,}."))
    return faults


def new_config(values: Mapping[str, Any], vocab_size: int = 300) -> PretrainedConfig:
    """Return transformers' config of `model.new`, for a tokenizer with `vocab_size` entries unless
    the values name more."""
    from transformers import CONFIG_MAPPING

    options = {key: value for key, value in values.items() if key != "model_type"}
    return CONFIG_MAPPING[values["model_type"]](**{"vocab_size": vocab_size, **options})


def new_model(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    attention: str | None = None,
    dtype: str = "float32",
) -> PreTrainedModel:
    """Return a model of `config` with random weights drawn from `seed`, for the vocabulary of
    `tokenizer`.

    `vocab_size` in `config` may exceed the tokenizer's (the shape of a larger model, a round
    number): the extra rows belong to no token. Raises `InputError` if it is smaller.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    vocab_size = config.get("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise InputError(
            f"model.new.vocab_size: found {vocab_size}, but the tokenizer has {len(tokenizer)} "
            "tokens. Set at least as many."
        )
    tokens = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        new_config({**config, **tokens}, len(tokenizer)),
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
    )
    check_buffers(model, "model.new", "this section")
    return model


def check_saved_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` if `tokenizer` splits a text otherwise once it is saved with a new
    `model`."""
    kind = model.config.model_type
    # The one model of transformers 5.23 that puts a class of its own in place of the tokenizer's.
    if kind != "qwen2":
        return
    with TemporaryDirectory(prefix="kinject-tokenizer-") as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        saved = load_tokenizer(folder)
    if saved(_HARD_TEXT).input_ids != tokenizer(_HARD_TEXT).input_ids:
        raise InputError(
            f"model.new.model_type: {kind}: transformers reads any tokenizer beside such a model "
            "as Qwen2's, so the saved model would get other tokens than it is trained on. Take "
            "qwen3 or llama, or a tokenizer of Qwen2."
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens; each digit is a token, and a text
    begins with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        # Every byte is a token, so no text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.Sequence(
        [
            # Learned tokens are marked by offsets that keep white space (corpus/spans.py).
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, bpe.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
