"""Keys of a training that exclude or need each other: model, corpus, evaluations, this machine and
its processes. `kinject.recipe.technique_conflicts` has those of the loss and the update."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from kinject.errors import Problem
from kinject.recipe.check import suggestion
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, starts_in_the_base
from kinject.recipe.read import TrainRecipe

HISTOGRAM_TRACKERS = ("tensorboard", "wandb")
"""Those of trainer.report_to that take histograms."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How and where a training is to run, as far as its recipe leaves that open; texts are "" where
    nothing is wrong."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    """The trainer section, with the defaults of SFTConfig."""
    device: str = "cpu"
    emulates_bf16: str = ""
    lacks_attention: str = ""
    fp16: bool = False
    splits: str = ""
    """Why kinject has no access to weights and gradients."""
    is_sharded: bool = False
    in_parts: bool = False
    """By transformers or ZeRO-3, so that no module can be copied or merged."""
    has_deepspeed: bool = False
    splits_rows: bool = False
    """By context parallelism."""
    splits_matrices: bool = False
    is_launched: bool = False
    cannot_upload: str = ""

    def __getitem__(self, name: str) -> Any:
        value = self.trainer.get(name)
        return getattr(value, "value", value)  # of an enum, its word

    @property
    def wraps_documents(self) -> bool:
        """Whether packed rows let a document read the one before it."""
        return bool(self["packing"]) and self["packing_strategy"] == "wrapped"

    @property
    def is_schedule_free(self) -> bool:
        """Whether the optimizer averages weights instead of following a schedule."""
        return str(self["optim"]).startswith("schedule_free")

    @property
    def updates_elsewhere(self) -> bool:
        """Whether the optimizer updates weights while gradients are computed."""
        return self["optim"] in ("lomo", "adalomo") or "layerwise" in str(self["optim"])


TrainCheck = Callable[[TrainRecipe, Launch], Iterator[Problem]]
"""The problems of one subject in a training."""


def techniques_on(recipe: TrainRecipe, *names: str) -> list[str]:
    """Return the keys of those of the techniques that are on."""
    return [f"techniques.{name}" for name in names if getattr(recipe.techniques, name)]


def terms_on(recipe: TrainRecipe, *names: str) -> list[str]:
    """Return the keys of those of the terms of regularization that are on."""
    section = recipe.regularization
    return [f"regularization.{name}" for name in names if getattr(section, name, None)]


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
    # Its first part is subtracted from the weights: without it they are no longer the base.
    if starts_in_the_base(adapter):
        for key in _comparisons_with_base(recipe):
            message = "reads the base, of which adapter.init_lora_weights takes a part."
            yield Problem(key, f"{message} Set it to true.")
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


def _comparisons_with_base(recipe: TrainRecipe) -> Iterator[str]:
    """Yield the keys of what reads the base with the adapter switched off."""
    is_own_teacher = recipe.distills is not None and recipe.distills.teacher is None
    if is_own_teacher or (recipe.method == "recall" and recipe.trainer.get("beta")):
        yield "method"
    yield from terms_on(recipe, "kl", "projection")


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


def corpus(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
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
    if recipe.method == "cpt" and section.answers == "own":
        message = "rows of cpt are texts, which ask nothing. Remove method, or the line."
        yield Problem("corpus.answers", message)
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
    if launch["push_to_hub"] and launch.cannot_upload:
        message = f"{launch.cannot_upload}. Set HF_TOKEN, or remove the line."
        yield Problem("trainer.push_to_hub", message)
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


def _takes_histograms(report_to: str | list[str] | tuple[str, ...] | None) -> bool:
    names = [report_to] if isinstance(report_to, str) else report_to or ()
    return any(name in HISTOGRAM_TRACKERS for name in names)


def processes(recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
    """Yield what weights or rows that are split over processes exclude."""
    if launch.splits:
        needing = ("sam", "freeze_base_steps", "histogram_steps")
        for key in (*terms_on(recipe, "l2", "kl"), *techniques_on(recipe, *needing)):
            yield Problem(key, f"needs the weights and the gradients, and {launch.splits}")
    if launch.in_parts or launch.splits:
        whole = techniques_on(recipe, "stochastic_rounding", "muon")
        for key in (*whole, *terms_on(recipe, "projection")):
            message = "needs whole weights on each process. Use DDP, or remove the line."
            yield Problem(key, message)
    if launch.splits_matrices and terms_on(recipe, "projection"):
        message = "needs whole weights on each process. Use DDP, or remove it."
        yield Problem("regularization.projection", message)
    if launch.in_parts:
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
    needing = techniques_on(recipe, "hard_example_mining", "row_weights")
    needing += terms_on(recipe, "projection")
    if recipe.method == "distill":
        needing.insert(0, "method")
    for key in needing:
        message = "needs whole rows on each process, and context parallelism splits them."
        yield Problem(key, f"{message} Use DDP or FSDP2 without it.")
