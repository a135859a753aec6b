"""Checks for faults of training that raise no error; the recipe's `guards` set the reaction to
each.

`check_trained` decides whether a run is finished: a run that changed nothing, or whose loss is not
finite, is not.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig

from kinject import models
from kinject.disk import system_failure
from kinject.errors import TrainingError, fault, one_line
from kinject.process import is_shortage, processes_per_row
from kinject.recipe import GuardsSection
from kinject.terminal import format_count, format_number
from kinject.train.loss import MeanLoss
from kinject.train.names import summarize_names, unwrapped_name

log = logging.getLogger(__name__)

_WINDOW = 64
"""Gradient norms in the running median."""
_SETTLED = 8
"""Norms needed before the median is used."""
_LOSSES = 16
"""Losses in a row that show a divergence: with fewer, batches of single short rows look like one.
"""
_LAST = 3
"""Losses at the end of a run whose median is compared with the first loss."""
_SPIKE = 10.0
_VANISHED = 1e-8
"""Gradient of a weight, by root mean square, below which AdamW moves it little: the usual epsilon
of its denominator."""
_FREE = ("lora_A", "lora_embedding_A")
"""Weights of an adapter that change nothing alone: they are multiplied by others, which begin at 0.
"""
_ISOLATION_TOLERANCE = 1e-3
_TRIED = 64
"""Tokens of the row on which TRL's head is compared with the model's."""
_HEAD_TOLERANCE = 0.03
"""Of log-probs: above the rounding of bfloat16, below what another head differs by."""


UNSTABLE = (
    "Lower trainer.learning_rate, or set trainer.max_grad_norm: 1.0; with fp16, use bf16. The "
    "model is not saved; the last complete checkpoint is kept."
)
"""The fix for numbers that are not finite."""


def react(reaction: str, message: str) -> list[str]:
    """Raise `TrainingError` for stop; log and return the warning for warn; return nothing for
    ignore."""
    if reaction == "stop":
        raise TrainingError(message)
    if reaction == "ignore":
        return []
    log.warning(message)
    return [message]


class GuardedTrainer(Protocol):
    """A trainer of a run, as far as its last checks know it."""

    model: PreTrainedModel
    args: TrainingArguments
    state: TrainerState
    guard: Guard
    losses: MeanLoss
    _tr_loss: torch.Tensor


class Guard(TrainerCallback):  # type: ignore[misc]
    """Counts updates made and skipped; checks the loss, the gradient norm and the learning rate.

    `updates` is the number of updates with a gradient that was finite and not zero, `skipped` that
    of updates left out because their gradient was not finite, the latest of them if `last_skipped`;
    `warnings` are the warnings so far, `norms` those of the running median, `weights` the result of
    `weight_sums` before the first step. Checkpoints hold its `state`.
    """

    def __init__(self, reactions: GuardsSection) -> None:
        self.reactions = reactions
        self.updates = self.skipped = 0
        self.last_skipped = False
        self.weights: dict[str, float] = {}
        self.warnings: list[str] = []
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._first_loss: float | None = None
        self._lowest_loss: float | None = None
        self._n_weights = 0
        self._settings = ""
        self._highest_rate = 0.0
        self._warned: set[str] = set()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel = None,
        **kwargs: Any,
    ) -> None:
        """Keep the sums and number of the weights; restore the highest rate of the steps before
        this run's checkpoint."""
        self.weights = weight_sums(model)
        self._n_weights = sum(
            models.size_of(weight) for weight in model.parameters() if weight.requires_grad
        )
        self._settings = (
            f"trainer.learning_rate (now {args.learning_rate:g}), raise trainer.warmup_steps (now "
            f"{args.warmup_steps:g}), or clip more: trainer.max_grad_norm (now "
            f"{args.max_grad_norm:g})"
        )
        self._highest_rate = max(
            (row.get("learning_rate", 0.0) for row in state.log_history), default=0.0
        )

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: AcceleratedOptimizer = None,
        **kwargs: Any,
    ) -> None:
        """Set accelerate's mark of a skipped update, by which Trainer leaves the schedule where it
        is."""
        # accelerate 1.15 sets it for a scaler alone, and not with a fused optimizer, which skips
        # within its own step
        optimizer._is_overflow = self.last_skipped

    def count(self, norm: float) -> bool:
        """Count an update by the norm of its gradient; return whether that is finite."""
        is_finite = math.isfinite(norm)
        # An update of zeros changes nothing; check_updates refuses a run of such updates alone.
        self.updates += is_finite and norm > 0
        self.skipped += not is_finite
        self.last_skipped = not is_finite
        return is_finite

    def may_update(self, norm: float, step: int, scale: float | None = None) -> bool:
        """Return whether to make the update of this (0-based) step: False if its gradient norm is
        not finite.

        A scaler (fp16, its `scale`) finds its scale by skipped updates, each at half the scale of
        the one before, so the recipe's limit does not apply to them. Raises `TrainingError` past
        that limit, or once the scale is below 1.
        """
        if self.count(norm):
            return True
        message = f"step {step + 1}: the gradient norm is {norm}"
        if scale is not None and scale < 1:
            raise TrainingError(
                f"{message} even with the loss scaled by {format_number(scale, 6)}; {self.skipped} "
                "updates were skipped. fp16 cannot hold this model's numbers: use bf16: true, or "
                "lower trainer.learning_rate. The last complete checkpoint is kept."
            )
        if scale is None and self.skipped > self.reactions.skipped_updates:
            raise TrainingError(
                f"{message} for the {self.skipped}. time; guards.skipped_updates allows "
                f"{self.reactions.skipped_updates}. Lower trainer.learning_rate or "
                "trainer.max_grad_norm; with fp16, use bf16. The last complete checkpoint is kept."
            )
        scaled = "" if scale is None else f" at loss scale {format_number(scale, 6)}"
        self._react("warn", f"{message}{scaled}; the update is skipped ({self.skipped} so far).")
        return False

    def check_progress(self, loss: float, norm: float, step: int) -> None:
        """Check the loss (nats a token) and the gradient norm of an update that was made, that of
        this (0-based) step.

        A norm that is not finite is unknown. Raises `TrainingError` for a fault whose reaction is
        stop.
        """
        if math.isfinite(norm):
            self._check_norm(norm, f"step {step + 1}: ")
        if math.isfinite(loss):
            self._check_loss(loss, f"step {step + 1}: ")

    def _check_norm(self, norm: float, prefix: str) -> None:
        """Check for a spike, 10 times the running median, and for 8 norms in a row that are almost
        0."""
        if len(self.norms) >= _SETTLED:
            median = statistics.median(self.norms)
            # With a median of 0 any norm would be a spike.
            if norm > _SPIKE * median > 0:
                self._react(
                    self.reactions.instability,
                    f"{prefix}the gradient norm is {format_number(norm)}, over 10 times its "
                    f"running median {format_number(median)}. Check the batch, lower "
                    "trainer.learning_rate, or set trainer.max_grad_norm.",
                )
        # Kept after the check, so that a spike does not raise its own median.
        self.norms.append(norm)
        highest = max(list(self.norms)[-_SETTLED:])
        if len(self.norms) >= _SETTLED and highest < _VANISHED * math.sqrt(self._n_weights):
            self._react_once(
                "gradient",
                self.reactions.instability,
                f"{prefix}the gradient vanishes: in {_SETTLED} updates its norm was at most "
                f"{highest:.2g}, for {self._n_weights:,} weights. With a loss near 0 the rows are "
                "memorised: train less. Else it has saturated: start again and lower "
                f"{self._settings}.",
            )

    def _check_loss(self, loss: float, prefix: str) -> None:
        """Check for 16 losses in a row above twice the lowest and 1 nat above it, by more than 4
        standard deviations.

        The lowest is a median of 16, since single batches may be easy, or in the first 64 updates
        the first loss.
        """
        self._losses.append(loss)
        if self._first_loss is None:
            self._first_loss = loss
        lowest = math.inf if self._lowest_loss is None else self._lowest_loss
        if self.updates <= _WINDOW:
            lowest = min(lowest, self._first_loss)
        if len(self._losses) < _LOSSES:
            return
        least, rise = min(self._losses), statistics.fmean(self._losses) - lowest
        if least > max(2 * lowest, lowest + 1) and rise > 4 * statistics.stdev(self._losses):
            self._react_once(
                "divergence",
                self.reactions.instability,
                f"{prefix}the loss diverges: in {_LOSSES} updates it was at least "
                f"{format_number(least)}, after a lowest of {format_number(lowest)}. Lower "
                f"{self._settings}. guards.instability: stop ends such a run here.",
            )
        median = statistics.median(self._losses)
        if self._lowest_loss is None or median < self._lowest_loss:
            self._lowest_loss = median

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the loss and the learning rate that were logged."""
        logs, prefix = logs or {}, f"step {state.global_step}: "
        if logs.get("loss") == 0.0:
            message = f"{prefix}the loss is exactly 0, so nothing is learned. Check the labels."
            self._react(self.reactions.nothing_learned, message)
        for name, value in logs.items():
            if name.endswith("loss") and not math.isfinite(value):
                self._react_once(
                    name, "warn", f"{prefix}{name} is {value}, which log.jsonl writes as null."
                )
        rate = logs.get("learning_rate")
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        # Schedules that decay are near 0 in the last steps, as in warm-up: no fault there.
        remaining = 1 - state.global_step / max(state.max_steps, 1)
        settled = state.global_step > args.get_warmup_steps(state.max_steps) and remaining > 0.05
        if rate is not None and settled and rate < 1e-4 * self._highest_rate:
            self._react_once(
                "rate",
                self.reactions.instability,
                f"{prefix}the learning rate is down to {rate:.2g} with {remaining:.0%} of the "
                "steps to go. Check trainer.lr_scheduler_type and lr_scheduler_kwargs.",
            )

    def ended_above(self) -> bool:
        """Return whether the last losses are far above the first, however short the run was; warn
        of that."""
        if self._first_loss is None:
            return False
        ended = statistics.median(list(self._losses)[-_LAST:])
        is_above = ended > max(2 * self._first_loss, self._first_loss + 1)
        if is_above:
            self._react_once(
                "end",
                "warn",
                f"the loss ended at {format_number(ended)}, far above "
                f"{format_number(self._first_loss)}, where it began: "
                f"the model is worse than before. Lower {self._settings}.",
            )
        return is_above

    def state(self) -> dict[str, Any]:
        """Return the counts, warnings and norms so far, for JSON."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "last_skipped": self.last_skipped,
            "weights": self.weights,
            "warnings": list(self.warnings),
            "norms": list(self.norms),
            "warned": sorted(self._warned),
            "losses": list(self._losses),
            "first_loss": self._first_loss,
            "lowest_loss": self._lowest_loss,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of an earlier process."""
        self.updates, self.skipped = state["updates"], state["skipped"]
        self.last_skipped = state["last_skipped"]
        self.weights, self._warned = state["weights"], set(state["warned"])
        # In place: early stopping and trackers hold this list.
        self.warnings[:] = state["warnings"]
        self.norms.extend(state["norms"])
        self._losses.extend(state["losses"])
        self._first_loss, self._lowest_loss = state["first_loss"], state["lowest_loss"]

    def _react_once(self, fault: str, reaction: str, message: str) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            self._react(reaction, message)

    def _react(self, reaction: str, message: str) -> None:
        self.warnings += react(reaction, message)


def check_start(
    reactions: GuardsSection,
    model: nn.Module,
    n_rows: int,
    config: SFTConfig,
    *,
    rounds_up: bool = False,
) -> list[str]:
    """Return the warnings that can be given before the first step; raises `TrainingError` for those
    whose reaction is stop.

    `n_rows` are the training rows of one epoch and `config` the SFTConfig; `rounds_up`: weights are
    rounded stochastically.
    """
    warnings: list[str] = []
    # Processes that share a row read it together.
    n_devices = config.world_size // processes_per_row()
    n_read = (
        config.max_steps * config.train_batch_size * config.gradient_accumulation_steps * n_devices
    )
    # A short run of plan or find-lr reads a part on purpose; it ignores instability as well.
    if 0 < n_read < n_rows and reactions.instability != "ignore":
        warnings += react(
            "warn",
            f"trainer.max_steps: {config.max_steps} reads {n_read:,} of "
            f"{format_count(n_rows, 'row')}; {1 - n_read / n_rows:.0%} of the corpus is never "
            f"seen. Set max_steps to {-(-n_rows * config.max_steps // n_read):,} for one epoch.",
        )
    lost = _fraction_rounded_away(model, config.learning_rate)
    if config.learning_rate == 0 or (lost > 0.5 and not rounds_up):
        warnings += react(
            reactions.instability,
            f"trainer.learning_rate: {config.learning_rate:.2g} is too small: {lost:.0%} of the "
            "weights round back to their old values. Set model.dtype: float32 (bf16 then speeds up "
            "the arithmetic), a higher rate, or in bfloat16 techniques.stochastic_rounding: true.",
        )
    return warnings


def _fraction_rounded_away(model: nn.Module, learning_rate: float) -> float:
    """Return the fraction of weights that a step of `learning_rate`, an AdamW update's usual size,
    does not move.

    A step below half of the distance to the next number, ``|w| * eps / 2``, rounds away. The first
    4,096 weights of each trained tensor are checked.
    """
    n_unmoved = n = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            sample = models.own_part(parameter).flatten()[:4096]
            # In float64, so that the sum is rounded once, to the weight's own dtype.
            moved = (sample.double() + learning_rate).to(parameter.dtype)
            n_unmoved += int((moved == sample).sum())
            n += int(torch.numel(sample))
    return n_unmoved / max(n, 1)


def weight_sums(model: nn.Module) -> dict[str, float]:
    """Return name -> sum of each weight that trains, in float64: this process's part."""
    sums = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # In float64: in float32 the sum of a large tensor hides the change of a few weights.
            sums[unwrapped_name(name)] = float(models.own_part(weight).sum(dtype=torch.float64))
    return sums


