"""The fields of `trainer:`, which are those of TRL's SFTConfig, and of its schedules;
`kinject.recipe.adapter_fields` has those of peft.

Names, types and defaults are read from the libraries. Importing TRL or peft takes seconds, so
functions import them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from kinject.recipe.check import Checker, KeyPath, suggestion
from kinject.recipe.shipped import FOLDER, SCHEMA

REFUSED = {
    "output_dir": "is run_dir's. Set run_dir at the top of the recipe.",
    "trust_remote_code": "stays off: kinject runs no code that comes with a model.",
    # Trainer's own uploads hold the run folder with lock, recipe and logs, before weights are
    # checked.
    "hub_strategy": "is fixed: push_to_hub uploads the finished model, once. Remove the line.",
    "hub_always_push": "is fixed: push_to_hub uploads the finished model, once. Remove the line.",
    "hub_token": "is a secret. Set the environment variable HF_TOKEN.",
    "push_to_hub_token": "is a secret. Set the environment variable HF_TOKEN.",
    "jit_mode_eval": "was removed from transformers. Remove the line; set torch_compile: true for "
    "speed.",
    "fp16_opt_level": "was NVIDIA Apex's, which transformers no longer uses. Remove the line; "
    "fp16: true suffices.",
    "dataset_text_field": "is fixed: corpus rows hold text, messages, or prompt and completion.",
    "formatting_func": "cannot be written in a file. Write corpus rows with text, messages, or "
    "prompt and completion.",
    "save_dtype": "is fixed: bfloat16 where the base is stored so, else as it was trained.",
    "model_init_kwargs": "is the model section's. Set model.dtype, model.attention or "
    "model.revision.",
    "parallelism_config": "is a Python object. Describe the devices to accelerate: "
    "docs/distributed.md.",
    "label_names": "is fixed: the rows of a corpus are labelled by kinject.",
    "resume_from_checkpoint": "is the command line's: kinject train RECIPE --resume.",
    "padding_free": "is TRL's collator's. Set packing: true with packing_strategy: bfd_split, "
    "which pads nothing.",
    "eval_packing": "has no effect: validation texts are read as rows of their own. Remove the "
    "line.",
    "shuffle_dataset": "has no effect: the order of rows spreads the texts of a document over an "
    "epoch. Remove the line.",
    "dataset_num_proc": "has no effect: a corpus is tokenised in one process, and once. Remove the "
    "line.",
    "dataset_kwargs": "is for TRL's own preparation of a data set. Remove the line.",
    "length_column_name": "has no effect: kinject knows the length of each row. Remove the line.",
    "do_train": "has no effect: kinject train trains. Remove the line.",
    "do_eval": "has no effect. Set eval_strategy, with probes or a validation corpus.",
    "do_predict": "has no effect: kinject eval asks questions. Remove the line.",
    "truncation_mode": "is fixed: of a text longer than max_length the beginning is read. Remove "
    "the line.",
    "remove_unused_columns": "has no effect: rows have the columns that the loss reads. Remove the "
    "line.",
    "auto_find_batch_size": "would change the batch of a run that is under way. Find it first: "
    "kinject find-lr RECIPE --batch.",
    "ignore_data_skip": "is fixed: a resumed run reads on where it stopped. Remove the line.",
    # --resume began with a new optimizer and schedule, and ended with another model.
    "save_only_model": "is fixed: a run resumes from the optimizer and schedule of its "
    "checkpoints. Remove the line; save_total_limit: 1 keeps one checkpoint.",
    "restore_callback_states_from_checkpoint": "has no effect: checkpoints hold what callbacks "
    "need. Remove the line.",
    "enable_jit_checkpoint": "is fixed: a signal ends a run with a checkpoint. Remove the line.",
    "logging_nan_inf_filter": "is fixed: a loss that is no number is logged as none. Remove the "
    "line.",
    "local_rank": "is the launcher's: accelerate launch sets it. Remove the line.",
    **dict.fromkeys(
        ("eos_token", "pad_token"), "is the tokenizer's. Save it with that token; remove the line."
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), "has no effect while a model trains. Remove the line."
    ),
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "batch_eval_metrics",
            "include_for_metrics",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
        ),
        "has no effect: an evaluation keeps losses alone, and probes have batches of their own. "
        "Remove the line.",
    ),
}
"""Fields that a recipe must not set -> the reason, and the setting to use."""


RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
    "max_seq_length": "max_length",
    "save_safetensors": "",
}
"""Older names of TRL's and transformers' fields -> today's; "" for one without an effect."""
RENAMED_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}
"""Older values of `trainer.optim` -> today's: the same arithmetic in torch."""
NAMES_OF_TRL = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""transformers' names of fields that TRL's SFTConfig has under another one -> TRL's, which kinject
reads."""
RECALL_FIELDS = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "beta",
    "epsilon",
    "num_iterations",
    "scale_rewards",
)
"""Fields of TRL's GRPOConfig that `method: recall` reads beside those of SFTConfig."""


