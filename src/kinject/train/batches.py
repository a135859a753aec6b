"""From training rows to batches: rows are made when they are read, in the order of an epoch, and
padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from kinject.corpus.packing import PackedRows
from kinject.corpus.tokenize import IGNORED
from kinject.models import is_runnable, without_flash
from kinject.recipe import TrainRecipe
from kinject.recipe.sections import Reaction
from kinject.train.guards import check_isolation, react
from kinject.train.objectives.distillation import NO_TEACHER, TeacherRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COLUMNS = ("input_ids", "labels", "position_ids", "replayed", "weights", "teacher")
_TRIED = 64
"""Tokens of each of two texts that are tried behind one another, where no row holds both."""
_PADDING: dict[str, float] = {
    "labels": IGNORED,
    "replayed": False,
    "weights": 0.0,
    "teacher": NO_TEACHER,
}


@dataclass(frozen=True)
class RowDataset:
    """Training rows for a trainer, each made when a batch needs it.

    A row is a dict with input_ids, labels, position_ids, length and replayed. With `weights` (of
    the corpus rows, in order) it has the weight of each token; rows mixed in weigh 1. With
    `teacher` it has the number of the teacher's prediction of each token; rows mixed in have none.
    """

    rows: PackedRows
    weights: npt.NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None
    column_names: tuple[str, ...] = field(
        default=("input_ids", "labels", "position_ids", "length", "replayed"), init=False
    )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        columns: dict[str, Any] = {
            "input_ids": row.input_ids,
            "labels": row.labels,
            "position_ids": row.position_ids,
            "length": len(row.input_ids),
            "replayed": row.replayed,
        }
        segments = self.rows.segments(index)
        if self.weights is not None:
            columns["weights"] = []
            for number, start, end in segments:
                # Behind the rows of the corpus are those that are mixed in.
                weight = float(self.weights[number]) if number < len(self.weights) else 1.0
                columns["weights"] += [weight] * (end - start)
        if self.teacher is not None:
            columns["teacher"] = []
            for number, start, end in segments:
                columns["teacher"] += self._predictions(self.teacher, number)[start:end]
        return columns

    def _predictions(self, teacher: TeacherRows, number: int) -> list[int]:
        """Return the number of the prediction of each token of one row of the source."""
        if number < len(teacher):
            predictions: list[int] = teacher.numbers(number).tolist()
            return predictions
        return [NO_TEACHER] * len(self.rows.source[number].input_ids)


def packed_row(recipe: TrainRecipe, dataset: RowDataset) -> dict[str, Any] | None:
    """Return the first row of several documents that must not see each other; None if there is
    none."""
    # Wrapped documents see each other by design (arXiv 2312.05934).
    if not recipe.trainer.get("packing") or recipe.trainer.get("packing_strategy") == "wrapped":
        return None
    return next((row for row in dataset if row["position_ids"].count(0) > 1), None)


def flattens(recipe: TrainRecipe, model: PreTrainedModel, dataset: RowDataset) -> bool:
    """Return whether the rows of a batch are joined into one, which flash attention parts at
    positions. Raises `TrainingError` if packed documents see each other."""
    # Without flash attention a joined row would attend over the whole batch: quadratic.
    has_flash = "flash" in str(model.config._attn_implementation)
    flatten = has_flash and bool(recipe.trainer.get("packing"))
    if not is_runnable(model):
        return flatten
    packed = packed_row(recipe, dataset)
    if packed is None and flatten and len(dataset) > 1:
        # Of rows with one text each it is the batch that holds several.
        first, second = dataset[0], dataset[1]
        packed = {}
        for name in ("input_ids", "position_ids"):
            packed[name] = [*first[name][:_TRIED], *second[name][:_TRIED]]
    if packed is not None:
        # Also where flash attention parts them: the convolutions and states of hybrid models
        # (Qwen3-Next, LFM2, Granite 4) carry one document into the next, whatever the attention.
        with without_flash(model):
            check_isolation(model, packed)
    return flatten


@dataclass(frozen=True)
class FilledRows:
    """The `rows` of an epoch or an evaluation, and behind them fillers up to a number that
    `multiple` divides.

    A filler is the first row with nothing to learn: it has no part in a loss.
    """

    rows: RowDataset
    multiple: int

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.rows[index]
        filler = dict(self.rows[0])
        filler["labels"] = [IGNORED] * len(filler["labels"])
        filler["replayed"] = [False] * len(filler["replayed"])
        filler["filler"] = True
        return filler


class EpochSampler(Sampler[int]):
    """Row numbers of one epoch, in an order that follows from the seed and the epoch alone: a run
    that resumes inside of an epoch reads what is left of it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """Return what draws the order."""
        # Multiplied, so that an epoch does not have the order of a later one of the seed before.
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)


