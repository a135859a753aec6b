"""`kinject find-lr` against a sweep of short trainings: how far its suggestion is from the best rate.

    python benchmarks/train/find_lr.py RECIPE [section.key=value ...] [--seeds 20] [--rates 1e-4 ...] [--sweep-seeds 2]

The sweep trains the recipe once for each rate and seed (seeds that find-lr does not get) and takes the mean loss of the last
fifth of the updates; the best rate has the lowest mean over its seeds. Prints a row for each training and each suggestion,
and how many suggestions are outside a factor of three of the best rate.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np

from kinject.recipe import read_recipe
from kinject.train.setup import make_trainer
from kinject.tune import Ramp, ramp_recipe, range_test, suggest

RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


def final_loss(recipe: Path, overrides: list[str]) -> float:
    """Return the mean loss of the last fifth of a training's updates; infinity if it had to stop."""
    from kinject.errors import TrainingError

    trainer = make_trainer(read_recipe(recipe, [*overrides, "trainer.logging_steps=1"], "train"))
    try:
        trainer.train()
    except TrainingError:
        return math.inf
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def main() -> None:
    """Run the sweep and the range tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sweep-seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = [*options.overrides, f"run_dir={folder}/run"]
        means = {}
        for rate in options.rates:
            seeds = range(1000, 1000 + options.sweep_seeds)
            losses = [
                final_loss(options.recipe, [*given, f"trainer.learning_rate={rate}", f"seed={n}"])
                for n in seeds
            ]
            means[rate] = float(np.mean(losses))
            print(f"rate {rate:.1e}: {', '.join(f'{loss:.3f}' for loss in losses)}", flush=True)
        best, outside = min(means, key=lambda rate: means[rate]), 0
        print(f"best rate of the sweep: {best:.1e}", flush=True)
        for seed in range(options.seeds):
            recipe = read_recipe(options.recipe, [*given, f"seed={seed}"], "train")
            ramp = Ramp()
            found = suggest(
                *range_test(make_trainer(ramp_recipe(recipe, ramp, Path(folder) / "ramp")), ramp)
            )
            is_near = found.suggestion is not None and best / 3 <= found.suggestion <= best * 3
            outside += not is_near
            print(
                f"seed {seed}: {found.suggestion} {found.reason}{'' if is_near else '   outside'}",
                flush=True,
            )
    print(f"{outside} of {options.seeds} suggestions outside a factor of three of {best:.1e}")


if __name__ == "__main__":
    main()
