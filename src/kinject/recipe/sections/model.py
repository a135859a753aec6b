"""The section `model`: which weights and tokenizer, and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.errors import Problem
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

    # No tokenizer has so many; a larger number is memory that the trainer asks for at once.
    vocab_size: int = option(
        help="Tokens in the vocabulary, special tokens included.", min=260, max=2**20
    )


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
        help="Attention implementation; flash_attention_N is the installed package, or else the "
        "prebuilt kernel of the hub that transformers chooses.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", help="Device of the model.")
    quantization: Quantization = option("none", help="Load through bitsandbytes (with an adapter).")
    freeze: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of the names of frozen parameters, as in [model.embed_tokens.*].",
    )


def model_problems(model: ModelSection) -> Iterator[Problem]:
    """Yield the problems of where weights and tokenizer come from."""
    if (model.path is None) == (model.new is None):
        message = (
            "give either path (a model to load) or new (config of a model with random weights)."
        )
        yield Problem("model", message)
    if model.new is not None and model.tokenizer is None:
        message = "missing. A new model needs a tokenizer: a folder, or vocab_size to train one."
        yield Problem("model.tokenizer", message)
    if model.new is None and model.tokenizer is not None:
        message = "a loaded model brings its own tokenizer. Remove the line."
        yield Problem("model.tokenizer", message)
