"""How long a run is: rows, steps, tokens and how often each document is read, counted from the corpus itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject.recipe import TrainRecipe
from kinject.train.config import trainer_field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Length:
    """What a run reads. `tokens` are read in all `steps` together, `learned` of them bear loss.

    Padding is not counted, and a token that is repeated where a document is cut counts once. `wordings` is (least, median,
    most) texts of a document that the whole run reads, `fill` the share of a row's places that hold a token.
    """

    n_rows: int
    steps: int
    epochs: float
    tokens: int
    learned: int
    documents: int
    wordings: tuple[float, float, float] | None
    fill: float
    shares: dict[str, float]


def measure(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, n_devices: int) -> Length:
    """Read, tokenise and lay out the corpus as training will (it is kept in corpus.cache_dir for it), and count.

    Raises `InputError` and `TrainingError` as training does for a corpus that it would refuse.
    """
    from kinject.train.data import summarise_exposures
    from kinject.train.prepare import prepare, read_corpora

    data = prepare(recipe, tokenizer, read_corpora(recipe)).data
    n_rows = len(data.rows)
    steps, epochs = steps_of(recipe, n_rows, n_devices)
    lengths = data.rows.lengths()
    seen: dict[str, Any] = summarise_exposures(data.exposures, epochs)
    rows = seen.get("rows")
    block = trainer_field(recipe, "max_length") if recipe.trainer.get("packing") else int(lengths.max())
    return Length(
        n_rows=n_rows, steps=steps, epochs=epochs, tokens=round((data.account.source - data.account.lost) * epochs),
        learned=round(data.account.trained * epochs), documents=seen["documents"],
        wordings=(rows["min"], rows["median"], rows["max"]) if rows else None,
        fill=float(lengths.mean()) / block, shares=dict(data.shares),
    )  # fmt: skip


def steps_of(recipe: TrainRecipe, n_rows: int, n_devices: int) -> tuple[int, float]:
    """Return (optimizer steps, epochs) of a run over `n_rows`, as transformers' Trainer counts them."""
    batch, accumulation = (
        trainer_field(recipe, "per_device_train_batch_size"),
        trainer_field(recipe, "gradient_accumulation_steps"),
    )
    n_batches = -(-n_rows // (batch * n_devices))
    if trainer_field(recipe, "dataloader_drop_last"):
        n_batches = n_rows // (batch * n_devices)
    an_epoch = max(-(-n_batches // accumulation), 1)
    most = trainer_field(recipe, "max_steps")
    if most > 0:
        return most, most / an_epoch
    epochs = float(trainer_field(recipe, "num_train_epochs"))
    return math.ceil(epochs * an_epoch), epochs
