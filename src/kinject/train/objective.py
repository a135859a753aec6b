"""The training loss where it is not the plain mean over tokens: smoothed labels, the hardest share, weighted rows.

Every variant is a sum over one batch of one device, divided by a number known before the batch is read, so that
accumulation and several devices change nothing: `total` is that sum, `count` the batch's part of that number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kinject.corpus import IGNORED
from kinject.recipe.sections import HardExampleMiningSection


@dataclass(frozen=True)
class Objective:
    """Cross-entropy of the next token, in nats; batches hold labels and position_ids [batch, length].

    * `smoothing`: this share of the target is spread evenly over the vocabulary (arXiv 1512.00567).
    * `hardest`: only the share with the highest loss counts: of tokens, or of rows by their mean loss, each row then as
      much as another (arXiv 1604.03540). Rows are texts: one ends where positions restart.
    * `weighted`: batches hold weights [batch, length], and the loss is the weighted mean over tokens.
    """

    smoothing: float = 0.0
    hardest: HardExampleMiningSection | None = None
    weighted: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is the plain mean over tokens."""
        return not self.smoothing and self.hardest is None and not self.weighted

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return what `batch` adds to the number by which the sum is divided."""
        learned = batch["labels"][:, 1:] != IGNORED
        if self.weighted:
            return torch.where(learned, batch["weights"][:, 1:], 0.0).sum()
        n = int(learned.sum())
        if self.hardest is not None:
            n = self._kept(n if self.hardest.unit == "tokens" else len(_texts(batch, learned)[0]))
        return torch.tensor(n, device=learned.device)

    def total(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the sum for `batch`; `logits` [batch, length, vocabulary] in float32, each foretelling the token after it.

        Labels are shifted, not logits: a copy of those costs as much as the softmax.
        """
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        plain = self.hardest is None and not self.weighted
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing,
            reduction="sum" if plain else "none",
        )  # fmt: skip
        if plain:
            return losses
        if self.weighted:
            return torch.sum(losses * F.pad(batch["weights"][:, 1:], (0, 1)).flatten())
        assert self.hardest is not None
        losses = losses.view(labels.shape)[:, :-1]
        learned = labels[:, :-1] != IGNORED
        if self.hardest.unit == "tokens":
            held = losses[learned]
        else:
            sizes, places = _texts(batch, learned)
            held = losses.new_zeros(len(sizes)).index_add(0, places, losses[learned]) / sizes
        return held.topk(self._kept(len(held))).values.sum()

    def _kept(self, n: int) -> int:
        assert self.hardest is not None
        return math.ceil(self.hardest.fraction * n - 1e-9)  # 0.1 * 30 is a little more than 3


def _texts(batch: Mapping[str, Any], learned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (learned tokens of each text that has any, the text of each learned token), texts in order."""
    restarts = batch["position_ids"] == 0
    restarts[:, 0] = True
    numbers = restarts.flatten().cumsum(0).view(restarts.shape)[:, 1:]
    _, places, sizes = numbers[learned].unique(return_inverse=True, return_counts=True)
    return sizes, places
