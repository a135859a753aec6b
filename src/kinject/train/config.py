"""The recipe's trainer and adapter sections as TRL's and peft's own configurations, checked before any model loads."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.corpus.rows import RESERVED_KWARGS
from kinject.disk import check_regular, path_exists
from kinject.errors import DiskError, InputError, Problem, RecipeError
from kinject.hub import upload_fault
from kinject.models import check_config, choose_attention, choose_device, choose_precision, emulated_bf16
from kinject.process import is_launched
from kinject.recipe import TrainRecipe
from kinject.recipe.check import suggestion
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, OWN_SCHEDULES, TORCH_SCHEDULES
from kinject.train.contexts import distillation_faults
from kinject.train.load import sharding_faults, split_row_faults, what_splits
from kinject.train.optimizers import optimizer_faults
from kinject.train.own_answers import answers_faults
from kinject.train.updates.regularization import projection_faults

if TYPE_CHECKING:
    from trl import SFTConfig

HISTOGRAM_TRACKERS = ("tensorboard", "wandb")
"""Those of trainer.report_to that take histograms."""

NO_MODEL = "give either path (a model to load) or new (config of a model with random weights)."
NO_TOKENIZER = "missing. A new model needs a tokenizer: a folder, or vocab_size to train one."
Faults = list[tuple[str, str]]
"""(key of the recipe, fault)."""
_NEED_MODEL = {"galore": "galore_torch", "apollo": "apollo_torch", "lomo": "lomo_optim", "adalomo": "lomo_optim"}
"""Optimizers that choose weights by the names of a model's modules -> their package."""
_UPDATES_IN_BACKWARD = ("lomo", "adalomo")


