"""Passages for questions: read, retrieved, reranked, or prepared; and their recall."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kinject.corpus.passages import cut_note, split_passages, word_spans
from kinject.disk import content_id, open_database, parse_json, read_jsonl, write_rows
from kinject.documents import read_documents
from kinject.errors import DiskError, InputError
from kinject.eval.retrievers import (
    Bm25Retriever,
    DenseRetriever,
    LexicalRetriever,
    Retriever,
    commit_of,
    count_longer,
    load_sentence_model,
    search_text,
)
from kinject.eval.scoring.answers import hash_model
from kinject.recipe import DocumentsSection
from kinject.recipe.eval_section import RerankerSection, RetrievalSection
from kinject.results import Recall
from kinject.terminal import Progress
from kinject.types import Passage, Question

_RRF = 60  # Cormack, Clarke and Buettcher, SIGIR 2009
_FUSED = 100  # passages of each retriever that are fused
_QUERIES = 16  # queries whose passages a local reranker reads together


def read_contexts(path: Path, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    """Return the prepared passages of each of `questions`: rows ``{question_id, passages: [...]}``, the best first.

    A passage is a text or ``{text, id?, document_id?}``; one without an id gets the hash of its text. Raises
    `InputError` (file:line) for a row of another shape, and for a question that has no row.
    """
    contexts: dict[str, tuple[Passage, ...]] = {}
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        question_id, passages = row.get("question_id"), row.get("passages")
        if isinstance(question_id, bool) or not isinstance(question_id, str | int) or not isinstance(passages, list):
            raise InputError(f"{path}:{number}: expected question_id and passages (a list of texts).")
        first = lines.setdefault(str(question_id), number)
        if first != number:
            fault = f"question {question_id!r:.80} is there twice, first on line {first}. Keep one."
            raise InputError(f"{path}:{number}: {fault}")
        contexts[str(question_id)] = tuple(_prepared_passage(item, f"{path}:{number}") for item in passages)
    missing = [question.id for question in questions if question.id not in contexts]
    if missing:
        raise InputError(
            f"{path}: no passages for {len(missing)} of {len(questions)} questions, such as {missing[0]!r}."
        )
    return [contexts[question.id] for question in questions]


def _prepared_passage(item: object, location: str) -> Passage:
    fields = item if isinstance(item, dict) else {"text": item}
    text, identity = fields.get("text"), fields.get("id")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{location}: passages: found {item!r:.60}, expected a text, or text with id and document_id.")
    name = str(identity) if identity else content_id("context", text)
    return Passage(name, str(fields.get("document_id") or ""), 0, len(text), text)


def read_passages(section: RetrievalSection, documents: DocumentsSection | None = None) -> list[Passage]:
    """Return the passages of the documents, each once. Raises `InputError` or `DiskError` as `read_documents` does."""
    by_id: dict[str, Passage] = {}
    for path in section.documents:
        for document in read_documents(Path(path), documents):
            for passage in split_passages(document, section.passage_tokens, word_spans, section.overlap):
                by_id.setdefault(passage.id, passage)
    return list(by_id.values())


def measure_recall(name: str, questions: Sequence[Question], contexts: Sequence[Sequence[Passage]], k: int) -> Recall:
    """Return recall at `k` over the questions of the set `name` that a document answers; `contexts` are in their order."""
    hits = [
        question.document_id in {passage.document_id for passage in context[:k]}
        for question, context in zip(questions, contexts, strict=True)
        if question.document_id and question.accepted
    ]
    return Recall(name, k, sum(hits), len(hits))


def make_retriever(section: RetrievalSection, passages: Sequence[Passage]) -> Retriever:
    """Return the retriever that `section` describes. Raises `InputError` as `DenseRetriever` and `Reranker` do."""
    retriever: Retriever
    if section.kind == "bm25":
        retriever = Bm25Retriever(passages, section.heading_path)
    elif section.kind == "dense":
        retriever = DenseRetriever(passages, section)
    else:
        retriever = LexicalRetriever(passages, section.heading_path)
        if section.kind == "both":
            retriever = FusedRetriever(retriever, DenseRetriever(passages, section))
    if section.reranker is not None:
        retriever = RerankedRetriever(retriever, section, section.reranker)
    note = cut_note(sum(passage.cut for passage in passages), len(passages), "eval.retrieval.passage_tokens")
    retriever.notes += (note,) * bool(note)
    return retriever


class FusedRetriever:
    """Two retrievers in one ranking, by reciprocal rank fusion: 1 / (60 + rank), summed."""

    def __init__(self, first: Retriever, second: Retriever) -> None:
        """Take two retrievers over the same passages."""
        self.passages = first.passages
        self.notes = (*first.notes, *second.notes)
        self.models: Mapping[str, str] = {**first.models, **second.models}
        self._retrievers = (first, second)

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal sums in the order of the passages."""
        depth = max(k, _FUSED)
        rankings = zip(*(retriever.rank(queries, depth) for retriever in self._retrievers), strict=True)
        return [fuse(pair)[:k] for pair in rankings]


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return the items of `rankings` by reciprocal rank fusion, the best first; equal sums by the smaller item."""
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            sums[item] = sums.get(item, 0.0) + 1 / (_RRF + rank)
    return sorted(sums, key=lambda item: (-sums[item], item))


class RerankedRetriever:
    """The best passages of a retriever, in the order of the scores that a reranker gives them; the others after them."""

    def __init__(self, first: Retriever, section: RetrievalSection, reranker: RerankerSection) -> None:
        """Take a retriever, its section and the section of the reranker. Raises `InputError` as `Reranker` does."""
        self.passages = first.passages
        self._first, self._n = first, reranker.candidates
        self._texts = [search_text(passage, section.heading_path) for passage in first.passages]
        self._reranker = Reranker(reranker.model)
        self._path = Path(section.cache_dir) / "reranked.sqlite"
        self.models: Mapping[str, str] = {**first.models, self._reranker.name: self._reranker.identity}
        read = f"the best {min(self._n, len(self._texts)):,} passages of each question were reranked by {self._reranker.name}"
        self.notes = (*first.notes, read, *self._reranker.notes(self._texts))

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the first ranking.

        Scores are stored as they come: a rerun computes none twice.
        """
        ranked = self._first.rank(queries, max(k, self._n))
        items = [
            (query, [self._texts[index] for index in ranking[: self._n]])
            for query, ranking in zip(queries, ranked, strict=True)
        ]
        scores = self._scores(items)
        rankings = []
        for ranking, passage_scores in zip(ranked, scores, strict=True):
            order = sorted(range(len(passage_scores)), key=lambda index: -passage_scores[index])
            rankings.append([*(ranking[index] for index in order), *ranking[len(passage_scores) :]][:k])
        return rankings

    def _scores(self, items: Sequence[tuple[str, list[str]]]) -> list[list[float]]:
        """Return the scores of the texts of each query, from the cache where they are there."""
        keys = [content_id("rerank", self._reranker.identity, query, texts) for query, texts in items]
        try:
            database = open_database(self._path, "CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, value TEXT)")
            try:
                known = {key: self._stored(database, key) for key in keys}
                missing = {key: item for key, item in zip(keys, items, strict=True) if known[key] is None}
                with Progress("rerank", len(missing), "questions") as progress:
                    for key, scores in zip(missing, self._reranker.scores(list(missing.values())), strict=True):
                        write_rows(
                            database, self._path, "INSERT OR REPLACE INTO scores VALUES (?, ?)", [(key, str(scores))]
                        )
                        known[key] = scores
                        progress.advance()
            finally:
                database.close()
        except (OSError, sqlite3.Error) as error:
            raise DiskError(
                f"{self._path}: the stored scores cannot be used ({error}). Delete it and run again."
            ) from error
        return [known[key] or [] for key in keys]

    def _stored(self, database: sqlite3.Connection, key: str) -> list[float] | None:
        row = database.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else [float(score) for score in parse_json(row[0].encode())]


