"""The results as plain text: one block for each question set, and learning beside forgetting at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kinject.types import Cell, Perplexity, Recall, Report

_HEAD = ("arm", "K", "format", "shots", "accuracy", "95% interval", "chance", "n", "to base", "gain", "p", "p Holm")
_RIGHT = frozenset({1, *range(3, 12)})
_MAYBE = frozenset({"gain", "p Holm"})  # columns left out where they are empty


def render_table(report: Report) -> str:
    """Return `report` as aligned text without a trailing newline: cells by question set, the summary, the notes."""
    blocks = [_set_block(name, report.cells) for name in dict.fromkeys(cell.question_set for cell in report.cells)]
    summary = _summary(report.cells)
    if summary:
        blocks.append(summary)
    blocks.extend(_subject_blocks(report.cells))
    if report.recalls:
        blocks.append(_recall_block(report.recalls))
    if report.perplexities:
        blocks.append(_perplexity_block(report.perplexities))
    if report.notes:
        blocks.append("\n".join(f"note: {note}" for note in report.notes))
    return "\n\n".join(blocks)


def _set_block(name: str, cells: Sequence[Cell]) -> str:
    own = [cell for cell in cells if cell.question_set == name]
    title = f"{name} ({own[0].role}, {own[0].n} questions)"
    rows = [_HEAD, *(_row(cell) for cell in own)]
    there = [at for at in range(len(_HEAD)) if _HEAD[at] not in _MAYBE or any(row[at] for row in rows[1:])]
    kept = [[row[at] for at in there] for row in rows]
    return f"{title}\n{aligned(kept, frozenset(place for place, at in enumerate(there) if at in _RIGHT))}"


def _row(cell: Cell) -> tuple[str, ...]:
    difference = cell.difference
    return (
        cell.arm,
        str(cell.k),
        _format(cell),
        str(cell.shots),
        f"{cell.accuracy:.3f}",
        f"{cell.low:.3f} to {cell.high:.3f}",
        f"{cell.chance:.3f}",
        str(cell.n) if not cell.n_unscored else f"{cell.n} ({cell.n_unscored} unscored)",
        "" if difference is None else f"{difference.delta:+.3f}",
        "" if difference is None or difference.relative is None else f"{difference.relative:+.1%}",
        "" if difference is None else format_p(difference.p),
        "" if difference is None or difference.p_holm is None else format_p(difference.p_holm),
    )


def _format(cell: Cell) -> str:
    """Return the format, with the score where it is not the plain sum: ``texts / chars``."""
    return cell.format if cell.score == "sum" else f"{cell.format} / {cell.score}"


def _subject_blocks(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table by subject for each question set that has several: a row a subject, a column an arm."""
    for name in dict.fromkeys(cell.question_set for cell in cells):
        own = [cell for cell in cells if cell.question_set == name and cell.subjects]
        for way in dict.fromkeys((_format(cell), cell.shots) for cell in own):
            asked = [cell for cell in own if (_format(cell), cell.shots) == way]
            head = ("subject", "n", *(f"{cell.arm}, K {cell.k}" if cell.k else cell.arm for cell in asked))
            rows = [head]
            for index, subject in enumerate(asked[0].subjects):
                parts = [cell.subjects[index] for cell in asked]
                shown = (f"{part.accuracy:.3f} ({part.low:.2f} to {part.high:.2f})" for part in parts)
                rows.append((subject.name or "(none)", str(subject.n), *shown))
            means = [cell.macro for cell in asked]
            shown = ("" if mean is None else f"{mean[0]:.3f} ({mean[1]:.2f} to {mean[2]:.2f})" for mean in means)
            rows.append(("mean of subjects", str(asked[0].n), *shown))
            title = f"{name} by subject ({way[0]}, {way[1]} shots)"
            yield f"{title}\n{aligned(rows, frozenset(range(1, len(head))))}"


def _recall_block(found: Sequence[Recall]) -> str:
    """Return how often the document that answers is among the retrieved passages: a row a set, a column a K."""
    ks = list(dict.fromkeys(item.k for item in found))
    shares = {(item.question_set, item.k): f"{item.n_found / item.n:.3f}" for item in found}
    counts = {item.question_set: str(item.n) for item in found}
    rows: list[tuple[str, ...]] = [("questions", "n", *(f"K {k}" for k in ks))]
    rows += [(name, n, *(shares.get((name, k), "") for k in ks)) for name, n in counts.items()]
    title = "recall: questions whose document is among the K passages (of those that name one)"
    return f"{title}\n{aligned(rows, frozenset(range(1, len(ks) + 2)))}"


def _perplexity_block(found: Sequence[Perplexity]) -> str:
    """Return held-out perplexity of each model, with its change to the first."""
    rows: list[tuple[str, ...]] = [("model", "texts", "tokens", "perplexity", "to base", "bits per byte")]
    for item in found:
        change = "" if item is found[0] else f"{item.per_token / found[0].per_token - 1:+.1%}"
        if item.n_tokens != found[0].n_tokens:  # another tokenizer: only bits per byte can be compared
            change = "other tokens"
        size = (str(item.n_texts), str(item.n_tokens))
        rows.append((item.model, *size, f"{item.per_token:.3f}", change, f"{item.bits_per_byte:.4f}"))
    return f"held-out perplexity on {found[0].name}\n{aligned(rows, frozenset(range(1, 6)))}"


def format_p(p: float) -> str:
    """Return `p` with three digits, "< 0.001" below."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _summary(cells: Sequence[Cell]) -> str:
    """Return the change to base of each arm on what is to be learned and on what is to be kept; "" without both."""
    changed = [cell for cell in cells if cell.difference is not None]
    if {cell.role for cell in changed} != {"learning", "retention"}:
        return ""
    sets = list(dict.fromkeys((cell.role, cell.question_set) for cell in cells))
    sets.sort()
    arms = dict.fromkeys((cell.arm, cell.k, _format(cell), cell.shots) for cell in changed)
    deltas = {
        (cell.arm, cell.k, _format(cell), cell.shots, cell.question_set): cell.difference.delta
        for cell in changed
        if cell.difference is not None
    }
    head = ("arm", "K", "format", "shots", *(f"{role}: {name}" for role, name in sets))
    rows = [head]
    for arm in arms:
        found = [deltas.get((*arm, name)) for _, name in sets]
        rows.append((*map(str, arm), *("" if delta is None else f"{delta:+.3f}" for delta in found)))
    right = frozenset({1, *range(3, len(head))})
    return f"change to {_base(changed)}: learned, and kept\n{aligned(rows, right)}"


def _base(changed: Sequence[Cell]) -> str:
    return next((cell.difference.base_arm for cell in changed if cell.difference is not None), "base")


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int]) -> str:
    """Return `rows` as columns, those in `right` aligned to the right; two spaces before each line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