class FilledSampler(Sampler[int]):
    """The row numbers that `sampler` draws, and behind them those of the fillers of `rows`."""

    def __init__(self, rows: FilledRows, sampler: Sampler[int], data_seed: int | None) -> None:
        # accelerate makes this of a random sampler that it finds, and finds none inside of another
        if isinstance(sampler, RandomSampler):
            sampler = SeedableRandomSampler(rows.rows, data_seed=data_seed)
        self.rows, self.sampler = rows, sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, if it decides the order of the rows."""
        if isinstance(self.sampler, EpochSampler | SeedableRandomSampler):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from range(len(self.rows.rows), len(self.rows))


class LengthSampler(EpochSampler):
    """Rows of similar length together, as transformers has them, which draws their order from the
    state of the process: the second epoch of a resumed run had another one."""

    def __init__(self, n_rows: int, lengths: Sequence[int], seed: int) -> None:
        super().__init__(seed)
        self.n_rows, self.lengths = n_rows, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        indices: list[int] = get_length_grouped_indices(
            self.lengths, self.n_rows, generator=self.generator()
        )
        return iter(indices)


class RoundSampler(EpochSampler):
    """The rounds in a random order, the rows of each in a random order, both by epoch."""

    def __init__(self, rounds: Sequence[int], seed: int) -> None:
        super().__init__(seed)
        # Ranges, as there may be millions of rows: those of a round are together.
        starts = (np.flatnonzero(np.diff(np.asarray(rounds, np.int64))) + 1).tolist()
        self.rounds = list(map(range, [0, *starts], [*starts, len(rounds)]))

    def __len__(self) -> int:
        return sum(map(len, self.rounds))

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        for number in torch.randperm(len(self.rounds), generator=generator).tolist():
            rows = self.rounds[number]
            for index in torch.randperm(len(rows), generator=generator).numpy():
                yield rows[index]


@dataclass(frozen=True)
class Collator:
    """Rows to tensors [batch, longest row]: padded on the right, with positions that continue into
    the padding, from 0 again at `n_positions` (None: any number).

    No attention mask is needed: padding follows a row, and earlier tokens cannot attend to it. With
    `masks_padding` there is one, for the routers of a mixture of experts: their loss is a mean over
    tokens. `flatten` joins the batch into one row [1, tokens], in which flash attention separates
    documents by position. `nothing_learned` is the reaction to a batch without a token in the loss.
    """

    pad_token_id: int
    flatten: bool = False
    pad_to_multiple_of: int = 1
    nothing_learned: Reaction = "stop"
    n_positions: int | None = None
    masks_padding: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, labels, position_ids, replayed and, if rows have them, weights and
        teacher.

        Raises `TrainingError` if no token of the batch is in the loss and `nothing_learned` is
        stop.
        """
        self._check_learned(rows)
        columns = [name for name in _COLUMNS if name in rows[0]]
        if self.flatten:
            joined = {
                name: list(chain.from_iterable(row[name] for row in rows)) for name in columns
            }
            return {name: torch.tensor([values]) for name, values in joined.items()}
        multiple = self.pad_to_multiple_of
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // multiple) * multiple
        batch = {}
        for name in columns:
            padded = [[*row[name], *self._padding(name, row, width)] for row in rows]
            batch[name] = torch.tensor(padded)
        if self.masks_padding:
            lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
            batch["attention_mask"] = (torch.arange(width) < lengths).long()
        return batch

    def _padding(self, name: str, row: Mapping[str, Any], width: int) -> Sequence[float]:
        """Return what fills up a column of a row to `width` tokens."""
        n_pad = width - len(row["input_ids"])
        if name == "input_ids":
            return [self.pad_token_id] * n_pad
        if name == "position_ids":
            # A position 0 begins another document: a row of one needs no mask without it.
            following = row["position_ids"][-1] + 1
            positions = range(following, following + n_pad)
            if self.n_positions is None:
                return positions
            # A packed row may be longer than the model's window (`check_positions`).
            return [position % self.n_positions for position in positions]
        return [_PADDING[name]] * n_pad

    def _check_learned(self, rows: Sequence[dict[str, Any]]) -> None:
        """React if no token of a batch is in the loss, unless it is made of fillers."""
        if all(row.get("filler") for row in rows):
            return
        labels = chain.from_iterable(row["labels"] for row in rows)
        if all(label == IGNORED for label in labels):
            react(
                self.nothing_learned,
                "a batch has no token to learn (all labels masked). Check the corpus rows.",
            )
