"""Intervals of perplexities: held-out texts are a sample, and so are the seeds of a training.

A perplexity is exp of a ratio: the loss of all texts over their tokens. The variance of such a
ratio is that of the texts' residuals, loss - ratio x tokens (Cochran 1977, chapter 6).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from statistics import fmean, variance

from kinject.results import ALPHA, Perplexity
from kinject.stats.intervals import cochran_df, quantile

_MOST_NATS = math.log(sys.float_info.max)


def perplexity_bounds(item: Perplexity) -> tuple[float, float] | None:
    """Return the 95% bounds of a perplexity over texts and seeds; None where it, or a bound, is not
    finite, or the texts are fewer than two."""
    if item.per_token is None:
        return None
    return _bounds(item.per_token, item.losses, item.lengths, [item])


def change_bounds(item: Perplexity, base: Perplexity) -> tuple[float, float] | None:
    """Return the 95% bounds of a perplexity's ratio to the base's on the same texts, paired by
    text; None where there are none."""
    if item.per_token is None or base.per_token is None or item.lengths != base.lengths:
        return None
    losses = [loss - other for loss, other in zip(item.losses, base.losses, strict=True)]
    return _bounds(item.per_token / base.per_token, losses, item.lengths, [item, base])


def _bounds(
    estimate: float, losses: Sequence[float], lengths: Sequence[int], arms: Sequence[Perplexity]
) -> tuple[float, float] | None:
    """Return the bounds of exp of the texts' `losses` a token, estimated as `estimate`."""
    n = len(losses)
    if n < 2 or estimate == math.inf:
        return None
    rate = math.log(estimate)
    squares = [(loss - rate * length) ** 2 for loss, length in zip(losses, lengths, strict=True)]
    of_texts = n / (n - 1) * math.fsum(squares) / sum(lengths) ** 2
    parts = [(of_texts, float(n - 1))]
    for arm in arms:
        n_seeds = len(arm.by_seed)
        if n_seeds > 1:
            of_seeds = variance(math.log(value) for value in arm.by_seed) / n_seeds
            parts.append((of_seeds, float(n_seeds - 1)))
    total = math.fsum(part for part, _ in parts)
    if total == 0:  # the same model: each text has the same loss
        return estimate, estimate
    half = quantile(ALPHA / 2, cochran_df(parts)) * math.sqrt(total)
    # Seeds of which one diverged (a loss of 200 nats, another of 3): no float holds the bound.
    if max(rate, 0.0) + half > _MOST_NATS:
        return None
    return estimate * math.exp(-half), estimate * math.exp(half)


def mean_losses(items: Sequence[Perplexity]) -> tuple[float, ...]:
    """Return the mean loss of each text over the seeds `items`, () where one seed has none."""
    if not all(item.losses for item in items):
        return ()
    of_seeds = [item.losses for item in items]
    return tuple(map(fmean, zip(*of_seeds, strict=True)))
