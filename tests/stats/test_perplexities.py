"""Intervals of perplexities: by pencil and paper, against a bootstrap, and how often they hold what is true."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kinject.results import Perplexity
from kinject.stats.perplexities import change_bounds, mean_losses, perplexity_bounds

LENGTHS = (10, 20, 30)


def _perplexity(
    arm: str, losses: tuple[float, ...], lengths: tuple[int, ...] = LENGTHS
) -> Perplexity:
    per_token = math.exp(sum(losses) / sum(lengths))
    return Perplexity(
        arm, "texts", len(losses), sum(lengths), per_token, 1.0, losses=losses, lengths=lengths
    )


def test_three_texts_by_hand() -> None:
    """Loss 120 of 60 tokens, 2 a token: residuals 20 - 20, 46 - 40, 54 - 60; t of two degrees is 4.3027."""
    bounds = perplexity_bounds(_perplexity("base", (20.0, 46.0, 54.0)))
    error = math.sqrt(3 / 2 * (0 + 36 + 36)) / 60
    by_hand = (math.exp(2 - 4.302653 * error), math.exp(2 + 4.302653 * error))
    assert bounds == pytest.approx(by_hand, rel=1e-5)


def test_a_change_is_paired_by_text() -> None:
    """Every text is the same 0.1 nats a token worse: the texts' own differences say nothing of the change."""
    base = _perplexity("base", (20.0, 46.0, 54.0))
    worse = _perplexity(
        "tuned", tuple(x + 0.1 * n for x, n in zip((20, 46, 54), LENGTHS, strict=True))
    )
    assert change_bounds(worse, base) == pytest.approx((math.exp(0.1),) * 2)
    wide = perplexity_bounds(worse)
    assert wide is not None
    assert wide[1] / wide[0] > 2


def test_several_seeds_widen_the_interval_of_a_perplexity() -> None:
    base = _perplexity("base", (20.0, 46.0, 54.0))
    tuned = replace(_perplexity("tuned", (21.0, 47.0, 56.0)), by_seed=(7.9, 7.9, 7.9))
    spread = replace(tuned, by_seed=(6.0, 8.0, 10.0))
    same, wider = change_bounds(tuned, base), change_bounds(spread, base)
    assert same is not None
    assert wider is not None
    assert wider[0] < same[0] < same[1] < wider[1]


def test_what_has_no_interval() -> None:
    base = _perplexity("base", (20.0, 46.0, 54.0))
    assert perplexity_bounds(_perplexity("one text", (20.0,), (10,))) is None
    assert perplexity_bounds(replace(base, per_token=None, losses=())) is None
    assert (
        change_bounds(base, _perplexity("other tokens", (20.0, 46.0, 54.0), (10, 20, 31))) is None
    )
    assert change_bounds(base, replace(base, losses=(), lengths=())) is None, "of an older report"
    far = replace(base, by_seed=(2.0, 1e180))  # one seed diverged: its bound is beyond any float
    assert perplexity_bounds(far) is None
    assert change_bounds(far, base) is None
    assert mean_losses([base, replace(base, losses=())]) == ()
    assert mean_losses([base, _perplexity("b", (22.0, 48.0, 56.0))]) == (21.0, 47.0, 55.0)


def test_the_interval_holds_the_true_change_in_95_of_100_tries() -> None:
    """Texts of very different lengths, whose change varies from text to text."""
    draw, held = np.random.default_rng(11), 0
    for _ in range(1000):
        lengths = draw.integers(20, 200, 40)
        own = draw.normal(3.0, 0.4, 40)
        change = draw.normal(0.1, 0.08, 40)
        base, tuned = own * lengths, (own + change) * lengths
        bounds = change_bounds(
            _perplexity("tuned", tuple(tuned), tuple(map(int, lengths))),
            _perplexity("base", tuple(base), tuple(map(int, lengths))),
        )
        assert bounds is not None
        held += bounds[0] <= math.exp(0.1) <= bounds[1]
    assert 0.93 <= held / 1000 <= 0.97
