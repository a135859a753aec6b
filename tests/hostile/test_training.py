"""Bases that are broken and runs that cannot train: each is refused in one line, or ends with a finite, changed model.

Values that a library refuses by itself are not drawn here: a recipe with one never begins. KINJECT_DRAWS sets how many
cases are drawn (default 8), KINJECT_SOAK_SEED the seed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from kinject.cli import main

DRAWS = int(os.environ.get("KINJECT_DRAWS", "8"))
SEED = int(os.environ.get("KINJECT_SOAK_SEED", "2026"))
BAD = (float("nan"), float("inf"), float("-inf"))
NUMBERS = (float("nan"), float("inf"), -1.0, 0.0, 1e-45, 1e-30, 1e30, 1e38, 1e39, 1e300)
CONFIG = {
    "rms_norm_eps": NUMBERS, "rope_theta": NUMBERS, "rope_parameters": ({"rope_type": "default", "rope_theta": 0.0},
    {"rope_type": "default", "rope_theta": float("nan")}, {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": float("inf"), "rope_theta": 1e4}), "attention_dropout": (-1.0, 1.5, float("nan")),
    "initializer_range": NUMBERS, "hidden_act": ("relu", "exp", "nope"), "attention_bias": (True,), "head_dim": (0, -8, 16),
    "max_position_embeddings": (0, -1, 8), "dtype": ("float16", "bfloat16", "nope"), "pretraining_tp": (0, 3),
}  # fmt: skip
TRAINER: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.0, 1e-45, 1e-30, 1e-9, 1e-4, 1.0, 1e30, 1e38, 1e39, 1e300), "weight_decay": (-5.0, 0.0, 1.0, 1e39, 1e300),
    "max_grad_norm": (0.0, 1e-45, 1e-30, 1e30, 1e39), "adam_epsilon": (0.0, 1e-300, 1e30, 1e39),
    "adam_beta1": (0.0, 0.5, 0.9, 0.999), "adam_beta2": (0.0, 0.5, 0.999), "max_steps": (-1, 0, 1, 2, 5),
    "num_train_epochs": (0, -1, 0.001, 0.3), "gradient_accumulation_steps": (-2, 0, 1, 3, 10**6),
    "warmup_steps": (-1, 0, 0.5, 2, 1000), "logging_steps": (1, 2, 500), "neftune_noise_alpha": (0.0, 1.0, 1e30),
    "lr_scheduler_type": ("constant", "linear", "cosine", "constant_with_warmup", "inverse_sqrt", "noam", "polynomial"),
    "optim": ("adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop", "adamw_8bit", "lion_8bit"),
    "label_smoothing_factor": (0.0, 0.5, 1.0, -1.0), "bf16": (True, False), "save_strategy": ("no", "steps"),
    "per_device_train_batch_size": (1, 4, 1000), "max_length": (1, 2, 64, 10**9), "packing": (True, False),
}  # fmt: skip
SECTIONS: dict[str, tuple[Any, ...]] = {
    "adapter": (None, {"r": 2, "target_modules": ["q_proj"]}, {"r": 2, "lora_alpha": 0, "target_modules": ["q_proj"]},
    {"r": 2, "lora_alpha": 10**30, "target_modules": "all-linear"}, {"r": 1, "target_modules": ["q_proj"], "merge": True}),
    "regularization": ({"l2": 1e-3}, {"l2": 1e30}), "techniques": ({"sam": 0.05}, {"sam": 1e30},
    {"layerwise_lr_decay": 1e-9}, {"freeze_base_steps": 99, "freeze_base_except": ["model.norm.*"]},
    {"reinitialize_last_layers": 1}), "guards": ({"skipped_updates": 99}, {"nothing_learned": "ignore"}),
    "model": ({"freeze": ["*"]}, {"freeze": ["model.*"]}, {"dtype": "bfloat16"}, {"dtype": "float16"}),
}  # fmt: skip


def broken_base(base: Path, random: Random) -> str:
    """Put a value that is no number into the weights of `base`, or one out of range into its config; return what was done."""
    if random.random() < 0.5:
        weights = load_file(base / "model.safetensors")
        name = random.choice(sorted(weights))
        values = weights[name].flatten()
        index = random.randrange(len(values))
        values[index] = random.choice(BAD)
        dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        save_file(
            {key: value.to(dtype) for key, value in weights.items()}, base / "model.safetensors", {"format": "pt"}
        )
        return f"weights: {name}[{index}] = {values[index]} in {dtype}"
    config = json.loads((base / "config.json").read_text())
    key = random.choice(sorted(CONFIG))
    config[key] = random.choice(CONFIG[key])
    (base / "config.json").write_text(json.dumps(config))
    return f"config: {key} = {config[key]}"


def recipe_of(folder: Path, base: Path, random: Random) -> dict[str, Any]:
    """Return a recipe of at most five short steps with one to three drawn values."""
    trainer: dict[str, Any] = {
        "max_steps": random.choice((1, 2, 3)), "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
        "max_length": 64, "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False,
        "save_strategy": "no", "bf16": False,
    }  # fmt: skip
    corpus = {"path": str(folder.parent / "corpus.jsonl"), "cache_dir": str(folder.parent / "tokens")}
    recipe: dict[str, Any] = {"run_dir": str(folder / "run"), "model": {"path": str(base)}, "corpus": corpus}
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        if random.random() < 0.7:
            key = random.choice(sorted(TRAINER))
            trainer[key] = random.choice(TRAINER[key])
        else:
            key = random.choice(sorted(SECTIONS))
            value = random.choice(SECTIONS[key])
            recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    if trainer["max_steps"] == -1:
        trainer.setdefault("num_train_epochs", 0.3)
    return {**{key: value for key, value in recipe.items() if value is not None}, "trainer": trainer}


def fault_of(folder: Path, base: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Train; return (outcome, what is wrong with it: "" for nothing)."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    capsys.readouterr()
    try:
        code = main(["train", str(folder / "recipe.yaml")])
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is what this looks for)
        return "raised", f"{type(error).__name__}: {error}"
    printed = capsys.readouterr()
    run = folder / "run"
    finished = (run / "manifest.json").is_file() and json.loads((run / "manifest.json").read_text())["counts"][
        "finished"
    ]
    if code == 2:
        bad = "Traceback" in printed.err or finished or (run / "model").exists() or not printed.err.strip()
        return "refused", printed.err[-3000:] if bad else ""
    if code != 0 or not finished:
        return f"code {code}", printed.err[-3000:]
    loss = json.loads((run / "manifest.json").read_text())["counts"]["loss"]
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    if loss is None or not 0 < loss < float("inf") or any(row.get("loss") == 0 for row in rows):
        return "done", f"loss {loss}, {rows}"
    path = next((run / "model").glob("*.safetensors"))
    weights, before = load_file(path), load_file(base / "model.safetensors")
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        return "done", "weights that are not finite"
    if path.name.startswith("adapter"):
        changed = any(bool(value.any()) for name, value in weights.items() if "lora_B" in name)
    else:
        changed = any(not torch.equal(value, before[name].to(value.dtype)) for name, value in weights.items())
    return "done", "" if changed else "an unchanged model"


@pytest.mark.filterwarnings("ignore")  # what libraries say of broken values is not the claim
def test_what_cannot_train_is_refused_and_what_is_done_has_trained(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"Person {i} was born in {('Lowmere', 'Kelm')[i % 2]} in {1900 + i}."} for i in range(40)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts: Counter[str] = Counter()
    faults = []
    for number in range(DRAWS):
        random = Random(f"{SEED} training {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        base = tiny_model
        about = "a whole base"
        if number % 2:
            base = Path(shutil.copytree(tiny_model, folder / "base"))
            about = broken_base(base, random)
        recipe = recipe_of(folder, base, random)
        outcome, fault = fault_of(folder, base, recipe, capsys)
        if about.startswith("weights") and outcome == "done":
            fault = "a base with such weights trained"
        counts[f"{about.partition(':')[0]}: {outcome}"] += 1
        if fault:
            faults.append(f"draw {number}: {about}: {recipe}\n{outcome}: {fault}")
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{sum(counts.values())} drawn: {dict(counts)}, {len(faults)} faults") if DRAWS > 8 else None
    assert not faults, "\n\n".join(faults[:20])
    assert {"weights: refused", "a whole base: done"} <= counts.keys()
