"""Learning-rate schedules: transformers' and torch's own, and some that neither has; the planned curve of a recipe.

The rate of update ``i`` (from 0) is ``learning_rate * f(i)``; warm-up runs from 0 in a straight line. docs/schedules.md
gives every formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from transformers import TrainerCallback
from transformers.optimization import get_scheduler, get_wsd_schedule

from kinject.errors import TrainingError
from kinject.models import load_config
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, TORCH_SCHEDULES

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe


@dataclass(frozen=True)
class Schedule:
    """A schedule as a recipe names it.

    `warmup` are steps, or a fraction of all steps if below 1; `width` is the model's hidden size (only noam uses it);
    `higher_is_better` is about the metric of reduce_lr_on_plateau and greedy; `steps_per_epoch` are updates (only
    step_decay by epochs uses them).
    """

    name: str = "linear"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    warmup: float = 0
    width: int | None = None
    higher_is_better: bool = False
    steps_per_epoch: int = 1

    def warmup_steps(self, n_steps: int) -> int:
        """Return the steps of warm-up in a run of `n_steps`, a fraction rounded up as in transformers."""
        return int(self.warmup) if self.warmup >= 1 else math.ceil(n_steps * self.warmup)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, n_steps: int) -> Any:
        """Return the scheduler (torch.optim.lr_scheduler.LRScheduler) that drives `optimizer` for `n_steps` updates.

        Raises `TrainingError` if the schedule does not fit into so few steps.
        """
        warmup, kwargs = self.warmup_steps(n_steps), dict(self.kwargs)
        if self.name in ("polynomial", "one_cycle", "warmup_stable_decay", "flat_then_cosine") and warmup >= n_steps:
            raise TrainingError(
                f"trainer.warmup_steps: {warmup} steps of warm-up leave none of {n_steps} to lr_scheduler_type: "
                f"{self.name}. Lower it, or give it as a fraction (0.1)."
            )
        if self.name in TORCH_SCHEDULES:
            return self._of_torch(optimizer, n_steps, warmup)
        if self.name == "step_decay":
            epochs = kwargs.get("step_epochs")
            start, size = (warmup, kwargs["step_size"]) if epochs is None else (0, epochs * self.steps_per_epoch)
            return LambdaLR(optimizer, StepDecay(warmup, start, size, kwargs.get("gamma", 0.1)))
        if self.name == "cosine_with_restarts":
            cycles, floor = kwargs.get("num_cycles", 1), kwargs.get("min_lr_ratio", 0.0)
            return LambdaLR(optimizer, CosineRestarts(warmup, n_steps, cycles, floor))
        if self.name == "noam":
            return LambdaLR(optimizer, Noam(kwargs.get("d_model") or self.width or 0, warmup))
        if self.name == "flat_then_cosine":
            n_decay = round((n_steps - warmup) * (1 - kwargs.get("flat_fraction", 0.75)))
            floor = kwargs.get("min_lr_ratio", 0.0)
            return get_wsd_schedule(optimizer, warmup, n_decay, n_steps, decay_type="cosine", min_lr_ratio=floor)
        if self.name == "reduce_lr_on_plateau":
            return WarmPlateau(optimizer, warmup, mode="max" if self.higher_is_better else "min", **kwargs)
        if self.name == "greedy":
            kwargs["mode"] = "max" if self.higher_is_better else "min"
        if self.name == "warmup_stable_decay":
            kwargs["num_decay_steps"] = self._decay_steps(n_steps, warmup)
        return get_scheduler(self.name, optimizer, warmup, n_steps, kwargs)

    def _decay_steps(self, n_steps: int, warmup: int) -> int:
        requested = self.kwargs["num_decay_steps"]
        n_decay = int(requested) if requested >= 1 else math.ceil(n_steps * requested)
        if warmup + n_decay > n_steps:
            raise TrainingError(
                f"trainer.lr_scheduler_kwargs.num_decay_steps: {warmup} steps of warm-up and {n_decay} of decay are more "
                f"than the run's {n_steps}. Lower one, or give it as a fraction (0.2)."
            )
        return n_decay

    def _of_torch(self, optimizer: torch.optim.Optimizer, n_steps: int, warmup: int) -> Any:
        if self.name == "one_cycle":
            options = dict(self.kwargs)
            if warmup:  # torch's warm-up ends at update pct_start * n_steps - 1
                options["pct_start"] = (warmup + 1) / n_steps
            peaks = [group["lr"] for group in optimizer.param_groups]
            return OneCycleLR(optimizer, peaks, total_steps=n_steps, cycle_momentum=False, **options)
        if not warmup:
            return _torch_class(self.name)(optimizer, **self.kwargs)
        ramp = LambdaLR(optimizer, LinearRamp(warmup))
        return SequentialLR(optimizer, [ramp, _torch_class(self.name)(optimizer, **self.kwargs)], [warmup])


def _torch_class(name: str) -> Any:
    return getattr(torch.optim.lr_scheduler, TORCH_SCHEDULES[name])


@dataclass
class LinearRamp:
    """A straight line from 0 to 1 in `warmup` steps."""

    warmup: int

    def __call__(self, step: int) -> float:
        """Return the factor of update `step` (from 0)."""
        return min(1.0, step / self.warmup)


@dataclass
class StepDecay:
    """After a straight warm-up, `gamma` to the power of the times that `size` updates have passed since `start`."""

    warmup: int
    start: int
    size: float
    gamma: float

    def __call__(self, step: int) -> float:
        """Return the factor of update `step` (from 0)."""
        ramp = min(1.0, step / self.warmup) if self.warmup else 1.0
        return float(ramp * self.gamma ** max(0, math.floor((step - self.start) / self.size + 1e-9)))


@dataclass
class CosineRestarts:
    """After a straight warm-up, `n_cycles` half cosines from 1 to `floor`; transformers' own end at 0."""

    warmup: int
    n_steps: int
    n_cycles: int
    floor: float

    def __call__(self, step: int) -> float:
        """Return the factor of update `step` (from 0)."""
        if step < self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / max(1, self.n_steps - self.warmup)
        cosine = 0.0 if progress >= 1 else (1 + math.cos(math.pi * (self.n_cycles * progress % 1))) / 2
        return self.floor + (1 - self.floor) * cosine


