"""The recipe's trainer and adapter sections to TRL's and peft's own configurations, before any model loads."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from kinject.errors import Fault, InputError, RecipeError
from kinject.models import check_config, choose_device, has_fast_bf16
from kinject.recipe import TrainRecipe
from kinject.recipe.check import suggestion
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, OWN_SCHEDULES, TORCH_SCHEDULES

if TYPE_CHECKING:
    from trl import SFTConfig


def build_config(recipe: TrainRecipe) -> SFTConfig:
    """Return SFTConfig with the recipe's own values, less those that say how rows become tokens: `kinject.corpus` does that.

    Where the recipe names neither bf16 nor fp16, bf16 is on exactly where the hardware multiplies it. Raises
    `RecipeError` with everything that SFTConfig, the model section or the adapter section refuse.
    """
    from trl import SFTConfig

    from kinject.train.anchor import check_anchor
    from kinject.train.techniques import check_techniques

    faults = [Fault(recipe.where(key), key, what) for key, what in _faults(recipe)]
    if faults:
        raise RecipeError(faults)
    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    values: dict[str, Any] = {
        "seed": recipe.seed, "report_to": "none", "eval_on_start": recipe.probes is not None,
        "disable_tqdm": True, "logging_nan_inf_filter": True, **recipe.trainer,
        "output_dir": str(recipe.run_dir), "packing": False, "padding_free": False, "use_cpu": device == "cpu",
        "dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": False, "completion_only_loss": None,
        "chat_template_path": None,
    }  # fmt: skip
    if isinstance(values.get("report_to"), tuple):
        values["report_to"] = list(values["report_to"])
    if not values.get("fp16") and values.get("bf16") is None:
        values["bf16"] = has_fast_bf16(device)
    schedule = values.get("lr_scheduler_type")
    if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
        values["lr_scheduler_type"] = "linear"  # SFTConfig knows transformers' names alone; it carries the rest
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            config = SFTConfig(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise recipe.error("trainer", f"SFTConfig refuses it: {' '.join(str(error).split())}") from error
    if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
        config.lr_scheduler_type = schedule
    after = [*check_anchor(recipe, config), *check_techniques(recipe, config), *_tracker_faults(config.report_to)]
    faults = [Fault(recipe.where(key), key, what) for key, what in after]
    if faults:
        raise RecipeError(faults)
    return config


def trainer_field(recipe: TrainRecipe, name: str) -> Any:
    """Return what the recipe's trainer section sets `name` to, else SFTConfig's default. Raises `KeyError` for no such field."""
    import dataclasses

    from trl import SFTConfig

    if name in recipe.trainer:
        return recipe.trainer[name]
    field = {field.name: field for field in dataclasses.fields(SFTConfig)}[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _faults(recipe: TrainRecipe) -> list[tuple[str, str]]:
    """Return (key, fault) for what only shows when sections are seen together."""
    from kinject.train.eight_bit import embedding_bits_fault

    model, trainer = recipe.model, recipe.trainer
    faults: list[tuple[str, str]] = []
    if (model.path is None) == (model.new is None):
        faults.append(("model", "give either path (a model to load) or new (config of a model with random weights)."))
    if model.new is not None:
        faults += [(f"model.new.{key}", what) for key, what in check_config(model.new)]
        if model.tokenizer is None:
            faults.append(
                ("model.tokenizer", "missing. A new model needs a tokenizer: a folder, or vocab_size to train one.")
            )
    elif model.tokenizer is not None:
        faults.append(("model.tokenizer", "a loaded model brings its own tokenizer. Remove the line."))
    if model.quantization != "none" and recipe.adapter is None:
        faults.append(
            ("model.quantization", "quantised weights do not train. Add an adapter section, or remove the line.")
        )
    if trainer.get("packing") and trainer.get("max_length", 1024) is None:
        faults.append(("trainer.max_length", "packing needs a block length."))
    if what := embedding_bits_fault(trainer):
        faults.append(("trainer.optim_args", what))
    faults += _evaluation_faults(recipe)
    if recipe.corpus is not None:
        if "replay" in (recipe.corpus.mix or {}):
            faults.append(("corpus.mix.replay", "stands beside corpus.mix. Move it up to corpus.replay, or rename it."))
        total = sum(part.fraction for part in recipe.corpus.parts().values())
        if total > 0.95:
            what = f"the shares of replay and mix come to {total:g}, allowed: up to 0.95. The corpus has the rest."
            faults.append(("corpus", what))
    if recipe.adapter is not None and model.freeze:
        faults.append(("model.freeze", "an adapter freezes the base by itself. Remove the line."))
    if recipe.adapter is not None and recipe.adapter.get("merge") and model.quantization != "none":
        faults.append(("adapter.merge", "folding into quantised weights loses precision. Use kinject merge later."))
    return faults


def _tracker_faults(trackers: list[str]) -> list[tuple[str, str]]:
    """Return a fault for each of trainer.report_to that transformers does not know or that is not installed."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    faults = []
    for name in trackers:
        if name not in INTEGRATION_TO_CALLBACK:
            faults.append(("trainer.report_to", f"found {name!r}.{suggestion(name, INTEGRATION_TO_CALLBACK)}"))
            continue
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            what = f"{name} is not installed ({' '.join(str(error).split())}) Install it with pip install, or set none."
            faults.append(("trainer.report_to", what))
    return faults


