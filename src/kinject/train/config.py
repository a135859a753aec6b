"""The recipe's trainer and adapter sections as TRL's and peft's own configurations, checked before
any model loads."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kinject import models
from kinject.errors import InputError, Problem
from kinject.hub import upload_fault
from kinject.process import context_parallel_size, is_fsdp_launch, is_launched, tensor_parallel_size
from kinject.recipe import ModelSection, RegularizationSection, TrainRecipe
from kinject.recipe.adapter_fields import ADAPTER_KEYS, adapter_types
from kinject.recipe.check import suggestion
from kinject.recipe.conflicts import find_problems
from kinject.recipe.launch import Launch
from kinject.recipe.library_fields import (
    ADAPTIVE_SCHEDULES,
    OWN_SCHEDULES,
    TORCH_SCHEDULES,
)
from kinject.recipe.train_conflicts import TrainCheck

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from trl import SFTConfig

_Made = TypeVar("_Made")
ConfigMaker: TypeAlias = "Callable[[Mapping[str, Any]], SFTConfig]"
_NEED_MODEL = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
}
"""Optimizers that choose weights by the names of a model's modules -> their package."""


def _sft_config(values: Mapping[str, Any]) -> SFTConfig:
    from trl import SFTConfig

    return SFTConfig(**values)


def make_configs(
    recipe: TrainRecipe,
    checks: Iterable[TrainCheck] = (),
    make_config: ConfigMaker = _sft_config,
) -> tuple[SFTConfig, PeftConfig | None]:
    """Return SFTConfig, without the fields of tokenising and packing, which kinject does itself,
    and peft's config or None.

    `make_config` is that of the recipe's method (`kinject.train.methods`).

    If the recipe names neither bf16 nor fp16, the device chooses
    (`kinject.models.choose_precision`). Raises `RecipeError` with every problem that shows without
    a model: of `find_problems`, of `checks`, and of the libraries.
    """
    problems: list[Problem] = []
    try:
        device = models.choose_device(recipe.device)
    except InputError as error:
        device = "cpu"
        problems.append(Problem("model.device", str(error).removeprefix("model.device: ")))

    def make(trainer: Mapping[str, Any]) -> SFTConfig:
        config = _trainer_config(recipe, trainer, device, make_config)
        _rehearse(config, str(recipe.trainer.get("optim", "")))
        return config

    config, refusals = build(make, recipe.trainer, "trainer", "TRL")
    adapter = None
    if recipe.adapter is not None:
        adapter, more = build(adapter_config, recipe.adapter, "adapter", "peft")
        refusals += more
    if adapter is not None:
        # TRL leaves it out, and the adapter would be loaded on the newest revision.
        adapter.revision = recipe.model.revision
    launch = _launch(recipe.model, recipe.trainer, config, device)
    problems += find_problems("train", recipe, launch)
    for check in checks:
        problems += check(recipe, launch)
    problems += _about_trackers(config, wants_all_trackers(recipe))
    if recipe.model.new is not None:
        for key, message in models.check_config(recipe.model.new):
            problems.append(Problem(f"model.new.{key}", message))
    # A conflict says more than what a library makes of it.
    known = {problem.key for problem in problems}
    problems += [problem for problem in refusals if problem.key not in known]
    recipe.raise_any(problems)
    assert config is not None
    return config, adapter


def _trainer_config(
    recipe: TrainRecipe, trainer: Mapping[str, Any], device: str, make_config: ConfigMaker
) -> SFTConfig:
    """Return TRL's config of the keys of a trainer section."""
    values: dict[str, Any] = {
        "seed": recipe.seed,
        "report_to": "none",
        # What is forgotten is counted from the accuracy before the first step.
        "eval_on_start": recipe.probes is not None,
        # callbacks.Screen draws the one bar.
        "disable_tqdm": True,
        # With the filter Trainer logs a loss of NaN as 0.
        "logging_nan_inf_filter": False,
        **trainer,
        "output_dir": str(recipe.run_dir),
        "use_cpu": device == "cpu",
        # kinject uploads model/ itself; Trainer would upload recipe, paths and logs, too.
        "hub_strategy": "end",
        # Rows are packed and labelled by kinject already.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "packing": False,
        "padding_free": False,
        "assistant_only_loss": False,
        "completion_only_loss": None,
        "chat_template_path": None,
    }
    # TrainingArguments would take a tuple, which the lists of a recipe are, for one name.
    if isinstance(values["report_to"], tuple):
        values["report_to"] = list(values["report_to"])
    if not values.get("fp16") and values.get("bf16") is None:
        values.update(_precision(recipe.regularization, device))
    schedule = values.get("lr_scheduler_type")
    if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
        values["lr_scheduler_type"] = "linear"  # SFTConfig accepts transformers' names only
    config = make_config(values)
    if schedule in (*TORCH_SCHEDULES, *OWN_SCHEDULES):
        config.lr_scheduler_type = schedule
    if config.n_gpu > 1:
        # Without a launcher transformers would spread batches over all GPUs by DataParallel,
        # which TRL's trainers do not survive (huggingface/trl#6836): one process is one device.
        config._n_gpu = 1
    return config


