"""The page of a run of `kinject augment`: yield by style and document, refusals with examples, doubts, cost, the judge.

Counts come from the manifest, texts and documents from the run's files. All texts are untrusted: the page escapes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kinject.disk import Row, read_jsonl
from kinject.report.formatting import format_count, format_date, format_name, format_percent, join_words
from kinject.report.page import (
    Bullets,
    Cell,
    Code,
    Line,
    Page,
    Section,
    TableBlock,
    Text,
    line,
    without_empty_columns,
    write_page,
)

_MOST_EXAMPLES = 3  # of one reason
_MOST_DOCUMENTS = 500
_UNFOLDED = 20  # documents
_LONGEST = 600  # characters of a text


@dataclass
class _Files:
    """The data of the page from a run's files: rows by document, and the first few refused or doubted texts of a reason."""

    rows: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Row]] = field(default_factory=dict)
    doubts: dict[str, list[Row]] = field(default_factory=dict)
    passages: dict[str, str] = field(default_factory=dict)


def write_augment_report(run_dir: Path) -> Path:
    """Write report.html of a finished run of kinject augment; return its path.

    Raises `InputError` when `run_dir` holds none, or one of its files is damaged; `DiskError` on I/O.
    """
    return write_page(run_dir, "augment", "report.html", partial(_make_page, run_dir))


def _read_files(run_dir: Path, styles: Mapping[str, Mapping[str, Any]]) -> _Files:
    """Return the data of the page from the files of a run with these counts of `styles` in its manifest."""
    files = _Files()
    has_doubts = any(style["in_doubt"] for style in styles.values())
    variants: set[str] = set()
    for row in _rows(run_dir, "corpus.jsonl", "sft.jsonl"):
        if row["origin"] == "variant":
            files.rows[row["document_id"]] += 1
            variants.add(row["id"])
        else:
            files.rows[row["document_id"]] += 0
    for row in _rows(run_dir, "rejected.jsonl"):
        if row["style"] in styles:  # those of an earlier recipe stay in the file
            files.refused[row["document_id"]] += 1
            _keep(files.examples, row["reason"], row)
            for doubt in row.get("in_doubt", ())[:1]:
                _keep(files.doubts, doubt[0], {**row, "detail": doubt[1]})
    for row in _rows(run_dir, "failures.jsonl"):
        files.failed[row["document_id"]] += 1
    for row in _rows(run_dir, "variants.jsonl") if has_doubts else ():
        for doubt in row["checks"].get("in_doubt", ())[:1] if row["id"] in variants else ():
            _keep(files.doubts, doubt[0], {**row, "detail": doubt[1]})
    passage_ids = {
        row["passage_id"] for by_reason in (files.examples, files.doubts) for rows in by_reason.values() for row in rows
    }
    if passage_ids:
        files.passages = {row["id"]: row["text"] for row in _rows(run_dir, "corpus.jsonl") if row["id"] in passage_ids}
    return files


def _rows(run_dir: Path, *names: str) -> Iterator[Row]:
    for name in names:
        if (run_dir / name).is_file():
            yield from (row for _, row in read_jsonl(run_dir / name))


def _keep(by_reason: dict[str, list[Row]], reason: str, row: Row) -> None:
    rows = by_reason.setdefault(reason, [])
    if len(rows) < _MOST_EXAMPLES:
        rows.append(row)


