"""Keys of a training that exclude or need each other: the loss, the method, what trains and the
update."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kinject.errors import Problem
from kinject.recipe.library_fields import RECALL_FIELDS
from kinject.recipe.read import TrainRecipe
from kinject.recipe.train_conflicts import Launch, is_cartridge, techniques_on, terms_on

_SFT_ONLY = (
    "packing",
    "assistant_only_loss",
    "completion_only_loss",
    "activation_offloading",
    "use_liger_kernel",
)
"""Fields of SFTConfig alone, and one that TRL's GRPO reads otherwise."""
_ONE_BY_ONE = re.compile(
    r"(paged_)?(adamw|lion|ademamix)(_bnb)?(_8bit|_32bit)|ademamix|adamw_torch(_fused)?"
    r"|sgd|adagrad|rmsprop(_bnb)?(_8bit|_32bit)?|adafactor"
)
"""Names of trainer.optim that read nothing but a parameter, its gradient and its own state."""


def loss(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what the loss of a token and the terms beside it exclude."""
    by_row_or_token = techniques_on(recipe, "hard_example_mining", "row_weights")
    kl = terms_on(recipe, "kl")
    if launch["loss_type"] != "nll":
        changing = [*by_row_or_token]
        if launch["label_smoothing_factor"]:
            changing.append("trainer.label_smoothing_factor")
        if recipe.method == "distill":
            changing.append("method")
        for key in changing:
            message = "changes or computes the loss nll, found trainer.loss_type:"
            yield Problem(key, f"{message} {launch['loss_type']}. Keep one.")
    if len(by_row_or_token) == 2:
        message = (
            "with row_weights it is undefined which loss is the highest, the weighted one or not."
        )
        yield Problem("techniques.hard_example_mining", f"{message} Keep one.")
    if not kl:
        return
    for key in by_row_or_token:
        message = "regularization.kl is in units of the loss of a token, all weighted equally."
        yield Problem(key, f"{message} Keep one.")
    if recipe.corpus.replay is None:
        yield Problem("regularization.kl", "is measured on replay. Set corpus.replay.")
    if launch.wraps_documents:
        message = "needs separated documents. Set trainer.packing_strategy: bfd_split."
        yield Problem("regularization.kl", message)


def method(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what `method: distill` and `method: recall` exclude, and what belongs to them alone."""
    section = recipe.distillation
    if section is not None and recipe.method != "distill":
        message = "belongs to method: distill. Set that, or remove the section."
        yield Problem("distillation", message)
    if section is not None and section.context == "none" and section.teacher is None:
        message = "without a context the model would teach itself what it predicts."
        fix = "Name another one: distillation.teacher."
        yield Problem("distillation.context", f"{message} {fix}")
    if recipe.method == "distill":
        if recipe.model.new is not None:
            message = "distill: a new model has nothing to teach. Give model.path."
            yield Problem("method", message)
        if launch.is_sharded:
            message = "distill: the teacher's pass needs whole weights on one process."
            yield Problem("method", f"{message} Use DDP or ZeRO-2.")
    if recipe.method == "recall":
        yield from _recall(recipe, launch)
        return
    for name in RECALL_FIELDS:
        if name in recipe.trainer:
            message = "is GRPOConfig's. Set method: recall, or remove the line."
            yield Problem(f"trainer.{name}", message)


def _recall(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what `method: recall` does not read, and where it cannot run."""
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
    yield from techniques_on(recipe, "hard_example_mining", "row_weights", "sam")
    yield from terms_on(recipe, "kl")


def trained_weights(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what an adapter or a new model excludes, since weights stay or come without a base."""
    adapter = recipe.adapter
    projects = bool(terms_on(recipe, "projection"))
    if adapter is not None:
        for key in terms_on(recipe, "l2"):
            message = "an adapter does not change the base weights. Remove the line."
            yield Problem(key, message)
    if projects and recipe.model.new is not None:
        message = "a new model has nothing to keep. Remove it."
        yield Problem("regularization.projection", message)
    if projects and (adapter or {}).get("use_dora"):
        message = "DoRA scales the whole weight. Remove adapter.use_dora."
        yield Problem("regularization.projection", message)
    if adapter is not None and is_cartridge(recipe):
        for key in (*terms_on(recipe, "projection"), *techniques_on(recipe, "muon")):
            message = "is for weights, and a cartridge changes none. Remove the line."
            yield Problem(key, message)
        if launch.is_sharded:
            message = "a cartridge begins as what the model reads, whole on each process. Use DDP."
            yield Problem("adapter.type", message)
        if adapter.get("merge"):
            message = "a cartridge is no part of the weights. Remove the line."
            yield Problem("adapter.merge", message)


def frozen_base(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of the updates for which only a part of the weights trains."""
    techniques = recipe.techniques
    names = techniques.freeze_base_except
    if techniques.freeze_base_steps and recipe.adapter is not None:
        message = "an adapter's base is frozen to the end. Remove the line."
        yield Problem("techniques.freeze_base_steps", message)
    elif techniques.freeze_base_steps and not (names or techniques.reinitialize_last_layers):
        message = "missing. Name the parameters that train first: [lm_head.*]."
        fix = "Or set techniques.reinitialize_last_layers."
        yield Problem("techniques.freeze_base_except", f"{message} {fix}")
    if names and not techniques.freeze_base_steps:
        message = "missing. freeze_base_except needs it: the number of updates."
        yield Problem("techniques.freeze_base_steps", message)


def new_layers(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of techniques.reinitialize_last_layers."""
    if not recipe.techniques.reinitialize_last_layers:
        return
    key = "techniques.reinitialize_last_layers"
    if recipe.adapter is not None or recipe.model.quantization != "none":
        fix = "Remove the line, or train all weights."
        yield Problem(key, f"beside an adapter they would not train. {fix}")
    if recipe.model.new is not None or recipe.method == "distill":
        message = "a new model's weights are random already, and a teacher needs its own."
        yield Problem(key, f"{message} Remove the line.")
    if terms_on(recipe, "l2", "kl", "projection"):
        message = "regularization would hold the model to untrained layers."
        yield Problem(key, f"{message} Keep one; layerwise_lr_decay may stay.")
    if launch.in_parts or launch.is_sharded:
        message = "new weights are drawn for whole layers, and the weights are in parts."
        yield Problem(key, f"{message} Use DDP or ZeRO-2.")


def gradients(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of what reads or changes gradients before the optimizer's step."""
    if launch.fp16:
        unscaled = techniques_on(recipe, "stochastic_rounding", "muon")
        for key in (*terms_on(recipe, "l2"), *unscaled):
            message = "needs unscaled gradients. Set trainer.bf16: true instead of fp16."
            yield Problem(key, message)
    if launch.updates_elsewhere:
        for key in techniques_on(recipe, "sam", "freeze_base_steps", "histogram_steps"):
            message = (
                "this optimizer updates while gradients are computed, before they can be used."
            )
            yield Problem(key, f"{message} Set another optim.")
    sam = recipe.techniques.sam
    # bfloat16 loses a change below some 0.2 to 0.4% of a weight.
    if sam > 0 and recipe.model.dtype in ("bfloat16", "float16"):
        message = f"a step of {sam:g} uphill rounds away in weights of 16 bits."
        fix = "Set model.dtype: float32; trainer.bf16 or fp16 then speeds up the arithmetic."
        yield Problem("techniques.sam", f"{message} {fix}")


def update(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what the optimizer, and the techniques that change its update, exclude."""
    optim, schedule = launch["optim"], launch["lr_scheduler_type"]
    if launch.is_schedule_free and schedule not in ("constant", "constant_with_warmup"):
        message = (
            f"found {schedule}, but schedule_free averages weights instead of following a schedule."
        )
        fix = "Set constant, with or without trainer.warmup_steps."
        yield Problem("trainer.lr_scheduler_type", f"{message} {fix}")
    rounds, projects = recipe.techniques.stochastic_rounding, terms_on(recipe, "projection")
    key = "techniques.stochastic_rounding"
    if rounds and not _ONE_BY_ONE.fullmatch(optim):
        fix = "Take adamw_8bit, adamw_torch or adafactor, or remove the line."
        yield Problem(key, f"{optim} does not treat weights one by one. {fix}")
    if rounds and recipe.model.dtype != "bfloat16":
        message = "rounds bfloat16 weights. Set model.dtype: bfloat16, or remove the line."
        yield Problem(key, message)
    if recipe.techniques.muon and optim not in ("adamw_torch", "adamw_torch_fused"):
        message = f"the other weights take AdamW, found trainer.optim: {optim}."
        yield Problem("techniques.muon", f"{message} Set adamw_torch, or remove the line.")
    if rounds and (recipe.techniques.muon or projects):
        message = (
            "rounds after trainer.optim alone; techniques.muon and regularization.projection "
            "change the update."
        )
        yield Problem(key, f"{message} Keep one.")
    if projects and (launch.updates_elsewhere or launch.is_schedule_free):
        message = f"corrects the weights after each step, and {optim} keeps or updates them"
        fix = "Set another trainer.optim."
        yield Problem("regularization.projection", f"{message} elsewhere. {fix}")
