"""The parameters that train: frozen ones, re-initialised layers, a base frozen for the first updates; and a check."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from kinject import models
from kinject.disk import is_file, path_exists
from kinject.errors import Problem, TrainingError
from kinject.hub import find_source
from kinject.process import machine_memory
from kinject.recipe import TrainRecipe
from kinject.recipe.check import suggestion
from kinject.train.config import build, lora_config
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

    The model is built without weights, from model.new or the config.json of a local folder. A new one of few parameters,
    and a layer of one that may be no decoder, are also built whole and read a few tokens. A model on the hub is not
    fetched for this.
    """
    from transformers import AutoConfig

    section, problems = recipe.model, list[Problem]()
    build_config: Callable[[], Any]
    if section.new is not None:
        build_config = functools.partial(_new_config, section.new)
    elif section.path is not None and path_exists(Path(section.path)):
        folder = find_source(section.path, "model")
        if not is_file(Path(folder) / "config.json"):
            return
        build_config = functools.partial(AutoConfig.from_pretrained, folder, trust_remote_code=False)
    else:
        return
    try:
        config = build_config()
    except Exception:  # noqa: BLE001 (of a folder; loading it reports what is wrong with it)
        config = None
    fault = models.causal_fault(config) if config is not None else ""
    if fault and section.new is None:
        raise recipe.error("model.path", f"{section.path}/config.json: {fault}")
    if fault:
        raise recipe.error("model.new", fault)
    problems += _try_new_model(section.new) if section.new is not None else []
    wants_router = recipe.trainer.get("router_aux_loss_coef") is not None
    wants_layers = recipe.techniques.reinitialize_last_layers > 0
    if (recipe.adapter is not None or wants_router or wants_layers or section.freeze) and config and not problems:
        try:
            empty = empty_model(config)
        except Exception:  # noqa: BLE001 (loading the folder reports what is wrong with it)
            return
        freeze(empty, recipe)
        if section.new is None or "vocab_size" in section.new:  # without it, the tokenizer decides
            check_trained_tokens(recipe, empty)
        if wants_layers:
            _check_last_layers(recipe, config)
        if wants_router and not hasattr(config.get_text_config(), "router_aux_loss_coef"):
            fault = f"is for mixtures of experts, and {config.model_type} is none. Remove the line."
            problems.append(Problem("trainer.router_aux_loss_coef", fault))
        problems += _try_adapter(recipe, config) if recipe.adapter is not None else []
    recipe.raise_any(problems)


def empty_model(config: Any) -> Any:
    """Return the model of a transformers config on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _run_empty(model: Any) -> None:
    """Run a model on the meta device forwards and backwards, as far as that device can: only shapes are computed."""
    try:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=False).logits.sum().backward()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):  # what that device cannot compute is no fault
            raise


def _new_config(fields: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    options = {key: value for key, value in fields.items() if key != "model_type"}
    return CONFIG_MAPPING[fields["model_type"]](**{"vocab_size": 300, **options})


def _try_new_model(new: Mapping[str, Any]) -> list[Problem]:
    from transformers import AutoModelForCausalLM

    def shape(fields: Mapping[str, Any]) -> int:
        model = empty_model(_new_config({"model_type": new["model_type"], **fields}))
        model.config.validate()  # as saving does
        model.generation_config.validate(strict=True)
        n = int(sum(parameter.numel() for parameter in model.parameters()))
        if n * 4 > machine_memory():
            raise ValueError(f"{n:.3g} parameters are more than the memory of this machine holds.")
        _run_empty(model)
        return n

    def values(fields: Mapping[str, Any]) -> None:
        if shape(fields) > _FEW_PARAMETERS:
            raise ValueError(not_finite)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_new_config({"model_type": new["model_type"], **fields}))
            window = models.window_of(model.config) or _PROBED
            ids = torch.arange(4).repeat(_PROBED // 4)[: max(4, window)]
            logits = model.train()(input_ids=ids[None], use_cache=False).logits
        if not bool(logits.isfinite().all()):
            raise ValueError(not_finite)
        if models.reads_later_tokens(model):
            raise ValueError("the model reads later tokens, so it is no causal language model.")

    not_finite = "the new model's first output is not finite."
    fields = {key: value for key, value in new.items() if key != "model_type"}
    n_parameters, problems = build(shape, fields, "model.new", new["model_type"])
    if problems or (n_parameters or 0) > _FEW_PARAMETERS:
        return problems
    return build(values, fields, "model.new", new["model_type"])[1]


def _try_adapter(recipe: TrainRecipe, config: Any) -> list[Problem]:
    """Return the problems of the adapter section on the model of a transformers `config`, tried without weights."""
    from peft import get_peft_model, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapter = recipe.adapter or {}
    problems = list(_unknown_modules(adapter, empty_model(config)))
    if problems:
        return problems

    def adapt(fields: Mapping[str, Any]) -> None:
        drawn = {**fields, "init_lora_weights": True} if isinstance(fields.get("init_lora_weights"), str) else fields
        model = get_peft_model(empty_model(config), lora_config(drawn))
        if isinstance(model.get_output_embeddings(), BaseTunerLayer):
            raise ValueError("the trainer computes the loss from lm_head's own weight; it can be in modules_to_save.")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter trains.")
        _check_adapter([name for name, parameter in model.named_parameters() if parameter.requires_grad], fields)
        if fields.keys() - _COMMON:
            _run_empty(model)

    def initialise(fields: Mapping[str, Any]) -> None:
        rank = min(int(fields.get("r", 8)), 64)
        made = {key: fields[key] for key in ("init_lora_weights", "loftq_config", "use_dora") if key in fields}
        layer = torch.nn.Sequential(torch.nn.Linear(2 * rank, 2 * rank))
        inject_adapter_in_model(lora_config({**made, "r": rank, "target_modules": ["0"]}), layer)

    tried = [adapt, *([initialise] if isinstance(adapter.get("init_lora_weights"), str) else [])]
    return [problem for attempt in tried for problem in build(attempt, adapter, "adapter", "peft")[1]]


_FEW_PARAMETERS = 20_000_000
_PROBED = 64
"""Tokens that a new model reads: in rows of less than 16, torch's attention on the CPU writes 0 for scores that are NaN."""
_COMMON = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "bias", "use_rslora", "use_dora", "merge",
    "init_lora_weights", "task_type", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
})  # fmt: skip
"""Keys of an adapter that need no forward pass to be tried."""


