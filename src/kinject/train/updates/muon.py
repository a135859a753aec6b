"""Muon for the matrices inside the layers (techniques.muon)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kinject.errors import InputError
from kinject.models import has_fast_bf16
from kinject.train.names import layer_number
from kinject.train.updates.base import RunningTrainer, UpdateRule

_VECTORS = re.compile(r"(?:bias|\.A_log|\.D|\.scale)$")
"""Ends of the names of parameters that no input is multiplied by: biases, and decays of Mamba."""
# torch's default.
_MUON_MOMENTUM = 0.95


class Muon(UpdateRule):
    """techniques.muon: Muon updates the matrices inside the layers, at `factor` of the learning
    rate."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def change_optimizer(self, optimizer: Optimizer, trainer: RunningTrainer) -> Optimizer:
        """Return an AdamW whose matrices inside the layers are updated by Muon."""
        return add_muon(optimizer, trainer.model, self.factor)

    def note(self) -> str:
        """Return what is updated by what."""
        return (
            f"techniques.muon: the layers' matrices by Muon at {self.factor:g} of the rate, "
            "the rest by AdamW"
        )


def is_muon_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: a matrix inside the layers (of an adapter too), not
    an embedding.

    Vectors in a table, as the biases of gpt-oss's experts, are no matrix.
    """
    is_matrix = len(shape) == 2 and min(shape) > 1 and not _VECTORS.search(name)
    return is_matrix and layer_number(name) is not None


class MuonAdamW(torch.optim.AdamW):
    """torch's AdamW, whose parameter groups `matrices` are updated by Muon (Jordan et al. 2024;
    arXiv 2502.16982).

    Muon makes the momentum of a matrix nearly orthogonal, so that all directions of the matrix move
    equally far. The update is scaled to the usual size of AdamW's: the same numbers as torch's own
    Muon, which always computes in bfloat16.
    """

    def __init__(
        self, others: Sequence[dict[str, Any]], matrices: Sequence[dict[str, Any]], **options: Any
    ) -> None:
        marked = [{**group, "muon_momentum": _MUON_MOMENTUM} for group in matrices]
        super().__init__([*others, *marked], **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state; AdamW is not shown the matrices, whose state has no number of steps."""
        groups = state["param_groups"]
        others = [group for group in groups if "muon_momentum" not in group]
        super().__setstate__({**state, "param_groups": others})  # type: ignore[no-untyped-call]
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure would be called twice, so none is
        taken."""
        assert closure is None
        groups = self.param_groups
        others = []
        for group in groups:
            if "muon_momentum" not in group:
                others.append(group)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_matrix(parameter, group)
        self.param_groups = others
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update_matrix(self, matrix: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state, rate = matrix.grad, self.state[matrix], float(group["lr"])
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["muon_momentum"])
        update = orthogonalize(gradient.lerp(momentum, group["muon_momentum"]))
        matrix.mul_(1 - rate * group["weight_decay"])
        # 0.2 is about the root mean square of an AdamW update (arXiv 2502.16982).
        matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return `matrix` with its singular values brought near 1, by five Newton-Schulz steps with
    Jordan's coefficients.

    They are computed in bfloat16 where the device multiplies it in hardware; elsewhere in float32,
    since a CPU without it takes 36 times as long in bfloat16.
    """
    fast = has_fast_bf16(matrix.device.type)
    # Of a tall matrix the product with itself would be larger than that of its transpose.
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        matrix = matrix.T
    x = matrix.to(torch.bfloat16 if fast else torch.float32, copy=True)
    # 1e-7 is the epsilon of torch's Muon, whose numbers these are.
    x.div_(x.norm().clamp(min=1e-7))
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def add_muon(optimizer: Optimizer, model: nn.Module, factor: float) -> MuonAdamW:
    """Return an optimizer with the groups of `optimizer`, a new AdamW, in which Muon updates the
    matrices inside the layers.

    Their learning rate is `factor` times that of their group; the weight decay stays. Raises
    `InputError` if none trains.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    others: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_adamw, by_muon = [], []
        for parameter in group["params"]:
            if is_muon_matrix(names[id(parameter)], parameter.shape):
                by_muon.append(parameter)
            else:
                by_adamw.append(parameter)
        if by_adamw:
            others.append({**group, "params": by_adamw})
        if by_muon:
            matrices.append({**group, "params": by_muon, "lr": group["lr"] * factor})
    if not matrices:
        raise InputError(
            "techniques.muon: no matrix inside the layers trains. Remove the line, or train more "
            "of the model."
        )
    options = dict(optimizer.defaults)
    options.pop("decoupled_weight_decay", None)  # AdamW sets it, and takes no argument for it
    return MuonAdamW(others, matrices, **options)