@contextlib.contextmanager
def compiler_faults() -> Iterator[None]:
    """Raise `TrainingError` where torch's compiler fails in the block: it is torch's fault, and the
    model trains without it."""
    try:
        yield
    except TorchDynamoException as error:
        # A full disk or memory is no matter of the compiler, and has its own message.
        if system_failure(error) or is_shortage(error):
            raise
        raise TrainingError(
            f"torch cannot compile this model ({type(error).__name__}: {one_line(error)}). Set "
            "trainer.torch_compile: false, and remove torch_compile_backend and torch_compile_mode."
        ) from error


def agree_on_fault(fault: str) -> None:
    """Raise `TrainingError` in all processes if one of them has a fault; each calls this."""
    # Together: a process that raised alone would leave the others waiting for it.
    first = next(filter(None, gather_object([fault])), "")
    if first:
        raise TrainingError(first)


def check_weights(trainer: GuardedTrainer) -> None:
    """Raise `TrainingError` in all processes if a weight of the model in training is not finite."""
    name, fault = models.not_finite(models.saved_tensors(trainer.model)), ""
    if name:
        step = trainer.state.global_step
        fault = f"step {step}: {name} is no longer finite (NaN or an infinity). {UNSTABLE}"
    agree_on_fault(fault)


def check_trained(trainer: GuardedTrainer) -> None:
    """Raise `TrainingError` in all processes unless training changed the model and its loss is
    finite.

    The weights are checked as they are saved.
    """
    check_updates(trainer)
    (unchanged, counted), fault = _unchanged_weights(trainer), ""
    if not trainer.losses.is_finite(trainer._tr_loss):
        fault = f"the loss is not finite at the end of the run. {UNSTABLE}"
    if not fault and unchanged == counted:
        fault = (
            "no weight differs from its start after "
            f"{format_count(trainer.guard.updates, 'update')}: trainer.learning_rate: "
            f"{trainer.args.learning_rate:.2g} over "
            f"{format_count(trainer.state.global_step, 'step')} of its schedule is 0, or so small "
            "that each change rounds away. Set a higher rate, or model.dtype: float32."
        )
    agree_on_fault(fault)
    if unchanged:
        trainer.guard.warnings += react(
            "warn",
            f"{len(unchanged)} of {format_count(len(counted), 'trained tensor')} never changed: "
            f"{', '.join(summarize_names(unchanged)[:3])}. They may get no gradient.",
        )


