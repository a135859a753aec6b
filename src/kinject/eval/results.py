"""From a run's answers to its cells, and to the notes on masses and on K."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_uppercase

from kinject.eval.cells import correct_family, is_right, make_cell
from kinject.eval.plan import Arm, Plan, QuestionSet
from kinject.eval.prompts import WITHOUT_QUESTION
from kinject.eval.scores import LETTERED, Score, letter_mass, letter_priors, rescored
from kinject.recipe.sections import EvalSection
from kinject.types import Answer, Cell

Results = dict[tuple[str, Arm], list[Answer]]

_LOW_MASS = 0.5


def make_cells(plan: Plan, section: EvalSection, results: Results) -> tuple[Cell, ...]:
    """Return one cell for each question set, arm and score, compared with the first model without context.

    p is Holm-corrected over all comparisons of the report. Validation splits have no cells: they only choose K.
    """
    cells = [
        _cell(question_set, arm, score, section, results)
        for question_set in plan.sets
        if not question_set.chooses_k_for
        for arm in question_set.arms
        for score in _scores_for(arm, section)
    ]
    return correct_family(cells)


def _cell(question_set: QuestionSet, arm: Arm, score: Score, section: EvalSection, results: Results) -> Cell:
    base = replace(arm, model=next(iter(section.models)), k=0)

    def numbers(of: Arm) -> list[Answer]:
        without = results[question_set.name, _bare(of)] if score == "pmi" else ()
        return rescored(results[question_set.name, of], score, without)

    cell = make_cell(
        numbers(arm), role=question_set.role, model=arm.model, base=None if arm == base else numbers(base), score=score
    )
    return replace(cell, mass=letter_mass(results[question_set.name, arm]))


def _bare(arm: Arm) -> Arm:
    return Arm(arm.model, "texts-no-question", 0, 0)


def _scores_for(arm: Arm, section: EvalSection) -> tuple[Score, ...]:
    """Return the scores that mean something for `arm`: letters are all equally long; a baseline needs no pmi."""
    wanted: tuple[Score, ...] = tuple(dict.fromkeys(section.scores))
    if arm.format in LETTERED:
        return ("sum",)
    if arm.format in WITHOUT_QUESTION or arm.format == "task":
        return tuple(score for score in wanted if score != "pmi") or ("sum",)
    return wanted


def note_masses(results: Results, notes: list[str]) -> None:
    """Add a note for each arm whose probability mostly lies off the letters, and one on letters favoured as such."""
    for (name, arm), answers in results.items():
        mass = letter_mass(answers)
        where = f"{arm.name} on {name} ({arm.format}, {arm.shots} shots, K {arm.k})"
        if mass is not None and mass < _LOW_MASS:
            notes.append(
                f"{where}: the letters hold only {mass:.1%} of the probability; the format may have failed, not the knowledge"
            )
        if arm.format == "rotations":
            priors = zip(ascii_uppercase, letter_priors(answers), strict=False)
            shares = ", ".join(f"{letter} {share:.0%}" for letter, share in priors)
            notes.append(f"{where}: whatever stands there, the letters get {shares}; removed")


def note_chosen_k(plan: Plan, section: EvalSection, results: Results, notes: list[str]) -> None:
    """Add a note on each arm's K: chosen on validation questions and reported on test, or only best on test.

    Of equal K the smallest counts, without context among them.
    """
    if section.retrieval is None:
        return
    chosen_by = {item.chooses_k_for: item for item in plan.sets if item.chooses_k_for}
    for question_set in plan.sets:
        if question_set.chooses_k_for:
            continue
        ways = dict.fromkeys(replace(arm, k=0) for arm in question_set.arms if arm.k)
        for way in ways:
            ks = (0, *dict.fromkeys(section.retrieval.k))
            test = {k: _accuracy(results[question_set.name, replace(way, k=k)]) for k in ks}
            best = max(ks, key=lambda k: (test[k], -k))
            where = f"{way.model} on {question_set.name} ({way.format}, {way.shots} shots)"
            split = chosen_by.get(question_set.name)
            if split is None:
                if len(ks) > 2:
                    notes.append(
                        f"{where}: K = {best} is best on the very questions it is reported on ({test[best]:.3f}), which "
                        "flatters it; name validation questions to choose K"
                    )
                continue
            seen = {k: _accuracy(results[split.name, replace(way, k=k)]) for k in ks}
            chosen = max(ks, key=lambda k: (seen[k], -k))
            note = f"{where}: K = {chosen} chosen on {len(split.questions)} validation questions ({seen[chosen]:.3f}): "
            note += f"{test[chosen]:.3f} on test"
            if best != chosen:
                note += f"; best on test, and flattered by it: K = {best} with {test[best]:.3f}"
            notes.append(note)


def _accuracy(answers: list[Answer]) -> float:
    merged = rescored(answers, "sum")
    return sum(map(is_right, merged)) / len(merged)
