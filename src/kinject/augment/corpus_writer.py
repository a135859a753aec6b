"""Writes the corpus of a run from the stored variants, in the order of the documents, and counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from kinject.augment.checks.facts import compare_facts
from kinject.augment.contamination import ContaminationCheck
from kinject.augment.plan import Group, Plan, PlannedDocument, Schedule, VariantRequest
from kinject.augment.store import Store
from kinject.corpus.questions import question_prompt
from kinject.corpus.retrieved import Bm25, best_of, quoting_answer, with_passages
from kinject.disk import Row, content_id, open_jsonl
from kinject.recipe import AugmentSection, RaftSection
from kinject.types import Passage, Variant

_MOST_SHOWN = 5
_TOKENS = ("tokens_in", "tokens_out", "tokens_thinking")


@dataclass(frozen=True)
class StyleCount:
    """Counts of one style: variants `asked` and `got`, answers refused by reason, variants without an answer.

    `in_doubt` counts accepted texts that the checks could not decide, by the first reason, `refused_in_doubt` those
    refused. `nothing` counts the answers NONE, `skipped` passages without a need of the style, by need.
    """

    asked: int
    got: int
    refused: Mapping[str, int]
    failed: int
    nothing: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    in_doubt: Mapping[str, int] = field(default_factory=dict)
    refused_in_doubt: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Coverage:
    """Facts by number of accepted variants: `by_count` maps that number to facts. The file `path` lists every fact.

    Each fact was to get `quota` variants. `short` holds the first facts with fewer (fact, variants). `without_facts` counts
    passages without a list of facts, `incomplete` those whose list lacks a number, date, unit, quotation or name of the
    passage, and `lost` holds the first of them (passage id, the missing detail).
    """

    path: Path
    quota: int
    n_facts: int
    by_count: Mapping[int, int]
    short: Sequence[tuple[str, int]]
    without_facts: int
    incomplete: int
    lost: Sequence[tuple[str, str]]

    @property
    def n_short(self) -> int:
        """Facts with fewer variants than the quota."""
        return sum(n_facts for count, n_facts in self.by_count.items() if count < self.quota)

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "quota": self.quota,
            "facts": self.n_facts,
            "facts_by_rewritings": {str(count): n_facts for count, n_facts in sorted(self.by_count.items())},
            "short": self.n_short,
            "passages_without_facts": self.without_facts,
            "passages_incomplete": self.incomplete,
        }


@dataclass
class _Count:
    asked: int = 0
    got: int = 0
    failed: int = 0
    nothing: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    in_doubt: Counter[str] = field(default_factory=Counter)
    refused_in_doubt: Counter[str] = field(default_factory=Counter)


@dataclass
class _CoverageCount:
    by_count: Counter[int] = field(default_factory=Counter)
    short: list[tuple[str, int]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    without_facts: int = 0
    incomplete: int = 0


class CorpusWriter:
    """Writes corpus.jsonl, sft.jsonl, coverage.jsonl and failures.jsonl in one pass over the documents.

    Each row of the corpus is searched for contamination as it is written. A row of a document with a licence names it and
    the document's source; so does a row of a document whose source is an address.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        store: Store,
        failures: Mapping[str, str],
        contamination: ContaminationCheck,
        section: AugmentSection,
    ) -> None:
        """`failures` maps ids of requests without an answer to the error."""
        self._section = section
        self._raft: _RaftRows | None = None
        self.corpus_path = run_dir / "corpus.jsonl"
        self.sft_path = run_dir / "sft.jsonl"
        self.failures_path = run_dir / "failures.jsonl"
        self._coverage_path = run_dir / "coverage.jsonl"
        self._plan, self._store, self._failures, self._contamination = plan, store, failures, contamination
        self._counts = {style: _Count() for style in plan.styles}
        self._coverage = _CoverageCount()
        self._quotas = [n for name, n in plan.styles.items() if plan.catalog[name].keeps and n]
        self.n_rows = self.n_sft_rows = 0
        self._origin: dict[str, Any] = {}
        self.failed = Counter[str]()
        self.tokens = Counter[str]()
        self.languages = Counter[str]()

    def write(self, documents: Iterable[PlannedDocument]) -> None:
        """Write the files: passages and their variants by style and sample, in the order of `documents`.

        Those are read twice for a style whose rows show other passages.

        Raises `DiskError`, and `InputError` if a stored row is damaged.
        """
        section, styles = self._section, [self._plan.catalog[name] for name in self._plan.styles]
        if any(style.rows == "quoted" for style in styles):
            shown = (passage for _, passages in documents for passage in passages)
            self._raft = _RaftRows(shown, section.raft or RaftSection(), self._plan.seed)
        makes_sft = any(style.makes_instructions or (section.messages and style.writes_chat) for style in styles)
        with contextlib.ExitStack() as stack:
            write_corpus = stack.enter_context(open_jsonl(self.corpus_path))
            write_failure = stack.enter_context(open_jsonl(self.failures_path))
            apart = makes_sft and not section.one_corpus
            write_sft = stack.enter_context(open_jsonl(self.sft_path)) if apart else None
            write_fact = stack.enter_context(open_jsonl(self._coverage_path)) if self._quotas else None
            files = (write_corpus, write_sft, write_fact, write_failure)
            for document, passages in documents:
                licence = document.meta.get("licence")
                origin = {"source": document.source} if licence or "://" in document.source else {}
                self._origin = origin | ({"licence": licence} if licence else {})
                for passage in passages:
                    if section.include_originals:
                        row = {"id": passage.id, "document_id": document.id, "origin": "original", "text": passage.text}
                        self._write_row(row, write_corpus, write_sft)
                    for group in self._plan.groups_of(document, passage):
                        self._write_group(group, *files)
                for group in self._plan.document_groups(document):
                    self._write_group(group, *files)

    def _write_group(
        self,
        group: Group,
        write_corpus: _Write,
        write_sft: _Write | None,
        write_fact: _Write | None,
        write_failure: _Write,
    ) -> None:
        if group.skipped:
            self._counts[group.style.name].skipped[group.skipped] += 1
        if group.skipped or not group.n_samples:
            return
        items = self._plan.items(group, self._store.notes)
        if items == []:
            self._counts[group.style.name].skipped["items"] += 1
        schedule = Schedule(self._plan, group, items) if items is not None else [self._plan.unprepared(group)]
        got = Counter[str]()
        for requests in schedule:
            variants = self._store.variants(requests)
            self._count(group, requests, variants)
            for request in requests:
                variant = variants.get(request.id)
                if variant is not None and variant.text:
                    got[str(request.item.get(group.style.keeps or ""))] += 1
                    for row in self._variant_rows(group, request, variant):
                        self._write_row(row, write_corpus, write_sft)
                elif variant is None and request.id in self._failures:
                    write_failure(self._failure_row(group, request))
            if isinstance(schedule, Schedule):
                schedule.count(variant.text for variant in variants.values() if variant.text)
        if write_fact is not None and group.style.keeps:
            for fact_row in self._fact_rows(group, [str(item[group.style.keeps]) for item in items or ()], got):
                write_fact(fact_row)

    def _write_row(self, row: Row, write_corpus: _Write, write_sft: _Write | None) -> None:
        row |= self._origin
        if "text" in row or write_sft is None:
            write_corpus(row)
            self.n_rows += 1
            self._contamination.check_row("corpus", self.corpus_path, row)
        else:
            write_sft(row)
            self.n_sft_rows += 1
            self._contamination.check_row("sft", self.sft_path, row)

    def _variant_rows(self, group: Group, request: VariantRequest, variant: Variant) -> Iterator[Row]:
        """Yield the corpus rows of a variant."""
        chat = group.source if self._section.messages else None
        for index, fields in enumerate(group.style.corpus_rows(variant.text, request.item, request.turn, chat)):
            row_id = content_id(variant.id, index) if index else variant.id
            if self._raft is not None and "quotation" in fields:
                fields = self._raft.fields(group.passage, row_id, **fields)
                if chat is not None:
                    turns = (("user", fields["prompt"]), ("assistant", fields["completion"].strip()))
                    fields = {"messages": [{"role": role, "content": content} for role, content in turns]}
            yield {"id": row_id, "document_id": group.passage.document_id, "origin": "variant", **fields}

    def _count(self, group: Group, requests: Sequence[VariantRequest], variants: Mapping[str, Variant]) -> None:
        count = self._counts[group.style.name]
        n_texts = sum(bool(variant.text) for variant in variants.values())
        count.asked += len(requests) if group.target is None else len(variants)
        count.got += n_texts
        count.nothing += len(variants) - n_texts
        refusals = self._store.refusals(requests)
        self._store.check_refusals(variants, refusals)
        for refusal in refusals:
            count.refused[refusal["reason"]] += 1
            self.tokens.update(refusal["usage"])
            if refusal.get("in_doubt"):
                count.refused_in_doubt[refusal["in_doubt"][0][0]] += 1
        for variant in variants.values():
            if variant.checks.get("in_doubt"):
                count.in_doubt[variant.checks["in_doubt"][0][0]] += 1
            if "language" in variant.checks:
                self.languages[variant.checks["language"]] += 1
            for name in _TOKENS:
                self.tokens[name] += getattr(variant.usage, name)

    def _failure_row(self, group: Group, request: VariantRequest) -> Row:
        error = self._failures[request.id]
        self._counts[group.style.name].failed += 1
        self.failed[error] += 1
        return {
            "variant_id": request.id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": group.style.name, "sample": request.sample, "error": error,
        }  # fmt: skip

    def _fact_rows(self, group: Group, facts: Sequence[str], got: Mapping[str, int]) -> Iterator[Row]:
        """Yield each fact of a passage with its number of variants."""
        coverage = self._coverage
        if not facts:
            coverage.without_facts += 1
            return
        compared = compare_facts(group.passage.text, " ".join(facts))
        if compared.reason:
            coverage.incomplete += 1
            if len(coverage.lost) < _MOST_SHOWN:
                coverage.lost.append((group.passage.id, f"{compared.reason}: {compared.detail}"))
        for fact in facts:
            n = got.get(fact, 0)
            coverage.by_count[n] += 1
            if n < group.n_samples and len(coverage.short) < _MOST_SHOWN:
                coverage.short.append((fact, n))
            ids = {"document_id": group.passage.document_id, "passage_id": group.passage.id}
            yield {**ids, "fact": fact, "asked": group.n_samples, "got": n}

    @property
    def styles(self) -> dict[str, StyleCount]:
        """The counts by style."""
        return {
            name: StyleCount(
                count.asked,
                count.got,
                dict(count.refused.most_common()),
                count.failed,
                count.nothing,
                dict(count.skipped),
                dict(count.in_doubt.most_common()),
                dict(count.refused_in_doubt.most_common()),
            )
            for name, count in self._counts.items()
        }

    @property
    def refused(self) -> dict[str, int]:
        """Refused answers of all styles, by reason."""
        return dict(sum((count.refused for count in self._counts.values()), Counter[str]()).most_common())

    @property
    def coverage(self) -> Coverage | None:
        """How many variants each fact got, None if no style lists facts."""
        count = self._coverage
        if not self._quotas:
            return None
        return Coverage(
            self._coverage_path, max(self._quotas), count.by_count.total(), dict(count.by_count), count.short,
            count.without_facts, count.incomplete, count.lost,
        )  # fmt: skip


