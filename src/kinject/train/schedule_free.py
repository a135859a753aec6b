"""Schedule-free optimizers (arXiv 2405.15682), of the package schedulefree through trainer.optim."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def schedule_free_faults(config: Any) -> list[tuple[str, str]]:
    """Return (key, fault) where `config` (an SFTConfig) asks for such an optimizer and cannot have it."""
    optim = str(getattr(config.optim, "value", config.optim))
    if not optim.startswith("schedule_free"):
        return []
    faults = []
    if find_spec("schedulefree") is None:
        what = f"{optim} needs the package schedulefree. Install it: pip install 'kinject[schedule-free]'."
        faults.append(("trainer.optim", what))
    schedule = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if schedule not in ("constant", "constant_with_warmup"):
        what = (
            f"found {schedule}, but averaging takes the place of a schedule in {optim}. Set constant, with or without"
        )
        faults.append(("trainer.lr_scheduler_type", f"{what} trainer.warmup_steps."))
    return faults


def leave_warmup_to_schedule(optimizer: Any) -> None:
    """Let a fresh schedule-free `optimizer` not warm up by itself: transformers hands the same warmup to both."""
    if {"train_mode", "warmup_steps"} <= getattr(optimizer, "defaults", {}).keys():  # DeepSpeed's stand-in has none
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0
