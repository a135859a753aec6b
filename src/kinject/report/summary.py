"""A study's result on a terminal: one table, the claims, what failed."""

from __future__ import annotations

from kinject.eval.table import aligned, format_p
from kinject.results import Score, StudyResult


def render_summary(result: StudyResult) -> str:
    """Return each arm's accuracy by set (first way of asking, and the chosen K), choices, claims and failures."""
    blocks = [_table(result), _choices(result), _claims(result), _failures(result)]
    return "\n\n".join(block for block in blocks if block)


def _table(result: StudyResult) -> str:
    shown = [
        score for score in result.scores
        if score.role != "baseline" and not score.subject and (score.k == 0 or score.chosen_k)
        and (score.format, score.shots) == (result.scores[0].format, result.scores[0].shots)
    ]  # fmt: skip
    sets = list(dict.fromkeys(score.question_set for score in shown))
    by_row: dict[tuple[str, str], dict[str, Score]] = {}
    for score in shown:
        label = score.arm if score.k == 0 else f"{score.arm}+rag, K {score.k}"
        by_row.setdefault((score.model, label), {})[score.question_set] = score
    rows: list[tuple[str, ...]] = [("model", "arm", *sets)]
    rows += [(model, label, *(_cell(own.get(name)) for name in sets)) for (model, label), own in by_row.items()]
    return (
        f"{result.title}\n{aligned(rows, frozenset(range(2, 2 + len(sets))))}"
        if shown
        else f"{result.title}: no arm finished"
    )


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    mark = ""
    if score.to_base is not None and score.to_base.p_holm < 0.05:
        mark = "+" if score.to_base.delta > 0 else "-"
    return f"{score.accuracy:.3f} ({score.low:.2f} to {score.high:.2f}){mark or ' '}"


def _choices(result: StudyResult) -> str:
    lines = [
        f"chosen for {choice.arm}{f' ({choice.model})' if len(result.models) > 1 else ''}: {choice.what} {choice.chosen} on "
        f"{choice.candidates[0][2]} validation questions of {choice.question_set} ("
        + ", ".join(f"{value}: {accuracy:.3f}" for value, accuracy, _ in choice.candidates)
        + ")"
        + (", an end of the grid: widen it" if choice.at_edge and choice.what != "k" else "")
        for choice in result.choices
    ]
    return "\n".join(lines)


def _claims(result: StudyResult) -> str:
    if not result.claims:
        return ""
    rows: list[tuple[str, ...]] = [("claim", "verdict", "p Holm", "finding")]
    rows += [
        (claim.statement, claim.verdict, "" if claim.p_holm is None else format_p(claim.p_holm), claim.finding)
        for claim in result.claims
    ]
    legend = "intervals: 95%, over source documents and seeds; + and -: differs from base at 5% after Holm"
    return f"{aligned(rows, frozenset({2}))}\n{legend}"


def _failures(result: StudyResult) -> str:
    return "\n".join(
        f"failed: {failure.arm}, seed {failure.seed}: {failure.stage}: {failure.message} (log: {failure.log})"
        for failure in result.failures
    )
