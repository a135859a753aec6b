"""The learning-rate schedules that `trainer.lr_scheduler_type` may name, and what each takes in `lr_scheduler_kwargs`.

Names, keyword arguments, types and defaults are read from transformers' and torch's own functions; only the two
schedules that neither has (`kinject.train.schedules`) are declared here.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kinject.recipe.check import Checker, suggestion

TORCH = {"step_decay": "StepLR", "exponential_decay": "ExponentialLR", "one_cycle": "OneCycleLR"}
"""Schedules that are torch.optim.lr_scheduler's -> the class there."""
OWN: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "noam": {"d_model": (int | None, None)},
    "flat_then_cosine": {"flat_fraction": (float, 0.75), "min_lr_ratio": (float, 0.0)},
}
"""kinject's own schedules -> keyword argument -> (type, default)."""
ADAPTIVE = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow a metric of the evaluations."""

_OURS_TO_GIVE = frozenset({
    "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs", "max_lr", "total_steps", "epochs",
    "steps_per_epoch", "cycle_momentum", "base_momentum", "max_momentum", "mode", "verbose",
})  # fmt: skip
"""Arguments that follow from the rest of the recipe, or that would change more than the learning rate."""
_SHAPES = Literal["linear", "cosine", "1-sqrt"]
_TYPES: Mapping[str, Any] = {
    "power": float, "lr_end": float, "min_lr_ratio": float, "num_decay_steps": float, "warmup_type": _SHAPES,
    "decay_type": _SHAPES, "anneal_strategy": Literal["cos", "linear"], "threshold_mode": Literal["rel", "abs"],
}  # fmt: skip
"""What the libraries leave unannotated, or check late."""
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "gamma": (0, 1), "step_size": (1, math.inf), "power": (0, math.inf), "lr_end": (0, math.inf),
    "timescale": (1, math.inf), "min_lr": (0, math.inf), "min_lr_rate": (0, 1), "min_lr_ratio": (0, 1),
    "warmup_lr_rate": (0, 1), "num_decay_steps": (0, math.inf), "num_stable_steps": (0, math.inf), "pct_start": (0, 1),
    "div_factor": (1, math.inf), "final_div_factor": (1, math.inf), "d_model": (1, math.inf), "flat_fraction": (0, 1),
    "patience": (0, math.inf), "threshold": (0, math.inf), "cooldown": (0, math.inf), "num_cycles": (0, math.inf),
    "factor": (0, 0.999_999),
}  # fmt: skip


def schedule_names() -> list[str]:
    """Return every name that `trainer.lr_scheduler_type` may have."""
    from transformers.trainer_utils import SchedulerType

    return [*(member.value for member in SchedulerType), *TORCH, *OWN]


def schedule_arguments(name: str) -> dict[str, tuple[Any, Any]]:
    """Return what `lr_scheduler_kwargs` may hold for schedule `name`: argument -> (type, default or `inspect._empty`)."""
    if name in OWN:
        return dict(OWN[name])
    source = _source(name)
    hints = typing.get_type_hints(vars(source)["__init__"] if isinstance(source, type) else source)
    found = {}
    for key, parameter in inspect.signature(source).parameters.items():
        if key not in _OURS_TO_GIVE:
            found[key] = (_TYPES.get(key, hints.get(key, type(parameter.default))), parameter.default)
    return found


def _source(name: str) -> Callable[..., Any]:
    """Return the library's function or class behind a schedule that is not kinject's own."""
    import torch.optim.lr_scheduler as of_torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
    from transformers.trainer_utils import SchedulerType

    if name in TORCH:
        return typing.cast("Callable[..., Any]", getattr(of_torch, TORCH[name]))
    adaptive = {"reduce_lr_on_plateau": of_torch.ReduceLROnPlateau, "greedy": GreedyLR}
    return adaptive.get(name) or typing.cast("Callable[..., Any]", TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)])


def check_schedule(
    trainer: Mapping[str, Any], written: Mapping[str, str], checker: Checker, plain: Callable[[Any], Any]
) -> None:
    """Report what is wrong with the schedule of `trainer` (under today's names; `written` says how the recipe has them)."""
    name = trainer.get("lr_scheduler_type", "linear")
    warmup = trainer.get("warmup_steps", 0)
    if written.get("warmup_steps") == "warmup_ratio" and isinstance(warmup, (int, float)) and not 0 <= warmup < 1:
        checker.report(
            ("trainer", "warmup_ratio"), f"found {warmup}, allowed: 0 up to 1 (1 excluded), a share of steps."
        )
    if name not in schedule_names():
        return
    place = ("trainer", "lr_scheduler_kwargs")
    given = trainer.get("lr_scheduler_kwargs") or {}
    if not isinstance(given, Mapping):
        checker.report(place, f"found {given!r}, expected a mapping.")
        return
    allowed = schedule_arguments(name)
    for key, value in given.items():
        if key not in allowed:
            what = suggestion(key, allowed) or " It takes none. Remove the line."
            checker.report((*place, key), f"unknown to lr_scheduler_type: {name}.{what}")
            continue
        hint = allowed[key][0]
        checked = checker.value(hint if typing.get_origin(hint) is Literal else plain(hint), value, (*place, key))
        low, high = _BOUNDS.get(key, (-math.inf, math.inf))
        if isinstance(checked, (int, float)) and not low <= checked <= high:
            allowed_range = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            checker.report((*place, key), f"found {checked}, allowed: {allowed_range}.")
    for key, (_, default) in allowed.items():
        if default is inspect.Parameter.empty and key not in given:
            example = f"lr_scheduler_kwargs: {{{key}: {_EXAMPLES[key]}}}"
            checker.report(("trainer", "lr_scheduler_type"), f"{name} needs {key}. For example {example}.")
    _check_together(name, given, trainer, checker)


_EXAMPLES = {"num_decay_steps": "0.2", "step_size": "100", "gamma": "0.999"}


def _check_together(name: str, given: Mapping[str, Any], trainer: Mapping[str, Any], checker: Checker) -> None:
    """Report arguments that contradict each other or the rest of the trainer section."""
    place = ("trainer", "lr_scheduler_kwargs")
    warmup = trainer.get("warmup_steps", 0)
    floors = [key for key in ("min_lr", "min_lr_rate") if given.get(key) is not None]
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and len(floors) != 1:
        found = "both" if floors else "neither"
        what = f"{name} needs one of lr_scheduler_kwargs.min_lr and min_lr_rate; found {found}."
        checker.report(("trainer", "lr_scheduler_type"), what)
    if name == "one_cycle" and "pct_start" in given and warmup:
        checker.report((*place, "pct_start"), "says the same as trainer.warmup_steps. Keep one.")
    if name == "noam" and not warmup:
        checker.report(
            ("trainer", "lr_scheduler_type"), "noam needs trainer.warmup_steps: its peak stands where they end."
        )
    if name == "greedy" and warmup:
        what = "greedy does not read trainer.warmup_steps. Set lr_scheduler_kwargs.warmup (in evaluations)."
        checker.report(("trainer", "lr_scheduler_type"), what)
    rate, end = trainer.get("learning_rate", 2e-5), given.get("lr_end", 1e-7)
    if name == "polynomial" and isinstance(rate, float) and isinstance(end, float) and end >= rate:
        checker.report((*place, "lr_end"), f"found {end:g}, allowed: less than learning_rate ({rate:g}).")
