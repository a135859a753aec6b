"""Weights in bfloat16 whose updates are rounded up or down at random (arXiv 2010.06192)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from kinject.train.optimizers import UpdateRule


class StochasticRounding(UpdateRule):
    """techniques.stochastic_rounding: the optimizer updates one parameter at a time and rounds it at random."""

    def __init__(self, rounds: bool) -> None:
        assert rounds

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer, whose step is another."""
        OneByOne(optimizer, lambda: trainer.state.global_step, trainer.args.seed)
        return optimizer

    def note(self) -> str:
        """Return how weights are rounded."""
        return "techniques.stochastic_rounding: bfloat16 weights, each update rounded up or down at random"


_SLICE = 2**24
"""Numbers that are rounded at a time."""


def round_stochastically(values: torch.Tensor, rounded: torch.Tensor, generator: torch.Generator) -> None:
    """Write `values` (float32) into `rounded` (bfloat16 of the same shape), up or down at random; `values` are changed too.

    A value goes to the neighbour away from zero with the probability of its distance to the other one, so that its mean is
    the value. bfloat16 is the upper half of float32: adding random bits to the lower half carries with that probability.
    """
    bits, out = values.view(torch.int32).view(-1), rounded.view(-1)
    for start in range(0, len(bits), _SLICE):
        part = bits[start : start + _SLICE]
        part += torch.randint(2**16, part.shape, dtype=torch.int32, device=part.device, generator=generator)
        part &= -(2**16)
        out[start : start + _SLICE] = part.view(torch.float32)


class OneByOne:
    """Makes a new optimizer update one parameter at a time, with stochastic rounding (arXiv 2010.06192).

    bfloat16 weights are updated in float32 and rounded stochastically, so that updates below half of the distance to the next
    number count on average. Their state is that of float32 weights. The random bits follow from `seed`, the number of the
    update (`step`) and the parameter: the same in every process, and after resuming. Beside the model, the float32 copies of
    one parameter and its gradient are in memory.
    """

    def __init__(self, optimizer: Any, step: Callable[[], int], seed: int) -> None:
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.seed, self.step = seed, step
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._positions = [(g["params"], index) for g in optimizer.param_groups for index in range(len(g["params"]))]
        self.optimizer, self._update_all = optimizer, optimizer.step
        self._update_all()  # without gradients: bitsandbytes finds its settings by parameter in its first step
        # a method, since torch's schedulers wrap it as one
        optimizer.step = types.MethodType(lambda _, closure=None: self._step(), optimizer)
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_load_state_dict_post_hook(self._restore_precision)

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

        Its float32 copy takes its position and its state: to change the parameter's own dtype would detach DDP from it.
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
        generator.manual_seed(hash((self.seed, self.step(), number)) % 2**63)
        round_stochastically(copy.detach(), parameter.detach(), generator)

    def _keep(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Keep a state that is about to be loaded."""
        self._loaded = state_dict

    def _restore_precision(self, optimizer: Any) -> None:
        """Put the loaded states back in their own dtypes: torch has cast them to that of the parameters."""
        numbers = [number for group in self._loaded["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self.parameters, strict=True):
            for key, value in self._loaded["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        del self._loaded
