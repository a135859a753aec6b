"""The parameters that train: frozen ones, re-initialised layers, a base frozen for the first updates; and a check."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from kinject import models
from kinject.disk import path_exists
from kinject.errors import TrainingError
from kinject.hub import find_source
from kinject.process import machine_memory
from kinject.recipe import TrainRecipe
from kinject.recipe.sections import ModelSection
from kinject.train.config import adapter_config, build
from kinject.train.updates.layers import layer_number


def freeze(model: Any, recipe: TrainRecipe) -> None:
    """Freeze the parameters that match `model.freeze`. Raises `RecipeError` for a pattern without a match."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in recipe.model.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise recipe.error(
                "model.freeze", f"{pattern!r} matches no parameter. Names look like {', '.join(names[:3])}."
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in recipe.model.freeze):
            parameter.requires_grad_(False)


def check_trainable(model: Any, recipe: TrainRecipe) -> list[str]:
    """Return the names that train. Raises `TrainingError` if they are not exactly those that the recipe names.

    Without an adapter these are all but the frozen; with one, its own weights beside every target, and a whole copy of
    every module in `modules_to_save` (embed_tokens and lm_head among them).
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if recipe.adapter is None:
        frozen = recipe.model.freeze
        expected = [n for n, _ in model.named_parameters() if not any(fnmatchcase(n, pattern) for pattern in frozen)]
        different = sorted(set(expected) ^ set(trained))
        if different:
            raise TrainingError(
                f"the parameters that train are not those of the recipe; these differ: {', '.join(different[:5])}."
            )
    else:
        _check_adapter(trained, recipe.adapter)
    if not trained:
        raise TrainingError("no parameter trains. Check model.freeze and the adapter section.")
    return trained


def check_model(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for impossible values of model.new and adapter, before any weight is read.

    The model is built without weights, from model.new or the config.json of a local folder; one on the hub is not fetched for
    this.
    """
    section = recipe.model
    config = _read_config(section)
    fault = models.causal_fault(config) if config is not None else ""
    if fault and section.new is None:
        raise recipe.error("model.path", f"{section.path}/config.json: {fault}")
    if fault:
        raise recipe.error("model.new", fault)
    if section.new is not None:
        fields = {key: value for key, value in section.new.items() if key != "model_type"}
        model_type = section.new["model_type"]
        recipe.raise_any(build(functools.partial(_shape, model_type), fields, "model.new", model_type)[1])
    wants_router = recipe.trainer.get("router_aux_loss_coef") is not None
    wants_layers = recipe.techniques.reinitialize_last_layers > 0
    if config is None or not (recipe.adapter is not None or wants_router or wants_layers or section.freeze):
        return
    try:
        empty = empty_model(config)
    except Exception:  # noqa: BLE001 (loading the folder reports what is wrong with it)
        return
    freeze(empty, recipe)
    if wants_layers:
        _check_last_layers(recipe, config)
    if wants_router and not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        fault = f"is for mixtures of experts, and {config.model_type} is none. Remove the line."
        raise recipe.error("trainer.router_aux_loss_coef", fault)
    if recipe.adapter is not None:
        if section.new is None or "vocab_size" in section.new:  # without it, the tokenizer decides
            _check_tokens(recipe, empty)
        recipe.raise_any(build(functools.partial(_adapt, config), recipe.adapter, "adapter", "peft")[1])


def _read_config(section: ModelSection) -> Any:
    """Return the config of the model to train; None if it is on the hub, or cannot be read (loading it says why)."""
    from transformers import AutoConfig

    try:
        if section.new is not None:
            return _new_config(**section.new)
        if section.path is not None and path_exists(Path(section.path)):
            return AutoConfig.from_pretrained(find_source(section.path, "model"), trust_remote_code=False)
    except Exception:  # noqa: BLE001
        return None
    return None


