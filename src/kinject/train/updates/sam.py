"""Gradients at the highest loss nearby (techniques.sam)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kinject.models import full_tensor, own_part
from kinject.train.updates.base import UpdateRule

Batch = Mapping[str, torch.Tensor]


class SharpnessAware(UpdateRule):
    """Sharpness-aware minimisation (SAM, arXiv 2010.01412): the gradient is taken near the highest
    loss nearby.

    The optimizer sees the gradient at ``w + rho * g / |g|`` with g over all accumulated batches. A
    scaled gradient (fp16) perturbs the weights in the same way. `restore` puts them back bitwise.
    Nothing is kept from one update to the next.
    """

    copies = 1

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._batches: list[Batch] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self) -> str:
        """Return where gradients are taken."""
        return f"techniques.sam: gradients are taken {self.rho:g} uphill, in two passes an update"

    def keep(self, batch: Batch) -> None:
        """Keep a batch of the current update."""
        self._batches.append(batch)

    def take_batches(self) -> list[Batch]:
        """Return the batches kept, in order, and forget them."""
        batches, self._batches = self._batches, []
        return batches

    @torch.no_grad()
    def perturb(self, model: nn.Module) -> bool:
        """Move the weights uphill; False (and no weight moves) if the gradient is zero or not
        finite."""
        gradients = {
            parameter: parameter.grad
            for parameter in model.parameters()
            if parameter.grad is not None
        }
        if not gradients:
            return False
        norm = full_tensor(nn.utils.get_total_norm([grad.float() for grad in gradients.values()]))
        if not bool(norm.isfinite()) or float(norm) == 0.0:
            return False
        # Copies: to subtract the step again would not give the same bits.
        self._weights = [(parameter, parameter.detach().clone()) for parameter in gradients]
        for parameter, gradient in gradients.items():
            step = own_part(gradient).float() * (self.rho / norm)
            own_part(parameter).add_(step.to(parameter.dtype))
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back to their values before `perturb`."""
        for parameter, before in self._weights:
            parameter.copy_(before)
        self._weights = []
