"""Passages by meaning: sentence embeddings in FAISS, kept on disk by what was embedded; and ranks of two ways fused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kinject.disk import content_id
from kinject.errors import DiskError, InputError
from kinject.eval.scoring.answers import hash_model
from kinject.recipe.sections import RetrievalSection
from kinject.types import Passage

BGE_PREFIX = "Represent this sentence for searching relevant passages: "
"""What the BGE models' card asks to be put before a query (English, versions 1 and 1.5); nothing before passages."""

_WORD = re.compile(r"\w+")
_RRF = 60  # Cormack, Clarke and Buettcher, SIGIR 2009
_FUSED = 100  # passages of each way that are fused


class Ranks(Protocol):
    """A way to order passages for a query."""

    passages: tuple[Passage, ...]
    notes: tuple[str, ...]

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the places of the `k` best passages, the best first."""
        ...


class DenseRetriever:
    """Passages by the dot product of normalised sentence embeddings (sentence-transformers into a flat FAISS index)."""

    def __init__(self, passages: Sequence[Passage], embedder: str, prefix: str | None, cache_dir: Path) -> None:
        """Embed `passages`, or read them from `cache_dir` where the same texts went through the same weights.

        `prefix` is put before each query; None: BGE's own for models with "bge" and without "m3" in their name, else
        nothing. Raises `InputError` when the extra `rag` is not installed or the model cannot be loaded.
        """
        self.passages = tuple(passages)
        faiss, self._model = _load(embedder)
        name = Path(embedder).name.lower()
        bge = "bge" in name and "m3" not in name
        self._prefix = (BGE_PREFIX if bge else "") if prefix is None else prefix
        weights = hash_model(embedder, _commit(self._model))
        key = content_id("passages", weights, [passage.text for passage in passages])
        self.path = cache_dir / f"{key}.npy"
        vectors = self._read_or_embed()
        self._index: Any = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)
        self.notes = tuple(self._cut_notes())

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the places of the `k` best passages, the best first; queries are embedded together."""
        if not queries:
            return []
        vectors = self._embed([self._prefix + query for query in queries])
        _, places = self._index.search(vectors, min(k, len(self.passages)))
        found: list[list[int]] = places.tolist()
        return found

    def _cut_notes(self) -> list[str]:
        """Return a note where the embedder does not read passages to their end."""
        longest = self._model.max_seq_length
        if not longest:
            return []
        texts = [passage.text for passage in self.passages]
        ids = self._model.tokenizer(texts, add_special_tokens=True, truncation=False, verbose=False).input_ids
        n_cut = sum(len(tokens) > longest for tokens in ids)
        if not n_cut:
            return []
        what = f"{n_cut:,} of {len(texts):,} passages are longer than the {longest} tokens that the embedder reads"
        return [f"{what}; what comes after is not searched. Lower eval.retrieval.passage_tokens"]

    def _read_or_embed(self) -> npt.NDArray[np.float32]:
        if self.path.exists():
            try:
                stored: npt.NDArray[np.float32] = np.load(self.path, allow_pickle=False)
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

    def _embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        vectors = self._model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)


class FusedRetriever:
    """Two ways in one order, by reciprocal rank fusion: 1 / (60 + rank), summed."""

    def __init__(self, first: Ranks, second: Ranks) -> None:
        """Take two ways over the same passages."""
        self.passages = first.passages
        self.notes = (*first.notes, *second.notes)
        self._ways = (first, second)

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the places of the `k` best passages; equal sums in the order of the passages."""
        depth = max(k, _FUSED)
        ranked = zip(*(way.rank(queries, depth) for way in self._ways), strict=True)
        return [fuse(rankings)[:k] for rankings in ranked]


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return the items of `rankings` by reciprocal rank fusion, the best first; equal sums by the smaller item."""
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            sums[item] = sums.get(item, 0.0) + 1 / (_RRF + rank)
    return sorted(sums, key=lambda item: (-sums[item], item))


def _load(embedder: str) -> tuple[Any, Any]:
    try:
        import faiss
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise InputError(
            f"eval.retrieval.kind: dense retrieval needs {error.name}. Install it: pip install 'kinject[rag]'."
        ) from error
    _refuse_code(Path(embedder))
    try:
        model = SentenceTransformer(embedder, trust_remote_code=False, model_kwargs={"use_safetensors": True})
        return faiss, model
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else repr(error)
        raise InputError(f"eval.retrieval.embedder: {embedder!r} cannot be loaded: {first_line}") from error


def _refuse_code(folder: Path) -> None:
    """Raise `InputError` where the folder of an embedder names modules of its own, or holds weights as pickles.

    Before its version 6, sentence-transformers runs them for a folder on disk whatever `trust_remote_code` says; a layer's
    pytorch_model.bin it reads where there is no model.safetensors.
    """
    if not folder.is_dir():
        return
    where = f"eval.retrieval.embedder: {folder}"
    try:
        listed = folder / "modules.json"
        modules = json.loads(listed.read_bytes()) if listed.exists() else []
        kinds = [str(module["type"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where}: modules.json cannot be read ({error}). Save the embedder anew.") from error
    foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise InputError(
            f"{where} comes with Python code of its own ({foreign[0]}), and kinject runs no code that comes with a model. "
            "Use an embedder of sentence-transformers' own modules."
        )
    for path in sorted(folder.rglob("pytorch_model.bin")):
        if not (path.parent / "model.safetensors").is_file():
            raise InputError(
                f"{where}: {path.relative_to(folder)} is a pickle, which can run code as it loads: kinject reads safetensors "
                "only. Save the embedder anew, as safetensors."
            )


def _commit(model: Any) -> str | None:
    inner = getattr(model[0], "auto_model", None)
    commit = getattr(getattr(inner, "config", None), "_commit_hash", None)
    return str(commit) if commit else None


class Retriever:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75, through bm25s) over passages; words in lower case, none left out."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Index `passages` (at least one)."""
        import bm25s

        self.passages = tuple(passages)
        self.notes: tuple[str, ...] = ()
        self._vocabulary: set[str] = set()
        words = [_words(passage.text) for passage in passages]
        self._vocabulary.update(*words)
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def best(self, query: str, k: int) -> tuple[Passage, ...]:
        """Return the `k` best passages for `query`, the best first; fewer where the index holds fewer."""
        return tuple(self.passages[index] for index in self._ranked(query, k))

    def rank(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """Return for each query the places of the `k` best passages; equal scores in the order of the passages."""
        return [self._ranked(query, k) for query in queries]

    def _ranked(self, query: str, k: int) -> list[int]:
        import numpy as np

        known = [word for word in _words(query) if word in self._vocabulary]
        scores = self._index.get_scores(known) if known else np.zeros(len(self.passages))
        found: list[int] = np.argsort(-scores, kind="stable")[:k].tolist()
        return found


def make_retriever(section: RetrievalSection, passages: Sequence[Passage]) -> Ranks:
    """Return the way to find passages that `section` asks for. Raises `InputError` as `DenseRetriever` does."""
    if section.kind == "bm25":
        return Retriever(passages)
    dense = DenseRetriever(passages, section.embedder, section.query_prefix, Path(section.cache_dir))
    return dense if section.kind == "dense" else FusedRetriever(Retriever(passages), dense)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
