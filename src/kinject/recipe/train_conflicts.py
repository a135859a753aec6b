"""What excludes or needs what in a training: rows of the table in `kinject.recipe.conflicts`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kinject.recipe.check import Conflict, suggestion
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, RECALL_FIELDS, starts_in_the_base

if TYPE_CHECKING:
    from kinject.recipe.read import TrainRecipe

_SFT_ONLY = (
    "packing", "assistant_only_loss", "completion_only_loss", "activation_offloading", "use_liger_kernel",
)  # fmt: skip
"""Fields of SFTConfig alone, and one that TRL's GRPO reads otherwise."""
HISTOGRAM_TRACKERS = ("tensorboard", "wandb")
"""Those of trainer.report_to that take histograms."""
_ONE_BY_ONE = re.compile(
    r"(paged_)?(adamw|lion|ademamix)(_bnb)?(_8bit|_32bit)|ademamix|adamw_torch(_fused)?|sgd|adagrad|rmsprop(_bnb)?(_8bit|_32bit)?|adafactor"
)
"""Names of trainer.optim that read nothing but a parameter, its gradient and its own state."""


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


def _on(recipe: Any, *names: str) -> list[str]:
    """Return those of the techniques that are on."""
    return [f"techniques.{name}" for name in names if getattr(recipe.techniques, name)]


def _terms(recipe: Any, *names: str) -> list[str]:
    """Return those of the terms of regularization that are on."""
    return [
        f"regularization.{name}" for name in names if getattr(recipe.regularization, name, None)
    ]


def _is_cartridge(recipe: Any) -> bool:
    return (recipe.adapter or {}).get("type") == "cartridge"


def _listed(**found: object) -> list[str]:
    """Return the keys of what is on; a double underscore is a dot."""
    return [key.replace("__", ".") for key, is_on in found.items() if is_on]


def _needs_evaluation(r: Any, f: Launch) -> list[str]:
    if f["eval_strategy"] != "no":
        return []
    return _listed(
        corpus__validation_fraction=r.corpus.validation_fraction, probes=r.probes, techniques__patience=r.techniques.patience,
        trainer__lr_scheduler_type=f["lr_scheduler_type"] in ADAPTIVE_SCHEDULES,
        trainer__save_strategy=f["save_strategy"] == "best",
    )  # fmt: skip


def _metrics(r: Any) -> list[str]:
    """Return the metrics of evaluations by which a checkpoint can be chosen."""
    sets = r.probes.sets() if r.probes is not None else {}
    return [
        *["loss"] * r.corpus.has_validation,
        *(f"{name}_accuracy" for name in sets),
        *["accuracy"] * bool(sets),
    ]


def _needs_metric(r: Any, f: Launch) -> list[tuple[str, str]]:
    if f["metric_for_best_model"] is not None or not _metrics(r):
        return []
    without_loss = not r.corpus.has_validation
    keys = _listed(
        trainer__lr_scheduler_type=without_loss and f["lr_scheduler_type"] in ADAPTIVE_SCHEDULES,
        trainer__load_best_model_at_end=without_loss and f["load_best_model_at_end"],
        techniques__patience=without_loss and r.techniques.patience, trainer__save_strategy=f["save_strategy"] == "best",
    )  # fmt: skip
    return [(key, ", ".join(_metrics(r))) for key in keys]


def _unknown_metric(r: Any, f: Launch) -> list[tuple[str, str]]:
    metric, known = f["metric_for_best_model"], _metrics(r)
    if (
        metric is None
        or not known
        or f["eval_strategy"] == "no"
        or metric.removeprefix("eval_") in known
    ):
        return []
    return [(metric, suggestion(metric, known))]