Fields = dict[str, tuple[dataclasses.Field[Any], Any]]
"""Name -> a library's field and its type."""


@functools.cache  # a hundred annotations, for each recipe that trains
def fields_of(kind: type) -> Fields:
    """Return the fields of a library's configuration that can be given."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (field, hints[field.name]) for field in dataclasses.fields(kind) if field.init
    }


def trainer_fields() -> Fields:
    """Return the fields of the trainer section, those that are refused among them."""
    from trl import GRPOConfig, SFTConfig

    recall = fields_of(GRPOConfig)
    return {**fields_of(SFTConfig), **{name: recall[name] for name in RECALL_FIELDS}}


def renamed(key: str) -> str:
    """Return what became of an older name, as the end of a sentence."""
    today = RENAMED[key]
    if not today:
        return "has no effect today; ignored"
    return f"is called {today} today; read as that"


def rename_old_fields(
    trainer: Mapping[str, Any], checker: Checker
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return (`trainer` under today's names, today's name -> name in the recipe, notes for the
    user).

    Reports a refused name, and an old name beside its new one. Of warmup_steps and warmup_ratio the
    first one counts unless it is 0, as transformers documents.
    """
    fields: dict[str, Any] = {}
    written: dict[str, str] = {}
    notes: list[str] = []
    unread = ""
    if {"warmup_steps", "warmup_ratio"} <= trainer.keys():
        used, unread = "warmup_steps", "warmup_ratio"
        if not trainer["warmup_steps"]:
            used, unread = unread, used
        notes.append(
            f"trainer.{unread} is not read: {used} counts. A warmup_steps above 0 overrides "
            "warmup_ratio."
        )
        _check_ratio(
            checker.value(float, trainer["warmup_ratio"], ("trainer", "warmup_ratio")), checker
        )
    for key, value in trainer.items():
        if key in REFUSED:
            checker.report(("trainer", key), REFUSED[key])
            continue
        if key == "save_safetensors" and value is False:
            checker.report(
                ("trainer", key),
                "weights are always safetensors (pickles can run code). Remove the line.",
            )
            continue
        if key == unread:
            continue
        name = RENAMED.get(key, key)
        if name != key:
            notes.append(f"trainer.{key} {renamed(key)}.")
        # Of two names transformers would obey its own, while the plan of a run reads TRL's.
        name = NAMES_OF_TRL.get(name, name)
        # The switch has become one of the values of train_sampling_strategy.
        if key == "group_by_length":
            value = "group_by_length" if value else "random"
        if name in written:
            checker.report(("trainer", key), f"is the same as {written[name]}. Keep one.")
        elif name:
            fields[name], written[name] = value, key
    optim = fields.get("optim")
    if isinstance(optim, str) and optim in RENAMED_OPTIMIZERS:
        fields["optim"] = RENAMED_OPTIMIZERS[optim]
        notes.append(
            f"trainer.optim: {optim} is gone from transformers; read as {fields['optim']}."
        )
    return fields, written, notes


def _check_ratio(ratio: Any, checker: Checker) -> None:
    if isinstance(ratio, (int, float)) and not 0 <= ratio < 1:
        checker.report(
            ("trainer", "warmup_ratio"),
            f"found {ratio}, allowed: 0 up to 1 (1 excluded), a fraction of the steps.",
        )


