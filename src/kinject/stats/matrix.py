"""The answers of one arm as numbers: questions come in source documents, training in seeds.

Arrays are float64, [seeds, questions], 1 if the answer was correct.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kinject.results import Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class SeedVariance(NamedTuple):
    """The variance of one seed's accuracy between seeds and its degrees of freedom; `alone`: unlike
    that of other arms.

    `noise` is the part of it that comes from single answers, as they scatter within documents.
    """

    value: float
    df: float
    alone: bool = False
    noise: float = 0.0

    @property
    def net(self) -> float:
        """The variance of the seeds themselves."""
        return max(0.0, self.value - self.noise)


@dataclass(frozen=True)
class CorrectnessMatrix:
    """The answers of one arm: `correct` [seeds, questions] is 0 or 1; `clusters` names each
    question's source document.

    `chances` are the accuracies of guessing each question, () where guessing never succeeds.
    `pooled` is the variance of seeds as the other arms of a study inform it (`family_variances`);
    None: its own seeds alone.
    """

    correct: Floats
    question_ids: tuple[str, ...]
    clusters: tuple[str, ...]
    chances: tuple[float, ...] = ()
    pooled: SeedVariance | None = None

    def mean(self) -> float:
        """Return the accuracy, seeds averaged."""
        return float(self.correct.mean())

    @property
    def n_seeds(self) -> int:
        """The number of seeds."""
        return int(self.correct.shape[0])

    def part(self, columns: Sequence[int]) -> CorrectnessMatrix:
        """Return the matrix of some of the questions, whose `pooled` variance is not known."""
        ids = tuple(self.question_ids[i] for i in columns)
        clusters = tuple(self.clusters[i] for i in columns)
        chances: tuple[float, ...] = ()
        if self.chances:
            chances = tuple(self.chances[i] for i in columns)
        return CorrectnessMatrix(self.correct[:, list(columns)], ids, clusters, chances)

    @property
    def chance(self) -> float:
        """The accuracy of guessing: the mean of the questions' chances."""
        if not self.chances:
            return 0.0
        return sum(self.chances) / len(self.chances)

    @cached_property
    def _members(self) -> tuple[Any, int]:
        return _members(self.question_ids, self.clusters)

    @property
    def n_documents(self) -> int:
        """The number of documents; a question without one is one of its own."""
        return self._members[1]

    @cached_property
    def per_cluster(self) -> tuple[Floats, Floats]:
        """Sums [seeds, clusters] and counts [clusters] over the questions of each document."""
        import numpy as np

        member, n = self._members
        sums = np.stack([np.bincount(member, row, n) for row in self.correct]).astype(np.float64)
        return sums, np.bincount(member, minlength=n).astype(np.float64)

    @property
    def n_effective(self) -> float:
        """The effective number of documents (Kish 1965): 1.4 where one has 200 questions and 19
        have two."""
        counts = self.per_cluster[1]
        if not len(counts):
            return 0.0
        return float(counts.sum() ** 2 / (counts**2).sum())

    @property
    def seed_variance(self) -> SeedVariance:
        """The variance of one seed's accuracy between seeds; several seeds are needed.

        Its noise is that of documents within seeds (two-way clustering: Cameron, Gelbach and Miller
        2011).
        """
        sums, counts = self.per_cluster
        rest, n, df = sums - sums.mean(0), counts.sum(), self.n_seeds - 1.0
        means = rest.sum(1) / n
        within = float(((rest - means[:, None] * counts) ** 2).sum()) / n**2
        noise = within / df * self.n_effective / max(self.n_effective - 1, 1)
        return SeedVariance(float((means**2).sum()) / df, df, noise=noise)

    @property
    def is_plain(self) -> bool:
        """Whether it has one seed and no document with two questions, so that questions are
        independent."""
        return self.n_seeds == 1 and self.n_documents == len(self.question_ids)

    @property
    def interval_name(self) -> Interval:
        """The name of the interval that `bounded_accuracy` gives."""
        if self.is_plain:
            return "Wilson"
        return "Wilson over documents and seeds"


@lru_cache(maxsize=16)  # the arms of a question set have the same questions
def _members(question_ids: tuple[str, ...], clusters: tuple[str, ...]) -> tuple[Any, int]:
    import numpy as np

    # No document has such a name, so a question without one stays alone.
    names = [cluster or f"\0{name}" for cluster, name in zip(clusters, question_ids, strict=True)]
    index = {name: i for i, name in enumerate(sorted(set(names)))}
    return np.array([index[name] for name in names], dtype=np.intp), len(index)


def mean_of_alike(values: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    """Return `values` with each replaced by the mean of those that have its key."""
    of_key: dict[Hashable, list[float]] = {}
    for value, key in zip(values, keys, strict=True):
        of_key.setdefault(key, []).append(value)
    means = {key: math.fsum(alike) / len(alike) for key, alike in of_key.items()}
    return [means[key] for key in keys]


def beyond(matrix: CorrectnessMatrix, control: CorrectnessMatrix) -> CorrectnessMatrix:
    """Return what the answers of `matrix` have beyond those of its `control`, the same arm without
    the question.

    Values are differences, from -1 to 1, on the questions of both, seed by seed. A control of one
    seed serves every seed.
    """
    matrix, control = aligned(matrix, control)
    # A difference of accuracies has no chance, and not the seeds' variance of an accuracy.
    return replace(matrix, correct=matrix.correct - control.correct, chances=(), pooled=None)


def aligned(*matrices: CorrectnessMatrix) -> list[CorrectnessMatrix]:
    """Return `matrices` on the questions of all of them, in one order: one without a score in one
    of them is no pair.

    A question has its document from the first matrix that names one.
    """
    shared = set(matrices[0].question_ids)
    for matrix in matrices[1:]:
        shared &= set(matrix.question_ids)
    names = tuple(name for name in matrices[0].question_ids if name in shared)
    parts = [_on_questions(matrix, names) for matrix in matrices]
    if len({part.clusters for part in parts}) > 1:
        by_question = zip(*(part.clusters for part in parts), strict=True)
        clusters = tuple(next(filter(None, named), "") for named in by_question)
        parts = [replace(part, clusters=clusters) for part in parts]
    return parts


def _on_questions(matrix: CorrectnessMatrix, names: tuple[str, ...]) -> CorrectnessMatrix:
    if matrix.question_ids == names:
        return matrix
    index = {name: i for i, name in enumerate(matrix.question_ids)}
    part = matrix.part([index[name] for name in names])
    # A few questions without a score do not change how much the seeds differ.
    return replace(part, pooled=matrix.pooled)
