"""Writes the corpus of a run from the stored variants, in the order of the documents, and counts
them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from kinject.augment.contamination import ContaminationCheck
from kinject.augment.coverage import (
    QUOTA,
    PassageCoverage,
    coverage_of,
    top_up_group,
    top_up_requests,
)
from kinject.augment.groups import Group, pair_groups, passage_groups, whole_document_groups
from kinject.augment.passage_file import PassageFile
from kinject.augment.plan import Plan
from kinject.augment.prompts import Source
from kinject.augment.store import TOKENS, Store, text_id
from kinject.augment.variant_requests import (
    VariantRequest,
    request_blocks,
    statements_id,
    stored_items,
    unprepared_requests,
)
from kinject.corpus.passages import Bm25, best_of, quoting_answer, with_passages
from kinject.disk import Row, content_id, open_jsonl
from kinject.question_formats import question_prompt
from kinject.recipe import AugmentSection, RaftSection
from kinject.terminal import format_count
from kinject.types import Document, Passage, Variant

_MOST_SHOWN = 5


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


class CorpusWriter:
    """Writes corpus.jsonl, sft.jsonl, coverage.jsonl and failures.jsonl in one pass over the
    documents.

    Each row of the corpus is searched for contamination as it is written. A row of a document with
    a licence names it and the document's source; so does a row of a document whose source is an
    address.
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
        self._plan, self._store, self._section = plan, store, section
        self._failures, self._contamination = failures, contamination
        self._raft: _RaftRows | None = None
        self.corpus_path = run_dir / "corpus.jsonl"
        self.sft_path = run_dir / "sft.jsonl"
        self.failures_path = run_dir / "failures.jsonl"
        self._coverage_path = run_dir / "coverage.jsonl"
        self.styles = {style: StyleCount() for style in plan.styles}
        self._by_count, self._short, self._n_short = Counter[int](), list[tuple[str, int]](), 0
        self._n_topped_up = self._n_without = 0
        self.n_rows = self.n_sft_rows = 0
        self._origin: dict[str, Any] = {}
        self._corpus: _Write
        self._sft: _Write | None
        self._failed: _Write
        self.failed = Counter[str]()
        self.tokens = Counter[str]()
        self.languages = Counter[str]()
        self.repairs = Counter[str]()

    def write(self, documents: PassageFile) -> None:
        """Write the files: passages and their variants by style and sample, in the order of
        `documents`.

        Those are read twice for a style whose rows show other passages.

        Raises `DiskError`, and `InputError` if a stored row is damaged.
        """
        section, styles = self._section, [self._plan.catalog[name] for name in self._plan.styles]
        # The index of all passages takes memory that only these rows need.
        if any(style.rows == "quoted" for style in styles):
            shown = chain.from_iterable(passages for _, passages in documents)
            self._raft = _RaftRows(shown, section.raft or RaftSection(), self._plan.seed)
        makes_sft = any(
            style.makes_instructions or (section.messages and style.writes_chat) for style in styles
        )
        with contextlib.ExitStack() as stack:
            self._corpus = stack.enter_context(open_jsonl(self.corpus_path))
            self._failed = stack.enter_context(open_jsonl(self.failures_path))
            self._sft = None
            if makes_sft and not section.one_corpus:
                self._sft = stack.enter_context(open_jsonl(self.sft_path))
            write_fact = stack.enter_context(open_jsonl(self._coverage_path))
            for document, passages in documents:
                self._origin = _origin_of(document)
                self._write_document(document, passages, write_fact)
            self._origin = {}  # a pair has two
            for group in pair_groups(self._plan, documents.with_others):
                self._write_group(group, [])

    def _write_document(
        self, document: Document, passages: Sequence[Passage], write_fact: _Write
    ) -> None:
        """Write the rows of a document, by passage, and the number of texts of each fact."""
        coverages = []
        for passage in passages:
            statements = self._store.notes(statements_id(self._plan, passage)) or ()
            coverages.append(coverage_of(passage, statements))
        for passage, coverage in zip(passages, coverages, strict=True):
            if self._section.include_originals:
                row = {"id": passage.id, "document_id": document.id}
                self._write_row({**row, "origin": "original", "text": passage.text})
            groups = list(passage_groups(self._plan, document, passage))
            for group in groups:
                self._write_group(group, [coverage])
            self._write_top_up(top_up_group(groups), coverage)
        for group in whole_document_groups(self._plan, document):
            self._write_group(group, coverages)
        for coverage in coverages:
            self._write_coverage(coverage, write_fact)

    def _write_group(self, group: Group, coverages: Sequence[PassageCoverage]) -> None:
        if group.skipped:
            self.styles[group.style.name].skipped[group.skipped] += 1
        if group.skipped or not group.n_samples:
            return
        items = stored_items(self._plan, group, self._store.notes)
        # None is a preparation without an answer: a failure, not a passage to skip.
        if items == []:
            self.styles[group.style.name].skipped["items"] += 1
        blocks: Iterable[list[VariantRequest]] = [unprepared_requests(group)]
        if items is not None:
            blocks = request_blocks(self._plan, group, items, self._store.variants)
        for requests in blocks:
            variants = self._store.variants(requests)
            n_asked = len(requests)
            if group.target is not None:  # tokens are asked for, not a number of variants
                n_asked = len(variants)
            self._count(group, requests, variants, n_asked)
            for request in requests:
                variant = variants.get(request.id)
                if variant is not None:
                    self._write_variant(group, request, variant, coverages)
                elif request.id in self._failures:
                    self._failed(self._failure_row(group, request))

    def _write_top_up(self, group: Group | None, coverage: PassageCoverage) -> None:
        """Write the texts that were asked for by naming facts."""
        if group is None or self._section.coverage is None:
            return
        for request in top_up_requests(self._plan, group, coverage, self._section.coverage):
            variants = self._store.variants([request])
            if request.id in self._failures:
                self._failed(self._failure_row(group, request))
            self._count(group, [request], variants, len(variants))
            for variant in variants.values():
                self._n_topped_up += len(variant.texts)
                self._write_variant(group, request, variant, [coverage])

    def _write_variant(
        self,
        group: Group,
        request: VariantRequest,
        variant: Variant,
        coverages: Sequence[PassageCoverage],
    ) -> None:
        # The facts of the group's passage, which is a whole document for some styles.
        own = variant.checks.get("facts", ())
        # A passage without a fact has no text that could carry one.
        if any(coverage.facts for coverage in coverages):
            # Not None: that is a text on which a person decided, whose facts are not counted yet.
            self._n_without += list(own).count([])
        for coverage in coverages:
            for text, facts in zip(variant.texts, own, strict=True):
                coverage.add(text, facts if len(coverages) == 1 else None)
        rows = list(self._variant_rows(group, request, variant))
        for index, row in enumerate(rows):
            facts = None
            # Other rows are parts of a text (pairs, paragraphs), which carry a part of its facts.
            if len(rows) == len(own):
                facts = own[index]
            if facts is None:
                facts = _facts_in(row, coverages)
            if facts:
                row |= {"facts": facts}
            self._write_row(row)

    def _write_coverage(self, coverage: PassageCoverage, write_fact: _Write) -> None:
        """Write and count the facts of a passage, each with its number of texts."""
        quota = coverage.quota(self._section.coverage)
        for fact, n in zip(coverage.facts, coverage.counts, strict=True):
            self._by_count[n] += 1
            if n < quota:
                self._n_short += 1
                if len(self._short) < _MOST_SHOWN:
                    self._short.append((fact.text, n))
            ids = {"document_id": coverage.passage.document_id, "passage_id": coverage.passage.id}
            write_fact({**ids, "fact": fact.id, "text": fact.text, "texts": n})

    def _write_row(self, row: Row) -> None:
        row |= self._origin
        if "text" in row or self._sft is None:
            self._corpus(row)
            self.n_rows += 1
            self._contamination.check_row("corpus", self.corpus_path, row)
        else:
            self._sft(row)
            self.n_sft_rows += 1
            self._contamination.check_row("sft", self.sft_path, row)

    def _variant_rows(
        self, group: Group, request: VariantRequest, variant: Variant
    ) -> Iterator[Row]:
        """Yield the corpus rows of a variant."""
        chat: Source | None = None
        if self._section.messages:
            chat = group.source
        ids = variant.checks.get("ids")
        if not ids:
            ids = [text_id(variant.id, index) for index in range(len(variant.texts))]
        for name, text in zip(ids, variant.texts, strict=True):
            rows = group.style.corpus_rows(text, request.item, request.turn, chat)
            for index, fields in enumerate(rows):
                row_id = text_id(name, index)
                if self._raft is not None and "quotation" in fields:
                    fields = self._raft.fields(group.passage, row_id, **fields)
                    if chat is not None:
                        fields = _as_conversation(**fields)
                ids_of_row = {"id": row_id, "document_id": group.passage.document_id}
                yield {**ids_of_row, "origin": "variant", **fields}

    def _count(
        self,
        group: Group,
        requests: Sequence[VariantRequest],
        variants: Mapping[str, Variant],
        n_asked: int,
    ) -> None:
        """Count the texts, refusals and tokens of `requests`, of which `n_asked` are wanted by the
        recipe."""
        count = self.styles[group.style.name]
        n_texts = sum(bool(variant.text) for variant in variants.values())
        # Nobody asks any more for a variant of which a person dropped every text.
        n_dropped = sum(variant.checks.get("ids") == [] for variant in variants.values())
        count.asked += n_asked - n_dropped
        count.got += n_texts
        count.nothing += len(variants) - n_texts - n_dropped
        count.texts += sum(len(variant.texts) for variant in variants.values())
        for refusal in self._store.refusals(requests):
            count.refused[refusal["reason"]] += 1
            self.tokens.update(refusal["usage"])
        for variant in variants.values():
            self.repairs.update(variant.checks.get("repairs", ()))
            if "language" in variant.checks:
                self.languages[variant.checks["language"]] += 1
            for name in TOKENS:
                self.tokens[name] += getattr(variant.usage, name)

    def _failure_row(self, group: Group, request: VariantRequest) -> Row:
        error = self._failures[request.id]
        self.styles[group.style.name].failed += 1
        self.failed[error] += 1
        return {
            "variant_id": request.id,
            "passage_id": group.passage.id,
            "document_id": group.passage.document_id,
            "style": group.style.name,
            "sample": request.sample,
            "error": error,
        }

    @property
    def refused(self) -> dict[str, int]:
        """Refused answers of all styles, by reason."""
        total = Counter[str]()
        for count in self.styles.values():
            total += count.refused
        return dict(total.most_common())

    @property
    def coverage(self) -> Coverage:
        """How many texts carry each fact."""
        return Coverage(
            path=self._coverage_path,
            quota=self._section.coverage,
            n_facts=self._by_count.total(),
            by_count=dict(self._by_count),
            n_short=self._n_short,
            short=self._short,
            n_texts=sum(count.texts for count in self.styles.values()),
            n_without=self._n_without,
            n_topped_up=self._n_topped_up,
            tokens_out=self.tokens["tokens_out"],
        )