def _precision(section: RegularizationSection | None, device: str) -> dict[str, bool]:
    """Return bf16 or fp16 for a recipe that names neither; none where l2 would need unscaled
    gradients."""
    precision = models.choose_precision(device)
    if precision == "fp16" and section is not None and section.l2:
        precision = "no"
    return {"bf16": precision == "bf16", "fp16": precision == "fp16"}


def adapter_config(adapter: Mapping[str, Any]) -> PeftConfig:
    """Return peft's config of the keys of an adapter section, of the class that `type` names
    (LoraConfig)."""
    fields: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    for key, value in adapter.items():
        if key not in ADAPTER_KEYS:
            # The lists of a recipe are tuples.
            fields[key] = list(value) if isinstance(value, tuple) else value
    return adapter_types()[adapter.get("type", "lora")](**fields)


def build(
    make: Callable[[Mapping[str, Any]], _Made],
    fields: Mapping[str, Any],
    section: str,
    library: str,
) -> tuple[_Made | None, list[Problem]]:
    """Return what `make` makes of `fields`, the keys of `section`, or None and the library's reason
    at the keys at fault.

    Those are the keys without which it does not fail, or fails otherwise (a second key is at fault,
    too); the whole section if no single key is. `make` calls nothing but the library.
    """
    made, reason = _attempt(make, fields)
    if not reason:
        return made, []
    message = f"{library} refuses it: {reason.rstrip('.')}."
    cured, changed = [], []
    for name in fields:
        others = dict(fields)
        del others[name]
        _, reason_without = _attempt(make, others)
        if not reason_without:
            cured.append(name)
        elif reason_without != reason:
            changed.append(name)
    problems = [Problem(f"{section}.{name}", message) for name in cured or changed]
    return None, problems or [Problem(section, message)]


def _attempt(
    make: Callable[[Mapping[str, Any]], _Made], fields: Mapping[str, Any]
) -> tuple[_Made | None, str]:
    """Return what `make` makes, or None and the message of the library's error, in one line."""
    try:
        with warnings.catch_warnings():
            # Of a refused section there is an attempt for each key, and each would warn again.
            warnings.simplefilter("ignore")
            return make(fields), ""
    except Exception as error:  # noqa: BLE001 (libraries raise anything on unchecked values)
        return None, " ".join(str(error).split())[:300] or type(error).__name__


