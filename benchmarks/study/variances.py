"""Ways to estimate the variance of a difference of two arms, on simulated studies: coverage, and false findings in a family.

Answers are drawn as in claims.py, many studies at once. `twice`: the variance between documents plus that between each arm's
seeds, both of which hold the noise of answers (Satterthwaite). `once`: without that noise in one of them. `two arms`: `once`
with the seeds' variance of both arms together. `joint`: `two arms` with degrees of freedom from the moments of the truncated
sum. `Behrens-Fisher`: the sum of a normal number and a t number for each arm's seeds. `all arms`: `twice`, each arm's
variance drawn towards that of the other arms (Smyth 2004).

    python benchmarks/study/variances.py [--studies 1000] [--seed 0]    # a minute or two
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.special import digamma, polygamma
from scipy.stats import chi2, norm, t

Floats = NDArray[np.float64]
CORRELATION, N_EACH, N_SEEDS, CHUNK = 0.3, 5, 3, 50
METHODS = ("twice", "once", "two arms", "joint", "Behrens-Fisher", "all arms")
_RATIOS = np.concatenate([[0], np.geomspace(0.06, 12, 9)])
_HALVES = np.geomspace(1e-3, 1e4, 4000)


def draw(n_documents: int, sds: Floats, random: np.random.Generator, *, untrained: bool) -> Floats:
    """Return correct answers by document, [studies, arms, seeds, documents], of arms whose true accuracy is 60%."""
    shape, rest = (CHUNK, len(sds), N_SEEDS, n_documents, N_EACH), (1 - CORRELATION) / 2
    shared = random.normal(0, math.sqrt(CORRELATION), (CHUNK, 1, 1, n_documents, 1))
    shared = shared + random.normal(0, math.sqrt(rest), (CHUNK, 1, 1, n_documents, N_EACH))
    level = norm.ppf(0.6)
    of_seeds = sds / norm.pdf(level)
    shift = random.normal(0, 1, shape[:3]) * of_seeds[:, None] + level * np.sqrt(1 + of_seeds**2)[:, None]
    noise = random.standard_normal(shape, dtype=np.float32) * math.sqrt(rest)
    right = (shared + noise + shift[..., None, None] > 0).sum(-1).astype(np.float64)
    if untrained:
        right[:, 0] = right[:, 0, :1]
    return np.asarray(right)


def parts(right: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the difference of two arms, its variance between documents, and by arm that of seeds and of answers."""
    n = right.shape[-1]
    scale = n / (n - 1) / (n * N_EACH) ** 2
    rest = right - right.mean(-1, keepdims=True)
    documents = scale * ((rest[:, 0] - rest[:, 1]).mean(1) ** 2).sum(-1)
    accuracies = right.mean(-1) / N_EACH
    noise = scale * ((rest - rest.mean(2, keepdims=True)) ** 2).sum((2, 3)) / N_SEEDS / (N_SEEDS - 1)
    means = accuracies.mean(2)
    return means[:, 0] - means[:, 1], documents, accuracies.var(2, ddof=1) / N_SEEDS, noise


def moderated(variances: Floats) -> tuple[Floats, Floats]:
    """Return variances [studies, arms] drawn towards each other, and their degrees of freedom."""
    df, most = N_SEEDS - 1, (N_SEEDS - 1.0) * variances.shape[1]
    middle = np.median(variances, axis=1, keepdims=True)
    logs = np.log(np.maximum(variances, middle / 100)) - digamma(df / 2) + math.log(df / 2)
    excess = logs.var(1, ddof=1) - polygamma(1, df / 2)
    prior = 2 * np.interp(-np.maximum(excess, 1e-6), -polygamma(1, _HALVES), _HALVES)
    scale = np.exp(logs.mean(1) + digamma(prior / 2) - np.log(prior / 2))
    scale, prior = np.where(prior < most, scale, variances.mean(1)), np.minimum(prior, most)
    return (prior[:, None] * scale[:, None] + df * variances) / (prior[:, None] + df), prior + df


def limit_table(alpha: float, n: int, random: np.random.Generator) -> Any:
    """Return the Behrens-Fisher limit over the documents' standard error, by both arms' seeds' standard errors over it."""
    draws = 60_000
    first, second = (random.standard_t(N_SEEDS - 1, draws) for _ in range(2))
    documents, table = random.standard_t(n - 1, draws), np.empty((len(_RATIOS), len(_RATIOS)))
    for i, a in enumerate(_RATIOS):
        for j, b in enumerate(_RATIOS[: i + 1]):
            table[i, j] = table[j, i] = np.quantile(np.abs(documents + a * first + b * second), 1 - alpha)
    return RegularGridInterpolator((_RATIOS, _RATIOS), table)


