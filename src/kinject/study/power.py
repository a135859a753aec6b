"""What each claim of a study could tell, before it runs: by stored answers where there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kinject.recipe.sections import ClaimSection
from kinject.report.formatting import format_count
from kinject.results import MARGIN
from kinject.stats.matrix import CorrectnessMatrix
from kinject.stats.power import Design, Spread, cheapest, detectable, spread_of
from kinject.study.arms import BASE
from kinject.study.claims import Evidence
from kinject.types import ArmName, Question

_COMPARED = ("difference", "equivalence")


def render_power(
    claims: Mapping[str, ClaimSection],
    evidence: Evidence,
    questions: Mapping[str, Sequence[Question]],
    n_seeds: int,
) -> Iterator[str]:
    """Yield a line for each claim that compares two arms: the difference that it can tell, and what
    would tell one of five points.

    `evidence` has the answers of finished stages, `questions` the test questions of each set,
    `n_seeds` is the study's.
    """
    family = max(1, len(claims))
    for name, claim in claims.items():
        asked = questions.get(claim.question_set, ())
        # The others compare one arm with guessing, or several: `detectable` is of two arms.
        if claim.test not in _COMPARED or not asked:
            continue
        arms = [evidence.arm_name(claim.arm), evidence.arm_name(claim.baseline)]
        # The base is not trained, so seeds do not change it.
        n_trained = sum(ArmName.parse(arm).arm != BASE for arm in arms)
        n_documents = len({question.document_id or question.id for question in asked})
        design = Design(n_documents, len(asked) / n_documents, n_seeds, n_trained, family)
        matrices = [evidence.matrix(arm, claim, net=evidence.is_net(arms, claim)) for arm in arms]
        spread = _measured(matrices)
        yield _line(name, design, spread, len(asked))


def _measured(matrices: Sequence[CorrectnessMatrix | None]) -> Spread:
    """Return how the difference of two arms varies by their answers, else the assumptions."""
    arm, baseline = matrices
    found = None
    if arm is not None and baseline is not None and arm.question_ids and baseline.question_ids:
        found = spread_of(arm, baseline)
    return found or Spread()


def _line(name: str, design: Design, spread: Spread, n_questions: int) -> str:
    tells = detectable(design, spread)
    source = "by stored answers"
    if spread.assumed:
        source = (
            "assumed: two of five answers change, changes on a document correlate by 0.1, "
            "trainings differ by 2 points"
        )
    text = (
        f"power: {name}: tells a difference of {100 * tells:.1f} points "
        f"({format_count(n_questions, 'question')} on {design.n_documents:,} documents, "
        f"{format_count(design.n_seeds, 'seed')}, {format_count(design.family, 'claim')}; {source})"
    )
    change = cheapest(design, spread, MARGIN)
    if change:
        text += f"; {100 * MARGIN:g} points need {change}"
    return text
