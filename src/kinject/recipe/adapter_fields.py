"""The fields of `adapter:`, which are those of peft's config of its type, and those refused."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from kinject.recipe.check import Checker, suggestion
from kinject.recipe.library_fields import INITS_REFUSED, RANGES, field_hint, hint_at_key

ADAPTER_REFUSED = {
    **dict.fromkeys(
        ("eva_config", "corda_config", "lora_ga_config"),
        "needs a pass over data before training. Remove the line.",
    ),
    "loftq_config": "rounds the base to 4 bits again at each load. Remove the line.",
    **dict.fromkeys(
        (
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "auto_mapping",
            "inference_mode",
            "runtime_config",
        ),
        "is peft's own record of a saved adapter. Remove the line.",
    ),
    **dict.fromkeys(
        # By name: a trial on the meta device does not show it, as MonteCLoRA defers its sampler
        # there.
        ("monteclora_config", "kasa_config"),
        "needs terms of its own in the loss, which the trainer does not compute. Remove the line.",
    ),
    **dict.fromkeys(
        ("megatron_config", "megatron_core"), "is for Megatron's layers. Remove the line."
    ),
    "alora_invocation_tokens": "adapts only text after these tokens, which no corpus row holds. "
    "Remove the line.",
    **dict.fromkeys(
        ("use_qalora", "qalora_group_size"),
        "pools the inputs of GPTQ's layers, which kinject does not load. Remove the line.",
    ),
    "save_only_topk_weights": "saves too little of vblora to load it again, or to resume. Remove "
    "the line.",
    "sample_at_inference": "draws another model at each pass: no score would be the trained one's. "
    "Remove the line.",
    "velora_config": "is a Python object. Remove the line.",
    "arrow_config": "routes between adapters that are trained already. Remove the line.",
}
"""Keys of peft's configs that an adapter to train must not set -> the reason."""
ADAPTER_KEYS: Mapping[str, Any] = {"type": "lora", "merge": False}
"""The keys that are not peft's, with their defaults: the type of adapter, and whether it is folded
into the base weights when training ends."""
_VIRTUAL_TOKENS = "adds virtual tokens, which neither packed rows nor the scoring of kinject know"
ADAPTER_TYPES_REFUSED = {
    "adalora": "needs the number of steps and a call after each of them, which Trainer does not "
    "make",
    "adaption_prompt": _VIRTUAL_TOKENS,
    "lily": "weighs its parts by all tokens of a batch, of which a token would read later ones",
    "poly": "is for several tasks, each with its number",
    "shadow": "is a model beside the model, whose output is no row of logits",
    "xlora": "mixes adapters that are trained already",
}
"""Types of peft that adapt weights and are refused -> the reason."""


def adapter_types() -> dict[str, Any]:
    """Return the config class of each type of adapter: cartridges, and those of peft that change
    weights. Imports peft."""
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    names = {kind.value.lower(): made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return {
        name: made
        for name, made in names.items()
        # Prompt learning to peft, too, but rows, scoring and writing know its keys and values.
        if name == "cartridge"
        or (name not in ADAPTER_TYPES_REFUSED and not issubclass(made, PromptLearningConfig))
    }


def with_adapter_type(adapter: Mapping[str, Any], checker: Checker) -> dict[str, Any]:
    """Return the adapter section with its type at `type`, in small letters, as peft's configs name
    it.

    peft's own key for it, `peft_type`, means the same: its config would take it and train a LoRA.
    """
    section = dict(adapter)
    named = section.pop("peft_type", None)
    if isinstance(named, str):
        kind = section.setdefault("type", named)
        if str(kind).lower() != named.lower():
            message = f"found {named}, but adapter.type is {kind}. Give one of the two."
            checker.report(("adapter", "peft_type"), message)
    elif named is not None:
        checker.report(("adapter", "peft_type"), f"found {named!r}, expected a type, as lora.")
    if isinstance(section.get("type"), str):
        section["type"] = section["type"].lower()
    return section


def _check_needed_keys(name: str, adapter: Mapping[str, Any], checker: Checker) -> None:
    """Report what an adapter of that type cannot do without."""
    if name == "trainable_tokens" and "token_indices" not in adapter:
        checker.report(("adapter", "token_indices"), "missing. Name the tokens: [5, 6].")
    if name == "cartridge" and "num_virtual_tokens" not in adapter:
        message = "num_virtual_tokens is missing: how many keys and values are trained, as 1025."
        checker.report(("adapter",), message)


def check_adapter(adapter: Mapping[str, Any], checker: Checker) -> None:
    """Report every key that peft's config of its type does not have, and every value of a wrong
    type or out of bounds.

    Imports peft (some seconds), so only a recipe that trains an adapter calls it.
    """
    types, name = adapter_types(), adapter.get("type", "lora")
    if name not in types:
        from peft import PeftType

        message = f"found {name!r}.{suggestion(str(name), types)}"
        if str(name).upper() in PeftType.__members__:
            message = (
                f"{name} {ADAPTER_TYPES_REFUSED.get(name, _VIRTUAL_TOKENS)}. Take another, as lora."
            )
        checker.report(("adapter", "type"), message)
        return
    _check_needed_keys(str(name), adapter, checker)
    known = {field.name: field for field in dataclasses.fields(types[name]) if field.init}
    hints = typing.get_type_hints(types[name])
    for key, value in adapter.items():
        path = ("adapter", key)
        if key in ADAPTER_REFUSED:
            checker.report(path, ADAPTER_REFUSED[key])
        elif value == [] or (isinstance(value, Mapping) and [] in value.values()):
            checker.report(path, "found an empty list. Name at least one, or remove the line.")
        elif key == "init_lora_weights" and isinstance(value, str) and value in INITS_REFUSED:
            checker.report(path, f"{value} {INITS_REFUSED[value]}.")
        elif (name, key) == ("tinylora", "init_weights") and not value:
            message = "leaves the weights as memory happens to hold them. Set true, or uniform."
            checker.report(path, f"{value} {message}")
        elif key == "merge":
            checker.value(bool, value, path)
        elif key in known:
            checker.is_in_bounds(
                checker.value(field_hint(known[key], hints[key]), value, path),
                RANGES.get(key, {}),
                path,
            )
        elif key != "type":
            kind = types[name].__name__
            hint = hint_at_key(path, {*known, *ADAPTER_KEYS})
            checker.report(path, f"unknown key of peft's {kind}.{hint}")
