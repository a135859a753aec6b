"""Learning-rate schedules: transformers' and torch's own, and some that neither has; the planned
curve of a recipe.

The rate of update ``i`` (from 0) is ``learning_rate * f(i)``; warm-up runs from 0 in a straight
line. docs/schedules.md gives every formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.optimization import get_scheduler, get_wsd_schedule

from kinject.errors import TrainingError
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, TORCH_SCHEDULES


@dataclass(frozen=True)
class Schedule:
    """A schedule as a recipe names it.

    `warmup` are steps, or a fraction of all steps if below 1; `width` is the model's hidden size
    (only noam uses it); `higher_is_better` is about the metric of reduce_lr_on_plateau and greedy;
    `steps_per_epoch` are updates (only step_decay by epochs uses them).
    """

    name: str = "linear"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    warmup: float = 0
    width: int | None = None
    higher_is_better: bool = False
    steps_per_epoch: int = 1

    def warmup_steps(self, n_steps: int) -> int:
        """Return the steps of warm-up in a run of `n_steps`, a fraction rounded up as in
        transformers."""
        if self.warmup < 1:
            return math.ceil(n_steps * self.warmup)
        return int(self.warmup)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, n_steps: int) -> Any:
        """Return the scheduler (torch.optim.lr_scheduler.LRScheduler) that drives `optimizer` for
        `n_steps` updates.

        Raises `TrainingError` if the schedule does not fit into so few steps.
        """
        warmup, kwargs = self.warmup_steps(n_steps), dict(self.kwargs)
        # transformers' polynomial divides by the steps that are left, which may be 0.
        if (
            self.name in ("polynomial", "one_cycle", "warmup_stable_decay", "flat_then_cosine")
            and warmup >= n_steps
        ):
            raise TrainingError(
                f"trainer.warmup_steps: {warmup} steps of warm-up leave none of {n_steps} to "
                f"lr_scheduler_type: {self.name}. Lower it, or give it as a fraction (0.1)."
            )
        match self.name:
            case "step_decay" | "cosine_with_restarts" | "noam":
                return LambdaLR(optimizer, self._factor(warmup, n_steps))
            case "flat_then_cosine":
                n_decay = round((n_steps - warmup) * (1 - kwargs.get("flat_fraction", 0.75)))
                floor = kwargs.get("min_lr_ratio", 0.0)
                return get_wsd_schedule(
                    optimizer, warmup, n_decay, n_steps, decay_type="cosine", min_lr_ratio=floor
                )
            case "one_cycle":
                if warmup:  # torch's warm-up ends at update pct_start * n_steps - 1
                    kwargs["pct_start"] = (warmup + 1) / n_steps
                peaks = [group["lr"] for group in optimizer.param_groups]
                # With cycle_momentum torch replaces AdamW's beta1.
                return OneCycleLR(
                    optimizer, peaks, total_steps=n_steps, cycle_momentum=False, **kwargs
                )
            case name if name in TORCH_SCHEDULES:
                kind = getattr(torch.optim.lr_scheduler, TORCH_SCHEDULES[name])
                if not warmup:
                    return kind(optimizer, **kwargs)
                ramp = LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
                return SequentialLR(optimizer, [ramp, kind(optimizer, **kwargs)], [warmup])
            case "reduce_lr_on_plateau":
                return ReduceLROnPlateau(
                    optimizer, mode="max" if self.higher_is_better else "min", **kwargs
                )
            case "greedy":
                kwargs["mode"] = "max" if self.higher_is_better else "min"
            case "warmup_stable_decay":
                kwargs["num_decay_steps"] = self._decay_steps(n_steps, warmup)
        return get_scheduler(self.name, optimizer, warmup, n_steps, kwargs)

    def _factor(self, warmup: int, n_steps: int) -> Callable[[int], float]:
        """Return the factor of each update of a schedule that neither library has."""
        kwargs = self.kwargs
        if self.name == "noam":  # 1706.03762, section 5.3; updates are counted from 1
            scale = (kwargs.get("d_model") or self.width or 0) ** -0.5
            return lambda step: float(scale * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5))
        if self.name == "step_decay":
            epochs, gamma = kwargs.get("step_epochs"), kwargs.get("gamma", 0.1)
            if epochs is None:
                after = _stairs(warmup, kwargs["step_size"], gamma)
            else:  # epochs are counted from the first update, warm-up included
                after = _stairs(0, epochs * self.steps_per_epoch, gamma)
        else:
            n_cycles, floor = kwargs.get("num_cycles", 1), kwargs.get("min_lr_ratio", 0.0)
            after = _cosines(warmup, n_steps, n_cycles, floor)
        if not warmup:
            return after
        return lambda step: after(step) * min(1.0, step / warmup)

    def _decay_steps(self, n_steps: int, warmup: int) -> int:
        requested = self.kwargs["num_decay_steps"]
        n_decay = int(requested) if requested >= 1 else math.ceil(n_steps * requested)
        if warmup + n_decay > n_steps:
            raise TrainingError(
                f"trainer.lr_scheduler_kwargs.num_decay_steps: {warmup} steps of warm-up and "
                f"{n_decay} of decay are more than the run's {n_steps}. Lower one, or give it as a "
                "fraction (0.2)."
            )
        return n_decay


def _stairs(start: int, size: float, gamma: float) -> Callable[[int], float]:
    """Return `gamma` to the power of the times that `size` updates have passed since `start`."""
    # 1e-9: a size of epochs may be a little too large, as 0.1 * 30 is more than 3.
    return lambda step: float(gamma ** max(0, math.floor((step - start) / size + 1e-9)))


def _cosines(warmup: int, n_steps: int, n_cycles: int, floor: float) -> Callable[[int], float]:
    """Return `n_cycles` half cosines from 1 to `floor` after the warm-up; transformers' own end at
    0."""

    def factor(step: int) -> float:
        progress = max(0, step - warmup) / max(1, n_steps - warmup)
        if progress >= 1:  # a full number of cycles would begin another one
            return floor
        cosine = (1 + math.cos(math.pi * (n_cycles * progress % 1))) / 2
        return floor + (1 - floor) * cosine

    return factor


def leave_warmup_to_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Take the warm-up of a new schedule-free optimizer away: transformers gives the same warm-up
    to the schedule."""
    settings = getattr(optimizer, "defaults", {})  # DeepSpeed's placeholder has none
    if {"train_mode", "warmup_steps"} <= settings.keys():
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0


