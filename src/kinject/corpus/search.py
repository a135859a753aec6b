"""Passages ranked by the words of a query, and by their pieces; no model is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kinject.corpus.passages import sentences
from kinject.types import Passage

LEXICAL_WEIGHTS = {"words": 1.0, "pieces": 0.53, "pairs": 0.75, "sentence": 0.43}
"""Weights of the scores of `LexicalRetriever`, learned from SQuAD questions by benchmarks/eval/retrieval.py."""

_WORD = re.compile(r"\w+")
_PIECE = 4  # letters


class Retriever(Protocol):
    """Ranks its passages for a query; `notes` are for the report, `models` (name -> hash) for the manifest."""

    passages: tuple[Passage, ...]
    notes: tuple[str, ...]
    models: Mapping[str, str]

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages, the best first."""
        ...


def search_text(passage: Passage, heading_path: bool) -> str:
    """Return the text of a passage that is searched."""
    return passage.below_path() if heading_path else passage.shown


class _Bm25:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75, through bm25s) over texts, each split into terms."""

    def __init__(self, texts: Sequence[str], terms: Callable[[str], list[str]]) -> None:
        import bm25s

        self._terms, self._n = terms, len(texts)
        split = [terms(text) for text in texts]
        self._vocabulary = set[str]().union(*split)
        self._index = bm25s.BM25() if self._vocabulary else None
        if self._index is not None:
            self._index.index(split, show_progress=False)

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each text."""
        known = [term for term in self._terms(query) if term in self._vocabulary]
        if self._index is None or not known:
            return np.zeros(self._n)
        return np.asarray(self._index.get_scores(known), dtype=np.float64)


class Bm25Retriever:
    """BM25 over passages; words in lower case, no stop words."""

    def __init__(self, passages: Sequence[Passage], heading_path: bool = False) -> None:
        """Index `passages` (at least one)."""
        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        self.models: Mapping[str, str] = {}
        self._index = _Bm25([search_text(passage, heading_path) for passage in passages], _words)

    def best(self, query: str, k: int) -> tuple[Passage, ...]:
        """Return the `k` best passages for `query`, the best first; all if the index holds fewer."""
        return tuple(self.passages[index] for index in self.rank([query], k)[0])

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the passages."""
        return [_best(self._index.scores(query), k) for query in queries]


class LexicalRetriever:
    """A weighted sum of four BM25 scores: of words, of pairs of words in a row, of 4-letter pieces, in the best sentence too.

    Pieces find other forms of a word, pairs find names and phrases, and the best sentence finds what stands together. No
    model is needed, and no list of endings or stop words of a language.
    """

    def __init__(self, passages: Sequence[Passage], heading_path: bool = False) -> None:
        """Index `passages` (at least one)."""
        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        self.models: Mapping[str, str] = {}
        texts = [search_text(passage, heading_path) for passage in passages]
        self._indices = {name: _Bm25(texts, terms) for name, terms in _TERMS.items()}
        split = [sentences(text) or [text] for text in texts]
        self._first = np.cumsum([0, *map(len, split)])[:-1]
        self._sentences = _Bm25([sentence for one in split for sentence in one], _pieces)

    def scores(self, query: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return the scores of the passages, by the names of `LEXICAL_WEIGHTS`."""
        found = {name: index.scores(query) for name, index in self._indices.items()}
        return {**found, "sentence": np.maximum.reduceat(self._sentences.scores(query), self._first)}

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the passages."""
        return [
            _best(np.sum([LEXICAL_WEIGHTS[name] * scores for name, scores in self.scores(query).items()], axis=0), k)
            for query in queries
        ]


def _best(scores: npt.NDArray[np.float64], k: int) -> list[int]:
    indices: list[int] = np.argsort(-scores, kind="stable")[:k].tolist()
    return indices


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _pairs(text: str) -> list[str]:
    return [f"{first} {second}" for first, second in pairwise(_words(text))]


def _pieces(text: str) -> list[str]:
    """Return the runs of 4 characters of each word, its borders marked; shorter words whole."""
    marked = (f" {word} " for word in _words(text))
    return [word[at : at + _PIECE] for word in marked for at in range(max(1, len(word) - _PIECE + 1))]


_TERMS = {"words": _words, "pieces": _pieces, "pairs": _pairs}