def check_updates(trainer: GuardedTrainer) -> None:
    """Raise `TrainingError` if no update was made that counts; the counts are those of all
    processes."""
    guard, n_steps = trainer.guard, trainer.state.global_step
    if not n_steps:
        raise TrainingError(
            "the run has no step, so nothing was trained. Check trainer.max_steps, "
            "num_train_epochs and gradient_accumulation_steps against the rows of the corpus."
        )
    if guard.skipped == n_steps:
        raise TrainingError(
            f"all {n_steps} updates were skipped, since their gradients were not finite. {UNSTABLE}"
        )
    if not guard.updates:
        raise TrainingError(
            f"the gradient was 0 in all {n_steps} updates, so nothing was learned. Check that rows "
            "of the corpus have tokens to learn, and which parameters train."
        )


def _unchanged_weights(trainer: GuardedTrainer) -> tuple[list[str], list[str]]:
    """Return the names of the trained tensors that no process changed its part of, and those of all
    counted."""
    sums = weight_sums(trainer.model)
    counted = [name for name in sums if not any(part in name for part in _FREE)] or list(sums)
    changed = gather_object(
        [name for name in counted if sums[name] != trainer.guard.weights.get(name)]
    )
    return sorted(set(counted) - set(changed), key=counted.index), counted