def make_sft_config(recipe: TrainRecipe) -> SFTConfig:
    """Return SFTConfig with the recipe's values, except the fields of tokenising and packing, which kinject does itself.

    If the recipe names neither bf16 nor fp16, the device chooses (`kinject.models.choose_precision`). Raises `RecipeError`
    with every fault of the trainer, model, adapter, regularization, techniques and probes sections that needs no model.
    """
    from trl import SFTConfig

    _raise_faults(recipe, _section_faults(recipe))
    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    values: dict[str, Any] = {
        "seed": recipe.seed, "report_to": "none", "eval_on_start": recipe.probes is not None,
        "disable_tqdm": True, "logging_nan_inf_filter": False, **recipe.trainer,
        "output_dir": str(recipe.run_dir), "packing": False, "padding_free": False, "use_cpu": device == "cpu",
        "dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": False, "completion_only_loss": None,
        "chat_template_path": None, "hub_strategy": "end",
        "enable_jit_checkpoint": False,
    }  # fmt: skip
    if isinstance(values.get("report_to"), tuple):
        values["report_to"] = list(values["report_to"])
    if not values.get("fp16") and values.get("bf16") is None:
        values.update(_precision(recipe, device))

    def make_config(trainer: Mapping[str, Any]) -> SFTConfig:
        left_out = recipe.trainer.keys() - trainer.keys()
        options = {key: value for key, value in values.items() if key not in left_out}
        schedule = options.get("lr_scheduler_type")
        if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
            options["lr_scheduler_type"] = "linear"  # SFTConfig accepts transformers' names only
        config = SFTConfig(**options)
        if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
            config.lr_scheduler_type = schedule
        return config

    _raise_faults(recipe, refusals(make_config, recipe.trainer, "trainer", "SFTConfig"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = make_config(recipe.trainer)
    faults = [*_config_faults(recipe, config), *_tracker_faults(config.report_to), *_missing_faults(config)]
    _raise_faults(recipe, faults or _rehearsal_faults(recipe, make_config))
    return config


def make_lora_config(recipe: TrainRecipe) -> Any:
    """Return peft's LoraConfig of the adapter section, or None without one. Raises `RecipeError` when peft refuses it."""
    if recipe.adapter is None:
        return None
    _raise_faults(recipe, refusals(lora_config, recipe.adapter, "adapter", "peft"))
    return lora_config(recipe.adapter)


def lora_config(adapter: Mapping[str, Any]) -> Any:
    """Return peft's LoraConfig of the keys of an adapter section."""
    from peft import LoraConfig

    fields = {
        key: list(value) if isinstance(value, tuple) else value for key, value in adapter.items() if key != "merge"
    }
    return LoraConfig(**{"task_type": "CAUSAL_LM", **fields})


def refusals(
    make_config: Callable[[Mapping[str, Any]], Any], fields: Mapping[str, Any], section: str, library: str
) -> Faults:
    """Return a fault for each of `fields`, the keys of `section`, without which the library's `make_config` does not fail.

    With several faults there is no such key. Then it is each key without which `make_config` fails otherwise, and the
    remaining fields are tried again, so that every fault is found at once. The whole section is at fault if no single key is.
    `make_config` gets some of the fields and calls nothing but the library.
    """
    faults: Faults = []
    remaining = dict(fields)
    while error := _failure(make_config, remaining):
        fault = f"{library} refuses it: {error.rstrip('.')}."
        without = {
            name: _failure(make_config, {key: remaining[key] for key in remaining if key != name}) for name in remaining
        }
        culprits = [name for name in remaining if not without[name]] or [
            name for name in remaining if without[name] != error
        ]
        faults += [(f"{section}.{name}", fault) for name in culprits] or [(section, fault)]
        if not culprits:
            break
        remaining = {key: value for key, value in remaining.items() if key not in culprits}
    return faults


def _failure(make_config: Callable[[Mapping[str, Any]], Any], fields: Mapping[str, Any]) -> str:
    """Return the message of the library's error, in one line; "" if it raises none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_config(fields)
    except Exception as error:  # noqa: BLE001 (a library raises anything on values that it does not check)
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _rehearsal_faults(recipe: TrainRecipe, make_config: Callable[[Mapping[str, Any]], SFTConfig]) -> Faults:
    """Return the values that optimizer, schedule, loader and checkpointing refuse, tried on one weight of a stand-in."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import Trainer

    from kinject.train.schedules import Schedule

    def optimizer(trainer: Mapping[str, Any]) -> Any:
        config, layer = make_config(trainer), torch.nn.Linear(2, 2, bias=False)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config, layer)
        groups = options.pop("params", [{"params": [layer.weight], "weight_decay": config.weight_decay}])
        return kind(groups, **options)

    def scheduler(trainer: Mapping[str, Any]) -> None:
        config = make_config(trainer)
        name = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
        schedule = Schedule(
            name, config.lr_scheduler_kwargs or {}, config.warmup_steps, 64, bool(config.greater_is_better)
        )
        weight = torch.nn.Parameter(torch.ones(()))
        made = schedule.make_scheduler(torch.optim.SGD([weight], lr=config.learning_rate), max(config.max_steps, 10**6))
        made.optimizer.step()
        made.step(*([0.5] if name in ADAPTIVE_SCHEDULES else []))

    def loader(trainer: Mapping[str, Any]) -> Any:
        config = make_config(trainer)
        rows: Any = [0]
        return DataLoader(
            rows, num_workers=config.dataloader_num_workers, prefetch_factor=config.dataloader_prefetch_factor,
            persistent_workers=config.dataloader_persistent_workers, in_order=config.dataloader_in_order,
            multiprocessing_context=config.dataloader_multiprocessing_context,
        )  # fmt: skip

    def checkpointing(trainer: Mapping[str, Any]) -> None:
        config = make_config(trainer)
        if config.gradient_checkpointing:
            options = {"use_reentrant": False, **(config.gradient_checkpointing_kwargs or {})}
            options.pop("selective", None)  # TRL's own
            torch.utils.checkpoint.checkpoint(torch.square, torch.ones(1, requires_grad=True), **options)

    optim = str(recipe.trainer.get("optim", ""))
    needs_model = any(optim.startswith(name) and find_spec(module) for name, module in _NEED_MODEL.items())
    tries = [scheduler, loader, checkpointing, *([] if needs_model else [optimizer])]
    return list(dict.fromkeys(
        fault for tried in tries for fault in refusals(tried, recipe.trainer, "trainer", f"the {tried.__name__}")
    ))  # fmt: skip


def _missing_faults(config: SFTConfig) -> Faults:
    """Return a fault for each package, compiler, token or launcher that this machine lacks."""
    faults: Faults = []
    if config.mixed_precision == "fp16" and config.use_cpu:
        fault = "float16 with a gradient scaler needs a GPU. On this CPU accelerate would train in float32 without a warning."
        faults.append(("trainer.fp16", f"{fault} Set bf16: true or remove the line (a launcher: mixed_precision)."))
    if config.use_liger_kernel and config.use_cpu:
        fault = "its kernels are Triton's, which need a GPU, and this run is on the CPU. Remove the line."
        faults.append(("trainer.use_liger_kernel", fault))
    elif config.use_liger_kernel and find_spec("liger_kernel") is None:
        faults.append(
            ("trainer.use_liger_kernel", "needs the package liger-kernel. Install it: pip install liger-kernel.")
        )
    if config.fsdp and not is_launched():
        fault = "shards the model over processes, and no launcher started this one. Use accelerate launch: docs/distributed.md."
        faults.append(("trainer.fsdp", fault))
    if config.activation_offloading and config.use_cpu:
        fault = "moves activations from an accelerator to memory, and this run is on the CPU. Remove the line."
        faults.append(("trainer.activation_offloading", fault))
    if config.torch_compile:
        import torch

        known = torch._dynamo.list_backends(exclude_tags=())
        if config.torch_compile_backend not in known:
            fault = f"found {config.torch_compile_backend!r}.{suggestion(config.torch_compile_backend, known)}"
            faults.append(("trainer.torch_compile_backend", fault))
    if config.push_to_hub and (reason := upload_fault()):
        faults.append(("trainer.push_to_hub", f"{reason}. Set HF_TOKEN, or remove the line."))
    return faults


def _device_faults(recipe: TrainRecipe) -> Faults:
    """Return a fault if this machine lacks the model's device, attention, arithmetic or quantization."""
    model = recipe.model
    faults: Faults = []
    try:
        device = choose_device("cpu" if recipe.trainer.get("use_cpu") else model.device)
        choose_attention(model.attention, device)
        if model.attention == "flex_attention" and device == "cpu":
            faults.append(
                ("model.attention", "torch's flex_attention does not train on a CPU. Set model.attention: auto.")
            )
        emulated = emulated_bf16(device)
        if emulated and recipe.trainer.get("bf16"):
            faults.append(("trainer.bf16", f"{emulated} Remove the line: fp16 is then on."))
        if emulated and model.dtype == "bfloat16":
            dtype = "float16 (of the arithmetic)" if recipe.adapter is not None else "float32 (fp16 is then on)"
            faults.append(("model.dtype", f"{emulated} Set model.dtype: {dtype}."))
    except InputError as error:
        key, _, fault = str(error).partition(": ")
        faults.append((key, fault))
    if model.quantization != "none" and find_spec("bitsandbytes") is None:
        faults.append(("model.quantization", "needs the package bitsandbytes. Install it: pip install bitsandbytes."))
    return faults


def _precision(recipe: TrainRecipe, device: str) -> dict[str, bool]:
    """Return bf16 or fp16 for a recipe that names neither; none where l2 or ewc would need unscaled gradients."""
    precision, section = choose_precision(device), recipe.regularization
    if precision == "fp16" and section is not None and (section.l2 or section.ewc):
        precision = "no"
    return {"bf16": precision == "bf16", "fp16": precision == "fp16"}


def trainer_field(recipe: TrainRecipe, name: str) -> Any:
    """Return `name` of the recipe's trainer section, else SFTConfig's default. Raises `KeyError` for no such field."""
    from trl import SFTConfig

    if name in recipe.trainer:
        return recipe.trainer[name]
    field = {field.name: field for field in dataclasses.fields(SFTConfig)}[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _raise_faults(recipe: TrainRecipe, faults: Faults) -> None:
    if faults:
        raise RecipeError([Problem(key, fault, recipe.location(key)) for key, fault in faults])


def _section_faults(recipe: TrainRecipe) -> Faults:
    """Return the faults that need several sections together, but no SFTConfig."""
    model, trainer = recipe.model, recipe.trainer
    faults: Faults = []
    if (model.path is None) == (model.new is None):
        faults.append(("model", NO_MODEL))
    if model.new is not None:
        faults += [(f"model.new.{key}", fault) for key, fault in check_config(model.new)]
        if model.tokenizer is None:
            faults.append(("model.tokenizer", NO_TOKENIZER))
    elif model.tokenizer is not None:
        faults.append(("model.tokenizer", "a loaded model brings its own tokenizer. Remove the line."))
    if model.quantization != "none" and recipe.adapter is None:
        faults.append(
            ("model.quantization", "quantised weights do not train. Add an adapter section, or remove the line.")
        )
    if trainer.get("packing") and trainer.get("max_length", 1024) is None:
        faults.append(("trainer.max_length", "packing needs a block length."))
    if trainer.get("logging_nan_inf_filter"):
        faults.append(("trainer.logging_nan_inf_filter", "writes a number for a loss that is none. Remove the line."))
    for key, value in trainer.items():  # the libraries open files that some of them name
        path = Path(value) if isinstance(value, str) else Path()
        if path_exists(path) and not path.is_dir():
            try:
                check_regular(path)
            except DiskError as error:
                faults.append((f"trainer.{key}", str(error)))
    faults += [*_evaluation_faults(recipe), *_device_faults(recipe)]
    if recipe.corpus is not None:
        faults += [*recipe.corpus.faults(), *answers_faults(recipe)]
        for key in RESERVED_KWARGS & (recipe.corpus.chat_template_kwargs or {}).keys():
            faults.append((f"corpus.chat_template_kwargs.{key}", "is set by kinject. Remove the line."))
    if recipe.adapter is not None and not recipe.adapter.get("merge") and model.save_dtype != "auto":
        faults.append(
            ("model.save_dtype", "an adapter is saved as it was trained. Remove the line; kinject export rounds.")
        )
    if recipe.adapter is not None and model.freeze:
        faults.append(("model.freeze", "an adapter freezes the base by itself. Remove the line."))
    if recipe.adapter is not None and recipe.adapter.get("merge") and model.quantization != "none":
        faults.append(("adapter.merge", "folding into quantised weights loses precision. Use kinject export later."))
    return faults


def _evaluation_faults(recipe: TrainRecipe) -> Faults:
    trainer, probes = recipe.trainer, recipe.probes
    has_loss = recipe.corpus is not None and recipe.corpus.has_validation
    evaluates = trainer.get("eval_strategy", "no") != "no"
    faults: Faults = []
    if recipe.corpus is not None and recipe.corpus.validation_fraction:
        if recipe.corpus.validation_corpus is not None:
            faults.append(("corpus.validation_fraction", "validation_corpus is the validation corpus. Keep one."))
        elif not evaluates:
            fault = (
                "missing. corpus.validation_fraction holds documents out for evaluations: set it to epoch, or steps."
            )
            faults.append(("trainer.eval_strategy", fault))
    for key in ("eval_strategy", "eval_on_start"):
        if not (evaluates if key == "eval_strategy" else trainer.get(key)) or has_loss or probes is not None:
            continue
        fault = "nothing to evaluate on. Set corpus.validation_corpus (JSONL) or validation_fraction, or add a probes section."
        faults.append((f"trainer.{key}", fault))
    sets = probes.sets() if probes is not None else {}
    schedule, metric = trainer.get("lr_scheduler_type"), trainer.get("metric_for_best_model")
    if schedule in ADAPTIVE_SCHEDULES and not evaluates:
        fault = f"{schedule} follows a metric of the evaluations. Set trainer.eval_strategy with eval_steps, or epoch."
        faults.append(("trainer.lr_scheduler_type", fault))
    elif schedule in ADAPTIVE_SCHEDULES and metric is None and not has_loss and sets:
        fault = f"{schedule} follows trainer.metric_for_best_model. Without corpus.validation_corpus there is no loss;"
        faults.append(("trainer.lr_scheduler_type", f"{fault} name another."))
    if probes is not None:
        if not evaluates:
            fault = "missing. Probes are scored at evaluations: set eval_strategy: steps with eval_steps, or epoch."
            faults.append(("trainer.eval_strategy", fault))
        if probes.max_forgetting is not None and all(item.role != "retention" for item in sets.values()):
            faults.append(("probes.max_forgetting", "no question set has role: retention. Give one that role."))
    known = [*(["loss"] if has_loss else []), *(f"{name}_accuracy" for name in sets), *(["accuracy"] if sets else [])]
    if metric is not None and evaluates and known and str(metric).removeprefix("eval_") not in known:
        faults.append(("trainer.metric_for_best_model", f"found {metric!r}.{suggestion(metric, known)}"))
    if trainer.get("load_best_model_at_end") and metric is None and not has_loss and sets:
        fault = f"missing. Without corpus.validation_corpus there is no loss to choose by. Allowed: {', '.join(known)}."
        faults.append(("trainer.metric_for_best_model", fault))
    if trainer.get("save_strategy") == "best" and not (evaluates and metric):
        fault = "best saves after evaluations: set trainer.eval_strategy, and trainer.metric_for_best_model by which."
        faults.append(("trainer.save_strategy", fault))
    return faults


def _config_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    """Return the faults of regularization and techniques, alone and together."""
    return [
        *_regularization_faults(recipe, config), *distillation_faults(recipe, config),
        *_loss_faults(recipe, config), *_gradient_faults(recipe, config),
        *_layer_faults(recipe), *_patience_faults(recipe, config), *optimizer_faults(recipe, config),
        *projection_faults(recipe, config), *_histogram_faults(recipe, config), *sharding_faults(recipe, config),
        *split_row_faults(recipe),
    ]  # fmt: skip


def _regularization_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    section, corpus = recipe.regularization, recipe.corpus
    if section is None:
        return []
    key, faults = "regularization", Faults()
    if (section.kl or section.ewc) and (corpus is None or corpus.replay is None):
        faults.append((f"{key}.{'kl' if section.kl else 'ewc'}", "is measured on replay. Set corpus.replay."))
    if section.kl and recipe.trainer.get("packing_strategy") == "wrapped" and recipe.trainer.get("packing"):
        faults.append((f"{key}.kl", "needs separated documents. Set trainer.packing_strategy: bfd_split."))
    if (section.l2 or section.ewc) and recipe.adapter is not None:
        faults.append((key, "an adapter does not change the base weights. Remove l2 and ewc."))
    if (section.l2 or section.ewc) and recipe.trainer.get("fp16"):
        faults.append((key, "l2 and ewc need unscaled gradients. Set trainer.bf16: true instead of fp16."))
    splits = what_splits(recipe, config)
    if section.needs_base and splits:
        faults.append((key, f"l2, ewc and kl need the base's weights and the gradients, and {splits}"))
    return faults


def _loss_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    smoothing = config.label_smoothing_factor
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
                (key, "regularization.kl is in units of the loss of a token, all weighted equally. Keep one.")
            )
    if techniques.loss_tile is not None and config.loss_type != "nll":
        fault = f"computes the loss nll, found trainer.loss_type: {config.loss_type}. Keep one."
        faults.append(("techniques.loss_tile", fault))
    if chosen["techniques.hard_example_mining"] and chosen["techniques.row_weights"]:
        fault = "with row_weights it is undefined which loss is the highest, the weighted one or not. Keep one."
        faults.append(("techniques.hard_example_mining", fault))
    return faults


def _gradient_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    uses_gradients = {
        "sam": techniques.sam > 0, "freeze_base_steps": techniques.freeze_base_steps is not None,
        "histogram_steps": techniques.histogram_steps is not None,
    }  # fmt: skip
    optim, splits = str(config.optim).lower(), what_splits(recipe, config)
    for name in (name for name, is_on in uses_gradients.items() if is_on):
        if splits:
            faults.append((f"techniques.{name}", f"needs the gradients, and {splits}"))
        if optim.rpartition(".")[2] in _UPDATES_IN_BACKWARD or "layerwise" in optim:
            fault = "this optimizer updates while gradients are computed, before they can be used. Set another optim."
            faults.append((f"techniques.{name}", fault))
    if uses_gradients["sam"] and recipe.model.dtype in ("bfloat16", "float16"):
        fault = f"a step of {techniques.sam:g} uphill rounds away in {recipe.model.dtype} weights. Set model.dtype: float32;"
        faults.append(("techniques.sam", f"{fault} trainer.bf16 or fp16 then speeds up the arithmetic."))
    return faults


def _layer_faults(recipe: TrainRecipe) -> Faults:
    techniques, faults = recipe.techniques, Faults()
    model, section = recipe.model, recipe.regularization
    if techniques.freeze_base_steps is not None:
        if recipe.adapter is not None:
            fault = "an adapter's base is frozen to the end. Remove the line."
            faults.append(("techniques.freeze_base_steps", fault))
        elif not techniques.freeze_base_except and not techniques.reinitialize_last_layers:
            fault = "missing. Name the parameters that train first: [lm_head.*]. Or set techniques.reinitialize_last_layers."
            faults.append(("techniques.freeze_base_except", fault))
    elif techniques.freeze_base_except:
        faults.append(("techniques.freeze_base_steps", "missing. freeze_base_except needs it: the number of updates."))
    if techniques.reinitialize_last_layers:
        key = "techniques.reinitialize_last_layers"
        if recipe.adapter is not None or model.quantization != "none":
            faults.append((key, "beside an adapter they would not train. Remove the line, or train all weights."))
        if model.new is not None:
            faults.append((key, "all weights of a new model are random. Remove the line."))
        if section is not None and (section.needs_base or section.projection):
            fault = "regularization would hold the model to untrained layers. Keep one; layerwise_lr_decay may stay."
            faults.append((key, fault))
    return faults


def _patience_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    if recipe.techniques.patience is None:
        return []
    key, faults = "techniques.patience", Faults()
    if recipe.trainer.get("eval_strategy", "no") == "no":
        fault = "missing. techniques.patience counts evaluations: set eval_strategy: steps with eval_steps, or epoch."
        faults.append(("trainer.eval_strategy", fault))
    has_loss = recipe.corpus is not None and recipe.corpus.has_validation
    if not has_loss and config.metric_for_best_model in (None, "loss", "eval_loss"):
        fault = (
            "without corpus.validation_corpus there is no loss. Set it, or trainer.metric_for_best_model to a probe's."
        )
        faults.append((key, fault))
    return faults


def _histogram_faults(recipe: TrainRecipe, config: SFTConfig) -> Faults:
    if recipe.techniques.histogram_steps is None or set(config.report_to) & set(HISTOGRAM_TRACKERS):
        return []
    trackers = " or ".join(HISTOGRAM_TRACKERS)
    return [("techniques.histogram_steps", f"no tracker that takes them. Set trainer.report_to: {trackers}.")]


def _tracker_faults(trackers: list[str]) -> Faults:
    """Return a fault for each of trainer.report_to that transformers does not know or that is not installed."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    from kinject.train.callbacks import tracker_error

    faults: Faults = []
    for name in trackers:
        if name not in INTEGRATION_TO_CALLBACK:
            faults.append(("trainer.report_to", f"found {name!r}.{suggestion(name, INTEGRATION_TO_CALLBACK)}"))
            continue
        error = tracker_error(INTEGRATION_TO_CALLBACK[name])
        if error:
            fault = f"{name} cannot run here: {error}. Install its package with pip install, or set none."
            faults.append(("trainer.report_to", fault))
    return faults