def _missing_packages(r: Any, f: Launch) -> list[tuple[str, str]]:
    packages = {
        "trainer.use_liger_kernel": (
            "liger_kernel",
            "liger-kernel",
            f["use_liger_kernel"] and f.device != "cpu",
        ),
        "model.quantization": ("bitsandbytes", "bitsandbytes", r.model.quantization != "none"),
        "trainer.optim": ("schedulefree", "'kinject[schedule-free]'", _is_schedule_free(f)),
    }
    return [
        (key, name)
        for key, (module, name, wants) in packages.items()
        if wants and find_spec(module) is None
    ]


def _unknown_backend(r: Any, f: Launch) -> list[tuple[str, str]]:
    name = f["torch_compile_backend"]
    if name is None:
        return []
    import torch

    known = torch._dynamo.list_backends(exclude_tags=())
    return [(name, suggestion(name, known))] if name not in known else []


def _of_nll(r: Any, f: Launch) -> list[tuple[str, str]]:
    keys = _on(r, "hard_example_mining", "row_weights") + _listed(
        trainer__label_smoothing_factor=f["label_smoothing_factor"], method=r.method == "distill"
    )
    return [(key, str(f["loss_type"])) for key in keys] if f["loss_type"] != "nll" else []


def _is_schedule_free(f: Launch) -> bool:
    return str(f["optim"]).startswith("schedule_free")


def _updates_elsewhere(f: Launch) -> bool:
    """Whether the optimizer updates weights while gradients are computed."""
    return f["optim"] in ("lomo", "adalomo") or "layerwise" in str(f["optim"])


def _unscaled(r: Any, f: Launch) -> list[str]:
    return [*_terms(r, "l2"), *_on(r, "stochastic_rounding", "muon")] if f.fp16 else []


def _whole_rows(r: Any, f: Launch) -> list[str]:
    found = [*_listed(method=r.method == "distill"), *_on(r, "hard_example_mining", "row_weights")]
    return [*found, *_terms(r, "projection")] if f.splits_rows else []


def _not_recalled(r: Any, f: Launch) -> list[str]:
    """Return the keys of what `method: recall` does not read."""
    if r.method != "recall":
        return []
    parts = [
        f"corpus.{key}"
        for key in ("replay", "mix", "validation_corpus", "validation_fraction")
        if getattr(r.corpus, key)
    ]
    given = [
        f"trainer.{key}"
        for key in (*_SFT_ONLY, "loss_type", "label_smoothing_factor")
        if r.trainer.get(key)
    ]
    sections = _listed(corpus__answers=r.corpus.answers != "given", probes=r.probes)
    return [
        *parts,
        *given,
        *sections,
        *_on(r, "hard_example_mining", "row_weights", "sam"),
        *_terms(r, "kl"),
    ]


def _compares_with_base(r: TrainRecipe, f: Launch) -> list[str]:
    """Return the keys of what reads the base with the adapter switched off, where that is no longer
    the base."""
    if not starts_in_the_base(r.adapter):
        return []
    own_teacher = r.distills is not None and r.distills.teacher is None
    return _listed(
        method=own_teacher or (r.method == "recall" and r.trainer.get("beta")),
        regularization__kl=bool(_terms(r, "kl")),
        regularization__projection=bool(_terms(r, "projection")),
    )


def _decomposes_parts(r: TrainRecipe, f: Launch) -> bool:
    """Whether an adapter begins as a part of weights that are quantized, or in parts."""
    if not (starts_in_the_base(r.adapter) or (r.adapter or {}).get("init_lora_weights") == "mica"):
        return False
    return r.model.quantization != "none" or f.in_parts or f.is_sharded or f.splits_matrices


def _decomposes_shared(r: TrainRecipe, f: Launch) -> bool:
    """Whether a part would be taken several times out of layers that share their weights."""
    return starts_in_the_base(r.adapter) and bool((r.adapter or {}).get("layer_replication"))


def _gradients(r: Any, f: Launch) -> list[str]:
    return _on(r, "sam", "freeze_base_steps", "histogram_steps")


