"""The corpus rows of a run, in the plan's order, and what is counted as they pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kinject.augment.checks.facts import compare_facts
from kinject.augment.checks.judge import JudgeScore, render_judge_score
from kinject.augment.contamination import Leaks, render_leaks
from kinject.augment.plan import Group, Plan, VariantRequest
from kinject.augment.store import Store
from kinject.augment.styles import STYLES
from kinject.disk import Row, content_id, write_jsonl


@dataclass(frozen=True)
class StyleCount:
    """What became of one style: rewritings `asked` and `got`, answers refused by reason, rewritings without an answer."""

    asked: int
    got: int
    refused: Mapping[str, int]
    failed: int


@dataclass(frozen=True)
class AugmentResult:
    """What `augment` made. `refused` counts answers by reason, `failed` rewritings that no answer came for, by error.

    `tokens_in` and `tokens_out` are those of every stored answer, refused ones too; `n_sent` and `n_cached` are of
    this run alone. `cost` is that of everything ever answered into the run folder, in the currency of the prices.
    `unsure` says what of it is not known for certain. `failures_path` lists the failed ones of this run, `judge` says how
    the judge did on planted errors. `sft_path` holds the rows of styles that make prompts and completions, None where there
    are none. `leaks` says which
    questions of the recipe's probe sets stand in prompts or corpus, None where it names no set; `coverage` how often each
    fact of the documents is told, None without a style that goes by facts.
    """

    run_dir: Path
    corpus_path: Path
    sft_path: Path | None
    variants_path: Path
    rejected_path: Path
    manifest_path: Path
    n_documents: int
    n_passages: int
    n_rows: int
    asked: int
    got: int
    styles: Mapping[str, StyleCount]
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    tokens_in: int
    tokens_out: int
    n_sent: int
    n_cached: int
    cost: float
    out_of_budget: bool
    failures_path: Path
    unsure: str = ""
    leaks: Leaks | None = None
    coverage: Coverage | None = None
    judge: JudgeScore | None = None

    @property
    def short(self) -> bool:
        """Whether fewer rewritings came out than were asked for."""
        return self.got < self.asked


@dataclass
class _Count:
    asked: int = 0
    got: int = 0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class CorpusWriter:
    """Yields the rows of a plan from what is stored, and counts."""

    def __init__(self, plan: Plan, store: Store, failures: Mapping[str, str]) -> None:
        self._plan, self._store, self._failures = plan, store, failures
        self._counts = {style: _Count() for style in plan.styles}
        self.failed = Counter[str]()
        self.failures: list[Row] = []
        self.tokens = Counter[str]()

    def rows(self, include_originals: bool) -> Iterator[Row]:
        """Yield each passage, then the texts of its rewritings by style and sample. Counts, so to be read once."""
        for document, passages in self._plan.passages():
            groups = list(self._plan.groups_of(document, passages))
            for passage in passages:
                if include_originals:
                    yield {"id": passage.id, "document_id": document.id, "origin": "original", "text": passage.text}
                for group in (group for group in groups if group.passage is passage):
                    slots = self._slots(group)
                    variants = self._store.accepted(slots)
                    self._count(group, slots, variants)
                    yield from (row for row in _rows_of(group, slots, variants) if "text" in row)

    def sft_rows(self) -> Iterator[Row]:
        """Yield the prompts and completions of all rewritings."""
        for group in self._plan.groups():
            slots = self._slots(group)
            yield from (row for row in _rows_of(group, slots, self._store.accepted(slots)) if "text" not in row)

    def _slots(self, group: Group) -> list[VariantRequest]:
        notes = self._store.notes(self._plan.notes_id(group)) if group.style.per_note else None
        return self._plan.slots(group, notes)

    def _count(self, group: Group, slots: Sequence[VariantRequest], variants: Mapping[str, Row]) -> None:
        count = self._counts[group.style.name]
        count.asked += len(slots)
        count.got += len(variants)
        refusals = self._store.refusals(slots)
        self._store.check_refusals(variants, refusals)
        count.refused.update(refusal["reason"] for refusal in refusals)
        for row in (*refusals, *variants.values()):
            for name, number in row["usage"].items():
                self.tokens[name] += number
        for slot in slots:
            if slot.id in self._failures and slot.id not in variants:
                count.failed += 1
                self.failures.append(
                    {"variant_id": slot.id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
                     "style": group.style.name, "sample": slot.sample, "error": self._failures[slot.id]}
                )  # fmt: skip
                self.failed[self._failures[slot.id]] += 1

    @property
    def styles(self) -> dict[str, StyleCount]:
        """What was counted, by style."""
        return {
            name: StyleCount(count.asked, count.got, dict(count.refused.most_common()), count.failed)
            for name, count in self._counts.items()
        }

    @property
    def refused(self) -> dict[str, int]:
        """Refused answers of all styles, by reason."""
        return dict(sum((count.refused for count in self._counts.values()), Counter[str]()).most_common())


def _rows_of(group: Group, slots: Sequence[VariantRequest], variants: Mapping[str, Row]) -> Iterator[Row]:
    """Yield the corpus rows of a group's rewritings."""
    for slot in slots:
        if slot.id not in variants:
            continue
        for index, fields in enumerate(group.style.rows(variants[slot.id]["text"])):
            identity = content_id(slot.id, index) if index else slot.id
            yield {"id": identity, "document_id": group.passage.document_id, "origin": "variant", **fields}


