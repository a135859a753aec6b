"""Sharpness-aware minimisation (arXiv 2010.01412): the gradient is taken where the loss nearby is about highest."""

from __future__ import annotations

from typing import Any

import torch


class Sharpness:
    """Keeps the batches of one update; climbs by `rho` along their whole gradient, and puts the weights back bitwise.

    The gradient that an optimizer then sees is that at ``w + rho * g / |g|`` with g over all accumulated batches. A
    scaled gradient (fp16) climbs the same way. Nothing is kept from one update to the next.
    """

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._batches: list[Any] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, batch: Any) -> None:
        """Keep a batch of the update that is being gathered."""
        self._batches.append(batch)

    def batches(self) -> list[Any]:
        """Return the batches kept, in order, and forget them."""
        held, self._batches = self._batches, []
        return held

    @torch.no_grad()
    def climb(self, model: Any) -> bool:
        """Move the weights uphill; False (and nothing moves) where the gradient is zero or not finite."""
        moving = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if not moving:
            return False
        norm = torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in moving])
        if not bool(norm.isfinite()) or float(norm) == 0.0:
            return False
        self._weights = [(parameter, parameter.detach().clone()) for parameter in moving]
        for parameter in moving:
            parameter.add_((parameter.grad.float() * (self.rho / norm)).to(parameter.dtype))
        return True

    @torch.no_grad()
    def come_back(self) -> None:
        """Put the weights where they were before `climb`."""
        for parameter, before in self._weights:
            parameter.copy_(before)
        self._weights = []