def _rehearse(config: SFTConfig, optim: str) -> None:
    """Make optimizer, schedule, loader and checkpointing for one weight: what they refuse would
    show after the model."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import Trainer

    from kinject.train.schedules import Schedule

    layer = torch.nn.Linear(2, 2, bias=False)
    if not _needs_model(optim):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config, layer)
        own = [{"params": [layer.weight], "weight_decay": config.weight_decay}]
        kind(options.pop("params", own), **options)
    name = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    schedule = Schedule(
        name,
        config.lr_scheduler_kwargs or {},
        config.warmup_steps,
        64,
        bool(config.greater_is_better),
    )
    sgd = torch.optim.SGD([layer.weight], lr=config.learning_rate)
    # The steps of epochs are not known yet, and with too few a good warm-up would be refused.
    scheduler = schedule.make_scheduler(sgd, max(config.max_steps, 10**6))
    scheduler.optimizer.step()
    if name in ADAPTIVE_SCHEDULES:
        scheduler.step(0.5)
    else:
        scheduler.step()
    rows: Any = [0]
    DataLoader(
        rows,
        num_workers=config.dataloader_num_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
        persistent_workers=config.dataloader_persistent_workers,
        in_order=config.dataloader_in_order,
        multiprocessing_context=config.dataloader_multiprocessing_context,
    )
    if config.gradient_checkpointing:
        arguments = {"use_reentrant": False, **(config.gradient_checkpointing_kwargs or {})}
        # TRL's own, and two of transformers; the others are torch's.
        for name in ("selective", "every_n_layers", "offload"):
            arguments.pop(name, None)
        torch.utils.checkpoint.checkpoint(
            torch.square, torch.ones(1, requires_grad=True), **arguments
        )


def _needs_model(optim: str) -> bool:
    """Return whether an optimizer is installed that chooses weights by the names of modules, which
    one layer alone does not have."""
    modules = [module for name, module in _NEED_MODEL.items() if optim.startswith(name)]
    return any(find_spec(module) is not None for module in modules)


def _launch(
    section: ModelSection, trainer: Mapping[str, Any], config: SFTConfig | None, device: str
) -> Launch:
    """Return what `find_problems` reads beside the recipe; of a refused `config`, nothing of
    the launcher."""
    from trl import SFTConfig

    lacks_attention = ""
    if section.attention != "auto":
        reason = models.attention_fault(section.attention, device, _arithmetic(section, config))
        if reason:
            lacks_attention = f"{section.attention} {reason}"
    defaults = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    launch = Launch(
        trainer={**defaults, **trainer},
        device=device,
        emulates_bf16=models.emulated_bf16(device),
        lacks_attention=lacks_attention,
        lacks_compiler=device == "cpu" and _lacks_compiler(trainer),
        fp16=bool(trainer.get("fp16")),
        splits_rows=context_parallel_size() > 1,
        splits_matrices=max(context_parallel_size(), tensor_parallel_size()) > 1,
        is_launched=is_launched(),
        cannot_upload=upload_fault() if trainer.get("push_to_hub") else "",
    )
    if config is None:
        return launch
    sharding = models.read_sharding(config.fsdp_config if config.fsdp else None, bf16=False)
    zero = getattr(config.deepspeed_plugin, "zero_stage", 0)
    return dataclasses.replace(
        launch,
        fp16=config.mixed_precision == "fp16",
        splits=what_splits(section.quantization, config),
        is_sharded=is_sharded(config),
        in_parts=sharding is not None or zero == 3,
        has_deepspeed=config.deepspeed_plugin is not None,
    )


def _arithmetic(section: ModelSection, config: SFTConfig | None) -> torch.dtype | None:
    """Return float32 where a training computes in it; None for 16 bits, and where it is not
    known."""
    import torch

    if config is None or config.deepspeed_plugin is not None or config.mixed_precision != "no":
        return None
    # `auto` trains float32, and of quantised weights what the GPU multiplies fastest.
    is_whole = section.quantization == "none" and section.dtype == "auto"
    return torch.float32 if is_whole or section.dtype == "float32" else None


def _lacks_compiler(trainer: Mapping[str, Any]) -> bool:
    """Return whether torch is to compile with inductor, its default, and finds no C++ compiler."""
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    is_compiled = any(trainer.get(key) for key in keys)
    if not is_compiled or trainer.get("torch_compile_backend") not in (None, "inductor"):
        return False
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    # On Windows torch raises it itself, elsewhere a kind of its own.
    except RuntimeError:
        return True
    return False


def what_splits(quantization: str, config: SFTConfig) -> str:
    """Return the reason why kinject has no access to weights and gradients in this launch, "" if it
    has.

    DeepSpeed's engine keeps them, and so does accelerate for a model that it shards. `accelerate
    launch` shows in the environment and in the plugin, not in the fields of the config.
    """
    if config.deepspeed_plugin is not None:
        return "DeepSpeed keeps them to itself. Use DDP, or FSDP2: recipes/distributed/fsdp2.yaml."
    if not (config.fsdp or is_fsdp_launch()):
        return ""
    # transformers shards while it loads, so that each process has its parts as DTensors.
    if quantization == "none" and models.read_sharding(config.fsdp_config, bf16=False) is not None:
        return ""
    return (
        "accelerate shards them after the base is read (quantized, offloaded or in context "
        "parallel). Use DDP."
    )


def is_sharded(config: SFTConfig) -> bool:
    """Return whether each process of this launch holds only a part of the weights (FSDP,
    ZeRO-3)."""
    is_fsdp = bool(config.fsdp) or is_fsdp_launch()
    return is_fsdp or getattr(config.deepspeed_plugin, "zero_stage", 0) == 3


def wants_all_trackers(recipe: TrainRecipe) -> bool:
    """Return whether `report_to: all` asks for every tracker that is installed and starts."""
    return recipe.trainer.get("report_to") in ("all", ("all",))


def _about_trackers(config: SFTConfig | None, wants_all: bool) -> list[Problem]:
    """Return a problem for each of trainer.report_to that transformers does not know or that is not
    installed; if `wants_all`, leave those out of `config` instead."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    from kinject.train.callbacks import tracker_error

    if config is None:
        return []
    if wants_all:
        config.report_to = [
            name for name in config.report_to if not tracker_error(INTEGRATION_TO_CALLBACK[name])
        ]
        return []
    messages = []
    for name in config.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            messages.append(f"found {name!r}.{suggestion(name, INTEGRATION_TO_CALLBACK)}")
            continue
        reason = tracker_error(INTEGRATION_TO_CALLBACK[name])
        if reason:
            messages.append(
                f"{name} cannot run here: {reason}. Install its package with pip install, or set "
                "none."
            )
    return [Problem("trainer.report_to", message) for message in messages]


def trainer_field(trainer: Mapping[str, Any], name: str) -> Any:
    """Return `name` of a trainer section, else SFTConfig's default. Raises `KeyError` for no such
    field."""
    from trl import SFTConfig

    if name in trainer:
        return trainer[name]
    field = {field.name: field for field in dataclasses.fields(SFTConfig)}[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@contextlib.contextmanager
def strategies_off(args: SFTConfig, *, evaluates: bool, saves: bool) -> Iterator[None]:
    """Let Trainer be made from `args` without evaluations or checkpoints where it would refuse
    these.

    It wants a dataset for evaluations, which probes do not need, and refuses to save a model that
    transformers has sharded, which `CheckpointMixin` saves.
    """
    strategies = args.eval_strategy, args.save_strategy
    if not evaluates:
        args.eval_strategy = "no"
    if not saves:
        args.save_strategy = "no"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    args.eval_strategy, args.save_strategy = strategies
