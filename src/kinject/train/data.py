"""The recipe's corpus to a dataset of training rows, and rows to padded batches."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinject.corpus import (
    IGNORED,
    CorpusFile,
    CorpusRow,
    Joined,
    LaidRows,
    Layout,
    TokenAccount,
    Tokenization,
    TokenRow,
    draw,
    entry_key,
    lay_out,
    stored,
    tokenize_rows,
    wanted_tokens,
)
from kinject.errors import TrainingError
from kinject.recipe.sections import Reaction

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

_MOST_ROWS = 1.25  # rows over the least that hold as many tokens, before a run says that they are not full

REPLAY = "replay"
"""The name of the part that is replay, and the origin of its rows."""


@dataclass(frozen=True)
class Part:
    """A corpus mixed in: `fraction` is its share of all tokens."""

    rows: Sequence[CorpusRow]
    fraction: float


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, the account of their tokens, and the share of tokens that each part mixed in has.

    `exposures` is, for each document that is not replay, (its corpus rows, its tokens) in one epoch.
    """

    rows: LaidRows
    account: TokenAccount
    shares: dict[str, float]
    exposures: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Preparation:
    """How corpora become training rows. With `cache`, tokens are kept in that folder by content and mapped from there."""

    tokenizer: PreTrainedTokenizerBase
    how: Tokenization
    layout: Layout
    seed: int
    cache: Path | None = None

    def apply(self, rows: Sequence[CorpusRow], parts: Mapping[str, Part] | None = None) -> TrainingData:
        """Return the training rows of a corpus with `parts` (by name) mixed in; the part ``replay`` is marked as such."""
        fresh = self._keep(rows, "", lambda: tokenize_rows(rows, self.tokenizer, self.how))
        n_fresh = sum(len(row.input_ids) for row in fresh)
        given = parts or {}
        fractions = [part.fraction for part in given.values()]
        drawn: dict[str, Sequence[TokenRow]] = {}
        for place, (name, part) in enumerate(given.items()):
            wanted = wanted_tokens(n_fresh, part.fraction, fractions)
            drawn[name] = self._draw(part.rows, REPLAY if name == REPLAY else "", wanted, self.seed + place)
        mixed = Joined([fresh, *drawn.values()])
        laid, account = lay_out(mixed, self.layout, self.seed)
        sizes = {name: sum(len(row.input_ids) for row in held) for name, held in drawn.items()}
        learned = Joined([fresh, *(held for name, held in drawn.items() if name != REPLAY)])
        shares = {name: size / account.source for name, size in sizes.items()}
        return TrainingData(laid, account, shares, _exposures(learned))

    def _draw(self, rows: Sequence[CorpusRow], origin: str, wanted: float, seed: int) -> Sequence[TokenRow]:
        def make() -> Iterator[TokenRow]:
            return draw(rows, lambda some: tokenize_rows(some, self.tokenizer, self.how), wanted, seed)

        return self._keep(rows, origin, make, round(wanted, 6), seed)

    def _keep(
        self, rows: Sequence[CorpusRow], origin: str, make: Callable[[], Iterable[TokenRow]], *more: object
    ) -> Sequence[TokenRow]:
        if self.cache is None or not isinstance(rows, CorpusFile):
            return list(make())
        return stored(self.cache, entry_key(rows.path, self.tokenizer, self.how, *more), make, origin)


def _exposures(rows: Iterable[TokenRow]) -> dict[str, tuple[int, int]]:
    n_rows: Counter[str] = Counter()
    n_tokens: Counter[str] = Counter()
    for index, row in enumerate(rows):
        name = row.document_id or f"row {index}"
        n_rows[name] += 1
        n_tokens[name] += int(np.count_nonzero(np.asarray(row.learned)))
    return {name: (n_rows[name], n_tokens[name]) for name in n_rows}


def summarise_exposures(exposures: dict[str, tuple[int, int]], epochs: float) -> dict[str, Any]:
    """Return how often a run of `epochs` shows each document: least, median and most wordings and tokens."""
    if not exposures:
        return {"documents": 0}
    seen = {"rows": [n for n, _ in exposures.values()], "tokens": [n for _, n in exposures.values()]}
    return {
        "documents": len(exposures),
        **{
            name: {
                "min": round(min(counts) * epochs, 2),
                "median": round(statistics.median(counts) * epochs, 2),
                "max": round(max(counts) * epochs, 2),
            }
            for name, counts in seen.items()
        },
    }


def exposures_by_document(exposures: dict[str, tuple[int, int]], epochs: float) -> dict[str, float]:
    """Return how many wordings of each document a run of `epochs` reads, repeats counted."""
    return {name: round(n_rows * epochs, 3) for name, (n_rows, _) in exposures.items()}