def _evaluation_faults(recipe: TrainRecipe) -> list[tuple[str, str]]:
    trainer, probes = recipe.trainer, recipe.probes
    held_out = recipe.corpus.validation_corpus is not None
    evaluates = trainer.get("eval_strategy", "no") != "no"
    faults: list[tuple[str, str]] = []
    if evaluates and not held_out and probes is None:
        what = "nothing to evaluate on. Set corpus.validation_corpus to a corpus (JSONL), or add a probes section with questions."
        faults.append(("trainer.eval_strategy", what))
    sets = probes.sets() if probes is not None else {}
    schedule, metric = trainer.get("lr_scheduler_type"), trainer.get("metric_for_best_model")
    if schedule in ADAPTIVE_SCHEDULES and not evaluates:
        what = f"{schedule} follows a metric of the evaluations. Set trainer.eval_strategy with eval_steps, or epoch."
        faults.append(("trainer.lr_scheduler_type", what))
    elif schedule in ADAPTIVE_SCHEDULES and metric is None and not held_out and sets:
        what = (
            f"{schedule} follows trainer.metric_for_best_model. Without corpus.validation_corpus there is no loss; name "
            "another."
        )
        faults.append(("trainer.lr_scheduler_type", what))
    if probes is not None:
        if not evaluates:
            what = "missing. It says when the probes are asked: eval_strategy: steps with eval_steps, or epoch."
            faults.append(("trainer.eval_strategy", what))
        if probes.patience is not None and trainer.get("metric_for_best_model") is None:
            what = f"needs trainer.metric_for_best_model, for example {next(iter(sets))}_accuracy."
            faults.append(("probes.patience", what))
        if probes.max_forgetting is not None and all(item.role != "retention" for item in sets.values()):
            faults.append(("probes.max_forgetting", "no question set has role: retention. Give one that role."))
    known = [*(["loss"] if held_out else []), *(f"{name}_accuracy" for name in sets), *(["accuracy"] if sets else [])]
    if metric is not None and evaluates and known and str(metric).removeprefix("eval_") not in known:
        faults.append(("trainer.metric_for_best_model", f"found {metric!r}.{suggestion(metric, known)}"))
    if trainer.get("load_best_model_at_end") and metric is None and not held_out and sets:
        what = f"missing. Without corpus.validation_corpus there is no loss to choose by. Allowed: {', '.join(known)}."
        faults.append(("trainer.metric_for_best_model", what))
    return faults


def peft_config(recipe: TrainRecipe) -> Any:
    """Return peft's LoraConfig of the adapter section, or None without one. Raises `InputError` when peft refuses it."""
    if recipe.adapter is None:
        return None
    from peft import LoraConfig

    try:
        asked = {key: value for key, value in recipe.adapter.items() if key != "merge"}
        return LoraConfig(**{"task_type": "CAUSAL_LM", **asked})
    except (ValueError, TypeError) as error:
        raise InputError(f"{recipe.where('adapter')}: adapter: peft refuses it: {error}") from error
