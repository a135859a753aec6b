"""The recipe's `techniques:` section: what changes an update beside SFTConfig's own fields, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinject.recipe.sections import option


@dataclass(frozen=True)
class HardExampleMiningSection:
    """Only the share with the highest loss is learned from; chosen anew in each batch of each device."""

    fraction: float = option(help="Fraction that is kept, rounded up to whole ones.", min=0.001, max=1.0)
    unit: Literal["tokens", "rows"] = option(
        "tokens", help="tokens, or rows: texts (pieces of them, where packing splits them) by their mean loss."
    )


@dataclass(frozen=True)
class RowWeightsSection:
    """How much each row of the corpus counts, by one of its columns. Rows of replay and mix count 1."""

    column: str = option(
        help="Key of the corpus row, as in weight, or meta.date for one inside another.", nonempty=True
    )
    half_life: float | None = option(
        None, help="The column holds dates; a row counts half as much for every so many days before the newest.",
        min=0.001,
    )  # fmt: skip
    missing: float | None = option(None, help="What a row without the column counts; default: it is a fault.", min=0.0)


@dataclass(frozen=True)
class TechniquesSection:
    """What changes an update beside SFTConfig's own fields; docs/techniques.md says when each helps."""

    freeze_base_steps: int | None = option(
        None, help="Updates for which only freeze_base_except trains; then everything does.", min=1
    )
    freeze_base_except: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of parameter names that train while the base is frozen; default: re-initialised layers.",
    )
    reinitialize_last_layers: int = option(0, help="Last layers whose weights are drawn anew before training.", min=0)
    sam: float = option(
        0.0, help="Sharpness-aware minimisation: how far (rho) the gradient is taken uphill; twice the time.", min=0.0
    )
    hard_example_mining: HardExampleMiningSection | None = option(
        None, help="Learn only from the share with the highest loss."
    )
    layerwise_lr_decay: float = option(
        1.0, help="Learning rate of a layer over that of the layer above it; embeddings are lowest.", min=0.0, max=1.0
    )
    row_weights: RowWeightsSection | None = option(None, help="Weigh corpus rows by a column or by their age.")
    patience: int | None = option(
        None, help="Stop after so many evaluations without a better trainer.metric_for_best_model (default: loss).",
        min=1,
    )  # fmt: skip
    histogram_steps: int | None = option(
        None, help="Every so many updates, weights and gradients go to the tracker (tensorboard, wandb).", min=1
    )
