"""Draw docs/schedules.png: every learning-rate schedule of the recipe grammar, over 200 updates with 20 of warm-up.

python docs/site/draw_schedules.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, schedule_names
from kinject.report.figures import INK, LEARNING, style
from kinject.train.schedules import Schedule

N_STEPS, WARM_UP = 200, 20
KWARGS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.3},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0},
    "step_decay": {"step_size": 60, "gamma": 0.3},
    "exponential_decay": {"gamma": 0.98},
    "flat_then_cosine": {"flat_fraction": 0.6},
    "warmup_stable_decay": {"num_decay_steps": 0.25, "decay_type": "1-sqrt"},
}
"""Arguments where the defaults draw another's curve, or where there are none."""


def rates(name: str) -> list[float]:
    """Return the rate of each update, over the highest."""
    warm_up = 0 if name == "constant" else WARM_UP
    schedule = Schedule(name, KWARGS.get(name, {}), warm_up, 512)
    weight = torch.nn.Parameter(torch.zeros(()))
    weight.grad = torch.zeros(())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = schedule.make_scheduler(optimizer, N_STEPS)
    found = []
    for _ in range(N_STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return [rate / max(found) for rate in found]


def main() -> None:
    """Write the figure."""
    names = [name for name in schedule_names() if name not in ADAPTIVE_SCHEDULES]
    n_rows = -(-len(names) // 4)
    with style():
        figure = Figure(figsize=(10.0, 1.7 * n_rows), layout="constrained")
        grid = figure.subplots(n_rows, 4, sharex=True, sharey=True).flatten()
        for axes, name in zip(grid, names, strict=False):
            axes.plot(range(1, N_STEPS + 1), rates(name), color=LEARNING, linewidth=1.6)
            axes.set_title(name, fontsize=9)
            more = ", ".join(f"{key}: {value:g}" if isinstance(value, float | int) else f"{key}: {value}"
                             for key, value in KWARGS.get(name, {}).items())  # fmt: skip
            axes.text(
                0.98,
                0.96,
                more.replace(", ", "\n"),
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=7,
                color=INK,
            )
            axes.set_ylim(0, 1.35)
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        figure.supxlabel(f"update, of {N_STEPS}; {WARM_UP} of warm-up", fontsize=9)
        figure.supylabel("rate over its highest", fontsize=9)
        figure.savefig(Path(__file__).parents[1] / "schedules.png", dpi=110)


if __name__ == "__main__":
    main()
