"""Retrievers: passages ranked by the words of a query, by their pieces, or by sentence embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kinject.corpus.passages import sentences
from kinject.corpus.retrieved import Bm25, best_of, words_of
from kinject.disk import atomic_file, content_id, open_to_read, parse_json, read_bytes
from kinject.errors import DiskError, InputError
from kinject.eval.scoring.answers import hash_model
from kinject.hub import find_source
from kinject.recipe.eval_section import RetrievalSection
from kinject.types import Passage

Vectors = npt.NDArray[np.float32]
"""Unit vectors, shape [n, dimensions]."""

PREFIXES = {
    "bge-m3": ("", ""), "bge": ("Represent this sentence for searching relevant passages: ", ""), "e5": ("query: ", "passage: "),
}  # fmt: skip
"""Part of an embedder's name -> its texts before queries and before passages, by the models' cards."""

LEXICAL_WEIGHTS = {"words": 1.0, "pieces": 0.53, "pairs": 0.75, "sentence": 0.43}
"""Weights of the scores of `LexicalRetriever`, learned from SQuAD questions by benchmarks/eval/retrieval.py."""

_NGRAM = 4  # letters
_PRODUCTS = 2**24  # dot products in memory at once: 64 MB
_MARGIN = 1e-3  # exceeds the rounding error of a float32 dot product of unit vectors


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


class Bm25Retriever:
    """BM25 over passages; words in lower case, no stop words."""

    def __init__(self, passages: Sequence[Passage], heading_path: bool = False) -> None:
        """Index `passages` (at least one)."""
        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        self.models: Mapping[str, str] = {}
        self._index = Bm25([search_text(passage, heading_path) for passage in passages], words_of)

    def best(self, query: str, k: int) -> tuple[Passage, ...]:
        """Return the `k` best passages for `query`, the best first; all if the index holds fewer."""
        return tuple(self.passages[index] for index in self.rank([query], k)[0])

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the passages."""
        return [best_of(self._index.scores(query), k) for query in queries]


