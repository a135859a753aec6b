"""Keys of a training that exclude or need each other: model, corpus, evaluations, this machine and
its processes, the loss and the update."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from kinject.errors import Problem
from kinject.recipe.check import suggestion
from kinject.recipe.launch import Launch
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, starts_in_the_base
from kinject.recipe.method_rules import rules_of
from kinject.recipe.read import TrainRecipe

HISTOGRAM_TRACKERS = ("tensorboard", "wandb")
"""Those of trainer.report_to that take histograms."""
_ONE_BY_ONE = re.compile(
    r"(paged_)?(adamw|lion|ademamix)(_bnb)?(_8bit|_32bit)|ademamix|adamw_torch(_fused)?"
    r"|sgd|adagrad|rmsprop(_bnb)?(_8bit|_32bit)?|adafactor"
)
"""Names of trainer.optim that read nothing but a parameter, its gradient and its own state."""


TrainCheck = Callable[[TrainRecipe, Launch], Iterator[Problem]]
"""The problems of one subject in a training."""


def is_cartridge(recipe: TrainRecipe) -> bool:
    """Return whether the adapter is keys and values in front of the text."""
    return (recipe.adapter or {}).get("type") == "cartridge"


def weights(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of an adapter and the base weights below it."""
    adapter = recipe.adapter
    quantized = recipe.model.quantization != "none"
    if adapter is None:
        if quantized:
            fix = "Add an adapter section, or remove the line."
            yield Problem("model.quantization", f"quantised weights do not train. {fix}")
        return
    if recipe.model.freeze:
        yield Problem("model.freeze", "an adapter freezes the base by itself. Remove the line.")
    for key, reason in _comparisons_with_base(recipe, adapter):
        yield Problem(key, f"reads the base, {reason}")
    decomposes = starts_in_the_base(adapter) or adapter.get("init_lora_weights") == "mica"
    in_parts = launch.in_parts or launch.is_sharded or launch.splits_matrices
    if decomposes and (quantized or in_parts):
        message = "decomposes weights, which must be whole on each process, not quantized."
        yield Problem("adapter.init_lora_weights", f"{message} Set true.")
    if starts_in_the_base(adapter) and adapter.get("layer_replication"):
        message = "copies share weights, from which init_lora_weights takes a part."
        yield Problem("adapter.layer_replication", f"{message} Set that to true.")
    if adapter.get("merge") and quantized:
        message = "folding into quantised weights loses precision. Use kinject export later."
        yield Problem("adapter.merge", message)


