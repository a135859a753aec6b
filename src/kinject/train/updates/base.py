"""What changes the updates of a run: the hooks of a rule, and what a rule is made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from torch import nn
from torch.optim import Optimizer

from kinject.corpus.packing import TrainingRow
from kinject.train.loss import Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState, TrainingArguments

    from kinject.recipe import TrainRecipe


class NormHistory(Protocol):
    """The guard of a run, as far as rules know it."""

    norms: deque[float]


class RunningTrainer(Protocol):
    """A trainer, as far as rules know it."""

    model: PreTrainedModel
    args: TrainingArguments
    state: TrainerState
    guard: NormHistory


@dataclass(frozen=True)
class UpdateInputs:
    """What rules are made from: the recipe, any of whose keys may be a rule's, and the model before
    a trainer wraps it.

    `load_base` makes a copy of a sharded model. `reinitialized` are the names of parameters with
    new weights, `kept` the rows on which a projection keeps the outputs.
    """

    recipe: TrainRecipe
    model: PreTrainedModel
    load_base: Callable[[], PreTrainedModel] | None = None
    reinitialized: Sequence[str] = ()
    kept: Sequence[TrainingRow] = field(default=())


class UpdateRule(Technique):
    """Changes the updates of a run; each kind is one file, and one line of
    `kinject.train.updates.UPDATE_RULES`.

    A rule of your own is a dataclass whose fields, made by `kinject.recipe.sections.option`, are
    its settings: a recipe sets them under techniques.custom.NAME. Of the hooks below a rule
    overrides those that it needs; they are called in the order of the table. Randomness must follow
    from the seed and the step, and state from the optimizer's: then `--resume` is exact.
    """

    copies: ClassVar[int] = 0
    """Copies of the trained weights that it keeps in float32, for the estimate of memory."""

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Self:
        """Return the rule with the recipe's settings."""
        return cls.configured(name, inputs.recipe)

    def start(self, trainer: RunningTrainer) -> None:
        """Measure what is needed; the model is wrapped, has its adapter, and has not been
        trained."""

    def change_optimizer(self, optimizer: Optimizer, trainer: RunningTrainer) -> Optimizer:
        """Return the optimizer to use in place of a new one, often itself."""
        return optimizer

    def change_gradient(self, model: nn.Module, step: int) -> None:
        """Change the accumulated gradients of a (0-based) update before they are clipped."""

    def before_update(self) -> None:
        """Read the weights before the optimizer's step."""

    def after_update(self) -> None:
        """Change the weights after the optimizer's step."""

    def note(self) -> str:
        """Return a line for the log, "" for none."""
        return ""
