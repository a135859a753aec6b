"""The naive way to score, and rows written as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kinject.eval.scoring.encode import Encoded


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models gain nothing from threads and lose much where the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture
def score_naively() -> Callable[[Any, Sequence[Encoded]], np.ndarray]:
    """Return the reference scorer."""
    return _score_naively


def _score_naively(model: Any, prompts: Sequence[Encoded]) -> np.ndarray:
    """Return [prompts, choices] log-probs: each choice a row of its own, no padding, no cache, float64."""
    exact = model.double()
    scores = []
    with torch.no_grad():
        for prompt in prompts:
            row = []
            for context, continuation in zip(prompt.contexts, prompt.continuations, strict=True):
                whole = torch.tensor(np.concatenate([context, continuation]).astype(np.int64))[None]
                log_probs = exact(whole[:, :-1], use_cache=False).logits[0].log_softmax(-1)
                indices = range(len(context) - 1, whole.shape[1] - 1)
                row.append(sum(float(log_probs[i, whole[0, i + 1]]) for i in indices))
            scores.append(row)
    return np.array(scores)