def _unknown_modules(adapter: Mapping[str, Any], model: Any) -> Iterator[Problem]:
    """Yield the problems of the names of modules and patterns in an adapter section."""
    names = [name for name, _ in model.named_modules() if name]
    ends = sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    )
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        modules = adapter.get(key)
        if isinstance(modules, str) and not (key == "target_modules" and modules.lower() == "all-linear"):
            try:
                matches = any(re.fullmatch(modules, name) for name in names)
            except re.error as error:
                yield Problem(f"adapter.{key}", f"{modules!r:.80} is no pattern (a regular expression): {error}.")
                continue
            if not matches:
                fault = f"{modules!r:.80} matches no module.{suggestion(modules, ends)} A text is a pattern for whole names."
                yield Problem(f"adapter.{key}", fault)
        elif not isinstance(modules, str):
            for name in modules or ():
                if not any(other == name or other.endswith(f".{name}") for other in names):
                    yield Problem(f"adapter.{key}", f"{name!r:.80} is no module of this model.{suggestion(name, ends)}")
    if adapter.get("target_modules") in ((), []) and not adapter.get("target_parameters"):
        yield Problem("adapter.target_modules", f"is empty; give at least one.{suggestion('', ends)}")


def check_trained_tokens(recipe: TrainRecipe, model: Any) -> None:
    """Raise `RecipeError` if adapter.trainable_token_indices names a token that has no row in its embedding."""
    token_indices = (recipe.adapter or {}).get("trainable_token_indices")
    for name, indices in (token_indices if isinstance(token_indices, Mapping) else {"": token_indices or ()}).items():
        layers = [layer for path, layer in model.named_modules() if f".{path}".endswith(f".{name}")] if name else ()
        for layer in layers or (model.get_input_embeddings(),):
            n_rows = models.shape_of(layer.weight)[0] if hasattr(layer, "weight") else 0
            ids = indices if isinstance(indices, list | tuple) else ()  # peft refuses the rest
            beyond = [index for index in ids if isinstance(index, int) and index >= n_rows > 0]
            if beyond:
                fault = f"found {beyond[0]}, allowed: 0 to {n_rows - 1:,}, the ids of tokens that have an embedding."
                raise recipe.error("adapter.trainable_token_indices", fault)


def _check_adapter(trained: Sequence[str], adapter: Any) -> None:
    targets = adapter.get("target_modules")
    expected = [(name, "lora_") for name in targets or ()] if isinstance(targets, list | tuple) else []
    expected += [(name, "modules_to_save") for name in adapter.get("modules_to_save") or ()]
    for module, mark in expected:
        if not any(f".{module}." in f".{name}" and mark in name for name in trained):
            raise TrainingError(f"the adapter asks to train {module}, but none of its weights train. Check its name.")
    marks = ("lora_", "modules_to_save", "trainable_tokens")
    others = [name for name in trained if not any(mark in name for mark in marks)]
    if others and adapter.get("bias", "none") == "none":
        raise TrainingError(f"these train although they are not in the adapter: {', '.join(others[:5])}.")


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
