"""The recipe's `techniques:` section: what changes an update beside SFTConfig's own fields, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinject.recipe.sections import option


@dataclass(frozen=True)
class HoldBaseSection:
    """The base holds still for the first updates while only some parameters train; then everything does."""

    steps: int = option(help="Updates for which the base holds still.", min=1)
    train: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of parameter names that train from the first update on; default: re-initialised layers.",
    )


@dataclass(frozen=True)
class HardestSection:
    """Only the share with the highest loss is learned from; chosen anew in each batch of each device."""

    share: float = option(help="Share that is kept, rounded up to whole ones.", min=0.001, max=1.0)
    of: Literal["tokens", "rows"] = option(
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

    hold_base: HoldBaseSection | None = option(None, help="Train new parts first, then everything.")
    reinitialize_layers: int = option(0, help="Last layers whose weights are drawn anew before training.", min=0)
    sam: float = option(
        0.0, help="Sharpness-aware minimisation: how far (rho) the gradient is taken uphill; twice the time.", min=0.0
    )
    hardest: HardestSection | None = option(None, help="Learn only from the share with the highest loss.")
    row_weights: RowWeightsSection | None = option(None, help="Weigh corpus rows by a column or by their age.")
    patience: int | None = option(
        None, help="Stop after so many evaluations without a better trainer.metric_for_best_model (default: loss).",
        min=1,
    )  # fmt: skip
    histograms: int | None = option(
        None, help="Every so many updates, weights and gradients go to the tracker (tensorboard, wandb).", min=1
    )
