"""How often each fact of the documents is told: the report of styles that go by facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinject.augment.checks.facts import compare_facts
from kinject.augment.plan import Group, Plan
from kinject.augment.store import Store
from kinject.augment.styles import STYLES
from kinject.disk import Row, write_jsonl

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