def misplaced(key: KeyPath) -> str:
    """Return a sentence on the key of `trainer` or `adapter` that a key of another section names,
    "" if it names none.

    The names are those of the shipped schema: importing the libraries takes seconds.
    """
    path = FOLDER / SCHEMA
    # A copied part of a checkout has none.
    if not path.is_file():
        return ""
    schema, name = json.loads(path.read_text("utf-8")), key[-1]
    # Of the recipe's top, as seed; and too common: a generator has a temperature of its own.
    if name in schema["properties"] or name in RECALL_FIELDS or name in ("type", "merge"):
        return ""
    for section in ("trainer", "adapter"):
        names = schema["properties"][section]["properties"].keys() - REFUSED.keys()
        if section != key[0] and name in names:
            return f" It is a key of {section}: {section}.{name}."
    return ""


def hint_at_key(key: KeyPath, allowed: Iterable[str]) -> str:
    """Return a sentence on what an unknown key of `trainer` or `adapter` may mean: a key of the
    other one, else one of the `allowed`."""
    return misplaced(key) or suggestion(key[-1], allowed)


def check_trainer(trainer: Mapping[str, Any], checker: Checker) -> tuple[dict[str, Any], list[str]]:
    """Return (the keyword arguments of TRL's config, notes), after reporting unknown names and
    values of a wrong type.

    Imports trl (several seconds), so only verbs that train call it.
    """
    fields, written, notes = rename_old_fields(trainer, checker)
    known = trainer_fields()
    # With torch's schedules and kinject's own, which SFTConfig's type does not have.
    known["lr_scheduler_type"] = (known["lr_scheduler_type"][0], Literal[tuple(schedule_names())])
    allowed = known.keys() - REFUSED.keys()
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        path = ("trainer", written[name])
        if name not in allowed:
            hint = hint_at_key(path, allowed | RENAMED.keys())
            checker.report(path, f"unknown key.{hint}")
            continue
        checked[name] = checker.value(field_hint(*known[name]), value, path)
        if checker.is_in_bounds(checked[name], RANGES.get(name, {}), path) and name in _EVERY:
            _check_whole(checked[name], path, checker)
    check_schedule(fields, written, checker)
    if checked.get("lr_scheduler_type") == "constant" and checked.get("warmup_steps"):
        # transformers' constant schedule ignores warmup_steps without a warning
        checked["lr_scheduler_type"] = "constant_with_warmup"
        notes.append(
            "trainer.lr_scheduler_type: constant has no warmup; read as constant_with_warmup."
        )
    return checked, notes


_EVERY = ("logging_steps", "eval_steps", "save_steps")


def _check_whole(steps: Any, key: KeyPath, checker: Checker) -> None:
    """Report a number of steps that is neither whole nor a fraction of all steps."""
    if isinstance(steps, float) and steps > 1 and steps != int(steps):
        checker.report(
            key, f"found {steps}, allowed: whole numbers, or a fraction of all steps (less than 1)."
        )


def field_hint(field: dataclasses.Field[Any], hint: Any) -> Any:
    """Return the annotation of a library's field as `Checker.value` reads it, with the words that a
    text may be."""
    plain = plain_hint(hint)
    words = _WORDS.get(field.name) or tuple(field.metadata.get("choices") or ()) or None
    if field.name == "init_lora_weights":
        return bool | Literal[_INITS]
    if words is not None:
        others = [option for option in (get_args(plain) or (plain,)) if option in _PLAIN]
        return functools.reduce(operator.or_, others, Literal[words])
    options = get_args(plain) if get_origin(plain) in (typing.Union, types.UnionType) else ()
    if (
        str in options
        and any(get_origin(option) is dict for option in options)
        and field.name not in _FILES
    ):
        # text is for command lines; YAML has mappings
        return functools.reduce(operator.or_, [option for option in options if option is not str])
    return plain


