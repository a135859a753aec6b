"""Statistics of a study: questions come in documents, training in seeds, and both are resampled.

Arrays are float64, [seeds, questions], 1 if the answer was correct. The same input gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

N_RESAMPLES = 4000
N_FLIPS = 20_000
_MOST_DRAWS = 1 << 24
"""Numbers of draws in memory at once (128 MiB)."""
_TINY = 1e-9


@dataclass(frozen=True)
class CorrectnessMatrix:
    """The answers of one arm: `correct` [seeds, questions] is 0 or 1; `clusters` names each question's source document."""

    correct: Floats
    question_ids: tuple[str, ...]
    clusters: tuple[str, ...]

    def mean(self) -> float:
        """Return the accuracy, seeds averaged."""
        return float(self.correct.mean())

    def part(self, columns: Sequence[int]) -> CorrectnessMatrix:
        """Return the matrix of some of the questions."""
        ids, clusters = ([values[i] for i in columns] for values in (self.question_ids, self.clusters))
        return CorrectnessMatrix(self.correct[:, list(columns)], tuple(ids), tuple(clusters))

    @cached_property
    def per_cluster(self) -> tuple[Floats, Floats, list[str]]:
        """Sums [seeds, clusters] and counts [clusters] over the questions of each document, and the documents."""
        import numpy as np

        names = sorted(set(self.clusters))
        index = {name: i for i, name in enumerate(names)}
        member = np.array([index[name] for name in self.clusters], dtype=np.intp)
        sums = np.stack([np.bincount(member, row, len(names)) for row in self.correct]).astype(np.float64)
        return sums, np.bincount(member, minlength=len(names)).astype(np.float64), names


def aligned(*matrices: CorrectnessMatrix) -> list[CorrectnessMatrix]:
    """Return `matrices` on the questions of all of them: one without a score in one of them is no pair."""
    shared = set(matrices[0].question_ids).intersection(*(matrix.question_ids for matrix in matrices[1:]))
    return [
        matrix if len(matrix.question_ids) == len(shared)
        else matrix.part([i for i, name in enumerate(matrix.question_ids) if name in shared])
        for matrix in matrices
    ]  # fmt: skip