_Write = Callable[[Row], None]


class _RaftRows:
    """Questions with passages in front of them, as RAFT trains on them (arXiv 2403.10131); all passages are in memory."""

    def __init__(self, passages: Iterable[Passage], section: RaftSection, seed: int) -> None:
        self._section, self._seed = section, seed
        self._texts = {passage.id: (passage.document_id, passage.shown) for passage in passages}
        self._ids = list(self._texts)
        self._n_passages = Counter(document for document, _ in self._texts.values())
        self._index = Bm25([text for _, text in self._texts.values()])

    def fields(self, gold: Passage, row_id: str, question: str, quotation: str, answer: str) -> dict[str, str]:
        """Return ``prompt`` and ``completion``: passages in an order of the seed, the question, the answer with its quotation.

        Without the passage that answers it, the answer alone is learned: no passage has the quotation.
        """
        section = self._section
        rng = Random(content_id("raft", self._seed, row_id))
        shows_gold = rng.random() >= section.without_gold
        others = self._distractors(gold, question, section.distractors + (not shows_gold))
        texts = [*([gold.shown] if shows_gold else []), *others]
        rng.shuffle(texts)
        completion = quoting_answer(quotation, answer) if shows_gold else answer
        return {"prompt": with_passages(texts, question_prompt(question)), "completion": f" {completion}"}

    def _distractors(self, gold: Passage, question: str, n: int) -> list[str]:
        """Return the texts of `n` passages of other documents, fewer if there are fewer."""
        n_ranked = min(n + self._n_passages[gold.document_id], len(self._ids))
        ranked = best_of(self._index.scores(question), n_ranked)
        others = (self._texts[self._ids[index]] for index in ranked)
        return list(islice((text for document, text in others if document != gold.document_id), n))


def render_coverage(coverage: Coverage) -> str:
    """Return the table of facts by variants, with the first facts that are short or missing."""
    lines = [f"facts, {coverage.quota} rewritings each: {coverage.n_facts} in {coverage.path}"]
    lines += [
        f"{n_facts:>8}  with {count} rewritings" for count, n_facts in sorted(coverage.by_count.items(), reverse=True)
    ]
    lines += [f"          short: {fact!r} ({count})" for fact, count in coverage.short]
    if coverage.without_facts:
        lines.append(f"{coverage.without_facts:>8}  passages without a list of facts")
    if coverage.incomplete:
        lines.append(f"{coverage.incomplete:>8}  passages whose list of facts is incomplete, such as")
        lines += [f"          {passage_id}  {detail}" for passage_id, detail in coverage.lost]
    return "\n".join(lines)
