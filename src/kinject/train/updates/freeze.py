"""A base that does not train in the first updates (techniques.freeze_base_steps)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from kinject.errors import fault
from kinject.terminal import format_count
from kinject.train.names import summarize_names, unwrapped_name
from kinject.train.updates.base import NormHistory, RunningTrainer, UpdateInputs, UpdateRule


class FreezeWarmup(UpdateRule):
    """techniques.freeze_base_steps: drops the gradients of the base in the first updates.

    `patterns` name the parameters that train from the start; without any these are `reinitialized`.
    An optimizer does not change weights without a gradient, by weight decay neither, and their
    moments begin with their first gradient. The count comes from the trainer's step, so resuming
    changes nothing.
    """

    def __init__(self, steps: int, patterns: Sequence[str], reinitialized: Sequence[str]) -> None:
        self.steps, self.patterns, self.first = steps, patterns, list(reinitialized)

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> FreezeWarmup:
        """Return the rule with the recipe's steps."""
        techniques = inputs.recipe.techniques
        return cls(
            techniques.freeze_base_steps or 0, techniques.freeze_base_except, inputs.reinitialized
        )

    def start(self, trainer: RunningTrainer) -> None:
        """Find the parameters that train first. Raises `RecipeError` for a pattern without a
        match."""
        self._guard: NormHistory = trainer.guard
        names = [
            name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
        ]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                looks = ", ".join(names[:3])
                message = f"{pattern!r} matches no parameter that trains. Names look like {looks}."
                raise fault("techniques.freeze_base_except", message)
        matched = [name for name in names if self._trains_first(name)]
        self.first = matched or self.first

    def _trains_first(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def change_gradient(self, model: nn.Module, step: int) -> None:
        """Drop the base's gradients if this update is one of the first."""
        if step == self.steps:  # from here on the norm is that of more weights
            self._guard.norms.clear()
        if step < self.steps:
            for name, parameter in model.named_parameters():
                if unwrapped_name(name) not in self.first:
                    parameter.grad = None

    def note(self) -> str:
        """Return what trains first."""
        names = ", ".join(summarize_names(self.first))
        return (
            f"techniques.freeze_base_steps: for {format_count(self.steps, 'update')} only these "
            f"train: {names}"
        )
