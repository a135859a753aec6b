"""Passages for questions: read or retrieved (by words, by their pieces, by sentence embeddings);
their recall."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kinject.corpus.passages import (
    Bm25,
    best_of,
    cut_note,
    split_passages,
    word_spans,
    words_of,
)
from kinject.disk import atomic_file, cached_folder, content_id, open_to_read
from kinject.errors import DiskError, InputError, one_line
from kinject.eval.scoring.answers import hash_model
from kinject.heap import read_documents
from kinject.hub import find_source
from kinject.language.sentences import sentences
from kinject.recipe import DocumentsSection
from kinject.recipe.sections import RetrievalSection
from kinject.results import Recall
from kinject.terminal import format_count
from kinject.types import Passage, Question

Vectors = npt.NDArray[np.float32]
"""Unit vectors, shape [n, dimensions]."""

PREFIXES = {
    # The first whose words are all in the name counts.
    ("bge", "m3"): ("", ""),
    ("bge", "zh"): ("为这个句子生成表示以用于检索相关文章：", ""),
    ("bge",): ("Represent this sentence for searching relevant passages: ", ""),
    ("e5", "instruct"): (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
        "Query: ",
        "",
    ),
    ("e5",): ("query: ", "passage: "),
}
"""Words of an embedder's name -> its texts before queries and passages, by the models' cards."""


def prefixes_of(embedder: str, prompts: Mapping[str, str]) -> tuple[str, str]:
    """Return an embedder's texts before queries and before passages: those of its card, or else
    the `prompts` in its own config.

    Without its "Instruct: ..." before a query, a model that was trained with it finds less.
    """
    # Whole words: base5 is no e5.
    words = re.split(r"[^a-z0-9]+", Path(embedder).name.lower())
    for needed, prefixes in PREFIXES.items():
        if set(needed) <= set(words):
            return prefixes
    of_passages = [prompts.get(name, "") for name in ("document", "passage", "corpus")]
    return prompts.get("query", ""), next(filter(None, of_passages), "")


# Recall at 1: 5.7 points over BM25. Ten scores have 6.2, for six more indices.
LEXICAL_WEIGHTS = {"words": 1.0, "pieces": 0.53, "pairs": 0.75, "sentence": 0.43}
"""Weights of the scores of `LexicalRetriever`, learned from SQuAD questions by
benchmarks/eval/retrieval.py."""

# Pieces of four letters gain 2.2 points of recall over BM25, stems 1.7 (docs/LOG.md).
_NGRAM = 4  # letters
_BLOCK = 512  # texts in one call of the tokenizer


INDICES = Path("runs/indices")
_VECTORS = "vectors.npy"
"""The folder of embedded passages, by content."""


class Retriever:
    """Ranks its passages for a query; `notes` are for the report, `models` (name -> hash) for the
    manifest.

    `section` (None: its defaults) has the score below which passages are left out.
    """

    def __init__(
        self, passages: Sequence[Passage], section: RetrievalSection | None = None
    ) -> None:
        """Index `passages` (at least one)."""
        self.passages = tuple(passages)
        self.least = None if section is None else section.min_score
        self.notes: tuple[str, ...] = ()
        self.models: Mapping[str, str] = {}

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each passage."""
        raise NotImplementedError

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages, the best first; equal scores
        in the order of passages."""
        return [best_of(self.scores(query), k, self.least) for query in queries]

    def find(self, questions: Sequence[Question], k: int) -> list[tuple[Passage, ...]]:
        """Return the `k` best passages for each question, the best first; fewer if few reach
        `least`."""
        ranked = self.rank([question.question for question in questions], k)
        return [tuple(self.passages[index] for index in indices) for indices in ranked]


class Bm25Retriever(Retriever):
    """BM25 over passages; words in lower case, no stop words."""

    def __init__(
        self, passages: Sequence[Passage], section: RetrievalSection | None = None
    ) -> None:
        """Index `passages` (at least one)."""
        super().__init__(passages, section)
        self._index = Bm25([passage.shown for passage in passages], words_of)

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each passage: from 0 up, without a bound."""
        return self._index.scores(query)


class OracleRetriever(Retriever):
    """The document that the question names; where it has several passages, those that BM25 ranks
    first among them."""

    def find(self, questions: Sequence[Question], k: int) -> list[tuple[Passage, ...]]:
        """Return the passages of each question's own document. Raises `InputError` for a question
        that names none of them."""
        own: dict[str, list[Passage]] = {}
        for passage in self.passages:
            own.setdefault(passage.document_id, []).append(passage)
        for question in questions:
            if question.document_id not in own:
                raise InputError(
                    f"question {question.id!r} names no document that is searched (document_id: "
                    f"{question.document_id!r}), and eval.retrieval.kind: oracle shows that one. "
                    "Name it, or choose another kind."
                )
        found = {name: Bm25Retriever(passages) for name, passages in own.items()}
        return [found[question.document_id].find([question], k)[0] for question in questions]