def empty_model(config: Any) -> Any:
    """Return the model of a transformers config on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _new_config(model_type: str, **fields: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**{"vocab_size": 300, **fields})


def _shape(model_type: str, fields: Mapping[str, Any]) -> None:
    """Build a new model without weights and run it. Raises what transformers makes of impossible fields."""
    model = empty_model(_new_config(model_type, **fields))
    model.config.validate()  # as saving does
    model.generation_config.validate(strict=True)
    n = sum(parameter.numel() for parameter in model.parameters())
    if n * 4 > machine_memory():
        raise ValueError(f"{n:.3g} parameters are more than the memory of this machine holds.")
    try:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=False).logits.sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):  # what that device cannot compute is no fault
            raise


def _adapt(config: Any, fields: Mapping[str, Any]) -> None:
    """Adapt a model without weights. Raises what peft makes of impossible fields."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    drawn = {**fields, "init_lora_weights": True} if isinstance(fields.get("init_lora_weights"), str) else fields
    try:
        model = get_peft_model(empty_model(config), adapter_config(drawn))
        if isinstance(model.get_output_embeddings(), BaseTunerLayer):
            raise ValueError("the trainer computes the loss from lm_head's own weight; it can be in modules_to_save.")
        _check_adapter([name for name, parameter in model.named_parameters() if parameter.requires_grad], fields)
        if fields.get("merge"):
            model.merge_and_unload()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):  # what that device cannot compute is no fault
            raise


def _check_tokens(recipe: TrainRecipe, empty: Any) -> None:
    """Raise `RecipeError` for adapter.trainable_token_indices beyond the vocabulary, which peft takes until it trains."""
    indices = (recipe.adapter or {}).get("trainable_token_indices")
    n = empty.get_input_embeddings().num_embeddings
    for tokens in indices.values() if isinstance(indices, Mapping) else [] if indices is None else [indices]:
        if not isinstance(tokens, list) or any(not 0 <= token < n for token in tokens):
            raise recipe.error(
                "adapter.trainable_token_indices", f"found {tokens!r}, allowed: a list of tokens below {n:,}."
            )


def _check_adapter(trained: Sequence[str], adapter: Mapping[str, Any]) -> None:
    targets = adapter.get("target_modules") or ()
    for module in (*(() if isinstance(targets, str) else targets), *(adapter.get("modules_to_save") or ())):
        if not any(f".{module}." in f".{name}" for name in trained):
            raise TrainingError(f"the adapter asks to train {module}, but none of its weights train. Check its name.")


def reinitialize_last_layers(model: Any, recipe: TrainRecipe) -> list[str]:
    """Draw new weights for the last `techniques.reinitialize_last_layers`, as the architecture does for a new model.

    Re-initialising helps small data sets (arXiv 2006.05987). The weights depend on the recipe's seed alone, so a resumed
    run draws the same. Returns the names of the parameters. Raises `RecipeError` if the model has fewer layers.
    """
    n_last = recipe.techniques.reinitialize_last_layers
    n_layers = model.config.get_text_config().num_hidden_layers
    _check_last_layers(recipe, model.config)
    if not n_last:
        return []
    names = [name for name, _ in model.named_parameters() if _at_least(name, n_layers - n_last)]
    for name in names:
        model.get_parameter(name)._is_hf_initialized = False  # transformers skips weights that it has marked as loaded
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}

    def initialize(module: Any) -> None:
        with models.whole_weights(module):
            model._init_weights(module)

    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(recipe.seed)
        for name, module in model.named_modules():
            if _at_least(f"{name}.", n_layers - n_last) and not _at_least(f"{name.rpartition('.')[0]}.", 0):
                module.apply(initialize)
    return names


def _check_last_layers(recipe: TrainRecipe, config: Any) -> None:
    n_last, n_layers = recipe.techniques.reinitialize_last_layers, config.get_text_config().num_hidden_layers
    if n_last > n_layers:
        fault = f"found {n_last}, but the model has {n_layers} layers. Set at most {n_layers}."
        raise recipe.error("techniques.reinitialize_last_layers", fault)


def _at_least(name: str, first: int) -> bool:
    number = layer_number(name)
    return number is not None and number >= first
