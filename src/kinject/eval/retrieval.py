"""Passages for questions: retrieved by BM25, by sentence embeddings or by both, or prepared by the user; and their recall."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kinject.corpus.documents import read_documents
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import content_id, open_to_read, parse_json, read_bytes, read_jsonl
from kinject.errors import DiskError, InputError
from kinject.eval.scoring.answers import hash_model
from kinject.hub import find_source
from kinject.recipe import DocumentsSection
from kinject.recipe.sections import RetrievalSection
from kinject.results import Recall
from kinject.types import Passage, Question

Vectors = npt.NDArray[np.float32]
"""Unit vectors, shape [n, dimensions]."""

BGE_PREFIX = "Represent this sentence for searching relevant passages: "
"""The query prefix of the BGE models' card (English, versions 1 and 1.5); passages get no prefix."""

_WORD = re.compile(r"\w+")
_RRF = 60  # Cormack, Clarke and Buettcher, SIGIR 2009
_FUSED = 100  # passages of each retriever that are fused
_PRODUCTS = 2**24  # dot products in memory at once: 64 MB
_MARGIN = 1e-3  # exceeds the rounding error of a float32 dot product of unit vectors


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


def _prepared_passage(item: object, where: str) -> Passage:
    fields = item if isinstance(item, dict) else {"text": item}
    text, identity = fields.get("text"), fields.get("id")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where}: passages: found {item!r:.60}, expected a text, or text with id and document_id.")
    name = str(identity) if identity else content_id("context", text)
    return Passage(name, str(fields.get("document_id") or ""), 0, len(text), text)


def read_passages(paths: Sequence[Path], n_tokens: int, documents: DocumentsSection | None = None) -> list[Passage]:
    """Return the passages of the documents in `paths`, of at most `n_tokens` words and punctuation marks, each once.

    Raises `InputError` or `DiskError` as `read_documents` does.
    """
    passages: dict[str, Passage] = {}
    for path in paths:
        for document in read_documents(path, documents):
            for passage in split_passages(document, n_tokens, word_spans):
                passages.setdefault(passage.id, passage)
    return list(passages.values())


def measure_recall(name: str, questions: Sequence[Question], contexts: Sequence[Sequence[Passage]], k: int) -> Recall:
    """Return recall at `k` over the questions of the set `name` that name a document; `contexts` are in their order."""
    hits = [
        question.document_id in {passage.document_id for passage in context[:k]}
        for question, context in zip(questions, contexts, strict=True)
        if question.document_id
    ]
    return Recall(name, k, sum(hits), len(hits))


