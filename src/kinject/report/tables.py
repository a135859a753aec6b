"""The tables of a report beside those of its results: names, claims, choices, costs and the small
ones that only some reports have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kinject.report.formatting import (
    View,
    arm_name,
    bare_p,
    format_finite,
    format_label,
    format_name,
    format_nonzero,
    format_p,
    format_percent,
    format_points,
    format_seed,
    join_words,
    perplexity_change,
)
from kinject.report.page import Cell, Line, TableBlock, line, without_empty_columns
from kinject.results import (
    ArmInfo,
    Claim,
    Cost,
    Perplexity,
    Recall,
)
from kinject.stats.perplexities import perplexity_bounds
from kinject.terminal import CURRENCY, duration, exact_number, format_count
from kinject.types import RAG, JudgeResult, Price

_FOR = {
    "learning": "the documents of the training answer it",
    "retention": "known before: what training may lose",
    "unanswerable": "no document answers it: to decline is correct",
}
_VERDICTS = {
    "shown": ("✓ shown", "good"),
    "opposite shown": ("✗ opposite shown", "bad"),
    "not shown": ("○ not shown", ""),
    "cannot be tested": ("– cannot be tested", ""),
}
_STAGES = ("setup", "augment", "corpus", "train", "merge", "eval")


def names_table(view: View) -> TableBlock:
    """Return the arms and question sets in words: what each model read, what each set is for."""
    lines = [
        line(format_name(arm.name), _about_arm(view, arm))
        for model in view.report.models
        for arm in view.own_arms(model)
    ]
    ks = sorted({result.k for result in view.set_results if result.k})
    if ks:
        passages = format_count(ks[0], "passage")
        if len(ks) > 1:
            passages = f"{ks[0]} to {ks[-1]} passages"
        about = f"the same model, shown {passages} that the retriever found"
        lines.append(line("… with passages", about))
    lines += [line(f"“{format_name(name)}”", _about_set(view, name)) for name in view.sets()]
    return TableBlock("", "", ("name", "what it is"), tuple(lines), wordy=True)


def _about_arm(view: View, arm: ArmInfo) -> str:
    """Return ``trained: 16 paraphrases of each document; base model sandbox``."""
    about = view.about(arm.model, arm.name)
    if arm.name == view.base(arm.model):
        about = "the model that the others are compared with"
    # The author's words for an arm come before what it read.
    parts = [about]
    if arm.trained:
        parts.append(view.reading(arm.model, arm.name))
    if view.several_models:
        parts.append(f"base model {format_name(arm.model)}")
    words = "trained" if arm.trained else "not trained"
    details = dict.fromkeys(filter(None, parts))  # a reading may be the study's own words
    return ": ".join(filter(None, (words, "; ".join(details))))


def _about_set(view: View, name: str) -> str:
    """Return ``300 questions on 60 documents: known before: what training may lose; guessing gives
    25.0%``."""
    first = view.first(name)
    about = f"{_size(view, name)}: {_FOR.get(first.role, first.role)}"
    # Written answers have no accuracy of guessing.
    if first.chance:
        about += f"; guessing gives {format_percent(first.chance)}"
    return about


def _size(view: View, name: str) -> str:
    """Return ``600 questions on 120 documents, up to 3 of the questions without a score``."""
    first = view.first(name)
    size = format_count(first.n, "question")
    if first.n_documents not in (None, first.n_scored):
        size += f" on {format_count(first.n_documents or 0, 'document')}"
    # Arms differ in it, so the most is named.
    most_unscored = max(r.n_unscored for r in view.set_results if r.question_set == name)
    if most_unscored:
        size += f", up to {most_unscored:,} of the questions without a score"
    return size


def claims_table(claims: Sequence[Claim]) -> TableBlock:
    """Return the claims that the study tests, each with its verdict and numbers."""
    columns = ("claim", "verdict", "finding", "Holm p", "source")
    table = TableBlock("", "", columns, tuple(map(_claim_line, claims)), wordy=True)
    return without_empty_columns(table)


def _claim_line(claim: Claim) -> Line:
    mark, tone = _VERDICTS[claim.verdict]
    late = "declared after test questions were answered" if claim.declared_late else ""
    return line(
        format_name(claim.statement),
        Cell(f"{mark}{claim.words.removeprefix(claim.verdict)}", tone, late),
        format_name(claim.finding),
        "" if claim.p_holm is None else bare_p(claim.p_holm),
        format_name(claim.source),
    )


def choices_table(view: View) -> TableBlock:
    """Return each choice with its whole grid."""
    lines = []
    for choice in view.report.choices:
        rates = [f"{_value(value)}: {100 * rate:.1f}" for value, rate, _ in choice.candidates]
        chosen = Cell(_value(choice.chosen))
        if choice.at_edge:
            chosen = Cell(_value(choice.chosen), "", "end of the grid")
        arm = view.with_model(format_name(choice.arm), choice.model)
        key, name = format_name(choice.key), format_name(choice.question_set)
        lines.append(line(key, arm, name, ", ".join(rates), chosen))
    columns = ("key", "arm", "validation set", "value: rate in %", "chosen")
    return without_empty_columns(TableBlock("", "", columns, tuple(lines), wordy=True))


def _value(value: str | float | None) -> str:
    return exact_number(value) if isinstance(value, float) else format_name(str(value))


def cost_table(view: View) -> TableBlock:
    """Return the cost of each arm, all its seeds together; the cost of shared stages is divided
    among the arms."""
    by_arm: dict[tuple[str, str], list[Cost]] = {}
    for cost in view.report.costs:
        by_arm.setdefault((cost.model, cost.arm), []).append(cost)
    lines = [
        line(view.with_model(format_name(arm), model), *_cost_cells(costs))
        for (model, arm), costs in by_arm.items()
    ]
    columns = (
        "arm",
        "seeds",
        *_STAGES,
        "its part",
        "tokens trained",
        "tokens written, a seed",
        "read by a teacher, a seed",
        "work of training, a seed",
        "peak memory",
        f"money, {CURRENCY}",
    )
    table = TableBlock("Cost of each arm", "seeds together", columns, tuple(lines), folded=True)
    return without_empty_columns(table)


def _cost_cells(costs: Sequence[Cost]) -> Iterator[str]:
    """Yield the cells of an arm with these costs, behind its name."""
    n_seeds = len({cost.seed for cost in costs})
    yield str(n_seeds)
    for stage in _STAGES:
        yield _duration(sum(cost.seconds for cost in costs if cost.stage == stage))
    yield duration(sum(cost.seconds / cost.shared_by for cost in costs))
    yield f"{sum(cost.tokens for cost in costs if cost.stage == 'train'):,}"
    yield format_nonzero(sum(cost.written_tokens for cost in costs) / n_seeds, "{:,.0f}")
    yield format_nonzero(sum(cost.teacher_tokens for cost in costs) / n_seeds, "{:,.0f}")
    yield _duration(sum(cost.work_seconds for cost in costs) / n_seeds)
    peak = max(cost.peak_bytes for cost in costs)
    yield format_nonzero(peak / 2**30, "{:.1f} GiB")
    money = sum(cost.money / cost.shared_by for cost in costs)
    yield format_nonzero(money, "{:.2f}")


def _duration(seconds: float) -> str:
    # Empty without such a stage, so that a column of none is left out.
    return duration(seconds) if seconds else ""


def price_table(view: View) -> TableBlock:
    """Return what it costs to ask each arm and to train it, and the number of questions from which
    on training pays."""
    lines = []
    for price in view.report.prices:
        arm = view.with_model(arm_name(price.arm, price.k), price.model)
        lines.append(
            line(
                arm,
                format_finite(price.prompt_tokens, 1, "not known"),
                f"{price.answer_tokens:.1f}",
                format_finite(price.asking, 4, "not known"),
                format_nonzero(price.training, "{:.4f}"),
                _pays_after(price),
            )
        )
    about = f"{CURRENCY}, over the question sets that get passages"
    columns = (
        "model",
        "prompt tokens a question",
        "answer tokens",
        "1,000 questions",
        "training, once",
        "training pays, against base with passages, from questions",
    )
    table = TableBlock("What an answer costs", about, columns, tuple(lines))
    return without_empty_columns(table)


def _pays_after(price: Price) -> str:
    if isinstance(price.pays_after, int):
        return f"{price.pays_after:,}"
    return price.pays_after or ""


def published_table(view: View) -> TableBlock:
    """Return the accuracies that a paper printed beside those of the report, with the difference
    and its interval."""
    lines = []
    for item in view.report.published:
        arm = arm_name(item.arm.removesuffix(f"+{RAG}"), item.k)
        bounds = f"{100 * item.low:+.1f} to {100 * item.high:+.1f}"
        tone = ""
        if item.low > 0:
            tone = "good"
        elif item.high < 0:
            tone = "bad"
        lines.append(
            line(
                view.with_model(arm, item.model),
                format_name(item.question_set),
                str(item.shots),
                format_name(format_label(item.format)),
                f"{100 * item.published:.1f}",
                f"{100 * item.measured:.1f}",
                Cell(format_points(item.measured - item.published), tone, bounds),
            )
        )
    sources = join_words(list(dict.fromkeys(item.source for item in view.report.published)))
    about = (
        f"{format_name(sources)}. Difference: measured - published, 95% interval of independent "
        "answers; the publication's own uncertainty is in it"
    )
    columns = ("model", "questions", "shots", "asked as", "published %", "here %", "difference")
    return TableBlock("Beside the published numbers", about, columns, tuple(lines))


def shortcuts_table(view: View) -> TableBlock:
    """Return what the choices of each set give away to someone who reads no question."""
    lines = []
    for item in view.report.shortcuts:
        fractions = (
            item.right_known,
            item.wrong_known,
            item.picker,
            item.most_frequent,
            item.longest,
            item.shortest,
            item.guessing,
        )
        lines.append(
            line(format_name(item.question_set), f"{item.n:,}", *map(format_percent, fractions))
        )
    columns = (
        "questions",
        "n",
        "right choices in the documents",
        "wrong choices in the documents",
        "right who picks one that stands there",
        "the most frequent there",
        "the longest",
        "the shortest",
        "guessing",
    )
    about = "right answers of someone who knows the documents' strings and reads no question"
    return TableBlock("What the choices give away", about, columns, tuple(lines))


def arms_table(view: View) -> TableBlock:
    """Return where the recipe of each arm differs."""
    lines = []
    for arm in view.report.arms:
        differs = ", ".join(f"{key}={value}" for key, value in arm.recipe.items())
        texts = (arm.name, arm.model, arm.description, arm.sweep, differs, arm.step_matched_to)
        lines.append(line(*map(format_name, texts)))
    columns = ("arm", "model", "description", "sweep", "differs in", "as many steps or tokens as")
    table = TableBlock("Each arm's recipe", "", columns, tuple(lines), wordy=True, folded=True)
    return without_empty_columns(table)


def small_tables(view: View) -> Iterator[TableBlock]:
    """Yield recall of retrieval, choices, prices, perplexity and the judge, if there are any."""
    if view.report.recalls:
        yield _recall_table(view.report.recalls)
    if view.report.shortcuts:
        yield shortcuts_table(view)
    if view.report.prices:
        yield price_table(view)
    if view.report.held_bits:
        yield _bits_table(view)
    for label, items in view.perplexities():
        yield _perplexity_table(view, label, items)
    if view.report.judge is not None:
        yield _judge_table(view.report.judge)


def _bits_table(view: View) -> TableBlock:
    """Return the bits that each arm holds, and those of each of its parameters."""
    lines = []
    for item in view.report.held_bits:
        each = item.bits / item.n_parameters
        bounds = f"{item.low:,.0f} to {item.high:,.0f}"
        lines.append(
            line(
                view.with_model(arm_name(item.arm), item.model),
                format_name(item.question_set),
                f"{item.n_parameters:,}",
                Cell(f"{item.bits:,.0f}", "", bounds),
                f"{item.most:,.0f}",
                format_nonzero(each, "{:.3g}"),
            )
        )
    about = (
        "facts x log2(choices) x (right - guessing) / (1 - guessing): a lower bound; 95% interval "
        "below (arXiv 2404.05405)"
    )
    columns = ("model", "questions", "parameters", "bits", "of at most", "bits a parameter")
    return TableBlock("Bits held", about, columns, tuple(lines))


def _recall_table(recalls: Sequence[Recall]) -> TableBlock:
    lines = tuple(
        line(
            format_name(recall.question_set),
            format_name(recall.retrieval),
            str(recall.k),
            f"{recall.n:,}",
            # A set may have no question that names a document.
            format_percent(recall.n_found / recall.n) if recall.n else "",
            format_nonzero(recall.n_empty, "{:,}"),
        )
        for recall in recalls
    )
    about = "questions whose document is among the K passages, of those that name one"
    columns = ("questions", "retrieval", "K", "n", "found", "questions without any passage")
    return without_empty_columns(TableBlock("Recall of retrieval", about, columns, lines))


def _perplexity_table(view: View, label: str, items: Sequence[Perplexity]) -> TableBlock:
    """Return the perplexities of one file of held-out texts, that of the base first."""
    base = items[0]
    changes = [perplexity_change(item, base) for item in items]
    changes[0] = "base"
    if not view.has_base(items):
        changes = [""] * len(items)
    lines = tuple(
        line(
            format_name(item.arm),
            f"{item.n_tokens:,}",
            format_finite(item.per_token, 3),
            _perplexity_bounds(item),
            change,
            format_finite(item.bits_per_byte, 4),
        )
        for item, change in zip(items, changes, strict=True)
    )
    columns = ("model", "tokens", "perplexity", "95% interval", "to base", "bits per byte")
    table = TableBlock("Perplexity of held-out texts", label, columns, lines)
    return without_empty_columns(table)


def _perplexity_bounds(item: Perplexity) -> str:
    bounds = perplexity_bounds(item)
    if bounds is None:
        return ""
    return f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _judge_table(judge: JudgeResult) -> TableBlock:
    lines = tuple(
        line(
            grade,
            f"{judge.planted[grade]:,}",
            _rate(judge.precision[grade]),
            _rate(judge.recall[grade]),
        )
        for grade in judge.recall
    )
    about = "measured on planted answers before it graded others"
    columns = ("grade", "planted answers", "precision", "recall")
    return TableBlock(f"The judge, {format_name(judge.model)}", about, columns, lines)


def _rate(rate: float | None) -> str:
    # A grade that the judge never gave has no precision.
    return "" if rate is None else format_percent(rate)


def claims_text(view: View) -> Iterator[str]:
    """Yield claims, choices and failures as lines, for the terminal."""
    for claim in view.report.claims:
        verdict = claim.words
        if claim.declared_late:
            verdict += " (declared late)"
        if claim.p_holm is not None:
            verdict += f" ({format_p(claim.p_holm)} after Holm)"
        # A text that YAML folds ends with a line break.
        yield f"claim: {format_name(claim.statement)}: {verdict}: {format_name(claim.finding)}"
    for choice in view.report.choices:
        rates = ", ".join(f"{_value(value)}: {rate:.3f}" for value, rate, _ in choice.candidates)
        edge = ", an end of the grid: widen it" if choice.at_edge else ""
        chosen = f"{format_name(choice.key)} {_value(choice.chosen)}"
        yield f"chosen for {format_name(choice.arm)}: {chosen} ({rates}){edge}"
    for failure in view.report.failures:
        arm = f"{format_name(failure.arm)}{format_seed(failure.seed)}"
        message = format_name(failure.message)
        yield f"failed: {arm}: {failure.stage}: {message} (log: {failure.log})"
