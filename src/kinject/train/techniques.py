"""The recipe's `techniques:` section: what cannot be together, what a trainer is given for it, and what to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinject.recipe import TrainRecipe
from kinject.train.fresh_layers import hold_base
from kinject.train.histograms import TRACKERS, Histograms
from kinject.train.objective import Objective
from kinject.train.probes import Stops, impatient
from kinject.train.schedule_free import schedule_free_faults
from kinject.train.sharpness import Sharpness
from kinject.train.trainable import summarise

if TYPE_CHECKING:
    from kinject.train.trainer import KnowledgeTrainer

Faults = list[tuple[str, str]]
_STEPS_IN_BACKWARD = ("lomo", "adalomo")


def check_techniques(recipe: TrainRecipe, config: Any) -> Faults:
    """Return (key, fault) for techniques that this recipe cannot have, or not together."""
    return [
        *_loss_faults(recipe, config),
        *_gradient_faults(recipe, config),
        *_layer_faults(recipe),
        *_patience_faults(recipe, config),
        *schedule_free_faults(config),
        *_histogram_faults(recipe, config),
    ]


def _loss_faults(recipe: TrainRecipe, config: Any) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    smoothing = config.label_smoothing_factor
    if not 0.0 <= smoothing < 1.0:
        faults.append(("trainer.label_smoothing_factor", f"found {smoothing}, allowed: 0 to less than 1."))
    chosen = {
        "trainer.label_smoothing_factor": bool(smoothing),
        "techniques.hard_example_mining": techniques.hard_example_mining is not None,
        "techniques.row_weights": techniques.row_weights is not None,
    }
    for key in (key for key, is_on in chosen.items() if is_on):
        if config.loss_type != "nll":
            faults.append((key, f"changes the loss nll, found trainer.loss_type: {config.loss_type}. Keep one."))
        if key.startswith("techniques.") and recipe.regularization is not None and recipe.regularization.kl:
            faults.append(
                (key, "regularization.kl is measured in units of a token's loss, each counting as much. Keep one.")
            )
    if chosen["techniques.hard_example_mining"] and chosen["techniques.row_weights"]:
        what = "beside row_weights it is open which loss is the highest, the weighted one or not. Keep one."
        faults.append(("techniques.hard_example_mining", what))
    return faults


def _gradient_faults(recipe: TrainRecipe, config: Any) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    reach = {"sam": techniques.sam > 0, "freeze_base_steps": techniques.freeze_base_steps is not None,
             "histogram_steps": techniques.histogram_steps is not None}  # fmt: skip
    for name in (name for name, is_on in reach.items() if is_on):
        if config.fsdp or config.deepspeed:
            faults.append((f"techniques.{name}", "needs whole gradients on each process. Use DDP."))
        if (
            str(config.optim).rpartition(".")[2].lower() in _STEPS_IN_BACKWARD
            or "layerwise" in str(config.optim).lower()
        ):
            what = "this optimizer updates while gradients are computed, so nothing can be done between. Set another optim."
            faults.append((f"techniques.{name}", what))
    if reach["sam"] and recipe.model.dtype in ("bfloat16", "float16"):
        what = f"a step of {techniques.sam:g} uphill rounds away in {recipe.model.dtype} weights. Set model.dtype: float32; "
        faults.append(("techniques.sam", what + "trainer.bf16 or fp16 then speeds up the arithmetic."))
    return faults


def _layer_faults(recipe: TrainRecipe) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    model, anchor = recipe.model, recipe.regularization
    if techniques.freeze_base_steps is not None:
        if recipe.adapter is not None:
            faults.append(
                ("techniques.freeze_base_steps", "an adapter's base holds still to the end. Remove the line.")
            )
        elif not techniques.freeze_base_except and not techniques.reinitialize_last_layers:
            what = "missing. It says what trains first, as in [lm_head.*]; or set techniques.reinitialize_last_layers."
            faults.append(("techniques.freeze_base_except", what))
    elif techniques.freeze_base_except:
        faults.append(("techniques.freeze_base_steps", "missing. freeze_base_except needs it: the number of updates."))
    if techniques.reinitialize_last_layers:
        key = "techniques.reinitialize_last_layers"
        if recipe.adapter is not None or model.quantization != "none":
            faults.append((key, "beside an adapter they would not train. Remove the line, or train all weights."))
        if model.new is not None:
            faults.append((key, "a new model's weights are all drawn anew. Remove the line."))
        if anchor is not None and (anchor.l2 or anchor.ewc or anchor.kl):
            faults.append(
                (
                    key,
                    "regularization would hold the model to layers that know nothing. Keep one; layerwise_lr_decay may stay.",
                )
            )
    return faults


def _patience_faults(recipe: TrainRecipe, config: Any) -> Faults:
    if recipe.techniques.patience is None:
        return []
    key, faults = "techniques.patience", Faults()
    if recipe.trainer.get("eval_strategy", "no") == "no":
        what = "missing. It says when techniques.patience looks: eval_strategy: steps with eval_steps, or epoch."
        faults.append(("trainer.eval_strategy", what))
    if recipe.probes is not None and recipe.probes.patience is not None:
        faults.append((key, "says the same as probes.patience. Keep one."))
    held_out = recipe.corpus.validation_corpus is not None
    if not held_out and config.metric_for_best_model in (None, "loss", "eval_loss"):
        what = (
            "without corpus.validation_corpus there is no loss to wait for. Set it, or trainer.metric_for_best_model to a "
            "probe's."
        )
        faults.append((key, what))
    return faults


def _histogram_faults(recipe: TrainRecipe, config: Any) -> Faults:
    if recipe.techniques.histogram_steps is None or set(config.report_to) & set(TRACKERS):
        return []
    return [
        ("techniques.histogram_steps", f"no tracker that takes them. Set trainer.report_to: {' or '.join(TRACKERS)}.")
    ]


def equip(trainer: KnowledgeTrainer, recipe: TrainRecipe, redrawn: Sequence[str]) -> None:
    """Give `trainer` what the recipe's techniques need, and what to say of them; `redrawn` are the names of fresh weights.

    Raises `RecipeError` for what only the model shows.
    """
    techniques = recipe.techniques
    trainer.objective = Objective(
        float(trainer.args.label_smoothing_factor), techniques.hard_example_mining, techniques.row_weights is not None
    )
    trainer.label_smoother = None  # the objective smooths; held-out losses stay what they are without
    if trainer.aux_loss_enabled and not trainer.objective.plain:
        what = (
            "this model adds its routers' loss, which smoothed labels, hard_example_mining and row_weights leave out. "
            "Remove them."
        )
        raise recipe.error("techniques" if "techniques" in recipe.raw else "trainer.label_smoothing_factor", what)
    trainer.layerwise_lr_decay = techniques.layerwise_lr_decay
    trainer.held_base = hold_base(trainer.model, recipe, redrawn)
    trainer.sharpness = Sharpness(techniques.sam) if techniques.sam else None
    if techniques.patience is not None:
        trainer.add_callback(Patience(techniques.patience, trainer.guard.warnings))
    if techniques.histogram_steps is not None:
        trainer.add_callback(Histograms(techniques.histogram_steps, lambda: trainer.callback_handler.callbacks))
    trainer.notes = _describe(trainer, recipe, redrawn)


def _describe(trainer: KnowledgeTrainer, recipe: TrainRecipe, redrawn: Sequence[str]) -> list[str]:
    notes = []
    if redrawn:
        notes.append(f"techniques.reinitialize_last_layers: drawn anew: {', '.join(summarise(redrawn))}")
    if trainer.held_base is not None:
        first = [name for name, _ in trainer.model.named_parameters() if name in trainer.held_base.first]
        notes.append(
            f"techniques.freeze_base_steps: for {trainer.held_base.steps} updates only these train: {', '.join(summarise(first))}"
        )
    if trainer.sharpness is not None:
        notes.append(f"techniques.sam: gradients are taken {trainer.sharpness.rho:g} uphill, in two passes an update")
    if recipe.techniques.hard_example_mining is not None:
        hardest = recipe.techniques.hard_example_mining
        notes.append(
            f"techniques.hard_example_mining: learns from the {hardest.fraction:.0%} of {hardest.unit} "
            "with the highest loss"
        )
    return notes


class Patience(Stops):
    """Stops a run after `evaluations` without a better metric: the held-out loss where the recipe names none."""

    def __init__(self, evaluations: int, said: list[str]) -> None:
        super().__init__(said)
        self.evaluations = evaluations

    def reason(self, args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        """Return that no evaluation since the best one is better."""
        metric = args.metric_for_best_model or "loss"
        greater = args.greater_is_better if args.metric_for_best_model is not None else False
        return impatient(history, (metric, greater), self.evaluations, "techniques.patience")
