"""How and where a training runs, beside what its recipe says: `Launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How and where a training is to run, as far as its recipe leaves that open; texts are "" where
    nothing is wrong."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    """The trainer section, with the defaults of SFTConfig."""
    device: str = "cpu"
    emulates_bf16: str = ""
    lacks_attention: str = ""
    lacks_compiler: bool = False
    """Of C++, where the model is to be compiled for a CPU."""
    fp16: bool = False
    splits: str = ""
    """Why kinject has no access to weights and gradients."""
    is_sharded: bool = False
    in_parts: bool = False
    """By transformers or ZeRO-3, so that no module can be copied or merged."""
    has_deepspeed: bool = False
    splits_rows: bool = False
    """By context parallelism."""
    splits_matrices: bool = False
    is_launched: bool = False
    cannot_upload: str = ""

    def __getitem__(self, name: str) -> Any:
        value = self.trainer.get(name)
        return getattr(value, "value", value)  # of an enum, its word

    @property
    def wraps_documents(self) -> bool:
        """Whether packed rows let a document read the one before it."""
        return bool(self["packing"]) and self["packing_strategy"] == "wrapped"

    @property
    def is_schedule_free(self) -> bool:
        """Whether the optimizer averages weights instead of following a schedule."""
        return str(self["optim"]).startswith("schedule_free")

    @property
    def updates_elsewhere(self) -> bool:
        """Whether the optimizer updates weights while gradients are computed."""
        return self["optim"] in ("lomo", "adalomo") or "layerwise" in str(self["optim"])
