"""Power: which difference a comparison can tell, and the cheapest change by which it tells a
smaller one.

A difference of accuracies varies with the questions, which come in documents, and with the seeds of
trained arms. Both parts follow from stored answers, or else from what was seen in other studies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kinject.results import ALPHA, FEWEST
from kinject.stats.intervals import FEWEST_DF, cochran_df, quantile, variance_of
from kinject.stats.matrix import CorrectnessMatrix, aligned
from kinject.terminal import format_count

POWER = 0.8
_FAR = 100.0
"""Standard errors."""
_MOST_QUESTIONS, _MOST_DOCUMENTS, _MOST_SEEDS = 24, 10_000, 20
_MANY_QUESTIONS = 12
"""What a change may ask for: more than 24 questions on a document of a page ask the same facts
again, and twelve are little work."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a difference of two arms varies.

    `question` is the variance of one question's change (1 where it became right, -1 where wrong);
    `within` the correlation of changes of questions on one document; `seed` the variance of the
    difference between two trainings; `answer` that of one answer between trainings. `assumed`
    without stored answers.
    """

    # Two of five answers change.
    question: float = 0.4
    within: float = 0.1
    # Two trainings differ by two points, squared.
    seed: float = 0.0004
    # 0.06 to 0.10 in seven arms of recipes/studies/real.yaml.
    answer: float = 0.08
    assumed: bool = True


@dataclass(frozen=True, slots=True)
class Design:
    """What a comparison has: documents, questions on each (their mean), seeds of each trained arm.

    `n_trained` counts the arms that seeds change, 0 to 2; `family` the claims that Holm's
    correction is made for. `n_alike` arms of the study are trained as often, so that their seeds
    inform one variance (`family_variances`).
    """

    n_documents: float
    n_questions: float
    n_seeds: int
    n_trained: int
    family: int
    n_alike: int = 1

    @property
    def seeds_df(self) -> float:
        """The degrees of freedom of the variance between seeds."""
        own = self.n_seeds - 1.0
        others = own * (self.n_alike - 1)
        # As `family_variances`: of so few seeds each arm keeps its own variance.
        if others < FEWEST_DF:
            return own
        return own + others


def detectable(design: Design, spread: Spread) -> float:
    """Return the difference that is shown with a probability of 80%, at 5% after Holm's correction.

    The first claim of a family is judged at 5% divided by its size, which is taken here. With one
    seed the verdict is about these trained models, and no variance between trainings counts.
    """
    of_document = spread.question * (1 + (design.n_questions - 1) * spread.within)
    variance = of_document / (design.n_questions * design.n_documents)
    df = design.n_documents - 1
    if design.n_trained and design.n_seeds > 1:
        # `seed` is that of a difference of two trained arms; against a base there is half of it.
        of_seeds = design.n_trained / 2 * spread.seed / design.n_seeds
        n_answers = design.n_questions * design.n_documents
        of_answers = design.n_trained * spread.answer / n_answers / design.n_seeds
        # As the test has them: few seeds are known badly, before the noise of answers is taken off.
        df = cochran_df([(variance, df), (of_seeds + of_answers, design.seeds_df)])
        variance += of_seeds
    return _shown(math.sqrt(variance), ALPHA / design.family, df)


def detectable_by(low: float, high: float, n_documents: float, family: int = 1) -> float:
    """Return the difference that a comparison with this 95% interval shows with a probability of
    80%, by itself, or as the first of a `family`."""
    df = max(1.0, n_documents - 1)
    error = (high - low) / 2 / quantile(ALPHA / 2, df)
    return _shown(error, ALPHA / family, df)


def documents_needed(
    interval: tuple[float, float],
    n_documents: int,
    n_effective: float,
    distance: float,
    family: int = 1,
) -> int:
    """Return how many documents show a difference of `distance` in four of five tries, where
    `n_documents` (that count as `n_effective`) gave this 95% `interval`.

    The one rule of the gate in CI, of a report's open questions and of its advice.
    """
    tells = detectable_by(*interval, n_effective, family)
    # The variance of a mean falls with the number of documents.
    return max(FEWEST, math.ceil(n_documents * (tells / distance) ** 2))


def _shown(error: float, alpha: float, df: float) -> float:
    """Return the difference with this standard error that a two-sided test at `alpha` shows with a
    probability of 80%: by the noncentral t, since a sum of two quantiles shows it in 67% where few
    seeds and many claims are."""
    from scipy.special import chdtri, nctdtrinc

    limit = quantile(alpha / 2, df)
    # There scipy's does not converge, and the error of the difference itself counts for nothing.
    if limit > _FAR:
        return error * limit * math.sqrt(float(chdtri(df, 1 - POWER)) / df)
    return error * float(nctdtrinc(df, 1 - POWER, limit))


def cheapest(design: Design, spread: Spread, wanted: float) -> str:
    """Return in words the cheapest change by which a difference of `wanted` can be told.

    Questions cost no training, so these come first, then documents and seeds, whose product is the
    tokens to train on. "" if nothing need change.
    """
    if detectable(design, spread) <= wanted:
        return ""
    for n_questions in range(math.ceil(design.n_questions), _MOST_QUESTIONS + 1):
        if detectable(replace(design, n_questions=n_questions), spread) <= wanted:
            return f"{format_count(n_questions, 'question')} a document"
    full = replace(design, n_questions=max(design.n_questions, _MANY_QUESTIONS))
    found: dict[float, Design] = {}
    for n_seeds in range(design.n_seeds, _MOST_SEEDS + 1):
        larger = _with_documents(replace(full, n_seeds=n_seeds), spread, wanted)
        if larger is not None:
            found.setdefault(larger.n_documents * n_seeds, larger)
    if not found:
        return f"over {_MOST_DOCUMENTS:,} documents and {_MOST_SEEDS} seeds"
    best = found[min(found)]
    words = f"{best.n_questions:g} questions on each of {best.n_documents:,g} documents"
    if best.n_seeds > design.n_seeds:
        words += f" and {format_count(best.n_seeds, 'seed')}"
    return words


def _with_documents(design: Design, spread: Spread, wanted: float) -> Design | None:
    """Return the design with as many documents as it takes, to within a twentieth; None if no
    number does."""
    n_documents = math.ceil(design.n_documents)
    while n_documents < _MOST_DOCUMENTS:
        larger = replace(design, n_documents=n_documents)
        if detectable(larger, spread) <= wanted:
            return larger
        n_documents = math.ceil(1.05 * n_documents)
    return None


def spread_of(matrix: CorrectnessMatrix, other: CorrectnessMatrix) -> Spread | None:
    """Return how the difference of two arms varies in their stored answers; None where it does not.

    Of arms with one seed each the variance between trainings stays the assumed one.
    """
    matrix, other = aligned(matrix, other)
    n = len(matrix.question_ids)
    if n < 2:
        return None
    changes = matrix.correct.mean(0) - other.correct.mean(0)
    of_question = float(changes.var())
    variance = variance_of([(1.0, matrix), (-1.0, other)])
    if variance is None or of_question == 0:
        return None
    mean_size = n / matrix.n_documents
    inflation = variance.documents * n / of_question
    within = 0.0
    if mean_size > 1:
        within = min(1.0, max(0.0, (inflation - 1) / (mean_size - 1)))
    seeds = [of.seed_variance for of in (matrix, other) if of.n_seeds > 1]
    if not seeds:
        return Spread(of_question, within, assumed=False)
    of_seed = sum(found.net for found in seeds) / len(seeds)
    of_answer = n * sum(found.noise for found in seeds) / len(seeds)
    return Spread(of_question, within, 2 * of_seed, of_answer, assumed=False)
