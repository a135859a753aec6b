"""The training strategies that `kinject bench` compares: one table, each entry a set of overrides."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinject.errors import Fault, RecipeError
from kinject.process import core_count
from kinject.recipe import Recipe, read_recipe

BATCH = "trainer.per_device_train_batch_size"
ACCUMULATION = "trainer.gradient_accumulation_steps"
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
"""peft's LoraConfig if the recipe has no adapter section."""
_MAX_PARTS = 4

VANILLA: Mapping[str, Any] = {
    "adapter": None, "model.quantization": "none", "trainer.bf16": False, "trainer.fp16": False,
    "trainer.gradient_checkpointing": False, "trainer.optim": "adamw_torch_fused", "trainer.torch_compile": False,
    "trainer.packing": False, "trainer.activation_offloading": False, ACCUMULATION: 1,
}  # fmt: skip
"""The base of every strategy: each technique off, whatever the recipe has."""


@dataclass(frozen=True)
class Setting:
    """The inputs of strategies: the recipe and this machine.

    `batch` is the recipe's rows per device and step, `block` its max_length (0 for none), `row_tokens` the mean tokens of a
    document (0 until the first vanilla run has counted them), `adapter` the recipe's own, `n_devices` the GPUs or cores.
    """

    device: str
    batch: int
    block: int
    packing_strategy: str
    adapter: Mapping[str, Any] | None
    bf16: bool
    compiler: bool
    bitsandbytes: bool
    row_tokens: float = 0.0
    n_devices: int = 1


OverridesFunction = Callable[[Mapping[str, Any], Setting], dict[str, Any]]


@dataclass(frozen=True)
class Strategy:
    """One technique.

    `overrides` returns its overrides (dotted key -> value) given those so far, `unavailable` the reason why it cannot run
    ("" if it can), `processes` the number of processes that train it.
    """

    name: str
    label: str
    description: str
    overrides: OverridesFunction
    unavailable: Callable[[Setting], str] = lambda setting: ""
    processes: int = 1


def _sets(**trainer: Any) -> OverridesFunction:
    return lambda _so_far, _setting: {f"trainer.{key}": value for key, value in trainer.items()}