class Retriever(Protocol):
    """Ranks its passages for a query; `notes` are for the report."""

    passages: tuple[Passage, ...]
    notes: tuple[str, ...]

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages, the best first."""
        ...


def make_retriever(section: RetrievalSection, passages: Sequence[Passage]) -> Retriever:
    """Return the retriever that `section` names. Raises `InputError` as `DenseRetriever` does."""
    if section.kind == "bm25":
        return Bm25Retriever(passages)
    dense = DenseRetriever(passages, section.embedder, section.query_prefix, Path(section.cache_dir))
    return dense if section.kind == "dense" else FusedRetriever(Bm25Retriever(passages), dense)


class Bm25Retriever:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75, through bm25s) over passages; words in lower case, no stop words."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Index `passages` (at least one)."""
        import bm25s

        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        words = [_words(passage.text) for passage in passages]
        self._vocabulary = set[str]().union(*words)
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def best(self, query: str, k: int) -> tuple[Passage, ...]:
        """Return the `k` best passages for `query`, the best first; all if the index holds fewer."""
        return tuple(self.passages[index] for index in self._rank(query, k))

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the passages."""
        return [self._rank(query, k) for query in queries]

    def _rank(self, query: str, k: int) -> list[int]:
        known = [word for word in _words(query) if word in self._vocabulary]
        scores = self._index.get_scores(known) if known else np.zeros(len(self.passages))
        indices: list[int] = np.argsort(-scores, kind="stable")[:k].tolist()
        return indices


class DenseRetriever:
    """Passages by the dot product of normalised sentence embeddings (sentence-transformers)."""

    def __init__(self, passages: Sequence[Passage], embedder: str, prefix: str | None, cache_dir: Path) -> None:
        """Embed `passages`, or read their vectors from `cache_dir` if the same weights embedded the same texts before.

        `prefix` is put before each query; None: BGE's own for models with "bge" and without "m3" in their name, else
        nothing. Raises `InputError` when the extra `rag` is not installed or the model cannot be loaded.
        """
        self.passages = tuple(passages)
        self._model = _load_embedder(embedder)
        name = Path(embedder).name.lower()
        is_bge = "bge" in name and "m3" not in name
        self._prefix = (BGE_PREFIX if is_bge else "") if prefix is None else prefix
        weights = hash_model(embedder, _commit_of(self._model))
        key = content_id("passages", weights, [passage.text for passage in passages])
        self.path = cache_dir / f"{key}.npy"
        self._vectors = self._read_or_embed()
        self.notes = tuple(self._truncation_notes())

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal ones in the order of the passages."""
        if not queries:
            return []
        return rank_by_dot_product(self._embed([self._prefix + query for query in queries]), self._vectors, k)

    def _truncation_notes(self) -> list[str]:
        """Return a note if the embedder does not read all passages to their end."""
        longest = self._model.max_seq_length
        if not longest:
            return []
        texts = [passage.text for passage in self.passages]
        ids = self._model.tokenizer(texts, add_special_tokens=True, truncation=False, verbose=False).input_ids
        n_cut = sum(len(tokens) > longest for tokens in ids)
        if not n_cut:
            return []
        count = f"{n_cut:,} of {len(texts):,} passages are longer than the {longest} tokens that the embedder reads"
        return [f"{count}; the rest of their text is not searched. Lower eval.retrieval.passage_tokens"]

    def _read_or_embed(self) -> Vectors:
        if self.path.exists():
            try:
                with open_to_read(self.path) as file:
                    stored: Vectors = np.load(file, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DiskError(f"{self.path}: damaged index ({error}). Delete it and run again.") from error
            if len(stored) == len(self.passages):
                return stored
        vectors = self._embed([passage.text for passage in self.passages])
        partial = self.path.with_suffix(f".{os.getpid()}.part.npy")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            np.save(partial, vectors, allow_pickle=False)
            partial.replace(self.path)
        except OSError as error:
            raise DiskError(f"{self.path}: cannot be written: {error.strerror}.") from error
        return vectors

    def _embed(self, texts: list[str]) -> Vectors:
        vectors = self._model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def rank_by_dot_product(queries: Vectors, passages: Vectors, k: int) -> list[list[int]]:
    """Return for each of `queries` the indices of the `k` best of `passages`; equal products in order of index.

    A float32 matrix product finds the candidates, and float64 products order them. So the ranking is that of float64,
    and does not depend on which queries come together.
    """
    ranking: list[list[int]] = []
    n_rows = max(1, _PRODUCTS // len(passages))
    for start in range(0, len(queries), n_rows):
        block = queries[start : start + n_rows]
        for query, products in zip(block, block @ passages.T, strict=True):
            lowest = np.partition(products, -k)[-k] - _MARGIN if k < len(passages) else -np.inf
            candidates = np.flatnonzero(products >= lowest)
            exact = (passages[candidates].astype(np.float64) * query).sum(axis=1)
            ranking.append(candidates[np.argsort(-exact, kind="stable")[:k]].tolist())
    return ranking


class FusedRetriever:
    """Two retrievers in one ranking, by reciprocal rank fusion: 1 / (60 + rank), summed."""

    def __init__(self, first: Retriever, second: Retriever) -> None:
        """Take two retrievers over the same passages."""
        self.passages = first.passages
        self.notes = (*first.notes, *second.notes)
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


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _load_embedder(embedder: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise InputError(
            f"eval.retrieval.kind: dense retrieval needs {error.name}. Install it: pip install 'kinject[rag]'."
        ) from error
    try:
        source = find_source(embedder, "embedder")
    except InputError as error:
        raise InputError(f"eval.retrieval.embedder (for kind: dense and both; bm25 needs none): {error}") from error
    _refuse_code(Path(source))
    try:
        return SentenceTransformer(source, trust_remote_code=False, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else repr(error)
        raise InputError(f"eval.retrieval.embedder: {embedder!r} cannot be loaded: {first_line}") from error


def _refuse_code(folder: Path) -> None:
    """Raise `InputError` if the folder of an embedder names modules of its own, or holds weights as pickles.

    Before its version 6, sentence-transformers runs such modules from a folder on disk even without
    `trust_remote_code`; it reads a layer's pytorch_model.bin if there is no model.safetensors.
    """
    if not folder.is_dir():
        return
    where = f"eval.retrieval.embedder: {folder}"
    try:
        path = folder / "modules.json"
        modules = parse_json(read_bytes(path)) if path.exists() else []
        kinds = [str(module["type"]) for module in modules]
    except (DiskError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where}: modules.json cannot be read ({error}). Save the embedder again.") from error
    foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise InputError(
            f"{where} comes with Python code of its own ({foreign[0]}), and kinject runs no code that comes with a model. "
            "Use an embedder of sentence-transformers' own modules."
        )
    for path in sorted(folder.rglob("pytorch_model.bin")):
        if not (path.parent / "model.safetensors").is_file():
            raise InputError(
                f"{where}: {path.relative_to(folder)} is a pickle, which can run code as it loads: kinject reads "
                "safetensors only. Save the embedder again, as safetensors."
            )


def _commit_of(model: Any) -> str | None:
    inner = getattr(model[0], "auto_model", None)
    commit = getattr(getattr(inner, "config", None), "_commit_hash", None)
    return str(commit) if commit else None
