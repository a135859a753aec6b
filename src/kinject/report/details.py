"""The legend of arms and question sets, and the tables that only a study has: claims, choices, questions, costs, failures."""

from __future__ import annotations

from collections.abc import Sequence

from kinject.report.formatting import bare_p, format_count, format_name, format_percent, format_points, format_prompt
from kinject.report.page import Cell, Line, TableBlock, line, without_empty_columns
from kinject.report.view import View, scaling_label
from kinject.results import Claim, Cost, QuestionResult
from kinject.scaling import Scaling

_VERDICT_TONES = {"shown": "good", "opposite shown": "bad", "not shown": "", "cannot be tested": ""}
_VERDICT_MARKS = {"shown": "✓\u00a0shown", "opposite shown": "✗\u00a0opposite shown", "not shown": "○\u00a0not\u00a0shown",
                  "cannot be tested": "–\u00a0cannot be tested"}  # fmt: skip
STAGES = ("setup", "augment", "corpus", "train", "merge", "eval")
_MOST_QUESTIONS = 5  # of one kind, on one set
_LONGEST = 300  # characters of a question


def legend_tables(view: View) -> list[TableBlock]:
    """Return a table of the arms and one of the question sets, each name in words."""
    lines = []
    for model in view.report.models:
        for arm in view.own_arms(model):
            status = "trained" if arm.trained else "not trained: the model that the others are compared with"
            of = f"; base model {format_name(model)}" if view.several_models else ""
            about = format_name(arm.description)
            about = f"{status}{of}: {about}" if about not in ("", format_name(arm.name)) else f"{status}{of}"
            lines.append(line(format_name(arm.name), about))
    ks = sorted({result.k for result in view.set_results if result.k})
    if ks:
        passages = f"{ks[0]} to {ks[-1]} passages" if len(ks) > 1 else format_count(ks[0], "passage")
        lines.append(line("…+rag", f"the same model, with {passages} before each question, found by the retriever"))
    arms = TableBlock("Arms", "", ("arm", "what it is"), tuple(lines), wordy=True)
    columns = ("question set", "what for", "questions", "documents", "guessing gives", "asked as")
    sets = tuple(_set_line(view, name) for name in view.sets())
    tables = [arms] if lines else []
    return (
        [*tables, without_empty_columns(TableBlock("Question sets", "", columns, sets, wordy=True))] if sets else tables
    )


def _set_line(view: View, name: str) -> Line:
    first = view.first(name)
    documents = f"{first.n_documents:,}" if first.n_documents not in (None, first.n) else ""
    formats = "; ".join(dict.fromkeys(map(format_prompt, view.formats(name))))
    words = {"learning": "the documents of the training answer it", "retention": "known before: what training may lose",
             "unanswerable": "no document answers it: to decline is correct"}  # fmt: skip
    return line(format_name(name), words.get(first.role, first.role), f"{first.n:,}", documents,
                format_percent(first.chance) if first.chance else "", formats)  # fmt: skip


def claims_table(claims: Sequence[Claim]) -> TableBlock:
    """Return the claims that the study tests, each with its verdict and numbers."""
    columns = ("claim", "verdict", "finding", "effect, points", "Holm p", "source")
    return without_empty_columns(TableBlock("", "", columns, tuple(map(_claim_line, claims)), wordy=True))


def _claim_line(claim: Claim) -> Line:
    bounds = ""
    if claim.low is not None and claim.high is not None:
        bounds = f"{format_points(claim.low)} to {format_points(claim.high)}"
    p = "" if claim.p_holm is None else bare_p(claim.p_holm)
    late = "declared after test questions were answered" if claim.declared_late else ""
    models = claim.words.removeprefix(claim.verdict)
    verdict = Cell(f"{_VERDICT_MARKS[claim.verdict]}{models}", _VERDICT_TONES[claim.verdict], late)
    effect = Cell("" if claim.effect is None else format_points(claim.effect), "", bounds)
    p = p.replace(" ", "\u00a0")
    return line(format_name(claim.statement), verdict, format_name(claim.finding), effect, p, format_name(claim.source))