class Reranker:
    """A cross-encoder of sentence-transformers: it scores texts for a query, the higher the better."""

    def __init__(self, model: str) -> None:
        """Load `model`, a folder or a name on the hub. Raises `InputError` if it cannot be, or the extra `rag` is missing."""
        key = "eval.retrieval.reranker.model"
        self._model = load_sentence_model("reranker", model, key)
        inner = self._model.model
        trained = getattr(inner.config, "architectures", None) or [type(inner).__name__]
        if self._model.num_labels != 1 or not (type(inner).__name__ in trained or "ForCausalLM" in trained[0]):
            raise InputError(
                f"{key}: {model} is no reranker: its layers give no single score ({trained[0]}, {self._model.num_labels} "
                "labels). Take a cross-encoder, such as BAAI/bge-reranker-v2-m3."
            )
        self.name = model
        self.identity = hash_model(model, commit_of(self._model))

    def scores(self, items: Sequence[tuple[str, list[str]]]) -> Iterator[list[float]]:
        """Yield for each (query, texts) a score for each text: the logit, which no sigmoid rounds to 1."""
        from torch import nn

        for start in range(0, len(items), _QUERIES):
            block = items[start : start + _QUERIES]
            pairs = [(query, text) for query, texts in block for text in texts]
            logits: list[float] = []
            if pairs:
                logits = self._model.predict(pairs, activation_fn=nn.Identity(), show_progress_bar=False).tolist()
            for _, texts in block:
                yield logits[: len(texts)]
                del logits[: len(texts)]

    def notes(self, texts: Sequence[str]) -> list[str]:
        """Return a note if the model does not read all texts to their end."""
        longest = getattr(self._model, "max_seq_length", None) or getattr(
            self._model.tokenizer, "model_max_length", None
        )
        n_cut = count_longer(self._model.tokenizer, texts, longest) if longest else 0
        if not n_cut:
            return []
        count = f"{n_cut:,} of {len(texts):,} passages are longer than the {longest} tokens that the reranker reads"
        return [f"{count}; it does not see the rest. Lower eval.retrieval.passage_tokens"]