def check_isolation(model: PreTrainedModel, row: dict[str, list[int]]) -> None:
    """Raise `TrainingError` if a document in a packed row sees the one before it.

    The second document of `row` (columns input_ids and position_ids, at least two documents) is run
    packed and alone in float32; the logits must agree.
    """
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    end = [*starts, len(row["input_ids"])][2]
    ids = torch.tensor([row["input_ids"][:end]], device=model.device)
    positions = torch.tensor([row["position_ids"][:end]], device=model.device)
    second = slice(starts[1], None)
    packed = models.steady_logits(model, input_ids=ids, position_ids=positions)[:, second]
    alone = models.steady_logits(model, input_ids=ids[:, second], position_ids=positions[:, second])
    difference = float((packed - alone).abs().max() / alone.abs().max().clamp(min=1.0))
    tolerance = _ISOLATION_TOLERANCE
    if model.dtype != torch.float32:
        tolerance *= 30
    if difference > tolerance:
        raise TrainingError(
            "packed documents see each other with this model's attention (logits differ by "
            f"{difference:.2g}). Set trainer.packing: false, or packing_strategy: wrapped to "
            "accept it."
        )


def fused_head_misfit(model: PreTrainedModel | PeftModel, row: dict[str, list[int]]) -> str:
    """Return why TRL's head, which holds no logits, does not give those of the model on the
    beginning of `row`; "" if it does."""
    difference = _fused_head_error(model, row)
    if difference <= _HEAD_TOLERANCE:
        return ""
    return f"log-probs differ by {difference:.2g}"