def _accumulate(so_far: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    batch = int(so_far.get(BATCH, setting.batch))
    parts = next(n for n in range(min(_MAX_PARTS, batch), 0, -1) if batch % n == 0)
    return {BATCH: batch // parts, ACCUMULATION: parts}


def _pack(so_far: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    rows = max(1, round(setting.batch * setting.row_tokens / setting.block))
    return {"trainer.packing": True, "trainer.packing_strategy": setting.packing_strategy, BATCH: rows}


def _needs_compiler(setting: Setting) -> str:
    if setting.compiler:
        return ""
    missing = "triton (pip install triton)" if setting.device == "cuda" else "a C++ compiler (g++ or clang++)"
    return f"torch.compile needs {missing}, which is not installed"


def _needs_gpu(need: str) -> Callable[[Setting], str]:
    return lambda setting: "" if setting.device == "cuda" else f"{need}; the model is on {setting.device}"


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("vanilla", "vanilla", "float32, the batch as given, one document a row", lambda _so_far, _setting: {}),
    Strategy(
        "fp16", "fp16", "autocast to float16 with a gradient scaler", _sets(fp16=True, bf16=False),
        _needs_gpu("float16 training needs an NVIDIA GPU (on a CPU accelerate would train in float32 without a warning)"),
    ),
    Strategy(
        "bf16", "bf16", "autocast to bfloat16", _sets(bf16=True, fp16=False),
        lambda setting: "" if setting.bf16 else f"torch has no bfloat16 autocast on this {setting.device}",
    ),
    Strategy(
        "packing", "packing", "the same number of tokens a step in full rows instead of padded ones", _pack,
        lambda setting: "" if setting.block else "needs a block length: trainer.max_length",
    ),
    Strategy(
        "accumulation", "gradient accumulation", "the same batch in several smaller ones", _accumulate,
        lambda setting: "" if setting.batch > 1 else f"{BATCH} is 1: nothing to split",
    ),
    Strategy(
        "checkpointing", "gradient checkpointing", "activations computed again instead of kept",
        _sets(gradient_checkpointing=True),
    ),
    Strategy(
        "offloading", "activation offloading", "activations moved to the machine's memory until they are needed",
        _sets(activation_offloading=True),
        _needs_gpu("activations lie in the machine's memory already: offloading moves them there from a GPU"),
    ),
    Strategy("adafactor", "Adafactor", "second moments kept by row and column", _sets(optim="adafactor")),
    Strategy(
        "adamw-8bit", "8-bit AdamW", "moments kept in 8 bits (bitsandbytes)", _sets(optim="adamw_8bit"),
        lambda setting: "" if setting.bitsandbytes else "bitsandbytes is not installed (pip install bitsandbytes)",
    ),
    Strategy("compile", "torch.compile", "the model compiled by torch", _sets(torch_compile=True), _needs_compiler),
    Strategy(
        "lora", "LoRA", "low-rank adapters on every linear layer, or the recipe's own adapter",
        lambda _so_far, setting: {"adapter": dict(setting.adapter or LORA)},
    ),
)  # fmt: skip
"""In the order in which the combination applies them. Of two that exclude each other the later one wins."""

_FORBIDDEN = ("run_dir", "seed", "eval", "study", "augment", "questions", "bench")
"""Sections that a strategy must not change."""


def custom_strategies(recipe: Recipe) -> list[Strategy]:
    """Return the strategies of the recipe's bench section. Raises `RecipeError` with every fault and its line."""
    taken = {item.name for item in (*STRATEGIES, COMBINED, *device_strategies(recipe))}
    faults: list[Fault] = []
    for name, changes in recipe.bench.strategies.items():
        key_path = ("bench", "strategies", name)
        if name in taken:
            faults.append(recipe.fault(key_path, "bench already has a strategy of this name. Rename it."))
        refused = "a strategy cannot change this section. It changes how a model is trained."
        faults += [recipe.fault((*key_path, key), refused) for key in changes if key.split(".")[0] in _FORBIDDEN]
        words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        try:
            read_recipe(recipe.path, (*recipe.overrides, *words))
        except RecipeError as error:
            faults += [
                replace(fault, location=recipe.location(key_path), key=f"{name}: {fault.key}") for fault in error.faults
            ]
    if faults:
        raise RecipeError(faults)
    return [
        Strategy(
            name, name, ", ".join(f"{key}: {json.dumps(value)}" for key, value in changes.items()), _constant(changes)
        )
        for name, changes in recipe.bench.strategies.items()
    ]


def device_strategies(recipe: Recipe) -> list[Strategy]:
    """Return a strategy for each number of devices in the recipe's bench section: the batch of one, divided (DDP)."""
    return [
        Strategy(
            f"devices-{n}", f"{n} devices", f"the same rows in a step, divided between {n} processes (DDP)",
            _divide_batch(n), _needs_devices(n), n,
        )
        for n in sorted(set(recipe.bench.devices))
    ]  # fmt: skip


def _divide_batch(n: int) -> OverridesFunction:
    return lambda _so_far, setting: {BATCH: setting.batch // n}


def _needs_devices(n: int) -> Callable[[Setting], str]:
    def reason(setting: Setting) -> str:
        if setting.n_devices < n:
            unit = "GPU" if setting.device == "cuda" else "core"
            return f"this machine has {setting.n_devices} {unit}{'s' if setting.n_devices != 1 else ''}"
        return f"{BATCH} is {setting.batch}: no whole rows for each of {n}" if setting.batch % n else ""

    return reason


def _constant(changes: Mapping[str, Any]) -> OverridesFunction:
    return lambda _so_far, _setting: dict(changes)


COMBINED = Strategy(
    "combined", "all combined", "all of these that run here", lambda _so_far, setting: _combine(setting)
)


def _combine(setting: Setting) -> dict[str, Any]:
    """Return the overrides of every strategy that runs here, applied in order."""
    so_far: dict[str, Any] = {}
    for strategy in STRATEGIES:
        if not strategy.unavailable(setting):
            so_far |= strategy.overrides(so_far, setting)
    return so_far


def combined_labels(setting: Setting) -> list[str]:
    """Return the labels of the strategies in the combination, without those that a later one replaces."""
    running = [item for item in STRATEGIES[1:] if not item.unavailable(setting)]
    names = {item.name for item in running}
    replaced = {"fp16": "bf16", "adafactor": "adamw-8bit"}
    return [item.label for item in running if replaced.get(item.name) not in names]


def count_devices(device: str) -> int:
    """Return how many processes can have a GPU, or a core, of their own."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else core_count() if device == "cpu" else 1


def has_bf16_autocast(device: str) -> bool:
    """Return whether torch computes in bfloat16 under autocast on `device`, fast or not."""
    import torch

    return device == "cpu" or (device == "cuda" and torch.cuda.is_bf16_supported())


def has_compiler(device: str) -> bool:
    """Return whether torch.compile finds a compiler."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    compilers = (shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device == "cpu" and any(compilers)