def schedule_of(args: TrainingArguments, model: PreTrainedModel, steps_per_epoch: int) -> Schedule:
    """Return the schedule that SFTConfig `args` name, for `model` and epochs of `steps_per_epoch`
    updates."""
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    higher_is_better = bool(args.greater_is_better)
    return Schedule(
        name,
        args.lr_scheduler_kwargs or {},
        args.warmup_steps,
        width,
        higher_is_better,
        steps_per_epoch,
    )


def planned_curve(
    trainer: Mapping[str, Any], config: PretrainedConfig, n_steps: int, steps_per_epoch: int
) -> list[float]:
    """Return the learning rate of each of the `n_steps` updates of a recipe, for a model of
    `config`, without training.

    They are the rates of the topmost layer if `techniques.layerwise_lr_decay` lowers those below. A
    schedule that follows a metric (reduce_lr_on_plateau, greedy) is drawn as if every evaluation
    were better than the last. Raises `TrainingError` if the schedule does not fit into so few
    steps.
    """
    from trl import SFTConfig

    rate = float(
        trainer.get("learning_rate", SFTConfig.__dataclass_fields__["learning_rate"].default)
    )
    name = trainer.get("lr_scheduler_type", "linear")
    kwargs = trainer.get("lr_scheduler_kwargs") or {}
    width = getattr(config.get_text_config(), "hidden_size", None)
    schedule = Schedule(
        name, kwargs, trainer.get("warmup_steps", 0), width, steps_per_epoch=steps_per_epoch
    )
    weight = torch.nn.Parameter(torch.zeros(()))
    weight.grad = torch.zeros(())
    optimizer = torch.optim.SGD([weight], lr=rate)
    scheduler = schedule.make_scheduler(optimizer, n_steps)
    rates = []
    for _ in range(n_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if name not in ADAPTIVE_SCHEDULES:
            scheduler.step()
    return rates