def choices_table(view: View) -> TableBlock:
    """Return each choice with its whole grid."""
    lines = []
    for choice in view.report.choices:
        grid = ", ".join(f"{_value(value)}: {100 * rate:.1f}" for value, rate, _ in choice.candidates)
        by = "" if choice.outcome == "right" else f"fewest {choice.outcome}"
        counts = sorted({n for _, _, n in choice.candidates})
        lines.append(line(
            format_name(choice.key), format_name(choice.model) if view.several_models else "", format_name(choice.arm),
            format_name(choice.question_set), by, grid, " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))),
            Cell(_value(choice.chosen), "", "end of the grid" if choice.at_edge else ""),
            "" if choice.best_on_test is None else _value(choice.best_on_test),
        ))  # fmt: skip
    rate = "accuracy" if all(choice.outcome == "right" for choice in view.report.choices) else "rate"
    columns = (
        "key", "model", "arm", "validation set", "chosen by", f"value: {rate} in %", "questions", "chosen", "best on test",
    )  # fmt: skip
    return without_empty_columns(TableBlock("", "", columns, tuple(lines), wordy=True))


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else format_name(str(value))


def question_tables(view: View) -> list[TableBlock]:
    """Return, by set, the questions that differ most between arms: those that arms gained, then those that arms lost."""
    model = view.report.models[0] if view.report.models else ""
    base, arms = view.base(model), [arm.name for arm in view.own_arms(model)]
    tables = []
    for name in dict.fromkeys(item.question_set for item in view.report.questions):
        items = [item for item in view.report.questions if item.question_set == name and base in item.fraction_correct]
        every = (*arms, *(f"{arm}+rag" for arm in arms))
        labels = [label for label in every if any(label in item.fraction_correct for item in items)]
        trained = [label for label in labels if label in arms and label != base]
        gained = [item for item in items if item.fraction_correct[base] < 0.5]
        lost = [item for item in items if item.fraction_correct[base] > 0.5]
        lines = [_question_line("gained", item, labels) for item in _most_different(gained, trained, gained=True)]
        lines += [_question_line("lost", item, labels) for item in _most_different(lost, trained, gained=False)]
        if lines:
            columns = ("question", "change", *map(format_name, labels))
            title = f"{format_name(name)}: the most different questions"
            about = "fraction of seeds that were correct, in %"
            tables.append(TableBlock(title, about, columns, tuple(lines), folded=True))
    return tables


def _most_different(items: Sequence[QuestionResult], labels: Sequence[str], *, gained: bool) -> list[QuestionResult]:
    """Return the few questions whose answers arms changed (to correct if `gained`) and on which they differ most."""
    scored = []
    for item in items:
        fractions = [item.fraction_correct[label] for label in labels if label in item.fraction_correct]
        changed = [fraction for fraction in fractions if (fraction > 0.5) == gained]
        if changed:
            centre = sum(fractions) / len(fractions)
            scored.append((sum((fraction - centre) ** 2 for fraction in fractions), item))
    return [item for _, item in sorted(scored, key=lambda pair: -pair[0])[:_MOST_QUESTIONS]]


def _question_line(change: str, item: QuestionResult, labels: Sequence[str]) -> Line:
    answer = item.choices[item.answer] if 0 <= item.answer < len(item.choices) else " or ".join(item.answers)
    others = [choice for i, choice in enumerate(item.choices) if i != item.answer]
    below = f"correct: {format_name(answer, _LONGEST) or '(no answer)'}"
    below += f"; wrong: {'; '.join(format_name(c, _LONGEST) for c in others)}" if others else ""
    head = Cell(format_name(item.question, _LONGEST), "", below)
    fractions = (
        f"{100 * item.fraction_correct[label]:.0f}" if label in item.fraction_correct else "" for label in labels
    )
    return line(head, change, *fractions)


def cost_table(view: View) -> TableBlock:
    """Return the cost of each arm, all its seeds together; the cost of shared stages is divided among the arms."""
    lines = []
    for model, arm in dict.fromkeys((cost.model, cost.arm) for cost in view.report.costs):
        costs = [cost for cost in view.report.costs if (cost.model, cost.arm) == (model, arm)]
        money = sum(cost.money / cost.shared_by for cost in costs)
        n_seeds = len({cost.seed for cost in costs})
        written, read = (
            sum(getattr(cost, key) for cost in costs) / n_seeds for key in ("written_tokens", "teacher_tokens")
        )
        work = sum(cost.work_seconds for cost in costs) / n_seeds
        lines.append(line(
            format_name(arm), format_name(model) if view.several_models else "",
            str(n_seeds), *(_stage_seconds(costs, stage) for stage in STAGES),
            format_seconds(sum(cost.seconds for cost in costs)),
            format_seconds(sum(cost.seconds / cost.shared_by for cost in costs)),
            f"{sum(cost.tokens for cost in costs if cost.stage == 'train'):,}", f"{sum(cost.tokens for cost in costs):,}",
            f"{written:,.0f}" if written else "", f"{read:,.0f}" if read else "", f"{work:.1f} s" if work else "",
            format_bytes(max(cost.peak_bytes for cost in costs)), f"{money:.2f}" if money else "",
        ))  # fmt: skip
    columns = ("arm", "model", "seeds", *STAGES, "all", "its part", "tokens trained", "tokens, all stages",
               "tokens written, a seed", "read by a teacher, a seed", "work of training, a seed", "peak memory",
               "money")  # fmt: skip
    about = "seeds together"
    if any(cost.work_seconds for cost in view.report.costs):
        about += "; work: with the teacher and own answers, also where a cache had them; on a CPU processor time"
    return without_empty_columns(TableBlock("Cost of each arm", about, columns, tuple(lines), folded=True))