class LexicalRetriever(Retriever):
    """A weighted sum of four BM25 scores: of words, of pairs of words in a row, of 4-letter pieces,
    in the best sentence too.

    Pieces find other forms of a word, pairs find names and phrases, and the best sentence finds
    words that are close together. No model is needed, and no list of endings or stop words of a
    language.
    """

    def __init__(
        self, passages: Sequence[Passage], section: RetrievalSection | None = None
    ) -> None:
        """Index `passages` (at least one)."""
        super().__init__(passages, section)
        texts = [passage.shown for passage in passages]
        self._indices = {name: Bm25(texts, terms) for name, terms in _TERMS.items()}
        # At least one a text: `reduceat` takes no empty parts.
        split = [sentences(text) or [text] for text in texts]
        self._first = np.cumsum([0, *map(len, split)])[:-1]
        self._sentences = Bm25(list(chain.from_iterable(split)), _ngrams)

    def parts(self, query: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return the four scores of the passages, by the names of `LEXICAL_WEIGHTS`."""
        scores = {name: index.scores(query) for name, index in self._indices.items()}
        scores["sentence"] = np.maximum.reduceat(self._sentences.scores(query), self._first)
        return scores

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each passage: from 0 up, without a bound."""
        weighted = [LEXICAL_WEIGHTS[name] * scores for name, scores in self.parts(query).items()]
        return np.asarray(np.sum(weighted, axis=0), dtype=np.float64)


def _pairs(text: str) -> list[str]:
    return [f"{first} {second}" for first, second in pairwise(words_of(text))]


def _ngrams(text: str) -> list[str]:
    """Return the runs of 4 characters of each word, its borders marked; shorter words whole."""
    marked = (f" {word} " for word in words_of(text))
    return [
        word[index : index + _NGRAM]
        for word in marked
        for index in range(max(1, len(word) - _NGRAM + 1))
    ]


_TERMS = {"words": words_of, "pieces": _ngrams, "pairs": _pairs}


class DenseRetriever(Retriever):
    """Passages by the dot product of normalised sentence embeddings (sentence-transformers)."""

    def __init__(self, passages: Sequence[Passage], section: RetrievalSection) -> None:
        """Embed `passages`, or read their vectors from the cache if the same weights embedded the
        same texts before.

        Raises `InputError` when the extra `rag` is not installed or the model cannot be loaded.
        """
        super().__init__(passages, section)
        key = "eval.retrieval.embedder (kinds bm25 and lexical need none)"
        self._model = load_embedder(section.embedder, key)
        self._prefix, prefix = prefixes_of(section.embedder, self._model.prompts)
        self._texts = [prefix + passage.shown for passage in passages]
        commit = getattr(getattr(self._model[0], "auto_model", None), "config", None)
        weights = hash_model(section.embedder, getattr(commit, "_commit_hash", None))
        self.models = {section.embedder: weights}
        self.path = INDICES / content_id("passages", weights, self._texts) / _VECTORS
        self._vectors = self._read_or_embed().astype(np.float64)
        self.notes = self._notes_on_length(section.embedder)

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages by float64 products, of equal
        ones the first."""
        embedded = self._embed([self._prefix + query for query in queries]) if queries else ()
        products = (self._vectors @ query.astype(np.float64) for query in embedded)
        return [best_of(scores, k, self.least) for scores in products]

    def _notes_on_length(self, embedder: str) -> tuple[str, ...]:
        """Return a note on passages that are longer than what the embedder reads; () without."""
        limit, n_long = self._model.max_seq_length, 0
        # Static embeddings read every token.
        if limit is None or math.isinf(limit):
            return ()
        for start in range(0, len(self._texts), _BLOCK):
            block = self._texts[start : start + _BLOCK]
            tokens = self._model.tokenizer(block, truncation=False, verbose=False)["input_ids"]
            n_long += sum(len(ids) > limit for ids in tokens)
        if not n_long:
            return ()
        of_all = format_count(len(self._texts), "passage")
        return (
            f"{n_long:,} of {of_all} exceed the {limit} tokens that {embedder} reads: a long one "
            "is found by its beginning alone. Lower eval.retrieval.passage_tokens.",
        )

    def _read_or_embed(self) -> Vectors:
        def write(part: Path) -> None:
            with atomic_file(part / _VECTORS, "wb") as file:
                np.save(file, self._embed(self._texts), allow_pickle=False)

        # With checksums: a changed vector would lead to other passages.
        cached_folder(INDICES, self.path.parent.name, write)
        try:
            with open_to_read(self.path) as file:
                # A pickle could run code (docs/security.md).
                stored: Vectors = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DiskError(
                f"{self.path}: damaged index ({error}). Delete its folder and run again."
            ) from error
        return stored

    def _embed(self, texts: list[str]) -> Vectors:
        vectors = self._model.encode(
            texts,
            # The texts have their prefix: not the model's default prompt as well.
            prompt="",
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


# A small embedder is behind BM25 on invented names; fused it wins from three passages on
# (docs/LOG.md).
class BothRetriever(Retriever):
    """Lexical and dense ranks in one: a passage scores the sum of 1 / (60 + rank) (Cormack et al.,
    2009), 0.033 at most."""

    def __init__(self, passages: Sequence[Passage], section: RetrievalSection) -> None:
        """Index and embed `passages`. Raises `InputError` as `DenseRetriever` does."""
        super().__init__(passages, section)
        # The least score is one of the sum of ranks, not of a part.
        self._dense = DenseRetriever(passages, replace(section, min_score=None))
        self._lexical, self.models = LexicalRetriever(passages), self._dense.models
        self.notes = self._dense.notes

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages, the best first."""
        from scipy.stats import rankdata

        ranked = []
        orders = self._dense.rank(queries, len(self.passages))
        for query, order in zip(queries, orders, strict=True):
            # Equal scores share a rank. By their order the first passages of a file would win over
            # the best of the dense ones, where no passage has a word of the query.
            lexical = rankdata(-self._lexical.scores(query))
            dense = 1 + np.argsort(order)
            ranked.append(best_of(1 / (60 + lexical) + 1 / (60 + dense), k, self.least))
        return ranked


def load_embedder(model: str, key: str) -> Any:
    """Return `model` (a folder or a name on the hub), loaded by sentence-transformers; weights as
    safetensors only.

    Raises `InputError` at the recipe's `key` when the extra `rag` is not installed, or the model
    cannot be loaded or names modules of its own, whose code sentence-transformers does not run.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise InputError(
            f"{key}: an embedder needs {error.name}. Install it: pip install 'kinject[rag]'."
        ) from error
    try:
        source = find_source(model, "embedder")
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    refuse_pickles(Path(source), key)
    try:
        # No code comes with a model (docs/security.md).
        return sentence_transformers.SentenceTransformer(
            source, trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    except Exception as error:  # the library raises whatever its readers of files raise
        raise InputError(
            f"{key}: {model!r} cannot be loaded: {one_line(error)}. Is the folder whole? Download "
            "it again, or choose another embedder."
        ) from error


def refuse_pickles(folder: Path, key: str) -> None:
    """Raise `InputError` at `key` if the folder of a model holds weights as a pickle, which it
    would read for safetensors."""
    for path in sorted(folder.rglob("pytorch_model.bin")):
        if not (path.parent / "model.safetensors").is_file():
            raise InputError(
                f"{key}: {folder}: {path.relative_to(folder)} is a pickle, which can run code as "
                "it loads: kinject reads safetensors only. Save the model again, as safetensors."
            )


def read_passages(
    section: RetrievalSection, documents: DocumentsSection | None = None
) -> list[Passage]:
    """Return the passages of the documents, each once. Raises `InputError` or `DiskError` as
    `read_documents` does."""
    by_id: dict[str, Passage] = {}
    for path in section.documents:
        for document in read_documents(Path(path), documents):
            for passage in split_passages(document, section.passage_tokens, word_spans):
                by_id.setdefault(passage.id, passage)
    return list(by_id.values())


def measure_recall(
    name: str, questions: Sequence[Question], contexts: Sequence[Sequence[Passage]], k: int
) -> Recall:
    """Return recall at `k` over the questions of the set `name` that a document answers; `contexts`
    are in their order.

    It also counts the questions for which nothing was found.
    """
    hits = [
        question.document_id in {passage.document_id for passage in context[:k]}
        for question, context in zip(questions, contexts, strict=True)
        if question.document_id and question.accepted
    ]
    return Recall(name, k, sum(hits), len(hits), sum(not context for context in contexts))


_KINDS: Mapping[str, Callable[[Sequence[Passage], RetrievalSection], Retriever]] = {
    "bm25": Bm25Retriever,
    "lexical": LexicalRetriever,
    "dense": DenseRetriever,
    "both": BothRetriever,
    "oracle": OracleRetriever,
}


def make_retriever(section: RetrievalSection, passages: Sequence[Passage]) -> Retriever:
    """Return the retriever that `section` describes. Raises `InputError` as `DenseRetriever`
    does."""
    retriever = _KINDS[section.kind](passages, section)
    n_cut = sum(passage.cut for passage in passages)
    note = cut_note(n_cut, len(passages), "eval.retrieval.passage_tokens")
    if note:
        retriever.notes += (note,)
    return retriever
