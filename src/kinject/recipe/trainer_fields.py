"""The recipe's `trainer:` section against TRL's SFTConfig: names, types, and names that older guides use."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from kinject.recipe.check import Checker, suggestion
from kinject.recipe.schedule_fields import check_schedule, schedule_names

REFUSED = {
    "output_dir": "is run_dir's. Set run_dir at the top of the recipe.",
    "trust_remote_code": "stays off: kinject runs no code that comes with a model.",
    "hub_token": "is a secret. Set the environment variable HF_TOKEN.",
    "push_to_hub_token": "is a secret. Set the environment variable HF_TOKEN.",
    "jit_mode_eval": "is gone from transformers. Remove the line; torch_compile: true is what speeds up a model today.",
    "fp16_opt_level": "was NVIDIA Apex's, which transformers no longer uses. Remove the line; fp16: true suffices.",
    "dataset_text_field": "is fixed: corpus rows hold text, messages, or prompt and completion.",
    "formatting_func": "cannot stand in a file. Write corpus rows with text, messages, or prompt and completion.",
    "model_init_kwargs": "is the model section's. Set model.dtype, model.attention or model.revision.",
    "resume_from_checkpoint": "is the command line's: kinject train RECIPE --resume.",
}
"""Fields that a recipe must not set, with the reason and what to use."""


def _same(new: str) -> Callable[[Any], tuple[dict[str, Any], str]]:
    return lambda value: ({new: value}, f"is called {new} today; read as that")


def _group_by_length(value: Any) -> tuple[dict[str, Any], str]:
    strategy = "group_by_length" if value else "random"
    return {"train_sampling_strategy": strategy}, f"is train_sampling_strategy: {strategy} today; read as that"


RENAMED: dict[str, Callable[[Any], tuple[dict[str, Any], str]]] = {
    "evaluation_strategy": _same("eval_strategy"),
    "warmup_ratio": _same("warmup_steps"),
    "group_by_length": _group_by_length,
    "max_seq_length": _same("max_length"),
    "no_cuda": _same("use_cpu"),
    "use_mps_device": lambda value: ({}, "has no effect today: Apple's GPU is found by itself; ignored"),
    "per_gpu_train_batch_size": _same("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _same("per_device_eval_batch_size"),
    "save_safetensors": lambda value: ({}, "has no effect today: weights are always safetensors; ignored"),
}
"""Older names -> (today's fields, what to say about it)."""


def modernise(trainer: Mapping[str, Any], checker: Checker) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return (`trainer` under today's names, today's name -> name in the recipe, what to tell the user).

    Reports a name that is refused, or stands beside its own successor.
    """
    fields: dict[str, Any] = {}
    written: dict[str, str] = {}
    notes: list[str] = []
    for key, value in trainer.items():
        if key in REFUSED:
            checker.report(("trainer", key), REFUSED[key])
            continue
        if key == "save_safetensors" and value is False:
            checker.report(("trainer", key), "weights are always safetensors (pickles can run code). Remove the line.")
            continue
        if key in RENAMED:
            replacement, note = RENAMED[key](value)
            notes.append(f"trainer.{key} {note}.")
        else:
            replacement = {key: value}
        for name, item in replacement.items():
            if name in written:
                checker.report(("trainer", key), f"says the same as {written[name]}. Keep one.")
                continue
            fields[name], written[name] = item, key
    return fields, written, notes


def check_trainer(trainer: Mapping[str, Any], checker: Checker) -> tuple[dict[str, Any], list[str]]:
    """Return (SFTConfig's keyword arguments, notes), reporting every unknown name and every value of a wrong type.

    Imports trl (several seconds), so it runs only for the verb that trains.
    """
    from trl import SFTConfig

    fields, written, notes = modernise(trainer, checker)
    hints = typing.get_type_hints(SFTConfig)
    hints["lr_scheduler_type"] = Literal[tuple(schedule_names())]
    allowed = {field.name for field in dataclasses.fields(SFTConfig) if field.init} - REFUSED.keys()
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        path = ("trainer", written[name])
        if name not in allowed:
            checker.report(path, f"unknown key.{suggestion(name, allowed | RENAMED.keys())}")
            continue
        checked[name] = checker.value(plain_hint(hints[name]), value, path)
    check_schedule(fields, written, checker, plain_hint)
    if checked.get("lr_scheduler_type") == "constant" and checked.get("warmup_steps"):
        # transformers' constant schedule has no warmup and drops the number in silence
        checked["lr_scheduler_type"] = "constant_with_warmup"
        notes.append("trainer.lr_scheduler_type: constant has no warmup; read as constant_with_warmup.")
    return checked, notes


def plain_hint(hint: Any) -> Any:
    """Return an annotation of SFTConfig in the terms that `Checker.value` knows: enums become their words."""
    if get_origin(hint) is Literal:
        return hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [plain_hint(argument) for argument in arguments]
        if any(get_origin(option) is Literal for option in options):  # "SchedulerType | str": the words are meant
            options = [option for option in options if option is not str]
        return functools.reduce(operator.or_, options)
    if origin is list or hint is list:
        return types.GenericAlias(tuple, (plain_hint(arguments[0]) if arguments else Any, ...))
    if origin is dict or hint is dict:
        return dict[str, Any]
    known = (str, int, float, bool, type(None))
    return hint if hint in known else Any
