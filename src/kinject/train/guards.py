"""Checks for faults of training that raise no error; the recipe's `guards` set the reaction to each.

`check_trained` decides whether a run is finished: a run that changed nothing, or whose numbers are not finite, is not.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from kinject import models
from kinject.errors import TrainingError
from kinject.process import processes_per_row, single_process_notes
from kinject.recipe import GuardsSection
from kinject.train.updates.layers import summarize_names

log = logging.getLogger(__name__)

_WINDOW = 64
"""Gradient norms in the running median."""
_SETTLED = 8
"""Norms needed before the median is used."""
_LOSSES = 16
"""Losses in a row that show a divergence: with fewer, batches of single short rows look like one."""
_LAST = 3
"""Losses at the end of a run whose median is compared with the first loss."""
_SPIKE = 10.0
_VANISHED = 1e-8
"""Gradient of a weight, by root mean square, below which AdamW moves it little: the usual epsilon of its denominator."""
_ROW = 64
"""Tokens of the row on which the model's output is checked."""
_FREE = ("lora_A", "lora_embedding_A")
"""Weights of an adapter that change nothing alone: they are multiplied by others, which begin at 0."""


UNSTABLE = (
    "Lower trainer.learning_rate, or set trainer.max_grad_norm: 1.0; with fp16, use bf16. The model is not saved; the last "
    "complete checkpoint is kept."
)
"""The fix for numbers that are not finite."""


def react(reaction: str, message: str) -> list[str]:
    """Raise `TrainingError` for stop; log and return the warning for warn; return nothing for ignore."""
    if reaction == "stop":
        raise TrainingError(message)
    if reaction == "ignore":
        return []
    log.warning(message)
    return [message]


