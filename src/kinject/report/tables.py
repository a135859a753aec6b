"""The tables of a report: the headline, one long table of every result, and the small ones that
only some reports have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kinject.disk import Row, check_output, read_jsonl
from kinject.errors import InputError
from kinject.report.formatting import (
    ROLES,
    View,
    arm_label,
    arm_name,
    bare_p,
    format_count,
    format_finite,
    format_name,
    format_p,
    format_percent,
    format_points,
    format_prompt,
    perplexity_change,
)
from kinject.report.page import Cell, Line, TableBlock, line, without_empty_columns
from kinject.results import ArmResult, Claim, Contrast, Control, Cost
from kinject.terminal import duration
from kinject.types import ArmName, Written

_MARKS = {"good": " ▲", "bad": " ▼", "": ""}
_FOR = {"learning": "the documents of the training answer it", "retention": "known before: what training may lose",
        "unanswerable": "no document answers it: to decline is correct"}  # fmt: skip
_VERDICTS = {"shown": ("✓ shown", "good"), "opposite shown": ("✗ opposite shown", "bad"), "not shown": ("○ not shown", ""),
             "cannot be tested": ("– cannot be tested", "")}  # fmt: skip
_CHANGES = {
    "right to wrong": "bad", "wrong to right": "good", "right to abstained": "bad", "abstained to right": "good",
    "abstained to wrong": "bad", "wrong to abstained": "good",
}  # fmt: skip
"""Change of an answer -> its tone: to decline is better than to be wrong."""
_MOST_OF_A_KIND = 10  # changed answers of an arm on a question set
_MOST_CHANGES = 500
_LONGEST = 1_000  # characters of a question or answer
_STAGES = ("setup", "augment", "corpus", "train", "merge", "eval")


def headline_table(view: View) -> TableBlock:
    """Return accuracy by arm (and base model) on each question set, in the first prompt format."""
    sets = view.sets()
    rows: dict[tuple[str, str], dict[str, ArmResult]] = {}
    for result in view.headline_results():
        rows.setdefault((result.model, arm_label(result)), {})[result.question_set] = result
    lines = tuple(
        line(Cell(arm, "", "" if not view.several_models else format_name(model)),
             *(_headline_cell(by_set.get(name)) for name in sets))
        for (model, arm), by_set in rows.items()
    )  # fmt: skip
    chances = [view.first(name).chance for name in sets]
    if any(chances):
        lines = (
            line("guessing", *(f"{100 * chance:.1f}" if chance else "" for chance in chances)),
            *lines,
        )
    columns = (
        "model",
        *(f"{format_name(name)}: {ROLES.get(view.first(name).role, '')}" for name in sets),
    )
    about = "95% interval below; ▲ above, ▼ below base (p < 0.05 after Holm)"
    if any(result.control for by_set in rows.values() for result in by_set.values()):
        about += (
            ". “without the question”: the same choices scored without it; where there is something to learn, ▲ is a gain "
            "beyond that"
        )
    return TableBlock("Correct answers in %", about, columns, lines)


def _accuracy(result: ArmResult | None) -> Cell:
    if result is None:
        return Cell("")
    tone = ""
    change = result.gain if result.role == "learning" else result.to_base
    if change is not None and change.is_significant:
        tone = "good" if change.delta > 0 else "bad"
    unscored = f"; {result.n_unscored:,} unscored" if result.n_unscored else ""
    return Cell(
        f"{100 * result.accuracy:.1f}{_MARKS[tone]}",
        tone,
        f"{_bounds(result.low, result.high)}{unscored}",
    )


def _headline_cell(result: ArmResult | None) -> Cell:
    """Return accuracy with its interval, and of written answers the shares that are wrong and
    abstained."""
    cell = _accuracy(result)
    parts = (
        []
        if result is None
        else [p for p in (result.wrong, result.abstained, result.answered) if p is not None]
    )
    below = "; ".join([cell.below, *(f"{part.outcome} {100 * part.rate:.1f}" for part in parts)])
    if result is not None and result.control is not None:
        below += f"; without the question {100 * result.control.accuracy:.1f}"
    return Cell(cell.text, cell.tone, below)


def _bounds(low: float, high: float) -> str:
    return f"{100 * low:.1f} – {100 * high:.1f}"


def _change(contrast: Contrast | None, more: str = "good") -> Cell:
    """Return a difference in points with its interval, marked where it is significant; `more` is
    the tone of a rise."""
    if contrast is None:
        return Cell("")
    tone, mark = "", ""
    if contrast.is_significant:
        mark = _MARKS["good" if contrast.delta > 0 else "bad"]
        tone = more if contrast.delta > 0 else {"good": "bad", "bad": "good"}.get(more, "")
    bounds = ""
    if contrast.low is not None and contrast.high is not None:
        bounds = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
    return Cell(f"{format_points(contrast.delta)}{mark}", tone, bounds)


_COLUMNS = (
    "questions", "model", "arm", "asked", "accuracy, %", "by seed", "n", "documents", "guessing", "without the question, %",
    "to base, points", "p, Holm", "to base beyond the choices without the question, points", "p of it, Holm",
    "became right", "became wrong", "to retrieval, points", "to itself without passages, points", "wrong, %",
    "abstained, %", "answered without an answer, %", "unread, %", "F1, %", "tokens", "thinking cut, %", "mass on letters, %",
)  # fmt: skip


def results_table(view: View) -> TableBlock:
    """Return every result of the report, one a line: arms, sweeps, subjects, every K and prompt
    format."""
    lines = [line(*_result_cells(view, result)) for result in view.report.results]
    about = "every question set, arm, prompt format, K and subject; press a heading to sort"
    return without_empty_columns(
        TableBlock("Results", about, _COLUMNS, tuple(lines), heads=4, folded=True)
    )


def _result_cells(view: View, result: ArmResult) -> tuple[str | Cell, ...]:
    name = format_name(result.question_set) + (
        f": {format_name(result.subject)}" if result.subject else ""
    )
    seeds = (
        ", ".join(f"{100 * value:.1f}" for value in result.by_seed)
        if len(result.by_seed) > 1
        else ""
    )
    base = result.to_base
    flips = ("", "") if base is None else (f"{base.wrong_to_right:,}", f"{base.right_to_wrong:,}")
    p = "" if base is None or base.deciding_p is None else bare_p(base.deciding_p)
    documents = ""
    if result.n_documents not in (None, result.n_scored):
        documents = f"{result.n_documents:,}"
    n = f"{result.n:,}"
    if result.n_unscored:
        n = f"{result.n_scored:,} of {n}"
    mass = "" if result.mass is None else f"{100 * result.mass:.0f}"
    return (
        name, format_name(result.model), arm_label(result), format_prompt(result.prompt_format), _accuracy(result), seeds,
        n, documents, f"{100 * result.chance:.1f}", _without_question(result.control),
        _change(base), p, *_net_cells(result.control), *flips, _change(result.to_rag), _change(result.to_plain),
        *_outcome_cells(result), *_written_cells(result.written), mass,
    )  # fmt: skip


def _without_question(control: Control | None) -> Cell:
    if control is None:
        return Cell("")
    return Cell(f"{100 * control.accuracy:.1f}", "", _bounds(control.low, control.high))


def _net_cells(control: Control | None) -> tuple[Cell, Cell]:
    """Return the net gain and its p."""
    net = None if control is None else control.net
    if net is None or net.deciding_p is None:
        return Cell(""), Cell("")
    return _change(net), Cell(bare_p(net.deciding_p))


def _outcome_cells(result: ArmResult) -> Iterator[Cell]:
    for part, more in ((result.wrong, "bad"), (result.abstained, ""), (result.answered, "bad")):
        change = _change(None if part is None else part.to_base, more)
        mark = change.text[-2:] if change.text.endswith(("▲", "▼")) else ""
        text = "" if part is None else f"{100 * part.rate:.1f}{mark}"
        yield Cell(text, change.tone, "" if part is None else _bounds(part.low, part.high))


def _written_cells(written: Written | None) -> tuple[str, str, str, str]:
    if written is None:
        return ("", "", "", "")
    w = written
    return (
        f"{100 * w.unread:.1f}" if w.unread else "", f"{100 * w.f1:.1f}", f"{w.n_tokens:.1f}",
        f"{100 * w.thinking_cut:.1f}" if w.n_thinking else "",
    )  # fmt: skip


def changes_table(path: Path) -> TableBlock | None:
    """Return the answers that are right, wrong or abstained where base's are another of these: the
    first of each kind.

    None without the file (flips.jsonl). Raises `InputError` (file:line) for a row of another shape,
    `DiskError` on I/O.
    """
    if not path.exists():
        return None
    check_output(path, "Run it again.")
    kinds, ends = Counter[tuple[object, ...]](), Counter[str]()
    lines: list[Line] = []
    for number, row in read_jsonl(path):
        try:
            kind = (
                row.get("model"),
                *(row[key] for key in ("arm", "k", "question_set", "format", "shots", "change")),
            )
            kinds[kind] += 1
            ends[row["change"].rpartition(" ")[2]] += 1
            if kinds[kind] <= _MOST_OF_A_KIND and len(lines) < _MOST_CHANGES:
                lines.append(line(*_change_cells(row)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(
                f"{path}:{number}: not a row of flips.jsonl ({error!r:.80}). Run it again."
            ) from error
    words = {"right": "became right", "wrong": "became wrong", "abstained": "now abstain"}
    counts = ", ".join(f"{ends[end]:,} {text}" for end, text in words.items() if ends[end])
    about = (
        f"{counts or 'nothing became right, nothing wrong'}; flips.jsonl has all, with log-probs"
    )
    columns = ("change", "arm", "questions", "question", "correct", "base answered", "arm answered")
    title = f"{ends.total():,} answers changed" + (
        f", the first {_MOST_OF_A_KIND} of each kind" * (len(lines) < ends.total())
    )
    return TableBlock(title, about, columns, tuple(lines), wordy=True)


def _change_cells(row: Row) -> tuple[str | Cell, ...]:
    def choice(key: str) -> str:
        return "–" if row[key] is None else format_name(row["choices"][row[key]], _LONGEST)

    return (
        Cell(row["change"], _CHANGES[row["change"]]), arm_name(ArmName.parse(row["arm"]).answers_of, row["k"]),
        Cell(format_name(row["question_set"]), "", format_name(row["document_id"] or "")),
        format_name(row["question"], _LONGEST), choice("gold"), choice("base_chosen"), choice("chosen"),
    )  # fmt: skip


def sweep_tables(view: View) -> Iterator[TableBlock]:
    """Yield the accuracies along each sweep of a base model: a line for each value, a column for
    each question set."""
    for sweep in view.report.sweeps:
        sets = view.sets("", sweep.model)
        lines = (
            line(
                format_name(point.label),
                *(_accuracy(view.result(sweep.model, point.arm, name)) for name in sets),
            )
            for point in sweep.points
        )
        title = format_name(sweep.name) + (
            f", {format_name(sweep.model)}" if view.several_models else ""
        )
        columns = (format_name(sweep.key), *map(format_name, sets))
        yield TableBlock(
            title, "correct answers in %, 95% interval below", columns, tuple(lines), folded=True
        )


def names_table(view: View) -> TableBlock:
    """Return the arms and question sets in words: what each model read, what each set is for."""
    lines = []
    for model in view.report.models:
        for arm in view.own_arms(model):
            is_base = arm.name == view.base(model)
            about = (
                "the model that the others are compared with"
                if is_base
                else view.about(model, arm.name)
            )
            parts = [about, view.reading(model, arm.name) if arm.trained else ""]
            parts += [f"base model {format_name(model)}"] if view.several_models else []
            what = "; ".join(dict.fromkeys(filter(None, parts)))
            lines.append(
                line(
                    format_name(arm.name),
                    f"{'' if arm.trained else 'not '}trained{what and f': {what}'}",
                )
            )
    ks = sorted({result.k for result in view.set_results if result.k})
    if ks:
        passages = (
            f"{ks[0]} to {ks[-1]} passages" if len(ks) > 1 else format_count(ks[0], "passage")
        )
        lines.append(
            line("… with passages", f"the same model, shown {passages} that the retriever found")
        )
    for name in view.sets():
        first = view.first(name)
        guess = f"; guessing gives {format_percent(first.chance)}" if first.chance else ""
        purpose = _FOR.get(first.role, first.role)
        lines.append(line(f"“{format_name(name)}”", f"{_size(view, name)}: {purpose}{guess}"))
    return TableBlock("", "", ("name", "what it is"), tuple(lines), wordy=True)


def _size(view: View, name: str) -> str:
    """Return ``600 questions on 120 documents, up to 3 of the questions without a score``."""
    first = view.first(name)
    size = format_count(first.n, "question")
    if first.n_documents not in (None, first.n_scored):
        size += f" on {format_count(first.n_documents or 0, 'document')}"
    most_unscored = max(r.n_unscored for r in view.set_results if r.question_set == name)
    if most_unscored:
        size += f", up to {most_unscored:,} of the questions without a score"
    return size


def claims_table(claims: Sequence[Claim]) -> TableBlock:
    """Return the claims that the study tests, each with its verdict and numbers."""
    lines = []
    for claim in claims:
        mark, tone = _VERDICTS[claim.verdict]
        late = "declared after test questions were answered" if claim.declared_late else ""
        verdict = Cell(f"{mark}{claim.words.removeprefix(claim.verdict)}", tone, late)
        p = "" if claim.p_holm is None else bare_p(claim.p_holm)
        lines.append(
            line(
                format_name(claim.statement),
                verdict,
                format_name(claim.finding),
                p,
                format_name(claim.source),
            )
        )
    columns = ("claim", "verdict", "finding", "Holm p", "source")
    return without_empty_columns(TableBlock("", "", columns, tuple(lines), wordy=True))


def choices_table(view: View) -> TableBlock:
    """Return each choice with its whole grid."""
    lines = []
    for choice in view.report.choices:
        grid = ", ".join(
            f"{_value(value)}: {100 * rate:.1f}" for value, rate, _ in choice.candidates
        )
        chosen = Cell(_value(choice.chosen), "", "end of the grid" if choice.at_edge else "")
        arm = format_name(choice.arm) + (
            f", {format_name(choice.model)}" if view.several_models else ""
        )
        lines.append(
            line(format_name(choice.key), arm, format_name(choice.question_set), grid, chosen)
        )
    columns = ("key", "arm", "validation set", "value: rate in %", "chosen")
    return without_empty_columns(TableBlock("", "", columns, tuple(lines), wordy=True))


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else format_name(str(value))


def cost_table(view: View) -> TableBlock:
    """Return the cost of each arm, all its seeds together; the cost of shared stages is divided
    among the arms."""
    lines = []
    for model, arm in dict.fromkeys((cost.model, cost.arm) for cost in view.report.costs):
        costs = [cost for cost in view.report.costs if (cost.model, cost.arm) == (model, arm)]
        seeds = len({cost.seed for cost in costs})
        stages = (sum(c.seconds for c in costs if c.stage == stage) for stage in _STAGES)
        money = sum(cost.money / cost.shared_by for cost in costs)
        trained = sum(cost.tokens for cost in costs if cost.stage == "train")
        name = format_name(arm) + (f", {format_name(model)}" if view.several_models else "")
        lines.append(line(
            name, str(seeds), *(duration(seconds) if seconds else "" for seconds in stages),
            duration(sum(cost.seconds / cost.shared_by for cost in costs)), f"{trained:,}",
            *_per_seed(costs, seeds), f"{peak / 2**30:.1f} GiB" if (peak := max(cost.peak_bytes for cost in costs)) else "",
            f"{money:.2f}" if money else "",
        ))  # fmt: skip
    columns = ("arm", "seeds", *_STAGES, "its part", "tokens trained", "tokens written, a seed", "read by a teacher, a seed",
               "work of training, a seed", "peak memory", "money")  # fmt: skip
    return without_empty_columns(
        TableBlock("Cost of each arm", "seeds together", columns, tuple(lines), folded=True)
    )


def price_table(view: View) -> TableBlock:
    """Return what it costs to ask each arm and to train it, and the number of questions from which
    on training pays."""
    lines = tuple(
        line(
            arm_name(price.arm, price.k) + (f", {format_name(price.model)}" if view.several_models else ""),
            format_finite(price.prompt_tokens, 1, "not known"), f"{price.answer_tokens:.1f}",
            format_finite(price.asking, 4, "not known"), f"{price.training:.4f}" if price.training else "",
            f"{price.pays_after:,}" if isinstance(price.pays_after, int) else price.pays_after or "",
        )
        for price in view.report.prices
    )  # fmt: skip
    about = "at the prices of the recipe, over the question sets that get passages"
    columns = ("model", "prompt tokens a question", "answer tokens", "1,000 questions", "training, once",
               "training pays, against base with passages, from questions")  # fmt: skip
    return without_empty_columns(TableBlock("What an answer costs", about, columns, lines))


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


def _per_seed(costs: Sequence[Cost], seeds: int) -> tuple[str, str, str]:
    written, read, work = (
        sum(getattr(cost, key) for cost in costs) / seeds
        for key in ("written_tokens", "teacher_tokens", "work_seconds")
    )
    return (
        f"{written:,.0f}" if written else "",
        f"{read:,.0f}" if read else "",
        duration(work) if work else "",
    )


def arms_table(view: View) -> TableBlock:
    """Return where the recipe of each arm differs."""
    lines = tuple(
        line(format_name(arm.name), format_name(arm.model), format_name(arm.description), format_name(arm.sweep),
             format_name(", ".join(f"{key}={value}" for key, value in arm.recipe.items())), format_name(arm.step_matched_to))
        for arm in view.report.arms
    )  # fmt: skip
    columns = ("arm", "model", "description", "sweep", "differs in", "as many steps or tokens as")
    return without_empty_columns(
        TableBlock("Each arm's recipe", "", columns, lines, wordy=True, folded=True)
    )


def small_tables(view: View) -> Iterator[TableBlock]:
    """Yield recall of retrieval, perplexity, the judge and exposures, each where the report has it."""
    recalls = [
        line(format_name(r.question_set), format_name(r.retrieval), str(r.k), f"{r.n:,}",
             format_percent(r.n_found / r.n) if r.n else "", f"{r.n_empty:,}" if r.n_empty else "")
        for r in view.report.recalls
    ]  # fmt: skip
    if recalls:
        about = "questions whose document is among the K passages, of those that name one"
        heads = ("questions", "retrieval", "K", "n", "found", "questions without any passage")
        yield without_empty_columns(TableBlock("Recall of retrieval", about, heads, tuple(recalls)))
    if view.report.shortcuts:
        yield shortcuts_table(view)
    if view.report.prices:
        yield price_table(view)
    for label, items in view.perplexities():
        lines = tuple(
            line(format_name(item.arm), f"{item.n_tokens:,}", format_finite(item.per_token, 3),
                 "base" if item is items[0] else perplexity_change(item, items[0]),
                 format_finite(item.bits_per_byte, 4))
            for item in items
        )  # fmt: skip
        columns = ("model", "tokens", "perplexity", "to base", "bits per byte")
        yield TableBlock("Perplexity of held-out texts", label, columns, lines)
    judge = view.report.judge
    if judge is not None:
        rates = tuple(
            line(grade, f"{judge.planted[grade]:,}",
                 *("" if (rate := of[grade]) is None else format_percent(rate) for of in (judge.precision, judge.recall)))
            for grade in judge.recall
        )  # fmt: skip
        about = "measured on planted answers before it graded others"
        yield TableBlock(
            f"The judge, {format_name(judge.model)}",
            about,
            ("grade", "planted answers", "precision", "recall"),
            rates,
        )


def claims_text(view: View) -> Iterator[str]:
    """Yield claims, choices and failures as lines, for the terminal."""
    for claim in view.report.claims:
        p = "" if claim.p_holm is None else f" ({format_p(claim.p_holm)} after Holm)"
        late = " (declared late)" if claim.declared_late else ""
        yield f"claim: {claim.statement}: {claim.words}{late}{p}: {claim.finding}"
    for choice in view.report.choices:
        rates = ", ".join(f"{value}: {rate:.3f}" for value, rate, _ in choice.candidates)
        edge = ", an end of the grid: widen it" if choice.at_edge else ""
        yield f"chosen for {choice.arm}: {choice.key} {choice.chosen} ({rates}){edge}"
    for failure in view.report.failures:
        seed = "" if failure.seed is None else f", seed {failure.seed}"
        yield f"failed: {failure.arm}{seed}: {failure.stage}: {failure.message} (log: {failure.log})"