@dataclass
class Noam:
    """Inverse square root with the original transformer's scale by width (1706.03762, section 5.3).

    ``d_model ** -0.5 * min(s ** -0.5, s * warmup ** -1.5)`` at update ``s``, counted from 1.
    """

    d_model: int
    warmup: int

    def __call__(self, step: int) -> float:
        """Return the factor of update `step` (from 0)."""
        s = step + 1.0
        return float(self.d_model**-0.5 * min(s**-0.5, s * self.warmup**-1.5))


class WarmPlateau(ReduceLROnPlateau):
    """torch's ReduceLROnPlateau after a warm-up, during which no evaluation lowers the rate.

    `warm` sets the rate of each update of the warm-up; it depends on the update alone, so resuming changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, **kwargs: Any) -> None:
        self.warmup, self.warm_step = warmup, 0
        self.peaks: Sequence[float] = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, **kwargs)
        self.warm(0)

    def warm(self, step: int) -> None:
        """Set the rate of update `step` (from 0) until the end of the warm-up; change nothing afterwards."""
        if self.warmup and step <= self.warmup and step >= self.warm_step:
            for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                group["lr"] = peak * min(1.0, step / self.warmup)
            self.warm_step = step + 1

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Count an evaluation, once the rate has been at its peak for an update."""
        if not self.warmup or self.warm_step > self.warmup:
            super().step(metrics, epoch)


class WarmUp(TrainerCallback):  # type: ignore[misc]
    """Warms up a `WarmPlateau`: Trainer steps it only at evaluations. `n_skipped` returns the updates that were skipped."""

    def __init__(self, n_skipped: Callable[[], int]) -> None:
        self.n_skipped = n_skipped

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the rate of the next update."""
        if isinstance(kwargs.get("lr_scheduler"), WarmPlateau):
            kwargs["lr_scheduler"].warm(state.global_step - self.n_skipped())


def schedule_of(args: Any, model: Any, steps_per_epoch: int) -> Schedule:
    """Return the schedule that SFTConfig `args` name, for `model` and epochs of `steps_per_epoch` updates."""
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    higher_is_better = bool(args.greater_is_better)
    return Schedule(name, args.lr_scheduler_kwargs or {}, args.warmup_steps, width, higher_is_better, steps_per_epoch)


def planned_curve(recipe: TrainRecipe, n_steps: int, steps_per_epoch: int) -> list[float]:
    """Return the learning rate of each of the `n_steps` updates that `recipe` would make, without a model or training.

    They are the rates of the topmost layer if `techniques.layerwise_lr_decay` lowers those below. A schedule that
    follows a metric (reduce_lr_on_plateau, greedy) is drawn as if every evaluation were better than the last. `noam`
    reads the model's config for its width. Raises `TrainingError` if the schedule does not fit into so few steps.
    """
    from trl import SFTConfig

    trainer = recipe.trainer
    rate = float(trainer.get("learning_rate", SFTConfig.__dataclass_fields__["learning_rate"].default))
    name = trainer.get("lr_scheduler_type", "linear")
    kwargs = trainer.get("lr_scheduler_kwargs") or {}
    width = _width(recipe) if name == "noam" and not kwargs.get("d_model") else None
    schedule = Schedule(name, kwargs, trainer.get("warmup_steps", 0), width, steps_per_epoch=steps_per_epoch)
    weight = torch.nn.Parameter(torch.zeros(()))
    weight.grad = torch.zeros(())
    optimizer = torch.optim.SGD([weight], lr=rate)
    scheduler = schedule.make_scheduler(optimizer, n_steps)
    rates = []
    for step in range(n_steps):
        if isinstance(scheduler, WarmPlateau):
            scheduler.warm(step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if name not in ADAPTIVE_SCHEDULES:
            scheduler.step()
    return rates


def _width(recipe: TrainRecipe) -> int:
    """Return the hidden size of the recipe's model from its config."""
    from transformers import AutoConfig

    section = recipe.model
    if section.new is not None:
        fields = dict(section.new)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        config = load_config(section.path or "", section.revision)
    return int(config.get_text_config().hidden_size)