def _make_page(run_dir: Path, manifest: Mapping[str, Any]) -> Page:
    counts = manifest["counts"]
    files = _read_files(run_dir, counts["styles"])
    command = format_name(" ".join(manifest.get("command", ())))
    sections = (
        Section("Yield by style", (_styles_table(counts), *_skipped(counts))),
        Section("Refused answers", tuple(_refusals(counts, files))),
        Section("In doubt", tuple(_doubts(counts, files))),
        Section("The judge", tuple(_judge(counts))),
        Section("Yield by document", tuple(_documents(files))),
        Section("Cost", (_cost_table(counts), *_endpoints(counts))),
        Section("Facts, languages, questions of the test", tuple(_further(counts))),
        Section("Run it again", (Code((command,)),) if command else ()),
    )
    versions = manifest.get("versions") or {}
    return Page(
        title=f"{format_name(run_dir.name)}: documents rewritten", subtitle="kinject augment", description="",
        facts=tuple((label, text) for label, text in _facts(manifest, counts) if text), headline=_headline(counts), verdict=(),
        sections=tuple(section for section in sections if section.blocks),
        footer=format_name(f"Written {manifest.get('written', '')} with kinject {versions.get('kinject', '')}."),
    )  # fmt: skip


def _facts(manifest: Mapping[str, Any], counts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    section = (manifest.get("recipe") or {}).get("augment") or {}
    yield "date", format_date(str(manifest.get("written", "")))
    yield (
        "documents",
        f"{counts['n_documents']:,} in {counts['n_passages']:,} passages, from {_names(manifest['inputs'])}",
    )
    for name in ("generator", "judge"):
        model = section.get(name) or {}
        yield {"generator": "writer"}.get(name, name), format_name(str(model.get("model") or model.get("kind") or ""))
    yield "styles", join_words([f"{format_name(name)}" for name in counts["styles"]])


def _names(paths: Iterable[str]) -> str:
    names = [format_name(Path(path).name, 40) for path in paths]
    return join_words(names if len(names) < 4 else [*names[:3], f"{len(names) - 3} more files"])


def _headline(counts: Mapping[str, Any]) -> str:
    """Return the yield, the refusals and the cost in a sentence or two."""
    nothing = sum(style["nothing"] for style in counts["styles"].values())
    text = f"{counts['got']:,} of {counts['asked']:,} requested rewritings are in the corpus"
    text += f" ({format_percent(counts['got'] / counts['asked'])})" if counts["asked"] else ""
    text += f", {nothing:,} had nothing to write" if nothing else ""
    refused, failed = sum(counts["refused"].values()), sum(counts["failed"].values())
    reasons = [f"{format_name(reason)} {n:,}" for reason, n in list(counts["refused"].items())[:3]]
    text += (
        f"; {format_count(refused, 'answer')} {'was' if refused == 1 else 'were'} refused on the way ({', '.join(reasons)})"
        if refused
        else "; no answer was refused"
    )
    text += f"; {failed:,} got no answer" if failed else ""
    text += f"; it cost {counts['cost']:,.2f}" if counts["cost"] else ""
    return text + (". The budget ended the run." if counts["out_of_budget"] else ".")


def _styles_table(counts: Mapping[str, Any]) -> TableBlock:
    lines = []
    for name, style in counts["styles"].items():
        n_refused = sum(style["refused"].values())
        reasons = ", ".join(f"{format_name(reason)} {n:,}" for reason, n in list(style["refused"].items())[:3])
        n_requested = style["asked"]
        fraction = style["got"] / n_requested if n_requested else None
        tone = "" if fraction is None else "bad" if fraction + style["nothing"] / n_requested < 0.9 else "good"
        lines.append(line(
            format_name(name), f"{n_requested:,}", f"{style['got']:,}",
            Cell("" if fraction is None else format_percent(fraction), tone), f"{style['nothing'] or ''}",
            f"{n_refused:,}", f"{style['failed'] or ''}", f"{sum(style['skipped'].values()) or ''}", reasons,
        ))  # fmt: skip
    columns = ("style", "asked", "in the corpus", "yield", "nothing to write", "answers refused", "no answer",
               "passages skipped", "why refused")  # fmt: skip
    title, about = (
        "Rewritings by style",
        "a refused answer is requested again, so there may be more refusals than missing texts",
    )
    return without_empty_columns(TableBlock(title, about, columns, tuple(lines)))


def _skipped(counts: Mapping[str, Any]) -> Iterator[Bullets]:
    from kinject.augment.styles import SKIPPED  # here, so that reports of other stages do not import that stage

    lines = [
        f"{format_name(name)}: {format_count(n, 'passage')} skipped: {format_name(SKIPPED.get(need, need))}"
        for name, style in counts["styles"].items() for need, n in style["skipped"].items()
    ]  # fmt: skip
    lines += [
        f"{format_name(name)}: {format_count(n, 'passage')} paused, refused three times in a row at the same point "
        f"({format_name(reason)})"
        for name, reasons in counts.get("paused", {}).items() for reason, n in reasons.items()
    ]  # fmt: skip
    if lines:
        yield Bullets(tuple(lines), small=True)


def _refusals(counts: Mapping[str, Any], files: _Files) -> Iterator[TableBlock | Bullets | Text]:
    from kinject.augment.summary import refusal_advice  # here, so that reports of other stages do not import that stage

    refused = counts["refused"]
    total = sum(refused.values())
    if not total:
        yield Text("No answer was refused.")
        return
    lines = tuple(line(format_name(reason), f"{n:,}", format_percent(n / total)) for reason, n in refused.items())
    yield TableBlock(
        "Refusals by reason", f"{total:,} answers; rejected.jsonl has all", ("reason", "answers", "of all"), lines
    )
    yield Bullets(tuple(f"{format_name(text)}." for text in refusal_advice(refused)))
    yield from _examples(
        "Examples of refused answers", {reason: files.examples.get(reason, []) for reason in refused}, files
    )


def _examples(title: str, rows: Mapping[str, list[Row]], files: _Files) -> Iterator[TableBlock]:
    lines = tuple(
        line(
            Cell(format_name(reason), "", format_name(f"{row['style']}, {row['document_id']}", 80)),
            format_name(str(row["detail"]), _LONGEST), format_name(str(row["text"]), _LONGEST),
            format_name(files.passages.get(row["passage_id"], ""), _LONGEST),
        ) for reason, of_reason in rows.items() for row in of_reason
    )  # fmt: skip
    if lines:
        columns = ("reason", "found", "the answer", "the passage")
        table = TableBlock(title, f"at most {_MOST_EXAMPLES} of a reason", columns, lines, wordy=True)
        yield without_empty_columns(table)


def _doubts(counts: Mapping[str, Any], files: _Files) -> Iterator[TableBlock]:
    accepted, refused = Counter[str](), Counter[str]()
    for style in counts["styles"].values():
        accepted.update(style["in_doubt"])
        refused.update(style["refused_in_doubt"])
    reasons = list((accepted + refused).keys())
    if reasons:
        lines = tuple(line(format_name(reason), f"{accepted[reason]:,}", f"{refused[reason]:,}") for reason in reasons)
        yield TableBlock("Texts that the checks could not decide", "", ("reason", "accepted", "refused"), lines)
        yield from _examples("Examples in doubt", {reason: files.doubts.get(reason, []) for reason in reasons}, files)


def _judge(counts: Mapping[str, Any]) -> Iterator[TableBlock]:
    judge = counts.get("judge")
    if not judge:
        return
    lines = [
        line(
            format_name(kind), f"{judge['caught'].get(kind, 0):,} of {n:,}", _percent(judge["recall_by_kind"].get(kind))
        )
        for kind, n in judge["planted"].items()
    ]
    recall = Cell(_percent(judge["recall"]), "", "recall")
    caught = f"{sum(judge['caught'].values()):,} of {sum(judge['planted'].values()):,}"
    lines.append(line("all planted errors", caught, recall))
    lines.append(line("correct texts refused", f"{judge['refused_good']:,} of {judge['good']:,}",
                      Cell(_percent(judge["precision"]), "", "precision")))  # fmt: skip
    about = "before the run: errors planted in passages, and correct texts"
    yield TableBlock("Score on known texts", about, ("planted", "refused", "score"), tuple(lines))


def _percent(value: float | None) -> str:
    return "–" if value is None else format_percent(value)


def _documents(files: _Files) -> Iterator[TableBlock | Text]:
    names = sorted(
        {*files.rows, *files.refused, *files.failed}, key=lambda name: (files.rows[name], -files.refused[name], name)
    )
    lines: list[Line] = [
        line(format_name(name, 80), f"{files.rows[name]:,}", f"{files.refused[name]:,}", f"{files.failed[name] or ''}")
        for name in names[:_MOST_DOCUMENTS]
    ]
    if len(names) > _MOST_DOCUMENTS:
        yield Text(f"The {_MOST_DOCUMENTS} documents with the fewest rows, of {len(names):,}.")
    if lines:
        columns = ("document", "rows of rewritings", "answers refused", "no answer")
        title = f"{format_count(len(names), 'document')}, the fewest rows first"
        table = TableBlock(title, "", columns, tuple(lines), folded=len(lines) > _UNFOLDED)
        yield without_empty_columns(table)


def _cost_table(counts: Mapping[str, Any]) -> TableBlock:
    run = counts["this_run"]
    facts = [
        ("tokens read by the writer", f"{counts['tokens_in']:,}"), ("tokens written", f"{counts['tokens_out']:,}"),
        ("of them thinking", f"{counts['tokens_thinking'] or ''}"),
        ("cost, all runs into this folder", f"{counts['cost']:,.4f}" if counts["cost"] else "no prices given"),
        ("of it for thinking", f"{counts['cost_of_thinking']:,.4f}" if counts.get("cost_of_thinking") else ""),
        ("requests sent in the last run", f"{run['sent']:,}"), ("answered from the cache", f"{run['from_cache']:,}"),
        ("sent again after an error", f"{sum(run['retried'].values()) or ''}"),
        ("seconds of requests", f"{run['request_seconds']:,}"),
        ("rows in corpus.jsonl", f"{counts['n_rows']:,}"),
    ]  # fmt: skip
    return TableBlock("Tokens and requests", "", ("", ""), tuple(line(*fact) for fact in facts if fact[1]))


def _endpoints(counts: Mapping[str, Any]) -> Iterator[TableBlock]:
    """Yield the table of the last run's endpoints, if there were several."""
    lines = tuple(
        line(
            format_name(name), f"{endpoint['answered']:,}", format_percent(endpoint["share"]),
            f"{endpoint['latency_seconds']:,.2f} s", f"{endpoint['cost']:,.4f}" if endpoint["cost"] else "",
            ", ".join(f"{format_name(kind)} {n:,}" for kind, n in endpoint["faults"].items()),
            format_name(endpoint.get("closed", ""), _LONGEST),
        )
        for name, endpoint in counts["this_run"].get("endpoints", {}).items() if endpoint["sent"]
    )  # fmt: skip
    if lines:
        columns = ("endpoint", "answers", "of all", "mean latency", "cost", "faults", "left out, because")
        yield without_empty_columns(TableBlock("Endpoints of the last run", "", columns, lines))


def _further(counts: Mapping[str, Any]) -> Iterator[Bullets]:
    lines = []
    if coverage := counts.get("coverage"):
        lines.append(f"{coverage['short']:,} of {coverage['facts']:,} facts have fewer than {coverage['quota']} rewritings "
                     "(coverage.jsonl lists all).")  # fmt: skip
    for code, language in counts.get("languages", {}).items():
        off = (
            f"; not checked there: {', '.join(map(format_name, language['not_checked']))}"
            if language["not_checked"]
            else ""
        )
        lines.append(f"{language['texts']:,} texts in the language {format_name(code)}{off}.")
    if contamination := counts.get("contamination"):
        lines.append(f"{contamination['contaminated']:,} of {contamination['questions']:,} questions of the test "
        f"occur in the training text.")  # fmt: skip
    if lines:
        yield Bullets(tuple(lines))
