"""8-bit optimizers with the embeddings' state in 8 bits, too: transformers keeps it in float32 unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_KEY = "embedding_bits"
_FAMILIES = ("adamw", "lion", "ademamix")


def embedding_bits_fault(trainer: Mapping[str, Any]) -> str:
    """Return what is wrong with `embedding_bits` in trainer.optim_args; "" where it is right or absent."""
    bits = embedding_bits(trainer.get("optim_args"))
    if bits is None:
        return ""
    optim = str(trainer.get("optim", "adamw_torch"))
    if "8bit" not in optim or not any(family in optim for family in _FAMILIES):
        return (
            f"embedding_bits is for 8-bit AdamW, Lion and AdEMAMix, found optim: {optim}. Remove it, or set adamw_8bit."
        )
    return (
        "" if bits in ("8", "32") else f"found embedding_bits={bits}, allowed are 8 and 32 (what transformers takes)."
    )


def settle_embedding_bits(optimizer: Any, model: nn.Module, optim_args: str | None) -> None:
    """Let a fresh bitsandbytes `optimizer` of `model` keep the embeddings' state in the bits that `optim_args` names.

    With a large vocabulary they are most of a small model: in float32 they hold adamw_8bit at 0.5 to 0.63 of AdamW's state.
    """
    bits = embedding_bits(optim_args)
    if bits is None:
        return
    manager = optimizer.mng
    tables = {id(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    manager.module_weight_config_triple = [
        (module, name, {**config, "optim_bits": int(bits)} if id(module) in tables else config)
        for module, name, config in manager.module_weight_config_triple
    ]


def embedding_bits(optim_args: str | None) -> str | None:
    """Return what trainer.optim_args sets embedding_bits to, None where it does not."""
    for pair in (optim_args or "").replace(" ", "").split(","):
        key, _, value = pair.partition("=")
        if key == _KEY:
            return value
    return None
