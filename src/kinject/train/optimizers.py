"""The shape of what changes the updates of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from kinject.corpus.packing import TrainingRow
from kinject.recipe.check import Conflict

if TYPE_CHECKING:
    from trl import SFTConfig

    from kinject.recipe import TrainRecipe


def optim_name(config: SFTConfig) -> str:
    """Return trainer.optim as its name."""
    return str(getattr(config.optim, "value", config.optim))


def leave_warmup_to_schedule(optimizer: Any) -> None:
    """Take the warm-up of a new schedule-free optimizer away: transformers gives the same warm-up to the schedule."""
    if {"train_mode", "warmup_steps"} <= getattr(optimizer, "defaults", {}).keys():  # DeepSpeed's placeholder has none
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0


@dataclass(frozen=True)
class UpdateInputs:
    """What rules are made from: the recipe, and the model before a trainer wraps it.

    `load_base` makes a copy of a sharded model. `reinitialized` are the names of parameters with new weights, `kept` the rows
    on which a projection keeps the outputs.
    """

    recipe: TrainRecipe
    model: Any
    load_base: Callable[[], Any] | None = None
    reinitialized: Sequence[str] = ()
    kept: Sequence[TrainingRow] = field(default=())


class UpdateRule:
    """Changes the updates of a run; each kind is one file, and one line of `kinject.train.updates.UPDATE_RULES`.

    A rule of your own is a dataclass whose fields, made by `kinject.recipe.sections.option`, are its settings: a recipe sets
    them under techniques.custom.NAME. Of the hooks below a rule overrides those that it needs; they are called in the order
    of the table. Randomness must follow from the seed and the step, and state from the optimizer's: then `--resume` is exact.
    """

    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """Rows for the table of conflicts: the keys that it excludes or needs."""
    copies: ClassVar[int] = 0
    """Copies of the trained weights that it keeps in float32, for the estimate of memory."""

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe asks for the rule that the table calls `name`: by a key of techniques, or of custom."""
        return name in recipe.techniques.custom or bool(getattr(recipe.techniques, name, None))

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Self:
        """Return the rule with the recipe's settings."""
        techniques, made = inputs.recipe.techniques, cast("Any", cls)
        rule: Self = made(**techniques.custom[name]) if name in techniques.custom else made(getattr(techniques, name))
        return rule

    def start(self, trainer: Any) -> None:
        """Measure what is needed; the model is wrapped, has its adapter, and has not been trained."""

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer to use in place of a new one, often itself."""
        return optimizer

    def change_gradient(self, model: Any, step: int) -> None:
        """Change the accumulated gradients of a (0-based) update before they are clipped."""

    def before_update(self) -> None:
        """Read the weights before the optimizer's step."""

    def after_update(self) -> None:
        """Change the weights after the optimizer's step."""

    def note(self) -> str:
        """Return a line for the log, "" for none."""
        return ""
