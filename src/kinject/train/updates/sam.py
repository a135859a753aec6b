"""Sharpness-aware minimisation (SAM, arXiv 2010.01412)."""

from __future__ import annotations

from typing import Any

import torch

from kinject.models import full_tensor, own_part
from kinject.train.optimizers import UpdateRule


class SharpnessAware(UpdateRule):
    """Sharpness-aware minimisation (SAM, arXiv 2010.01412): the gradient is taken near the highest loss nearby.

    The optimizer sees the gradient at ``w + rho * g / |g|`` with g over all accumulated batches. A scaled gradient (fp16)
    perturbs the weights in the same way. `restore` puts them back bitwise. Nothing is kept from one update to the next.
    """

    copies = 1

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._batches: list[Any] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self) -> str:
        """Return where gradients are taken."""
        return f"techniques.sam: gradients are taken {self.rho:g} uphill, in two passes an update"

    def keep(self, batch: Any) -> None:
        """Keep a batch of the current update."""
        self._batches.append(batch)

    def take_batches(self) -> list[Any]:
        """Return the batches kept, in order, and forget them."""
        batches, self._batches = self._batches, []
        return batches

    @torch.no_grad()
    def perturb(self, model: Any) -> bool:
        """Move the weights uphill; False (and no weight moves) if the gradient is zero or not finite."""
        moving = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if not moving:
            return False
        norm = full_tensor(torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in moving]))
        if not bool(norm.isfinite()) or float(norm) == 0.0:
            return False
        self._weights = [(parameter, parameter.detach().clone()) for parameter in moving]
        for parameter in moving:
            step = own_part(parameter.grad).float() * (self.rho / norm)
            own_part(parameter).add_(step.to(parameter.dtype))
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back to their values before `perturb`."""
        for parameter, before in self._weights:
            parameter.copy_(before)
        self._weights = []
