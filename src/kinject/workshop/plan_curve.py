"""The learning rate of a recipe, step by step, from the scheduler that training will use."""

from __future__ import annotations

import warnings

import torch

from kinject.recipe import Recipe
from kinject.train.config import trainer_field

_BARS = "▁▂▃▄▅▆▇█"


def planned_rates(recipe: Recipe, n_steps: int) -> list[float]:
    """Return the learning rate of each of `n_steps` updates."""
    from transformers import get_scheduler

    rate = float(trainer_field(recipe, "learning_rate"))
    warmup = float(trainer_field(recipe, "warmup_steps") or 0)
    warmup_steps = int(warmup) if warmup >= 1 else -int(-n_steps * warmup // 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        scheduler = get_scheduler(
            str(trainer_field(recipe, "lr_scheduler_type")), optimizer, num_warmup_steps=warmup_steps,
            num_training_steps=n_steps, scheduler_specific_kwargs=trainer_field(recipe, "lr_scheduler_kwargs") or {},
        )  # fmt: skip
        rates = []
        for _ in range(n_steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    return rates


def sparkline(rates: list[float], width: int = 48) -> str:
    """Return `rates` as a line of at most `width` bars, each the mean of its share of the steps."""
    top = max(rates)
    n_bars = min(width, len(rates))
    line = ""
    for bar in range(n_bars):
        held = rates[bar * len(rates) // n_bars : (bar + 1) * len(rates) // n_bars]
        level = sum(held) / len(held) / top if top else 0.0
        line += _BARS[min(int(level * len(_BARS)), len(_BARS) - 1)]
    return line
