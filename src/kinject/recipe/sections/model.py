"""The section `model`: which weights and tokenizer, and how they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.recipe.sections.option import option

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "8bit", "4bit"]
Attention = Literal[
    "auto",
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]


@dataclass(frozen=True)
class TokenizerSection:
    """Train a byte-level BPE tokenizer on the corpus."""

    vocab_size: int = option(help="Tokens in the vocabulary, special tokens included.", min=260)


@dataclass(frozen=True)
class ModelSection:
    """Which model: `path` to load one, or `new` (config fields) with `tokenizer` to start from
    random weights."""

    path: str | None = option(None, help="Model folder or hub name.", path="model")
    revision: str | None = option(None, help="Branch, tag or commit on the hub.")
    new: Mapping[str, Any] | None = option(
        None, help="model_type and config fields of a model with random weights."
    )
    tokenizer: str | TokenizerSection | None = option(
        None, help="Tokenizer folder or hub name; or vocab_size of one to train.", path="model"
    )
    dtype: Dtype = option("auto", help="Weights in memory.")
    attention: Attention = option(
        "auto",
        help="Attention implementation; flash_attention_N is the installed package, or else the prebuilt kernel of the hub "
        "that transformers chooses.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", help="Device of the model.")
    quantization: Quantization = option("none", help="Load through bitsandbytes (with an adapter).")
    freeze: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of the names of frozen parameters, as in [model.embed_tokens.*].",
    )