# Saved as what the whole base lacks: as peft saves them, pissa_niter_N drew another part of the
# base at each load (a loss of 2.66 in training, 3.28 to 3.51 loaded).
_OF_THE_BASE = ("olora", "pissa", *(f"pissa_niter_{n}" for n in range(1, 17)))
_INITS = ("gaussian", "orthogonal", "mica", *_OF_THE_BASE)
_NEEDS_DATA = "needs a pass over data before training. Set true, or pissa"
INITS_REFUSED = {
    "eva": _NEEDS_DATA,
    "corda": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
    "loftq": "rounds the base to 4 bits at each load, by CUDA. Set true, or pissa",
}
"""Those of peft's init_lora_weights that are refused -> the reason."""


def starts_in_the_base(adapter: Mapping[str, Any] | None) -> bool:
    """Return whether an adapter begins as a part of the base, which is taken out of the weights."""
    return adapter is not None and adapter.get("init_lora_weights") in _OF_THE_BASE


_FILES = ("fsdp", "fsdp_config", "deepspeed", "accelerator_config")
"""Fields whose text is a file, or flags."""
_PLAIN = (int, float, bool, types.NoneType)


def plain_hint(hint: Any) -> Any:
    """Return an annotation of SFTConfig as `Checker.value` reads it: an enum becomes its words."""
    if get_origin(hint) is Literal:
        return hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [plain_hint(argument) for argument in arguments]
        if any(
            get_origin(option) is Literal for option in options
        ):  # "SchedulerType | str" means the words
            options = [option for option in options if option is not str]
        return functools.reduce(operator.or_, options)
    if origin is list or hint is list:
        return types.GenericAlias(tuple, (plain_hint(arguments[0]) if arguments else Any, ...))
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return dict[str, Any]
    known = (str, int, float, bool, type(None))
    return hint if hint in known else Any


