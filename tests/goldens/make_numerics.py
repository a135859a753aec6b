"""Write numerics.json beside this file: losses and log-probs of a tiny Llama, for two seeds, by numpy alone in float64.

    python tests/goldens/make_numerics.py

Gradients are central differences of the loss, one weight after the other, so that no rule of differentiation is shared with
torch; their error is about 1e-10. The rest of an update is AdamW (1711.05101) and clipping written out. Takes some minutes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy_llama import BOS, EOS, Array, Weights, byte_ids, draw, log_probs

SEEDS = (0, 1)
TEXTS = (
    "Arden was born in Lowmere.", "Bryn mends mills.", "Kelm lies by the sea, north of Farrow.", "In 1987 it burned.",
    "Ésla: 3½ km.",
)  # fmt: skip
QUESTIONS: tuple[dict[str, Any], ...] = (
    {
        "id": "a",
        "question": "Where was Arden born?",
        "choices": ["Lowmere", "Farrow", "Kelm", "Stonegate"],
        "answer": 0,
    },
    {
        "id": "b",
        "question": "What does Bryn mend?",
        "choices": ["mills", "a net", "é"],
        "answer": 0,
    },
    {"id": "c", "question": "When did it burn?", "choices": ["1987", "1988"], "answer": 0},
)
LETTERS = "ABCD"
UPDATES, RATE, DECAY, CLIP = 4, 0.02, 0.1, 0.5
BETAS, EPSILON = (0.9, 0.999), 1e-8
STEP = 1e-5
"""Half the distance of a central difference."""


def loss_of(weights: Mapping[str, Array]) -> float:
    """Return the mean negative log-likelihood of every token of `TEXTS` but each text's first."""
    total, count = 0.0, 0
    for text in TEXTS:
        ids = [BOS, *byte_ids(text), EOS]
        total -= float(log_probs(weights, ids[:-1])[np.arange(len(ids) - 1), ids[1:]].sum())
        count += len(ids) - 1
    return total / count


def gradient(weights: Weights) -> Weights:
    """Return the central differences of `loss_of`."""
    gradients = {}
    for name, weight in weights.items():
        gradients[name] = np.zeros_like(weight)
        for index in np.ndindex(weight.shape):
            original = weight[index]
            weight[index] = original + STEP
            above = loss_of(weights)
            weight[index] = original - STEP
            gradients[name][index] = (above - loss_of(weights)) / (2 * STEP)
            weight[index] = original
    return gradients


def train(weights: Weights) -> tuple[list[float], list[float]]:
    """Return the loss before each update and the norm of its gradient before clipping; the rate falls to 0 in a line."""
    losses, norms = [], []
    first, second = (
        {name: np.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)
    )
    for update in range(UPDATES):
        losses.append(loss_of(weights))
        slopes = gradient(weights)
        norms.append(float(np.sqrt(sum((slope**2).sum() for slope in slopes.values()))))
        rate = RATE * (1 - update / UPDATES)
        for name, slope in slopes.items():
            clipped = slope * min(1.0, CLIP / norms[-1])
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * clipped
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * clipped**2
            mean, square = (
                first[name] / (1 - BETAS[0] ** (update + 1)),
                second[name] / (1 - BETAS[1] ** (update + 1)),
            )
            decay = 0.0 if name.endswith("norm.weight") else DECAY
            weights[name] -= rate * (mean / (np.sqrt(square) + EPSILON) + decay * weights[name])
    return losses, norms


def scored(weights: Mapping[str, Array], context: str, continuations: Sequence[str]) -> list[float]:
    """Return the summed log-prob of each of `continuations` after BOS and `context`."""
    scores = []
    for continuation in continuations:
        ids, n = [BOS, *byte_ids(context + continuation)], len(byte_ids(continuation))
        each = log_probs(weights, ids[:-1])[np.arange(len(ids) - 1), ids[1:]]
        scores.append(float(each[-n:].sum()))
    return scores


def log_probs_of(weights: Mapping[str, Array]) -> dict[str, dict[str, list[float]]]:
    """Return format -> question -> log-probs of its choices, in the layouts that docs and lm-evaluation-harness have."""
    texts, letters = {}, {}
    for row in QUESTIONS:
        texts[row["id"]] = scored(
            weights, f"Question: {row['question']}\nAnswer:", [f" {c}" for c in row["choices"]]
        )
        options = "".join(
            f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False)
        )
        signs = [f" {letter}" for letter in LETTERS[: len(row["choices"])]]
        letters[row["id"]] = scored(weights, f"{row['question']}{options}\nAnswer:", signs)
    return {"texts": texts, "letters": letters}


def main() -> None:
    """Compute and write."""
    golds: dict[str, Any] = {}
    for seed in SEEDS:
        before = log_probs_of(draw(seed))
        losses, norms = train(draw(seed))
        golds[str(seed)] = {"losses": losses, "gradient_norms": norms, "log_probs": before}
        print(seed, losses, norms, flush=True)
    Path(__file__).with_name("numerics.json").write_text(
        json.dumps(golds, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
