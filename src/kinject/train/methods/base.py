"""The shape of a training method: what `method` of a recipe changes in rows, settings and trainer.

The rest of the program asks a method, never for its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kinject.corpus.rows import Shape
from kinject.recipe import GuardsSection, TrainRecipe
from kinject.train.batches import Collator
from kinject.train.data import Corpora, Practice, TokenizedCorpora
from kinject.train.objectives.distillation import Teacher
from kinject.train.parts import TrainingParts
from kinject.train.trainer import KnowledgeTrainer, RunTrainer

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl import SFTConfig


@dataclass(frozen=True)
class MethodInputs:
    """What a method prepares its part of a run from: the recipe, its rows, and the model before it
    is trained. `hashes` are those of `kinject.train.run.hash_inputs`."""

    recipe: TrainRecipe
    config: SFTConfig
    corpora: Corpora
    tokenized: TokenizedCorpora
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    hashes: Mapping[str, str]
    cost: Counter[str]
    """Tokens and seconds of what is made before training; a method adds its own."""


@dataclass(frozen=True)
class MethodParts:
    """A method's part of a run: the rows to train on and how many an epoch has, the guards, notes
    for the log, a teacher, questions to practise."""

    tokenized: TokenizedCorpora
    n_rows: int
    guards: GuardsSection
    notes: list[str] = field(default_factory=list)
    make_teacher: Callable[[PreTrainedModel], Teacher] | None = None
    practice: Sequence[Practice] = ()


@dataclass(frozen=True)
class TrainerOptions:
    """What every trainer is made from, beside its parts. `adapter` is peft's config."""

    model: PreTrainedModel
    config: SFTConfig
    tokenizer: PreTrainedTokenizerBase
    adapter: PeftConfig | None
    run_dir: Path
    callbacks: list[TrainerCallback]
    collator: Collator

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that trainers of every method take; not all of them take the collator."""
        return {
            "model": self.model,
            "args": self.config,
            "processing_class": self.tokenizer,
            "peft_config": self.adapter,
            "run_dir": self.run_dir,
            "callbacks": self.callbacks,
        }


class Method:
    """A way to train: each kind is one file of this folder, and one line of `METHODS`.

    As it stands it learns rows of every shape by the next token, as a recipe without `method`
    does. A kind overrides what it changes.
    """

    name: ClassVar[str | None] = None
    refused_shapes: ClassVar[tuple[Shape, ...]] = ()
    """Shapes of rows that it does not learn."""
    no_rate_test: ClassVar[str] = ""
    """Why its loss shows no learning rate; "" if it does."""
    no_timing: ClassVar[str] = ""
    """Why the time of its steps cannot be estimated by a few of them; "" if it can."""

    def make_config(self, values: Mapping[str, Any]) -> SFTConfig:
        """Return TRL's config of `values`. Raises what TRL raises for values that it refuses."""
        from trl import SFTConfig

        return SFTConfig(**values)

    def trainer_with_defaults(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trainer section with the defaults that are not SFTConfig's."""
        return dict(trainer)

    def warnings_on_rows(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return warnings on the rows that it learns with this tokenizer."""
        return []

    def prepare(self, inputs: MethodInputs) -> MethodParts:
        """Return its part of a run. What it makes with the model is made here, before training."""
        tokenized = inputs.tokenized
        return MethodParts(tokenized, len(tokenized.train.rows), inputs.recipe.guards)

    def make_trainer(self, parts: TrainingParts, options: TrainerOptions) -> RunTrainer:
        """Return the trainer of a run."""
        return KnowledgeTrainer(parts, data_collator=options.collator, **options.arguments)

    def for_timing(self, recipe: TrainRecipe) -> TrainRecipe:
        """Return the recipe whose steps take as long, without what is made before the first one."""
        return recipe