def _comparisons_with_base(
    recipe: TrainRecipe, adapter: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield (the key of what reads the base, why it would read another model with the adapter
    switched off)."""
    before, during = [], recipe.terms_on("kl")
    if rules_of(recipe).has_teacher and rules_of(recipe).reads_base(recipe):
        before.append("method")  # predictions are made before the first update
    elif rules_of(recipe).reads_base(recipe):
        during.append("method")
    if starts_in_the_base(adapter):
        # Its first part is subtracted from the weights: without it they are no longer the base.
        for key in (*before, *during, *recipe.terms_on("projection")):
            yield key, "of which adapter.init_lora_weights takes a part. Set it to true."
    if adapter.get("layer_replication"):
        for key in (*before, *during):
            yield key, "of which adapter.layer_replication makes a deeper model. Remove one."
    if adapter.get("bias", "none") != "none":
        # The base's own biases train: the KL to "the base" stayed 0 where it was 1.16.
        for key in during:
            yield key, "whose biases adapter.bias trains. Set that to none."


def arithmetic(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of attention and precision on this device."""
    if launch.lacks_attention:
        message = f"{launch.lacks_attention}. Set model.attention: auto."
        yield Problem("model.attention", message)
    if recipe.model.attention == "flex_attention" and launch.device == "cpu":
        message = "torch's flex_attention does not train on a CPU. Set model.attention: auto."
        yield Problem("model.attention", message)
    if launch.emulates_bf16 and recipe.trainer.get("bf16"):
        message = f"{launch.emulates_bf16} Remove the line: fp16 is then on."
        yield Problem("trainer.bf16", message)
    if launch.emulates_bf16 and recipe.model.dtype == "bfloat16":
        fix = "Set model.dtype: float32, or float16 with an adapter."
        yield Problem("model.dtype", f"{launch.emulates_bf16} {fix}")


def corpus(recipe: TrainRecipe, _: Launch | None) -> Iterator[Problem]:
    """Yield the problems of the corpora and of their mixture."""
    section = recipe.corpus
    if "replay" in (section.mix or {}):
        message = "replay is no part of mix. Move it up to corpus.replay, or rename it."
        yield Problem("corpus.mix.replay", message)
    total = sum(part.fraction for part in section.parts().values())
    if total > 0.95:
        message = f"the fractions of replay and mix sum to {total:g}, allowed: up to 0.95."
        yield Problem("corpus", f"{message} The corpus has the rest.")
    if recipe.model.new is not None:
        for part in section.own_answers():
            key = f"corpus.{part}.answers" if part else "corpus.answers"
            message = "a new model has no answers yet. Give model.path, or remove the line."
            yield Problem(key, message)
    if section.validation_fraction and section.validation_corpus:
        message = "validation_corpus is the validation corpus. Keep one."
        yield Problem("corpus.validation_fraction", message)


def evaluations(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of evaluations during training, and of the metric that is followed."""
    if launch["eval_strategy"] == "no":
        for key in _needing_evaluations(recipe, launch):
            message = f"missing. {key} needs evaluations"
            fix = "set eval_strategy: steps with eval_steps, or epoch."
            yield Problem("trainer.eval_strategy", f"{message}: {fix}")
    metrics = _metrics(recipe)
    if not metrics:
        for name in ("eval_strategy", "eval_on_start"):
            if recipe.trainer.get(name) not in (None, False, "no"):
                fix = (
                    "Set corpus.validation_corpus (JSONL) or validation_fraction, "
                    "or add a probes section."
                )
                yield Problem(f"trainer.{name}", f"nothing to evaluate on. {fix}")
    else:
        yield from _metric(recipe, launch, metrics)
    if recipe.probes is not None and recipe.probes.max_forgetting is not None:
        roles = {item.role for item in recipe.probes.sets().values()}
        if "retention" not in roles:
            message = "no question set has role: retention. Give one that role."
            yield Problem("probes.max_forgetting", message)
    if launch["packing"] and launch["max_length"] is None:
        yield Problem("trainer.max_length", "packing needs a block length.")


def _needing_evaluations(recipe: TrainRecipe, launch: Launch) -> Iterator[str]:
    """Yield the keys of what happens at evaluations only."""
    if recipe.corpus.validation_fraction:
        yield "corpus.validation_fraction"
    if recipe.probes is not None:
        yield "probes"
    if recipe.techniques.patience:
        yield "techniques.patience"
    if launch["lr_scheduler_type"] in ADAPTIVE_SCHEDULES:
        yield "trainer.lr_scheduler_type"
    if launch["save_strategy"] == "best":
        yield "trainer.save_strategy"


def _metrics(recipe: TrainRecipe) -> list[str]:
    """Return the metrics of evaluations by which a checkpoint can be chosen."""
    metrics = []
    if recipe.corpus.has_validation:
        metrics.append("loss")
    if recipe.probes is not None:
        metrics += [*(f"{name}_accuracy" for name in recipe.probes.sets()), "accuracy"]
    return metrics


def _metric(recipe: TrainRecipe, launch: Launch, metrics: list[str]) -> Iterator[Problem]:
    """Yield the problems of trainer.metric_for_best_model, which may be one of `metrics`."""
    key, metric = "trainer.metric_for_best_model", launch["metric_for_best_model"]
    if metric is None:
        for follower in _following_metric(recipe, launch):
            allowed = ", ".join(metrics)
            yield Problem(key, f"missing. {follower} follows it. Allowed: {allowed}.")
    elif launch["eval_strategy"] != "no" and metric.removeprefix("eval_") not in metrics:
        yield Problem(key, f"found {metric!r}.{suggestion(metric, metrics)}")


def _following_metric(recipe: TrainRecipe, launch: Launch) -> Iterator[str]:
    """Yield the keys of what follows a metric that no default gives."""
    # Trainer's own default is the loss; for save_strategy: best it has none.
    if not recipe.corpus.has_validation:
        if launch["lr_scheduler_type"] in ADAPTIVE_SCHEDULES:
            yield "trainer.lr_scheduler_type"
        if launch["load_best_model_at_end"]:
            yield "trainer.load_best_model_at_end"
        if recipe.techniques.patience:
            yield "techniques.patience"
    if launch["save_strategy"] == "best":
        yield "trainer.save_strategy"


def machine(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what this machine, its packages and its launcher lack."""
    for key, module, package in _packages(recipe, launch):
        if find_spec(module) is None:
            yield Problem(key, f"needs a package. Install it: pip install {package}.")
    if launch.device == "cpu":
        yield from _on_a_cpu(launch)
    if launch["fsdp"] and not launch.is_launched:
        message = "shards the model over processes, and no launcher started this one."
        fix = "Use accelerate launch: docs/distributed.md."
        yield Problem("trainer.fsdp", f"{message} {fix}")
    backend = launch["torch_compile_backend"]
    if backend is not None:
        import torch

        # With those for debugging, which torch leaves out by itself.
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            message = f"found {backend!r}.{suggestion(backend, known)}"
            yield Problem("trainer.torch_compile_backend", message)
    if launch.lacks_compiler:
        message = "torch translates the model into C++, and there is no compiler for it."
        fix = "Install g++ (macOS: xcode-select --install), name yours in CXX, or remove the line."
        yield Problem("trainer.torch_compile", f"{message} {fix}")
    if launch["push_to_hub"] and launch.cannot_upload:
        yield Problem("trainer.push_to_hub", f"{launch.cannot_upload}, or remove the line.")
    if recipe.trainer.get("hub_revision") and not launch["push_to_hub"]:
        fix = "Set trainer.push_to_hub: true, or remove the line."
        yield Problem(
            "trainer.hub_revision", f"is the branch of an upload, and there is none. {fix}"
        )
    if recipe.techniques.histogram_steps and not _takes_histograms(launch["report_to"]):
        fix = f"Set trainer.report_to: {' or '.join(HISTOGRAM_TRACKERS)}."
        yield Problem("techniques.histogram_steps", f"no tracker that takes them. {fix}")


def _packages(recipe: TrainRecipe, launch: Launch) -> Iterator[tuple[str, str, str]]:
    """Yield (key, module, name for pip) of each package that a setting needs."""
    # On a CPU no package helps: `_on_a_cpu` has the message.
    if launch["use_liger_kernel"] and launch.device != "cpu":
        yield "trainer.use_liger_kernel", "liger_kernel", "liger-kernel"
    if recipe.model.quantization != "none":
        yield "model.quantization", "bitsandbytes", "bitsandbytes"
    if launch.is_schedule_free:
        yield "trainer.optim", "schedulefree", "'kinject[schedule-free]'"


def _on_a_cpu(launch: Launch) -> Iterator[Problem]:
    """Yield what a CPU does not do."""
    if launch.fp16:
        message = (
            "float16 with a gradient scaler needs a GPU. On this CPU accelerate would train in "
            "float32 without a warning."
        )
        fix = "Set bf16: true or remove the line (a launcher: mixed_precision)."
        yield Problem("trainer.fp16", f"{message} {fix}")
    if launch["use_liger_kernel"]:
        message = "its kernels are Triton's, which need a GPU, and this run is on the CPU."
        yield Problem("trainer.use_liger_kernel", f"{message} Remove the line.")
    if launch["activation_offloading"]:
        message = (
            "moves activations from an accelerator to memory, and this run is on the CPU. "
            "Remove the line."
        )
        yield Problem("trainer.activation_offloading", message)
    if launch["optim"].startswith("paged_"):
        # bitsandbytes 0.50 would take unpaged states with a warning.
        message = "its states are paged between a GPU and memory, and this run is on the CPU."
        plain = launch["optim"].removeprefix("paged_")
        yield Problem("trainer.optim", f"{message} Set {plain}.")


def _takes_histograms(report_to: str | list[str] | tuple[str, ...] | None) -> bool:
    names = [report_to] if isinstance(report_to, str) else report_to or ()
    return any(name in HISTOGRAM_TRACKERS for name in names)


def processes(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what weights or rows that are split over processes exclude."""
    if launch.splits:
        needing = ("sam", "freeze_base_steps", "histogram_steps")
        for key in (*recipe.terms_on("l2", "kl"), *recipe.techniques_on(*needing)):
            yield Problem(key, f"needs the weights and the gradients, and {launch.splits}")
    if launch.in_parts or launch.splits:
        whole = recipe.techniques_on("stochastic_rounding", "muon")
        for key in (*whole, *recipe.terms_on("projection")):
            message = "needs whole weights on each process. Use DDP, or remove the line."
            yield Problem(key, message)
    if launch.splits_matrices and recipe.terms_on("projection"):
        message = "needs whole weights on each process. Use DDP, or remove it."
        yield Problem("regularization.projection", message)
    # Also where accelerate shards (offload, context parallelism): a merge comes after hours.
    if launch.in_parts or launch.is_sharded:
        yield from _weights_in_parts(recipe, launch)
    if launch.splits_rows:
        yield from _rows_in_parts(recipe, launch)


def _weights_in_parts(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    for name in ("merge", "modules_to_save"):
        if (recipe.adapter or {}).get(name):
            fix = "Remove the line (kinject export merges later), or use DDP."
            yield Problem(f"adapter.{name}", f"the weights are in parts. {fix}")
    optim = launch["optim"]
    # DeepSpeed shards the states itself; torchao's are tensors that FSDP can shard.
    if not launch.has_deepspeed and re.search("8bit|bnb|paged", optim) and "torchao" not in optim:
        message = f"bitsandbytes cannot shard the states of {optim}."
        fix = "Set adamw_torch_fused, or an optimizer of torchao."
        yield Problem("trainer.optim", f"{message} {fix}")


def _rows_in_parts(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    # No error comes otherwise: accelerate drops the mask, and TRL's check sees no packing, since
    # kinject packs.
    if launch["packing"] and not launch.wraps_documents:
        message = "packed documents would read each other: context parallelism has no mask."
        fix = "Set trainer.packing: false; or packing_strategy: wrapped, which lets them."
        yield Problem("trainer.packing", f"{message} {fix}")
    if recipe.model.attention not in ("auto", "sdpa"):
        message = "context parallelism has sdpa only. Set model.attention: sdpa."
        yield Problem("model.attention", message)
    needing = recipe.techniques_on("hard_example_mining", "row_weights")
    needing += recipe.terms_on("projection")
    if rules_of(recipe).has_teacher:
        needing.insert(0, "method")
    for key in needing:
        message = "needs whole rows on each process, and context parallelism splits them."
        yield Problem(key, f"{message} Use DDP or FSDP2 without it.")


def loss(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what the loss of a token and the terms beside it exclude."""
    by_row_or_token = recipe.techniques_on("hard_example_mining", "row_weights")
    kl = recipe.terms_on("kl")
    if launch["loss_type"] != "nll":
        changing = [*by_row_or_token]
        if launch["label_smoothing_factor"]:
            changing.append("trainer.label_smoothing_factor")
        if rules_of(recipe).has_teacher:
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
    """Yield what the method of training excludes, and what belongs to another one."""
    section = recipe.distillation
    if section is not None and not rules_of(recipe).has_teacher:
        message = "belongs to method: distill. Set that, or remove the section."
        yield Problem("distillation", message)
    if section is not None and section.context == "none" and section.teacher is None:
        message = "without a context the model would teach itself what it predicts."
        fix = "Name another one: distillation.teacher."
        yield Problem("distillation.context", f"{message} {fix}")
    yield from rules_of(recipe).problems(recipe, launch)


def trained_weights(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what an adapter or a new model excludes, since weights stay or come without a base."""
    adapter = recipe.adapter
    projects = bool(recipe.terms_on("projection"))
    # An adapter is saved without its base: of one that was drawn here nothing would be left.
    if adapter is not None and recipe.model.new is not None and not adapter.get("merge"):
        message = "is saved without the new model's own weights, and could not be loaded."
        yield Problem("adapter", f"{message} Remove the section, or set adapter.merge: true.")
    if adapter is not None:
        for key in recipe.terms_on("l2"):
            message = "an adapter does not change the base weights. Remove the line."
            yield Problem(key, message)
    if projects and recipe.model.new is not None:
        message = "a new model has nothing to keep. Remove it."
        yield Problem("regularization.projection", message)
    if projects and (adapter or {}).get("use_dora"):
        message = "DoRA scales the whole weight. Remove adapter.use_dora."
        yield Problem("regularization.projection", message)
    if adapter is not None and is_cartridge(recipe):
        for key in (*recipe.terms_on("projection"), *recipe.techniques_on("muon")):
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
    if recipe.model.new is not None or rules_of(recipe).has_teacher:
        message = "a new model's weights are random already, and a teacher needs its own."
        yield Problem(key, f"{message} Remove the line.")
    if recipe.terms_on("l2", "kl", "projection"):
        message = "regularization would hold the model to untrained layers."
        yield Problem(key, f"{message} Keep one; layerwise_lr_decay may stay.")
    if launch.in_parts or launch.is_sharded:
        message = "new weights are drawn for whole layers, and the weights are in parts."
        yield Problem(key, f"{message} Use DDP or ZeRO-2.")


def gradients(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield the problems of what reads or changes gradients before the optimizer's step."""
    if launch.fp16:
        unscaled = recipe.techniques_on("stochastic_rounding", "muon")
        for key in (*recipe.terms_on("l2"), *unscaled):
            message = "needs unscaled gradients. Set trainer.bf16: true instead of fp16."
            yield Problem(key, message)
    if launch.updates_elsewhere:
        # Frozen weights lose their gradients just before the step: requires_grad would not do,
        # since DDP fixes at the start which gradients it waits for.
        for key in recipe.techniques_on("sam", "freeze_base_steps", "histogram_steps"):
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
    rounds, projects = recipe.techniques.stochastic_rounding, recipe.terms_on("projection")
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
    # By a callback after the whole step: a hook on the optimizer fires twice where one optimizer
    # calls another's step, as Muon beside AdamW.
    if projects and (launch.updates_elsewhere or launch.is_schedule_free):
        message = f"corrects the weights after each step, and {optim} keeps or updates them"
        fix = "Set another trainer.optim."
        yield Problem("regularization.projection", f"{message} elsewhere. {fix}")
