"""The recipe of each run of a bench: the user's own, every technique off, one strategy on top."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from kinject.bench.results import LEAST_STEPS
from kinject.bench.strategies import BATCH, VANILLA, Setting, Strategy, has_bf16, has_compiler
from kinject.recipe import TrainRecipe
from kinject.study.arms import nest_overrides

_STEPS = 12
"""Optimizer steps where neither the command line nor the recipe says how many."""
_UNWANTED = ("eval", "study", "augment", "questions", "bench")


def look_around(recipe: TrainRecipe) -> Setting:
    """Return what the strategies need to know of the recipe and of this machine."""
    from kinject.models import choose_device

    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    strategy = recipe.trainer.get("packing_strategy", "bfd_split")
    return Setting(
        device=device, batch=int(recipe.trainer.get(BATCH.split(".")[1], 8)),
        block=recipe.trainer.get("max_length", 1024), strategy=strategy, adapter=recipe.adapter, bf16=has_bf16(device),
        compiler=has_compiler(device), bitsandbytes=importlib.util.find_spec("bitsandbytes") is not None,
    )  # fmt: skip


def recipe_of(recipe: TrainRecipe, strategy: Strategy, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
    """Return the values of the train recipe of one run, less its run_dir: the recipe, vanilla, the strategy on top.

    Questions are asked once, after the last step: the recipe's probes, or those of its eval section.
    """
    values = {key: value for key, value in recipe.raw.items() if key not in (*_UNWANTED, "run_dir")}
    values["trainer"] = {key: _plain(value) for key, value in recipe.trainer.items()}
    values["seed"] = seed
    overrides: dict[str, Any] = {
        **VANILLA, "trainer.max_steps": steps, "trainer.logging_steps": 1, "trainer.save_strategy": "no",
        "trainer.eval_strategy": "no", "trainer.load_best_model_at_end": False, "trainer.metric_for_best_model": None,
        "trainer.report_to": "none",
    }  # fmt: skip
    probes = _probes(recipe)
    if probes is not None:
        values["probes"] = probes
        overrides |= {
            "trainer.eval_strategy": "steps", "trainer.eval_steps": steps, "trainer.eval_on_start": False,
        }  # fmt: skip
    overrides |= strategy.change({}, setting)
    return _laid_over(values, nest_overrides(overrides))


def _probes(recipe: TrainRecipe) -> dict[str, Any] | None:
    if recipe.probes is not None:
        return {key: value for key, value in recipe.raw["probes"].items() if key not in ("patience", "max_forgetting")}
    if recipe.eval is None:
        return None
    sets: dict[str, Any] = {}
    for name, item in recipe.eval.questions.items():
        own = {"path": item} if isinstance(item, str) else {"path": item.path, "role": item.role, "layout": item.layout}
        if not own["path"].endswith((".yaml", ".yml")):  # a task of the harness is kinject eval's alone
            sets[name] = own
    return {"questions": sets} if sets else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _laid_over(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `more` laid over, section by section; an adapter replaces the whole section."""
    found = dict(values)
    for key, value in more.items():
        below = found.get(key)
        deeper = isinstance(value, Mapping) and isinstance(below, Mapping) and key != "adapter"
        found[key] = _laid_over(below, value) if deeper else value  # type: ignore[arg-type]
    return found


def steps_of(recipe: TrainRecipe, asked: int | None) -> int:
    """Return the steps of every run: as asked, else the recipe's, else a dozen."""
    own = int(recipe.trainer.get("max_steps", -1))
    return asked or max(own if own > 0 else _STEPS, LEAST_STEPS)


def machine() -> str:
    """Return what a measurement holds for: another machine, library or number of cores is measured anew."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "kinject"))
    return f"{platform.node()}, {platform.machine()}, {cores} cores, {device}, {libraries}"
