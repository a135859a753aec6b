"""A report on the terminal: tables of accuracies, choices, claims, failures, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kinject.report.formatting import escape_markdown, format_finite, perplexity_change
from kinject.report.headline import render_headline
from kinject.report.page import render_markdown_block
from kinject.report.tables import numbers_tables
from kinject.report.verdict import render_verdict
from kinject.report.view import View, unscored_text
from kinject.results import ArmResult, Contrast, Recall, Report
from kinject.stats import format_p
from kinject.terminal import aligned

_HEAD = ("arm", "K", "format", "shots", "accuracy", "95% interval", "chance", "n", "to base", "gain", "p", "p Holm")
_RIGHT_ALIGNED = frozenset({1, *range(3, 12)})
_OPTIONAL = frozenset({"gain", "p Holm"})  # columns left out where they are empty


def render_summary(report: Report) -> str:
    """Return `report` as text without a trailing newline.

    An evaluation: every result by question set, learning beside forgetting, subjects, recall, perplexity, notes. A study:
    each arm's accuracy by set (first prompt format, and the chosen K), choices, claims, failures. The headline ends it.
    """
    view = View(report)
    if report.kind == "evaluation":
        names = dict.fromkeys(result.question_set for result in report.results)
        blocks = [
            *(_set_table(name, report.results) for name in names), _outcomes(report), _judge(report), _unscored(report),
            _changes(report),
            *_subject_tables(report.results), _recalls(report.recalls), _perplexities(view),
            "\n".join(f"note: {note}" for note in report.notes),
        ]  # fmt: skip
    else:
        blocks = [
            _arm_table(report), _outcomes(report), _judge(report), _unscored(report), _perplexities(view),
            _choices(report), _claims(report), _failures(report),
        ]  # fmt: skip
    blocks.append(" ".join(render_headline(view, render_verdict(view))).strip())
    return "\n\n".join(block for block in blocks if block)


def render_card_tables(report: Report) -> str:
    """Return the headline and the tables of all accuracies as Markdown, for a model card."""
    view = View(report)
    headline = " ".join(render_headline(view, render_verdict(view))).strip()
    blocks = [escape_markdown(headline), *("\n".join(render_markdown_block(table)) for table in numbers_tables(view))]
    return "\n\n".join(block for block in blocks if block)


def _outcomes(report: Report) -> str:
    """Return the outcomes of written answers, a row an arm and set, each rate with its change to base; "" without any."""
    rows: list[tuple[str, ...]] = [("set", "arm", "K", "right", "wrong", "abstained", "answered")]
    for result in report.results:
        if result.outcomes and (report.kind == "evaluation" or not result.k or result.chosen_k):
            parts = (result.wrong, result.abstained, result.answered)
            right = _rate(result.accuracy, result.to_base)
            rates = ("" if part is None else _rate(part.rate, part.to_base) for part in parts)
            rows.append((result.question_set, _arm(result), str(result.k), right, *rates))
    about = "written answers, each share with its change to base (answered: of the questions that no document answers)"
    return f"{about}\n{aligned(rows, frozenset(range(2, 7)))}" if len(rows) > 1 else ""


def _judge(report: Report) -> str:
    """Return precision and recall of the judge of written answers; "" without one."""
    judge = report.judge
    if judge is None:
        return ""
    rates = (f"{grade} {judge.precision[grade] or 0:.2f} / {judge.recall[grade] or 0:.2f}" for grade in judge.recall)
    return f"judge {judge.model}, on planted answers: precision / recall {', '.join(rates)}"


def _rate(rate: float, contrast: Contrast | None) -> str:
    if contrast is None:
        return f"{rate:.3f}"
    return f"{rate:.3f} ({contrast.delta:+.3f}{'*' if contrast.is_significant else ''})"


def _unscored(report: Report) -> str:
    return "\n".join(f"no score: {unscored_text(item)}" for item in report.unscored)


def _arm(result: ArmResult) -> str:
    return f"{result.arm}+rag" if result.k else result.arm


def _format(result: ArmResult) -> str:
    """Return the format, with the score if it is not the plain sum: ``texts / chars``."""
    return result.format if result.score == "sum" else f"{result.format} / {result.score}"


def _set_table(name: str, results: Sequence[ArmResult]) -> str:
    of_set = [result for result in results if result.question_set == name]
    rows = [_HEAD, *(_row(result) for result in of_set)]
    kept = [i for i in range(len(_HEAD)) if _HEAD[i] not in _OPTIONAL or any(row[i] for row in rows[1:])]
    right = frozenset(column for column, i in enumerate(kept) if i in _RIGHT_ALIGNED)
    table = aligned([[row[i] for i in kept] for row in rows], right)
    return f"{name} ({of_set[0].role}, {of_set[0].n} questions)\n{table}"


def _row(result: ArmResult) -> tuple[str, ...]:
    contrast = result.to_base
    return (
        *_settings(result), f"{result.accuracy:.3f}", f"{result.low:.3f} to {result.high:.3f}", f"{result.chance:.3f}",
        str(result.n) if not result.n_unscored else f"{result.n} ({result.n_unscored} unscored)",
        "" if contrast is None else f"{contrast.delta:+.3f}",
        "" if contrast is None or contrast.relative is None else f"{contrast.relative:+.1%}",
        "" if contrast is None or contrast.p is None else format_p(contrast.p),
        "" if contrast is None or contrast.p_holm is None else format_p(contrast.p_holm),
    )  # fmt: skip


def _settings(result: ArmResult) -> tuple[str, str, str, str]:
    """Return arm, K, format and shots."""
    return _arm(result), str(result.k), _format(result), str(result.shots)


def _changes(report: Report) -> str:
    """Return the change to base of each arm on learning and on retention sets; "" without both."""
    changed = [result for result in report.results if result.to_base is not None]
    if not {result.role for result in changed} >= {"learning", "retention"}:
        return ""
    sets = sorted(dict.fromkeys((result.role, result.question_set) for result in report.results))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for result in changed:
        rows.setdefault(_settings(result), {})[result.question_set] = (
            "" if result.to_base is None else f"{result.to_base.delta:+.3f}"
        )
    head = ("arm", "K", "format", "shots", *(f"{role}: {name}" for role, name in sets))
    lines = [head, *((*key, *(deltas.get(name, "") for _, name in sets)) for key, deltas in rows.items())]
    return f"change to {report.models[0]}, by question set\n{aligned(lines, frozenset({1, *range(3, len(head))}))}"


def _subject_tables(results: Sequence[ArmResult]) -> Iterator[str]:
    """Yield a table by subject for each question set that has several: a row a subject, a column an arm."""
    with_subjects = [result for result in results if result.subjects]
    for name, form in dict.fromkeys((result.question_set, result.prompt_format) for result in with_subjects):
        of_set = [result for result in with_subjects if (result.question_set, result.prompt_format) == (name, form)]
        head = ("subject", "n", *(f"{_arm(result)}, K {result.k}" if result.k else result.arm for result in of_set))
        rows = [head]
        by_arm = [{part.name: part for part in result.subjects} for result in of_set]
        for subject in {name: part for parts in reversed(by_arm) for name, part in parts.items()}.values():
            parts = (parts.get(subject.name) for parts in by_arm)
            cells = ("" if part is None else _bounded((part.accuracy, part.low, part.high)) for part in parts)
            rows.append((subject.name or "(none)", str(subject.n), *cells))
        means = ("" if result.macro is None else _bounded(result.macro) for result in of_set)
        rows.append(("mean of subjects", str(of_set[0].n), *means))
        title = f"{name} by subject ({_format(of_set[0])}, {form.shots} shots)"
        yield f"{title}\n{aligned(rows, frozenset(range(1, len(head))))}"


def _bounded(value: tuple[float, float | None, float | None]) -> str:
    accuracy, low, high = value
    return f"{accuracy:.3f}" if low is None or high is None else f"{accuracy:.3f} ({low:.2f} to {high:.2f})"


def _recalls(recalls: Sequence[Recall]) -> str:
    """Return the fraction of questions whose source document was retrieved: a row a set, a column a K."""
    if not recalls:
        return ""
    ks = list(dict.fromkeys(item.k for item in recalls))
    fractions = {(item.question_set, item.k): f"{item.n_found / item.n:.3f}" for item in recalls}
    counts = {item.question_set: str(item.n) for item in recalls}
    rows: list[tuple[str, ...]] = [("questions", "n", *(f"K {k}" for k in ks))]
    rows += [(name, n, *(fractions.get((name, k), "") for k in ks)) for name, n in counts.items()]
    title = "recall: questions whose document is among the K passages (of those that name one)"
    return f"{title}\n{aligned(rows, frozenset(range(1, len(ks) + 2)))}"


def _perplexities(view: View) -> str:
    """Return each arm's perplexity of the held-out texts and its change to the base's; "" if none was measured."""
    items = view.report.perplexities
    if not items:
        return ""
    several = len({item.model for item in items}) > 1
    rows: list[tuple[str, ...]] = [("model", "texts", "tokens", "perplexity", "to base", "bits per byte")]
    for base, item in ((of_base[0], item) for _, of_base in view.perplexities() for item in of_base):
        name = f"{item.model} {item.arm}" if several else item.arm
        cells = (format_finite(item.per_token, 3), perplexity_change(item, base), format_finite(item.bits_per_byte, 4))
        rows.append((name, str(item.n_texts), str(item.n_tokens), *cells))
    return f"held-out perplexity on {items[0].name}\n{aligned(rows, frozenset(range(1, 6)))}"


def _arm_table(report: Report) -> str:
    shown = [
        result for result in report.results
        if result.role != "baseline" and not result.subject and (result.k == 0 or result.chosen_k)
        and result.prompt_format == report.results[0].prompt_format
    ]  # fmt: skip
    if not shown:
        return f"{report.title}: no arm finished"
    sets = list(dict.fromkeys(result.question_set for result in shown))
    by_row: dict[tuple[str, str], dict[str, ArmResult]] = {}
    for result in shown:
        label = result.arm if result.k == 0 else f"{result.arm}+rag, K {result.k}"
        by_row.setdefault((result.model, label), {})[result.question_set] = result
    rows: list[tuple[str, ...]] = [("model", "arm", *sets)]
    rows += [(*key, *(_marked(by_set.get(name)) for name in sets)) for key, by_set in by_row.items()]
    return f"{report.title}\n{aligned(rows, frozenset(range(2, 2 + len(sets))))}"


def _marked(result: ArmResult | None) -> str:
    if result is None:
        return ""
    mark = " "
    if result.to_base is not None and result.to_base.is_significant:
        mark = "+" if result.to_base.delta > 0 else "-"
    unscored = f", {result.n_unscored} unscored" if result.n_unscored else ""
    return f"{result.accuracy:.3f} ({result.low:.2f} to {result.high:.2f}{unscored}){mark}"


def _choices(report: Report) -> str:
    return "\n".join(
        f"chosen for {choice.arm}{f' ({choice.model})' if len(report.models) > 1 else ''}: {choice.key} {choice.chosen} on "
        f"{choice.candidates[0][2]} validation questions of {choice.question_set} ("
        + ("" if choice.outcome == "right" else f"fewest {choice.outcome}; ")
        + ", ".join(f"{value}: {rate:.3f}" for value, rate, _ in choice.candidates)
        + ")"
        + (", an end of the grid: widen it" if choice.at_edge and choice.key != "k" else "")
        for choice in report.choices
    )


def _claims(report: Report) -> str:
    if not report.claims:
        return ""
    rows: list[tuple[str, ...]] = [("claim", "verdict", "p Holm", "finding")]
    rows += [
        (
            claim.statement,
            f"{claim.words} (declared late)" if claim.declared_late else claim.words,
            "" if claim.p_holm is None else format_p(claim.p_holm),
            claim.finding,
        )
        for claim in report.claims
    ]
    legend = "intervals: 95%, over source documents and seeds; + and -: differs from base at 5% after Holm"
    if any(claim.scope != "method" for claim in report.claims):
        legend += "\nin these models: an arm was trained with one seed, so another training may show something else"
    return f"{aligned(rows, frozenset({2}))}\n{legend}"


def _failures(report: Report) -> str:
    return "\n".join(
        f"failed: {failure.arm}, seed {failure.seed}: {failure.stage}: {failure.message} (log: {failure.log})"
        for failure in report.failures
    )
