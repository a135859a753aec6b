"""Writes the corpus of a run from the stored variants, in the order of the documents, and counts
them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from kinject.augment.contamination import ContaminationCheck, Position
from kinject.augment.corpus_counts import CorpusCounts, StyleCount
from kinject.augment.coverage import (
    PassageCoverage,
    coverage_of,
    top_up_group,
    top_up_requests,
)
from kinject.augment.groups import Group, pair_groups, passage_groups, whole_document_groups
from kinject.augment.passage_file import PassageFile
from kinject.augment.pieces import (
    AFTER_DOCUMENTS,
    CORPUS,
    COVERAGE,
    FAILURES,
    PIECES,
    SFT,
    write_pieces,
)
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
from kinject.types import Document, Passage, Variant


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
        self._run_dir = run_dir
        self.counts = CorpusCounts({style: StyleCount() for style in plan.styles})
        self._origin: dict[str, Any] = {}
        self._write: dict[str, _Write] = {}
        self._position: Position = (0, "")
        self._n_bytes = Counter[str]()

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
        makes_sft = any(style.makes_rows_apart(messages=section.messages) for style in styles)
        names = [CORPUS, COVERAGE, FAILURES]
        if makes_sft and not section.one_corpus:
            names.append(SFT)
        with contextlib.ExitStack() as stack:
            for name in names:
                self._write[name] = stack.enter_context(open_jsonl(self._run_dir / name))
            write_piece: _Write | None = None
            if self._plan.shard.total:
                write_piece = stack.enter_context(open_jsonl(self._run_dir / PIECES))
            for _ in self._write_all(documents):
                if write_piece is not None:
                    write_piece({"position": self._position, "bytes": self._n_bytes})
                self._n_bytes.clear()
        self.counts.passages = documents.counts
        if self._plan.shard.total:
            write_pieces(self._run_dir, names, self.counts, self._contamination)

    def _write_all(self, documents: PassageFile) -> Iterator[None]:
        """Write all documents, then all pairs, and pause after each."""
        for number, document, passages in documents.numbered():
            self._position = (number, "")
            self._origin = _origin_of(document)
            self._write_document(document, passages)
            yield
        self._origin = {}  # a pair has two
        for group in pair_groups(self._plan, documents.with_others):
            self._position = (AFTER_DOCUMENTS, group.item["entity"])
            self._write_group(group, [])
            yield

    def _put(self, name: str, row: Row) -> None:
        """Write a row to one of the files."""
        self._n_bytes[name] += self._write[name](row)

    def _write_document(self, document: Document, passages: Sequence[Passage]) -> None:
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
            self._write_coverage(coverage)

    def _write_group(self, group: Group, coverages: Sequence[PassageCoverage]) -> None:
        if group.skipped:
            self.counts.styles[group.style.name].skipped[group.skipped] += 1
        if group.skipped or not group.n_samples:
            return
        items = stored_items(self._plan, group, self._store.notes)
        # None is a preparation without an answer: a failure, not a passage to skip.
        if items == []:
            self.counts.styles[group.style.name].skipped["items"] += 1
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
                    self._put(FAILURES, self._failure_row(group, request))

    def _write_top_up(self, group: Group | None, coverage: PassageCoverage) -> None:
        """Write the texts that were asked for by naming facts."""
        if group is None or self._section.coverage is None:
            return
        for request in top_up_requests(self._plan, group, coverage, self._section.coverage):
            variants = self._store.variants([request])
            if request.id in self._failures:
                self._put(FAILURES, self._failure_row(group, request))
            self._count(group, [request], variants, len(variants))
            for variant in variants.values():
                self.counts.n_topped_up += len(variant.texts)
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
            self.counts.n_without += list(own).count([])
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

    def _write_coverage(self, coverage: PassageCoverage) -> None:
        """Write and count the facts of a passage, each with its number of texts."""
        quota = coverage.quota(self._section.coverage)
        for fact, n in zip(coverage.facts, coverage.counts, strict=True):
            self.counts.facts_by_texts[n] += 1
            if n < quota:
                self.counts.add_short(self._position, fact.text, n)
            ids = {"document_id": coverage.passage.document_id, "passage_id": coverage.passage.id}
            self._put(COVERAGE, {**ids, "fact": fact.id, "text": fact.text, "texts": n})

    def _write_row(self, row: Row) -> None:
        row |= self._origin
        kind = "corpus"
        if "text" in row or SFT not in self._write:
            self._put(CORPUS, row)
            self.counts.n_rows += 1
        else:
            self._put(SFT, row)
            self.counts.n_sft_rows += 1
            kind = "sft"
        path = self._run_dir / f"{kind}.jsonl"
        self._contamination.check_row(kind, path, row, self._position)

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
        count = self.counts.styles[group.style.name]
        n_texts = sum(bool(variant.text) for variant in variants.values())
        # Nobody asks any more for a variant of which a person dropped every text.
        n_dropped = sum(variant.checks.get("ids") == [] for variant in variants.values())
        count.asked += n_asked - n_dropped
        count.got += n_texts
        count.nothing += len(variants) - n_texts - n_dropped
        count.texts += sum(len(variant.texts) for variant in variants.values())
        for refusal in self._store.refusals(requests):
            count.refused[refusal["reason"]] += 1
            self.counts.tokens.update(refusal["usage"])
        for variant in variants.values():
            self.counts.repairs.update(variant.checks.get("repairs", ()))
            if "language" in variant.checks:
                self.counts.languages[variant.checks["language"]] += 1
            for name in TOKENS:
                self.counts.tokens[name] += getattr(variant.usage, name)

    def _failure_row(self, group: Group, request: VariantRequest) -> Row:
        error = self._failures[request.id]
        self.counts.styles[group.style.name].failed += 1
        self.counts.failed[error] += 1
        return {
            "variant_id": request.id,
            "passage_id": group.passage.id,
            "document_id": group.passage.document_id,
            "style": group.style.name,
            "sample": request.sample,
            "error": error,
        }


_Write = Callable[[Row], int]


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