TORCH_SCHEDULES = {"exponential_decay": "ExponentialLR", "one_cycle": "OneCycleLR"}
"""Schedules of torch.optim.lr_scheduler -> the class there."""
OWN_SCHEDULES: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "noam": {"d_model": (int | None, None)},
    "flat_then_cosine": {"flat_fraction": (float, 0.75), "min_lr_ratio": (float, 0.0)},
    "cosine_with_restarts": {"num_cycles": (int, 1), "min_lr_ratio": (float, 0.0)},
    "step_decay": {
        "step_size": (int | None, None),
        "step_epochs": (float | None, None),
        "gamma": (float, 0.1),
    },
}
"""Schedules of kinject.train.schedules -> keyword argument -> (type, default)."""
ADAPTIVE_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow a metric of the evaluations."""

# OneCycleLR's momentum would replace AdamW's beta1, whatever adam_beta1 is; transformers sets a
# plateau's mode to min for every metric, so the rate would fall while an accuracy rises.
_SET_BY_KINJECT = frozenset({
    "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs", "max_lr",
    "total_steps", "epochs", "steps_per_epoch", "cycle_momentum", "base_momentum", "max_momentum",
    "mode", "verbose",
})  # fmt: skip
"""Arguments that follow from the rest of the recipe, or that change more than the learning rate."""
_SHAPES = Literal["linear", "cosine", "1-sqrt"]
_TYPES: Mapping[str, Any] = {
    "power": float,
    "lr_end": float,
    "min_lr_ratio": float,
    "num_decay_steps": float,
    "warmup_type": _SHAPES,
    "decay_type": _SHAPES,
    "anneal_strategy": Literal["cos", "linear"],
    "threshold_mode": Literal["rel", "abs"],
}
"""Types that the libraries do not annotate, or check late."""
_COUNT: Mapping[str, Any] = {"min": 1, "max": 2**20}
_STEPS: Mapping[str, Any] = {"above": 0, "max": 10**9}
_FROM_0: Mapping[str, Any] = {"min": 0, "max": 10**9}
_UNIT: Mapping[str, Any] = {"min": 0, "below": 1}
_FRACTION: Mapping[str, Any] = {"min": 0, "max": 1}
_SEED: Mapping[str, Any] = {"min": 0, "max": 2**32 - 1}
# Beside the range, max_grad_norm 0 switches Trainer's clipping off, and max_steps -1 leaves the
# number of steps to the epochs.
RANGES: Mapping[str, Mapping[str, Any]] = {
    "per_device_train_batch_size": _COUNT, "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT, "max_length": {"min": 2, "max": 2**22},
    "logging_steps": _STEPS, "eval_steps": _STEPS, "save_steps": _STEPS, "warmup_steps": _FROM_0,
    "num_train_epochs": {"above": 0, "max": 10**6}, "max_steps": {"min": 1, "max": 10**9, "or": -1},
    "learning_rate": {"above": 0, "max": 100},
    "max_grad_norm": {"min": 1e-6, "max": 10**9, "or": 0}, "label_smoothing_factor": _UNIT,
    "seed": _SEED, "data_seed": _SEED, "pad_to_multiple_of": {"min": 1, "max": 2**16},
    "weight_decay": {"min": 0, "max": 1000}, "adam_epsilon": {"above": 0, "max": 1},
    "neftune_noise_alpha": {"min": 0, "max": 10**6},
    "r": {"min": 1, "max": 2**16}, "lora_alpha": _COUNT,
    "lora_dropout": _UNIT, "trainable_token_indices": _FROM_0,
}  # fmt: skip
"""Bounds of the libraries' fields that no library refuses itself, and with which nothing is
learned."""
_WORDS: Mapping[str, tuple[str, ...]] = {
    "loss_type": ("nll", "dft", "chunked_nll"),
    "pad_to_multiple_of": ("auto",),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "debug": ("", "underflow_overflow", "tpu_metrics_debug"),
    "torch_compile_mode": (
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ),
    "task_type": ("CAUSAL_LM",),
}
"""The words of fields that are annotated as text and whose metadata has no choices, or choices that
kinject has not."""
_SCHEDULE_RANGES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("min_lr_rate", "min_lr_ratio", "warmup_lr_rate", "pct_start", "flat_fraction"), _FRACTION
    ),
    **dict.fromkeys(
        ("power", "lr_end", "min_lr", "num_stable_steps", "num_decay_steps", "num_cycles"), _FROM_0
    ),
    **dict.fromkeys(("step_size", "step_epochs", "timescale", "d_model"), _STEPS),
    "gamma": {"above": 0, "max": 1},
    "factor": _UNIT,
}


def schedule_names() -> list[str]:
    """Return every name that `trainer.lr_scheduler_type` may have."""
    from transformers.trainer_utils import SchedulerType

    return list(
        dict.fromkeys(
            [*(member.value for member in SchedulerType), *TORCH_SCHEDULES, *OWN_SCHEDULES]
        )
    )


def schedule_arguments(name: str) -> dict[str, tuple[Any, Any]]:
    """Return what `lr_scheduler_kwargs` may hold for schedule `name`: argument -> (type, default or
    `inspect._empty`)."""
    if name in OWN_SCHEDULES:
        return dict(OWN_SCHEDULES[name])
    source = _source(name)
    # The hints of a class are those of its attributes, not of its arguments.
    hints = typing.get_type_hints(vars(source)["__init__"] if isinstance(source, type) else source)
    arguments = {}
    for key, parameter in inspect.signature(source).parameters.items():
        if key not in _SET_BY_KINJECT:
            arguments[key] = (
                # The libraries annotate few of them: the default shows the type of the others.
                _TYPES.get(key, hints.get(key, type(parameter.default))),
                parameter.default,
            )
    return arguments


def _source(name: str) -> Callable[..., Any]:
    """Return the library's function or class of a schedule."""
    import torch.optim.lr_scheduler as of_torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
    from transformers.trainer_utils import SchedulerType

    if name in TORCH_SCHEDULES:
        return typing.cast("Callable[..., Any]", getattr(of_torch, TORCH_SCHEDULES[name]))
    adaptive = {"reduce_lr_on_plateau": of_torch.ReduceLROnPlateau, "greedy": GreedyLR}
    return adaptive.get(name) or typing.cast(
        "Callable[..., Any]", TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    )


