"""Only the hardest tokens or rows of a batch count (techniques.hard_example_mining)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kinject.corpus.tokenize import IGNORED
from kinject.recipe.sections import HardExampleMiningSection
from kinject.train.loss import Objective


class HardExamples(Objective):
    """Only the fraction with the highest loss counts: of tokens, or of rows by their mean loss, all
    rows with equal weight.

    Rows are texts: one ends where positions restart (arXiv 1604.03540).
    """

    is_mean = False

    def __init__(self, section: HardExampleMiningSection) -> None:
        self.section = section

    def count(self, batch: Mapping[str, torch.Tensor], learned: torch.Tensor) -> torch.Tensor:
        """Return how many tokens or rows are kept."""
        n = int(learned.sum()) if self.section.unit == "tokens" else len(_texts(batch, learned)[0])
        return torch.tensor(_n_hardest(n, self.section.fraction), device=learned.device)

    def total(self, losses: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of the highest losses."""
        learned = batch["labels"][:, 1:] != IGNORED
        if self.section.unit == "tokens":
            items = losses[learned]
        else:
            sizes, indices = _texts(batch, learned)
            items = losses.new_zeros(len(sizes)).index_add(0, indices, losses[learned]) / sizes
        return items.topk(_n_hardest(len(items), self.section.fraction)).values.sum()


def _n_hardest(n: int, fraction: float) -> int:
    return math.ceil(fraction * n - 1e-9)  # 0.1 * 30 is a little more than 3


def _texts(
    batch: Mapping[str, torch.Tensor], learned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (learned tokens of each text that has any, the index of the text of each learned
    token), texts in order."""
    restarts = batch["position_ids"] == 0
    restarts[:, 0] = True
    numbers = restarts.flatten().cumsum(0).view(restarts.shape)[:, 1:]
    _, indices, sizes = numbers[learned].unique(  # type: ignore[no-untyped-call]
        return_inverse=True, return_counts=True
    )
    return sizes, indices
