"""Training through TRL's SFTTrainer: continued pretraining and instruction SFT, with an account of
every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe
    from kinject.types import TrainResult

__all__ = ["train"]


def train(recipe: TrainRecipe, *, resume: bool = False, overwrite: bool = False) -> TrainResult:
    """Train by `recipe` into its run_dir; see `kinject.train.run.run`. Imports torch when
    called."""
    from kinject.train.run import run

    return run(recipe, resume=resume, overwrite=overwrite)