class LexicalRetriever:
    """A weighted sum of four BM25 scores: of words, of pairs of words in a row, of 4-letter pieces, in the best sentence too.

    Pieces find other forms of a word, pairs find names and phrases, and the best sentence finds words that are close together.
    No model is needed, and no list of endings or stop words of a language.
    """

    def __init__(self, passages: Sequence[Passage], heading_path: bool = False) -> None:
        """Index `passages` (at least one)."""
        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        self.models: Mapping[str, str] = {}
        texts = [search_text(passage, heading_path) for passage in passages]
        self._indices = {name: Bm25(texts, terms) for name, terms in _TERMS.items()}
        split = [sentences(text) or [text] for text in texts]
        self._first = np.cumsum([0, *map(len, split)])[:-1]
        self._sentences = Bm25([sentence for passage_sentences in split for sentence in passage_sentences], _ngrams)

    def scores(self, query: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return the scores of the passages, by the names of `LEXICAL_WEIGHTS`."""
        by_name = {name: index.scores(query) for name, index in self._indices.items()}
        return {**by_name, "sentence": np.maximum.reduceat(self._sentences.scores(query), self._first)}

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the indices of the `k` best passages; equal scores in the order of the passages."""
        return [
            best_of(np.sum([LEXICAL_WEIGHTS[name] * scores for name, scores in self.scores(query).items()], axis=0), k)
            for query in queries
        ]


def _pairs(text: str) -> list[str]:
    return [f"{first} {second}" for first, second in pairwise(words_of(text))]


def _ngrams(text: str) -> list[str]:
    """Return the runs of 4 characters of each word, its borders marked; shorter words whole."""
    marked = (f" {word} " for word in words_of(text))
    return [word[index : index + _NGRAM] for word in marked for index in range(max(1, len(word) - _NGRAM + 1))]


_TERMS = {"words": words_of, "pieces": _ngrams, "pairs": _pairs}


class DenseRetriever:
    """Passages by the dot product of normalised sentence embeddings (sentence-transformers)."""

    def __init__(self, passages: Sequence[Passage], section: RetrievalSection) -> None:
        """Embed `passages`, or read their vectors from the cache if the same weights embedded the same texts before.

        Raises `InputError` when the extra `rag` is not installed or the model cannot be loaded.
        """
        self.passages = tuple(passages)
        name = Path(section.embedder).name.lower()
        self._prefix, prefix = next((pair for word, pair in PREFIXES.items() if word in name), ("", ""))
        self._texts = [prefix + search_text(passage, section.heading_path) for passage in passages]
        key = "eval.retrieval.embedder (kinds bm25 and lexical need none)"
        self._model = load_sentence_model("embedder", section.embedder, key)
        weights = hash_model(section.embedder, commit_of(self._model[0]))
        self.models: Mapping[str, str] = {section.embedder: weights}
        self.path = Path(section.cache_dir) / f"{content_id('passages', weights, self._texts)}.npy"
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
        n_cut = count_longer(self._model.tokenizer, self._texts, longest) if longest else 0
        if not n_cut:
            return []
        count = (
            f"{n_cut:,} of {len(self._texts):,} passages are longer than the {longest} tokens that the embedder reads"
        )
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
        vectors = self._embed(self._texts)
        with atomic_file(self.path, "wb") as file:
            np.save(file, vectors, allow_pickle=False)
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


def load_sentence_model(kind: Literal["embedder", "reranker"], model: str, key: str) -> Any:
    """Return `model` (a folder or a name on the hub), loaded by sentence-transformers; weights as safetensors only.

    Raises `InputError` at the recipe's `key` when the extra `rag` is not installed or the model cannot be loaded.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise InputError(f"{key}: a {kind} needs {error.name}. Install it: pip install 'kinject[rag]'.") from error
    try:
        source = find_source(model, kind)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    refuse_code(Path(source), key)
    try:
        load = sentence_transformers.SentenceTransformer if kind == "embedder" else sentence_transformers.CrossEncoder
        return load(source, trust_remote_code=False, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else repr(error)
        raise InputError(f"{key}: {model!r} cannot be loaded: {first_line}") from error


def refuse_code(folder: Path, key: str) -> None:
    """Raise `InputError` at `key` if the folder of a model names modules of its own, or holds weights as pickles.

    Before its version 6, sentence-transformers runs such modules from a folder on disk even without
    `trust_remote_code`; it reads a layer's pytorch_model.bin if there is no model.safetensors.
    """
    if not folder.is_dir():
        return
    label = f"{key}: {folder}"
    try:
        path = folder / "modules.json"
        modules = parse_json(read_bytes(path)) if path.exists() else []
        kinds = [str(module["type"]) for module in modules]
    except (DiskError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{label}: modules.json cannot be read ({error}). Save the model again.") from error
    foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise InputError(
            f"{label} comes with Python code of its own ({foreign[0]}), and kinject runs no code that comes with a model. "
            "Use a model of sentence-transformers' own modules."
        )
    for path in sorted(folder.rglob("pytorch_model.bin")):
        if not (path.parent / "model.safetensors").is_file():
            raise InputError(
                f"{label}: {path.relative_to(folder)} is a pickle, which can run code as it loads: kinject reads "
                "safetensors only. Save the model again, as safetensors."
            )


def commit_of(module: Any) -> str | None:
    """Return the hub commit of the transformers model in `module`, None for a folder."""
    inner = getattr(module, "auto_model", None) or getattr(module, "model", None)
    commit = getattr(getattr(inner, "config", None), "_commit_hash", None)
    return str(commit) if commit else None


def count_longer(tokenizer: Any, texts: Sequence[str], longest: int) -> int:
    """Return how many of `texts` have more than `longest` tokens, special ones included."""
    ids = tokenizer(list(texts), add_special_tokens=True, truncation=False, verbose=False).input_ids
    return sum(len(tokens) > longest for tokens in ids)