def check_schedule(
    trainer: Mapping[str, Any], written: Mapping[str, str], checker: Checker
) -> None:
    """Report the faults in the schedule of `trainer` (under today's names; `written` maps them to
    those in the recipe)."""
    name = trainer.get("lr_scheduler_type", "linear")
    warmup = trainer.get("warmup_steps", 0)
    if written.get("warmup_steps") == "warmup_ratio":
        _check_ratio(warmup, checker)
    if name not in schedule_names():
        return
    section = ("trainer", "lr_scheduler_kwargs")
    arguments = trainer.get("lr_scheduler_kwargs") or {}
    if not isinstance(arguments, Mapping):
        checker.report(section, f"found {arguments!r}, expected a mapping.")
        return
    allowed = schedule_arguments(name)
    for key, value in arguments.items():
        if key not in allowed:
            fault = suggestion(key, allowed) or " It takes none. Remove the line."
            checker.report((*section, key), f"unknown to lr_scheduler_type: {name}.{fault}")
            continue
        hint = allowed[key][0]
        checked = checker.value(plain_hint(hint), value, (*section, key))
        checker.is_in_bounds(checked, _SCHEDULE_RANGES.get(key, {}), (*section, key))
    for key, (_, default) in allowed.items():
        if default is inspect.Parameter.empty and key not in arguments:
            example = f"lr_scheduler_kwargs: {{{key}: {_EXAMPLES[key]}}}"
            checker.report(
                ("trainer", "lr_scheduler_type"), f"{name} needs {key}. For example {example}."
            )
    _check_combination(name, arguments, trainer, checker)


_EXAMPLES = {"num_decay_steps": "0.2", "gamma": "0.999"}


def _check_combination(
    name: str, arguments: Mapping[str, Any], trainer: Mapping[str, Any], checker: Checker
) -> None:
    """Report arguments that contradict each other or the rest of the section, and that no library
    refuses itself."""
    section = ("trainer", "lr_scheduler_kwargs")
    warmup = trainer.get("warmup_steps", 0)
    sizes = [key for key in ("step_size", "step_epochs") if arguments.get(key) is not None]
    if name == "step_decay" and len(sizes) != 1:
        present = "both" if sizes else "neither"
        fault = f"step_decay needs step_size (updates) or step_epochs (epochs); found {present}."
        example = (
            " For example lr_scheduler_kwargs: {step_epochs: 1, gamma: 0.5}."
            if not sizes
            else " Keep one."
        )
        checker.report(("trainer", "lr_scheduler_type"), fault + example)
    if name == "one_cycle" and "pct_start" in arguments and warmup:
        checker.report((*section, "pct_start"), "is the same as trainer.warmup_steps. Keep one.")
    if name == "noam" and not warmup:
        checker.report(
            ("trainer", "lr_scheduler_type"),
            "noam needs trainer.warmup_steps: its peak is where they end.",
        )
    # transformers drops the warm-up of a plateau without a word, and torch has none.
    if name in ADAPTIVE_SCHEDULES and warmup:
        fix = (
            "Set lr_scheduler_kwargs.warmup (in evaluations)"
            if name == "greedy"
            else "Remove the line, or take another"
        )
        checker.report(
            ("trainer", "lr_scheduler_type"), f"{name} has no trainer.warmup_steps. {fix}."
        )


_NEW_RANGES: Mapping[str, Mapping[str, Any]] = {
    "eps": {"min": 1e-30, "max": 1},
    "epsilon": {"min": 1e-30, "max": 1},
    "dropout": _UNIT,
    "pdrop": _UNIT,
    "initializer_range": {"min": 1e-6, "max": 10},
    # A config of 2**63 layers is built layer by layer, and never ends.
    "num_hidden_layers": {"min": 1, "max": 10_000},
    "hidden_size": {"min": 1, "max": 10**6},
    "vocab_size": {"min": 1, "max": 10**8},
}
"""End of the name of a model's config field -> its bounds. Building the model shows whether its
sizes fit each other."""


def check_new_model(new: Mapping[str, Any], checker: Checker) -> None:
    """Report every number of `model.new` that is out of bounds."""
    for name, value in new.items():
        bounds = next((bounds for end, bounds in _NEW_RANGES.items() if name.endswith(end)), {})
        checker.is_in_bounds(value, bounds, ("model", "new", name))