def render_summary(result: AugmentResult) -> str:
    """Return the table that ends a run: asked, got and refused by style, refused by reason, and what to do if short."""
    lines = [
        f"{result.n_documents} documents, {result.n_passages} passages -> {result.n_rows} rows in {result.corpus_path}",
        "",
        f"{'style':<16}{'asked':>8}{'got':>8}{'refused':>9}{'failed':>8}",
    ]
    for name, count in result.styles.items():
        row = f"{name:<16}{count.asked:>8}{count.got:>8}{sum(count.refused.values()):>9}{count.failed:>8}"
        reasons = ", ".join(f"{reason} {number}" for reason, number in count.refused.items())
        # With one style the list below says the same.
        lines.append(f"{row}  {reasons}" if reasons and len(result.styles) > 1 else row)
    if result.refused:
        lines += ["", f"answers refused (each with its text in {result.rejected_path}):"]
        lines += [f"{number:>8}  {reason}" for reason, number in result.refused.items()]
    if result.failed:
        lines += ["", f"rewritings that no answer came for (each in {result.failures_path}):"]
        lines += [f"{number:>8}  {error}" for error, number in result.failed.items()]
    lines.append("")
    if result.sft_path:
        lines.append(f"prompts and completions: {result.sft_path}")
    tokens = (
        f"; {result.tokens_in:,} tokens in, {result.tokens_out:,} out" if result.tokens_in or result.tokens_out else ""
    )
    lines.append(f"{result.n_sent} requests sent in this run, {result.n_cached} answered from the cache{tokens}")
    if result.judge:
        lines.append(render_judge_score(result.judge))
    if result.cost:
        lines.append(f"cost {result.cost:.4f}, everything answered into {result.run_dir} included")
    if result.unsure:
        lines.append(result.unsure)
    if result.out_of_budget:
        lines.append("Stopped before the budget was crossed.")
    if result.coverage:
        lines.append(render_coverage(result.coverage))
    if result.leaks:
        lines.append(render_leaks(result.leaks))
    if result.short:
        missing = result.asked - result.got
        cures = ["run again for what failed"] if result.failed else []
        cures += ["raise augment.max_attempts for what was refused"] if result.refused and result.n_sent else []
        lines.append(f"Short by {missing}" + (f": {'; '.join(cures)}." if cures else "."))
    return "\n".join(lines)


_MOST_SHOWN = 5