_Write = Callable[[Row], None]


def _origin_of(document: Document) -> Row:
    """Return the fields by which each row of a document names its source and licence."""
    licence = document.meta.get("licence")
    origin: Row = {}
    if licence or "://" in document.source:
        origin["source"] = document.source
    if licence:
        origin["licence"] = licence
    return origin


def _facts_in(row: Row, coverages: Iterable[PassageCoverage]) -> list[str]:
    """Return the ids of the facts that a row carries, by its text."""
    written = row.get("text") or f"{row.get('prompt', '')}{row.get('completion', '')}"
    facts: list[str] = []
    for coverage in coverages:
        facts += coverage.carried(written)
    return facts


def _as_conversation(prompt: str, completion: str) -> Row:
    question = {"role": "user", "content": prompt}
    return {"messages": [question, {"role": "assistant", "content": completion.strip()}]}


class _RaftRows:
    """Questions with passages in front of them, as RAFT trains on them (arXiv 2403.10131); all
    passages are in memory."""

    def __init__(self, passages: Iterable[Passage], section: RaftSection, seed: int) -> None:
        self._section, self._seed = section, seed
        self._texts = {passage.id: (passage.document_id, passage.shown) for passage in passages}
        self._ids = list(self._texts)
        self._n_passages = Counter(document for document, _ in self._texts.values())
        self._index = Bm25([text for _, text in self._texts.values()])

    def fields(
        self, gold: Passage, row_id: str, question: str, quotation: str, answer: str
    ) -> dict[str, str]:
        """Return ``prompt`` and ``completion``: passages in an order of the seed, the question, the
        answer with its quotation.

        Without the passage that answers it, the answer alone is learned: no passage has the
        quotation.
        """
        section = self._section
        # By the row alone: one row more elsewhere changes no other.
        rng = Random(content_id("raft", self._seed, row_id))
        shows_gold = rng.random() >= section.without_gold
        others = self._distractors(gold, question, section.distractors + (not shows_gold))
        completion, texts = answer, list(others)
        if shows_gold:
            texts.insert(0, gold.shown)
            if section.quote:
                completion = quoting_answer(quotation, answer)
        rng.shuffle(texts)
        prompt = with_passages(texts, question_prompt(question))
        return {"prompt": prompt, "completion": f" {completion}"}

    def _distractors(self, gold: Passage, question: str, n: int) -> list[str]:
        """Return the texts of `n` passages of other documents, fewer if there are fewer."""
        # Enough to leave out each passage of the question's own document; to rank all takes longer.
        n_ranked = min(n + self._n_passages[gold.document_id], len(self._ids))
        ranked = best_of(self._index.scores(question), n_ranked)
        others = (self._texts[self._ids[index]] for index in ranked)
        return list(islice((text for document, text in others if document != gold.document_id), n))


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