MODEL_ROWS = (
    Conflict("model", lambda r, f: (r.model.path is None) == (r.model.new is None),
             "give either path (a model to load) or new (config of a model with random weights)."),
    Conflict("model.tokenizer", lambda r, f: r.model.new is not None and r.model.tokenizer is None,
             "missing. A new model needs a tokenizer: a folder, or vocab_size to train one."),
    Conflict("model.tokenizer", lambda r, f: r.model.new is None and r.model.tokenizer is not None,
             "a loaded model brings its own tokenizer. Remove the line."),
)  # fmt: skip
TRAIN_ROWS = (
    *MODEL_ROWS,
    Conflict("model.quantization", lambda r, f: r.model.quantization != "none" and r.adapter is None,
             "quantised weights do not train. Add an adapter section, or remove the line."),
    Conflict("model.freeze", lambda r, f: r.adapter is not None and r.model.freeze,
             "an adapter freezes the base by itself. Remove the line."),
    Conflict("{0}", _compares_with_base,
             "reads the base, of which adapter.init_lora_weights takes a part. Set it to true."),
    Conflict("adapter.init_lora_weights", _decomposes_parts,
             "decomposes weights, which must be whole on each process, not quantized. Set true."),
    Conflict("adapter.layer_replication", _decomposes_shared,
             "copies share weights, from which init_lora_weights takes a part. Set that to true."),
    Conflict("adapter.merge", lambda r, f: r.adapter and r.adapter.get("merge") and r.model.quantization != "none",
             "folding into quantised weights loses precision. Use kinject export later."),
    Conflict("model.attention", lambda r, f: [f.lacks_attention] if f.lacks_attention else [],
             "{0}. Set model.attention: auto."),
    Conflict("model.attention", lambda r, f: r.model.attention == "flex_attention" and f.device == "cpu",
             "torch's flex_attention does not train on a CPU. Set model.attention: auto."),
    Conflict("trainer.bf16", lambda r, f: [f.emulates_bf16] if f.emulates_bf16 and r.trainer.get("bf16") else [],
             "{0} Remove the line: fp16 is then on."),
    Conflict("model.dtype", lambda r, f: [f.emulates_bf16] if f.emulates_bf16 and r.model.dtype == "bfloat16" else [],
             "{0} Set model.dtype: float32, or float16 with an adapter."),
    # the corpus and evaluations
    Conflict("corpus.mix.replay", lambda r, f: "replay" in (r.corpus.mix or {}),
             "replay is no part of mix. Move it up to corpus.replay, or rename it."),
    Conflict("corpus", lambda r, f: [f"{total:g}" for total in [sum(part.fraction for part in r.corpus.parts().values())]
                                     if total > 0.95],
             "the fractions of replay and mix sum to {0}, allowed: up to 0.95. The corpus has the rest."),
    Conflict("corpus.{0}answers", lambda r, f: [f"{part}." if part else "" for part in r.corpus.own_answers()
                                                if r.model.new is not None],
             "a new model has no answers yet. Give model.path, or remove the line."),
    Conflict("corpus.answers", lambda r, f: r.method == "cpt" and "" in r.corpus.own_answers(),
             "rows of cpt are texts, which ask nothing. Remove method, or the line."),
    Conflict("corpus.validation_fraction", lambda r, f: r.corpus.validation_fraction and r.corpus.validation_corpus,
             "validation_corpus is the validation corpus. Keep one."),
    Conflict("trainer.eval_strategy", _needs_evaluation,
             "missing. {0} needs evaluations: set eval_strategy: steps with eval_steps, or epoch."),
    Conflict("trainer.{0}", lambda r, f: [key for key in ("eval_strategy", "eval_on_start")
                                          if r.trainer.get(key) not in (None, False, "no") and not _metrics(r)],
             "nothing to evaluate on. Set corpus.validation_corpus (JSONL) or validation_fraction, or add a probes section."),
    Conflict("trainer.metric_for_best_model", _needs_metric, "missing. {0} follows it. Allowed: {1}."),
    Conflict("trainer.metric_for_best_model", _unknown_metric, "found {0!r}.{1}"),
    Conflict("probes.max_forgetting",
             lambda r, f: r.probes is not None and r.probes.max_forgetting is not None
             and all(item.role != "retention" for item in r.probes.sets().values()),
             "no question set has role: retention. Give one that role."),
    Conflict("trainer.max_length", lambda r, f: f["packing"] and f["max_length"] is None, "packing needs a block length."),
    # this machine and its packages
    Conflict("{0}", _missing_packages, "needs a package. Install it: pip install {1}."),
    Conflict("trainer.fp16", lambda r, f: f.fp16 and f.device == "cpu",
             "float16 with a gradient scaler needs a GPU. On this CPU accelerate would train in float32 without a warning. "
             "Set bf16: true or remove the line (a launcher: mixed_precision)."),
    Conflict("trainer.use_liger_kernel", lambda r, f: f["use_liger_kernel"] and f.device == "cpu",
             "its kernels are Triton's, which need a GPU, and this run is on the CPU. Remove the line."),
    Conflict("trainer.activation_offloading", lambda r, f: f["activation_offloading"] and f.device == "cpu",
             "moves activations from an accelerator to memory, and this run is on the CPU. Remove the line."),
    Conflict("trainer.fsdp", lambda r, f: f["fsdp"] and not f.is_launched,
             "shards the model over processes, and no launcher started this one. Use accelerate launch: docs/distributed.md."),
    Conflict("trainer.torch_compile_backend", _unknown_backend, "found {0!r}.{1}"),
    Conflict("trainer.push_to_hub", lambda r, f: [f.cannot_upload] if f["push_to_hub"] and f.cannot_upload else [],
             "{0}. Set HF_TOKEN, or remove the line."),
    Conflict("techniques.histogram_steps",
             lambda r, f: r.techniques.histogram_steps and not {*_names(f["report_to"])} & {*HISTOGRAM_TRACKERS},
             f"no tracker that takes them. Set trainer.report_to: {' or '.join(HISTOGRAM_TRACKERS)}."),
    # the loss
    Conflict("{0}", _of_nll, "changes or computes the loss nll, found trainer.loss_type: {1}. Keep one."),
    Conflict("techniques.hard_example_mining",
             lambda r, f: r.techniques.hard_example_mining is not None and r.techniques.row_weights is not None,
             "with row_weights it is undefined which loss is the highest, the weighted one or not. Keep one."),
    Conflict("{0}", lambda r, f: _on(r, "hard_example_mining", "row_weights") if _terms(r, "kl") else [],
             "regularization.kl is in units of the loss of a token, all weighted equally. Keep one."),
    Conflict("{0}", lambda r, f: _terms(r, "kl") if r.corpus.replay is None else [],
             "is measured on replay. Set corpus.replay."),
    Conflict("regularization.kl", lambda r, f: _terms(r, "kl") and f["packing"] and f["packing_strategy"] == "wrapped",
             "needs separated documents. Set trainer.packing_strategy: bfd_split."),
    Conflict("distillation", lambda r, f: r.distillation is not None and r.method != "distill",
             "belongs to method: distill. Set that, or remove the section."),
    Conflict("distillation.context", lambda r, f: r.distillation is not None and r.distillation.context == "none"
             and r.distillation.teacher is None,
             "without a context the model would teach itself what it predicts. Name another one: distillation.teacher."),
    Conflict("method", lambda r, f: r.method == "distill" and r.model.new is not None,
             "distill: a new model has nothing to teach. Give model.path."),
    Conflict("method", lambda r, f: r.method == "distill" and f.is_sharded,
             "distill: the teacher's pass needs whole weights on one process. Use DDP or ZeRO-2."),
    Conflict("trainer.{0}", lambda r, f: [key for key in RECALL_FIELDS if key in r.trainer and r.method != "recall"],
             "is GRPOConfig's. Set method: recall, or remove the line."),
    Conflict("{0}", _not_recalled, "belongs to answers that are given; those of method: recall are drawn. Remove it."),
    Conflict("method", lambda r, f: r.method == "recall" and (r.model.new is not None or f.is_sharded),
             "recall: answers are drawn from a trained model, whole on each process. Give model.path; use DDP or ZeRO-2."),
    # what trains
    Conflict("{0}", lambda r, f: _terms(r, "l2") if r.adapter is not None else [],
             "an adapter does not change the base weights. Remove the line."),
    Conflict("regularization.projection", lambda r, f: _terms(r, "projection") and r.model.new is not None,
             "a new model has nothing to keep. Remove it."),
    Conflict("regularization.projection", lambda r, f: _terms(r, "projection") and (r.adapter or {}).get("use_dora"),
             "DoRA scales the whole weight. Remove adapter.use_dora."),
    Conflict("{0}", lambda r, f: [*_terms(r, "projection"), *_on(r, "muon")] if _is_cartridge(r) else [],
             "is for weights, and a cartridge changes none. Remove the line."),
    Conflict("adapter.type", lambda r, f: _is_cartridge(r) and f.is_sharded,
             "a cartridge begins as what the model reads, whole on each process. Use DDP."),
    Conflict("adapter.merge", lambda r, f: _is_cartridge(r) and r.adapter.get("merge"),
             "a cartridge is no part of the weights. Remove the line."),
    Conflict("techniques.freeze_base_steps", lambda r, f: r.techniques.freeze_base_steps and r.adapter is not None,
             "an adapter's base is frozen to the end. Remove the line."),
    Conflict("techniques.freeze_base_except",
             lambda r, f: r.techniques.freeze_base_steps and r.adapter is None
             and not (r.techniques.freeze_base_except or r.techniques.reinitialize_last_layers),
             "missing. Name the parameters that train first: [lm_head.*]. Or set techniques.reinitialize_last_layers."),
    Conflict("techniques.freeze_base_steps",
             lambda r, f: r.techniques.freeze_base_except and not r.techniques.freeze_base_steps,
             "missing. freeze_base_except needs it: the number of updates."),
    Conflict("techniques.reinitialize_last_layers",
             lambda r, f: r.techniques.reinitialize_last_layers and (r.adapter is not None or r.model.quantization != "none"),
             "beside an adapter they would not train. Remove the line, or train all weights."),
    Conflict("techniques.reinitialize_last_layers",
             lambda r, f: r.techniques.reinitialize_last_layers and (r.model.new is not None or r.method == "distill"),
             "a new model's weights are random already, and a teacher needs its own. Remove the line."),
    Conflict("techniques.reinitialize_last_layers",
             lambda r, f: r.techniques.reinitialize_last_layers and _terms(r, "l2", "kl", "projection"),
             "regularization would hold the model to untrained layers. Keep one; layerwise_lr_decay may stay."),
    Conflict("techniques.reinitialize_last_layers",
             lambda r, f: r.techniques.reinitialize_last_layers and (f.in_parts or f.is_sharded),
             "new weights are drawn for whole layers, and the weights are in parts. Use DDP or ZeRO-2."),
    # the update
    Conflict("{0}", _unscaled, "needs unscaled gradients. Set trainer.bf16: true instead of fp16."),
    Conflict("{0}", lambda r, f: _gradients(r, f) if _updates_elsewhere(f) else [],
             "this optimizer updates while gradients are computed, before they can be used. Set another optim."),
    Conflict("techniques.sam", lambda r, f: [f"{r.techniques.sam:g}"] * (r.techniques.sam > 0 and r.model.dtype
                                                                         in ("bfloat16", "float16")),
             "a step of {0} uphill rounds away in weights of 16 bits. Set model.dtype: float32; trainer.bf16 or fp16 then "
             "speeds up the arithmetic."),
    Conflict("trainer.lr_scheduler_type",
             lambda r, f: [f["lr_scheduler_type"]] if _is_schedule_free(f) and f["lr_scheduler_type"]
             not in ("constant", "constant_with_warmup") else [],
             "found {0}, but schedule_free averages weights instead of following a schedule. Set constant, with or without "
             "trainer.warmup_steps."),
    Conflict("techniques.stochastic_rounding",
             lambda r, f: [f["optim"]] if r.techniques.stochastic_rounding and not _ONE_BY_ONE.fullmatch(f["optim"]) else [],
             "{0} does not treat weights one by one. Take adamw_8bit, adamw_torch or adafactor, or remove the line."),
    Conflict("techniques.stochastic_rounding",
             lambda r, f: r.techniques.stochastic_rounding and r.model.dtype != "bfloat16",
             "rounds bfloat16 weights. Set model.dtype: bfloat16, or remove the line."),
    Conflict("techniques.muon",
             lambda r, f: [f["optim"]] if r.techniques.muon and f["optim"] not in ("adamw_torch", "adamw_torch_fused") else [],
             "the other weights take AdamW, found trainer.optim: {0}. Set adamw_torch, or remove the line."),
    Conflict("techniques.stochastic_rounding",
             lambda r, f: r.techniques.stochastic_rounding and (r.techniques.muon or _terms(r, "projection")),
             "rounds after trainer.optim alone; techniques.muon and regularization.projection change the update. Keep one."),
    Conflict("regularization.projection",
             lambda r, f: [f["optim"]] if _terms(r, "projection") and (_updates_elsewhere(f) or _is_schedule_free(f)) else [],
             "corrects the weights after each step, and {0} keeps or updates them elsewhere. Set another trainer.optim."),
    # several processes
    Conflict("{0}", lambda r, f: [(key, f.splits) for key in (*_terms(r, "l2", "kl"), *_gradients(r, f)) if f.splits],
             "needs the weights and the gradients, and {1}"),
    Conflict("{0}", lambda r, f: [*_on(r, "stochastic_rounding", "muon"), *_terms(r, "projection")]
             if f.in_parts or f.splits else [],
             "needs whole weights on each process. Use DDP, or remove the line."),
    Conflict("regularization.projection", lambda r, f: f.splits_matrices and _terms(r, "projection"),
             "needs whole weights on each process. Use DDP, or remove it."),
    Conflict("adapter.{0}", lambda r, f: [key for key in ("merge", "modules_to_save") if (r.adapter or {}).get(key)]
             if f.in_parts else [],
             "the weights are in parts. Remove the line (kinject export merges later), or use DDP."),
    Conflict("trainer.optim", lambda r, f: [f["optim"]] if f.in_parts and not f.has_deepspeed
             and re.search("8bit|bnb|paged", f["optim"]) and "torchao" not in f["optim"] else [],
             "bitsandbytes cannot shard the states of {0}. Set adamw_torch_fused, or an optimizer of torchao."),
    Conflict("trainer.packing", lambda r, f: f.splits_rows and f["packing"] and f["packing_strategy"] != "wrapped",
             "packed documents would read each other: context parallelism has no mask. Set trainer.packing: false; or "
             "packing_strategy: wrapped, which lets them."),
    Conflict("model.attention", lambda r, f: f.splits_rows and r.model.attention not in ("auto", "sdpa"),
             "context parallelism has sdpa only. Set model.attention: sdpa."),
    Conflict("{0}", _whole_rows,
             "needs whole rows on each process, and context parallelism splits them. Use DDP or FSDP2 without it."),
)  # fmt: skip


def _names(value: Any) -> Iterable[str]:
    """Return trainer.report_to as names."""
    return (value,) if isinstance(value, str) else value or ()