def check_head_of_answers(model: PreTrainedModel | PeftModel, row: dict[str, list[int]]) -> None:
    """Raise `RecipeError` if answers that are drawn would be learned by the logits of another
    model: TRL's GRPO has no loss but that of its head."""
    reason = fused_head_misfit(model, row)
    if reason:
        message = f"found recall, whose head by TRL does not give this model's logits ({reason})."
        raise fault("method", f"{message} Take another model, or sft.")


def _fused_head_error(model: PreTrainedModel, row: dict[str, list[int]]) -> float:
    """Return by how much the log-probs of TRL's head, which holds no logits, differ from those of
    the model on the beginning of `row`: on average, as a part of them, or in nats below 1."""
    ids = torch.tensor([row["input_ids"][:_TRIED]], device=model.device)
    positions = torch.tensor([row["position_ids"][:_TRIED]], device=model.device)
    logits = models.steady_logits(model, input_ids=ids, position_ids=positions)[:, :-1]
    wanted = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[:, :, 0]
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids}
    output = models.steady_output(model, **inputs, fused_lm_head=True)
    # Not of the largest: rounding to bfloat16 is most of the log-prob of a token known by heart.
    return float((output.log_probs - wanted).abs().mean() / wanted.abs().mean().clamp(min=1.0))
