"""bfloat16 weights whose updates are rounded at random (techniques.stochastic_rounding)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from kinject.train.updates.base import RunningTrainer, UpdateRule

_SLICE = 2**24
"""Numbers that are rounded at a time."""


def round_stochastically(
    values: torch.Tensor, rounded: torch.Tensor, generator: torch.Generator
) -> None:
    """Write `values` (float32) into `rounded` (bfloat16 of the same shape), up or down at random;
    `values` are changed too.

    A value goes to the neighbour away from zero with the probability of its distance to the other
    one, so that its mean is the value. bfloat16 is the upper half of float32: adding random bits to
    the lower half carries with that probability.
    """
    bits, out = values.view(torch.int32).view(-1), rounded.view(-1)
    for start in range(0, len(bits), _SLICE):
        part = bits[start : start + _SLICE]
        part += torch.randint(
            2**16, part.shape, dtype=torch.int32, device=part.device, generator=generator
        )
        part &= -(2**16)
        out[start : start + _SLICE] = part.view(torch.float32)


class StochasticRounding(UpdateRule):
    """techniques.stochastic_rounding: one parameter is updated at a time, and rounded at random
    (arXiv 2010.06192).

    bfloat16 weights are updated in float32 and rounded stochastically, so that updates below half
    of the distance to the next number count on average. Their state is that of float32 weights. The
    random bits follow from the seed, the number of the update and the parameter: the same in every
    process, and after resuming. Beside the model, the float32 copies of one parameter and its
    gradient are in memory.
    """

    def __init__(self, rounds: bool) -> None:
        assert rounds

    def note(self) -> str:
        """Return how weights are rounded."""
        return (
            "techniques.stochastic_rounding: bfloat16 weights, each update rounded up or down at "
            "random"
        )

    def change_optimizer(self, optimizer: Optimizer, trainer: RunningTrainer) -> Optimizer:
        """Return the optimizer, whose step is another."""
        self.parameters: list[torch.Tensor] = []
        self._positions: list[tuple[list[torch.Tensor], int]] = []
        for group in optimizer.param_groups:
            self.parameters += group["params"]
            self._positions += [(group["params"], index) for index in range(len(group["params"]))]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.trainer, self.optimizer = trainer, optimizer
        self._update_all: Callable[[], Any] = optimizer.step
        # Without gradients: bitsandbytes finds its settings by parameter in its first step, where
        # the float32 copies are not known to it.
        self._update_all()

        def step(_: Optimizer, closure: None = None) -> None:
            self._step()

        # A method, since torch's schedulers wrap it as one.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_load_state_dict_post_hook(self._restore_precision)
        return optimizer

    @torch.no_grad()
    def _step(self) -> None:
        """Update every parameter that has a gradient; the gradients stay."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                self._update(parameter, gradient)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one parameter, while no other has a gradient.

        Its float32 copy takes its position and its state: to change the parameter's own dtype would
        detach DDP from it.
        """
        if parameter.dtype != torch.bfloat16:
            parameter.grad = gradient
            self._update_all()
            parameter.grad = None
            return
        number, state = self._numbers[id(parameter)], self.optimizer.state
        positions, index = self._positions[number]
        copy = torch.nn.Parameter(parameter.detach().float())
        copy.grad = gradient.float()
        if parameter in state:
            state[copy] = state.pop(parameter)
        positions[index] = copy
        self._update_all()
        positions[index] = parameter
        state[parameter] = state.pop(copy)
        generator = torch.Generator(parameter.device)
        # The hash of integers is the same in every process, that of a text is not.
        generator.manual_seed(
            hash((self.trainer.args.seed, self.trainer.state.global_step, number)) % 2**63
        )
        round_stochastically(copy.detach(), parameter.detach(), generator)

    def _keep(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Keep a state that is about to be loaded."""
        self._loaded = state_dict

    def _restore_precision(self, optimizer: Optimizer) -> None:
        """Put the loaded states back in their own dtypes: torch has cast them to that of the
        parameters."""
        numbers: list[int] = []
        for group in self._loaded["param_groups"]:
            numbers += group["params"]
        for number, parameter in zip(numbers, self.parameters, strict=True):
            for key, value in self._loaded["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        del self._loaded