def check_account(account: TokenAccount, block: int | None, allow_dropped_tokens: bool) -> str:
    """Return the account as a line to print. Raises `TrainingError` when text would be lost and the recipe forbids it."""
    line = (
        f"tokens: {account.source:,} in the corpus, {account.trained:,} bear loss, {account.masked:,} are read only, "
        f"{account.truncated:,} truncated, {account.dropped:,} dropped"
    )
    if account.lost and not allow_dropped_tokens:
        raise TrainingError(
            f"{account.lost:,} of {account.source:,} tokens ({account.lost / account.source:.1%}) would be lost at "
            f"trainer.max_length: {block} ({account.truncated:,} truncated, {account.dropped:,} in rows with nothing left "
            "to learn). Raise trainer.max_length, pack with trainer.packing: true and packing_strategy: bfd_split, or "
            "accept it with corpus.allow_dropped_tokens: true."
        )
    if account.trained == 0:
        raise TrainingError(f"{line}. Nothing is left to learn. Raise trainer.max_length.")
    return line


def note_fill(rows: LaidRows, layout: Layout) -> list[str]:
    """Return what to say where spreading a document's texts leaves packed rows emptier than packing alone would."""
    if layout.strategy not in ("bfd", "bfd_split") or not layout.spread or layout.block is None:
        return []
    n_tokens = int(rows.lengths().sum())
    least = -(-n_tokens // layout.block)
    if len(rows) <= _MOST_ROWS * least:
        return []
    return [
        f"corpus.separate_paraphrases: some documents have more texts than the corpus has room to keep apart, so rows are only "
        f"{n_tokens / (len(rows) * layout.block):.0%} full ({len(rows):,} rows where {least:,} would do). They still never "
        "share a row. A smaller trainer.max_length, more documents, or separate_paraphrases: false fills them."
    ]


@dataclass(frozen=True)
class RowDataset:
    """Training rows as a trainer wants them: each joined when a batch asks for it.

    A row is a dict with input_ids, labels, position_ids, length and, if asked, replayed. With `weights` (of the corpus
    rows, in order) it has the weight of each token; what is mixed in weighs 1.
    """

    rows: LaidRows
    with_replay: bool = False
    weights: npt.NDArray[np.float32] | None = None
    column_names: tuple[str, ...] = field(default=("input_ids", "labels", "position_ids", "length"), init=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        found: dict[str, Any] = {
            "input_ids": row.input_ids, "labels": row.labels, "position_ids": row.position_ids,
            "length": len(row.input_ids),
        }  # fmt: skip
        if self.with_replay:
            found["replayed"] = row.replayed
        if self.weights is not None:
            found["weights"] = [
                float(self.weights[number]) if number < len(self.weights) else 1.0
                for number, start, end in self.rows.pieces(index)
                for _ in range(start, end)
            ]
        return found


@dataclass(frozen=True)
class Collator:
    """Rows to tensors [batch, longest row]: padded on the right with positions that go on counting.

    No attention mask is made: what follows a row cannot reach back into it. `flatten` joins the batch into one row
    [1, tokens], the form in which flash attention keeps documents apart by position. `masked_batch` says what follows
    when no token of a batch bears loss.
    """

    pad_token_id: int
    flatten: bool = False
    pad_to_multiple_of: int | None = None
    masked_batch: Reaction = "stop"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, labels, position_ids and, where rows have them, replayed and weights.

        Raises `TrainingError` when no token of the batch bears loss and `masked_batch` is stop.
        """
        import torch

        if not any(label != IGNORED for row in rows for label in row["labels"]):
            what = "a batch has no token to learn (all labels masked). Check the corpus rows."
            if self.masked_batch == "stop":
                raise TrainingError(what)
            if self.masked_batch == "warn":
                log.warning(what)
        filling = {"input_ids": self.pad_token_id, "labels": IGNORED, "replayed": False, "weights": 0.0}
        kinds = ("input_ids", "labels", "position_ids", "replayed", "weights")
        columns = [key for key in kinds if key in rows[0]]
        if self.flatten:
            return {key: torch.tensor([[value for row in rows for value in row[key]]]) for key in columns}
        width = max(len(row["input_ids"]) for row in rows)
        if self.pad_to_multiple_of:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch: dict[str, list[list[Any]]] = {key: [] for key in columns}
        for row in rows:
            n_pad = width - len(row["input_ids"])
            last = row["position_ids"][-1]
            for key in columns:
                more = range(last + 1, last + 1 + n_pad) if key == "position_ids" else [filling[key]] * n_pad
                batch[key].append([*row[key], *more])
        return {key: torch.tensor(value) for key, value in batch.items()}