def interval(matrix: CorrectnessMatrix, other: CorrectnessMatrix | None = None) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the accuracy, or of the difference to `other` on its questions.

    Documents are drawn with replacement, the same for both matrices; so are the seeds of each matrix, if it has several
    (a crossed bootstrap: Owen 2007, "The pigeonhole bootstrap").
    """
    import numpy as np

    means = _resampled(matrix, other)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _resampled(matrix: CorrectnessMatrix, other: CorrectnessMatrix | None) -> Floats:
    sums, counts, _ = matrix.per_cluster
    drawn = _means(sums, counts, 1)
    return drawn if other is None else drawn - _means(other.per_cluster[0], counts, 2)


def _means(sums: Floats, counts: Floats, stream: int) -> Floats:
    """Return the resampled means. One stream of draws serves all matrices on a set: the same documents for both sides."""
    import numpy as np

    of_seeds = np.concatenate(list(_draws(sums.shape[0], stream))) / sums.shape[0]
    columns = np.vstack([sums, counts]).T
    drawn = np.concatenate([weights @ columns for weights in _draws(len(counts), 0)])  # [resamples, seeds + 1]
    return np.asarray((of_seeds * drawn[:, :-1]).sum(1) / drawn[:, -1])


def _draws(n: int, stream: int) -> Iterator[Any]:
    """Yield parts of [resamples, n]: how often each of `n` was drawn. The memory does not grow with n."""
    import numpy as np

    if n * N_RESAMPLES <= _MOST_DRAWS:
        yield _kept_draws(n, stream).astype(np.float64)
        return
    random, chances = np.random.default_rng([stream, n]), [1 / n] * n
    for part in np.array_split(np.arange(N_RESAMPLES), -(-n * N_RESAMPLES // _MOST_DRAWS)):
        yield random.multinomial(n, chances, len(part)).astype(np.float64)


@lru_cache(maxsize=64)
def _kept_draws(n: int, stream: int) -> Any:
    import numpy as np

    return np.random.default_rng([stream, n]).multinomial(n, [1 / n] * n, N_RESAMPLES).astype(np.uint16)


_BLOCK = 64


@lru_cache(maxsize=64)
def _signs(block: int) -> Any:
    """Return [flips, 64] random signs of the documents from 64 `block` on, in column-major order."""
    import numpy as np

    drawn = np.random.default_rng([0, block]).integers(0, 2, (N_FLIPS, _BLOCK), dtype=np.int8)
    return np.asfortranarray(drawn * np.int8(2) - np.int8(1))


@cache
def _every_sign(n: int) -> Any:
    """Return [2^n, n]: every assignment of signs to `n` numbers."""
    import numpy as np

    return (np.arange(2**n)[:, None] >> np.arange(n) & 1) * 2.0 - 1.0


def sign_flip_p(matrix: CorrectnessMatrix, other: CorrectnessMatrix | float) -> float:
    """Return the two-sided p of the mean difference being 0: signs flipped document by document (Fisher's randomisation).

    If at most 14 documents differ, every assignment of signs is counted, else 20,000 random ones. `other` is a matrix on the same
    questions, or a constant such as chance. Seeds are averaged first, so p speaks of these trained models; the interval
    speaks of other seeds too.
    """
    import numpy as np

    sums, counts, _ = matrix.per_cluster
    expected = other.per_cluster[0].mean(0) if isinstance(other, CorrectnessMatrix) else other * counts
    differences = sums.mean(0) - expected
    differences = differences[np.abs(differences) > _TINY]  # the sign of the others changes nothing
    n = len(differences)
    exact = 2**n <= N_FLIPS
    flipped = _every_sign(n) @ differences if exact else np.zeros(N_FLIPS)
    for i in range(0, 0 if exact else n, _BLOCK):
        part = differences[i : i + _BLOCK]
        flipped += _signs(i // _BLOCK)[:, : len(part)] @ part
    n_extreme = int((np.abs(flipped) >= abs(float(differences.sum())) - _TINY).sum())
    return n_extreme / 2**n if exact else (1 + n_extreme) / (1 + N_FLIPS)


def trend_p(matrices: Sequence[CorrectnessMatrix]) -> float:
    """Return the one-sided p that accuracy rises along `matrices` (Page 1963): documents are the blocks, seeds averaged."""
    import numpy as np
    from scipy.stats import page_trend_test

    columns = []
    for matrix in matrices:
        sums, counts, _ = matrix.per_cluster
        columns.append(sums.mean(0) / counts)
    return float(page_trend_test(np.stack(columns, axis=1)).pvalue)


def near_p(matrix: CorrectnessMatrix, centre: float, margin: float) -> float:
    """Return the p of two one-sided tests that the accuracy lies within `margin` of `centre` (Schuirmann 1987)."""
    drawn = _resampled(matrix, None)
    above = float((1 + (drawn >= centre + margin).sum()) / (1 + N_RESAMPLES))
    below = float((1 + (drawn <= centre - margin).sum()) / (1 + N_RESAMPLES))
    return max(above, below)


def majority_changes(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> tuple[int, int]:
    """Return how many questions most seeds of `other` had wrong and most of `matrix` correct, and the reverse."""
    now, before = matrix.correct.mean(0) > 0.5, other.correct.mean(0) > 0.5
    return int((now & ~before).sum()), int((before & ~now).sum())


def bits_matrix(matrix: CorrectnessMatrix, n_choices: Sequence[int], n_values: Sequence[int]) -> CorrectnessMatrix:
    """Return `matrix` with the bits of each question in place of right or wrong, corrected for guessing.

    log2(values) x (right - 1 / choices) / (1 - 1 / choices): its mean is the share of facts known, times their bits, of a
    reader who knows a fact or guesses evenly among the choices, values being equally likely.
    """
    import numpy as np

    chances = 1 / np.array(n_choices, dtype=np.float64)
    worth = np.log2(np.array(n_values, dtype=np.float64))
    return CorrectnessMatrix((matrix.correct - chances) / (1 - chances) * worth, matrix.question_ids, matrix.clusters)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float, float, float | None]:
    """Return (slope, low, high, intercept, r squared) of least squares of `ys` over log2 of `xs`; 95%, Student's t.

    Where all `ys` are the same the line is level, and r squared None.
    """
    from scipy.stats import linregress, t

    if len(set(ys)) == 1:
        return 0.0, 0.0, 0.0, ys[0], None
    found = linregress([math.log2(x) for x in xs], ys)
    half = float(t.ppf(0.975, len(xs) - 2)) * float(found.stderr)
    slope = float(found.slope)
    return slope, slope - half, slope + half, float(found.intercept), float(found.rvalue) ** 2
