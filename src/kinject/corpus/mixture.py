"""Several corpora in one epoch by share of tokens: instruction rows, replay of what the base was trained on.

Replay: the stronger the shift, the more of it (arXiv 2403.08763). Instruction rows among documents: arXiv 2402.12847.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, overload

from kinject.corpus.tokens import TokenRow
from kinject.errors import InputError

Row = TypeVar("Row")
_CHUNK = 256


def wanted_tokens(n_tokens: int, fraction: float, fractions: Sequence[float]) -> float:
    """Return how many tokens a part of share `fraction` holds beside `n_tokens` of the main corpus.

    `fractions` are the shares of all parts together, this one included; the main corpus has the rest.
    """
    return fraction / (1 - sum(fractions)) * n_tokens


def draw(
    rows: Sequence[Row], tokenize: Callable[[Sequence[Row]], Iterable[TokenRow]], wanted: float, seed: int
) -> Iterator[TokenRow]:
    """Yield tokenised rows drawn without replacement until they hold `wanted` tokens, to within half a row.

    Only what is drawn is tokenised, so the corpus may be large. One that is too small is gone through again, in another
    order. Raises `InputError` when something is wanted of a corpus without rows.
    """
    if wanted <= 0:
        return
    if not rows:
        raise InputError("corpus: a part of the mixture has no rows to draw.")
    n_tokens = 0
    for row in _drawn(rows, tokenize, random.Random(seed)):
        if n_tokens + len(row.input_ids) / 2 >= wanted:
            return
        yield row
        n_tokens += len(row.input_ids)


def _drawn(
    rows: Sequence[Row], tokenize: Callable[[Sequence[Row]], Iterable[TokenRow]], rng: random.Random
) -> Iterator[TokenRow]:
    """Yield `rows` tokenised, in a random order, again and again."""
    order = array("q", range(len(rows)))
    while True:
        rng.shuffle(order)
        for start in range(0, len(order), _CHUNK):
            indices = order[start : start + _CHUNK]
            pick = getattr(rows, "pick", None)
            yield from tokenize([rows[index] for index in indices] if pick is None else pick(indices))


class Joined(Sequence[TokenRow]):
    """Several sequences of token rows as one, none of them copied."""

    def __init__(self, parts: Sequence[Sequence[TokenRow]]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._starts = [sum(len(part) for part in self.parts[:n]) for n in range(len(self.parts))]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        """Return one row, or some."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        part = bisect_right(self._starts, at) - 1
        return self.parts[part][at - self._starts[part]]
