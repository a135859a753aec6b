"""Passages in front of a question, the same for training rows and for evaluation: found by BM25, rendered, quoted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BEGIN_QUOTE, END_QUOTE = "##begin_quote##", "##end_quote##"
"""The marks around an answer's quotation, as RAFT writes them (arXiv 2403.10131)."""
_WORD = re.compile(r"\w+")


def with_passages(passages: Iterable[str], prompt: str) -> str:
    """Return `prompt` behind its passages, each followed by a blank line."""
    return "".join(f"{passage}\n\n" for passage in passages) + prompt


def quoting_answer(quotation: str, answer: str) -> str:
    """Return an answer behind the words of a passage that show it."""
    return f"{BEGIN_QUOTE} {quotation} {END_QUOTE} {answer}"


def final_answer(text: str) -> str:
    """Return the text after the last quotation in `text`, all of it without one."""
    return text.rpartition(END_QUOTE)[2]


def words_of(text: str) -> list[str]:
    """Return the words of `text` in lower case."""
    return _WORD.findall(text.lower())


def best_of(scores: npt.NDArray[np.float64], k: int) -> list[int]:
    """Return the indices of the `k` highest scores, the best first; equal scores keep their order."""
    import numpy as np

    indices: list[int] = np.argsort(-scores, kind="stable")[:k].tolist()
    return indices


class Bm25:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75, through bm25s) over texts, each split into terms."""

    def __init__(self, texts: Sequence[str], terms: Callable[[str], list[str]] = words_of) -> None:
        import bm25s

        self._terms, self._n = terms, len(texts)
        split = [terms(text) for text in texts]
        self._vocabulary = set[str]().union(*split)
        self._index = bm25s.BM25() if self._vocabulary else None
        if self._index is not None:
            self._index.index(split, show_progress=False)

    def scores(self, query: str) -> npt.NDArray[np.float64]:
        """Return the score of each text."""
        import numpy as np

        known = [term for term in self._terms(query) if term in self._vocabulary]
        if self._index is None or not known:
            return np.zeros(self._n)
        return np.asarray(self._index.get_scores(known), dtype=np.float64)