def decisions(right: Floats, alpha: float, table: Any, pooled: tuple[Floats, Floats]) -> dict[str, NDArray[np.bool_]]:
    """Return for each method which studies say at `alpha` that the two arms differ."""
    difference, documents, seeds, noise = parts(right)
    n, df = right.shape[-1], N_SEEDS - 1
    both, answers = seeds.sum(1), noise.sum(1)
    net = np.maximum(0, both - answers)
    rest, squares = documents**2 / (n - 1), (seeds**2).sum(1) / df
    ratio = np.where(np.maximum(both, answers) > 0, answers / np.maximum(np.maximum(both, answers), 1e-12), 0) * 2 * df
    larger = np.maximum(both, answers)
    zero, weight_one, two = (chi2.sf(ratio, 2 * df + more) for more in (0, 2, 4))
    mean = larger * weight_one - answers * zero
    spread = larger**2 * (df + 1) / df * two - 2 * answers * larger * weight_one + answers**2 * zero - mean**2
    totals = {
        "twice": (documents + both, rest + squares),
        "once": (documents + net, rest + np.where(net > 0, squares, 0)),
        "two arms": (documents + net, rest + both**2 / (2 * df)),
        "joint": (documents + net, rest + np.maximum(spread, 0) / 2),
        "all arms": (documents + pooled[0].sum(1), rest + (pooled[0] ** 2).sum(1) / pooled[1]),
    }
    result = {
        name: np.abs(difference) > t.isf(alpha / 2, np.maximum(total**2 / below, 1)) * np.sqrt(total)
        for name, (total, below) in totals.items()
    }
    ratios = np.minimum(np.sqrt(seeds / documents[:, None]), _RATIOS[-1])
    result["Behrens-Fisher"] = np.abs(difference) > table(ratios) * np.sqrt(documents)
    return result


def measure(
    n_documents: int,
    sds: list[float],
    alpha: float,
    n_studies: int,
    random: np.random.Generator,
    *,
    untrained: bool = False,
) -> dict[str, float]:
    """Return for each method the percentage of studies in which any arm is said to differ from the first."""
    table, counts = limit_table(alpha, n_documents, random), dict.fromkeys(METHODS, 0)
    for _ in range(n_studies // CHUNK):
        right = draw(n_documents, np.array(sds), random, untrained=untrained)
        variances = (right.mean(-1) / N_EACH).var(2, ddof=1) / N_SEEDS
        informed, df = moderated(variances[:, untrained:])
        if untrained:
            informed = np.concatenate([np.zeros((CHUNK, 1)), informed], axis=1)
        any_found = {name: np.zeros(CHUNK, dtype=bool) for name in METHODS}
        for arm in range(1, len(sds)):
            pair = decisions(right[:, [arm, 0]], alpha, table, (informed[:, [arm, 0]], df))
            for name, differs in pair.items():
                any_found[name] |= differs
        for name in METHODS:
            counts[name] += int(any_found[name].sum())
    return {name: 100 * count / n_studies for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.studies % CHUNK:
        parser.error(f"--studies: found {arguments.studies}, expected a multiple of {CHUNK}, which are drawn at once.")
    n, random = arguments.studies, np.random.default_rng(arguments.seed)
    print(f"| coverage of 95% intervals, % | {' | '.join(METHODS)} |\n|---|{'---|' * len(METHODS)}")
    for n_documents in (10, 20, 120):
        for sd in (0.0, 0.02, 0.04):
            rates = measure(n_documents, [sd, sd], 0.05, n, random)
            cells = " | ".join(f"{100 - rates[name]:.1f}" for name in METHODS)
            print(f"| {n_documents} documents, SD {100 * sd:.0f} | {cells} |", flush=True)
    print(f"\n| false among ten, % | {' | '.join(METHODS)} |\n|---|{'---|' * len(METHODS)}")
    for name, sds, untrained in (
        ("an arm, SD 0", [0.0] * 11, False), ("an arm, SD 2", [0.02] * 11, False), ("an arm, SD 4", [0.04] * 11, False),
        ("an arm, SD 0 and 4", [0.02, *[0.0, 0.04] * 5], False), ("base, SD 2", [0.0] + [0.02] * 10, True),
        ("base, SD 4", [0.0] + [0.04] * 10, True), ("base, SD 0 and 4", [0.0, *[0.0, 0.04] * 5], True),
    ):  # fmt: skip
        rates = measure(120, sds, 0.005, n, random, untrained=untrained)
        print(f"| ten arms like {name} | {' | '.join(f'{rates[method]:.1f}' for method in METHODS)} |", flush=True)


if __name__ == "__main__":
    main()
