"""Models and tokenizers: loaded from a folder or the hub, or created; the choice of dtype, attention and device.

Importing this package imports no torch; its functions do.
"""

from typing import Any

from kinject.models.hardware import choose_attention, choose_device, has_fast_bf16, varlen_unavailable_reason
from kinject.models.load import (
    LoadedModel,
    base_of_adapter,
    check_config,
    check_finite_in,
    load_model,
    load_tokenizer,
    new_model,
    not_finite,
    not_finite_in,
    saved_tensors,
    train_tokenizer,
)

__all__ = [
    "LoadedModel", "base_of_adapter", "check_config", "check_finite_in", "choose_attention", "choose_device", "has_fast_bf16",
    "load_model", "load_tokenizer", "new_model", "not_finite", "not_finite_in", "saved_tensors", "train_tokenizer",
    "try_varlen", "varlen_unavailable_reason",
]  # fmt: skip


def try_varlen(model: Any) -> str:
    """Switch `model` to torch's variable-length attention; see `kinject.models.varlen.try_varlen`. Imports torch."""
    from kinject.models import varlen

    return varlen.try_varlen(model)