class Guard(TrainerCallback):  # type: ignore[misc]
    """Counts updates made and skipped; checks the loss, the gradient norm and the learning rate.

    `updates` is the number of updates with a gradient that was finite and not zero, `skipped` that of updates left out
    because their gradient was not finite, `skipped_last` how many of the latest were; `warnings` are the warnings so far.
    `norms` are those of the running median. `weights` and `output` are the results of `weight_sums` and `sample_output`
    before the first step. Checkpoints hold its `state`.
    """

    def __init__(self, reactions: GuardsSection) -> None:
        self.reactions = reactions
        self.updates = self.skipped = self.skipped_last = 0
        self.weights: dict[str, int] = {}
        self.output = torch.empty(0)
        self.warnings: list[str] = []
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._first_loss: float | None = None
        self._lowest_loss: float | None = None
        self._n_weights = 0
        self._settings = ""
        self._highest_rate = 0.0
        self._warned: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep the sums and number of the weights; restore the highest rate of the steps before this run's checkpoint."""
        self.weights = weight_sums(model)
        self._n_weights = sum(models.size_of(weight) for weight in model.parameters() if weight.requires_grad)
        self._settings = (
            f"trainer.learning_rate (now {args.learning_rate:g}), raise trainer.warmup_steps (now {args.warmup_steps:g}), or "
            f"clip more: trainer.max_grad_norm (now {args.max_grad_norm:g})"
        )
        self._highest_rate = max((row.get("learning_rate", 0.0) for row in state.log_history), default=0.0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Set accelerate's mark of a skipped update, by which Trainer leaves the schedule where it is.

        accelerate sets it for a scaler alone, and not with a fused optimizer, which skips within its own step.
        """
        optimizer._is_overflow = self.skipped_last > 0

    def keep_output(self, model: Any, row: Mapping[str, Any]) -> bool:
        """Keep the model's output on a row before training; return whether it is finite."""
        self.output = sample_output(model, row)
        return bool(self.output.isfinite().all())

    def count(self, norm: float) -> bool:
        """Count an update by the norm of its gradient; return whether that is finite."""
        is_finite = math.isfinite(norm)
        self.updates += is_finite and norm > 0
        self.skipped += not is_finite
        self.skipped_last = 0 if is_finite else self.skipped_last + 1
        return is_finite

    def may_update(self, norm: float, step: int) -> bool:
        """Return whether to make the update of this (0-based) step: False if its gradient norm is not finite.

        Raises `TrainingError` if more updates would be skipped than the recipe allows.
        """
        if self.count(norm):
            return True
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

    def check_scaler(self, norm: float, scale: float, step: int) -> bool:
        """Return whether an fp16 scaler makes the update of this (0-based) step: not if its norm is not finite.

        A scaler finds its scale by such updates, each at half the scale of the one before, so the recipe's limit does not
        apply to them. Raises `TrainingError` once the scale is below 1: then the loss itself is not finite.
        """
        if self.count(norm):
            return True
        if scale < 1:
            raise TrainingError(
                f"step {step + 1}: the gradient norm is {norm} even with the loss scaled by {scale:g}; {self.skipped} updates "
                "were left out. fp16 cannot hold this model's numbers: use bf16: true, or lower trainer.learning_rate. "
                "The last complete checkpoint is kept."
            )
        self._react("warn", f"step {step + 1}: fp16 overflow at loss scale {scale:g}; the update is left out.")
        return False

    def check_progress(self, loss: float, norm: float, step: int) -> None:
        """Check the loss (nats a token) and the gradient norm of an update that was made, that of this (0-based) step.

        A norm that is not finite is unknown. Raises `TrainingError` for a fault whose reaction is stop.
        """
        if math.isfinite(norm):
            self._check_norm(norm, f"step {step + 1}: ")
        if math.isfinite(loss):
            self._check_loss(loss, f"step {step + 1}: ")

    def _check_norm(self, norm: float, prefix: str) -> None:
        """Check for a spike, 10 times the running median, and for 8 norms in a row that are almost 0."""
        if len(self.norms) >= _SETTLED:
            median = statistics.median(self.norms)
            if norm > _SPIKE * median > 0:
                self._react(
                    self.reactions.norm_spike,
                    f"{prefix}the gradient norm is {norm:.3g}, over 10 times its running median {median:.3g}. "
                    "Check the batch, lower trainer.learning_rate, or set trainer.max_grad_norm.",
                )
        self.norms.append(norm)
        highest = max(list(self.norms)[-_SETTLED:])
        if len(self.norms) >= _SETTLED and highest < _VANISHED * math.sqrt(self._n_weights):
            self._react_once(
                "gradient", self.reactions.vanishing_gradient,
                f"{prefix}the gradient vanishes: in {_SETTLED} updates its norm was at most {highest:.2g}, for "
                f"{self._n_weights:,} weights. With a loss near 0 the rows are memorised: train less. Else it has "
                f"saturated: start again and lower {self._settings}.",
            )  # fmt: skip

    def _check_loss(self, loss: float, prefix: str) -> None:
        """Check for 16 losses in a row above twice the lowest and 1 nat above it, by more than 4 standard deviations.

        The lowest is a median of 16, since single batches may be easy, or in the first 64 updates the first loss.
        """
        self._losses.append(loss)
        self._first_loss = loss if self._first_loss is None else self._first_loss
        lowest = math.inf if self._lowest_loss is None else self._lowest_loss
        lowest = min(lowest, self._first_loss if self.updates <= _WINDOW else math.inf)
        if len(self._losses) < _LOSSES:
            return
        least, rise = min(self._losses), statistics.fmean(self._losses) - lowest
        if least > max(2 * lowest, lowest + 1) and rise > 4 * statistics.stdev(self._losses):
            self._react_once(
                "divergence", self.reactions.divergence,
                f"{prefix}the loss diverges: in {_LOSSES} updates it was at least {least:.3g}, after a lowest of {lowest:.3g}. "
                f"Lower {self._settings}. guards.divergence: stop ends such a run here.",
            )  # fmt: skip
        median = statistics.median(self._losses)
        self._lowest_loss = median if self._lowest_loss is None else min(self._lowest_loss, median)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Check the loss and the learning rate that were logged."""
        logs = logs or {}
        if logs.get("loss") == 0.0:
            self._react(
                self.reactions.nothing_learned,
                f"step {state.global_step}: the loss is exactly 0, so nothing is learned. Check the labels.",
            )
        for name, value in logs.items():
            if name.endswith("loss") and not math.isfinite(value):
                message = f"step {state.global_step}: {name} is {value}, which log.jsonl writes as null."
                self._react_once(name, "warn", message)
        rate = logs.get("learning_rate")
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        remaining = 1 - state.global_step / max(state.max_steps, 1)
        settled = state.global_step > args.get_warmup_steps(state.max_steps) and remaining > 0.05
        if rate is not None and settled and rate < 1e-4 * self._highest_rate:
            self._react_once(
                "rate",
                self.reactions.vanishing_rate,
                f"step {state.global_step}: the learning rate is down to {rate:.2g} with {remaining:.0%} of the steps to go. "
                "Check trainer.lr_scheduler_type and lr_scheduler_kwargs.",
            )

    def ended_above(self) -> bool:
        """Return whether the last losses are far above the first, however short the run was; warn of that."""
        if self._first_loss is None:
            return False
        ended = statistics.median(list(self._losses)[-_LAST:])
        is_above = ended > max(2 * self._first_loss, self._first_loss + 1)
        if is_above:
            self._react_once(
                "end", "warn", f"the loss ended at {ended:.3g}, far above {self._first_loss:.3g}, where it began: the model is "
                f"worse than before. Lower {self._settings}.",
            )  # fmt: skip
        return is_above

    def state(self) -> dict[str, Any]:
        """Return the counts, warnings and norms so far, for JSON."""
        return {
            "updates": self.updates, "skipped": self.skipped, "skipped_last": self.skipped_last, "weights": self.weights,
            "warnings": list(self.warnings), "norms": list(self.norms), "warned": sorted(self._warned),
            "losses": list(self._losses), "first_loss": self._first_loss, "lowest_loss": self._lowest_loss,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of an earlier process."""
        self.updates, self.skipped, self.skipped_last = state["updates"], state["skipped"], state["skipped_last"]
        self.weights, self._warned = state["weights"], set(state["warned"])
        self.warnings[:] = state["warnings"]
        self.norms.extend(state["norms"])
        self._losses.extend(state["losses"])
        self._first_loss, self._lowest_loss = state["first_loss"], state["lowest_loss"]

    def warn(self, message: str) -> None:
        """Log a warning and keep it for the manifest."""
        self._react("warn", message)

    def _react_once(self, fault: str, reaction: str, message: str) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            self._react(reaction, message)

    def _react(self, reaction: str, message: str) -> None:
        self.warnings += react(reaction, message)


def check_start(
    reactions: GuardsSection, tokenizer: Any, model: Any, n_rows: int, config: Any, *, rounds_up: bool = False
) -> list[str]:
    """Return the warnings that can be given before the first step; raises `TrainingError` for those whose reaction is stop.

    `n_rows` are the training rows of one epoch and `config` the SFTConfig; `rounds_up`: weights are rounded stochastically.
    """
    warnings: list[str] = []
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        warnings += react(
            "warn",
            f"the tokenizer pads with its end-of-text token {tokenizer.eos_token!r}. kinject still learns where texts "
            "end, but tools that mask padding by its id do not. Give the tokenizer a pad token of its own.",
        )
    for note in single_process_notes():
        warnings += react("warn", f"{note}. The global batch is that of this process.")
    n_devices = config.world_size // processes_per_row()
    n_read = config.max_steps * config.train_batch_size * config.gradient_accumulation_steps * n_devices
    if 0 < n_read < n_rows:
        warnings += react(
            reactions.unread_corpus,
            f"trainer.max_steps: {config.max_steps} reads {n_read:,} of {n_rows:,} rows; {1 - n_read / n_rows:.0%} of the "
            f"corpus is never seen. Set max_steps to {-(-n_rows * config.max_steps // n_read):,} for one epoch.",
        )
    lost = _fraction_rounded_away(model, config.learning_rate)
    if config.learning_rate == 0 or (lost > 0.5 and not rounds_up):
        warnings += react(
            reactions.vanishing_rate,
            f"trainer.learning_rate: {config.learning_rate:.2g} is too small: in {_dtype(model)}, {lost:.0%} of the weights "
            "round back to their old values. Set model.dtype: float32 (bf16 then speeds up the arithmetic), a higher rate, or in "
            "bfloat16 techniques.stochastic_rounding: true.",
        )
    return warnings


def _dtype(model: Any) -> str:
    return str(next(p.dtype for p in model.parameters() if p.requires_grad)).removeprefix("torch.")


def _fraction_rounded_away(model: Any, learning_rate: float) -> float:
    """Return the fraction of weights that a step of `learning_rate`, an AdamW update's usual size, does not move.

    A step below half of the distance to the next number, ``|w| * eps / 2``, rounds away. The first 4,096 weights of
    each trained tensor are checked.
    """
    n_unmoved = n = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            sample = models.own_part(parameter).flatten()[:4096]
            moved = (sample.double() + learning_rate).to(parameter.dtype)
            n_unmoved += int((moved == sample).sum())
            n += int(torch.numel(sample))
    return n_unmoved / max(n, 1)


@torch.no_grad()
def sample_output(model: Any, row: Mapping[str, Any]) -> torch.Tensor:
    """Return the logsumexp of the model's logits at each of the first tokens of a training row: [tokens], float32.

    It is empty for a model that is not runnable, such as a sharded one before training begins.
    """
    if not models.is_runnable(model):
        return torch.empty(0)
    device = next(iter(model.parameters())).device
    ids, positions = (torch.tensor([row[key][:_ROW]], device=device) for key in ("input_ids", "position_ids"))
    was_training = model.training
    model.eval()
    logits: torch.Tensor = getattr(model, "_orig_mod", model)(
        input_ids=ids, position_ids=positions, use_cache=False
    ).logits
    model.train(was_training)
    return logits[0].float().logsumexp(-1).cpu()


def weight_sums(model: Any) -> dict[str, int]:
    """Return name -> sum of the bytes of each weight that trains, eight at a time, modulo 2^64: this process's part."""
    return {
        name.removeprefix("module.").replace("_orig_mod.", ""): _sum_of_bytes(weight)
        for name, weight in model.named_parameters() if weight.requires_grad
    }  # fmt: skip


def _sum_of_bytes(weight: torch.Tensor) -> int:
    values = models.own_part(weight).flatten()
    values = values.clone() if values.storage_offset() * values.element_size() % 8 else values
    data = values.view(torch.uint8)
    n = len(data) // 8 * 8
    return int(data[:n].view(torch.int64).sum()) + int(data[n:].sum())


def agree_on_fault(trainer: Any, fault: str) -> None:
    """Raise `TrainingError` in all processes if one of them has a fault; each calls this."""
    faults = [fault]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        faults = gather_object(faults)
    first = next(filter(None, faults), "")
    if first:
        raise TrainingError(first)


def check_weights(trainer: Any) -> None:
    """Raise `TrainingError` in all processes if a weight of the model in training is not finite."""
    name = models.not_finite(models.saved_tensors(trainer.model))
    step = trainer.state.global_step
    agree_on_fault(trainer, name and f"step {step}: {name} is no longer finite (NaN or an infinity). {UNSTABLE}")


def check_trained(trainer: Any) -> None:
    """Raise `TrainingError` in all processes unless training changed the model, and its loss and output are finite.

    The weights are checked as they are saved.
    """
    unchanged = _unchanged_weights(trainer)
    agree_on_fault(trainer, update_fault(trainer) or _result_fault(trainer, *unchanged))
    output, before = sample_output(trainer.model_wrapped, trainer.train_dataset[0]), trainer.guard.output
    fault = ""
    if not bool(output.isfinite().all()):
        name = models.not_finite(models.saved_tensors(trainer.model)) or "the output on the first row of the corpus"
        fault = f"{name} is not finite after training. {UNSTABLE}"
    elif (
        output.numel()
        and torch.equal(output, before)
        and not any("trainable_tokens" in n for n in trainer.guard.weights)
    ):
        fault = f"the model's output on the first row of the corpus is the same as before training. {_small(trainer)}"
    agree_on_fault(trainer, fault)


def _small(trainer: Any) -> str:
    return (
        f"trainer.learning_rate: {trainer.args.learning_rate:.2g} over {trainer.state.global_step} steps of its schedule is 0, "
        f"or too small for {_dtype(trainer.model)} (each change rounds away). Set a higher rate, or model.dtype: float32."
    )


def update_fault(trainer: Any) -> str:
    """Return why no update counts; "" if one was made, and the last was not skipped."""
    guard, n_steps = trainer.guard, trainer.state.global_step
    if not n_steps:
        return (
            "the run has no step, so nothing was trained. Check trainer.max_steps, num_train_epochs and "
            "gradient_accumulation_steps against the rows of the corpus."
        )
    if guard.skipped == n_steps:
        return f"all {n_steps} updates were skipped, since their gradients were not finite. {UNSTABLE}"
    if not guard.updates:
        return (
            f"the gradient was 0 in all {n_steps} updates, so nothing was learned. Check that rows of the corpus "
            f"have tokens to learn, and which parameters train."
        )
    most = 0 if trainer.accelerator.scaler is None else 1  # a scaler tries a higher scale now and then
    if guard.skipped_last > most:
        return (
            f"the last {guard.skipped_last} of {n_steps} updates were skipped, since their gradients were not finite. "
            f"{UNSTABLE}"
        )
    return ""


def _unchanged_weights(trainer: Any) -> tuple[list[str], list[str]]:
    """Return the names of the trained tensors that no process changed its part of, and those of all counted."""
    sums = weight_sums(trainer.model)
    counted = [name for name in sums if not any(part in name for part in _FREE)] or list(sums)
    changed = [name for name in counted if sums[name] != trainer.guard.weights.get(name)]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        changed = gather_object(changed)
    return sorted(set(counted) - set(changed), key=counted.index), counted


def _result_fault(trainer: Any, unchanged: list[str], counted: list[str]) -> str:
    guard, args = trainer.guard, trainer.args
    if not trainer.losses.is_finite(trainer._tr_loss):
        return f"the loss is not finite at the end of the run. {UNSTABLE}"
    if unchanged == counted:
        return f"no weight differs from its start after {guard.updates} updates. {_small(trainer)}"
    if unchanged:
        guard.warn(
            f"{len(unchanged)} of {len(counted)} trained tensors never changed: "
            f"{', '.join(summarize_names(unchanged)[:3])}. They may get no gradient."
        )
    state = getattr(trainer.optimizer, "state", {})
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    name = models.not_finite(
        (f"{key} of {names.get(id(weight), 'a weight')}", getattr(value, "scale", value))  # torchao's, of each block
        for weight, values in state.items() for key, value in values.items() if isinstance(value, torch.Tensor)
    )  # fmt: skip
    if name:
        return f"the optimizer's {name} is not finite, so it no longer moves that weight. {UNSTABLE}"
    metric = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
    evaluated = any(metric in row and row["step"] > 0 for row in trainer.state.log_history)
    best = trainer.state.best_metric
    if args.load_best_model_at_end and evaluated and (best is None or not math.isfinite(best)):
        return (
            f"no evaluation has a finite {metric}, so no checkpoint is the best (trainer.load_best_model_at_end). Check the "
            "validation corpus and the probes, or remove the line."
        )
    return ""
