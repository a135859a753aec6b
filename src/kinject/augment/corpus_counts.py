"""The counts of a corpus, and of the facts that its texts carry: those of shards add up to those of
one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from kinject.augment.contamination import Position
from kinject.augment.coverage import QUOTA
from kinject.terminal import format_count

MOST_SHORT = 5
"""Facts in too few texts that a summary shows."""


@dataclass
class StyleCount:
    """Counts of one style: variants `asked` and `got`, answers refused by reason, variants without
    an answer.

    `texts` counts the accepted texts, of which one answer may hold several. `nothing` counts the
    answers NONE, `skipped` passages without a need of the style, by need.
    """

    asked: int = 0
    got: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    nothing: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    texts: int = 0

    def add(self, other: StyleCount) -> None:
        """Add the counts of another shard."""
        self.asked += other.asked
        self.got += other.got
        self.refused.update(other.refused)
        self.failed += other.failed
        self.nothing += other.nothing
        self.skipped.update(other.skipped)
        self.texts += other.texts


@dataclass(frozen=True)
class Coverage:
    """Facts by number of accepted texts that carry them: `by_count` maps that number to facts. The
    file `path` lists every fact.

    Each fact should stand in `quota` texts, None for 5, or half of the passage's texts where these
    are fewer. `n_short` facts stand in fewer; `short` holds the first of them (fact, texts).
    `n_texts` are the accepted texts, `n_without` those of them that carry no fact of their passage,
    `n_topped_up` those that were asked for by naming facts, and `tokens_out` what the writer wrote,
    refused answers included.
    """

    path: Path
    quota: int | None
    n_facts: int
    by_count: Mapping[int, int]
    n_short: int
    short: Sequence[tuple[str, int]]
    n_texts: int
    n_without: int
    n_topped_up: int
    tokens_out: int

    @property
    def n_covered(self) -> int:
        """Facts that five texts or more carry."""
        return sum(n_facts for count, n_facts in self.by_count.items() if count >= QUOTA)

    @property
    def tokens_per_text(self) -> float | None:
        """Writer tokens for each accepted text, None without texts of a model."""
        return self._tokens_each(self.n_texts)

    @property
    def tokens_per_fact(self) -> float | None:
        """Writer tokens for each fact that stands in five texts, None where none does."""
        return self._tokens_each(self.n_covered)

    def _tokens_each(self, n: int) -> float | None:
        if not n or not self.tokens_out:
            return None
        return self.tokens_out / n

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        by_texts = {str(count): n_facts for count, n_facts in sorted(self.by_count.items())}
        return {
            "quota": self.quota,
            "facts": self.n_facts,
            "short": self.n_short,
            "texts": self.n_texts,
            "texts_without_facts": self.n_without,
            "topped_up": self.n_topped_up,
            "facts_in_five": self.n_covered,
            "facts_by_texts": by_texts,
            "tokens_per_text": self.tokens_per_text,
            "tokens_per_fact": self.tokens_per_fact,
        }


@dataclass
class CorpusCounts:
    """What one pass over the documents counted.

    `passages` has the documents, passages, and passages cut short. `facts_by_texts` maps a number
    of texts to the facts that so many carry; `short` holds the first facts in too few texts, with
    the position of their document.
    """

    styles: dict[str, StyleCount]
    passages: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    facts_by_texts: Counter[int] = field(default_factory=Counter)
    short: list[tuple[Position, str, int]] = field(default_factory=list)
    n_short: int = 0
    n_without: int = 0
    n_topped_up: int = 0
    n_rows: int = 0
    n_sft_rows: int = 0

    def add(self, other: CorpusCounts) -> None:
        """Add the counts of another shard."""
        for name, count in other.styles.items():
            self.styles[name].add(count)
        self.passages.update(other.passages)
        self.failed.update(other.failed)
        self.tokens.update(other.tokens)
        self.languages.update(other.languages)
        self.repairs.update(other.repairs)
        self.facts_by_texts.update(other.facts_by_texts)
        # By position alone: the facts of one document keep their order.
        self.short = sorted([*self.short, *other.short], key=itemgetter(0))[:MOST_SHORT]
        self.n_short += other.n_short
        self.n_without += other.n_without
        self.n_topped_up += other.n_topped_up
        self.n_rows += other.n_rows
        self.n_sft_rows += other.n_sft_rows

    def add_short(self, position: Position, text: str, n_texts: int) -> None:
        """Count a fact that too few texts carry, in the order of the documents."""
        self.n_short += 1
        if len(self.short) < MOST_SHORT:
            self.short.append((position, text, n_texts))

    @property
    def refused(self) -> dict[str, int]:
        """Refused answers of all styles, by reason."""
        total = Counter[str]()
        for count in self.styles.values():
            total += count.refused
        return dict(total.most_common())

    def coverage(self, path: Path, quota: int | None) -> Coverage:
        """Return how many texts carry each fact; each is in the file `path`."""
        return Coverage(
            path=path,
            quota=quota,
            n_facts=self.facts_by_texts.total(),
            by_count=dict(self.facts_by_texts),
            n_short=self.n_short,
            short=[(text, n_texts) for _, text, n_texts in self.short],
            n_texts=sum(count.texts for count in self.styles.values()),
            n_without=self.n_without,
            n_topped_up=self.n_topped_up,
            tokens_out=self.tokens["tokens_out"],
        )


def render_coverage(coverage: Coverage) -> str:
    """Return the number of facts, of those in no text, the first facts that are short, and what a
    fact costs."""
    if not coverage.n_facts:
        return "no passage has a number, date, name or quotation to count"
    wanted, topped_up = "5 texts, or half of them", ""
    if coverage.quota is not None:
        wanted = format_count(coverage.quota, "text")
    if coverage.n_topped_up:
        topped_up = f"; texts asked for by naming them: {coverage.n_topped_up:,}"
    n_nowhere = coverage.by_count.get(0, 0)
    lines = [
        f"facts of the passages: {coverage.n_facts:,}, {n_nowhere:,} of them in no accepted text "
        f"(each in {coverage.path})",
        f"{coverage.n_short:>8,}  stand in fewer than {wanted}{topped_up}",
    ]
    lines += [f"          {fact!r} ({count})" for fact, count in coverage.short]
    if coverage.n_without:
        lines.append(
            f"{coverage.n_without:>8,}  of {format_count(coverage.n_texts, 'accepted text')} "
            "carry none of their passage's facts"
        )
    if coverage.tokens_per_text is not None:
        line = f"writer tokens: {coverage.tokens_per_text:,.0f} for each accepted text"
        if coverage.tokens_per_fact is not None:
            line += f", {coverage.tokens_per_fact:,.0f} for each fact that stands in five"
        lines.append(line)
    return "\n".join(lines)