def _stage_seconds(costs: Sequence[Cost], stage: str) -> str:
    seconds = [cost.seconds for cost in costs if cost.stage == stage]
    return format_seconds(sum(seconds)) if seconds else ""


def format_seconds(seconds: float) -> str:
    """Return ``9.3 s``, ``12 min`` or ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_bytes(n: int) -> str:
    """Return ``900 MiB`` or ``12.3 GiB``; "" for none known."""
    return "" if not n else f"{n / 2**20:,.0f} MiB" if n < 2**30 else f"{n / 2**30:.1f} GiB"


def arms_table(view: View) -> TableBlock:
    """Return the description of each arm."""
    lines = []
    for arm in view.report.arms:
        recipe = ", ".join(f"{key}={value}" for key, value in arm.recipe.items())
        lines.append(line(
            format_name(arm.name), format_name(arm.model) if view.several_models else "", format_name(arm.description),
            format_name(recipe), format_name(arm.step_matched_to), format_name(arm.sweep),
        ))  # fmt: skip
    columns = ("arm", "model", "description", "differs in", "as many steps or tokens as", "point of the sweep")
    return without_empty_columns(
        TableBlock("Description of each arm", "", columns, tuple(lines), wordy=True, folded=True)
    )


def failures_table(view: View) -> TableBlock:
    """Return the arms that could not be finished, with the log of each."""
    lines = [
        line(format_name(f.arm), format_name(f.model) if view.several_models else "", "" if f.seed is None else str(f.seed),
             format_name(f.stage), format_name(f.message), format_name(f.log))
        for f in view.report.failures
    ]  # fmt: skip
    columns = ("arm", "model", "seed", "stage", "error", "log")
    return without_empty_columns(TableBlock("", "", columns, tuple(lines), wordy=True))


def scaling_tables(scaling: Scaling) -> list[TableBlock]:
    """Return the fitted lines and the bits of each point, where there are any."""
    return [*([_fits_table(scaling)] if scaling.fits else ()), *([_points_table(scaling)] if scaling.points else ())]


def _fits_table(scaling: Scaling) -> TableBlock:
    lines = tuple(
        line(format_name(fit.question_set), f"doubling of {fit.along}",
             format_name(scaling_label(scaling, fit.fixed) if fit.along == "parameters" else fit.fixed),
             Cell(f"{100 * fit.slope:+.1f}", "", f"{100 * fit.low:+.1f} – {100 * fit.high:+.1f}"),
             "–" if fit.r_squared is None else f"{fit.r_squared:.2f}", str(fit.n))
        for fit in scaling.fits
    )  # fmt: skip
    columns = ("set", "along", "at", "points of accuracy", "r²", "runs")
    return TableBlock("What a doubling adds", "least squares, 95% interval below", columns, lines, heads=3)


def _points_table(scaling: Scaling) -> TableBlock:
    lines = tuple(
        line(format_name(point.question_set), format_name(point.model), format_name(scaling_label(scaling, point.label)),
             f"{point.parameters:,}", f"{100 * point.accuracy:.1f}%",
             Cell(f"{point.bits:,.0f}", "", f"{point.low:,.0f} – {point.high:,.0f}"), f"{point.most_bits:,.0f}",
             f"{point.per_parameter:.3g}")
        for point in scaling.points
    )  # fmt: skip
    columns = ("set", "model", "at", "parameters", "accuracy", "bits", "of at most", "bits per parameter")
    return TableBlock("Bits held", "95% interval below", columns, lines, heads=3)
