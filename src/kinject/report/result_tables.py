"""The tables of results: the headline, every result, sweeps, and changed answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kinject.disk import Row, check_output, read_jsonl
from kinject.errors import InputError
from kinject.report.formatting import (
    ROLES,
    View,
    arm_key,
    arm_label,
    arm_name,
    bare_p,
    format_name,
    format_points,
    format_prompt,
)
from kinject.report.page import Cell, Line, TableBlock, line, without_empty_columns
from kinject.results import (
    ArmResult,
    Contrast,
    Control,
    OutcomeResult,
)
from kinject.terminal import format_count
from kinject.types import ArmName, Written

_MARKS = {"good": " ▲", "bad": " ▼", "": ""}
_OPPOSITE = {"good": "bad", "bad": "good", "": ""}
_CHANGES = {
    "right to wrong": "bad",
    "wrong to right": "good",
    "right to abstained": "bad",
    "abstained to right": "good",
    "abstained to wrong": "bad",
    "wrong to abstained": "good",
}
"""Change of an answer -> its tone: to decline is better than to be wrong."""
_CHANGED_TO = {
    "right": "became right",
    "wrong": "became wrong",
    "abstained": "now abstain",
}
_MOST_OF_A_KIND = 10  # changed answers of an arm on a question set
_MOST_CHANGES = 500
_LONGEST = 1_000  # characters of a question or answer
# What the functions of a row raise where it has another shape.
_ROWS_OF_FLIPS_RAISE = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def headline_table(view: View) -> TableBlock:
    """Return accuracy by arm (and base model) on each question set, in the first prompt format."""
    sets = view.sets()
    rows: dict[tuple[str, tuple[str, int | None]], dict[str, ArmResult]] = {}
    for result in view.headline_results():
        rows.setdefault((result.model, arm_key(result)), {})[result.question_set] = result
    lines = []
    chances = [view.first(name).chance for name in sets]
    # Written answers have no accuracy of guessing.
    if any(chances):
        lines.append(line("guessing", *(_percent(chance or None) for chance in chances)))
    for (model, _), by_set in rows.items():
        label = arm_label(next(iter(by_set.values())))
        head = Cell(label)
        if view.several_models:
            head = Cell(label, "", format_name(model))
        lines.append(line(head, *(_headline_cell(by_set.get(name)) for name in sets)))
    roles = [ROLES.get(view.first(name).role, "") for name in sets]
    heads = [f"{format_name(name)}: {role}" for name, role in zip(sets, roles, strict=True)]
    about = "95% interval below; ▲ above, ▼ below base (p < 0.05 after Holm)"
    if any(result.control for result in view.headline_results()):
        about += (
            ". “without the question”: the same choices scored without it; where there is "
            "something to learn, ▲ is a gain beyond that"
        )
    return TableBlock("Correct answers in %", about, ("model", *heads), tuple(lines))


def _percent(fraction: float | None, digits: int = 1) -> str:
    """Return a fraction in percent, "" for None."""
    return "" if fraction is None else f"{100 * fraction:.{digits}f}"


def _accuracy(result: ArmResult | None) -> Cell:
    if result is None:
        return Cell("")
    tone = ""
    # The mark follows what is called learned, as the caption says.
    change = result.gain if result.role == "learning" else result.to_base
    if change is not None:
        tone = _tone(change)
    below = _bounds(result.low, result.high)
    if result.n_unscored:
        below += f"; {result.n_unscored:,} unscored"
    return Cell(f"{100 * result.accuracy:.1f}{_MARKS[tone]}", tone, below)


def _tone(change: Contrast) -> str:
    """Return good for a significant rise, bad for a significant fall, else ""."""
    if not change.is_significant:
        return ""
    return "good" if change.delta > 0 else "bad"


def _headline_cell(result: ArmResult | None) -> Cell:
    """Return accuracy with its interval, and of written answers the shares that are wrong and
    abstained."""
    cell = _accuracy(result)
    if result is None:
        return cell
    below = cell.below
    for part in (result.wrong, result.abstained, result.answered):
        if part is not None:
            below += f"; {part.outcome} {100 * part.rate:.1f}"
    if result.control is not None:
        below += f"; without the question {100 * result.control.accuracy:.1f}"
    return Cell(cell.text, cell.tone, below)


def _bounds(low: float, high: float) -> str:
    return f"{100 * low:.1f} – {100 * high:.1f}"


def _change(contrast: Contrast | None, rise: str = "good") -> Cell:
    """Return a difference in points with its interval, marked where it is significant; `rise` is
    the tone of a rise."""
    if contrast is None:
        return Cell("")
    direction = _tone(contrast)
    tone = ""
    if direction == "good":
        tone = rise
    elif direction == "bad":
        tone = _OPPOSITE[rise]
    text = f"{format_points(contrast.delta)}{_MARKS[direction]}"
    # One document has no variance, so it has no interval.
    if contrast.low is None or contrast.high is None:
        return Cell(text, tone)
    bounds = f"{format_points(contrast.low)} to {format_points(contrast.high)}"
    return Cell(text, tone, bounds)


_COLUMNS = (
    "questions",
    "model",
    "arm",
    "asked",
    "accuracy, %",
    "by seed",
    "n",
    "documents",
    "guessing",
    "without the question, %",
    "to base, points",
    "p, Holm",
    "to base beyond the choices without the question, points",
    "p of it, Holm",
    "became right",
    "became wrong",
    "to retrieval, points",
    "to itself without passages, points",
    "wrong, %",
    "abstained, %",
    "answered without an answer, %",
    "unread, %",
    "F1, %",
    "tokens",
    "thinking cut, %",
    "mass on letters, %",
)


def results_table(view: View) -> TableBlock:
    """Return every result of the report, one a line: arms, sweeps, subjects, every K and prompt
    format."""
    lines = [line(*_result_cells(view, result)) for result in view.report.results]
    about = "every question set, arm, prompt format, K and subject; press a heading to sort"
    return without_empty_columns(
        TableBlock("Results", about, _COLUMNS, tuple(lines), heads=4, folded=True)
    )


def _result_cells(view: View, result: ArmResult) -> tuple[str | Cell, ...]:
    return (
        *_asked_cells(result),
        _accuracy(result),
        _seeds(result.by_seed),
        _n_questions(result),
        _n_documents(result),
        # Written answers have no accuracy of guessing.
        _percent(result.chance or None),
        _without_question(result.control),
        *_base_cells(result.to_base),
        *_net_cells(result.control),
        *_flip_cells(result.to_base),
        _change(result.to_rag),
        _change(result.to_plain),
        _outcome_cell(result.wrong, "bad"),
        # Abstentions may have been right answers or wrong ones: more of them is neither good nor
        # bad.
        _outcome_cell(result.abstained, ""),
        _outcome_cell(result.answered, "bad"),
        *_written_cells(result.written),
        _percent(result.mass, 0),
    )


def _asked_cells(result: ArmResult) -> tuple[str, str, str, str]:
    """Return the heads of a line: what was asked of which arm."""
    name = format_name(result.question_set)
    if result.subject:
        name += f": {format_name(result.subject)}"
    asked = format_prompt(result.prompt_format)
    return name, format_name(result.model), arm_label(result), asked


def _seeds(by_seed: Sequence[float]) -> str:
    return "" if len(by_seed) == 1 else ", ".join(map(_percent, by_seed))


def _n_questions(result: ArmResult) -> str:
    if result.n_unscored:
        return f"{result.n_scored:,} of {result.n:,}"
    return f"{result.n:,}"


def _n_documents(result: ArmResult) -> str:
    """Return the number of documents, "" if each question is its own or none were counted."""
    if result.n_documents in (None, result.n_scored):
        return ""
    return f"{result.n_documents:,}"


def _without_question(control: Control | None) -> Cell:
    if control is None:
        return Cell("")
    return Cell(f"{100 * control.accuracy:.1f}", "", _bounds(control.low, control.high))


def _base_cells(base: Contrast | None) -> tuple[Cell, str]:
    """Return the difference to the base and its p."""
    if base is None or base.deciding_p is None:
        return _change(base), ""
    return _change(base), bare_p(base.deciding_p)


def _net_cells(control: Control | None) -> tuple[Cell, Cell]:
    """Return the net gain and its p."""
    if control is None or control.net is None or control.net.deciding_p is None:
        return Cell(""), Cell("")
    return _change(control.net), Cell(bare_p(control.net.deciding_p))


def _flip_cells(base: Contrast | None) -> tuple[str, str]:
    if base is None:
        return "", ""
    return f"{base.wrong_to_right:,}", f"{base.right_to_wrong:,}"


def _outcome_cell(part: OutcomeResult | None, rise: str) -> Cell:
    """Return how often written answers had an outcome; `rise` is the tone of a rise."""
    if part is None:
        return Cell("")
    mark, tone = "", ""
    if part.to_base is not None:
        mark, tone = _MARKS[_tone(part.to_base)], _change(part.to_base, rise).tone
    return Cell(f"{100 * part.rate:.1f}{mark}", tone, _bounds(part.low, part.high))


def _written_cells(written: Written | None) -> tuple[str, str, str, str]:
    if written is None:
        return ("", "", "", "")
    return (
        # An empty cell for none, so that the column is left out where no arm has any.
        _percent(written.unread or None),
        _percent(written.f1),
        f"{written.n_tokens:.1f}",
        _percent(written.thinking_cut if written.n_thinking else None),
    )


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
            kind = _kind_of_change(row)
            kinds[kind] += 1
            ends[row["change"].rpartition(" ")[2]] += 1
            if kinds[kind] <= _MOST_OF_A_KIND and len(lines) < _MOST_CHANGES:
                lines.append(line(*_change_cells(row)))
        except _ROWS_OF_FLIPS_RAISE as error:
            raise InputError(
                f"{path}:{number}: not a row of flips.jsonl ({error!r:.80}). Run it again."
            ) from error
    counts = ", ".join(f"{ends[end]:,} {text}" for end, text in _CHANGED_TO.items() if ends[end])
    about = (
        f"{counts or 'nothing became right, nothing wrong'}; flips.jsonl has all, with log-probs"
    )
    columns = ("change", "arm", "questions", "question", "correct", "base answered", "arm answered")
    title = f"{format_count(ends.total(), 'answer')} changed"
    if len(lines) < ends.total():
        title += f", the first {_MOST_OF_A_KIND} of each kind"
        if len(lines) == _MOST_CHANGES:
            title += f", {_MOST_CHANGES} in all"
    return TableBlock(title, about, columns, tuple(lines), wordy=True)


def _kind_of_change(row: Row) -> tuple[object, ...]:
    keys = ("arm", "k", "question_set", "format", "shots", "change")
    return row.get("model"), *(row[key] for key in keys)  # an evaluation has no model


def _change_cells(row: Row) -> tuple[str | Cell, ...]:
    return (
        Cell(row["change"], _CHANGES[row["change"]]),
        arm_name(ArmName.parse(row["arm"]).answers_of, row["k"]),
        Cell(format_name(row["question_set"]), "", format_name(row["document_id"] or "")),
        format_name(row["question"], _LONGEST),
        _choice(row, "gold"),
        _choice(row, "base_chosen"),
        _choice(row, "chosen"),
    )


def _choice(row: Row, key: str) -> str:
    """Return the text of the choice whose index is at `key`, a dash if the model abstained."""
    if row[key] is None:
        return "–"
    return format_name(row["choices"][row[key]], _LONGEST)


def sweep_tables(view: View) -> Iterator[TableBlock]:
    """Yield the accuracies along each sweep of a base model: a line for each value, a column for
    each question set."""
    for sweep in view.report.sweeps:
        sets = view.sets("", sweep.model)
        lines = []
        for point in sweep.points:
            results = [view.result(sweep.model, point.arm, name) for name in sets]
            lines.append(line(format_name(point.label), *map(_accuracy, results)))
        title = view.with_model(format_name(sweep.name), sweep.model)
        columns = (format_name(sweep.key), *map(format_name, sets))
        about = "correct answers in %, 95% interval below"
        yield TableBlock(title, about, columns, tuple(lines), folded=True)
