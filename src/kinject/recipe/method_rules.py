"""What a recipe of each training method may say: `RULES`.

The work itself is in `kinject.train.methods`, a file for each name. These rules stand apart from
it because a recipe is read and checked where torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from kinject.errors import Problem
from kinject.recipe.launch import Launch
from kinject.recipe.library_fields import RECALL_FIELDS
from kinject.recipe.read import MethodName, TrainRecipe
from kinject.recipe.sections import DistillationSection

_SFT_ONLY = (
    "packing",
    "assistant_only_loss",
    "completion_only_loss",
    "activation_offloading",
    "use_liger_kernel",
)
"""Fields of SFTConfig alone, and one that TRL's GRPO reads otherwise."""


class MethodRules:
    """The rules of a recipe without a method, and of a method that adds none of its own."""

    has_teacher = False
    """Whether it learns the predictions of another model, or of its own with a context."""

    def reads_base(self, recipe: TrainRecipe) -> bool:
        """Return whether the loss compares with the base, which an adapter's base must then be."""
        return False

    def problems(self, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """Yield what the method excludes."""
        for name in RECALL_FIELDS:
            if name in recipe.trainer:
                message = "is GRPOConfig's. Set method: recall, or remove the line."
                yield Problem(f"trainer.{name}", message)


class ContinuedPretrainingRules(MethodRules):
    """The rules of `method: cpt`."""

    def problems(self, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """Yield what texts without a question exclude."""
        if recipe.corpus.answers == "own":
            message = "rows of cpt are texts, which ask nothing. Remove method, or the line."
            yield Problem("corpus.answers", message)
        yield from super().problems(recipe, launch)


class DistillationRules(MethodRules):
    """The rules of `method: distill`."""

    has_teacher = True

    def reads_base(self, recipe: TrainRecipe) -> bool:
        """Return whether the base itself is the teacher."""
        return recipe.distillation is None or recipe.distillation.teacher is None

    def problems(self, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """Yield where there is no teacher, or none that reads a whole row."""
        if recipe.model.new is not None:
            message = "distill: a new model has nothing to teach. Give model.path."
            yield Problem("method", message)
        if launch.is_sharded:
            message = "distill: the teacher's pass needs whole weights on one process."
            yield Problem("method", f"{message} Use DDP or ZeRO-2.")
        yield from super().problems(recipe, launch)


class RecallRules(MethodRules):
    """The rules of `method: recall`, whose answers are drawn, not read."""

    def reads_base(self, recipe: TrainRecipe) -> bool:
        """Return whether GRPO's distance from the base is a part of the loss."""
        return bool(recipe.trainer.get("beta"))

    def problems(self, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """Yield what it does not read, and where it cannot run. GRPO's own fields may stand."""
        for key in _of_given_answers(recipe):
            message = "belongs to answers that are given; those of method: recall are drawn."
            yield Problem(key, f"{message} Remove it.")
        if recipe.model.new is not None or launch.is_sharded:
            message = "recall: answers are drawn from a trained model, whole on each process."
            yield Problem("method", f"{message} Give model.path; use DDP or ZeRO-2.")


def _of_given_answers(recipe: TrainRecipe) -> Iterator[str]:
    """Yield the keys of what only answers that are given read."""
    for name in ("replay", "mix", "validation_corpus", "validation_fraction"):
        if getattr(recipe.corpus, name):
            yield f"corpus.{name}"
    for name in (*_SFT_ONLY, "loss_type", "label_smoothing_factor"):
        if recipe.trainer.get(name):
            yield f"trainer.{name}"
    if recipe.corpus.answers != "given":
        yield "corpus.answers"
    if recipe.probes is not None:
        yield "probes"
    yield from recipe.techniques_on("hard_example_mining", "row_weights", "sam")
    yield from recipe.terms_on("kl")


RULES: dict[MethodName | None, MethodRules] = {
    None: MethodRules(),
    "cpt": ContinuedPretrainingRules(),
    "sft": MethodRules(),
    "distill": DistillationRules(),
    "recall": RecallRules(),
}
"""Name -> what a recipe of that method may say."""


def rules_of(recipe: TrainRecipe) -> MethodRules:
    """Return the rules of a recipe's method."""
    return RULES[recipe.method]


def distillation_of(recipe: TrainRecipe) -> DistillationSection | None:
    """Return the settings of a method that has a teacher; None for another."""
    if not rules_of(recipe).has_teacher:
        return None
    return recipe.distillation or DistillationSection()
