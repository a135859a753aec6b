"""Models and tokenizers: loaded from a folder or the hub, or made new; dtype, attention and device chosen aloud.

Importing this package imports no torch; its functions do.
"""

from typing import Any

from kinject.models.hardware import choose_attention, choose_device, has_fast_bf16, varlen_missing
from kinject.models.load import LoadedModel, base_of_adapter, load_model, load_tokenizer
from kinject.models.new import check_config, new_model, train_tokenizer

__all__ = [
    "LoadedModel",
    "base_of_adapter",
    "check_config",
    "choose_attention",
    "choose_device",
    "has_fast_bf16",
    "load_model",
    "load_tokenizer",
    "new_model",
    "train_tokenizer",
    "try_varlen",
    "varlen_missing",
]


def try_varlen(model: Any) -> str:
    """Give `model` torch's variable-length attention; see `kinject.models.varlen.try_varlen`. Imports torch."""
    from kinject.models.varlen import try_varlen as attempt

    return attempt(model)