@dataclass(frozen=True)
class Coverage:
    """Facts by the number of accepted rewritings that they got: `by_count` maps that number to facts.

    Every fact stands in the file `path`. `quota` is what each was to get, `short` are the first that got less (fact,
    rewritings). `without_facts` counts passages that no list of facts came for, `incomplete` those whose list lacks a
    number, date, unit, quotation or name of the passage, and `lost` are the first such (passage id, what is lost).
    """

    path: Path
    quota: int
    n_facts: int
    by_count: Mapping[int, int]
    short: tuple[tuple[str, int], ...]
    without_facts: int
    incomplete: int
    lost: tuple[tuple[str, str], ...]

    @property
    def n_short(self) -> int:
        """Facts that got fewer rewritings than the quota."""
        return sum(n_facts for count, n_facts in self.by_count.items() if count < self.quota)

    def counts(self) -> dict[str, object]:
        """Return what goes into a manifest."""
        return {
            "quota": self.quota,
            "facts": self.n_facts,
            "facts_by_rewritings": {str(count): n_facts for count, n_facts in sorted(self.by_count.items())},
            "short": self.n_short,
            "passages_without_facts": self.without_facts,
            "passages_incomplete": self.incomplete,
        }


@dataclass
class _Covering:
    """What is counted while the rows of coverage.jsonl are written."""

    plan: Plan
    store: Store
    by_count: Counter[int] = field(default_factory=Counter)
    short: list[tuple[str, int]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    without_facts: int = 0
    incomplete: int = 0

    def rows(self) -> Iterator[Row]:
        for group in self.plan.groups():
            if group.style.per_note and group.n_samples:
                facts = self.store.notes(self.plan.notes_id(group))
                self.without_facts += not facts
                if facts:
                    self._compare(group, facts)
                    yield from self._rows_of(group, facts)

    def _compare(self, group: Group, facts: tuple[str, ...]) -> None:
        """Note where the list of facts lacks something of the passage that can be told without understanding it."""
        reason, detail = compare_facts(group.passage.text, " ".join(facts))
        if reason:
            self.incomplete += 1
            if len(self.lost) < _MOST_SHOWN:
                self.lost.append((group.passage.id, f"{reason}: {detail}"))

    def _rows_of(self, group: Group, facts: tuple[str, ...]) -> Iterator[Row]:
        got = Counter[int]()
        slots = self.plan.slots(group, facts)
        for slot, accepted in zip(slots, self.store.are_accepted(slots), strict=True):
            got[slot.sample % len(facts)] += accepted
        for index, fact in enumerate(facts):
            self.by_count[got[index]] += 1
            if got[index] < group.n_samples and len(self.short) < _MOST_SHOWN:
                self.short.append((fact, got[index]))
            place = {"document_id": group.passage.document_id, "passage_id": group.passage.id}
            yield {**place, "fact": fact, "asked": group.n_samples, "got": got[index]}


def cover(plan: Plan, store: Store, path: Path) -> Coverage | None:
    """Write every fact with its number of rewritings to `path`; return None where no style goes by facts."""
    quotas = [n_samples for name, n_samples in plan.styles.items() if STYLES[name].per_note and n_samples]
    if not quotas:
        return None
    covering = _Covering(plan, store)
    n_facts = write_jsonl(path, covering.rows())
    return Coverage(
        path=path, quota=max(quotas), n_facts=n_facts, by_count=dict(covering.by_count), short=tuple(covering.short),
        without_facts=covering.without_facts, incomplete=covering.incomplete, lost=tuple(covering.lost),
    )  # fmt: skip


def render_coverage(coverage: Coverage) -> str:
    """Return the table of facts by rewritings, and what is short or missing."""
    lines = [f"facts, each to be told {coverage.quota} times: {coverage.n_facts} in {coverage.path}"]
    lines += [f"{n_facts:>8}  told {count} times" for count, n_facts in sorted(coverage.by_count.items(), reverse=True)]
    lines += [f"          short: {fact!r} ({count})" for fact, count in coverage.short]
    if coverage.without_facts:
        lines.append(f"{coverage.without_facts:>8}  passages that no list of facts came for")
    if coverage.incomplete:
        lines.append(f"{coverage.incomplete:>8}  passages whose list of facts lacks something of the passage, such as")
        lines += [f"          {passage_id}  {what}" for passage_id, what in coverage.lost]
    return "\n".join(lines)
