"""Changes to the updates of a run: each is one file of this folder, and one line of
`UPDATE_RULES`."""

from __future__ import annotations

from kinject.train.updates.base import UpdateInputs, UpdateRule
from kinject.train.updates.freeze import FreezeWarmup
from kinject.train.updates.layerwise import LayerwiseRates
from kinject.train.updates.muon import Muon
from kinject.train.updates.projection import Projection
from kinject.train.updates.regularization import Regularizer
from kinject.train.updates.rounding import StochasticRounding
from kinject.train.updates.sam import SharpnessAware

__all__ = ["UPDATE_RULES", "UpdateInputs", "UpdateRule", "make_rules"]

# Muon makes a new optimizer, layerwise_lr_decay splits its groups, and stochastic_rounding puts
# copies into the lists of these, so it comes after both.
UPDATE_RULES: dict[str, type[UpdateRule]] = {
    "freeze_base_steps": FreezeWarmup,
    "regularization": Regularizer,
    "muon": Muon,
    "layerwise_lr_decay": LayerwiseRates,
    "stochastic_rounding": StochasticRounding,
    "sam": SharpnessAware,
    "projection": Projection,
}
"""Name -> kind, in the order in which they change an update. A name that is no key of a recipe is
one of techniques.custom."""


def make_rules(inputs: UpdateInputs) -> tuple[UpdateRule, ...]:
    """Return the rules that the recipe asks for, in order."""
    return tuple(
        kind.make(name, inputs)
        for name, kind in UPDATE_RULES.items()
        if kind.is_on(name, inputs.recipe)
    )
