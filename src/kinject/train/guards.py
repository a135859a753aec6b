"""Checks for faults of training that raise no error; the recipe's `guards` set the reaction to each."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from kinject.errors import TrainingError
from kinject.recipe import GuardsSection

log = logging.getLogger(__name__)

_WINDOW = 64
"""Gradient norms in the running median."""
_SETTLED = 8
"""Norms needed before the median is used."""
_SPIKE = 10.0


def react(reaction: str, message: str) -> list[str]:
    """Raise `TrainingError` for stop; log and return the warning for warn; return nothing for ignore."""
    if reaction == "stop":
        raise TrainingError(message)
    if reaction == "ignore":
        return []
    log.warning(message)
    return [message]


class Guard(TrainerCallback):  # type: ignore[misc]
    """Counts skipped updates; checks the gradient norm, the loss and the learning rate.

    `skipped` is the number of updates left out because their gradient was not finite; `warnings` are the warnings so far.
    Checkpoints hold its `state`.
    """

    def __init__(self, reactions: GuardsSection) -> None:
        self.reactions = reactions
        self.skipped = 0
        self.warnings: list[str] = []
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._highest_rate = 0.0
        self._warned_of_rate = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the highest rate of the steps before the checkpoint at which this run resumes."""
        self._highest_rate = max((row.get("learning_rate", 0.0) for row in state.log_history), default=0.0)

    def may_update(self, norm: float, step: int) -> bool:
        """Return whether to make the update of this (0-based) step: False if its gradient norm is not finite.

        Raises `TrainingError` if more updates would be skipped than the recipe allows, and for a norm of 10 times the
        running median if the reaction to it is stop.
        """
        if not math.isfinite(norm):
            self.skipped += 1
            if self.skipped > self.reactions.skipped_updates:
                raise TrainingError(
                    f"step {step + 1}: the gradient norm is {norm} for the {self.skipped}. time; guards.skipped_updates "
                    f"allows {self.reactions.skipped_updates}. Lower trainer.learning_rate or trainer.max_grad_norm; with "
                    "fp16, use bf16. The last complete checkpoint is kept."
                )
            self._react(
                "warn", f"step {step + 1}: the gradient norm is {norm}; the update is skipped ({self.skipped} so far)."
            )
            return False
        if len(self._norms) >= _SETTLED:
            median = statistics.median(self._norms)
            if norm > _SPIKE * median > 0:
                self._react(
                    self.reactions.norm_spike,
                    f"step {step + 1}: the gradient norm is {norm:.3g}, over 10 times its running median {median:.3g}. "
                    "Check the batch, lower trainer.learning_rate, or set trainer.max_grad_norm.",
                )
        self._norms.append(norm)
        return True

    def check_scaler(self, norm: float, scale: float, step: int) -> None:
        """Count an update of this (0-based) step that an fp16 scaler leaves out because its norm is not finite.

        A scaler finds its scale by such updates, each at half the scale of the one before, so the recipe's limit does not
        apply to them. Raises `TrainingError` once the scale is below 1: then the loss itself is not finite.
        """
        if math.isfinite(norm):
            return
        self.skipped += 1
        if scale < 1:
            raise TrainingError(
                f"step {step + 1}: the gradient norm is {norm} even with the loss scaled by {scale:g}; {self.skipped} updates "
                "were left out. fp16 cannot hold this model's numbers: use bf16: true, or lower trainer.learning_rate. "
                "The last complete checkpoint is kept."
            )
        self._react("warn", f"step {step + 1}: fp16 overflow at loss scale {scale:g}; the update is left out.")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Check the loss and the learning rate that were logged."""
        logs = logs or {}
        if logs.get("loss") == 0.0 and not self.skipped:
            self._react(
                self.reactions.zero_loss,
                f"step {state.global_step}: the loss is exactly 0, so nothing is learned. Check the labels.",
            )
        rate = logs.get("learning_rate")
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        left = 1 - state.global_step / max(state.max_steps, 1)
        settled = state.global_step > args.get_warmup_steps(state.max_steps) and left > 0.05
        if rate is not None and settled and rate < 1e-4 * self._highest_rate and not self._warned_of_rate:
            self._warned_of_rate = True
            self._react(
                self.reactions.vanishing_rate,
                f"step {state.global_step}: the learning rate is down to {rate:.2g} with {left:.0%} of the steps to go. "
                "Check trainer.lr_scheduler_type and lr_scheduler_kwargs.",
            )

    def state(self) -> dict[str, Any]:
        """Return the counts, warnings and norms so far, for JSON."""
        return {
            "skipped": self.skipped, "warnings": list(self.warnings), "norms": list(self._norms),
            "warned_of_rate": self._warned_of_rate,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in an earlier process."""
        self.skipped, self._warned_of_rate = state["skipped"], state["warned_of_rate"]
        self.warnings[:] = state["warnings"]
        self._norms.extend(state["norms"])

    def _react(self, reaction: str, message: str) -> None:
        self.warnings += react(reaction, message)


def check_start(reactions: GuardsSection, tokenizer: Any, model: Any, n_rows: int, config: Any) -> list[str]:
    """Return the warnings that can be given before the first step; raises `TrainingError` for those whose reaction is stop.

    `n_rows` are the training rows of one epoch and `config` the SFTConfig.
    """
    warnings: list[str] = []
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        warnings += react(
            reactions.pad_is_eos,
            f"the tokenizer pads with its end-of-text token {tokenizer.eos_token!r}. kinject still learns where texts "
            "end, but tools that mask padding by its id do not. Give the tokenizer a pad token of its own.",
        )
    n_read = config.max_steps * config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    if 0 < n_read < n_rows:
        warnings += react(
            reactions.unread_corpus,
            f"trainer.max_steps: {config.max_steps} reads {n_read:,} of {n_rows:,} rows; {1 - n_read / n_rows:.0%} of the "
            f"corpus is never seen. Set max_steps to {-(-n_rows * config.max_steps // n_read):,} for one epoch.",
        )
    lost = _fraction_rounded_away(model, config.learning_rate)
    if config.learning_rate == 0 or lost > 0.5:
        warnings += react(
            reactions.vanishing_rate,
            f"trainer.learning_rate: {config.learning_rate:.2g} is too small: in {_dtype(model)}, {lost:.0%} of the weights "
            "round back to their old values. Set model.dtype: float32 (bf16 then speeds up the arithmetic), or a higher rate.",
        )
    return warnings


def _dtype(model: Any) -> str:
    return str(next(p.dtype for p in model.parameters() if p.requires_grad)).removeprefix("torch.")


def _fraction_rounded_away(model: Any, learning_rate: float) -> float:
    """Return the fraction of weights that a step of `learning_rate`, an AdamW update's usual size, does not move.

    A step below half of the distance to the next number, ``|w| * eps / 2``, rounds away. The first 4,096 weights of
    each trained tensor are checked.
    """
    import torch

    n_unmoved = n = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            sample = parameter.detach().flatten()[:4096]
            moved = (sample.double() + learning_rate).to(parameter.dtype)
            n_unmoved += int((moved == sample).sum())
            n += int(torch.numel(sample))
    return n_unmoved / max(n, 1)
